//! An MCP server on a loopback port, over streamable HTTP or HTTPS, which can misbehave.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::common::PATIENCE;
use crate::common::request::{more, next_request};

/// How the server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Answers with JSON.
    Answers,
    /// Answers in a stream that begins with a notification and stays open.
    Streams,
    /// Says that the tool failed.
    Fails,
    /// Answers with an error of JSON-RPC.
    Refuses,
    Hangs,
    /// Answers with more bytes than are read.
    Floods,
    /// Answers with text that is no JSON.
    Garbles,
    /// Begins a stream and closes the connection.
    BreaksOff,
    Status(u16),
    /// Forgets its sessions once.
    Forgets,
    /// Sends this many rounds of four requests in a stream, waits for a reply to each, and answers.
    Asks(usize),
}

/// The properties of a scripted server.
#[derive(Clone)]
pub struct Traits {
    pub on_list: Manner,
    pub on_call: Manner,
    /// The revision that the server chooses. None: it refuses `initialize` as a server of the revision 2026-07-28 does.
    pub revision: Option<&'static str>,
    pub tls: Option<Arc<ServerConfig>>,
}

/// The methods of the server's requests, which have the ids 0, "1", 2, "3".
pub const ASKED: [&str; 4] = ["ping", "sampling/createMessage", "roots/list", "elicitation/create"];

/// A received message: its method, its head, its body.
#[derive(Clone, Debug)]
pub struct Came {
    pub method: String,
    pub head: String,
    pub body: Value,
}

pub struct McpServer {
    pub address: SocketAddr,
    scheme: &'static str,
    came: Arc<Mutex<Vec<Came>>>,
}

impl McpServer {
    pub fn start(on_list: Manner, on_call: Manner) -> Self {
        Self::with(Traits { on_list, on_call, revision: Some("2025-06-18"), tls: None })
    }

    pub fn with(traits: Traits) -> Self {
        let scheme = if traits.tls.is_some() { "https" } else { "http" };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let came = Arc::<Mutex<Vec<Came>>>::default();
        let seen = Arc::clone(&came);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (seen, traits) = (Arc::clone(&seen), traits.clone());
                std::thread::spawn(move || accepted(stream.unwrap(), &seen, &traits));
            }
        });
        Self { address, scheme, came }
    }

    pub fn url(&self) -> String {
        format!("{}://{}/mcp", self.scheme, self.address)
    }

    pub fn came(&self) -> Vec<Came> {
        self.came.lock().unwrap().clone()
    }

    pub fn methods(&self) -> Vec<String> {
        self.came().into_iter().map(|came| came.method).collect()
    }

    pub fn count(&self, method: &str) -> usize {
        self.methods().iter().filter(|came| *came == method).count()
    }
}

fn tools() -> Value {
    let number = json!({"type": "number"});
    let schema = json!({"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]});
    json!([
        {"name": "add", "description": "Adds.", "inputSchema": schema, "annotations": {"readOnlyHint": true}},
        {"name": "write", "inputSchema": {"type": "object"}}
    ])
}

fn accepted(stream: TcpStream, seen: &Mutex<Vec<Came>>, traits: &Traits) {
    match &traits.tls {
        None => connection(stream, seen, traits),
        Some(config) => {
            let session = ServerConnection::new(Arc::clone(config)).unwrap();
            connection(StreamOwned::new(session, stream), seen, traits);
        }
    }
}

fn connection(mut stream: impl Read + Write, seen: &Mutex<Vec<Came>>, traits: &Traits) {
    let mut bytes = Vec::new();
    while let Some((head, body)) = next_request(&mut stream, &mut bytes) {
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let method = body["method"].as_str().unwrap_or(head.split(' ').next().unwrap()).to_owned();
        let times = {
            let mut seen = seen.lock().unwrap();
            seen.push(Came { method: method.clone(), head: head.clone(), body: body.clone() });
            seen.iter().filter(|came| came.method == method).count()
        };
        let id = &body["id"];
        let (manner, result) = match method.as_str() {
            "initialize" => match traits.revision {
                Some(revision) => {
                    let result = json!({"protocolVersion": revision, "capabilities": {"tools": {}},
                                        "serverInfo": {"name": "scripted", "version": "1"}});
                    (Manner::Answers, result)
                }
                None => {
                    let data = json!({"supported": ["2026-07-28"], "requested": body["params"]["protocolVersion"]});
                    let error = json!({"code": -32022, "message": "Unsupported protocol version", "data": data});
                    let body = json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string();
                    let _ = stream.write_all(whole(400, "application/json", &body).as_bytes());
                    return;
                }
            },
            "tools/list" => (traits.on_list, json!({"tools": tools()})),
            "tools/call" => {
                let arguments = &body["params"]["arguments"];
                let sum = arguments["a"].as_i64().unwrap_or(0) + arguments["b"].as_i64().unwrap_or(0);
                (traits.on_call, json!({"content": [{"type": "text", "text": sum.to_string()}]}))
            }
            _ => {
                if stream.write_all(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n").is_err() {
                    return;
                }
                continue;
            }
        };
        if !answered(&mut stream, manner, id, &result, (times, seen)) {
            return;
        }
    }
}

/// An answer with a length.
fn whole(status: u16, kind: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nmcp-session-id: s-1\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n: hello\n\n";

/// Sends requests and waits until each has a reply.
fn asked(stream: &mut impl Write, rounds: usize, seen: &Mutex<Vec<Came>>) -> bool {
    let mut events = STREAM.to_owned();
    for n in 0..rounds * ASKED.len() {
        let id = if n % 2 == 0 { json!(n) } else { json!(n.to_string()) };
        let request = json!({"jsonrpc": "2.0", "id": id, "method": ASKED[n % ASKED.len()], "params": {}});
        events.push_str(&format!("data: {request}\n\n"));
    }
    let replies = || seen.lock().unwrap().iter().filter(|came| came.method == "post").count();
    let since = Instant::now();
    let sent = stream.write_all(events.as_bytes()).is_ok();
    while sent && replies() < rounds * ASKED.len() && since.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(5));
    }
    sent
}

/// Answers according to `manner`. Returns false if the connection ends.
fn answered(
    stream: &mut (impl Read + Write),
    manner: Manner,
    id: &Value,
    result: &Value,
    (times, seen): (usize, &Mutex<Vec<Came>>),
) -> bool {
    let answer = |result: &Value| json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string();
    let json = "application/json";
    let text = match manner {
        Manner::Answers => whole(200, json, &answer(result)),
        Manner::Forgets if times == 1 => whole(404, json, "{}"),
        Manner::Forgets => whole(200, json, &answer(result)),
        Manner::Fails => {
            let failed = json!({"content": [{"type": "text", "text": "no such file"}], "isError": true});
            whole(200, json, &answer(&failed))
        }
        Manner::Refuses => {
            let error = json!({"code": -32000, "message": "not today"});
            whole(200, json, &json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string())
        }
        Manner::Floods => {
            let flood = json!({"content": [{"type": "text", "text": "x".repeat(1 << 20)}]});
            whole(200, json, &answer(&flood))
        }
        Manner::Garbles => whole(200, json, "certainly! {"),
        Manner::Status(status) => whole(status, "text/plain", "no"),
        Manner::Hangs => {
            while more(stream, &mut Vec::new()).is_some() {}
            return false;
        }
        Manner::Streams | Manner::BreaksOff => {
            let progress = r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1}}"#;
            let begins = format!("{STREAM}data: {progress}\n\n");
            if stream.write_all(begins.as_bytes()).is_err() || manner == Manner::BreaksOff {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
            let event = format!("event: message\ndata: {}\n\n", answer(result));
            let sent = stream.write_all(event.as_bytes()).is_ok();
            while sent && more(stream, &mut Vec::new()).is_some() {}
            return false;
        }
        Manner::Asks(rounds) => {
            let event = format!("data: {}\n\n", answer(result));
            let _ = asked(stream, rounds, seen) && stream.write_all(event.as_bytes()).is_ok();
            return false;
        }
    };
    stream.write_all(text.as_bytes()).is_ok()
}
