//! The stages of a `tokenizer.json` for serde.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// The stages of the file.
#[derive(Deserialize)]
pub(crate) struct Description<'a> {
    #[serde(default)]
    pub(crate) added_tokens: Vec<Added>,
    #[serde(default)]
    pub(crate) normalizer: Value,
    #[serde(default)]
    pub(crate) pre_tokenizer: Value,
    #[serde(default)]
    pub(crate) post_processor: Value,
    #[serde(default)]
    pub(crate) decoder: Value,
    #[serde(borrow)]
    pub(crate) model: &'a RawValue,
}

/// A token that is matched literally.
#[derive(Deserialize)]
pub(crate) struct Added {
    pub(crate) id: u32,
    pub(crate) content: String,
    #[serde(default)]
    pub(crate) single_word: bool,
    #[serde(default)]
    pub(crate) lstrip: bool,
    #[serde(default)]
    pub(crate) rstrip: bool,
    #[serde(default)]
    pub(crate) normalized: bool,
    #[serde(default)]
    pub(crate) special: bool,
}
