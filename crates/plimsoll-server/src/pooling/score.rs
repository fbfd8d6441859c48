//! `POST /v1/score`, in vLLM's form: how well texts fit each other, pair by pair.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use super::cut::Cut;
use super::judge::Judgement;
use super::{Usage, check_count, hold_answer, ids_bytes};
use crate::conversation::params::model_name;
use crate::conversation::prompt_input::PromptInput;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::ids::now_s;
use crate::http::json::json_sized;
use crate::state::model::ModelState;

/// The most bytes of JSON for one pair's score.
const ITEM_BYTES: usize = 96;

/// The most bytes of JSON around the scores, apart from the model's name.
const ANSWER_BYTES: usize = 256;

#[derive(Serialize)]
struct Answer<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    data: Vec<Item>,
    usage: Usage,
}

#[derive(Serialize)]
struct Item {
    index: usize,
    object: &'static str,
    score: f64,
}

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let asked = state.on_body(request, |body, state| {
        let (model, judgement, pairs) = parse(&body.bytes, state)?;
        let kept: Held = body.keep(ids_bytes(&judgement.inputs))?;
        Ok((model, judgement, pairs, kept))
    });
    let (model, judgement, pairs, kept) = asked.await?;
    let json_bytes = ANSWER_BYTES + 6 * model.len() + pairs * ITEM_BYTES;
    let bytes = json_bytes as u64 + judgement.result_bytes(&state);
    let held = hold_answer(&state, "text_2", bytes)?;
    let id = state.server.ids.request("score");
    let scores = judgement.scores(&state, &id, "score", "text_2").await?;
    let usage = Usage::new(&judgement.inputs);
    drop((judgement, kept));
    let item = |(index, score)| Item { index, object: "score", score };
    let data = scores.into_iter().enumerate().map(item).collect();
    let answer = Answer { id: &id, object: "list", created: now_s(), model: &model, data, usage };
    Ok(json_sized(&answer, json_bytes, held))
}

/// Parses and tokenizes. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<(String, Judgement, usize)> {
    let mut fields = Fields::of_body(body)?;
    let model = model_name(&mut fields, state)?;
    let mut texts = |name: &str| {
        let PromptInput::Texts(texts) = fields.required(name)? else {
            return Err(ApiError::invalid(name, format!("{name} is a text or a list of texts")));
        };
        check_count(state, name, texts.len()).map(|()| texts)
    };
    let (first, second) = (texts("text_1")?, texts("text_2")?);
    let cut = Cut::take(&mut fields, state)?;
    fields.finish()?;
    let pairs: Vec<(usize, usize)> = match (first.len(), second.len()) {
        (1, n) => (0..n).map(|b| (0, b)).collect(),
        (a, b) if a == b => (0..a).map(|i| (i, i)).collect(),
        (a, b) => {
            let message = format!("{a} texts in text_1 and {b} in text_2: give one, or as many, in text_1");
            return Err(ApiError::invalid("text_1", message));
        }
    };
    let judgement = Judgement::new(state, [("text_1", &first), ("text_2", &second)], &pairs, cut)?;
    Ok((model, judgement, pairs.len()))
}
