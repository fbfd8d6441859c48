//! Hostile clients: too much, too slow, too deep, too many. The server answers, closes, and is idle afterwards.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use plimsoll_engine::Limits;
use plimsoll_engine::testing::{letters, limits};
use plimsoll_server::ServerConfig;
use serde_json::json;

use crate::common::{Answer, Server, config, eventually, hasty, post};

#[test]
fn an_announced_hundred_megabytes_are_refused_unread() {
    let server = Server::start(letters);
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 104857600\r\n\r\n";
    let mut client = server.send(head);
    let answer = client.answer();
    let error = answer.error(413);
    assert_eq!(error["code"], "request_too_large");
    assert!(error["message"].as_str().unwrap().contains("1048576 bytes"), "{error}");
    assert_eq!(answer.header("connection"), Some("close"));
    // A client that continues to send is not cut off before it can read the answer, and costs no memory.
    let mut client = server.send(head);
    let junk = vec![b'x'; 1 << 20];
    for sent in 0..20 {
        let went = client.stream.write_all(&junk);
        assert!(went.is_ok(), "cut off after {sent} MiB: {went:?}");
    }
    client.answer().error(413);
    server.assert_idle();
}

#[test]
fn an_unannounced_flood_is_refused_while_it_is_read() {
    let server = Server::start(letters);
    let mut client = server.send("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    for _ in 0..64 {
        if client.stream.write_all(chunk.as_bytes()).is_err() {
            break;
        }
    }
    client.answer().error(413);
    server.assert_idle();
}

#[test]
fn bytes_in_flight_are_bounded_over_all_clients() {
    // Room for three bodies of 64 KiB, not for a fourth. Each may grow by an eighth and has another 64 KiB in buffers.
    let tight = ServerConfig { max_body_bytes: 64 << 10, max_bytes_in_flight: 430 << 10, ..config() };
    let server = Server::with(tight, limits(), letters);
    let begun = || {
        let mut text = post("/v1/completions", &"x".repeat(64 << 10));
        text.truncate(text.len() - 10);
        text
    };
    let clients: Vec<_> = (0..3).map(|_| server.send(begun())).collect();
    eventually("all are held", || {
        server.get("/v1/memory").json()["pools"]["http_bytes"]["used"].as_u64().unwrap() >= 3 * ((64 << 10) - 10)
    });
    let answer = server.send(begun()).answer();
    assert_eq!(answer.header("retry-after"), Some("1"));
    answer.error(503);
    assert_eq!(server.get("/health").status, 200);
    drop(clients);
    server.assert_idle();
    server.post("/v1/completions", &json!({"prompt": "x"})).ok();
}

#[test]
fn what_is_made_of_ids_is_held_before_it_is_written() {
    // A body of 64 KiB fits; its 32,768 control characters become 192 KiB of JSON.
    let tight = ServerConfig { max_body_bytes: 128 << 10, max_bytes_in_flight: 208 << 10, ..config() };
    let large = Limits { max_req_total_len: 32 << 10, max_total_token_num: 32 << 10, ..limits() };
    let server = Server::with(tight, large, letters);
    let never = server.post("/detokenize", &json!({"tokens": vec![1; 32 << 10]})).error(400);
    assert!(
        never["message"].as_str().unwrap().contains("--max-bytes-in-flight") && never["param"] == "tokens",
        "{never}"
    );
    assert_eq!(server.post("/detokenize", &json!({"tokens": vec![97; 32 << 10]})).ok()["prompt"], "a".repeat(32 << 10));
    let strs = |text: &str| json!({"prompt": text, "return_token_strs": true});
    assert_eq!(server.post("/tokenize", &strs(&"\u{1}".repeat(9000))).error(400)["param"], "prompt");
    assert_eq!(server.post("/tokenize", &strs(&"a".repeat(9000))).ok()["token_strs"][8999], "a");
    server.assert_idle();
}

#[test]
fn what_an_answer_repeats_of_its_prompt_is_held() {
    // 2,000 control characters are 12,000 bytes of JSON: room for one answer, not for eight.
    let tight = ServerConfig { max_body_bytes: 16 << 10, max_bytes_in_flight: 84 << 10, ..config() };
    let long = Limits { max_req_total_len: 2048, ..limits() };
    let server = Server::with(tight, long, letters);
    for stream in [false, true] {
        let echo = |n| json!({"prompt": vec![1; 2000], "echo": true, "n": n, "max_tokens": 1, "stream": stream});
        let never = server.post("/v1/completions", &echo(8)).error(400);
        assert!(never["message"].as_str().unwrap().contains("limit of 86016"), "stream {stream}: {never}");
        let said = server.post("/v1/completions", &echo(1));
        let text = match stream {
            false => said.ok()["choices"][0]["text"].as_str().unwrap().to_owned(),
            true => {
                said.events().iter().map(|event| event["choices"][0]["text"].as_str().unwrap().to_owned()).collect()
            }
        };
        assert!(text.starts_with(&"\u{1}".repeat(2000)) && text.len() > 2000, "stream {stream}");
    }
    let long = server.post("/v1/completions", &json!({"prompt": vec![1; 2049], "echo": true})).error(400);
    assert_eq!((&long["code"], &long["param"]), (&json!("context_length_exceeded"), &json!("prompt")), "{long}");
    server.assert_idle();
}

#[test]
#[ignore = "soak"]
fn slow_heads_and_slow_bodies_are_closed() {
    let server = Server::with(hasty(), limits(), letters);
    // A head that never ends.
    let mut client = server.connect();
    for byte in b"GET /health HT" {
        if client.stream.write_all(&[*byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(client.is_closed());
    // A connection that sends nothing, and one that sends nothing after its first request.
    assert!(server.connect().is_closed());
    let mut client = server.send("GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n");
    client.answer().ok();
    assert!(client.is_closed());
    // A body that stops, and one that arrives byte by byte.
    let text = post("/v1/completions", &json!({"prompt": "x"}).to_string());
    server.send(&text[..text.len() - 3]).answer().error(408);
    let mut client = server.send(&text[..text.len() - 12]);
    for byte in "x".repeat(11).bytes() {
        if client.stream.write_all(&[byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    client.answer().error(408);
    server.assert_idle();
}

#[test]
fn a_body_that_ends_early_leaves_nothing() {
    let server = Server::start(letters);
    let text = post("/v1/completions", &json!({"prompt": "x"}).to_string());
    for cut in [text.len() - 1, text.len() - 8, text.len() - 13] {
        drop(server.send(&text[..cut]));
    }
    let half = server.send(&text[..text.len() - 2]);
    half.stream.shutdown(std::net::Shutdown::Write).unwrap();
    server.assert_idle();
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

#[test]
fn malformed_input_is_answered_and_leaves_nothing() {
    let server = Server::start(letters);
    let mut bodies: Vec<Vec<u8>> = vec![
        b"\xff\xfe{}".to_vec(),
        b"{\"prompt\":\"\xc3\x28\"}".to_vec(),
        b"{\"prompt\":\"a\0b\"}".to_vec(),
        vec![b'['; 900_000],
        "{\"a\":".repeat(150_000).into_bytes(),
        format!("{{\"prompt\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000)).into_bytes(),
        format!("{{\"metadata\":{}{}}}", "{\"a\":".repeat(100_000), "1".to_owned() + &"}".repeat(100_000)).into_bytes(),
        format!("{{\"prompt\":[{}1]}}", "[],".repeat(300_000)).into_bytes(),
        format!("{{\"prompt\":\"x\",\"stop\":[{}\"\"]}}", "\"\",".repeat(300_000)).into_bytes(),
        format!("{{\"prompt\":\"x\",\"n\":{}}}", "9".repeat(100_000)).into_bytes(),
        format!("{{\"prompt\":\"x\",\"temperature\":1e{}}}", "9".repeat(1000)).into_bytes(),
    ];
    bodies.push(format!("{{{}\"z\":1}}", (0..50_000).map(|i| format!("\"f{i}\":1,")).collect::<String>()).into_bytes());
    for body in bodies {
        let head = post("/v1/completions", "").replace("content-length: 0", &format!("content-length: {}", body.len()));
        let mut client = server.send(head);
        client.write(&body);
        client.answer().error(400);
        let head =
            post("/v1/chat/completions", "").replace("content-length: 0", &format!("content-length: {}", body.len()));
        let mut client = server.send(head);
        client.write(&body);
        client.answer().error(400);
    }
    // Bytes that are not HTTP.
    for bytes in [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], b"\0\0\0\0\r\n\r\n"] {
        let mut client = server.send(bytes);
        let mut rest = Vec::new();
        let _ = client.stream.read_to_end(&mut rest);
        assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 400"), "{}", String::from_utf8_lossy(&rest));
    }
    // A head that is larger than its buffer, and one with too many lines.
    let long = format!("GET /health HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "y".repeat(40_000));
    let mut client = server.connect();
    let _ = client.stream.write_all(long.as_bytes());
    assert_eq!(client.answer().status, 431);
    let many = format!("GET /health HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(200));
    assert_eq!(server.send(many).answer().status, 431);
    server.assert_idle();
    assert!(server.observed.requests.lock().unwrap().is_empty());
}

#[test]
fn one_connection_too_many_is_told_so() {
    let few = ServerConfig { max_connections: 4, ..config() };
    let server = Server::with(few, limits(), letters);
    let held: Vec<_> = (0..4).map(|_| server.connect()).collect();
    std::thread::sleep(Duration::from_millis(100));
    let refused = |answer: Answer| {
        assert_eq!(answer.header("retry-after"), Some("1"));
        let error = answer.error(503);
        let words = error["message"].as_str().unwrap();
        assert!(words.contains("4 connections") && words.contains("--max-connections"), "{words}");
    };
    let ask = |path: &str| server.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).answer();
    // A full server is healthy and reports how full it is; each connection gets one request.
    for path in ["/health", "/ready", "/metrics", "/v1/status", "/v1/memory"] {
        let answer = ask(path);
        assert_eq!((answer.status, answer.header("connection")), (200, Some("close")), "{path}");
    }
    refused(ask("/v1/models"));
    refused(server.post("/v1/completions", &json!({"prompt": "x"})));
    // Twelve more connections send nothing: all but four of them are refused at once.
    let mut more: Vec<_> = (0..12).map(|_| server.connect()).collect();
    let told = more.iter_mut().filter_map(|client| client.comes("HTTP/1.1 503").then_some(())).count();
    assert!(told >= 8, "{told} of 12");
    // A client that is refused while it is still sending may not see the answer.
    let good = |path: &str| {
        let mut client = server.connect();
        let _ = client.stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes());
        client.comes("HTTP/1.1 200")
    };
    eventually("who says nothing makes room", || good("/health"));
    drop((held, more));
    eventually("there is room again", || good("/version"));
}

#[test]
fn health_answers_while_large_prompts_arrive() {
    let mut large = limits();
    large.max_req_total_len = 2 << 20;
    large.max_total_token_num = 1 << 24;
    large.host_bytes = 1 << 30;
    let roomy = ServerConfig {
        max_body_bytes: 2 << 20,
        max_bytes_in_flight: 64 << 20,
        max_tokenizing_bytes: 1 << 30,
        ..config()
    };
    let server = Server::with(roomy, large, letters);
    let words = "the quick brown fox jumps over the lazy dog ".repeat(24_000);
    let body = json!({"prompt": words, "max_tokens": 1}).to_string();
    std::thread::scope(|scope| {
        let busy: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let ask = |_| {
                        let start = Instant::now();
                        server.post_text("/v1/completions", &body).ok();
                        start.elapsed()
                    };
                    (0..3).map(ask).min().unwrap()
                })
            })
            .collect();
        let mut times = Vec::new();
        while busy.iter().any(|thread| !thread.is_finished()) {
            let start = Instant::now();
            assert_eq!(server.get("/version").status, 200);
            times.push(start.elapsed());
        }
        times.sort();
        let p99 = times[times.len() * 99 / 100];
        let prompt = busy.into_iter().map(|thread| thread.join().unwrap()).min().unwrap();
        // The bound is a tenth of a second, or a quarter of a prompt's time on a slow machine.
        let bound = Duration::from_millis(100).max(prompt / 4);
        assert!(p99 < bound, "p99 {p99:?} over {} probes, a prompt {prompt:?}", times.len());
    });
    server.assert_idle();
}

#[test]
fn a_thousand_bad_clients_leave_the_server_as_it_was() {
    let server = Server::start(letters);
    let text = post("/v1/completions", &json!({"prompt": "abc", "max_tokens": 50, "stream": true}).to_string());
    let first: String =
        server.send(&text).answer().events().iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    let before = server.get("/v1/memory").json();
    for i in 0..1000 {
        // Each client disconnects at another point: in the head, in the body, during the answer.
        let mut client = server.connect();
        let cut = (i * 7) % (text.len() + 1);
        let _ = client.stream.write_all(&text.as_bytes()[..cut]);
    }
    server.assert_idle();
    server.alone();
    let fds = |page: &serde_json::Value| page["process"]["fds"].as_i64().unwrap();
    // Tests in the same process have descriptors too; these are closed when the tests end.
    eventually("no descriptors are left over", || fds(&server.get("/v1/memory").json()) <= fds(&before) + 8);
    let text_of = |events: Vec<serde_json::Value>| -> String {
        events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect()
    };
    assert_eq!(text_of(server.send(&text).answer().events()), first);
}
