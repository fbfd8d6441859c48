//! Compares this crate's ids with those of the reference libraries, on the vocabulary of a real model.
//!
//! Usage: `compare_ids FILE.json`, where the file was written by `tests/fixtures/reference.py`. Prints every difference up to
//! ten, the counts, and how fast encoding is. Full-size vocabularies are too big to commit, so this is run by hand.

use std::error::Error;
use std::time::Instant;

use plimsoll_text::{GgufVocab, Tokenizer};
use serde::Deserialize;

#[derive(Deserialize)]
struct File {
    vocab: Vocab,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Vocab {
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

#[derive(Deserialize)]
struct Case {
    text: String,
    parse_special: bool,
    ids: Vec<u32>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: compare_ids FILE.json")?;
    let file: File = serde_json::from_slice(&std::fs::read(path)?)?;
    let v = file.vocab;
    let vocab = GgufVocab {
        model: v.model,
        pre: v.pre,
        tokens: v.tokens,
        scores: v.scores,
        token_types: v.token_types,
        merges: v.merges,
        bos: v.bos,
        eos: v.eos,
        extra_eos: Vec::new(),
        unknown: v.unknown,
        add_bos: v.add_bos,
        add_eos: None,
        add_space_prefix: v.add_space_prefix,
        ..GgufVocab::default()
    };
    let start = Instant::now();
    let tokenizer = Tokenizer::from_gguf(&vocab)?;
    println!("{tokenizer:?}, loaded in {:?}, tables {} KiB", start.elapsed(), tokenizer.table_bytes() >> 10);
    compare(&tokenizer, &file.cases)?;
    time(&tokenizer, &file.cases)?;
    Ok(())
}

fn compare(tokenizer: &Tokenizer, cases: &[Case]) -> Result<(), Box<dyn Error>> {
    let (mut equal, mut ids, mut round_trips) = (0, 0, 0);
    let mut shown = 0;
    for case in cases {
        let ours = tokenizer.encode(&case.text, false, case.parse_special)?;
        ids += ours.len();
        round_trips += usize::from(tokenizer.decode(&ours, false) == case.text);
        if ours == case.ids {
            equal += 1;
        } else if shown < 10 {
            shown += 1;
            println!("{:?} (special: {})", case.text, case.parse_special);
            println!("  ours      {ours:?}\n  reference {:?}", case.ids);
        }
    }
    println!("{equal} of {} cases equal ({ids} ids); {round_trips} decode to their text", cases.len());
    Ok(())
}

fn time(tokenizer: &Tokenizer, cases: &[Case]) -> Result<(), Box<dyn Error>> {
    let prose: String = cases.iter().filter(|c| !c.parse_special).map(|c| c.text.as_str()).collect();
    let hostile = ["a", " ", "ab", "中", "\n", "🚀", "1"].map(|unit| unit.repeat((1 << 20) / unit.len()));
    for text in std::iter::once(prose).chain(hostile) {
        let start = Instant::now();
        let ids = tokenizer.encode(&text, false, true)?.len();
        let head: String = text.chars().take(2).collect();
        println!("{:?}... {} bytes, {ids} ids, {:?}", head, text.len(), start.elapsed());
    }
    Ok(())
}
