//! Reads the fixtures; `fixtures/make.py` makes them.

#![allow(dead_code)] // Every test binary uses a part of this.

use std::path::PathBuf;

use plimsoll_text::{GgufVocab, Tokenizer};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A text and the ids that the reference library gives it.
#[derive(Deserialize)]
pub struct Case {
    pub text: String,
    pub parse_special: bool,
    pub ids: Vec<u32>,
}

/// Ids and the text that the reference library gives them.
#[derive(Deserialize)]
pub struct Decoding {
    pub ids: Vec<u32>,
    pub skip_special: bool,
    pub text: String,
}

/// The expected ids and texts of a `tokenizer.json`.
#[derive(Deserialize)]
pub struct Expected {
    pub cases: Vec<Case>,
    pub decodings: Vec<Decoding>,
    /// The ids of `Hi <|im_end|>` with special tokens added.
    pub with_special: Vec<u32>,
}

/// A vocabulary as a GGUF file has it.
#[derive(Deserialize)]
pub struct Vocab {
    model: String,
    pre: String,
    tokens: Vec<String>,
    scores: Vec<f32>,
    token_types: Vec<i32>,
    merges: Vec<String>,
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    add_bos: Option<bool>,
    add_space_prefix: Option<bool>,
}

/// A GGUF vocabulary with its expected ids and texts.
#[derive(Deserialize)]
pub struct GgufFixture {
    vocab: Vocab,
    pub cases: Vec<Case>,
}

impl GgufFixture {
    pub fn vocab(&self) -> GgufVocab {
        let v = &self.vocab;
        GgufVocab {
            model: v.model.clone(),
            pre: v.pre.clone(),
            tokens: v.tokens.clone(),
            scores: v.scores.clone(),
            token_types: v.token_types.clone(),
            merges: v.merges.clone(),
            bos: v.bos,
            eos: v.eos,
            extra_eos: Vec::new(),
            unknown: v.unknown,
            add_bos: v.add_bos,
            add_eos: None,
            add_space_prefix: v.add_space_prefix,
            ..GgufVocab::default()
        }
    }
}

pub fn path(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "fixtures", name].iter().collect()
}

pub fn read<T: DeserializeOwned>(name: &str) -> T {
    let path = path(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The folders that hold a `tokenizer.json`.
pub const FOLDERS: [&str; 7] = ["gemma", "byte_level", "gpt2", "llama2", "metaspace", "unigram", "wordpiece"];

pub fn tokenizer(folder: &str) -> Tokenizer {
    let file = path(folder).join("tokenizer.json");
    Tokenizer::from_file(&file).unwrap_or_else(|error| panic!("{folder}: {error}"))
}

/// Returns a `tokenizer.json` with byte-level BPE as the GGUF vocabulary that a converter would make of it.
pub fn as_gguf(folder: &str, pre: &str) -> GgufVocab {
    let file: serde_json::Value = read(&format!("{folder}/tokenizer.json"));
    let ids = file["model"]["vocab"].as_object().unwrap();
    let added = file["added_tokens"].as_array().unwrap();
    let count = ids.values().chain(added.iter().map(|a| &a["id"])).filter_map(|id| id.as_u64()).max();
    let mut tokens = vec![String::new(); count.unwrap() as usize + 1];
    let mut token_types = vec![1; tokens.len()];
    for (token, id) in ids {
        tokens[id.as_u64().unwrap() as usize] = token.clone();
    }
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        tokens[id] = token["content"].as_str().unwrap().to_owned();
        token_types[id] = if token["special"] == true { 3 } else { 4 };
    }
    let merges = file["model"]["merges"].as_array().unwrap().iter().map(|pair| {
        let part = |i: usize| pair[i].as_str().unwrap();
        format!("{} {}", part(0), part(1))
    });
    GgufVocab {
        model: "gpt2".to_owned(),
        pre: pre.to_owned(),
        merges: merges.collect(),
        tokens,
        token_types,
        ..GgufVocab::default()
    }
}
