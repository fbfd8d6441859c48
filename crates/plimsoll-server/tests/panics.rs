//! Panics in the server's path of a request: in tokenizer, template and the shaping of answers. The request ends with a 500 or an error
//! event. Its connection and all other requests continue, and a metric counts the panic.

mod common;

use std::sync::{Mutex, MutexGuard};

use common::{Server, events, post};
use plimsoll_engine::testing::{Step, letters};
use plimsoll_engine::{FinishReason, Request};
use plimsoll_memory::faults::{self, Site};
use serde_json::{Value, json};

/// Injected faults belong to the process: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Letters, slowly, for the request that runs beside the faults.
fn paced(request: &Request) -> Box<dyn Iterator<Item = Step> + Send> {
    if request.max_tokens != 400 {
        return letters(request);
    }
    let token = |i: u32| [Step::Token(97 + i % 26, "n".into()), Step::Wait(std::time::Duration::from_millis(1))];
    Box::new((0..400).flat_map(token).chain([Step::Finish(FinishReason::Length, None)]))
}

fn body(path: &str, stream: bool) -> Value {
    let mut body = json!({"max_tokens": 5, "stream": stream, "logprobs": if path.contains("chat") { json!(true) } else { json!(2) }});
    match path.contains("chat") {
        true => body["messages"] = json!([{"role": "user", "content": "x"}]),
        false => body["prompt"] = "x".into(),
    }
    body
}

const PATHS: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

#[test]
fn a_panic_costs_one_answer_and_not_its_connection() {
    let _alone = alone();
    let server = Server::start(letters);
    let cases = [
        (Site::Tokenizer, PATHS[0]),
        (Site::Tokenizer, PATHS[1]),
        (Site::Template, PATHS[1]),
        (Site::Shape, PATHS[0]),
        (Site::Shape, PATHS[1]),
    ];
    for (panics, (site, path)) in (1..).zip(cases) {
        let request = post(path, &body(path, false).to_string());
        let mut client = server.connect();
        faults::arm_site(site, 1);
        client.write(&request);
        let error = client.answer().error(500);
        assert_eq!(faults::disarm_site().hit, 1, "{site:?} at {path}");
        assert_eq!(error["type"], "server_error");
        assert!(error["message"].as_str().unwrap().contains("panicked"), "{error}");
        assert_eq!(server.engine.metrics().panics.get(), panics);
        client.write(&request);
        client.answer().ok();
        server.assert_idle();
    }
    let page = server.get("/metrics").body;
    assert!(page.contains("plimsoll_panics_total 5"), "{page}");
    assert!(page.contains("plimsoll_http_answers_total{path=\"/v1/completions\",code=\"500\"} 2"), "{page}");
}

#[test]
fn neighbours_of_a_panic_hear_what_they_would_have_heard() {
    let _alone = alone();
    let server = Server::start(paced);
    let request = post("/v1/completions", &json!({"prompt": "y", "max_tokens": 400, "stream": true}).to_string());
    let calm = text(&server.send(&request).answer().events());
    let mut neighbour = server.send(&request);
    neighbour.until("\r\n\r\n");
    for site in [Site::Tokenizer, Site::Template].into_iter().cycle().take(20) {
        faults::arm_site(site, 1);
        server.post(PATHS[1], &body(PATHS[1], false)).error(500);
        assert_eq!(faults::disarm_site().hit, 1);
    }
    let rest = String::from_utf8(neighbour.chunks()).unwrap();
    assert_eq!(text(&events(&rest)), calm);
    assert_eq!(server.engine.metrics().panics.get(), 20);
    server.assert_idle();
}

fn text(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
}

#[test]
fn every_event_of_a_stream_may_panic() {
    let _alone = alone();
    let server = Server::start(letters);
    let mut swept = 0;
    for path in PATHS {
        for nth in 1.. {
            faults::arm_site(Site::Shape, nth);
            let answer = server.post(path, &body(path, true));
            let hit = faults::disarm_site().hit;
            // Whole events only, and the terminator.
            let events = answer.events();
            let last = events.last().unwrap();
            if hit == 0 {
                assert!(last.get("error").is_none());
                break;
            }
            swept += 1;
            assert_eq!(last["error"]["type"], "server_error", "event {nth}: {last}");
            assert!(events[..events.len() - 1].iter().all(|event| event.get("error").is_none()));
            server.assert_idle();
        }
    }
    println!("{swept} events panicked, one at a time");
    // Pieces that arrive at once are one event. Each path has at least the first piece, the last one and one between.
    assert!(swept >= 3 * PATHS.len() as u64, "{swept}");
    assert_eq!(server.engine.metrics().panics.get(), swept);
}

#[test]
fn streams_of_named_events_end_with_their_own_words() {
    let _alone = alone();
    let server = Server::start(letters);
    let messages = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5});
    let input = json!({"input": "x", "max_output_tokens": 5});
    let mut swept = 0;
    for (path, body, failed) in [("/v1/messages", messages, "error"), ("/v1/responses", input, "response.failed")] {
        faults::arm_site(Site::Shape, 1);
        let whole = server.post(path, &body);
        assert_eq!((whole.status, faults::disarm_site().hit), (500, 1), "{}", whole.body);
        let mut body = body;
        body["stream"] = true.into();
        for nth in 1.. {
            faults::arm_site(Site::Shape, nth);
            let answer = server.post(path, &body);
            let hit = faults::disarm_site().hit;
            let events: Vec<&str> = answer.body.split("\n\n").filter(|event| !event.is_empty()).collect();
            for event in &events {
                let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
                assert_eq!(serde_json::from_str::<Value>(data).unwrap()["type"], name, "whole events only");
            }
            let ends_badly = events.last().unwrap().starts_with(&format!("event: {failed}\n"));
            assert_eq!(ends_badly, hit == 1, "event {nth} at {path}: {}", answer.body);
            server.assert_idle();
            if hit == 0 {
                break;
            }
            swept += 1;
        }
    }
    assert!(swept >= 16, "{swept}");
    assert_eq!(server.engine.metrics().panics.get(), swept + 2);
}
