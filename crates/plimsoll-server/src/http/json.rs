//! JSON answers, and the number of bytes of a text in JSON.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use plimsoll_memory::faults::{self, Site};
use serde::Serialize;

use crate::http::budget::Held;

/// Makes a JSON answer of at most about `bytes` bytes, written into a block of that size, so that it is never held twice.
pub(crate) fn json_sized(answer: &impl Serialize, bytes: usize, held: Held) -> Response {
    let mut body = Vec::with_capacity(bytes);
    // As in `json`.
    let _ = serde_json::to_writer(&mut body, answer);
    json_text(body.into(), Some(held))
}

/// Makes a JSON answer. Its share of the byte budget is released when the connection has sent it.
pub(crate) fn json(answer: &impl Serialize, held: Option<Held>) -> Response {
    // Plain structs serialized into memory: this cannot fail.
    json_text(serde_json::to_vec(answer).unwrap_or_default().into(), held)
}

/// Returns the bytes of a text as JSON, with a comma.
pub(crate) fn json_bytes(text: &str) -> usize {
    let escaped = |byte| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => "\\u0000".len(),
        _ => 1,
    };
    text.bytes().map(escaped).sum::<usize>() + "\"\",".len()
}

/// Makes an answer of finished JSON.
pub(crate) fn json_text(bytes: Bytes, held: Option<Held>) -> Response {
    faults::site(Site::Shape);
    let body = Body::from(Bytes::from_owner(Answer { bytes, _held: held }));
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
}

struct Answer {
    bytes: Bytes,
    _held: Option<Held>,
}

impl AsRef<[u8]> for Answer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}
