//! `POST /v1/rerank`, in Cohere's and Jina's form: documents in the order of how well they answer a query.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use super::cut::Cut;
use super::documents::Documents;
use super::judge::Judgement;
use super::{Usage, check_count, hold_answer, ids_bytes};
use crate::conversation::params::model_name;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::json::json_sized;
use crate::state::model::ModelState;

/// The most bytes of JSON for one document's result, apart from its text.
const RESULT_BYTES: usize = 96;

/// The most bytes of JSON around the results, apart from the model's name.
const ANSWER_BYTES: usize = 256;

struct RerankRequest {
    model: String,
    documents: Vec<String>,
    judgement: Judgement,
    top_n: usize,
    return_documents: bool,
    /// Bytes of the body, an upper limit of the documents' texts as JSON.
    body_bytes: usize,
    kept: Held,
}

#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    model: &'a str,
    results: Vec<Ranked<'a>>,
    usage: Usage,
}

#[derive(Serialize)]
struct Ranked<'a> {
    index: usize,
    relevance_score: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Text<'a>>,
}

#[derive(Serialize)]
struct Text<'a> {
    text: &'a str,
}

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let parsed = state.on_body(request, |body, state| {
        let (model, documents, judgement, top_n, return_documents) = parse(&body.bytes, state)?;
        let texts: usize = documents.iter().map(|text| text.len() + size_of::<String>()).sum();
        let body_bytes = body.bytes.len();
        let kept = body.keep(ids_bytes(&judgement.inputs) + texts as u64)?;
        Ok(RerankRequest { model, documents, judgement, top_n, return_documents, body_bytes, kept })
    });
    let parsed = parsed.await?;
    let texts = if parsed.return_documents { parsed.body_bytes } else { 0 };
    let json_bytes = ANSWER_BYTES + 6 * parsed.model.len() + parsed.documents.len() * RESULT_BYTES + texts;
    let bytes = json_bytes as u64 + parsed.judgement.result_bytes(&state);
    let held = hold_answer(&state, "documents", bytes)?;
    let id = state.server.ids.request("rerank");
    let scores = parsed.judgement.scores(&state, &id, "rerank", "documents").await?;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    // A stable sort: of documents with equal scores the earlier comes first.
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let ranked = |index: &usize| Ranked {
        index: *index,
        relevance_score: scores[*index],
        document: parsed.return_documents.then(|| Text { text: &parsed.documents[*index] }),
    };
    let results = order[..parsed.top_n].iter().map(ranked).collect();
    let usage = Usage::new(&parsed.judgement.inputs);
    let response = json_sized(&Answer { id: &id, model: &parsed.model, results, usage }, json_bytes, held);
    drop(parsed.kept);
    Ok(response)
}

/// Parses and tokenizes. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<(String, Vec<String>, Judgement, usize, bool)> {
    let mut fields = Fields::of_body(body)?;
    let model = model_name(&mut fields, state)?;
    let query = fields.required::<String>("query")?;
    let Documents(documents) = fields.required("documents")?;
    let top_n = fields.take::<usize>("top_n")?;
    let return_documents = fields.take("return_documents")?.unwrap_or(true);
    let cut = Cut::take_with_documents(&mut fields, state)?;
    fields.finish()?;
    if documents.is_empty() {
        return Err(ApiError::invalid("documents", "documents is empty"));
    }
    check_count(state, "documents", documents.len())?;
    if top_n == Some(0) {
        return Err(ApiError::invalid("top_n", "top_n is 0; at least 1 is needed"));
    }
    let pairs: Vec<(usize, usize)> = (0..documents.len()).map(|document| (0, document)).collect();
    let judgement = Judgement::new(state, [("query", &[query]), ("documents", &documents)], &pairs, cut)?;
    let top_n = top_n.unwrap_or(documents.len()).min(documents.len());
    Ok((model, documents, judgement, top_n, return_documents))
}
