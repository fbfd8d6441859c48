//! JSON-RPC: requests as text, and the answer to one.

use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::McpError;
use super::error::printable;
use super::events::EventReader;

/// The revisions of the protocol that a server may choose; the client proposes the last one.
pub(super) const REVISIONS: [&str; 3] = ["2025-03-26", "2025-06-18", "2025-11-25"];

/// JSON-RPC's code for an unknown method.
const METHOD_NOT_FOUND: i64 = -32601;

/// The most requests that a server may send to this client before its answer.
const SERVER_REQUESTS_MAX: usize = 16;

/// The longest id of a server's request, in bytes.
const ID_BYTES_MAX: usize = 128;

/// The most JSON values of an answer.
const VALUES_MAX: usize = 65_536;

pub(super) fn initialize(id: u64) -> String {
    let client = json!({"name": "plimsoll", "version": env!("CARGO_PKG_VERSION")});
    let revision = REVISIONS[REVISIONS.len() - 1];
    let params = json!({"protocolVersion": revision, "capabilities": {}, "clientInfo": client});
    request(id, "initialize", &params.to_string())
}

pub(super) fn list(id: u64, cursor: Option<&str>) -> String {
    let params = cursor.map_or(json!({}), |cursor| json!({"cursor": cursor}));
    request(id, "tools/list", &params.to_string())
}

/// `arguments`: JSON of an object.
pub(super) fn call(id: u64, name: &str, arguments: &str) -> String {
    let name = serde_json::Value::from(name);
    request(id, "tools/call", &format!("{{\"name\":{name},\"arguments\":{arguments}}}"))
}

pub(super) fn initialized() -> String {
    json!({"jsonrpc": "2.0", "method": "notifications/initialized"}).to_string()
}

pub(super) fn cancelled(id: u64) -> String {
    let params = json!({"requestId": id, "reason": "the client of this server cancelled its request"});
    json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}).to_string()
}

fn request(id: u64, method: &str, params: &str) -> String {
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"{method}\",\"params\":{params}}}")
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<Failure<'a>>,
    #[serde(borrow)]
    method: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Failure<'a> {
    code: i64,
    #[serde(default)]
    message: String,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

/// The kind of a message from the server.
#[derive(Debug)]
pub(super) enum Heard {
    /// The answer to the request.
    Answer(Result<Box<RawValue>, McpError>),
    /// A request of the server, and the reply to it.
    Request { reply: String },
    /// A notification, or the answer to another request.
    Other,
}

/// Reads a message that arrives before or as the answer to the request `id`.
pub(super) fn heard(message: &[u8], id: u64) -> Heard {
    let invalid = |why: &str| Heard::Answer(Err(McpError::invalid(why)));
    let Ok(text) = std::str::from_utf8(message) else { return invalid("a message is not UTF-8") };
    let values = values(text);
    if values > VALUES_MAX {
        return invalid(&format!("a message has about {values} JSON values; the limit is {VALUES_MAX}"));
    }
    let Ok(message) = serde_json::from_str::<Message<'_>>(text) else {
        return invalid("a message is not one of JSON-RPC");
    };
    let own = message.id.filter(|raw| raw.get() != "null");
    match (message.method, own) {
        (Some(method), Some(id)) => return replied(method, id),
        (Some(_), None) => return Heard::Other,
        (None, Some(raw)) if raw.get() != id.to_string() => return Heard::Other,
        (None, _) => {}
    }
    match (message.result, message.error) {
        // An error without an id answers the only open request.
        (_, Some(error)) => Heard::Answer(Err(error.into())),
        (Some(result), None) if own.is_some() => Heard::Answer(Ok(result.to_owned())),
        (None, None) if own.is_some() => invalid("an answer has neither a result nor an error"),
        (_, None) => Heard::Other,
    }
}

/// Reads the messages of a stream, until the answer to a request arrives.
pub(super) struct Messages {
    events: EventReader,
    id: u64,
    /// The number of the server's requests so far.
    requests: usize,
}

impl Messages {
    pub fn new(id: u64) -> Self {
        Self { events: EventReader::default(), id, requests: 0 }
    }

    /// Reads more. Adds a reply for each request of the server, and returns the answer once it has arrived.
    pub fn read(&mut self, bytes: &[u8], replies: &mut Vec<String>) -> Option<Result<Box<RawValue>, McpError>> {
        let Self { events, id, requests } = self;
        events.push(bytes, |message| match heard(message, *id) {
            Heard::Answer(answer) => Some(answer),
            Heard::Request { .. } if *requests == SERVER_REQUESTS_MAX => {
                let why = format!("it sends more than {SERVER_REQUESTS_MAX} requests, which is the limit");
                Some(Err(McpError::invalid(why)))
            }
            Heard::Request { reply } => {
                *requests += 1;
                replies.push(reply);
                None
            }
            Heard::Other => None,
        })
    }
}

/// Answers a request of the server: only `ping` is supported. This client offers no model, no files and no user.
fn replied(method: &RawValue, id: &RawValue) -> Heard {
    let (id, is_string) = (id.get(), id.get().starts_with('"'));
    if id.len() > ID_BYTES_MAX || !(is_string || id.parse::<i64>().is_ok()) {
        let why = format!("the id of a request must be an integer or a string of at most {ID_BYTES_MAX} bytes");
        return Heard::Answer(Err(McpError::invalid(why)));
    }
    let outcome = match method.get() {
        "\"ping\"" => "\"result\":{}".to_owned(),
        _ => format!("\"error\":{{\"code\":{METHOD_NOT_FOUND},\"message\":\"this client answers ping only\"}}"),
    };
    Heard::Request { reply: format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},{outcome}}}") }
}

/// Returns the error message in the body of a refused request, with the revisions that it names.
pub(super) fn refusal(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Supported {
        supported: Vec<String>,
    }
    let text = std::str::from_utf8(body).ok().filter(|text| values(text) <= VALUES_MAX)?;
    let Failure { message, data, .. } = serde_json::from_str::<Message<'_>>(text).ok()?.error?;
    let supported = data.and_then(|data| serde_json::from_str::<Supported>(data.get()).ok());
    let mut words = message;
    if let Some(Supported { supported }) = supported {
        words = format!("{words} (it speaks {}; known here are {})", supported.join(", "), REVISIONS.join(", "));
    }
    Some(printable(&words)).filter(|words| !words.is_empty())
}

impl From<Failure<'_>> for McpError {
    fn from(failure: Failure<'_>) -> Self {
        Self::Rpc { code: failure.code, message: printable(&failure.message) }
    }
}

/// Returns about how many values JSON holds.
fn values(json: &str) -> usize {
    json.bytes().filter(|byte| matches!(byte, b',' | b'[' | b'{' | b':')).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_told_from_other_messages() {
        let of = |text: &str| match heard(text.as_bytes(), 7) {
            Heard::Answer(answer) => Some(answer),
            Heard::Request { .. } | Heard::Other => None,
        };
        assert_eq!(of(r#"{"jsonrpc":"2.0","id":7,"result":{"a":1}}"#).unwrap().unwrap().get(), r#"{"a":1}"#);
        assert!(of(r#"{"jsonrpc":"2.0","id":8,"result":{}}"#).is_none());
        assert!(of(r#"{"jsonrpc":"2.0","id":"7","result":{}}"#).is_none());
        assert!(of(r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#).is_none());
        assert!(of(r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{}}"#).is_none());
        assert!(of("{}").is_none());
        let error = of(r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32602,"message":"no\nsuch tool"}}"#);
        assert_eq!(error.unwrap().unwrap_err(), McpError::Rpc { code: -32602, message: "no such tool".into() });
        let error = of(r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"x"}}"#);
        assert!(matches!(error, Some(Err(McpError::Rpc { .. }))));
        for bad in ["[", "[]", "7", "\u{1}", r#"{"id":7}"#, r#"{"id":7,"error":3}"#] {
            assert!(matches!(of(bad), Some(Err(McpError::Invalid(_)))), "{bad}");
        }
        let many = format!("{{\"id\":7,\"result\":[{}0]}}", "0,".repeat(VALUES_MAX));
        assert!(matches!(of(&many), Some(Err(McpError::Invalid(_)))));
    }

    #[test]
    fn a_ping_is_answered_and_other_requests_are_refused() {
        let reply = |text: &str| match heard(text.as_bytes(), 7) {
            Heard::Request { reply } => reply,
            other => panic!("{text}: {other:?}"),
        };
        let pong = reply(r#"{"jsonrpc":"2.0","id":"p\"1","method":"ping"}"#);
        assert_eq!(pong, r#"{"jsonrpc":"2.0","id":"p\"1","result":{}}"#);
        for method in ["sampling/createMessage", "roots/list", "elicitation/create", "x"] {
            // Client and server number their requests independently: 7 is not the answer.
            let text = format!(r#"{{"jsonrpc":"2.0","id":7,"method":"{method}","params":{{}}}}"#);
            let refused: serde_json::Value = serde_json::from_str(&reply(&text)).unwrap();
            assert_eq!((&refused["id"], &refused["error"]["code"]), (&7.into(), &(-32601).into()), "{method}");
        }
        let long = format!("\"{}\"", "x".repeat(ID_BYTES_MAX));
        for id in ["1.5", "{}", "[1]", "true", &long] {
            let text = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
            assert!(matches!(heard(text.as_bytes(), 7), Heard::Answer(Err(McpError::Invalid(_)))), "{id}");
        }
    }

    #[test]
    fn a_refusal_names_the_revisions_of_the_server() {
        let body = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32022,"message":"Unsupported protocol version",
            "data":{"supported":["2026-07-28"],"requested":"2025-11-25"}}}"#;
        let known = "known here are 2025-03-26, 2025-06-18, 2025-11-25";
        let expected = format!("Unsupported protocol version (it speaks 2026-07-28; {known})");
        assert_eq!(refusal(body.as_bytes()), Some(expected));
        assert_eq!(refusal(br#"{"error":{"code":1,"message":"no"}}"#).as_deref(), Some("no"));
        for none in ["", "no", "{}", r#"{"error":"no"}"#, r#"{"error":{"code":1}}"#] {
            assert_eq!(refusal(none.as_bytes()), None, "{none}");
        }
    }
}
