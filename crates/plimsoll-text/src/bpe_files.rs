//! A tokenizer in parts: `vocab.json`, `merges.txt` and the added tokens of `tokenizer_config.json`, as repositories of Qwen2's class have
//! it without a `tokenizer.json`.
//!
//! The parts are joined as transformers' converter of this class joins them, and then read like any `tokenizer.json`.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::TextError;
use crate::neighbours::{Neighbours, read, read_json};
use crate::pattern_names::QWEN2;
use crate::tokenizer::Tokenizer;

/// The files of the vocabulary.
const FILES: [&str; 2] = ["vocab.json", "merges.txt"];
/// The largest of these files that is read, in bytes. Qwen's have 3 MB.
const FILE_BYTES_MAX: u64 = 32 << 20;
/// The classes of these files that are read. Other classes of the same files cut and normalize texts differently.
const CLASSES: [&str; 2] = ["Qwen2Tokenizer", "Qwen2TokenizerFast"];

impl Tokenizer {
    /// Whether the folder has the files of [`Tokenizer::from_parts`].
    pub fn is_in_parts(folder: &Path) -> bool {
        FILES.iter().all(|name| folder.join(name).is_file())
    }

    /// Loads the tokenizer of a folder with `vocab.json`, `merges.txt` and `tokenizer_config.json`.
    ///
    /// # Errors
    ///
    /// [`TextError::Io`] and [`TextError::FileTooLarge`] for the files, [`TextError::BadTokenizer`] and [`TextError::Unsupported`] for their
    /// content.
    pub fn from_parts(folder: &Path) -> Result<Self, TextError> {
        let config = read_json(folder, "tokenizer_config.json")?;
        let class = config["tokenizer_class"].as_str().unwrap_or("none");
        if !CLASSES.contains(&class) {
            return Err(TextError::Unsupported(format!(
                "vocab.json and merges.txt of tokenizer_class {class:?}; {:?} is supported: make tokenizer.json of them with transformers' \
                 AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)",
                CLASSES[0]
            )));
        }
        let [vocab, merges] = FILES.map(|name| read(&folder.join(name), FILE_BYTES_MAX));
        let vocab: Value = serde_json::from_slice(&vocab?).map_err(|error| bad(format!("vocab.json: {error}")))?;
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let split = json!({"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": false});
        let whole = json!({
            "added_tokens": added(&config)?,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": pairs(merges?)?},
        });
        Self::from_json(whole.to_string().as_bytes(), &Neighbours::read(folder)?)
    }
}

fn bad(message: String) -> TextError {
    TextError::BadTokenizer(message)
}

/// Parses `merges.txt`: the two parts of a merge on each line, and a first line with a version.
fn pairs(merges: Vec<u8>) -> Result<Vec<[String; 2]>, TextError> {
    let text = String::from_utf8(merges).map_err(|error| bad(format!("merges.txt: {error}")))?;
    let is_version = |at: usize, line: &str| at == 0 && line.starts_with("#version");
    let lines = text.lines().enumerate().filter(|(at, line)| !(line.is_empty() || is_version(*at, line)));
    let pair = |(at, line): (usize, &str)| match line.split_once(' ') {
        Some((left, right)) => Ok([left.to_owned(), right.to_owned()]),
        None => Err(bad(format!("merges.txt: line {} has no two parts", at + 1))),
    };
    lines.map(pair).collect()
}

/// The added tokens in the form of `tokenizer.json`.
fn added(config: &Value) -> Result<Vec<Value>, TextError> {
    let missing =
        || bad("tokenizer_config.json has no added_tokens_decoder, which the added tokens are read from".to_owned());
    let tokens = config["added_tokens_decoder"].as_object().ok_or_else(missing)?;
    let one = |(id, token): (&String, &Value)| {
        let id: u32 = id.parse().map_err(|_| bad(format!("added_tokens_decoder: {id:?} is not an id")))?;
        let mut token = token.clone();
        match token.as_object_mut() {
            Some(fields) => fields.insert("id".to_owned(), id.into()),
            None => return Err(bad(format!("added_tokens_decoder: token {id} is not an object"))),
        };
        Ok(token)
    };
    tokens.iter().map(one).collect()
}
