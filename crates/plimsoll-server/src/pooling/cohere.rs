//! Cohere's `POST /v2/embed`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use super::cut::Cut;
use super::embeddings::{Batch, dimensions};
use super::{ids_bytes, input_tokens, vector};
use crate::conversation::params::model_name;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Fields;
use crate::http::json::json_sized;
use crate::state::config::MAX_PROMPTS;
use crate::state::model::ModelState;

/// Known purposes of a text. The served models read all texts alike.
const INPUT_TYPES: [&str; 4] = ["search_document", "search_query", "classification", "clustering"];

/// A parsed request.
pub(crate) struct Asked {
    model: String,
    texts: Vec<String>,
    batch: Batch,
    /// Whether the answer has floats, and whether it has base64.
    types: (bool, bool),
}

#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    embeddings: Embeddings<'a>,
    texts: &'a [String],
    meta: Meta,
    response_type: &'static str,
}

#[derive(Serialize)]
struct Embeddings<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    float: Option<&'a [Vec<f32>]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base64: Option<Vec<String>>,
}

#[derive(Serialize)]
struct Meta {
    api_version: ApiVersion,
    billed_units: BilledUnits,
}

#[derive(Serialize)]
struct ApiVersion {
    version: &'static str,
}

#[derive(Serialize)]
struct BilledUnits {
    input_tokens: u64,
}

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let asked = state.on_body(request, |body, state| {
        let asked = parse(&body.bytes, state)?;
        let texts: usize = asked.texts.iter().map(|text| text.len() + size_of::<String>()).sum();
        let body_bytes = body.bytes.len();
        let kept = body.keep(ids_bytes(&asked.batch.inputs) + texts as u64)?;
        Ok((asked, body_bytes, kept))
    });
    let (Asked { model, texts, mut batch, types }, body_bytes, kept) = asked.await?;
    // The answer repeats the texts, and has base64 beside the numbers that it is made of.
    batch.more_bytes = body_bytes + if types.1 { batch.base64_bytes(&state) } else { 0 };
    let input_tokens = input_tokens(&batch.inputs);
    let id = state.server.ids.request("embd");
    let (vectors, json_bytes, held) = batch.vectors(&state, "cohere_embed", "texts", &model).await?;
    let embeddings = Embeddings {
        float: types.0.then_some(&vectors[..]),
        base64: types.1.then(|| vectors.iter().map(|x| vector::base64(x)).collect()),
    };
    let meta = Meta { api_version: ApiVersion { version: "2" }, billed_units: BilledUnits { input_tokens } };
    let answer = Answer { id: &id, embeddings, texts: &texts, meta, response_type: "embeddings_by_type" };
    let response = json_sized(&answer, json_bytes, held);
    drop(kept);
    Ok(response)
}

/// Parses and tokenizes. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<Asked> {
    let mut fields = Fields::of_body(body)?;
    let model = model_name(&mut fields, state)?;
    let texts = fields.required::<Vec<String>>("texts")?;
    if texts.is_empty() {
        return Err(ApiError::invalid("texts", "texts is empty"));
    }
    let input_type = fields.take::<String>("input_type")?;
    if let Some(other) = input_type.filter(|kind| !INPUT_TYPES.contains(&kind.as_str())) {
        let message = format!("input_type is `{}`; known are {}", quote(&other), INPUT_TYPES.join(", "));
        return Err(ApiError::unsupported("input_type", message));
    }
    let cut = truncate(&mut fields, state)?;
    let dimensions = dimensions(&mut fields, "output_dimension", state)?;
    let types = types(&mut fields)?;
    fields.never(&["images", "inputs"], "this server embeds texts; send them as `texts`")?;
    fields.hints(&["priority"]);
    fields.finish()?;
    let normalize = state.served.pooled.normalize;
    let batch = Batch::new(state, "texts", &texts, cut, dimensions, normalize)?;
    Ok(Asked { model, texts, batch, types })
}

/// Takes `truncate` and `max_tokens`: the treatment of a text that is too long.
fn truncate(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Cut> {
    let most = fields.take::<u32>("max_tokens")?;
    match fields.take::<String>("truncate")?.as_deref() {
        None | Some("END") => match most {
            Some(most) => Cut::to(most, "max_tokens", state),
            None => Ok(Cut::to_limit(state)),
        },
        Some("NONE") if most.is_none() => Ok(Cut::never()),
        Some("NONE") => Err(ApiError::invalid("max_tokens", "max_tokens has no effect when truncate is NONE")),
        Some(_) => {
            Err(ApiError::unsupported("truncate", "truncate is END or NONE: the beginning of a text is never cut"))
        }
    }
}

/// Takes `embedding_types`: floats by default.
fn types(fields: &mut Fields<'_>) -> ApiResult<(bool, bool)> {
    let Some(types) = fields.take_few::<Vec<String>>("embedding_types", MAX_PROMPTS)? else { return Ok((true, false)) };
    let known = |kind: &String| ["float", "base64"].contains(&kind.as_str());
    if types.is_empty() || !types.iter().all(known) {
        let message = "embedding_types has float and base64; this server makes no quantized embeddings";
        return Err(ApiError::unsupported("embedding_types", message));
    }
    let has = |kind: &str| types.iter().any(|known| known == kind);
    Ok((has("float"), has("base64")))
}
