//! Deep grammars. The library follows them by recursion, and a stack overflow ends the process.

use std::path::Path;
use std::sync::Arc;

use plimsoll_engine::constraint::Grammar;
use plimsoll_grammar::{CompileLimits, Grammars, Guide, Settings, Source};
use plimsoll_text::Tokenizer;
use serde_json::{Map, Value, json};

fn grammars() -> Arc<Grammars> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(&path).unwrap());
    let (vocab, ends) = (tokenizer.vocab_size(), tokenizer.eos().to_vec());
    Grammars::new(Settings { tokenizer, vocab, ends, spelled: Vec::new(), bytes: 64 << 20, sandbox: None })
}

/// Compiles a grammar and accepts a few tokens on a small stack, like a text worker's.
fn compile_and_sample(grammars: &Arc<Grammars>, source: Source) -> Result<(), String> {
    let grammars = Arc::clone(grammars);
    let work = move || {
        let guide = Guide::new(&grammars, Some(&source), "", None, &CompileLimits::default())
            .map_err(|error| error.to_string())?;
        let mut constraint = guide.begin()?;
        for _ in 0..8 {
            let Some(mask) = constraint.allowed().map_err(|unfit| unfit.to_string())? else { break };
            let Some(word) = mask.iter().position(|bits| *bits != 0) else { break };
            let token = word as u32 * 32 + mask[word].trailing_zeros();
            constraint.accept(token).map_err(|unfit| unfit.to_string())?;
            if constraint.complete() {
                break;
            }
        }
        Ok(())
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(work).unwrap().join().unwrap()
}

/// A schema that is a chain of `length` definitions.
fn chain(length: usize, link: impl Fn(Value) -> Value) -> Source {
    let next = |i: usize| (format!("d{i}"), link(json!({"$ref": format!("#/$defs/d{}", i + 1)})));
    let mut all: Map<String, Value> = (0..length).map(next).collect();
    all.insert(format!("d{length}"), json!({"type": "object"}));
    Source::JsonSchema(json!({"$ref": "#/$defs/d0", "$defs": all}).to_string())
}

fn nested(levels: usize, open: &str, inner: &str, close: &str) -> Source {
    let text = format!("{}{inner}{}", open.repeat(levels), close.repeat(levels));
    Source::JsonSchema(text)
}

/// The deepest accepted grammars overflow no stack, and deeper ones are rejected by name. Not all accepted ones
/// compile.
#[test]
fn no_grammar_overflows_the_stack() {
    let grammars = grammars();
    let rules = |n: usize, line: fn(usize) -> String| {
        Source::Lark((0..n).fold("start: a0\n".to_owned(), |all, i| all + &line(i)) + &format!("a{n}: \"x\"\n"))
    };
    let terminals = |n: usize, line: fn(usize) -> String| {
        Source::Lark((0..n).fold("start: A0\n".to_owned(), |all, i| all + &line(i)) + &format!("A{n}: \"x\"\n"))
    };
    let condition =
        |n: usize| Source::Lark(format!("start: a::0x1\na::_: \"x\" %if {}true{}\n", "not(".repeat(n), ")".repeat(n)));
    let sources = |n: usize| {
        [
            ("rules", rules(n, |i| format!("a{i}: a{}\n", i + 1))),
            ("alternatives", rules(n, |i| format!("a{i}: \"y\" a{} | \"z\"\n", i + 1))),
            (
                "groups",
                rules(n / 20, |i| format!("a{i}: {}\"y\" a{} | \"z\"{}\n", "(".repeat(19), i + 1, ")".repeat(19))),
            ),
            ("terminals", terminals(n, |i| format!("A{i}: A{}\n", i + 1))),
            ("alternatives of terminals", terminals(n, |i| format!("A{i}: \"y\" A{} | \"z\"\n", i + 1))),
            ("conditions", condition(n)),
            ("references", chain(n / 3, |link| link)),
            ("references in all", chain(n / 4, |link| json!({"allOf": [link, {"type": "object"}]}))),
            ("references in any", chain(n / 4, |link| json!({"anyOf": [link, {"const": 1}]}))),
            ("references in properties", chain(n / 4, |link| json!({"type": "object", "properties": {"a": link}}))),
        ]
    };
    for (name, source) in sources(2000) {
        println!("{name}: {:?}", compile_and_sample(&grammars, source));
    }
    for (name, source) in sources(4000) {
        let result = compile_and_sample(&grammars, source);
        // Definitions inside properties become rules, which take no stack levels.
        if name == "references in properties" {
            assert_eq!(result, Ok(()), "{name}");
            continue;
        }
        let message = result.unwrap_err();
        let limits = ["the limit is 2048", "more than 500 schemas within each other"];
        assert!(limits.iter().any(|limit| message.contains(limit)), "{name}: {message}");
    }
    // The deepest and longest JSON and regular expressions.
    for (name, source) in [
        ("items", nested(120, r#"{"type":"array","items":"#, "{}", "}")),
        ("any", nested(60, r#"{"anyOf":[{"type":"number"},"#, "{}", "]}")),
        ("all", nested(60, r#"{"allOf":[{"type":"object"},"#, r#"{"type":"object"}"#, "]}")),
        ("properties", nested(60, r#"{"properties":{"a":"#, "{}", "}}")),
        ("not", nested(120, r#"{"not":"#, r#"{"const":1}"#, "}")),
        ("parentheses", Source::Regex(format!("{}x{}", "(a|b".repeat(240), ")*".repeat(240)))),
        ("classes", Source::Regex("[ab]".repeat(4_000))),
        ("optional classes", Source::Regex("[ab]?".repeat(2_000))),
        ("counts", Source::Regex("(((a{9}){9}){9}){9}".into())),
        ("choices", Source::Choice((0..10_000).map(|i| format!("w{i}")).collect())),
    ] {
        let result = compile_and_sample(&grammars, source);
        println!("{name}: {:?}", result.map_err(|message| message.chars().take(120).collect::<String>()));
    }
}

/// The stack of a deep grammar counts against the budget.
#[test]
fn a_deep_grammar_is_charged_for_its_stack() {
    let rules = |n: usize| {
        let line = |all: String, i: usize| all + &format!("a{i}: \"y\" a{} | \"z\"\n", i + 1);
        Source::Lark((0..n).fold("start: a0\n".to_owned(), line) + &format!("a{n}: \"x\"\n"))
    };
    let used = |levels: usize| {
        let grammars = grammars();
        compile_and_sample(&grammars, chain(1, |link| link)).unwrap();
        let before = grammars.usage().used;
        compile_and_sample(&grammars, rules(levels)).unwrap();
        grammars.usage().used - before
    };
    let (shallow, deep) = (used(4), used(400));
    assert!(shallow < 1 << 20, "{shallow}");
    assert!(deep > shallow + 300 * 4096, "{deep} for a hundred times the levels of {shallow}");
}
