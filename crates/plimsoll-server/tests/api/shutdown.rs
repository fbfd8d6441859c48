//! Shutdown: running requests may finish, new ones are refused, and silent connections do not delay it.

use std::net::TcpStream;
use std::time::Duration;

use plimsoll_engine::testing::{Step, limits};
use plimsoll_engine::{FinishReason, Request};
use plimsoll_server::ServerConfig;
use serde_json::{Value, json};

use crate::common::{PATIENCE, Script, Server, ask, config, endless, events, eventually, post, silent};

/// Number of tries of a test that depends on chance.
const TRIES: usize = 40;

#[test]
#[ignore = "soak"]
fn shutdown_lets_requests_finish_and_then_ends_the_rest() {
    // A request that ends within the deadline, one that does not, one whole answer that does not.
    let times = ServerConfig { drain_deadline: Duration::from_secs(5), ..config() };
    let server = Server::with(times, limits(), |request: &Request| -> Script {
        match request.max_tokens {
            7 => Box::new([Step::Wait(Duration::from_millis(300))].into_iter().chain(short(request))),
            _ => endless(request),
        }
    });
    let mut brief = server.send(post("/v1/completions", &json!({"prompt": "x", "max_tokens": 7}).to_string()));
    let mut long = server.send(ask(true));
    let mut whole = server.send(ask(false));
    eventually("all three run", || server.engine.reserved().1 == 3);
    let idle = server.connect();
    server.shut_down();
    eventually("the engine drains", || server.engine.draining());
    // New requests are refused now, and their connection is closed.
    for late in [
        "GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n".into(),
        post("/v1/completions", &json!({"prompt": "x"}).to_string()),
    ] {
        let answer = server.send(late).answer();
        assert!(answer.header("retry-after").is_some() && answer.header("connection") == Some("close"));
        answer.error(503);
    }
    assert_eq!(server.get("/health").ok()["status"], "healthy");
    assert_eq!(brief.answer().ok()["choices"][0]["text"], "end");
    let events: Vec<Value> = events(&long.answer().body);
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["type"], "service_unavailable_error", "{error}");
    whole.answer().error(503);
    assert!(server.wait_for_end(PATIENCE), "serve returned");
    assert!(TcpStream::connect(server.address).is_err(), "nobody listens any more");
    drop(idle);
}

#[test]
fn a_server_that_is_told_again_does_not_wait_for_what_runs() {
    let patient = ServerConfig { drain_deadline: Duration::from_secs(600), ..config() };
    let server = Server::with(patient, limits(), endless);
    let mut stream = server.send(ask(true));
    let mut whole = server.send(ask(false));
    eventually("both run", || server.engine.reserved().1 == 2);
    server.shut_down();
    eventually("the engine drains", || server.engine.draining());
    assert!(!server.wait_for_end(Duration::from_millis(200)), "it waits for what runs");
    server.shut_down();
    let events: Vec<Value> = events(&stream.answer().body);
    assert_eq!(events.last().unwrap()["error"]["type"], "service_unavailable_error");
    whole.answer().error(503);
    assert!(server.wait_for_end(PATIENCE), "serve returned");
}

/// A server with very long time-outs.
fn patient(script: fn(&Request) -> Script) -> Server {
    let ages = Duration::from_secs(600);
    Server::with(ServerConfig { drain_deadline: ages, header_timeout: ages, ..config() }, limits(), script)
}

/// An answer of one token.
fn short(_: &Request) -> Script {
    Box::new([Step::Token(98, "end".into()), Step::Finish(FinishReason::Length, None)].into_iter())
}

#[test]
fn silent_connection_at_the_end_is_not_awaited() {
    for _ in 0..TRIES {
        let server = patient(silent);
        let idle = server.connect();
        server.shut_down();
        assert!(server.wait_for_end(PATIENCE), "there is nobody to wait for");
        drop(idle);
    }
}

#[test]
fn silent_connection_during_drain_is_not_awaited() {
    let server = patient(|request| Box::new([Step::Wait(Duration::from_secs(1))].into_iter().chain(short(request))));
    let mut brief = server.send(ask(false));
    eventually("it runs", || server.engine.reserved().1 == 1);
    server.shut_down();
    eventually("the engine drains", || server.engine.draining());
    let idle = server.connect();
    brief.answer().ok();
    assert!(server.wait_for_end(Duration::from_secs(2)), "there is nobody to wait for");
    drop(idle);
}

#[test]
fn request_before_the_end_is_answered() {
    let look = "GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let question = post("/v1/completions", &json!({"prompt": "x"}).to_string());
    for _ in 0..TRIES {
        let server = patient(short);
        let mut kept = server.send(look);
        kept.answer().ok();
        kept.write(&question);
        let mut looks = server.send(look);
        let mut asks = server.send(&question);
        server.shut_down();
        looks.answer().ok();
        for asker in [&mut kept, &mut asks] {
            let answer = asker.answer();
            // The request may come before the end or after it.
            assert!(matches!(answer.status, 200 | 503), "{answer:?}");
        }
        assert!(server.wait_for_end(PATIENCE), "all are answered");
    }
}

#[test]
fn shutdown_without_requests_is_quick() {
    let server = patient(silent);
    let mut kept = server.connect();
    kept.write("GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n");
    kept.answer().ok();
    server.shut_down();
    assert!(server.wait_for_end(PATIENCE), "there is nobody to wait for");
}
