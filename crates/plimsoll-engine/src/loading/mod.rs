//! Opens a served model from a path: checkpoint, tokenizer, chat template.
//!
//! Only this module depends on the places of tokenizer and template in GGUF metadata and checkpoint directories.

pub(crate) mod error;
pub(crate) mod generation;
pub(crate) mod rank;
pub mod sentence;
mod transcription;

use std::path::Path;
use std::sync::Arc;

use plimsoll_formats::{Checkpoint, GgufMeta, GgufValue, Mmproj};
use plimsoll_memory::heap;
use plimsoll_text::{ChatTemplate, FimIds, GgufVocab, TemplateSources, TextError, Tokenizer};

use crate::loading::rank::Rank;
use crate::loading::sentence::Sentence;
use crate::sampling::SamplingParams;
pub use error::LoadingError;

/// The key of SentencePiece's table of characters.
const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";

/// Opens a checkpoint that can be served: it has weights, not a configuration alone.
///
/// # Errors
/// [`LoadingError::NoWeights`], or the error of a broken checkpoint.
pub fn with_weights(path: &Path, mmproj: &Mmproj) -> Result<Checkpoint, LoadingError> {
    let checkpoint = Checkpoint::open_with(path, mmproj)?;
    match checkpoint.has_data() {
        true => Ok(checkpoint),
        false => Err(LoadingError::NoWeights(path.display().to_string())),
    }
}

/// Defaults from the checkpoint's own files, for settings that have no other source.
pub struct CheckpointDefaults {
    /// The way embeddings are made; `None` if the files do not say.
    pub sentence: Result<Option<Sentence>, LoadingError>,
    /// The recommended sampling; `None` if the checkpoint recommends none.
    pub sampling: Result<Option<SamplingParams>, LoadingError>,
}

impl CheckpointDefaults {
    /// Reads the files; a `.gguf` file has the pooling alone.
    ///
    /// # Errors
    /// [`LoadingError::Sentence`]. A broken sampling recommendation and an unknown pooling of a GGUF file are no errors here:
    /// `sampling` and `sentence` keep them, since the operator can serve without them.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, LoadingError> {
        let (sentence, sampling) = match checkpoint.gguf() {
            Some(meta) => (Sentence::of_gguf(meta, checkpoint.config.encoder), Ok(None)),
            None => {
                let dense = checkpoint.config.encoder.and_then(|encoder| encoder.dense);
                (Ok(Sentence::read(checkpoint.dir(), dense)?), generation::sampling(checkpoint.dir()))
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
    /// Messages to prompt; `None` when the model has no template.
    pub template: Option<Arc<ChatTemplate>>,
    /// Defaults from the checkpoint's own files.
    pub defaults: CheckpointDefaults,
    /// The way it scores a document for a query, or the reason why it cannot.
    pub rank: Result<Rank, String>,
    /// Heap bytes of tokenizer, template and scoring, measured while they were made; `None` where the heap is not counted.
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
            Some(meta) => {
                let (tokenizer, own) = from_gguf(meta)?;
                (tokenizer, transcription::template(checkpoint.config.audio.as_ref(), own))
            }
            None => from_directory(checkpoint.dir())?,
        };
        let template = template.map(|sources| template_of(&sources, &tokenizer)).transpose()?;
        let rank = Rank::read(&checkpoint, &tokenizer);
        let text_bytes = heap::in_use().checked_sub(before).filter(|bytes| *bytes > 0);
        Ok(Self {
            defaults: CheckpointDefaults::read(&checkpoint)?,
            tokenizer: Arc::new(tokenizer),
            template: template.map(Arc::new),
            rank,
            checkpoint,
            text_bytes,
        })
    }

    /// The model with a draft model: a smaller one whose tokens are the same.
    ///
    /// # Errors
    /// [`LoadingError::DraftTokens`], an error of the files, or [`plimsoll_formats::FormatError::Draft`].
    pub fn with_draft(self, draft: &Path) -> Result<Self, LoadingError> {
        let draft = Self::open_with(draft, &Mmproj::Off)?;
        same_tokens(&self.tokenizer, &draft.tokenizer)?;
        Ok(Self { checkpoint: self.checkpoint.with_draft(draft.checkpoint)?, ..self })
    }
}

/// Checks that two tokenizers spell every token alike. Ids without a token in one of them are padding.
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
    let model = meta.str("tokenizer.ggml.model").ok_or_else(|| missing("tokenizer.ggml.model"))?.to_owned();
    // Other families have no use for the table, whatever it is.
    let charsmap = match model.as_str() {
        "t5" => charsmap(meta.get(CHARSMAP))?,
        _ => Vec::new(),
    };
    let vocab = GgufVocab {
        model,
        pre: meta.str("tokenizer.ggml.pre").unwrap_or_default().to_owned(),
        tokens: strings("tokenizer.ggml.tokens").ok_or_else(|| missing("tokenizer.ggml.tokens"))?,
        scores: meta.f32s("tokenizer.ggml.scores").unwrap_or_default().to_vec(),
        token_types: meta.i32s("tokenizer.ggml.token_type").unwrap_or_default().to_vec(),
        merges: strings("tokenizer.ggml.merges").unwrap_or_default(),
        bos: id("bos"),
        eos: id("eos"),
        extra_eos: ["eot", "eom"].iter().filter_map(|key| id(key)).collect(),
        cls: id("cls"),
        // The GGUF key has this spelling.
        sep: id("seperator"),
        unknown: id("unknown"),
        add_bos: meta.bool("tokenizer.ggml.add_bos_token"),
        add_eos: meta.bool("tokenizer.ggml.add_eos_token"),
        add_sep: meta.bool("tokenizer.ggml.add_sep_token"),
        remove_extra_whitespaces: meta.bool("tokenizer.ggml.remove_extra_whitespaces"),
        charsmap,
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

/// The table of characters that SentencePiece replaces; empty without one. Files have unsigned bytes, or signed ones.
fn charsmap(value: Option<&GgufValue>) -> Result<Vec<u8>, LoadingError> {
    let bytes = match value {
        None => Some(Vec::new()),
        Some(GgufValue::Bytes(bytes)) => Some(bytes.to_vec()),
        Some(GgufValue::I32s(numbers)) => {
            numbers.iter().map(|number| i8::try_from(*number).ok().map(i8::cast_unsigned)).collect()
        }
        Some(_) => None,
    };
    bytes.ok_or_else(|| LoadingError::NoTokenizer(format!("the GGUF file's '{CHARSMAP}' is not an array of bytes")))
}

fn from_directory(dir: &Path) -> Result<(Tokenizer, Option<TemplateSources>), LoadingError> {
    let file = dir.join("tokenizer.json");
    let tokenizer = match file.is_file() {
        true => Tokenizer::from_file(&file)?,
        false if Tokenizer::is_in_parts(dir) => Tokenizer::from_parts(dir)?,
        false => return Err(LoadingError::NoTokenizer(format!("there is no '{}'", file.display()))),
    };
    Ok((tokenizer, plimsoll_text::chat_template_sources(dir)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A string as GGUF files have it.
    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    /// A fixture with more keys: name, number of the type, value. Before the tensors is as much room as their alignment asks for.
    fn opened_with(model: &str, keys: &[(&str, u32, &[u8])]) -> Result<LoadedModel, LoadingError> {
        const COUNT: std::ops::Range<usize> = 16..24;
        let file = format!("{}/../../tests/fixtures/models/{model}/model.gguf", env!("CARGO_MANIFEST_DIR"));
        let mut bytes = std::fs::read(file).unwrap();
        let entry = |(name, kind, value): &(&str, u32, &[u8])| [&string(name), &kind.to_le_bytes()[..], value].concat();
        let mut more: Vec<u8> = keys.iter().flat_map(entry).collect();
        let padding = string(&"x".repeat(31 - (more.len() + entry(&("padding", 8, &string(""))).len() + 31) % 32));
        more.extend(entry(&("padding", 8, &padding)));
        let count = u64::from_le_bytes(bytes[COUNT].try_into().unwrap()) + keys.len() as u64 + 1;
        bytes[COUNT].copy_from_slice(&count.to_le_bytes());
        bytes.splice(COUNT.end..COUNT.end, more);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.gguf");
        std::fs::write(&file, bytes).unwrap();
        LoadedModel::open(&file)
    }

    #[test]
    fn keys_of_encoders_do_not_refuse_a_chat_model() {
        let (number, floats) = (1_000_000_u32.to_le_bytes(), [6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let model = opened_with(
            "gguf-qwen2-f16",
            &[
                ("tokenizer.ggml.cls_token_id", 4, &number),
                ("tokenizer.ggml.seperator_token_id", 4, &number),
                (CHARSMAP, 9, &floats),
                ("qwen2.pooling_type", 4, &number),
            ],
        );
        let error = model.unwrap().defaults.sentence.unwrap_err().to_string();
        assert!(error.contains("'qwen2.pooling_type' is 1000000; supported are 0 to 4"), "{error}");
    }

    #[test]
    fn keys_of_encoders_are_checked_for_an_encoder() {
        let number = 1_000_000_u32.to_le_bytes();
        let error = opened_with("bert-gguf", &[("tokenizer.ggml.cls_token_id", 4, &number)]).err().unwrap().to_string();
        assert!(error.contains("special token 1000000"), "{error}");
    }

    #[test]
    fn the_table_of_characters_has_bytes_of_either_sign() {
        let signed = GgufValue::I32s([-128, -1, 0, 127].into());
        assert_eq!(charsmap(Some(&signed)).unwrap(), [128, 255, 0, 127]);
        assert_eq!(charsmap(Some(&GgufValue::Bytes([128, 255].into()))).unwrap(), [128, 255]);
        assert_eq!(charsmap(None).unwrap(), [0; 0]);
        for other in [GgufValue::I32s([128].into()), GgufValue::U32s([1].into()), GgufValue::U64(1)] {
            let error = charsmap(Some(&other)).unwrap_err().to_string();
            assert!(error.contains("'tokenizer.ggml.precompiled_charsmap' is not an array of bytes"), "{error}");
        }
    }
}
