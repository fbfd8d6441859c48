//! Expressions in templates give what Python gives. `fixtures/expressions.py` lists them, `fixtures/make.py` asks the reference.

use crate::common::read;
use plimsoll_text::{ChatTemplate, Ending};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Expressions {
    values: Map<String, Value>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    expression: String,
    text: Option<String>,
}

/// Expressions that the reference evaluates and the library refuses. The client sees the template's error.
const UNKNOWN: &[&str] = &[
    "range is callable",
    "'%r' | format('a')",
    "'a b&c/é' | urlencode",
    "'a b c' | wordcount",
    "'%s' % 'a'",
    "'{!r}'.format('a')",
    "'a  b'.rsplit()",
    "'hello'.index('l')",
    "'Abc'.swapcase()",
    "'5'.zfill(3)",
    "'a'.ljust(3) ~ '|'",
    "'a'.rjust(3)",
    "'a'.center(3)",
    "'abc'.encode()",
    "words.index('a')",
];

/// Expressions that the reference refuses, and the library does not.
const LENIENT: &[&str] = &["5 | indent", "1 | bool", "'abc'.split('')", "','.join([1])"];

/// Expressions that give another text. No known template has one of them.
const DIFFERENT: &[&str] = &[
    "{1: 2, none: 3, true: 4, 1.5: 5} | tojson",
    "[1,1.0,true] | unique | list",
    "'<a>\"\\'' | escape",
    "{'a': 1} | attr('a')",
    "\"they're bill's\".title()",
];

#[test]
fn expressions_equal_the_reference() {
    let Expressions { values, cases } = read("expressions.json");
    assert!(cases.len() > 350);
    let (mut unknown, mut lenient, mut different) = (Vec::new(), Vec::new(), Vec::new());
    for Case { expression, text } in cases {
        let source = format!("{{{{ {expression} }}}}");
        let ours = ChatTemplate::new(&source, "", "").and_then(|t| t.render(&json!([]), None, Ending::Closed, &values));
        if ours.as_ref().ok() != text.as_ref() {
            eprintln!("{expression}\n  ours {ours:?}\n  reference {text:?}");
            match (ours, text) {
                (Err(_), _) => unknown.push(expression),
                (Ok(_), None) => lenient.push(expression),
                (Ok(_), Some(_)) => different.push(expression),
            }
        }
    }
    assert_eq!(unknown, UNKNOWN);
    assert_eq!(lenient, LENIENT);
    assert_eq!(different, DIFFERENT);
}
