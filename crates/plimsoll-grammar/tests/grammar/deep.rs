//! Grammars that go deep: the library walks them by recursion, and a stack that ends takes the process along.

use std::path::Path;
use std::sync::Arc;

use plimsoll_engine::constraint::Grammar;
use plimsoll_grammar::{Grammars, Guide, Patience, Settings, Source};
use plimsoll_text::Tokenizer;
use serde_json::{Map, Value, json};

fn grammars() -> Arc<Grammars> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::from_file(&path).unwrap());
    let (vocab, ends) = (tokenizer.vocab_size(), tokenizer.eos().to_vec());
    Grammars::new(Settings { tokenizer, vocab, ends, spelled: Vec::new(), bytes: 64 << 20, sandbox: None })
}

/// Compiles and goes a few steps, on a small stack, as a text worker has one.
fn go(grammars: &Arc<Grammars>, source: Source) -> Result<(), String> {
    let grammars = Arc::clone(grammars);
    let work = move || {
        let guide =
            Guide::new(&grammars, Some(&source), "", None, &Patience::default()).map_err(|error| error.to_string())?;
        let mut walk = guide.begin()?;
        for _ in 0..8 {
            let Some(mask) = walk.allowed().map_err(|unfit| unfit.to_string())? else { break };
            let Some(word) = mask.iter().position(|bits| *bits != 0) else { break };
            let token = word as u32 * 32 + mask[word].trailing_zeros();
            walk.accept(token).map_err(|unfit| unfit.to_string())?;
            if walk.complete() {
                break;
            }
        }
        Ok(())
    };
    std::thread::Builder::new().stack_size(2 << 20).spawn(work).unwrap().join().unwrap()
}

/// Schemas that are chains of `length` definitions.
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

/// What is as deep as is let in survives; what is deeper is refused by name. Which of the former compile is the library's business.
#[test]
fn no_grammar_ends_the_stack() {
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
        println!("{name}: {:?}", go(&grammars, source));
    }
    for (name, source) in sources(4000) {
        let said = go(&grammars, source);
        // Definitions within properties are rules, and rules are no levels of a stack.
        if name == "references in properties" {
            assert_eq!(said, Ok(()), "{name}");
            continue;
        }
        let words = said.unwrap_err();
        let limits = ["2048 are allowed", "more than 500 schemas within each other"];
        assert!(limits.iter().any(|limit| words.contains(limit)), "{name}: {words}");
    }
    // As deep as JSON and regular expressions come, and as long.
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
        let said = go(&grammars, source);
        println!("{name}: {:?}", said.map_err(|words| words.chars().take(120).collect::<String>()));
    }
}

/// The stack that a deep grammar may take is memory like any other: it comes out of the budget.
#[test]
fn a_deep_grammar_is_charged_for_its_stack() {
    let rules = |n: usize| {
        let line = |all: String, i: usize| all + &format!("a{i}: \"y\" a{} | \"z\"\n", i + 1);
        Source::Lark((0..n).fold("start: a0\n".to_owned(), line) + &format!("a{n}: \"x\"\n"))
    };
    let used = |levels: usize| {
        let grammars = grammars();
        go(&grammars, chain(1, |link| link)).unwrap();
        let before = grammars.usage().used;
        go(&grammars, rules(levels)).unwrap();
        grammars.usage().used - before
    };
    let (shallow, deep) = (used(4), used(400));
    assert!(shallow < 1 << 20, "{shallow}");
    assert!(deep > shallow + 300 * 4096, "{deep} for a hundred times the levels of {shallow}");
}
