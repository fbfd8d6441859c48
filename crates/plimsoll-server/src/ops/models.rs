//! `GET /v1/models`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use plimsoll_text::strftime;
use serde::Serialize;

use crate::http::error::ApiResult;
use crate::http::json::json;
use crate::http::path::Name;
use crate::state::config::{SamplingDefaults, Served};
use crate::state::model::ModelState;

/// One name of a model.
#[derive(Serialize)]
pub(crate) struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: Option<&'a str>,
    /// A field for Anthropic's clients.
    #[serde(rename = "type")]
    kind: &'static str,
    display_name: &'a str,
    created_at: String,
    /// The context length in tokens. Known while it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u32>,
    /// The kinds of input in a prompt: `text`, `image`, `video`, `audio`. Known while it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    input_modalities: Option<Vec<&'static str>>,
    /// The kinds of output: `text`, `embeddings`, `scores`. Known while it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_modalities: Option<Vec<&'static str>>,
    /// Sampling of a request that sets none. Known while it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    default_sampling: Option<SamplingDefaults>,
    /// The model's state, on a server with several.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Model<'a>>,
    /// Fields for Anthropic's clients, which request lists page by page. This list has only one page.
    first_id: Option<&'a str>,
    last_id: Option<&'a str>,
    has_more: bool,
}

impl<'a> Model<'a> {
    /// The list entry of a model under its name `id`. `root` is the model's first name, `created` a time in Unix
    /// seconds. `served` is present while the model is loaded.
    pub fn new(id: &'a str, root: &'a str, created: u64, served: Option<&Served>, state: Option<&'static str>) -> Self {
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
            max_model_len: served.map(|served| served.engine.limits().max_req_total_len),
            input_modalities: served.map(inputs),
            output_modalities: served.map(outputs),
            default_sampling: served.filter(|served| served.generates()).map(|served| served.sampling),
            state,
        }
    }
}

fn inputs(served: &Served) -> Vec<&'static str> {
    let media = served.engine.media();
    let mut inputs = if served.transcribes_only() { Vec::new() } else { vec!["text"] };
    inputs.extend(media.and_then(|media| media.image.as_ref()).map(|_| "image"));
    inputs.extend(media.and_then(|media| media.video.as_ref()).map(|_| "video"));
    inputs.extend(media.and_then(|media| media.audio.as_ref()).map(|_| "audio"));
    inputs
}

fn outputs(served: &Served) -> Vec<&'static str> {
    match (served.generates(), served.pooled.pooling.is_some()) {
        (true, true) => vec!["text", "embeddings"],
        (true, false) => vec!["text"],
        (false, true) => vec!["embeddings"],
        (false, false) => vec!["scores"],
    }
}

/// Returns the list of these models.
pub(crate) fn listed(data: Vec<Model<'_>>) -> Response {
    let (first_id, last_id) = (data.first().map(|model| model.id), data.last().map(|model| model.id));
    json(&List { object: "list", data, first_id, last_id, has_more: false }, None)
}

fn model<'a>(state: &'a ModelState, id: &'a str) -> Model<'a> {
    Model::new(id, &state.served.names[0], state.served.created_s, Some(&state.served), None)
}

/// Lists every name of the model.
pub(crate) async fn list(State(state): State<Arc<ModelState>>) -> Response {
    listed(state.served.names.iter().map(|name| model(&state, name)).collect())
}

/// Describes the model under one name; 404 when the server does not know it.
pub(crate) async fn one(State(state): State<Arc<ModelState>>, Name(id): Name) -> ApiResult<Response> {
    state.check_model(&id)?;
    Ok(json(&model(&state, &id), None))
}
