//! Texts from clients and files: bounded time, an error that names the limit, never a panic.

use std::time::{Duration, Instant};

use crate::common::{FOLDERS, GgufFixture, path, read, tokenizer};
use plimsoll_text::{GgufVocab, TextError, Tokenizer};
use proptest::prelude::*;

#[test]
#[ignore = "soak"]
fn a_text_without_words_takes_no_ages() {
    let spm: GgufFixture = read("spm.json");
    let tokenizers =
        [tokenizer("byte_level"), tokenizer("gpt2"), tokenizer("llama2"), Tokenizer::from_gguf(&spm.vocab()).unwrap()];
    for tokenizer in &tokenizers {
        for unit in ["a", " ", "ab", "\n", "中", "🚀", "e\u{301}", "'", "0", "\u{0}", "aA", " \n"] {
            let text = unit.repeat((1 << 20) / unit.len());
            let start = Instant::now();
            let ids = tokenizer.encode(&text, true, true).unwrap();
            // A quadratic algorithm would need hours for a million symbols.
            assert!(start.elapsed() < Duration::from_secs(30), "{unit:?}: {:?}", start.elapsed());
            assert!(!ids.is_empty());
        }
    }
}

#[test]
fn encoding_is_near_linear() {
    let tokenizer = tokenizer("llama2");
    let time = |bytes: usize| {
        let text = "abcab".repeat(bytes / 5);
        let runs = (0..3).map(|_| {
            let start = Instant::now();
            tokenizer.encode(&text, false, false).unwrap();
            start.elapsed()
        });
        runs.min().unwrap()
    };
    let (small, large) = (time(64 << 10), time(1 << 20));
    // Sixteen times the text; a quadratic algorithm would take 256 times as long.
    assert!(large < small * 100, "{small:?} for 64 KiB, {large:?} for 1 MiB");
}

#[test]
fn a_long_text_is_refused_by_name() {
    let tokenizer = tokenizer("byte_level").with_text_bytes_max(10);
    assert!(tokenizer.encode("0123456789", false, false).is_ok());
    let error = tokenizer.encode("0123456789a", false, false).unwrap_err();
    assert!(error.to_string().contains("11") && error.to_string().contains("10"), "{error}");
    assert!(tokenizer.encode_bytes_max(10) >= 40);
}

#[test]
fn any_text_encodes() {
    let all: Vec<Tokenizer> = FOLDERS.iter().map(|f| tokenizer(f)).collect();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    runner
        .run(&("(?s).{0,40}", any::<bool>()), |(text, special)| {
            for tokenizer in &all {
                prop_assert!(tokenizer.encode(&text, special, special).is_ok());
            }
            Ok(())
        })
        .unwrap();
}

fn vocab() -> GgufVocab {
    GgufVocab {
        model: "gpt2".to_owned(),
        pre: "gpt-2".to_owned(),
        tokens: ["a", "b", "ab"].map(str::to_owned).to_vec(),
        merges: vec!["a b".to_owned()],
        ..GgufVocab::default()
    }
}

#[test]
fn contradictory_vocabularies_are_refused() {
    assert_eq!(Tokenizer::from_gguf(&vocab()).unwrap().encode("abab", true, true).unwrap(), [2, 2]);
    type Change = fn(&mut GgufVocab);
    let bad: [(&str, Change); 10] = [
        ("model", |v| v.model = "rwkv".to_owned()),
        ("pre", |v| v.pre = "nonsense".to_owned()),
        ("no tokens", |v| v.tokens.clear()),
        ("types", |v| v.token_types = vec![1]),
        ("scores", |v| v.scores = vec![0.0; 9]),
        ("bos", |v| v.bos = Some(3)),
        ("fim", |v| v.fim.middle = Some(3)),
        ("eos", |v| v.extra_eos = vec![u32::MAX]),
        ("merge", |v| v.merges.push("ab".to_owned())),
        ("merge of unknowns", |v| v.merges.push("b b".to_owned())),
    ];
    for (name, change) in bad {
        let mut vocab = vocab();
        change(&mut vocab);
        assert!(Tokenizer::from_gguf(&vocab).is_err(), "{name}");
    }
    // Only encoders have a token around a text, and others a separator if they add it.
    let others = GgufVocab { cls: Some(3), sep: Some(3), charsmap: vec![255; 4], ..vocab() };
    assert!(Tokenizer::from_gguf(&others).is_ok());
    let error = Tokenizer::from_gguf(&GgufVocab { add_sep: Some(true), ..others }).unwrap_err().to_string();
    assert!(error.contains("special token 3 is not among the 3 tokens"), "{error}");
    let mut no_scores = vocab();
    no_scores.model = "llama".to_owned();
    assert!(matches!(Tokenizer::from_gguf(&no_scores), Err(TextError::BadTokenizer(_))));
}

/// A table has a place for every id below the largest: a fuzzer would find this first.
#[test]
fn a_short_file_stands_for_no_long_table() {
    let folder = std::env::temp_dir().join(format!("plimsoll-text-ids-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("tokenizer.json");
    let with_id = |id: u32| {
        let model = r#"{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}"#;
        std::fs::write(&file, format!(r#"{{"added_tokens":[{{"id":{id},"content":"x"}}],"model":{model}}}"#)).unwrap();
        Tokenizer::from_file(&file)
    };
    assert_eq!(with_id(60_000).unwrap().vocab_size(), 60_001);
    let words = with_id(16_000_000).unwrap_err().to_string();
    assert!(words.contains("token id 16000000; of 3 tokens the largest that can be loaded is 65560"), "{words}");
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Stages that would multiply a table or the stack are refused when the file is loaded.
#[test]
fn stages_that_multiply_are_refused() {
    let folder = std::env::temp_dir().join(format!("plimsoll-text-bombs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("tokenizer.json");
    let double = r#"{"type":"Replace","pattern":{"String":"a"},"content":"aa"}"#;
    let split = r#"{"type":"Split","pattern":{"String":"x"},"behavior":"Isolated","invert":false}"#;
    let list = |stage: &str, key: &str, count: usize| {
        format!(r#"{{"type":"Sequence","{key}":[{}]}}"#, vec![stage; count].join(","))
    };
    let load = |stages: String| {
        let model = r#"{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}"#;
        std::fs::write(&file, format!(r#"{{{stages},"model":{model}}}"#)).unwrap();
        Tokenizer::from_file(&file).map(|tokenizer| tokenizer.encode("aaaa", false, false).map(|ids| ids.len()))
    };
    assert_eq!(load(format!(r#""decoder":{}"#, list(double, "decoders", 3))).unwrap().unwrap(), 4);
    for (stages, words) in [
        (format!(r#""decoder":{}"#, list(double, "decoders", 31)), "more than 68 bytes of one token"),
        (format!(r#""decoder":{}"#, list(double, "decoders", 33)), "33 steps"),
        // Each split is applied within the one before: thousands overflowed the stack and ended the process.
        (format!(r#""pre_tokenizer":{}"#, list(split, "pretokenizers", 20_000)), "more than 16 patterns"),
    ] {
        let error = load(stages).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The library allocates as many bytes as the first number says, and reads outside a table that is too short.
#[test]
fn broken_tables_of_characters_are_refused() {
    let folder = std::env::temp_dir().join(format!("plimsoll-text-charsmap-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("tokenizer.json");
    let good = std::fs::read_to_string(path("unigram/tokenizer.json")).unwrap();
    for (bytes, base64, words) in [
        (vec![255; 4], "/////w==", "precompiled_charsmap says that its trie has 4294967295 bytes"),
        (vec![0; 4], "AAAAAA==", "precompiled_charsmap says that its trie has 0 bytes"),
        (vec![4, 0, 0, 0, 0, 0, 0, 0], "BAAAAAAAAAA=", "precompiled_charsmap leads to unit 255 of a trie of 1"),
        (vec![1; 3], "not base64", "precompiled_charsmap "),
    ] {
        let stage = format!(r#"{{"type":"Precompiled","precompiled_charsmap":"{base64}"}}"#);
        for stage in [format!(r#"{{"type":"Sequence","normalizers":[{{"type":"NFC"}},{stage}]}}"#), stage] {
            let mut json: serde_json::Value = serde_json::from_str(&good).unwrap();
            json["normalizer"] = serde_json::from_str(&stage).unwrap();
            std::fs::write(&file, json.to_string()).unwrap();
            let error = Tokenizer::from_file(&file).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let vocab = GgufVocab {
            model: "t5".to_owned(),
            tokens: ["<unk>", "<s>", "</s>", "▁a"].map(str::to_owned).to_vec(),
            scores: vec![0.0; 4],
            charsmap: bytes,
            ..GgufVocab::default()
        };
        let error = Tokenizer::from_gguf(&vocab).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn strange_scores_and_types_do_no_harm() {
    let mut vocab = vocab();
    vocab.model = "llama".to_owned();
    vocab.scores = vec![f32::NAN, f32::NEG_INFINITY, f32::INFINITY];
    vocab.token_types = vec![-7, i32::MAX, 1];
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap();
    assert_eq!(tokenizer.encode("abx", false, false).unwrap(), [2]);
}

#[test]
fn broken_files_are_errors() {
    let folder = std::env::temp_dir().join(format!("plimsoll-text-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("tokenizer.json");
    let good = std::fs::read_to_string(path("byte_level/tokenizer.json")).unwrap();
    let huge_id = good.replacen("\"id\":1200", "\"id\":4294967295", 1);
    assert_ne!(huge_id, good);
    let deep = "[".repeat(100_000);
    let broken =
        ["", "{}", "null", &good[..good.len() / 2], &huge_id, &deep, "{\"model\":{\"type\":\"BPE\",\"vocab\":{}}}"];
    for (index, content) in broken.iter().enumerate() {
        std::fs::write(&file, content).unwrap();
        assert!(Tokenizer::from_file(&file).is_err(), "{index}");
    }
    // A byte changed anywhere is an error or another tokenizer, but no panic.
    for at in (0..good.len()).step_by(good.len() / 60) {
        let mut bytes = good.clone().into_bytes();
        bytes[at] = b'}';
        std::fs::write(&file, bytes).unwrap();
        let _ = Tokenizer::from_file(&file).map(|t| t.encode("some text", true, true));
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let error = Tokenizer::from_file(&file).unwrap_err();
    assert!(matches!(error, TextError::Io { .. }), "{error}");
}
