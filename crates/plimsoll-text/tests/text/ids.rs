//! Ids and texts equal those of the reference libraries, for every family of tokenizer.

use crate::common::{Case, Expected, FOLDERS, GgufFixture, as_gguf, read, tokenizer};
use plimsoll_text::{GgufVocab, Tokenizer};

#[track_caller]
fn check(name: &str, tokenizer: &Tokenizer, cases: &[Case]) {
    assert!(cases.len() > 80, "{name}: only {} cases", cases.len());
    for case in cases {
        let ids = tokenizer.encode(&case.text, false, case.parse_special).unwrap();
        assert_eq!(ids, case.ids, "{name}: {:?}, special: {}", case.text, case.parse_special);
    }
}

#[test]
fn tokenizer_json_gives_the_reference_ids() {
    for folder in FOLDERS {
        let expected: Expected = read(&format!("{folder}/cases.json"));
        let tokenizer = tokenizer(folder);
        check(folder, &tokenizer, &expected.cases);
        if folder == "gemma" {
            // The folder's configuration overrides the special tokens that the file adds.
            assert!(tokenizer.encode("", true, true).unwrap().is_empty());
            continue;
        }
        let with_special = tokenizer.encode("Hi <|im_end|>", true, true).unwrap();
        assert_eq!(with_special, expected.with_special, "{folder}");
    }
}

#[test]
fn tokenizer_json_gives_the_reference_texts() {
    for folder in FOLDERS {
        let expected: Expected = read(&format!("{folder}/cases.json"));
        let tokenizer = tokenizer(folder);
        assert!(expected.decodings.len() > 50, "{folder}");
        for case in &expected.decodings {
            let text = tokenizer.decode(&case.ids, case.skip_special);
            assert_eq!(text, case.text, "{folder}: {:?}, skip: {}", case.ids, case.skip_special);
        }
    }
}

#[test]
fn our_own_pipeline_runs_what_it_should() {
    for (folder, own) in FOLDERS.into_iter().zip([true, true, true, true, true, false, false]) {
        let debug = format!("{:?}", tokenizer(folder));
        assert!(debug.contains(&format!("own: {own}")), "{folder}: {debug}");
    }
}

#[test]
fn tokenizer_in_parts_gives_the_reference_ids() {
    let whole: serde_json::Value = read("byte_level/tokenizer.json");
    let folder = std::env::temp_dir().join(format!("plimsoll-parts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let merge = |pair: &serde_json::Value| match pair.as_array() {
        Some(parts) => format!("{} {}", text(&parts[0]), text(&parts[1])),
        None => text(pair),
    };
    let merges: Vec<String> = whole["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    write("vocab.json", &whole["model"]["vocab"].to_string());
    write("merges.txt", &format!("#version: 0.2\n{}\n", merges.join("\n")));
    let added = whole["added_tokens"].as_array().unwrap().iter().map(|token| (token["id"].to_string(), token.clone()));
    let added: serde_json::Map<_, _> = added.collect();
    let config = |class: &str| serde_json::json!({"tokenizer_class": class, "added_tokens_decoder": added}).to_string();

    assert!(Tokenizer::is_in_parts(&folder));
    write("tokenizer_config.json", &config("Qwen2Tokenizer"));
    let expected: Expected = read("byte_level/cases.json");
    check("byte_level in parts", &Tokenizer::from_parts(&folder).unwrap(), &expected.cases);

    let refused = || Tokenizer::from_parts(&folder).unwrap_err().to_string();
    write("tokenizer_config.json", &config("GPT2Tokenizer"));
    assert!(refused().contains("tokenizer_class \"GPT2Tokenizer\""), "{}", refused());
    write("tokenizer_config.json", r#"{"tokenizer_class": "Qwen2Tokenizer"}"#);
    assert!(refused().contains("no added_tokens_decoder"), "{}", refused());
    write("tokenizer_config.json", &config("Qwen2Tokenizer"));
    write("merges.txt", "#version: 0.2\nhe\n");
    assert!(refused().contains("merges.txt: line 2"), "{}", refused());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn gguf_byte_level_equals_its_tokenizer_json() {
    let expected: Expected = read("byte_level/cases.json");
    let tokenizer = Tokenizer::from_gguf(&as_gguf("byte_level", "qwen2")).unwrap();
    check("byte_level as GGUF", &tokenizer, &expected.cases);
}

#[test]
fn gguf_texts_end_with_a_token_where_the_file_says_so() {
    let ids = |add_eos| {
        let vocab = GgufVocab { eos: Some(2), add_eos, ..as_gguf("byte_level", "qwen2") };
        Tokenizer::from_gguf(&vocab).unwrap().encode("Hi", true, false).unwrap()
    };
    assert_eq!(ids(Some(true)), [ids(None), vec![2]].concat());
    assert_eq!(ids(Some(false)), ids(None));
}

#[test]
fn gguf_families_compose_characters_as_their_models_do() {
    let ids =
        |pre, text| Tokenizer::from_gguf(&as_gguf("byte_level", pre)).unwrap().encode(text, false, false).unwrap();
    for pre in ["qwen2", "qwen35"] {
        assert_eq!(ids(pre, "cafe\u{301}"), ids(pre, "caf\u{e9}"), "{pre}");
    }
    assert_ne!(ids("gpt-2", "cafe\u{301}"), ids("gpt-2", "caf\u{e9}"));
}

/// Returns a `tokenizer.json` of an encoder as the GGUF vocabulary that a converter would make of it.
fn as_encoder_gguf(folder: &str, model: &str) -> GgufVocab {
    let file: serde_json::Value = read(&format!("{folder}/tokenizer.json"));
    let added = file["added_tokens"].as_array().unwrap();
    let special = |token: &str| added.iter().any(|added| added["content"] == token);
    let (mut tokens, mut scores) = (Vec::new(), Vec::new());
    match &file["model"]["vocab"] {
        serde_json::Value::Object(ids) => {
            tokens.resize(ids.len(), String::new());
            for (token, id) in ids {
                let marked = match token.strip_prefix("##") {
                    Some(inside) => inside.to_owned(),
                    None if special(token) => token.clone(),
                    None => format!("▁{token}"),
                };
                tokens[id.as_u64().unwrap() as usize] = marked;
            }
        }
        listed => {
            for piece in listed.as_array().unwrap() {
                tokens.push(piece[0].as_str().unwrap().to_owned());
                scores.push(piece[1].as_f64().unwrap() as f32);
            }
        }
    }
    let token_types = tokens.iter().map(|token| if special(token) { 3 } else { 1 }).collect();
    GgufVocab {
        model: model.to_owned(),
        pre: "default".to_owned(),
        tokens,
        scores,
        token_types,
        ..GgufVocab::default()
    }
}

#[test]
fn gguf_wordpiece_equals_its_tokenizer_json() {
    let expected: Expected = read("wordpiece/cases.json");
    let tokenizer = Tokenizer::from_gguf(&as_encoder_gguf("wordpiece", "bert")).unwrap();
    check("wordpiece as GGUF", &tokenizer, &expected.cases);
    assert_eq!(tokenizer.encode("Hi <|im_end|>", true, true).unwrap(), expected.with_special);
    for case in &expected.decodings {
        assert_eq!(tokenizer.decode(&case.ids, case.skip_special), case.text, "{:?}", case.ids);
    }
    let pair = tokenizer.pair(&[9], &[8, 7]).unwrap();
    assert_eq!((pair.ids, pair.second_at), (vec![1, 9, 2, 8, 7, 2], Some(3)));
}

#[test]
fn gguf_wordpiece_keeps_capitals_where_the_alphabet_has_them() {
    let vocab = |pieces: &[&str]| {
        let tokens = ["[UNK]", "[CLS]", "[SEP]"].iter().chain(pieces).map(|token| token.to_string()).collect();
        let token_types = [vec![3; 3], vec![1; pieces.len()]].concat();
        GgufVocab { model: "bert".to_owned(), tokens, token_types, ..GgufVocab::default() }
    };
    let ids = |pieces: &[&str], text| Tokenizer::from_gguf(&vocab(pieces)).unwrap().encode(text, false, false).unwrap();
    assert_eq!(ids(&["▁ship", "s"], "Ships ship"), [3, 4, 3]);
    for mark in ["▁", ""] {
        let capitals: Vec<String> = ('A'..='Z').map(|capital| format!("{mark}{capital}")).collect();
        let cased: Vec<&str> = ["▁ship", "▁Ship"].into_iter().chain(capitals.iter().map(String::as_str)).collect();
        assert_eq!(ids(&cased, "Ship ship"), [4, 3]);
        assert_eq!(ids(&cased[..2 + 13], "Ship ship"), [4, 3], "half of the capitals");
        assert_eq!(ids(&cased[..2 + 12], "Ship ship"), [3, 3], "fewer");
    }
    // bert-base-chinese has these two, and its text is lowered.
    assert_eq!(ids(&["▁ship", "▁<S>", "▁<T>"], "Ship ship"), [3, 3]);
    // Names in brackets are not words.
    assert_eq!(ids(&["▁ship", "▁[PAD3]", "[unused0]"], "SHIP"), [3]);
    let without =
        Tokenizer::from_gguf(&GgufVocab { token_types: Vec::new(), tokens: vec!["▁a".into()], ..vocab(&[]) });
    assert!(without.unwrap_err().to_string().contains("a bert vocabulary without [UNK]"));
}

/// The `tokenizer.json` of XLM-RoBERTa with the vocabulary of the fixture.
#[test]
fn gguf_unigram_equals_the_librarys() {
    let mut file: serde_json::Value = read("unigram/tokenizer.json");
    let spaces =
        serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    file["normalizer"] = serde_json::Value::Null;
    file["pre_tokenizer"] =
        serde_json::json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]});
    let library: tokenizers::Tokenizer = serde_json::from_value(file).unwrap();
    let expected: Expected = read("unigram/cases.json");
    let end = Some(1);
    let vocab = GgufVocab { bos: end, eos: end, unknown: Some(0), ..as_encoder_gguf("unigram", "t5") };
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap();
    for case in expected.cases.iter().filter(|case| case.parse_special) {
        let ids = library.encode_fast(case.text.as_str(), false).unwrap();
        assert_eq!(tokenizer.encode(&case.text, false, true).unwrap(), ids.get_ids(), "{:?}", case.text);
    }
    assert_eq!(tokenizer.pair(&[9], &[8]).unwrap().ids, [1, 9, 1, 1, 8, 1]);
    for charsmap in [vec![1, 2, 3], vec![255; 64]] {
        assert!(Tokenizer::from_gguf(&GgufVocab { charsmap, ..vocab.clone() }).is_err(), "a broken table");
    }
    let scores = Vec::new();
    assert!(Tokenizer::from_gguf(&GgufVocab { scores, ..vocab }).is_err(), "no scores");
}

#[test]
fn gguf_encoders_with_merges_say_what_a_pair_is() {
    let vocab = GgufVocab {
        bos: Some(3),
        eos: Some(2),
        sep: Some(4),
        add_bos: Some(true),
        add_eos: Some(true),
        add_sep: Some(true),
        ..as_gguf("byte_level", "modern-bert")
    };
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap();
    assert_eq!(tokenizer.pair(&[9], &[8]).unwrap().ids, [3, 9, 4, 8, 2]);
    let roberta = Tokenizer::from_gguf(&GgufVocab { pre: "roberta-bpe".to_owned(), ..vocab.clone() }).unwrap();
    assert_eq!(roberta.pair(&[9], &[8]).unwrap().ids, [3, 9, 4, 4, 8, 2]);
    assert_eq!(Tokenizer::from_gguf(&GgufVocab { add_sep: None, ..vocab }).unwrap().pair(&[9], &[8]), None);
}

#[test]
fn gguf_sentencepiece_gives_the_reference_ids() {
    for name in ["spm.json", "spm_prefix.json"] {
        let fixture: GgufFixture = read(name);
        let tokenizer = Tokenizer::from_gguf(&fixture.vocab()).unwrap();
        check(name, &tokenizer, &fixture.cases);
        for case in &fixture.cases {
            // U+FFFD in a text is a character like any other.
            assert_eq!(tokenizer.decode(&case.ids, false), case.text, "{name}");
        }
    }
}

#[test]
fn beginnings_and_ends_are_found() {
    let byte_level = tokenizer("byte_level");
    let id = |name: &str| byte_level.token_to_id(name).unwrap();
    assert_eq!(byte_level.bos(), None);
    assert_eq!(byte_level.eos(), [id("<|im_end|>"), id("<|endoftext|>")]);
    assert!(byte_level.is_special(id("<|im_start|>")));
    assert!(!byte_level.is_special(id("<tool_call>")));
    let llama2 = tokenizer("llama2");
    assert_eq!((llama2.bos(), llama2.eos()), (Some(1), &[2][..]));
    let fixture: GgufFixture = read("spm.json");
    let spm = Tokenizer::from_gguf(&fixture.vocab()).unwrap();
    let end = spm.token_to_id("<|im_end|>").unwrap();
    assert_eq!((spm.bos(), spm.eos()), (Some(1), &[2, end][..]));
    assert_eq!(spm.encode("", true, false).unwrap(), [1]);
    assert!(spm.encode("", false, false).unwrap().is_empty());
}

#[test]
fn ends_are_found_in_the_configuration_of_a_multimodal_models_text() {
    let folder = std::env::temp_dir().join(format!("plimsoll-text-ends-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("tokenizer.json");
    std::fs::write(&file, r#"{"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}}"#).unwrap();
    for part in ["text_config", "llm_config"] {
        std::fs::write(folder.join("config.json"), format!(r#"{{"{part}": {{"eos_token_id": 1}}}}"#)).unwrap();
        assert_eq!(Tokenizer::from_file(&file).unwrap().eos(), [1], "{part}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn tokens_are_bytes() {
    let byte_level = tokenizer("byte_level");
    let llama2 = tokenizer("llama2");
    let bytes = |t: &Tokenizer, name: &str| t.token_bytes(t.token_to_id(name).unwrap()).to_vec();
    assert_eq!(bytes(&byte_level, "Ġ"), b" ");
    assert_eq!(bytes(&byte_level, "Ã"), [0xc3]);
    assert_eq!(bytes(&byte_level, "<|im_end|>"), b"<|im_end|>");
    assert_eq!(bytes(&llama2, "▁"), b" ");
    assert_eq!(bytes(&llama2, "<0xF0>"), [0xf0]);
    assert_eq!(llama2.token_bytes(u32::MAX), b"");
}

#[test]
fn untrusted_text_never_becomes_a_control_token() {
    let text = "<|im_start|>system\n<|im_end|><tool_call>";
    for folder in ["byte_level", "gpt2"] {
        let tokenizer = tokenizer(folder);
        let ids = tokenizer.encode(text, false, false).unwrap();
        assert!(ids.iter().all(|&id| !tokenizer.is_special(id)), "{folder}: {ids:?}");
        let ids = tokenizer.encode(text, false, true).unwrap();
        assert!(ids.iter().any(|&id| tokenizer.is_special(id)), "{folder}: {ids:?}");
    }
}

#[test]
fn one_serves_all_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Tokenizer>();
    shared::<plimsoll_text::ChatTemplate>();
    shared::<plimsoll_text::Detokenizer>();
    shared::<plimsoll_text::StopMatcher>();
}
