//! Streams that did not end, ended without a terminator, or blocked other requests.

use serde_json::{Value, json};

use crate::http::request;
use crate::product::eventually;
use crate::visitor::{events, greedy, number, prompt, rests, tiny, with};

fn last(events: &[Value]) -> &Value {
    events.last().expect("events")
}

// vllm-mlx 302: on some ways out the terminator was missing; clients hung.
#[test]
fn v_43_every_end_of_a_stream_has_its_terminator() {
    let server = tiny(&[]);
    let stream = |fields: Value| {
        let body = with(with(greedy(&prompt(1, 20), 30), json!({"stream": true})), fields);
        events(server.post("/v1/completions", &body))
    };
    let text: String = stream(json!({})).iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    let finish = |events: &[Value]| {
        let reasons = events.iter().filter_map(|event| event["choices"][0]["finish_reason"].as_str());
        reasons.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(finish(&stream(json!({}))), ["length"]);
    let piece: String = text.chars().skip(3).take(4).collect();
    assert_eq!(finish(&stream(json!({"stop": [piece]}))), ["stop"]);
    assert_eq!(finish(&stream(json!({"n": 3}))), ["length"; 3]);
    assert!(last(&stream(json!({"stream_options": {"include_usage": true}})))["usage"].is_object());
    // A stream that is cancelled while it runs must have the terminator, too, which `events` checks.
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let mut body = with(greedy(&prompt(1, 20), 4000), json!({"stream": true}));
        if path.contains("chat") {
            let body = body.as_object_mut().expect("a body");
            body.remove("prompt");
            body.insert("messages".into(), json!([{"role": "user", "content": "x"}]));
        }
        let mut answer = server.post(path, &body);
        let first: Value = serde_json::from_str(&answer.event().expect("an event")).expect("JSON");
        let id = first["id"].as_str().expect("an id");
        request(server.address, "DELETE", &format!("/v1/requests/{id}"), b"").expect("an answer");
        let events = events(answer);
        assert_eq!(last(&events)["error"]["code"], "request_cancelled", "{path}");
    }
    rests(&server);
}

// vllm-mlx 673: a parser that was inside a call swallowed the last output; there was no reason, and clients asked again.
#[test]
fn v_44_an_answer_that_ends_inside_a_call_says_so() {
    let server = tiny(&[]);
    let body = json!({
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": true, "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "minLength": 200}}, "required": ["city"]}}}],
    });
    let events = events(server.post("/v1/chat/completions", &body));
    let reasons: Vec<_> = events.iter().filter_map(|event| event["choices"][0]["finish_reason"].as_str()).collect();
    assert_eq!(reasons, ["length"], "{events:?}");
    rests(&server);
}

// vllm-mlx 414: a prompt blocked the decoding of all other requests for 20 to 30 seconds.
#[test]
fn v_37_streams_go_on_while_a_long_prompt_is_computed() {
    let server = tiny(&["--batch-max-tokens", "32", "--graph-max-batch-size", "4"]);
    let stream = server.send("/v1/completions", &with(greedy(&prompt(1, 20), 4000), json!({"stream": true})));
    eventually("it talks", || !server.rows("decode").is_empty());
    // Computed prompt tokens, and tokens of the stream.
    let look = || {
        let page = server.status();
        let field = |phase: &str, name: &str| {
            let row = page["requests"].as_array()?.iter().find(|row| row["phase"] == phase)?;
            Some(number(&row[name]))
        };
        field("prefill", "computed_tokens").zip(field("decode", "generated_tokens"))
    };
    let long = with(greedy(&prompt(2, 2400), 1), json!({"prompt_logprobs": 1}));
    let looks: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let asked = scope.spawn(|| server.ask("/v1/completions", &long));
        let mut looks = Vec::new();
        while !asked.is_finished() {
            looks.extend(look());
        }
        looks
    });
    let (first, last) = (looks.first().expect("a prompt in work"), looks.last().expect("a prompt in work"));
    let (computed, said) = (last.0 - first.0, last.1 - first.1);
    assert!(computed >= 600, "{computed} tokens of the prompt were seen being computed");
    // A step has four rows with logits. One is the stream's, so each step computes three prompt tokens.
    assert!(said >= computed / 4, "{said} tokens while {computed} of the prompt were computed");
    drop(stream);
    rests(&server);
}

// vllm-mlx 261: a stream blocked the loop that answered everything else; 298 requests of more than 48 seconds.
#[test]
fn v_38_status_pages_answer_under_load() {
    let server = tiny(&["--max-total-token-num", "65536"]);
    let streams: Vec<_> = (0..16)
        .map(|i| server.send("/v1/completions", &with(greedy(&prompt(i, 20), 2000), json!({"stream": true}))))
        .collect();
    eventually("they talk", || server.rows("decode").len() == 16);
    for _ in 0..50 {
        let asked = std::time::Instant::now();
        assert_eq!(server.get("/health").status, 200);
        assert!(asked.elapsed().as_secs() < 10, "health took {:?}", asked.elapsed());
    }
    drop(streams);
    rests(&server);
}
