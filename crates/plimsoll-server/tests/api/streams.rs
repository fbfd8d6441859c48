//! Streams and waiting answers: every end has its terminator, and a client that disconnects ends its request.

use std::net::Shutdown;
use std::time::{Duration, Instant};

use plimsoll_engine::testing::{Step, letters, limits};
use plimsoll_engine::{FinishReason, Request};
use plimsoll_server::ServerConfig;
use serde_json::json;

use crate::common::{Client, Script, Server, ask, config, endless, eventually, hasty, post, silent};

/// Receive buffers of a client that reads nothing yet, and of one that reads; in bytes.
const SMALL: usize = 4 << 10;
const LARGE: usize = 1 << 20;

fn takes(client: &Client, bytes: usize) {
    socket2::SockRef::from(&client.stream).set_recv_buffer_size(bytes).unwrap();
}

#[test]
fn a_client_that_leaves_aborts_its_request_in_every_phase() {
    // Waiting for the first token, streamed and not.
    let server = Server::start(silent);
    for (i, stream) in [(1, false), (2, true)] {
        let client = server.send(ask(stream));
        eventually("the request runs", || server.engine.reserved().1 == 1);
        drop(client);
        eventually("it was aborted", || server.aborted() == i);
    }
    server.assert_idle();
    // In the middle of the output.
    let server = Server::start(endless);
    let mut client = server.send(ask(true));
    client.until("data: ");
    client.until("\"text\":\"");
    drop(client);
    eventually("it was aborted", || server.aborted() == 1);
    let client = server.send(ask(false));
    eventually("it runs", || server.engine.reserved().1 == 1);
    client.stream.shutdown(Shutdown::Both).unwrap();
    eventually("it was aborted", || server.aborted() == 2);
    server.assert_idle();
}

#[test]
fn all_choices_go_with_their_client() {
    let server = Server::start(silent);
    let client = server.send(post("/v1/completions", &json!({"prompt": ["x", "y"], "n": 3}).to_string()));
    eventually("six run", || server.engine.reserved().1 == 6);
    drop(client);
    eventually("six were aborted", || server.aborted() == 6);
    server.assert_idle();
}

#[test]
fn a_client_that_leaves_behind_a_second_request_is_noticed() {
    let server = Server::start(silent);
    let client = server.send(ask(false) + &ask(false));
    eventually("the first runs", || server.engine.reserved().1 == 1);
    drop(client);
    eventually("it was aborted", || server.aborted() == 1);
    server.assert_idle();
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = Server::start(plimsoll_engine::testing::letters);
    let one = |n: u32| post("/v1/completions", &json!({"prompt": "x", "max_tokens": n}).to_string());
    let mut client = server.send(one(1) + &one(2) + &one(3));
    for n in 1..=3 {
        assert_eq!(client.answer().ok()["usage"]["completion_tokens"], n);
    }
}

#[test]
fn a_reader_that_stops_reading_is_given_up() {
    // Some megabytes, so that no socket buffer hides the stall.
    let mut roomy = limits();
    roomy.max_req_total_len = 200_000;
    roomy.host_bytes = 1 << 30;
    let server = Server::with(hasty(), roomy, |_| Box::new((0..).map(|_| Step::Token(97, "a".repeat(2000)))));
    let body = json!({"prompt": "x", "max_tokens": 100_000, "stream": true});
    let mut client = server.send(post("/v1/completions", &body.to_string()));
    client.until("data: ");
    let start = Instant::now();
    eventually("it was aborted", || server.aborted() == 1);
    let waited = start.elapsed();
    assert!(waited >= Duration::from_millis(500), "given up after {waited:?} only");
    server.assert_idle();
}

/// A write would reveal that the client is gone, but the first output may be long in coming.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "soak"]
fn a_client_that_vanishes_while_nothing_is_said_is_given_up() {
    let patient = ServerConfig { write_timeout: Duration::from_secs(4), ..config() };
    let server = Server::with(patient, limits(), silent);
    let client = server.send(ask(false));
    eventually("it runs", || server.engine.reserved().1 == 1);
    // The filter "return 0" drops every packet, so the client's system answers none.
    socket2::SockRef::from(&client.stream).attach_filter(&[socket2::SockFilter::new(0x06, 0, 0, 0)]).unwrap();
    let start = Instant::now();
    eventually("it was aborted", || server.aborted() == 1);
    // The keep-alive time-out, a second between two probes, and a moment; the system's default is some minutes.
    assert!(start.elapsed() < Duration::from_secs(30), "after {:?}", start.elapsed());
    server.assert_idle();
}

#[test]
#[ignore = "soak"]
fn a_slow_reader_gets_everything() {
    // The receive window opens only after some reads. On a machine that stands still the first time-out may be too short for that.
    let whole = [4, 20].into_iter().any(|seconds| {
        let times = ServerConfig { write_timeout: Duration::from_secs(seconds), ..config() };
        let server = Server::with(times, limits(), |_| {
            let tokens = (0..400).map(|i| Step::Token(97, format!("{i},{}", "x".repeat(1000))));
            Box::new(tokens.chain([Step::Finish(FinishReason::Length, None)]))
        });
        let mut client = server.send(ask(true));
        let head = client.until("\r\n\r\n");
        assert!(head.contains("text/event-stream"), "{head}");
        // Slower than the time-out in total, but never stalled for that long.
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(60 * seconds));
            client.more();
        }
        let whole = client.comes("399,") && client.comes("data: [DONE]\n\n");
        server.assert_idle();
        whole
    });
    assert!(whole, "it was cut off");
}

#[test]
fn an_engine_error_is_a_500_or_an_event_and_always_an_end() {
    let script = |_: &Request| -> Script {
        Box::new([Step::Token(97, "a".into()), Step::Fail("kernel panic in layer 3".into())].into_iter())
    };
    let server = Server::start(script);
    let error = server.post("/v1/completions", &json!({"prompt": "x", "n": 2})).error(500);
    assert_eq!(error["type"], "server_error");
    assert!(error["message"].as_str().unwrap().contains("layer 3"));
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let body = if path.contains("chat") {
            json!({"messages": [{"role": "user", "content": "x"}], "stream": true})
        } else {
            json!({"prompt": "x", "stream": true})
        };
        let events = server.post(path, &body).events();
        let last = events.last().unwrap();
        assert_eq!(last["error"]["type"], "server_error", "{last}");
        assert!(events[..events.len() - 1].iter().all(|e| e.get("error").is_none()));
    }
    server.assert_idle();
}

#[test]
fn a_request_that_memory_ran_short_for_may_be_tried_again_and_is_told_so() {
    let script = |_: &Request| -> Script { Box::new([Step::Token(97, "a".into()), Step::RunShort].into_iter()) };
    let server = Server::start(script);
    let answer = server.post("/v1/completions", &json!({"prompt": "x"}));
    assert_eq!(answer.header("retry-after"), Some("5"));
    let error = answer.error(503);
    assert_eq!((&error["type"], &error["code"]), (&json!("service_unavailable_error"), &json!("unavailable")));
    let events = server.post("/v1/completions", &json!({"prompt": "x", "stream": true})).events();
    assert_eq!(events.last().unwrap()["error"]["code"], "unavailable");
    server.assert_idle();
}

#[test]
fn a_backlog_comes_in_events_of_bounded_size_and_says_the_same() {
    use std::sync::atomic::{AtomicBool, Ordering};
    // All output is there before the client reads its first byte: the engine is held until all is generated.
    static SAID: AtomicBool = AtomicBool::new(false);
    let server = Server::with(config(), limits(), |request| {
        let all = letters(request).inspect(|step| SAID.store(matches!(step, Step::Finish(..)), Ordering::Release));
        Box::new(std::iter::once(Step::Wait(Duration::from_millis(1))).chain(all))
    });
    let path = "/v1/chat/completions";
    let messages = json!([{"role": "user", "content": "x"}]);
    let body = json!({"messages": messages, "max_tokens": 400, "logprobs": true, "top_logprobs": 20, "stream": true});
    let said = |events: &[serde_json::Value]| {
        let reports = |event: &serde_json::Value| event["choices"][0]["logprobs"]["content"].as_array().cloned();
        let text = |event: &serde_json::Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
        let all: Vec<_> = events.iter().filter_map(reports).flatten().collect();
        (events.iter().filter_map(text).collect::<String>(), all)
    };
    let whole = said(&server.post(path, &body).events());
    assert_eq!((whole.0.len(), whole.1.len()), (400, 400));
    SAID.store(false, Ordering::Release);
    let mut client = server.connect();
    takes(&client, SMALL);
    client.write(post(path, &body.to_string()).as_bytes());
    eventually("all is said", || SAID.load(Ordering::Acquire));
    takes(&client, LARGE);
    let events = client.answer().events();
    assert_eq!(said(&events), whole);
    let largest = events.iter().map(|event| event.to_string().len()).max().unwrap();
    println!("{} events, the largest of {largest} bytes", events.len());
    assert!(largest <= 16 << 10, "an event of {largest} bytes");
    assert!(events.len() < 400, "what has waited is put together");
    server.assert_idle();
}

#[test]
fn one_failed_choice_ends_the_others() {
    let mut count = 0;
    let server = Server::start(move |request| {
        count += 1;
        if count % 2 == 0 { Box::new([Step::Fail("broken".into())].into_iter()) } else { endless(request) }
    });
    server.post("/v1/completions", &json!({"prompt": "x", "n": 2})).error(500);
    server.assert_idle();
    let events = server.post("/v1/completions", &json!({"prompt": "x", "n": 2, "stream": true})).events();
    assert!(events.last().unwrap().get("error").is_some());
    server.assert_idle();
}

#[test]
fn an_engine_that_stops_ends_every_request_and_health() {
    let server = Server::start(|_| {
        let steps = [Step::Token(97, "a".into()), Step::Wait(Duration::from_millis(200)), Step::StopEngine];
        Box::new(steps.into_iter())
    });
    let mut waiting = server.send(ask(false));
    let events = server.send(ask(true)).answer().events();
    assert!(events.last().unwrap().get("error").is_some());
    waiting.answer().error(500);
    server.get("/health").error(503);
    server.get("/ready").error(503);
    server.post("/v1/completions", &json!({"prompt": "x"})).error(503);
}

#[test]
#[ignore = "soak"]
fn a_silent_engine_is_given_up_and_a_long_request_cut() {
    let times = ServerConfig { silence_timeout: Duration::from_secs(1), ..config() };
    let server = Server::with(times, limits(), silent);
    let error = server.post("/v1/completions", &json!({"prompt": "x"})).error(504);
    assert!(error["message"].as_str().unwrap().contains("produced nothing for 1 s"), "{error}");
    server.assert_idle();
    let times = ServerConfig { request_timeout: Some(Duration::from_secs(2)), ..config() };
    let server = Server::with(times, limits(), endless);
    let events = server.send(ask(true)).answer().events();
    assert!(events.len() > 3);
    assert!(events.last().unwrap()["error"]["message"].as_str().unwrap().contains("limit of 2 s"));
    server.assert_idle();
}

#[test]
#[ignore = "soak"]
fn time_limit_holds_for_unread_output() {
    let times = ServerConfig { request_timeout: Some(Duration::from_secs(1)), ..config() };
    let server = Server::with(times, limits(), letters);
    // More output than sockets and buffers hold, so that some of it is still with the engine.
    let body = json!({"prompt": "x", "max_tokens": 400, "n": 8, "logprobs": 20, "stream": true});
    let mut client = server.connect();
    takes(&client, SMALL);
    client.write(post("/v1/completions", &body.to_string()));
    std::thread::sleep(Duration::from_secs(2));
    takes(&client, LARGE);
    let events = client.answer().events();
    let error = &events.last().unwrap()["error"];
    assert!(error["message"].as_str().is_some_and(|message| message.contains("limit of 1 s")), "{error}");
    server.assert_idle();
}

#[test]
fn a_quiet_stream_shows_that_it_lives() {
    let times = ServerConfig { keep_alive: Duration::from_millis(50), ..config() };
    let server = Server::with(times, limits(), |_| {
        let end = [Step::Token(97, "a".into()), Step::Finish(FinishReason::Stop, None)];
        Box::new([Step::Wait(Duration::from_secs(1))].into_iter().chain(end))
    });
    let answer = server.send(ask(true)).answer();
    assert!(answer.body.matches(": waiting\n\n").count() >= 3, "{}", answer.body);
    assert_eq!(answer.events()[0]["choices"][0]["text"], "a");
}
