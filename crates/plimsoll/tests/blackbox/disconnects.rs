//! Clients that disconnect in every phase, in every way. Their requests' memory is freed, as `/v1/status` and the ledger's pools show.
//!
//! A client that closes its connection is noticed at once, and its slot is free after the current step. A client that vanishes (here:
//! its kernel drops all packets) is detected by the server's kernel. A client that does not read is disconnected after the same time.
//! The engine waits for neither.

use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::product::{Server, eventually, eventually_within, fixture, repository, rests};

/// How a client disconnects.
#[derive(Clone, Copy, Debug)]
enum Going {
    /// It closes its socket.
    Close,
    /// It resets the connection: unread input makes the system send an RST.
    Reset,
}

/// Waits until all memory is freed. Returns the engine's steps since the request left the list.
fn steps_to_rest(server: &Server, what: &str, within: Duration) -> u64 {
    let (since, mut gone) = (Instant::now(), None);
    loop {
        let page = server.status();
        let steps = page["totals"]["steps"].as_u64().unwrap();
        if page["requests"].as_array().unwrap().is_empty() {
            let from = *gone.get_or_insert(steps);
            if rests(&page) {
                return steps - from;
            }
        }
        assert!(since.elapsed() < within, "{what}: not all is back: {page}");
    }
}

#[test]
#[ignore = "models"]
fn disconnect_cancels_the_request_in_every_phase() {
    // One request runs at a time, so that others wait. Steps are small, so that a prompt takes many.
    let flags = [
        "--running-max-req-size",
        "1",
        "--graph-max-batch-size",
        "1",
        "--batch-max-tokens",
        "16",
        "--max-total-token-num",
        "8192",
    ];
    let server = Server::start(&flags);
    let long = json!({"prompt": vec![7; 4000], "max_tokens": 100, "ignore_eos": true});
    let talk = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true});
    let call = json!({
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, "ignore_eos": true, "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "string", "minLength": 5000}}, "required": ["a"]}}}],
    });
    let mut seen = 0;
    for stream in [false, true] {
        for going in [Going::Close, Going::Reset] {
            for (what, path, body, phase) in [
                ("prefill", "/v1/completions", &long, "prefill"),
                ("decode", "/v1/completions", &talk, "decode"),
                ("tool grammar", "/v1/chat/completions", &call, "decode"),
            ] {
                let mut body = body.clone();
                body["stream"] = stream.into();
                // Other tokens each time, because a cached prompt would be computed at once.
                if body["prompt"].is_array() {
                    seen += 1;
                    body["prompt"][0] = json!(100 + seen);
                }
                let client = server.send(path, &body);
                let what = format!("{what}, {going:?}, stream {stream}");
                leaves_while_it_runs(&server, &what, client, (phase, stream, going));
            }
        }
    }
    for stream in [false, true] {
        for reads in [false, true] {
            for going in [Going::Close, Going::Reset] {
                leaves_after_the_end(&server, stream, reads, going);
            }
        }
    }
    let answer = server.ask("/v1/completions", &json!({"prompt": "z", "max_tokens": 2}));
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    assert_eq!(server.memory()["device_allocations"]["after_ready"], 0);
}

/// Disconnects a client while its request is in `phase`. First, a client with a waiting request disconnects.
fn leaves_while_it_runs(server: &Server, what: &str, client: TcpStream, (phase, stream, going): (&str, bool, Going)) {
    eventually(&format!("{what}: it runs"), || {
        let computed = |row: &Value| row["kv_bytes"].as_u64() > Some(0) && row["host_bytes"].as_u64() > Some(0);
        server.rows(phase).iter().any(computed)
    });
    let waiting = server.send("/v1/completions", &json!({"prompt": "y", "stream": stream}));
    eventually("another waits", || server.rows("waiting").len() == 1);
    leave(waiting, going);
    // The request leaves the queue first, then the list.
    let left = || server.status()["requests"].as_array().unwrap().len();
    eventually("the waiting request is gone", || server.rows("waiting").is_empty() && left() < 2);
    assert_eq!(left(), 1, "{what}: the other one stays");
    leave(client, going);
    // A disconnect that unread input hides is checked for every two seconds.
    let steps = steps_to_rest(server, what, Duration::from_secs(30));
    // One step runs when the server drops the request; the next step does not have it.
    assert!(steps <= 1, "{what}: {steps} steps until all was back");
}

/// Disconnects a client after its answer has ended, read or unread.
fn leaves_after_the_end(server: &Server, stream: bool, reads: bool, going: Going) {
    let body = json!({"prompt": "z", "max_tokens": 2, "stream": stream});
    let finished = || server.status()["totals"]["finished"].as_u64().unwrap();
    let before = finished();
    let mut client = server.send("/v1/completions", &body);
    if reads {
        read_to(&mut client, if stream { "[DONE]" } else { "usage" });
    }
    // Finished requests are counted, because before the request arrives the server is at rest, too.
    eventually("it has ended", || finished() > before && server.at_rest());
    leave(client, going);
    assert!(server.at_rest());
}

/// A prompt with six large images, all new to the server.
fn gallery(number: usize, stream: bool) -> Value {
    let mut file = std::fs::read(repository().join("tests/fixtures/media/large.jpg")).unwrap();
    let parts: Vec<Value> = (0..6)
        .map(|i| {
            // Bytes after the image's end: the same image with another hash.
            file.extend_from_slice(&[number as u8, i]);
            let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(&file));
            json!({"type": "image_url", "image_url": {"url": url}})
        })
        .collect();
    json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 2000, "ignore_eos": true, "stream": stream})
}

/// A server with slow image encoding: one image at once, on one thread.
fn seeing() -> Server {
    let flags = [
        "--visual-infer-batch-size",
        "1",
        "--threads",
        "1",
        "--graph-max-batch-size",
        "4",
        "--max-total-token-num",
        "16384",
    ];
    Server::start_model(&fixture("vl-qwen3.5"), &flags)
}

#[test]
fn disconnect_during_encoding_cancels_the_images() {
    let server = seeing();
    let mut number = 0;
    for stream in [false, true] {
        for going in [Going::Close, Going::Reset] {
            number += 1;
            let client = server.send("/v1/chat/completions", &gallery(number, stream));
            let what = format!("encode, {going:?}, stream {stream}");
            eventually(&what, || server.rows("encode").len() == 1);
            leave(client, going);
            let steps = steps_to_rest(&server, &what, Duration::from_secs(30));
            assert!(steps <= 1, "{what}: {steps} steps until all was back");
        }
    }
    let page = server.memory();
    assert_eq!(page["device_allocations"]["after_ready"], 0, "{page}");
}

#[cfg(target_os = "linux")]
#[test]
fn clients_that_vanish_or_do_not_read_while_their_images_are_encoded_are_found_out() {
    let server = seeing();
    let mut clients = Vec::new();
    for (number, stream) in [(10, false), (11, true)] {
        let client = server.send("/v1/chat/completions", &gallery(number, stream));
        eventually("it is encoded", || server.rows("encode").len() == 1);
        vanish(&client);
        clients.push(client);
    }
    // These clients stay connected and do not read.
    for (number, stream) in [(12, false), (13, true)] {
        clients.push(server.send("/v1/chat/completions", &gallery(number, stream)));
        eventually("it is encoded", || !server.rows("encode").is_empty());
    }
    let since = Instant::now();
    let computed = || server.status()["totals"]["running"] == 0;
    while !(computed() && server.at_rest()) {
        assert!(since.elapsed() < VANISHED_WITHIN + Duration::from_secs(15), "{}", server.status());
        thread::sleep(Duration::from_millis(100));
    }
    println!("all four were given up after {:.1} s", since.elapsed().as_secs_f32());
    drop(clients);
}

fn leave(client: TcpStream, going: Going) {
    match going {
        Going::Close => client.shutdown(Shutdown::Both).unwrap(),
        Going::Reset => {
            // Nothing is read, so closing resets the connection: there is input in the buffer, or it arrives later.
            drop(client);
        }
    }
}

fn read_to(client: &mut TcpStream, marker: &str) -> String {
    let (mut said, mut piece) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&said).contains(marker) {
        let n = client.read(&mut piece).unwrap();
        assert!(n > 0, "ended before {marker}: {}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&piece[..n]);
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Open connections without the one that asks.
fn connections(server: &Server) -> u64 {
    let page = server.get("/metrics").text();
    let line = page.lines().find_map(|line| line.strip_prefix("plimsoll_http_connections "));
    line.and_then(|number| number.parse::<u64>().ok()).unwrap_or_else(|| panic!("{page}")) - 1
}

/// Makes the kernel drop all packets for this client, unread and without a reply. The client sends nothing
/// either. To the server it looks like a client with its cable pulled.
#[cfg(target_os = "linux")]
fn vanish(client: &TcpStream) {
    use socket2::{SockFilter, SockRef};
    // "return 0": the filter drops every packet.
    SockRef::from(client).attach_filter(&[SockFilter::new(0x06, 0, 0, 0)]).unwrap();
}

/// The time limit of the issue, and three seconds more for a busy machine.
#[cfg(target_os = "linux")]
const VANISHED_WITHIN: Duration = Duration::from_secs(25 + 3);

#[cfg(target_os = "linux")]
#[test]
#[ignore = "models"]
fn clients_that_vanish_are_found_out_in_every_phase() {
    let flags = ["--graph-max-batch-size", "6", "--batch-max-tokens", "16", "--max-total-token-num", "24576"];
    let server = Server::start(&flags);
    let endless = |stream: bool| json!({"prompt": "Once", "max_tokens": 8000, "ignore_eos": true, "stream": stream});
    let call = |stream: bool| {
        json!({
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 7000, "ignore_eos": true, "tool_choice": "required",
            "stream": stream, "tools": [{"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "properties": {"a": {"type": "string", "minLength": 5000}}, "required": ["a"]}}}],
        })
    };
    let long =
        |stream: bool| json!({"prompt": vec![7; 3000], "max_tokens": 5000, "ignore_eos": true, "stream": stream});
    let patience = Duration::from_secs(60);
    let mut clients = Vec::new();
    // The server writes these two answers, and the clients never acknowledge them.
    for stream in [false, true] {
        let client = server.send("/v1/completions", &json!({"prompt": "z", "max_tokens": 2, "stream": stream}));
        vanish(&client);
        clients.push(client);
    }
    eventually_within("who is answered holds nothing", patience, || server.at_rest());
    let rows = |phase: &str| {
        let page = server.status();
        page["requests"].as_array().unwrap().iter().filter(|row| row["phase"] == phase).count()
    };
    for stream in [false, true] {
        clients.push(server.send("/v1/completions", &endless(stream)));
        clients.push(server.send("/v1/chat/completions", &call(stream)));
    }
    eventually_within("four write", patience, || rows("decode") == 4);
    // A long prompt takes all rows that are left; requests behind it wait. It is sent first: the server could read a
    // shorter body sooner and start that request instead.
    clients.push(server.send("/v1/completions", &long(false)));
    eventually_within("one is read", patience, || rows("prefill") == 1);
    clients.push(server.send("/v1/completions", &endless(false)));
    clients.push(server.send("/v1/completions", &long(true)));
    clients.push(server.send("/v1/completions", &endless(true)));
    eventually_within("others wait", patience, || rows("waiting") >= 1);
    assert!(rows("prefill") >= 1, "{}", server.status());
    println!("{} in a prompt, {} decoding, {} waiting", rows("prefill"), rows("decode"), rows("waiting"));
    clients.iter().skip(2).for_each(vanish);
    let since = Instant::now();
    while !server.at_rest() || connections(&server) > 0 {
        assert!(since.elapsed() < VANISHED_WITHIN, "after {:?}: {}", since.elapsed(), server.status());
        thread::sleep(Duration::from_millis(100));
    }
    println!("all ten were found out after {:.1} s", since.elapsed().as_secs_f32());
    drop(clients);
}

#[test]
#[ignore = "models"]
fn the_engine_waits_for_no_reader() {
    let server = Server::start(&["--graph-max-batch-size", "8", "--max-total-token-num", "16384"]);
    // The answer fills every buffer on the way, because log-probabilities are long.
    let body = |stream: bool| json!({"prompt": "Once", "max_tokens": 120, "n": 4, "ignore_eos": true, "stream": stream, "logprobs": 20, "seed": 1});
    let mut slow: Vec<TcpStream> =
        [false, true].iter().map(|stream| server.send("/v1/completions", &body(*stream))).collect();
    eventually("both run", || server.status()["totals"]["running"] == 8);
    // After them come requests for every other phase: waiting, long prompts, forced calls. No client reads its
    // answer.
    for stream in [false, true] {
        let long =
            json!({"prompt": vec![7; 600], "max_tokens": 20, "ignore_eos": true, "stream": stream, "logprobs": 20});
        slow.push(server.send("/v1/completions", &long));
        let call = json!({
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "ignore_eos": true, "tool_choice": "required",
            "stream": stream, "tools": [{"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "properties": {"a": {"type": "string", "minLength": 5000}}, "required": ["a"]}}}],
        });
        slow.push(server.send("/v1/chat/completions", &call));
    }
    eventually("four wait", || server.rows("waiting").len() == 4);
    // Their slots are free after the last token, read or not.
    eventually_within("all are computed", Duration::from_secs(300), || {
        let page = server.status();
        page["totals"]["running"] == 0
            && page["totals"]["waiting"] == 0
            && page["pools"]["kv_pages"]["used"] == page["pools"]["kv_pages"]["cached"]
    });
    let answer = server.ask("/v1/completions", &json!({"prompt": "z", "max_tokens": 2}));
    assert_eq!(answer["usage"]["completion_tokens"], 2, "others are served meanwhile");
    // If a client reads nothing for twelve seconds, the server closes its connection and frees its memory.
    eventually_within("all is back", Duration::from_secs(28), || server.at_rest() && connections(&server) == 0);
    drop(slow);
}
