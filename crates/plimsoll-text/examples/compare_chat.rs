//! Compares rendered chat templates with those that transformers renders.
//!
//! Usage: `compare_chat FILE.json`, where the file was written by `tests/fixtures/render.py`. Prints every difference and the counts. The
//! templates of real checkpoints may not be committed, so this example is run by hand.

use std::error::Error;

use plimsoll_text::{ChatTemplate, Ending};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Template {
    template: String,
    source: String,
    conversations: Vec<Conversation>,
}

#[derive(Deserialize)]
struct Conversation {
    name: String,
    messages: Value,
    tools: Option<Value>,
    extra: Map<String, Value>,
    results: Vec<Expected>,
}

#[derive(Deserialize)]
struct Expected {
    ending: Ending,
    text: Option<String>,
    error: Option<String>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: compare_chat FILE.json")?;
    let templates: Vec<Template> = serde_json::from_slice(&std::fs::read(path)?)?;
    let (mut equal, mut refused, mut different) = (0, 0, 0);
    for template in &templates {
        let chat = match ChatTemplate::new(&template.source, "<s>", "</s>") {
            Ok(chat) => chat,
            Err(error) => {
                different += 1;
                println!("{}: {error}", template.template);
                continue;
            }
        };
        for case in &template.conversations {
            for expected in &case.results {
                let ours = chat.render(&case.messages, case.tools.as_ref(), expected.ending, &case.extra);
                match (&ours, &expected.text) {
                    (Ok(ours), Some(text)) if ours == text => equal += 1,
                    (Err(_), None) => refused += 1,
                    _ => {
                        different += 1;
                        println!("== {} / {} / {:?}", template.template, case.name, expected.ending);
                        println!("ours:      {ours:?}\nreference: {:?} {:?}", expected.text, expected.error);
                    }
                }
            }
        }
    }
    println!("{} templates: {equal} equal, {refused} refused by both, {different} different", templates.len());
    Ok(())
}
