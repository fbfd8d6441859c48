//! Ollama's `POST /api/embed` and the older `POST /api/embeddings`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use super::cut::Cut;
use super::embeddings::{Batch, dimensions};
use super::{ids_bytes, input_tokens};
use crate::conversation::clock::Clock;
use crate::conversation::params::model_name;
use crate::conversation::prompt_input::{Inputs, PromptInput};
use crate::http::budget::Held;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::json::json_sized;
use crate::ollama;
use crate::state::model::ModelState;

#[derive(Serialize)]
struct Answer<'a> {
    model: &'a str,
    embeddings: &'a [Vec<f32>],
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: u64,
}

#[derive(Serialize)]
struct One<'a> {
    embedding: &'a [f32],
}

/// `POST /api/embed`.
pub(crate) async fn embed(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let clock = Clock::new(Caller::current().arrived());
    let (model, batch, kept) = asked(&state, request, parse).await?;
    let prompt_eval_count = input_tokens(&batch.inputs);
    let (vectors, json_bytes, held) = batch.vectors(&state, "ollama_embed", "input", &model).await?;
    drop(kept);
    let (total_duration, load_duration) = (clock.total(), clock.load());
    let answer = Answer { model: &model, embeddings: &vectors, total_duration, load_duration, prompt_eval_count };
    Ok(json_sized(&answer, json_bytes, held))
}

/// `POST /api/embeddings`.
pub(crate) async fn embeddings(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let (model, batch, kept) = asked(&state, request, parse_one).await?;
    let (vectors, json_bytes, held) = batch.vectors(&state, "ollama_embeddings", "prompt", &model).await?;
    drop(kept);
    let embedding = vectors.first().map_or(&[][..], Vec::as_slice);
    Ok(json_sized(&One { embedding }, json_bytes, held))
}

type Parse = fn(&[u8], &ModelState) -> ApiResult<(String, Batch)>;

async fn asked(state: &Arc<ModelState>, request: Request, parse: Parse) -> ApiResult<(String, Batch, Held)> {
    let asked = state.on_body(request, move |body, state| {
        let (model, batch) = parse(&body.bytes, state)?;
        let kept = body.keep(ids_bytes(&batch.inputs))?;
        Ok((model, batch, kept))
    });
    asked.await
}

/// Parses and tokenizes the body of `/api/embed`. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<(String, Batch)> {
    let mut fields = Fields::of_body(body)?;
    let model = model_name(&mut fields, state)?;
    let Inputs(PromptInput::Texts(texts)) = fields.required("input")? else {
        return Err(ApiError::invalid("input", "input must be a text or a list of texts"));
    };
    let cut = if fields.take("truncate")?.unwrap_or(true) { Cut::to_limit(state) } else { Cut::never() };
    let dimensions = dimensions(&mut fields, "dimensions", state)?;
    unused(&mut fields)?;
    fields.finish()?;
    // Ollama's embeddings always have length 1.
    Ok((model, Batch::new(state, "input", &texts, cut, dimensions, true)?))
}

fn parse_one(body: &[u8], state: &ModelState) -> ApiResult<(String, Batch)> {
    let mut fields = Fields::of_body(body)?;
    let model = model_name(&mut fields, state)?;
    let prompt = fields.required::<String>("prompt")?;
    unused(&mut fields)?;
    fields.finish()?;
    let normalize = state.served.pooled.normalize;
    Ok((model, Batch::new(state, "prompt", &[prompt], Cut::to_limit(state), None, normalize)?))
}

/// Takes fields that have no effect on an embedding.
fn unused(fields: &mut Fields<'_>) -> ApiResult<()> {
    ollama::request::keep_alive(fields)?;
    if let Some(raw) = fields.raw("options") {
        ollama::options::of_embedding(Fields::of("options".into(), raw)?)?;
    }
    Ok(())
}
