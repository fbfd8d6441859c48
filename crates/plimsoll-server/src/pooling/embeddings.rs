//! `POST /v1/embeddings`, OpenAI's.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use super::cut::Cut;
use super::run::run;
use super::{Input, Usage, check_count, check_length, embedding, hold_answer, ids_bytes, vector};
use crate::conversation::params::model_name;
use crate::conversation::prompt::{Inputs, PromptInput};
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::json::json_sized;
use crate::state::model::ModelState;

/// A number of an embedding as JSON, with its comma: `-1.17549435e-38,`.
const FLOAT_BYTES: usize = 16;

/// What surrounds one embedding's numbers.
const ITEM_BYTES: usize = 64;

/// What surrounds all of them, the model's name aside.
const ANSWER_BYTES: usize = 256;

struct Asked {
    model: String,
    inputs: Vec<Input>,
    as_base64: bool,
    dimensions: Option<usize>,
    kept: Held,
}

#[derive(Serialize)]
struct Answer<'a> {
    object: &'static str,
    data: Vec<Item>,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Item {
    object: &'static str,
    index: usize,
    embedding: Numbers,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Numbers {
    Floats(Vec<f32>),
    Base64(String),
}

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let asked = state.on_body(request, |body, state| {
        let (model, inputs, as_base64, dimensions) = parse(&body.bytes, state)?;
        let kept = body.keep(ids_bytes(&inputs))?;
        Ok(Asked { model, inputs, as_base64, dimensions, kept })
    });
    let Asked { model, inputs, as_base64, dimensions, kept } = asked.await?;
    let size = state.served.engine.limits().embedding_size as usize;
    let json_bytes = answer_bytes(inputs.len(), dimensions.unwrap_or(size), as_base64, &model);
    let bytes = (json_bytes + inputs.len() * size * size_of::<f32>()) as u64;
    let held = hold_answer(&state, "input", bytes)?;
    let id = state.server.ids.request("embd");
    let results = run(&state, &id, "embeddings", "input", &inputs).await?;
    let usage = Usage::new(&inputs);
    drop((inputs, kept));
    let item = |(index, mut x): (usize, Vec<f32>)| {
        x.truncate(dimensions.unwrap_or(size));
        if state.served.pooled.normalize || dimensions.is_some() {
            vector::normalize(&mut x);
        }
        let embedding = if as_base64 { Numbers::Base64(vector::base64(&x)) } else { Numbers::Floats(x) };
        Item { object: "embedding", index, embedding }
    };
    let data = results.into_iter().enumerate().map(item).collect();
    Ok(json_sized(&Answer { object: "list", data, model: &model, usage }, json_bytes, held))
}

/// The most bytes of the answer as JSON, base64 texts before they are written included.
fn answer_bytes(inputs: usize, dimensions: usize, as_base64: bool, model: &str) -> usize {
    let numbers =
        if as_base64 { 2 * (dimensions * size_of::<f32>()).div_ceil(3) * 4 } else { dimensions * FLOAT_BYTES };
    // A name of control characters is written six times as long.
    ANSWER_BYTES + 6 * model.len() + inputs * (ITEM_BYTES + numbers)
}

/// Parses and tokenizes. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<(String, Vec<Input>, bool, Option<usize>)> {
    let mut fields = Fields::of_body(body)?;
    let model = model_name(&mut fields, state)?;
    let embed = embedding(state)?;
    let Inputs(input) = fields.required("input")?;
    let as_base64 = match fields.take::<String>("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(ApiError::unsupported("encoding_format", "encoding_format is float or base64")),
    };
    let dimensions = dimensions(&mut fields, state)?;
    let add_special = fields.take("add_special_tokens")?.unwrap_or(true);
    let cut = Cut::take(&mut fields, state)?;
    // An identifier of the end user, which nothing here depends on.
    fields.take::<String>("user")?;
    fields.finish()?;
    check_count(state, "input", input.count())?;
    let ids: ApiResult<Vec<Vec<u32>>> = match input {
        PromptInput::Texts(texts) => texts.iter().map(|text| cut.encode(state, "input", text, add_special)).collect(),
        PromptInput::Ids(lists) => {
            lists.iter().try_for_each(|ids| state.check_ids("input", ids))?;
            cut.check_ids()?;
            Ok(lists)
        }
    };
    let ids = ids?;
    ids.iter().enumerate().try_for_each(|(i, one)| check_length(state, "input", i, ids.len(), one.len()))?;
    let inputs = ids.into_iter().map(|ids| Input { ids, embed }).collect();
    Ok((model, inputs, as_base64, dimensions))
}

fn dimensions(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Option<usize>> {
    let size = state.served.engine.limits().embedding_size;
    match fields.take::<u32>("dimensions")? {
        Some(n) if n == 0 || n > size => {
            Err(ApiError::invalid("dimensions", format!("dimensions is {n}; this model has 1 to {size}")))
        }
        given => Ok(given.map(|n| n as usize)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_answer_is_longer_than_it_was_priced() {
        // The longest floats there are.
        let longest = [-f32::MIN_POSITIVE, -1.234_567_8e-38, f32::MIN, -1.0e-45, -0.000_012_345_678];
        for as_base64 in [false, true] {
            for n in [1, 2, 3, 50] {
                let x: Vec<f32> = longest.iter().cycle().take(n).copied().collect();
                let (model, inputs) = ("a \"model\"\n", 2048);
                let item = |index| Item {
                    object: "embedding",
                    index,
                    embedding: if as_base64 { Numbers::Base64(vector::base64(&x)) } else { Numbers::Floats(x.clone()) },
                };
                let data = (0..inputs).map(item).collect();
                let usage = Usage { prompt_tokens: u64::MAX, total_tokens: u64::MAX };
                let json = serde_json::to_vec(&Answer { object: "list", data, model, usage }).unwrap();
                assert!(json.len() <= answer_bytes(inputs, n, as_base64, model), "{n} numbers, base64 {as_base64}");
            }
        }
    }
}
