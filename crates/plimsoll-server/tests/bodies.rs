//! Bodies of the largest size, of every kind that is expensive to parse. They take no more heap than the plan has for bodies in flight and
//! for parsed bodies, alone or several at once. Several at once are all answered.

mod common;

use std::io::Write;

use common::{Server, config};
use plimsoll_engine::testing::{letters, limits};
use plimsoll_memory::heap;
use plimsoll_server::ServerConfig;

#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

const BODY_BYTES: usize = 8 << 20;

/// A body of the largest size: `piece` is repeated between `head` and `tail`.
fn body(head: &str, piece: &str, tail: &str) -> String {
    let times = (BODY_BYTES - head.len() - tail.len()) / piece.len();
    format!("{head}{}{tail}", piece.repeat(times))
}

/// Returns one body for each shape, with its path and a description.
fn giants() -> Vec<(&'static str, &'static str, String)> {
    let call = r#"{"type":"function","id":"a","function":{"name":"f","arguments":"["#;
    let chat = format!(r#"{{"messages":[{{"role":"assistant","tool_calls":[{call}"#);
    let item = r#"{"input":[{"type":"function_call","call_id":"a","name":"f","arguments":"["#;
    let form = r#"{"prompt":"x","guided_json":"["#;
    let completions = vec![
        ("words", body("{\"prompt\":\"", "the old man and the sea ", "\"}")),
        ("escapes", body("{\"prompt\":\"", "abcdefghijklmnopqrstuvw\\n", "\"}")),
        ("nothing but escapes", body("{\"prompt\":\"", "\\n", "\"}")),
        ("ids", body("{\"prompt\":[", "1,", "1]}")),
        ("ids with an echo", body("{\"echo\":true,\"prompt\":[", "1,", "1]}")),
        ("a grammar of what is spelled at length", body("{\"prompt\":\"x\",\"guided_regex\":\"", "\u{7f}", "\"}")),
        ("prompts", body("{\"prompt\":[", "\"x\",", "\"x\"]}")),
        ("stop strings", body("{\"prompt\":\"x\",\"stop\":[", "\"a\",", "\"a\"]}")),
        ("stop ids", body("{\"prompt\":\"x\",\"stop_token_ids\":[", "1,", "1]}")),
        ("biases", body("{\"prompt\":\"x\",\"logit_bias\":{", "\"1\":1,", "\"1\":1}}")),
        ("metadata", body("{\"prompt\":\"x\",\"metadata\":{", "\"\":\"\",", "\"\":\"\"}}")),
        ("an unknown field", body("{\"", "a", "\":1}")),
        ("a schema in a text", body(form, "1,", r#"1]"}"#)),
    ];
    let others = [
        ("/v1/chat/completions", "arguments", body(&chat, "1,", r#"1]"}}]}]}"#)),
        ("/v1/chat/completions", "empty arguments", body(&chat, "{},", r#"1]"}}]}]}"#)),
        ("/tokenize", "arguments", body(&chat, "1,", r#"1]"}}]}]}"#)),
        ("/v1/responses", "arguments", body(item, "1,", r#"1]"}]}"#)),
    ];
    completions.into_iter().map(|(name, body)| ("/v1/completions", name, body)).chain(others).collect()
}

/// One test, since the heap is counted for the whole process.
#[test]
fn giants_take_what_is_planned_for_them_and_several_at_once_are_answered() {
    let config = ServerConfig { max_body_bytes: BODY_BYTES as u64, max_bytes_in_flight: 24 << 20, ..config() };
    let server = Server::with(config.clone(), limits(), letters);
    server.get("/metrics").ok_text();
    let head = |path: &str, body: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
    };
    println!("{:<22} {:>12} {:>12}", "", "heap", "a byte");
    let (giants, mut worst) = (giants(), 0);
    for (path, name, body) in &giants {
        let before = heap::in_use();
        heap::restart_peak();
        let mut client = server.connect();
        client.stream.write_all(head(path, body).as_bytes()).unwrap();
        let _ = client.stream.write_all(body.as_bytes());
        client.answer().error(400);
        let taken = heap::peak() - before;
        println!("{name:<22} {taken:>12} {:>12.2}", taken as f64 / body.len() as f64);
        worst = worst.max(taken);
        server.assert_idle();
    }
    // The planned heap: the body with an eighth of room, and its parsing. The buffers of one connection come on top.
    let planned = BODY_BYTES as u64 * 9 / 8 + 3 * BODY_BYTES as u64;
    assert!(worst <= planned + (1 << 20), "{worst} bytes, {planned} planned");
    assert!(worst * 100 >= planned * 95, "{worst} bytes of {planned}: more is planned than can be used");
    // As many bodies at once as there is room for are all read and answered; none is refused.
    let (before, several) = (heap::in_use(), (24 << 20) / (BODY_BYTES * 9 / 8));
    assert!(several >= 2);
    heap::restart_peak();
    std::thread::scope(|scope| {
        for (path, _, body) in giants.iter().take(several) {
            let (server, head) = (&server, head(path, body));
            scope.spawn(move || {
                let mut client = server.connect();
                client.stream.write_all(head.as_bytes()).unwrap();
                let _ = client.stream.write_all(body.as_bytes());
                client.answer().error(400);
            });
        }
    });
    let taken = heap::peak() - before;
    let planned = config.max_bytes_in_flight + 3 * config.max_body_bytes;
    println!("{several} at once took {taken} bytes of {planned} planned");
    // Connections and this test's threads take some more.
    assert!(taken <= planned + (2 << 20), "{taken} bytes, {planned} planned");
    server.assert_idle();
}
