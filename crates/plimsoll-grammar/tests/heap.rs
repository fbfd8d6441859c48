//! The budget charges at least the heap bytes of the vocabulary's trie, of grammars and of outputs.

use std::sync::Arc;

use plimsoll_engine::constraint::Grammar;
use plimsoll_grammar::{CompileLimits, Grammars, Guide, Settings, Source};
use plimsoll_memory::heap::{self, CountingHeap};
use plimsoll_text::Tokenizer;
use serde_json::{Map, Value, json};

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// A vocabulary of 50,000 random words of three to ten letters. Half of them start with a space.
fn tokenizer() -> Arc<Tokenizer> {
    let mut vocab = Map::new();
    let mut next = 0x100;
    for byte in 0..=255u32 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { byte } else { next };
        next += u32::from(!printable);
        vocab.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    let mut state = 7u64;
    while vocab.len() < 50_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let length = 3 + (state >> 60) as usize % 8;
        let letter = |i: usize| char::from(b'a' + (state >> (8 + 5 * i)) as u8 % 26);
        let word: String = (0..length).map(letter).collect();
        let word = if state >> 40 & 1 == 1 { format!("Ġ{word}") } else { word };
        let id = vocab.len();
        vocab.entry(word).or_insert_with(|| id.into());
    }
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let end = json!({"id": 50_000, "content": "<|im_end|>", "single_word": false, "lstrip": false, "rstrip": false,
                     "normalized": false, "special": true});
    let description = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end],
        "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": []}
    });
    let path = std::env::temp_dir().join(format!("plimsoll-grammar-{}.json", std::process::id()));
    std::fs::write(&path, description.to_string()).unwrap();
    let tokenizer = Tokenizer::from_file(&path);
    std::fs::remove_file(&path).unwrap();
    Arc::new(tokenizer.unwrap())
}

fn schema(i: usize) -> Source {
    let field = |j: usize| {
        (format!("field_{i}_{j}"), json!({"type": ["string", "null"], "maxLength": 40, "description": "A field."}))
    };
    let properties: Map<String, Value> = (0..12).map(field).collect();
    Source::JsonSchema(
        json!({"type": "object", "properties": properties, "required": [format!("field_{i}_0")]}).to_string(),
    )
}

/// Accepts up to 300 allowed tokens.
fn sample(guide: &Guide) -> Box<dyn plimsoll_engine::constraint::Constraint> {
    let mut constraint = guide.begin().unwrap();
    for step in 0..300 {
        let Some(mask) = constraint.allowed().unwrap() else { break };
        let allowed: Vec<u32> = (0..50_000).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        let Some(id) = allowed.get(step * 7919 % allowed.len().max(1)) else { break };
        constraint.accept(*id).unwrap();
        if constraint.complete() {
            break;
        }
    }
    constraint
}

#[test]
fn heap_bytes_stay_below_charged_bytes() {
    let tokenizer = tokenizer();
    let settings =
        Settings { vocab: 50_001, ends: vec![50_000], spelled: Vec::new(), bytes: 256 << 20, tokenizer, sandbox: None };
    let grammars = Grammars::new(settings);
    let before = heap::in_use();
    let first =
        Guide::new(&grammars, Some(&Source::Choice(vec!["a".into()])), "", None, &CompileLimits::default()).unwrap();
    let (trie, charged) = (heap::in_use() - before, grammars.usage().used);
    println!("trie and one small grammar: {trie} bytes on the heap, {charged} charged");
    assert!(trie <= charged && charged <= 8 * trie);
    let before = heap::in_use();
    let guides: Vec<Guide> =
        (0..8).map(|i| Guide::new(&grammars, Some(&schema(i)), "", None, &CompileLimits::default()).unwrap()).collect();
    let (compiled, more) = (heap::in_use() - before, grammars.usage().used - charged);
    println!("eight schemas: {compiled} bytes on the heap, {more} charged");
    assert!(compiled <= more);
    let (before, charged) = (heap::in_use(), grammars.usage().used);
    let outputs: Vec<_> = guides.iter().map(sample).collect();
    let (held, more) = (heap::in_use() - before, grammars.usage().used - charged);
    let reserved: u64 = guides.iter().map(|guide| guide.bytes_max(300)).sum();
    println!(
        "eight outputs of 300 tokens: {held} bytes on the heap, {more} charged and {reserved} reserved by requests"
    );
    assert!(held <= more + reserved);
    drop((outputs, first));
}
