//! From a path to everything a served model is made of: checkpoint, tokenizer, chat template.
//!
//! The one place that knows where GGUF metadata and checkpoint directories keep what the text side needs.

pub(crate) mod error;
pub(crate) mod generation;
pub mod sentence;

use std::path::Path;
use std::sync::Arc;

use plimsoll_formats::{Checkpoint, GgufMeta, GgufValue, Mmproj};
use plimsoll_memory::heap;
use plimsoll_text::{ChatTemplate, FimIds, GgufVocab, TemplateSources, TextError, Tokenizer};

use crate::loading::sentence::Sentence;
use crate::sampling::SamplingParams;
pub use error::LoadingError;

/// Opens a checkpoint that can be served: one with weights, not a configuration alone.
///
/// # Errors
/// [`LoadingError::NoWeights`], or what is wrong with it.
pub fn with_weights(path: &Path, mmproj: &Mmproj) -> Result<Checkpoint, LoadingError> {
    let checkpoint = Checkpoint::open_with(path, mmproj)?;
    match checkpoint.has_data() {
        true => Ok(checkpoint),
        false => Err(LoadingError::NoWeights(path.display().to_string())),
    }
}

/// Defaults from the checkpoint's own files, for settings that have no other source.
pub struct CheckpointDefaults {
    /// How embeddings are made.
    pub sentence: Option<Sentence>,
    /// The sampling that is recommended; none if the checkpoint recommends none.
    pub sampling: Result<Option<SamplingParams>, LoadingError>,
}

impl CheckpointDefaults {
    /// Reads the files; a `.gguf` file has the pooling alone.
    ///
    /// # Errors
    /// [`LoadingError::Sentence`]. A broken sampling recommendation is no error here: `sampling` keeps it,
    /// since the operator can serve without the recommendation.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, LoadingError> {
        let (sentence, sampling) = match checkpoint.gguf() {
            Some(meta) => (Sentence::of_gguf(meta, checkpoint.config.encoder)?, Ok(None)),
            None => {
                let dense = checkpoint.config.encoder.and_then(|encoder| encoder.dense);
                (Sentence::read(checkpoint.dir(), dense)?, generation::sampling(checkpoint.dir()))
            }
        };
        Ok(Self { sentence, sampling })
    }
}

/// An opened model; nothing is packed yet.
pub struct LoadedModel {
    /// Configuration and tensors.
    pub checkpoint: Checkpoint,
    /// Characters to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to prompt; none when the model has no template.
    pub template: Option<Arc<ChatTemplate>>,
    /// Defaults from the checkpoint's own files.
    pub defaults: CheckpointDefaults,
    /// Heap bytes that tokenizer and template take, measured while they were made; none where the heap is not counted.
    pub text_bytes: Option<u64>,
}

impl LoadedModel {
    /// Opens a `.gguf` file, with the vision encoder of an `mmproj` file beside it, or a checkpoint directory.
    pub fn open(path: &Path) -> Result<Self, LoadingError> {
        Self::open_with(path, &Mmproj::Beside)
    }

    /// The same with a choice of the `mmproj` file.
    pub fn open_with(path: &Path, mmproj: &Mmproj) -> Result<Self, LoadingError> {
        let checkpoint = with_weights(path, mmproj)?;
        let before = heap::in_use();
        let (tokenizer, template) = match checkpoint.gguf() {
            Some(meta) => from_gguf(meta)?,
            None => from_directory(checkpoint.dir())?,
        };
        let template = template.map(|sources| template_of(&sources, &tokenizer)).transpose()?;
        let text_bytes = heap::in_use().checked_sub(before).filter(|bytes| *bytes > 0);
        Ok(Self {
            defaults: CheckpointDefaults::read(&checkpoint)?,
            tokenizer: Arc::new(tokenizer),
            template: template.map(Arc::new),
            checkpoint,
            text_bytes,
        })
    }

    /// The model with a draft model: a smaller one whose tokens are the same.
    ///
    /// # Errors
    /// [`LoadingError::DraftTokens`], what is wrong with the files, or [`plimsoll_formats::FormatError::Draft`].
    pub fn with_draft(self, draft: &Path) -> Result<Self, LoadingError> {
        let draft = Self::open_with(draft, &Mmproj::Off)?;
        same_tokens(&self.tokenizer, &draft.tokenizer)?;
        Ok(Self { checkpoint: self.checkpoint.with_draft(draft.checkpoint)?, ..self })
    }
}

/// That two tokenizers spell every token alike. Ids that one of them has no token for are padding.
fn same_tokens(own: &Tokenizer, draft: &Tokenizer) -> Result<(), LoadingError> {
    for id in 0..own.vocab_size().min(draft.vocab_size()) as u32 {
        let (own, draft) = (own.token_name(id), draft.token_name(id));
        if own != draft && !own.is_empty() && !draft.is_empty() {
            return Err(LoadingError::DraftTokens { id, draft: draft.into(), own: own.into() });
        }
    }
    Ok(())
}

fn template_of(sources: &TemplateSources, tokenizer: &Tokenizer) -> Result<ChatTemplate, TextError> {
    let name = |id: Option<u32>| id.map_or("", |id| tokenizer.token_name(id));
    let compile =
        |source: &str| ChatTemplate::new(source, name(tokenizer.bos()), name(tokenizer.eos().first().copied()));
    let template = compile(&sources.default)?;
    Ok(match &sources.tool_use {
        Some(source) => template.with_tool_use(compile(source)?),
        None => template,
    })
}

fn from_gguf(meta: &GgufMeta) -> Result<(Tokenizer, Option<TemplateSources>), LoadingError> {
    let missing = |key: &str| LoadingError::NoTokenizer(format!("the GGUF file has no '{key}'"));
    let strings = |key: &str| meta.strings(key).map(|strings| strings.iter().map(str::to_owned).collect::<Vec<_>>());
    let id = |key: &str| meta.u64(&format!("tokenizer.ggml.{key}_token_id")).and_then(|id| u32::try_from(id).ok());
    let vocab = GgufVocab {
        model: meta.str("tokenizer.ggml.model").ok_or_else(|| missing("tokenizer.ggml.model"))?.to_owned(),
        pre: meta.str("tokenizer.ggml.pre").unwrap_or_default().to_owned(),
        tokens: strings("tokenizer.ggml.tokens").ok_or_else(|| missing("tokenizer.ggml.tokens"))?,
        scores: meta.f32s("tokenizer.ggml.scores").unwrap_or_default().to_vec(),
        token_types: meta.i32s("tokenizer.ggml.token_type").unwrap_or_default().to_vec(),
        merges: strings("tokenizer.ggml.merges").unwrap_or_default(),
        bos: id("bos"),
        eos: id("eos"),
        extra_eos: ["eot", "eom"].iter().filter_map(|key| id(key)).collect(),
        cls: id("cls"),
        // Spelled so.
        sep: id("seperator"),
        unknown: id("unknown"),
        add_bos: meta.bool("tokenizer.ggml.add_bos_token"),
        add_eos: meta.bool("tokenizer.ggml.add_eos_token"),
        add_sep: meta.bool("tokenizer.ggml.add_sep_token"),
        remove_extra_whitespaces: meta.bool("tokenizer.ggml.remove_extra_whitespaces"),
        charsmap: charsmap(meta)?,
        add_space_prefix: meta.bool("tokenizer.ggml.add_space_prefix"),
        // Older files have the names without `fim`.
        fim: FimIds {
            prefix: id("fim_pre").or(id("prefix")),
            suffix: id("fim_suf").or(id("suffix")),
            middle: id("fim_mid").or(id("middle")),
            pad: id("fim_pad"),
            repository: id("fim_rep"),
            separator: id("fim_sep"),
        },
    };
    let template = |name: &str| meta.str(name).map(str::to_owned);
    let tool_use = template("tokenizer.chat_template.tool_use");
    let sources = template("tokenizer.chat_template").map(|default| TemplateSources { default, tool_use });
    Ok((Tokenizer::from_gguf(&vocab)?, sources))
}

/// The table of characters that SentencePiece replaces; empty without one.
fn charsmap(meta: &GgufMeta) -> Result<Vec<u8>, LoadingError> {
    let key = "tokenizer.ggml.precompiled_charsmap";
    match meta.get(key) {
        None => Ok(Vec::new()),
        Some(GgufValue::Bytes(bytes)) => Ok(bytes.to_vec()),
        Some(_) => Err(LoadingError::NoTokenizer(format!("the GGUF file's '{key}' is no array of bytes"))),
    }
}

fn from_directory(dir: &Path) -> Result<(Tokenizer, Option<TemplateSources>), LoadingError> {
    let file = dir.join("tokenizer.json");
    if !file.is_file() {
        return Err(LoadingError::NoTokenizer(format!("there is no '{}'", file.display())));
    }
    let tokenizer = Tokenizer::from_file(&file)?;
    Ok((tokenizer, plimsoll_text::chat_template_sources(dir)?))
}
