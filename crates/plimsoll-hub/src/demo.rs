//! The demo model, which is part of the program: made by `tools/train_demo`, kept in `models/demo`.
//!
//! It goes through the cache like every other entry, because weights are mapped from files. `export.py` writes the rows below.

use crate::entry::{Beside, Entry, Source, beside};

/// The demo model's row in the catalogue.
pub(crate) const DEMO: Entry = Entry {
    name: "demo",
    title: "Plimsoll's demo model: images, text, a draft head",
    licence: "Apache-2.0",
    file: "model.safetensors",
    bytes: WEIGHTS.bytes,
    sha256: WEIGHTS.sha256,
    beside: BESIDE,
    sources: &[Source::Here(FILES)],
};

const WEIGHTS: Beside =
    beside("model.safetensors", 3_574_432, "1866b88a89cc0b0274e4af62e0202c2853b86b10b64da17809de19560f92e5f7");

const BESIDE: &[Beside] = &[
    beside("chat_template.jinja", 1719, "31667eac08f8b167b6ee54e97d5d718cadb42c42f59b01704d9c6ddd4c3f9cab"),
    beside("config.json", 1952, "8fff48ba58ab384a5404af8f09eb49327801a8360c41ad1343c51e701e8342a2"),
    beside("generation_config.json", 129, "0ecf66e9554740d8dbe3ceac09925e5aa4560783b0e952124dccfb7fe14f2fd9"),
    beside("preprocessor_config.json", 332, "7b9fd1f630e464adb2d2f6d29b79b3b36c27ff901d774751f07fd4f141ab2051"),
    beside("tokenizer.json", 23_060, "4a97a720eef7b5b294538e0535e07dd997e249b37d656378f1edebbd9c2d321a"),
    beside("tokenizer_config.json", 2821, "06430b18687ce21a48f8a2b3cee4c7f4161212677c7b72584e092afd9911e00e"),
];

macro_rules! files {
    ($($name:literal),*) => { &[$(($name, include_bytes!(concat!("../../../models/demo/", $name)))),*] };
}

const FILES: &[(&str, &[u8])] = files![
    "model.safetensors",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json"
];
