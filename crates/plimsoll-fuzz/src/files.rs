//! Targets for the files of a model: checkpoints, configurations, tokenizers, chat templates.

use std::path::Path;

use plimsoll_engine::{Blueprint, LoadedModel, MemoryLimit, Options};
use plimsoll_formats::{Checkpoint, RowBuf};
use plimsoll_text::{ChatTemplate, Ending, PROMPT_BYTES_MAX, Tokenizer};
use serde_json::{Map, Value, json};

use crate::scratch::Scratch;
use crate::seeds;
use crate::{KIB, MIB, parts, within};

/// The smallest `config.json` of a Llama model, and that of one with weights in groups of four bits.
const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}"#;
const PACKED: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100,
    "quantization": {"group_size": 32, "bits": 4}}"#;

/// The most bytes for the tables of a checkpoint, proportional to its file, as in `plimsoll-formats/tests/memory.rs`.
fn tables(bytes: usize) -> usize {
    8 * bytes + 64 * KIB
}

/// Opens a checkpoint and decodes everything in it.
fn exercise(path: &Path, bytes: usize) {
    let Ok(checkpoint) = within(tables(bytes), || Checkpoint::open(path)) else { return };
    // A row of the densest codes unpacks to 16 times its bytes.
    within(64 * bytes + MIB, || {
        let names: Vec<String> = checkpoint.tensors().map(|(name, _)| name.to_owned()).collect();
        let (mut row, mut values) = (RowBuf::new(), Vec::new());
        for name in names {
            let Some(info) = checkpoint.tensor(&name) else { continue };
            for index in 0..info.rows() {
                checkpoint.decode_rows(&name, index, &mut row).expect("a row that there is can be decoded");
                assert_eq!(row.len(), info.cols());
                values.resize(row.len(), 0.0);
                row.dequantize(&mut values);
            }
            if info.rows() > 0 && info.cols() > 1 {
                // Refused if it is quantized.
                drop(checkpoint.decode_block(&name, 0..1, 1..info.cols(), &mut values));
            }
            assert!(checkpoint.decode_rows(&name, info.rows(), &mut row).is_err(), "there is no such row");
            checkpoint.release(&name);
        }
    });
}

/// Reads a GGUF file: its tensors, and its tokenizer and template. The tokenizer encodes a text.
pub(crate) fn gguf(data: &[u8]) {
    let dir = Scratch::new();
    let path = dir.write("model.gguf", data);
    exercise(&path, data.len());
    let Ok(model) = within(64 * data.len() + 64 * MIB, || LoadedModel::open(&path)) else { return };
    for parse_special in [false, true] {
        let Ok(ids) = model.tokenizer.encode("Hello,  wörld! ａ①🚀 <s>[CLS]", true, parse_special) else {
            continue;
        };
        assert!(ids.iter().all(|id| (*id as usize) < model.tokenizer.vocab_size()), "{ids:?}");
    }
}

/// Reads a file with a vision encoder, with a model that it may belong to: opens it, and declares it if it is valid.
pub(crate) fn mmproj(data: &[u8]) {
    let Some((kind, file)) = data.split_first() else { return };
    let dir = Scratch::new();
    let pairs = seeds::pairs();
    let model = &pairs[usize::from(*kind) % pairs.len()].model;
    let path = dir.write("model.gguf", model);
    dir.write("mmproj.gguf", file);
    exercise(&path, model.len() + file.len());
    let Ok(checkpoint) = Checkpoint::open(&path) else { return };
    within(256 * MIB, || drop(Blueprint::new(&checkpoint, &Options::default())));
}

/// Reads a safetensors file; the first byte selects the configuration.
pub(crate) fn safetensors(data: &[u8]) {
    let Some((kind, file)) = data.split_first() else { return };
    let dir = Scratch::new();
    let config = if kind % 2 == 0 { LLAMA } else { PACKED };
    dir.write("config.json", config);
    dir.write("model.safetensors", file);
    exercise(&dir.0, file.len() + config.len());
}

/// Reads the index of two safetensors files.
pub(crate) fn index(data: &[u8]) {
    let dir = Scratch::new();
    dir.write("config.json", LLAMA);
    let head = |name: &str| format!(r#"{{"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#);
    let mut bytes = data.len() + LLAMA.len();
    for (file, name) in [("model-00001-of-00002", "a"), ("model-00002-of-00002", "b")] {
        let head = head(name);
        let shard = [&(head.len() as u64).to_le_bytes(), head.as_bytes(), &[0; 8]].concat();
        bytes += shard.len();
        dir.write(&format!("{file}.safetensors"), shard);
    }
    dir.write("model.safetensors.index.json", data);
    exercise(&dir.0, bytes);
}

/// Reads, declares and plans a configuration, with its generation configuration and its preprocessor's.
pub(crate) fn config(data: &[u8]) {
    let dir = Scratch::new();
    let [config, generation, preprocessor] = parts(data);
    dir.write("config.json", config);
    for (name, text) in [("generation_config.json", generation), ("preprocessor_config.json", preprocessor)] {
        if !text.is_empty() {
            dir.write(name, text);
        }
    }
    let allowed = tables(data.len()) + expressions(config) * EXPRESSION_BYTES;
    let Ok(checkpoint) = within(allowed, || Checkpoint::open(&dir.0)) else { return };
    // A plan holds a row for every matrix of every layer, whatever the file's length.
    within(256 * MIB, || {
        let options = Options::default();
        let Ok(blueprint) = Blueprint::new(&checkpoint, &options) else { return };
        drop(blueprint.plan(&options, 2, &MemoryLimit::of_budget(1 << 40, "a fuzzer")));
    });
}

/// Heap bytes that one regular expression of `quantization_config` takes while it is compiled: its limit is 64 KiB compiled.
const EXPRESSION_BYTES: usize = 512 * KIB;

/// The most regular expressions in a `config.json`. Those of compressed-tensors begin with `re:`, those of GPTQ with `+:` or `-:`, and
/// those of AutoRound have a character that no plain name has.
fn expressions(config: &[u8]) -> usize {
    let marks: [&[u8]; 5] = [b"re:", b"+:", b"-:", b"*", b"\\\\"];
    marks.iter().map(|mark| config.windows(mark.len()).filter(|bytes| bytes == mark).count()).sum()
}

/// Reads a `tokenizer.json` and its configuration, and encodes a text.
pub(crate) fn tokenizer(data: &[u8]) {
    let dir = Scratch::new();
    let [file, beside, text] = parts(data);
    let path = dir.write("tokenizer.json", file);
    if !beside.is_empty() {
        dir.write("tokenizer_config.json", beside);
    }
    let Ok(tokenizer) = within(64 * (file.len() + beside.len()) + 64 * MIB, || Tokenizer::from_file(&path)) else {
        return;
    };
    // The rules of a normalizer may lengthen a text once per rule: such a file must be trusted or not used.
    let rules = |name: &[u8]| file.windows(name.len()).filter(|window| *window == name).count();
    if rules(b"Replace") + rules(b"Prepend") + rules(b"Precompiled") > 4 {
        return;
    }
    let text = String::from_utf8_lossy(text);
    for text in [&*text, "Hello,  wörld! 🚀\n\n 12345 <|im_start|>"] {
        for parse_special in [false, true] {
            // The tokenizer's automata make their tables at their first use.
            let bytes_max = tokenizer.encode_bytes_max(text.len()) + 16 * MIB;
            let Ok(ids) = within(bytes_max, || tokenizer.encode(text, true, parse_special)) else { continue };
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "{ids:?}");
            drop(tokenizer.decode(&ids, parse_special));
        }
    }
    drop(tokenizer.pair(&[0], &[0]));
}

/// Templates for which a client sends the messages. A template itself comes from the model's files: apart from its limits on steps, output
/// and recursion, its memory is not bounded.
const TEMPLATES: &[&str] = &[
    include_str!("../../plimsoll-text/tests/fixtures/templates/headers.jinja"),
    include_str!("../../plimsoll-text/tests/fixtures/templates/inst.jinja"),
    include_str!("../../plimsoll-text/tests/fixtures/templates/python.jinja"),
    include_str!("../../plimsoll-text/tests/fixtures/templates/qwen2.5.jinja"),
    include_str!("../../plimsoll-text/tests/fixtures/templates/smollm2.jinja"),
    include_str!("../../plimsoll-text/tests/fixtures/templates/think.jinja"),
    include_str!("../../plimsoll-text/tests/fixtures/templates/turns.jinja"),
];

/// Renders messages, variables and tools with one of the templates; the first byte selects it.
pub(crate) fn template(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let [messages, extra, tools] = parts(data);
    let messages: Value = serde_json::from_slice(messages).unwrap_or_else(|_| {
        json!([{"role": "system", "content": "a"}, {"role": "user", "content": "b <c>"},
               {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}])
    });
    let extra: Map<String, Value> = serde_json::from_slice(extra).unwrap_or_default();
    let tools: Option<Value> = serde_json::from_slice(tools).ok();
    let source = TEMPLATES[usize::from(*choice) % TEMPLATES.len()];
    // Memory is linear in the client's bytes. A small number becomes a value of some words, in two trees.
    within(512 * data.len() + 4 * MIB, || {
        let template = ChatTemplate::new(source, "<s>", "</s>").expect("the fixtures compile");
        for ending in [Ending::Open, Ending::Within] {
            if let Ok(prompt) = template.render(&messages, tools.as_ref(), ending, &extra) {
                assert!(prompt.len() <= PROMPT_BYTES_MAX);
            }
        }
    });
}
