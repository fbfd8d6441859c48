//! Clients that go in every phase: what their requests held is back, seen through `/v1/status` and the ledger's pools.
//!
//! Slow readers and half-open connections, which take their time by design, are in `plimsoll-server/tests/streams.rs`.

use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use serde_json::json;

use crate::product::{Server, eventually};

/// How a client goes.
#[derive(Clone, Copy, Debug)]
enum Going {
    /// It closes its socket.
    Close,
    /// It resets the connection: what it had not read makes the system send an RST.
    Reset,
}

#[test]
fn whoever_goes_takes_its_request_along_in_every_phase() {
    // One place, so that others wait; small steps, so that a prompt takes many.
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
                // Other tokens each time: a cached prompt is computed at once.
                if body["prompt"].is_array() {
                    seen += 1;
                    body["prompt"][0] = json!(100 + seen);
                }
                let client = server.send(path, &body);
                let patience = Duration::from_secs(20);
                eventually(&format!("{what}, {going:?}, stream {stream}: it runs"), patience, || {
                    server
                        .rows(phase)
                        .iter()
                        .any(|row| row["kv_bytes"].as_u64() > Some(0) && row["host_bytes"].as_u64() > Some(0))
                });
                // Behind it one that waits goes first.
                let waiting = server.send("/v1/completions", &json!({"prompt": "y", "stream": stream}));
                eventually("another waits", patience, || server.rows("waiting").len() == 1);
                leave(waiting, going);
                eventually("who waited is gone", patience, || server.rows("waiting").is_empty());
                assert_eq!(server.status()["requests"].as_array().unwrap().len(), 1, "{what}: the other one stays");
                leave(client, going);
                // A hang-up that unread input hides is looked for every two seconds.
                eventually(
                    &format!("{what}, {going:?}, stream {stream}: all is back"),
                    Duration::from_secs(10),
                    || server.at_rest(),
                );
            }
        }
    }
    // After its end.
    let mut client = server.send("/v1/completions", &json!({"prompt": "z", "max_tokens": 2, "stream": true}));
    let (mut said, mut piece) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&said).contains("[DONE]") {
        let n = client.read(&mut piece).unwrap();
        assert!(n > 0, "the stream came to its end");
        said.extend_from_slice(&piece[..n]);
    }
    eventually("it has ended", Duration::from_secs(20), || server.at_rest());
    drop(client);
    let answer = server.ask("/v1/completions", &json!({"prompt": "z", "max_tokens": 2}));
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    assert_eq!(server.memory()["device_allocations"]["after_ready"], 0);
}

fn leave(client: TcpStream, going: Going) {
    match going {
        Going::Close => client.shutdown(Shutdown::Both).unwrap(),
        Going::Reset => {
            // Nothing is read: closing with input in the buffer, or input that comes later, resets.
            drop(client);
        }
    }
}
