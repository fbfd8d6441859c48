//! `GET /v1/models`, and how a JSON answer is sent.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use plimsoll_memory::faults::{self, Site};
use plimsoll_text::strftime;
use serde::Serialize;

use crate::config::Served;
use crate::error::ApiResult;
use crate::limits::Held;
use crate::model_state::ModelState;
use crate::path::Name;

/// Seconds since 1970.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A JSON answer of at most about `bytes` bytes, written into a block of that size, so that it is never held twice.
pub(crate) fn json_sized(answer: &impl Serialize, bytes: usize, held: Held) -> Response {
    let mut body = Vec::with_capacity(bytes);
    // As in `json`.
    let _ = serde_json::to_writer(&mut body, answer);
    json_text(body.into(), Some(held))
}

/// A JSON answer. What it holds of the byte budget goes back when the connection has sent it.
pub(crate) fn json(answer: &impl Serialize, held: Option<Held>) -> Response {
    // Plain structs serialized into memory: this cannot fail.
    json_text(serde_json::to_vec(answer).unwrap_or_default().into(), held)
}

/// Bytes of a text as JSON, with a comma.
pub(crate) fn json_bytes(text: &str) -> usize {
    let escaped = |byte| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => "\\u0000".len(),
        _ => 1,
    };
    text.bytes().map(escaped).sum::<usize>() + "\"\",".len()
}

/// A JSON answer that is written already.
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

/// One name of a model.
#[derive(Serialize)]
pub(crate) struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: Option<&'a str>,
    /// What Anthropic's clients read.
    #[serde(rename = "type")]
    kind: &'static str,
    display_name: &'a str,
    created_at: String,
    /// Known while it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u32>,
    /// Where it stands, on a server of several.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Model<'a>>,
    /// Anthropic's clients turn pages: this is all of them.
    first_id: Option<&'a str>,
    last_id: Option<&'a str>,
    has_more: bool,
}

impl<'a> Model<'a> {
    /// The list entry of a model under its name `id`. `root` is the model's first name, `created` a time in Unix
    /// seconds. `served` is present while the model is loaded.
    pub fn new(id: &'a str, root: &'a str, created: u64, served: Option<&Served>, state: Option<&'static str>) -> Self {
        let max_model_len = served.map(|served| served.engine.limits().max_req_total_len);
        Self {
            id,
            object: "model",
            created,
            owned_by: "plimsoll",
            root,
            parent: None,
            kind: "model",
            display_name: id,
            created_at: strftime("%Y-%m-%dT%H:%M:%SZ", created),
            max_model_len,
            state,
        }
    }
}

/// The list of all of them.
pub(crate) fn listed(data: Vec<Model<'_>>) -> Response {
    let (first_id, last_id) = (data.first().map(|model| model.id), data.last().map(|model| model.id));
    json(&List { object: "list", data, first_id, last_id, has_more: false }, None)
}

fn model<'a>(state: &'a ModelState, id: &'a str) -> Model<'a> {
    Model::new(id, &state.served.names[0], state.served.created_s, Some(&state.served), None)
}

/// Every name the model goes by.
pub(crate) async fn list(State(state): State<Arc<ModelState>>) -> Response {
    listed(state.served.names.iter().map(|name| model(&state, name)).collect())
}

/// One name; 404 when the server does not know it.
pub(crate) async fn one(State(state): State<Arc<ModelState>>, Name(id): Name) -> ApiResult<Response> {
    state.check_model(&id)?;
    Ok(json(&model(&state, &id), None))
}
