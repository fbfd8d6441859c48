//! The heap cost of a client's text: conversations in templates, and texts in the tokenizers of the fixtures. One test, because the heap of
//! the whole process is counted.

mod common;

use common::{FOLDERS, path, tokenizer};
use plimsoll_memory::heap::{self, CountingHeap};
use plimsoll_text::{ChatTemplate, Ending, PROMPT_BYTES_MAX};
use serde_json::{Map, Value, json};

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// Returns the most heap bytes that `work` has at once, its result included.
fn peak<T>(work: impl FnOnce() -> T) -> u64 {
    heap::restart_peak();
    let before = heap::in_use();
    drop(work());
    heap::peak() - before
}

#[test]
#[ignore = "soak"]
fn clients_texts_cost_memory_linear_in_their_bytes() {
    conversations();
    texts();
}

/// Texts that grow most when they are printed, escaped, split and replaced: control characters, quotes, line ends and tags.
const UNITS: &[&str] = &["word ", "\u{7}", "\"\\'", "\n", "<think>", "</think>", "é", "🚀", ",", "{}%s"];

fn conversation(messages: usize, unit: &str, bytes: usize) -> Value {
    let text = unit.repeat(bytes / unit.len());
    let calls = json!([{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": text}}}]);
    let message = |i: usize| match i % 2 {
        0 => json!({"role": "user", "content": text}),
        _ => json!({"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": calls}),
    };
    (0..messages).map(message).collect()
}

/// Four times as many messages, or four times as long ones, cost about four times as much. A byte costs at most 16 bytes of heap.
fn conversations() {
    for file in std::fs::read_dir(path("templates")).unwrap() {
        let file = file.unwrap().path();
        let chat = ChatTemplate::new(&std::fs::read_to_string(&file).unwrap(), "<s>", "</s>").unwrap();
        let cost = |messages: &Value| {
            let render = || chat.render(messages, None, Ending::Open, &Map::new());
            (peak(render), messages.to_string().len() as u64)
        };
        let mut most = 0.0_f64;
        for unit in UNITS {
            let (small, bytes) = cost(&conversation(64, unit, 1 << 10));
            for large in [conversation(256, unit, 1 << 10), conversation(64, unit, 1 << 12)] {
                let (large, large_bytes) = cost(&large);
                let times = large_bytes as f64 / bytes as f64;
                assert!(large as f64 <= 1.5 * times * small as f64, "{file:?} {unit:?}: {small}, then {large}");
                most = most.max(large as f64 / large_bytes as f64);
            }
        }
        println!("{:?}: at most {most:.1} bytes of heap for each byte of messages", file.file_stem().unwrap());
        assert!(most <= 16.0, "{file:?}: {most}");
    }
    let chat =
        ChatTemplate::new("{% for m in messages %}{% set x %}{{ m.content }}{% endset %}{% endfor %}", "", "").unwrap();
    let messages = conversation(64, "word ", 1 << 20);
    let cost = peak(|| assert!(chat.render(&messages, None, Ending::Open, &Map::new()).is_err()));
    assert!(
        cost <= messages.to_string().len() as u64 + 4 * PROMPT_BYTES_MAX as u64,
        "captured text is limited: {cost}"
    );
}

/// No text costs more than [`plimsoll_text::Tokenizer::encode_bytes_max`]. The memory of the compiled patterns is not counted.
fn texts() {
    // U+FDFA has 3 bytes, and 33 in the compatibility form that some normalizers make.
    for folder in FOLDERS {
        let tokenizer = tokenizer(folder);
        let mut most = 0.0_f64;
        let units =
            ["a", " ", "\u{FDFA}", "Á", "e\u{301}", "中", "🚀", "\u{0}", "word ", "\n", "!", "!a", "! ", "ǆ", "½"];
        // Vectors double: the second length is just beyond the capacity of many.
        for (unit, bytes) in units.iter().flat_map(|unit| [(unit, 1 << 16), (unit, (1 << 16) + (1 << 12))]) {
            let text = unit.repeat(bytes / unit.len());
            drop(tokenizer.encode(&text, true, true));
            let cost = peak(|| tokenizer.encode(&text, true, true).unwrap());
            let price = tokenizer.encode_bytes_max(text.len()) as u64;
            println!(
                "{folder} {unit:?}: {:.1} of {} bytes a byte",
                cost as f64 / text.len() as f64,
                price / text.len() as u64
            );
            most = most.max(cost as f64 / price as f64);
        }
        assert!(most <= 1.0, "{folder}: {most} of the price");
    }
}
