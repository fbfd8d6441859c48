//! Text that is streamed token by token equals the text decoded at once, for any sequence of ids.

use crate::common::{FOLDERS, GgufFixture, read, tokenizer};
use plimsoll_text::{Detokenizer, Tokenizer};
use proptest::prelude::*;

fn all() -> Vec<(String, Tokenizer)> {
    let mut out: Vec<_> = FOLDERS.iter().map(|f| ((*f).to_owned(), tokenizer(f))).collect();
    let fixture: GgufFixture = read("spm_prefix.json");
    out.push(("spm_prefix".to_owned(), Tokenizer::from_gguf(&fixture.vocab()).unwrap()));
    out
}

fn stream(tokenizer: &Tokenizer, mut detokenizer: Detokenizer, ids: &[u32]) -> String {
    let mut text = String::new();
    for &id in ids {
        detokenizer.push(tokenizer, id, &mut text);
    }
    detokenizer.finish(&mut text);
    text
}

/// Returns the bytes of the tokens, without streaming.
fn bytes(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<u8> {
    ids.iter()
        .filter(|&&id| !(skip_special && tokenizer.is_special(id)))
        .flat_map(|&id| tokenizer.token_bytes(id).to_vec())
        .collect()
}

#[test]
fn streams_equal_wholes() {
    let tokenizers = all();
    let ids = proptest::collection::vec(prop_oneof![0u32..300, 0u32..1600], 0..40);
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    runner
        .run(&(ids, any::<bool>()), |(ids, skip)| {
            for (name, tokenizer) in &tokenizers {
                let whole = tokenizer.decode(&ids, skip);
                prop_assert_eq!(&stream(tokenizer, Detokenizer::new(skip), &ids), &whole, "{}", name);
                // Continued text is the bytes of its tokens; text at the beginning differs from it only at its start.
                let plain = String::from_utf8_lossy(&bytes(tokenizer, &ids, skip)).into_owned();
                let continued = stream(tokenizer, Detokenizer::continuing(skip), &ids);
                prop_assert_eq!(&continued, &plain, "{}", name);
                if ["byte_level", "gpt2"].contains(&name.as_str()) {
                    prop_assert_eq!(&whole, &plain, "{}", name);
                }
                if ["llama2", "spm_prefix"].contains(&name.as_str()) {
                    prop_assert_eq!(whole.as_str(), plain.strip_prefix(' ').unwrap_or(&plain), "{}", name);
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn text_survives_the_round_trip() {
    let (gpt2, llama2) = (tokenizer("gpt2"), tokenizer("llama2"));
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    runner
        .run(&"(?s).{0,60}", |text| {
            for tokenizer in [&gpt2, &llama2] {
                let ids = tokenizer.encode(&text, false, false).unwrap();
                prop_assert_eq!(tokenizer.decode(&ids, false), text.clone());
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_split_character_waits_for_its_end() {
    let tokenizer = tokenizer("byte_level");
    let ids: Vec<u32> = "ð Ł ļ Ģ".split(' ').map(|t| tokenizer.token_to_id(t).unwrap()).collect();
    let mut detokenizer = Detokenizer::new(false);
    let mut text = String::new();
    for &id in &ids[..3] {
        detokenizer.push(&tokenizer, id, &mut text);
        assert_eq!(text, "");
    }
    detokenizer.push(&tokenizer, ids[3], &mut text);
    assert_eq!(text, "🚀");
    assert_eq!(tokenizer.decode(&ids[..3], false), "\u{fffd}");
    assert_eq!(tokenizer.decode(&[ids[1], ids[1]], false), "\u{fffd}\u{fffd}");
}
