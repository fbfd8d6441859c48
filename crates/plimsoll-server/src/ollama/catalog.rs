//! Ollama's routes about models: `/api/version`, `/api/tags`, `/api/ps`, `/api/show`; and those that would change models: `/api/pull`,
//! `/api/delete`.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use plimsoll_text::strftime;
use serde::Serialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::conversation::params::model_name;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::json::json;
use crate::http::sse::{Events, LINE_HEADERS};
use crate::state::config::{About, SamplingDefaults, Served};
use crate::state::model::ModelState;

/// The release of Ollama whose API this is: clients check that it is new enough.
const API_VERSION: &str = "0.12.11";

/// The unload time of a model that is never unloaded.
const NEVER: &str = "9999-12-31T23:59:59Z";

#[derive(Serialize)]
struct Version {
    version: &'static str,
}

/// `GET /api/version`.
pub(crate) async fn version() -> Response {
    json(&Version { version: API_VERSION }, None)
}

/// `DELETE /api/delete`. The body is not read.
pub(crate) async fn delete() -> ApiError {
    let message = "this server deletes no models: its command line says which it serves";
    ApiError { close: true, ..ApiError::unsupported("model", message) }
}

#[derive(Serialize)]
struct Details<'a> {
    parent_model: &'static str,
    format: &'a str,
    family: &'a str,
    families: Vec<&'a str>,
    parameter_size: String,
    quantization_level: &'a str,
}

impl<'a> Details<'a> {
    fn of(about: &'a About) -> Self {
        Self {
            parent_model: "",
            format: about.format,
            family: &about.family,
            families: Some(about.family.as_str()).filter(|family| !family.is_empty()).into_iter().collect(),
            parameter_size: size(about.parameters),
            quantization_level: &about.quantization,
        }
    }
}

/// Returns a number of parameters in Ollama's form: `134.5M`, `7.6B`; empty if it is not known.
fn size(parameters: u64) -> String {
    let in_units = |unit: f64| parameters as f64 / unit;
    match parameters {
        0 => String::new(),
        n if n >= 1_000_000_000 => format!("{:.1}B", in_units(1e9)),
        n if n >= 1_000_000 => format!("{:.2}M", in_units(1e6)),
        _ => format!("{:.2}K", in_units(1e3)),
    }
}

/// A model in a list.
#[derive(Serialize)]
pub(crate) struct Entry<'a> {
    name: String,
    model: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    modified_at: Option<String>,
    size: u64,
    digest: String,
    details: Details<'a>,
    /// Present for a loaded model in `/api/ps`.
    #[serde(flatten)]
    running: Option<Running>,
}

/// Further details of a loaded model.
#[derive(Serialize)]
struct Running {
    expires_at: String,
    /// Bytes of GPU memory: 0 here.
    size_vram: u64,
    context_length: u32,
}

#[derive(Serialize)]
struct List<'a> {
    models: Vec<Entry<'a>>,
}

/// The answer of `/api/tags` and `/api/ps`.
pub(crate) fn listed(models: Vec<Entry<'_>>) -> Response {
    json(&List { models }, None)
}

impl<'a> Entry<'a> {
    /// An entry of `/api/tags`: a model under one of its names. For a model that is not loaded, `about` is the default without details.
    pub fn tag(name: &str, created_s: u64, about: &'a About) -> Self {
        let name = tagged(name);
        Self {
            digest: digest(&name, about),
            model: name.clone(),
            name,
            modified_at: Some(strftime("%Y-%m-%dT%H:%M:%SZ", created_s)),
            size: about.bytes,
            details: Details::of(about),
            running: None,
        }
    }

    /// An entry of `/api/ps`: a loaded model.
    pub fn running(name: &str, served: &'a Served, expires: Option<SystemTime>) -> Self {
        let expires_at = expires.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        let running = Running {
            expires_at: expires_at.map_or_else(|| NEVER.into(), |at| strftime("%Y-%m-%dT%H:%M:%SZ", at.as_secs())),
            size_vram: 0,
            context_length: served.engine.limits().max_req_total_len,
        };
        let size = served.engine.report().committed_bytes;
        Self { modified_at: None, size, running: Some(running), ..Self::tag(name, served.created_s, &served.about) }
    }
}

/// Returns a name with a tag, as Ollama lists it.
fn tagged(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}

/// Returns a hash that tells models apart: clients show its beginning. It does not depend on the files' content.
fn digest(name: &str, about: &About) -> String {
    let About { format, family, quantization, parameters, bytes } = about;
    let hash = Sha256::digest(format!("{name}\n{format}\n{family}\n{quantization}\n{parameters}\n{bytes}"));
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `GET /api/tags` of a server with one model.
pub(crate) async fn tags(State(state): State<Arc<ModelState>>) -> Response {
    let Served { names, created_s, about, .. } = &state.served;
    listed(names.iter().map(|name| Entry::tag(name, *created_s, about)).collect())
}

/// `GET /api/ps` of a server with one model.
pub(crate) async fn ps(State(state): State<Arc<ModelState>>) -> Response {
    listed(vec![Entry::running(&state.served.names[0], &state.served, None)])
}

/// Takes the model's name: `model`, or `name` as older clients have it.
fn named(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<String> {
    match fields.take::<String>("name")? {
        Some(name) if !fields.has("model") => state.check_model(&name).map(|()| name),
        _ => model_name(fields, state),
    }
}

#[derive(Serialize)]
struct Show<'a> {
    modelfile: String,
    parameters: String,
    template: &'a str,
    details: Details<'a>,
    model_info: Map<String, Value>,
    capabilities: Vec<&'static str>,
    modified_at: String,
}

/// `POST /api/show`.
pub(crate) async fn show(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    state.on_body(request, |body, state| show_request(&body.bytes, state)).await?;
    let served = &state.served;
    let about = &served.about;
    let answer = Show {
        modelfile: format!("FROM {}\n", served.names[0]),
        parameters: parameters(&served.sampling),
        template: served.template.as_ref().map_or("", |template| template.when(false).source()),
        details: Details::of(about),
        model_info: model_info(served),
        capabilities: capabilities(served),
        modified_at: strftime("%Y-%m-%dT%H:%M:%SZ", served.created_s),
    };
    Ok(json(&answer, None))
}

fn show_request(body: &[u8], state: &ModelState) -> ApiResult<()> {
    let mut fields = Fields::of_body(body)?;
    named(&mut fields, state)?;
    // The answer always has all details.
    fields.take::<bool>("verbose")?;
    for name in ["system", "template"] {
        fields.only(name, &["\"\""])?;
    }
    fields.only("options", &["{}"])?;
    fields.finish()
}

/// Returns the default sampling of requests, one value a line.
fn parameters(sampling: &SamplingDefaults) -> String {
    let SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty, .. } = sampling;
    format!(
        "temperature {temperature}\ntop_p {top_p}\ntop_k {top_k}\nmin_p {min_p}\nrepeat_penalty {repetition_penalty}"
    )
}

fn model_info(served: &Served) -> Map<String, Value> {
    let (limits, family) = (served.engine.limits(), served.about.family.as_str());
    let mut info = Map::new();
    info.insert("general.architecture".into(), family.into());
    info.insert("general.parameter_count".into(), served.about.parameters.into());
    info.insert(format!("{family}.context_length"), limits.max_req_total_len.into());
    info.insert(format!("{family}.embedding_length"), limits.embedding_size.into());
    info.insert(format!("{family}.vocab_size"), limits.vocab_size.into());
    info
}

/// Returns the model's abilities by Ollama's names.
fn capabilities(served: &Served) -> Vec<&'static str> {
    let (generates, formats) = (served.generates() && !served.transcribes_only(), &served.formats);
    let thinks = formats.reasoning.or(formats.reasoning_with_tools).is_some();
    let sees = served.engine.media().is_some_and(|media| media.image.is_some());
    let talks = generates && served.template.is_some();
    let all = [
        ("completion", generates),
        ("tools", talks && formats.tools.is_some()),
        ("thinking", talks && thinks),
        ("vision", talks && sees),
        ("insert", generates && served.tokenizer.fim().is_some()),
        ("embedding", served.pooled.pooling.is_some()),
    ];
    all.into_iter().filter(|(_, has)| *has).map(|(word, _)| word).collect()
}

#[derive(Serialize)]
struct Status {
    status: &'static str,
}

/// `POST /api/pull`. The model is present: an unknown one is refused, and one of several has been loaded before this handler runs.
pub(crate) async fn pull(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let streams = state.on_body(request, |body, state| pull_request(&body.bytes, state)).await?;
    let done = Status { status: "success" };
    if !streams {
        return Ok(json(&done, None));
    }
    let mut out = Events::default();
    out.push_line(&Status { status: "pulling manifest" });
    out.push_line(&done);
    Ok((LINE_HEADERS, out.into_bytes()).into_response())
}

fn pull_request(body: &[u8], state: &ModelState) -> ApiResult<bool> {
    let mut fields = Fields::of_body(body)?;
    named(&mut fields, state)?;
    let streams = fields.take("stream")?.unwrap_or(true);
    // Nothing is fetched from a registry.
    fields.take::<bool>("insecure")?;
    fields.finish()?;
    Ok(streams)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_ollama_writes_them() {
        assert_eq!([0, 134_515_008, 7_615_616_512, 12_345].map(size), ["", "134.52M", "7.6B", "12.35K"]);
    }

    #[test]
    fn names_get_a_tag_once() {
        let tags = ["smollm2", "a:7b", "host:80/a", "org/a"].map(tagged);
        assert_eq!(tags, ["smollm2:latest", "a:7b", "host:80/a:latest", "org/a:latest"]);
    }

    #[test]
    fn digests_have_64_digits_and_differ() {
        let about = About::default();
        let [a, b] = ["a", "b"].map(|name| digest(name, &about));
        assert!(a.len() == 64 && a != b, "{a} {b}");
    }
}
