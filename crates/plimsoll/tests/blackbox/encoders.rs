//! Embeddings, reranking and scores from outside: the real MiniLM through the official `openai` client, a cross-encoder, a
//! decoder with pooling.

use std::path::Path;

use serde_json::{Value, json};

use crate::clients::OPENAI;
use crate::product::{Server, eventually, fixture, plimsoll, repository, run};
use crate::python::satisfies;

/// The reference values of a fixture, computed by transformers.
fn reference(model: &str) -> Value {
    let file = fixture(model).join("reference.json");
    serde_json::from_slice(&std::fs::read(file).expect("the fixture is there")).expect("it is JSON")
}

#[test]
#[ignore = "external"]
fn the_openai_client_gets_the_embeddings_that_transformers_makes() {
    run(&["pull", "minilm"]).good();
    let words = run(&["plan", "minilm"]).good();
    assert!(words.contains("an encoder keeps nothing"), "{words}");
    let server = Server::try_start(plimsoll(["serve", "minilm", "--port", "0", "--max-inputs", "1024"]))
        .unwrap_or_else(|words| panic!("{words}"));
    let reference = repository().join("tests/fixtures/minilm_reference.json");
    satisfies(OPENAI, "embeddings_client.py", &server, &[reference]);
    let memory = server.memory();
    let rows = memory["components"].as_array().unwrap_or_else(|| panic!("{memory}"));
    for row in rows {
        let bytes = |of: &str| row[of].as_u64().unwrap_or_else(|| panic!("{row}"));
        assert!(bytes("committed_bytes") <= bytes("planned_bytes"), "I2: {row}");
    }
    eventually("everything is given back", || {
        server.memory()["pools"]["host_bytes"]["used"] == 0 && server.memory()["pools"]["http_bytes"]["used"] == 0
    });
}

#[test]
fn a_cross_encoder_scores_and_reranks() {
    let reference = reference("bert-cross");
    let pairs = reference["pairs"].as_array().unwrap();
    let server = Server::start_model(&fixture("bert-cross"), &[]);
    let expected = |pair: &Value| 1.0 / (1.0 + (-pair["logit"].as_f64().unwrap()).exp());
    let side = |name: &str| pairs.iter().map(|pair| pair[name].clone()).collect::<Vec<_>>();
    let answer = server.ask("/v1/score", &json!({"text_1": side("a"), "text_2": side("b")}));
    let tokens: usize = pairs.iter().map(|pair| pair["ids"].as_array().unwrap().len()).sum();
    assert_eq!(answer["usage"]["prompt_tokens"], json!(tokens));
    for (item, pair) in answer["data"].as_array().unwrap().iter().zip(pairs) {
        let off = (item["score"].as_f64().unwrap() - expected(pair)).abs();
        assert!(off < 1e-5, "{item}: off by {off}");
    }
    // The first two share their query; the first document answers it better.
    let documents = [&pairs[1]["b"], &pairs[0]["b"]];
    let answer = server.ask("/v1/rerank", &json!({"query": pairs[0]["a"], "documents": documents}));
    let order: Vec<u64> = answer["results"].as_array().unwrap().iter().map(|r| r["index"].as_u64().unwrap()).collect();
    assert_eq!(order, [1, 0]);
    assert!((answer["results"][0]["relevance_score"].as_f64().unwrap() - expected(&pairs[0])).abs() < 1e-5);
    // A document that is too long is cut on request: to the model's limit, or to a number of document tokens.
    let (query, document) = (&pairs[0]["a"], pairs[0]["b"].as_str().unwrap());
    let long = vec![document; 60].join(" ");
    let score = |more: Value| {
        let mut asked = json!({"query": query, "documents": [long]});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/rerank", &asked)
    };
    assert_eq!(score(json!({})).status, 400);
    let whole = score(json!({"truncate_prompt_tokens": -1})).json();
    assert_eq!(whole["usage"]["prompt_tokens"], 96, "all of its positions: {whole}");
    let own = server.ask("/tokenize", &json!({"prompt": document, "add_special_tokens": false}))["count"].clone();
    let brief = score(json!({"max_tokens_per_doc": own})).json();
    assert!((brief["results"][0]["relevance_score"].as_f64().unwrap() - expected(&pairs[0])).abs() < 1e-5, "{brief}");
    assert_eq!(brief["usage"]["prompt_tokens"], json!(pairs[0]["ids"].as_array().unwrap().len()));
    let refused = server.post("/v1/embeddings", &json!({"input": "a"}));
    assert!(refused.status == 400 && refused.json()["error"]["message"].as_str().unwrap().contains("/v1/rerank"));
}

#[test]
fn a_decoder_is_pooled_when_it_is_told_how() {
    let file = repository().join("tests/fixtures/pooling_reference.json");
    let reference: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let prompts = reference["prompts"].as_array().unwrap();
    let flags = ["--max-total-token-num", "4096", "--dtype", "f32", "--kv-dtype", "f32", "--batch-max-tokens", "64"];
    for pooling in ["last", "mean"] {
        let server = Server::start_model(&fixture("qwen3"), &[&flags[..], &["--pooling", pooling]].concat());
        let ids: Vec<&Value> = prompts.iter().map(|prompt| &prompt["ids"]).collect();
        let answer = server.ask("/v1/embeddings", &json!({"input": ids}));
        for (item, prompt) in answer["data"].as_array().unwrap().iter().zip(prompts) {
            let floats =
                |value: &Value| -> Vec<f64> { value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect() };
            let (found, raw) = (floats(&item["embedding"]), floats(&prompt[pooling]));
            let length = raw.iter().map(|x| x * x).sum::<f64>().sqrt();
            let off = found.iter().zip(&raw).map(|(x, y)| (x - y / length).abs()).fold(0.0, f64::max);
            assert!(off < 1e-5, "{pooling}: off by {off}");
        }
        // The model still writes text, and reranks by the cosine of embeddings.
        server.ask("/v1/completions", &json!({"prompt": "A ship", "max_tokens": 4}));
        let ranked = server.ask("/v1/rerank", &json!({"query": "A ship", "documents": ["water", "A ship"]}));
        assert_eq!(ranked["results"][0]["index"], json!(1));
    }
    let plain = Server::start_model(&fixture("qwen3"), &flags);
    let refused = plain.post("/v1/embeddings", &json!({"input": "a"}));
    assert!(refused.status == 400 && refused.json()["error"]["message"].as_str().unwrap().contains("--pooling"));
}

/// The three published formats of Qwen3-Reranker: all score as transformers does.
#[test]
fn a_reranker_that_answers_yes_or_no_scores_the_same_in_each_of_its_forms() {
    let flags = ["--max-total-token-num", "4096", "--dtype", "f32", "--kv-dtype", "f32"];
    let reference = reference("rerank-qwen3");
    let pairs = reference["pairs"].as_array().unwrap();
    for (model, more) in [
        ("rerank-qwen3-gguf", &[][..]),
        ("rerank-qwen3-old", &["--pooling", "rank"]),
        ("rerank-qwen3", &["--pooling", "rank"]),
    ] {
        let server = Server::start_model(&fixture(model), &[&flags[..], more].concat());
        let side = |name: &str| pairs.iter().map(|pair| pair[name].clone()).collect::<Vec<_>>();
        let answer = server.ask("/v1/score", &json!({"text_1": side("a"), "text_2": side("b")}));
        let tokens: usize = pairs.iter().map(|pair| pair["ids"].as_array().unwrap().len()).sum();
        assert_eq!(answer["usage"]["prompt_tokens"], json!(tokens), "{model}");
        for (item, pair) in answer["data"].as_array().unwrap().iter().zip(pairs) {
            let off = (item["score"].as_f64().unwrap() - pair["score"].as_f64().unwrap()).abs();
            assert!(off < 1e-5, "{model}: {item}: off by {off}");
        }
        // The first two share their query. A document is cut, and special tokens in it are text.
        let documents = json!([pairs[1]["b"], pairs[0]["b"]]);
        let ask = |more: Value| {
            let mut asked = json!({"query": pairs[0]["a"], "documents": documents});
            asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            server.ask("/v1/rerank", &asked)
        };
        assert_eq!(ask(json!({}))["results"][0]["index"], json!(1), "{model}");
        let cut = ask(json!({"max_tokens_per_doc": 1}))["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!(cut < ask(json!({}))["usage"]["prompt_tokens"].as_u64().unwrap(), "{model}");
        let count = |text: &str| {
            let answer = server.ask("/v1/rerank", &json!({"query": "a", "documents": [text]}));
            answer["usage"]["prompt_tokens"].as_u64().unwrap()
        };
        assert!(count("<|im_end|>") > count("a") + 3, "{model}");
        let refused = server.post("/v1/embeddings", &json!({"input": "a"}));
        assert!(refused.status == 400 && refused.json()["error"]["message"].as_str().unwrap().contains("/v1/rerank"));
        let written = server.post("/v1/completions", &json!({"prompt": "A ship", "max_tokens": 2}));
        assert_eq!(server.get("/v1/status").json()["generates"], json!(written.status == 200), "{model}");
        match model {
            "rerank-qwen3-gguf" => {
                assert_eq!(written.status, 400);
                let said = written.json()["error"]["message"].as_str().unwrap().to_owned();
                assert!(said.contains("scores texts only"), "{said}");
                assert_eq!(server.get("/v1/models").json()["data"][0]["output_modalities"], json!(["scores"]));
            }
            _ => assert_eq!(written.status, 200, "{model}"),
        }
    }
}

/// Writes the fixture `qwen3` in the layout of Qwen3-Embedding: no `model.` before the tensors' names, an end token that the
/// tokenizer's post-processor appends, the last position pooled and normalized as `modules.json` says.
fn as_qwen3_embedding(to: &Path) {
    let from = fixture("qwen3");
    for name in ["config.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let weights = std::fs::read(from.join("model.safetensors")).unwrap();
    let (len, rest) = weights.split_first_chunk::<8>().unwrap();
    let (head, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let head = String::from_utf8(head.to_vec()).unwrap().replace("\"model.", "\"");
    let file = [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), data].concat();
    std::fs::write(to.join("model.safetensors"), file).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(from.join("tokenizer.json")).unwrap()).unwrap();
    let end = json!({"id": "<|endoftext|>", "type_id": 0});
    let template = json!({
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": end}],
        "pair": [],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [381], "tokens": ["<|endoftext|>"]}}
    });
    tokenizer["post_processor"] =
        json!({"type": "Sequence", "processors": [tokenizer["post_processor"].clone(), template]});
    std::fs::write(to.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let module = |kind: &str, path: &str| json!({"type": format!("sentence_transformers.models.{kind}"), "path": path});
    let modules =
        json!([module("Transformer", ""), module("Pooling", "1_Pooling"), module("Normalize", "2_Normalize")]);
    std::fs::write(to.join("modules.json"), modules.to_string()).unwrap();
    std::fs::create_dir(to.join("1_Pooling")).unwrap();
    let pooling = json!({"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true});
    std::fs::write(to.join("1_Pooling/config.json"), pooling.to_string()).unwrap();
}

#[test]
fn files_like_qwen3_embedding_need_no_flag() {
    let folder = std::env::temp_dir().join(format!("plimsoll-qwen3-embedding-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    as_qwen3_embedding(&folder);
    let flags = ["--max-total-token-num", "4096"];
    let server = Server::start_model(&folder, &flags);
    let plain = Server::start_model(&fixture("qwen3"), &[&flags[..], &["--pooling", "last"]].concat());
    let text = "Nobody on the quay can see how much water is left";
    let answer = server.ask("/v1/embeddings", &json!({"input": text}));
    let tokens = plain.ask("/tokenize", &json!({"prompt": text}))["tokens"].as_array().unwrap().clone();
    let with_end: Vec<Value> = tokens.iter().cloned().chain([json!(381)]).collect();
    assert_eq!(answer["usage"]["prompt_tokens"], json!(with_end.len()), "the end token is appended");
    let expected = plain.ask("/v1/embeddings", &json!({"input": with_end}));
    assert_eq!(answer["data"], expected["data"]);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Features of single encoder families: dense layers, and a classifier of the mean.
#[test]
fn dense_layers_make_embeddings_and_a_modernbert_scores() {
    let server = Server::start_model(&fixture("embeddinggemma"), &[]);
    for text in reference("embeddinggemma")["texts"].as_array().unwrap() {
        let expected: Vec<f64> = text["dense"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        let length = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
        let answer = server.ask("/v1/embeddings", &json!({"input": text["text"]}));
        let found = answer["data"][0]["embedding"].as_array().unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found.as_f64().unwrap() - expected / length).abs() < 1e-5,
                "{found} instead of {expected} / {length}"
            );
        }
    }
    let reference = reference("bert-modern-mean");
    let server = Server::start_model(&fixture("bert-modern-mean"), &[]);
    for pair in reference["pairs"].as_array().unwrap() {
        let answer = server.ask("/v1/score", &json!({"text_1": pair["a"], "text_2": pair["b"]}));
        let expected = 1.0 / (1.0 + (-pair["logit"].as_f64().unwrap()).exp());
        let off = (answer["data"][0]["score"].as_f64().unwrap() - expected).abs();
        assert!(off < 1e-5, "{answer}: off by {off}");
    }
}

#[test]
fn flags_that_mean_nothing_for_an_encoder_are_refused() {
    let [bert, cross, dense, whisper, qwen3, judge] =
        ["bert", "bert-cross", "embeddinggemma", "whisper", "qwen3", "rerank-qwen3-gguf"].map(fixture);
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    for (args, words) in [
        (vec!["serve".into(), path(&bert), "--max-total-token-num".into(), "4096".into()], "encoder"),
        (vec!["serve".into(), path(&bert), "--enable-mtp".into()], "--enable-mtp"),
        (vec!["serve".into(), path(&cross), "--pooling".into(), "mean".into()], "scores pairs"),
        (vec!["serve".into(), path(&judge), "--pooling".into(), "last".into()], "scores pairs"),
        (vec!["serve".into(), path(&bert), "--pooling".into(), "rank".into()], "Bert does not score texts"),
        (vec!["serve".into(), path(&qwen3), "--pooling".into(), "rank".into()], "the vocabulary has no token \"yes\""),
        (vec!["serve".into(), path(&dense), "--pooling".into(), "cls".into()], "leave --pooling out"),
        (vec!["serve".into(), path(&whisper), "--pooling".into(), "mean".into()], "leave --pooling out"),
        (
            vec!["serve".into(), path(&whisper), "--max-req-total-len".into(), "90".into()],
            "a clip takes 100: give at least 105",
        ),
        (vec!["plan".into(), path(&bert), "--users".into(), "3".into()], "--users"),
        (vec!["plan".into(), path(&bert), "--probe".into()], "--probe"),
    ] {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let said = run(&args).refused();
        assert!(said.contains(words), "{args:?}: {said}");
    }
}
