//! The small files beside a `tokenizer.json`: the tokens that begin and end a text. `template_files` reads the chat templates.
//!
//! Checkpoints repeat values in `tokenizer_config.json`, `special_tokens_map.json`, `config.json` and `generation_config.json`, and the
//! values sometimes contradict each other. This module defines the order of precedence.

use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::TextError;
use crate::table::TokenTable;

/// The largest of the small files, in bytes. Lists of added tokens can be long.
pub(crate) const FILE_BYTES_MAX: u64 = 16 << 20;

/// Reads a file that may be at most `limit` bytes long.
pub(crate) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, TextError> {
    let failed = |source| TextError::Io { path: path.display().to_string(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > limit {
        return Err(TextError::FileTooLarge { path: path.display().to_string(), bytes, limit });
    }
    let mut content = Vec::with_capacity(bytes as usize);
    // The file may grow while it is read, but the limit still holds.
    file.take(limit).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}

/// Reads a JSON file of the folder. Null if there is none.
pub(crate) fn read_json(folder: &Path, name: &str) -> Result<Value, TextError> {
    match read(&folder.join(name), FILE_BYTES_MAX) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|error| TextError::BadTokenizer(format!("{name}: {error}")))
        }
        Err(TextError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(error),
    }
}

/// The contents of the small files; null for a file that does not exist.
#[derive(Default)]
pub(crate) struct Neighbours {
    tokenizer_config: Value,
    special_tokens_map: Value,
    config: Value,
    generation_config: Value,
}

impl Neighbours {
    /// Reads the files that exist in `folder`.
    pub(crate) fn read(folder: &Path) -> Result<Self, TextError> {
        Ok(Self {
            tokenizer_config: read_json(folder, "tokenizer_config.json")?,
            special_tokens_map: read_json(folder, "special_tokens_map.json")?,
            config: read_json(folder, "config.json")?,
            generation_config: read_json(folder, "generation_config.json")?,
        })
    }

    /// The id of a token that a file names under `key` (such as `bos_token`), as a string or as an object with its content.
    fn named(&self, key: &str, table: &TokenTable) -> Option<u32> {
        [&self.tokenizer_config, &self.special_tokens_map]
            .into_iter()
            .find_map(|file| {
                let token = &file[key];
                token.as_str().or_else(|| token["content"].as_str())
            })
            .and_then(|name| table.id_of(name))
    }

    /// The ids under `key` in the model's configuration files, from a number or a list.
    fn numbered(&self, key: &str, table: &TokenTable) -> Vec<u32> {
        let mut out = Vec::new();
        // `llm_config` is the original InternVL's word for `text_config`.
        let [text, llm] = ["text_config", "llm_config"].map(|part| &self.config[part]);
        let files = [&self.generation_config, &self.config, text, llm];
        for value in files.map(|file| &file[key]) {
            let one = std::slice::from_ref(value);
            let ids = value.as_array().map_or(one, Vec::as_slice);
            let ids = ids.iter().filter_map(Value::as_u64);
            out.extend(ids.filter_map(|id| u32::try_from(id).ok()).filter(|&id| (id as usize) < table.len()));
        }
        out
    }

    /// The beginning-of-sequence token.
    pub(crate) fn bos(&self, table: &TokenTable) -> Option<u32> {
        let numbered = || self.numbered("bos_token_id", table).first().copied();
        self.named("bos_token", table).or_else(numbered)
    }

    /// The end token of the tokenizer's files.
    pub(crate) fn main_eos(&self, table: &TokenTable) -> Option<u32> {
        self.named("eos_token", table)
    }

    /// Every token that ends a generation: the tokenizer's first, then the model configuration's.
    pub(crate) fn eos(&self, table: &TokenTable) -> Vec<u32> {
        let mut out: Vec<u32> = Vec::new();
        let all = self.main_eos(table).into_iter();
        for id in all.chain(self.numbered("eos_token_id", table)) {
            if !out.contains(&id) {
                out.push(id);
            }
        }
        out
    }

    /// The configuration's override of the post-processor's tokens; none if there is none. Tokenizer classes that come from SentencePiece
    /// rebuild their post-processor from these two flags; all other classes ignore the flags.
    fn flag(&self, key: &str) -> Option<bool> {
        let class = self.tokenizer_config["tokenizer_class"].as_str()?;
        let rebuilds = ["Llama", "CodeLlama", "Gemma", "Cohere"]
            .iter()
            .any(|family| class.strip_prefix(family).is_some_and(|rest| rest.starts_with("Tokenizer")));
        self.tokenizer_config[key].as_bool().filter(|_| rebuilds)
    }

    /// The tokens before a text: the post-processor's, unless the configuration overrides them.
    pub(crate) fn override_bos(&self, prefix: Vec<u32>, bos: Option<u32>) -> Vec<u32> {
        match (self.flag("add_bos_token"), bos) {
            (Some(true), Some(bos)) => vec![bos],
            (Some(false), _) => Vec::new(),
            _ => prefix,
        }
    }

    /// The tokens after a text: the post-processor's, unless the configuration overrides them.
    pub(crate) fn override_eos(&self, suffix: Vec<u32>, eos: Option<u32>) -> Vec<u32> {
        match (self.flag("add_eos_token"), eos) {
            (Some(true), Some(eos)) => vec![eos],
            (Some(false), _) => Vec::new(),
            _ => suffix,
        }
    }
}
