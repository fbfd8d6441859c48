//! The small files beside a `tokenizer.json`: which tokens begin and end a text. `template_files` reads the chat templates.
//!
//! Checkpoints repeat themselves across `tokenizer_config.json`, `special_tokens_map.json`, `config.json` and
//! `generation_config.json`, and contradict themselves now and then. The order of trust is written here, once.

use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::TextError;
use crate::table::TokenTable;

/// The largest of the small files that is read, in bytes. Lists of added tokens can be long.
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
    // The file may grow while it is read; the limit holds all the same.
    file.take(limit).read_to_end(&mut content).map_err(failed)?;
    Ok(content)
}

/// A JSON file of the folder, or null if there is none.
pub(crate) fn read_json(folder: &Path, name: &str) -> Result<Value, TextError> {
    match read(&folder.join(name), FILE_BYTES_MAX) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|error| TextError::BadTokenizer(format!("{name}: {error}")))
        }
        Err(TextError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(error) => Err(error),
    }
}

/// The content of the small files; null where a file does not exist.
#[derive(Default)]
pub(crate) struct Neighbours {
    tokenizer_config: Value,
    special_tokens_map: Value,
    config: Value,
    generation_config: Value,
}

impl Neighbours {
    /// Reads what exists in `folder`.
    pub(crate) fn read(folder: &Path) -> Result<Self, TextError> {
        Ok(Self {
            tokenizer_config: read_json(folder, "tokenizer_config.json")?,
            special_tokens_map: read_json(folder, "special_tokens_map.json")?,
            config: read_json(folder, "config.json")?,
            generation_config: read_json(folder, "generation_config.json")?,
        })
    }

    /// The id of a token that is given by name (`bos_token`), as a string or as an object with its content.
    fn named(&self, key: &str, table: &TokenTable) -> Option<u32> {
        [&self.tokenizer_config, &self.special_tokens_map]
            .into_iter()
            .find_map(|file| {
                let token = &file[key];
                token.as_str().or_else(|| token["content"].as_str())
            })
            .and_then(|name| table.id_of(name))
    }

    /// The ids that the model's own files give under `key`, a number or a list.
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

    /// The token that the tokenizer itself calls the end.
    pub(crate) fn main_eos(&self, table: &TokenTable) -> Option<u32> {
        self.named("eos_token", table)
    }

    /// Every token that ends a generation: the tokenizer's first, then what the model's configuration adds.
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

    /// Whether the configuration overrides what the post-processor adds. The classes that came from SentencePiece rebuild
    /// their post-processor from these two flags; all others ignore them.
    fn flag(&self, key: &str) -> Option<bool> {
        let class = self.tokenizer_config["tokenizer_class"].as_str()?;
        let rebuilds = ["Llama", "CodeLlama", "Gemma", "Cohere"]
            .iter()
            .any(|family| class.strip_prefix(family).is_some_and(|rest| rest.starts_with("Tokenizer")));
        self.tokenizer_config[key].as_bool().filter(|_| rebuilds)
    }

    /// What goes before a text: the post-processor's word, unless the configuration overrides it.
    pub(crate) fn override_bos(&self, prefix: Vec<u32>, bos: Option<u32>) -> Vec<u32> {
        match (self.flag("add_bos_token"), bos) {
            (Some(true), Some(bos)) => vec![bos],
            (Some(false), _) => Vec::new(),
            _ => prefix,
        }
    }

    /// What goes after a text, likewise.
    pub(crate) fn override_eos(&self, suffix: Vec<u32>, eos: Option<u32>) -> Vec<u32> {
        match (self.flag("add_eos_token"), eos) {
            (Some(true), Some(eos)) => vec![eos],
            (Some(false), _) => Vec::new(),
            _ => suffix,
        }
    }
}
