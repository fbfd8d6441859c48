//! `/v1/completions`: every shape of prompt, every report, whole and streamed.

use plimsoll_engine::FinishReason;
use plimsoll_engine::testing::{Step, letters};
use serde_json::{Value, json};

use crate::common::Server;

fn text_of(events: &[Value], index: u64) -> String {
    let choices = events.iter().flat_map(|e| e["choices"].as_array().unwrap());
    choices.filter(|c| c["index"] == index).map(|c| c["text"].as_str().unwrap()).collect()
}

#[test]
fn all_prompt_shapes_reach_the_engine_and_come_back_in_order() {
    let server = Server::start(letters);
    for (prompt, expected) in [
        (json!("ab"), vec![vec![97, 98]]),
        (json!(["ab", "c<|im_end|>"]), vec![vec![97, 98], vec![99, 257]]),
        (json!([1, 2, 3]), vec![vec![1, 2, 3]]),
        (json!([[1], [2, 3]]), vec![vec![1], vec![2, 3]]),
    ] {
        server.observed.requests.lock().unwrap().clear();
        let answer = server.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 4})).ok();
        let prompts: Vec<_> = server.observed.requests.lock().unwrap().iter().map(|r| r.prompt.clone()).collect();
        assert_eq!(prompts, expected);
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(answer["model"], "tiny");
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), expected.len());
        for (i, choice) in choices.iter().enumerate() {
            assert_eq!(choice["index"], i);
            assert_eq!(choice["text"].as_str().unwrap().len(), 4);
            assert_eq!(choice["finish_reason"], "length");
        }
        let in_prompts: usize = expected.iter().map(Vec::len).sum();
        assert_eq!(answer["usage"]["prompt_tokens"], in_prompts);
        assert_eq!(answer["usage"]["completion_tokens"], 4 * expected.len());
        assert_eq!(answer["usage"]["total_tokens"], in_prompts + 4 * expected.len());
    }
    server.assert_idle();
}

#[test]
fn without_a_number_sixteen_tokens_are_generated() {
    let server = Server::start(letters);
    server.post("/v1/completions", &json!({"prompt": "a"})).ok();
    assert_eq!(server.last_request().max_tokens, 16);
}

#[test]
fn a_stream_says_the_same_as_a_whole_answer() {
    let server = Server::start(letters);
    let ask = |stream: bool| json!({"prompt": ["x", "yy"], "n": 2, "max_tokens": 40, "stream": stream, "seed": 5});
    let whole = server.post("/v1/completions", &ask(false)).ok();
    let events = server.post("/v1/completions", &ask(true)).events();
    for index in 0..4u64 {
        assert_eq!(whole["choices"][index as usize]["text"], text_of(&events, index));
        let ends: Vec<_> = events
            .iter()
            .flat_map(|e| e["choices"].as_array().unwrap())
            .filter(|c| c["index"] == index && !c["finish_reason"].is_null())
            .collect();
        assert_eq!(ends.len(), 1);
        assert_eq!(ends[0]["finish_reason"], "length");
    }
    assert!(events.iter().all(|e| e.get("usage").is_none()));
    assert!(events.iter().all(|e| e["id"] == events[0]["id"] && e["id"].as_str().unwrap().starts_with("cmpl-")));
}

#[test]
fn choices_get_consecutive_seeds_and_equal_prompts() {
    let server = Server::start(letters);
    server.post("/v1/completions", &json!({"prompt": ["a", "b"], "n": 3, "seed": 10, "max_tokens": 1})).ok();
    let seeds: Vec<_> = server.observed.requests.lock().unwrap().iter().map(|r| r.sampling.seed).collect();
    assert_eq!(seeds, [10, 11, 12, 10, 11, 12]);
    server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).ok();
    let first = server.last_request().sampling.seed;
    server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).ok();
    assert_ne!(first, server.last_request().sampling.seed, "without a seed, each request has its own");
}

#[test]
fn every_field_reaches_the_engine() {
    let server = Server::start(letters);
    let body = json!({
        "model": "org/tiny-alias", "prompt": "a", "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.75,
        "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 1.0,
        "logit_bias": {"5": -100, "7": 2.5}, "seed": -1, "stop": ["x", "yz"], "stop_token_ids": [3], "ignore_eos": true,
        "skip_special_tokens": false, "cache_salt": "tenant", "user": "u", "store": false, "service_tier": "auto",
        "metadata": {"a": "b"}, "n": 1, "best_of": 1, "suffix": null, "echo": false, "logprobs": null,
        "response_format": {"type": "text"}, "mtp": false
    });
    let answer = server.post("/v1/completions", &body).ok();
    assert_eq!(answer["model"], "org/tiny-alias");
    assert_eq!(answer["usage"]["speculation"], Value::Null, "nothing was drafted");
    let request = server.last_request();
    assert_eq!((request.max_tokens, request.min_tokens), (9, 2));
    let sampling = &request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.5, 0.75, 7, 0.25));
    assert_eq!(sampling.repetition_penalty, 1.5);
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (-1.0, 1.0));
    assert_eq!(sampling.logit_bias, [(5, -100.0), (7, 2.5)]);
    assert_eq!(sampling.seed, u64::MAX);
    assert_eq!(request.stop, ["x", "yz"]);
    assert_eq!(request.stop_token_ids, [3]);
    assert!(request.ignore_eos && !request.skip_special_tokens && !request.speculate);
    let salt = request.cache_salt;
    assert_ne!(salt, 0);
    server.post("/v1/completions", &json!({"prompt": "a", "cache_salt": "other", "stop": "s"})).ok();
    assert!(!request.keep_stop && !server.last_request().keep_stop);
    for name in ["include_stop_str_in_output", "no_stop_trim"] {
        server.post("/v1/completions", &json!({"prompt": "a", "stop": "s", name: true})).ok();
        assert!(server.last_request().keep_stop, "{name}");
    }
    server.post("/v1/completions", &json!({"prompt": "a", "cache_salt": "other", "stop": "s"})).ok();
    let request = server.last_request();
    assert!(request.cache_salt != salt && request.cache_salt != 0 && request.speculate);
    assert_eq!(request.stop, ["s"]);
    assert_eq!(request.sampling.temperature, 1.0);
}

#[test]
fn log_probabilities_have_openais_shape() {
    let server = Server::start(|_| {
        let steps = [("é", 5u32), ("", 6), ("日x", 7), ("!", 8)];
        let tokens = steps.map(|(text, id)| Step::Token(id, text.into()));
        Box::new(tokens.into_iter().chain([Step::Finish(FinishReason::Stop, Some("END".into()))]))
    });
    let ask = json!({"prompt": "abc", "logprobs": 2, "max_tokens": 9});
    let answer = server.post("/v1/completions", &ask).ok();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "é日x!");
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["stop_reason"], "END");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["\u{5}", "\u{6}", "\u{7}", "\u{8}"]));
    assert_eq!(logprobs["token_logprobs"], json!([-0.5, -0.5, -0.5, -0.5]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 3]));
    assert_eq!(logprobs["top_logprobs"][0], json!({"\u{5}": -0.5, "\u{6}": -1.5}));
    // Streamed: the same lists, in pieces.
    let mut ask = ask;
    ask["stream"] = true.into();
    let events = server.post("/v1/completions", &ask).events();
    for list in ["tokens", "token_logprobs", "text_offset", "top_logprobs"] {
        let pieces = events.iter().filter_map(|e| e["choices"][0]["logprobs"][list].as_array());
        assert_eq!(json!(pieces.flatten().collect::<Vec<_>>()), logprobs[list], "{list}");
    }
}

#[test]
fn an_echo_repeats_the_prompt_with_its_log_probabilities() {
    let server = Server::start(letters);
    let ask = json!({"prompt": "abc", "echo": true, "logprobs": 1, "max_tokens": 2});
    let answer = server.post("/v1/completions", &ask).ok();
    let choice = &answer["choices"][0];
    assert!(choice["text"].as_str().unwrap().starts_with("abc"));
    assert_eq!(choice["text"].as_str().unwrap().len(), 5);
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 5);
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.5, -0.5, -0.5, -0.5]));
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4]));
    let mut streamed = ask.clone();
    streamed["stream"] = true.into();
    let events = server.post("/v1/completions", &streamed).events();
    assert_eq!(text_of(&events, 0), choice["text"].as_str().unwrap());
    let offsets = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["text_offset"].as_array());
    assert_eq!(json!(offsets.flatten().collect::<Vec<_>>()), logprobs["text_offset"]);

    // Scoring: nothing is generated, the prompt is reported.
    let score = json!({"prompt": [[97, 98], [99]], "echo": true, "logprobs": 0, "max_tokens": 0});
    let answer = server.post("/v1/completions", &score).ok();
    assert_eq!(answer["choices"][0]["text"], "ab");
    assert_eq!(answer["choices"][1]["text"], "c");
    assert_eq!(answer["choices"][0]["logprobs"]["token_logprobs"], json!([null, -0.5]));
    assert_eq!(answer["usage"]["completion_tokens"], 0);

    // An echo alone has no log-probabilities.
    let answer = server.post("/v1/completions", &json!({"prompt": "abc", "echo": true, "max_tokens": 0})).ok();
    assert_eq!(answer["choices"][0]["text"], "abc");
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    assert!(answer["choices"][0].get("prompt_logprobs").is_none());
}

#[test]
fn vllms_reports_are_there_on_request() {
    let server = Server::start(|_| {
        Box::new(
            [
                Step::Cached(2),
                Step::Drafts(3, 1),
                Step::Token(104, "h".into()),
                Step::Token(105, "i".into()),
                Step::Finish(FinishReason::Stop, None),
            ]
            .into_iter(),
        )
    });
    let ask = json!({"prompt": "abc", "return_token_ids": true, "prompt_logprobs": 1, "max_tokens": 2});
    let answer = server.post("/v1/completions", &ask).ok();
    let choice = &answer["choices"][0];
    assert_eq!(choice["token_ids"], json!([104, 105]));
    assert_eq!(choice["prompt_token_ids"], json!([97, 98, 99]));
    let report = &choice["prompt_logprobs"];
    assert_eq!(report[0], Value::Null);
    assert_eq!(report[1], json!({"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}));
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
    assert_eq!(answer["usage"]["speculation"], json!({"drafted": 3, "accepted": 1}));
    let ask = json!({"prompt": "abc", "return_token_ids": true, "stream": true, "max_tokens": 2});
    let events = server.post("/v1/completions", &ask).events();
    assert_eq!(events[0]["choices"][0]["prompt_token_ids"], json!([97, 98, 99]));
    let ids = events.iter().filter_map(|e| e["choices"][0]["token_ids"].as_array()).flatten();
    assert_eq!(ids.collect::<Vec<_>>(), [&json!(104), &json!(105)]);
    assert_eq!(events.iter().filter(|e| e["choices"][0].get("prompt_token_ids").is_some()).count(), 1);
    let ask = json!({"prompt": "abc", "logprobs": 0, "return_tokens_as_token_ids": true, "max_tokens": 2});
    let answer = server.post("/v1/completions", &ask).ok();
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"], json!(["token_id:104", "token_id:105"]));
}

#[test]
fn usage_comes_when_asked_for() {
    let server = Server::start(letters);
    let ask = |options: Value| json!({"prompt": "abc", "max_tokens": 3, "stream": true, "stream_options": options});
    let events = server.post("/v1/completions", &ask(json!({"include_usage": true}))).events();
    let (last, rest) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["total_tokens"], 6);
    assert!(rest.iter().all(|e| e.get("usage") == Some(&Value::Null)));
    let both = json!({"include_usage": true, "continuous_usage_stats": true});
    let events = server.post("/v1/completions", &ask(both)).events();
    assert!(events.iter().all(|e| e["usage"]["prompt_tokens"] == 3));
}

#[test]
fn an_echoed_character_of_several_tokens_is_one() {
    let server = Server::start(letters);
    let body = json!({"prompt": "\u{e9}!", "echo": true, "logprobs": 0, "max_tokens": 1, "stream": false});
    let choice = server.post("/v1/completions", &body).ok()["choices"][0].clone();
    assert_eq!(choice["text"].as_str().unwrap().chars().count(), 3);
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 0, 1, 2]));
}
