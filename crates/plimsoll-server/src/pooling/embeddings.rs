//! `POST /v1/embeddings`, OpenAI's.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde::Serialize;

use super::cut::Cut;
use super::run::run;
use super::{Input, Usage, check_count, check_length, embedding, hold_answer, ids_bytes, vector};
use crate::conversation::params::model_name;
use crate::conversation::prompt_input::{Inputs, PromptInput};
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::json::json_sized;
use crate::state::model::ModelState;

/// The most bytes of one number of an embedding as JSON, with its comma: `-1.17549435e-38,`.
const FLOAT_BYTES: usize = 16;

/// The most bytes of JSON around one embedding's numbers.
const ITEM_BYTES: usize = 64;

/// The most bytes of JSON around all embeddings, apart from the model's name.
const ANSWER_BYTES: usize = 256;

/// Inputs to be embedded.
pub(crate) struct Batch {
    pub inputs: Vec<Input>,
    dimensions: Option<usize>,
    normalize: bool,
    /// Whether the answer has the numbers in base64.
    as_base64: bool,
    /// Bytes of the answer apart from the numbers and the model's name.
    pub more_bytes: usize,
}

impl Batch {
    /// Tokenizes texts.
    pub fn new(
        state: &ModelState,
        param: &str,
        texts: &[String],
        cut: Cut,
        dimensions: Option<usize>,
        normalize: bool,
    ) -> ApiResult<Self> {
        let embed = embedding(state)?;
        check_count(state, param, texts.len())?;
        let mut inputs = Vec::with_capacity(texts.len());
        for (i, text) in texts.iter().enumerate() {
            let ids = cut.encode(state, param, text, true)?;
            check_length(state, param, i, texts.len(), ids.len())?;
            inputs.push(Input { ids, embed });
        }
        let normalize = normalize || dimensions.is_some();
        Ok(Self { inputs, dimensions, normalize, as_base64: false, more_bytes: 0 })
    }

    fn size(&self, state: &ModelState) -> usize {
        self.dimensions.unwrap_or(state.served.engine.limits().embedding_size as usize)
    }

    /// Returns the most bytes of the embeddings in base64: the strings, and the answer that they are written into.
    pub fn base64_bytes(&self, state: &ModelState) -> usize {
        answer_bytes(self.inputs.len(), self.size(state), true, "")
    }

    /// Returns the embeddings, the most bytes of the JSON answer, and the share of the byte budget. `param` names the inputs in errors.
    pub async fn vectors(
        self,
        state: &Arc<ModelState>,
        api: &'static str,
        param: &'static str,
        model: &str,
    ) -> ApiResult<(Vec<Vec<f32>>, usize, Held)> {
        let size = state.served.engine.limits().embedding_size as usize;
        let json_bytes = self.more_bytes + answer_bytes(self.inputs.len(), self.size(state), self.as_base64, model);
        let held = hold_answer(state, param, (json_bytes + self.inputs.len() * size * size_of::<f32>()) as u64)?;
        let id = state.server.ids.request("embd");
        let mut vectors = run(state, &id, api, param, &self.inputs).await?;
        for x in &mut vectors {
            x.truncate(self.dimensions.unwrap_or(size));
            if self.normalize {
                vector::normalize(x);
            }
        }
        Ok((vectors, json_bytes, held))
    }
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
        let (model, batch) = parse(&body.bytes, state)?;
        let kept = body.keep(ids_bytes(&batch.inputs))?;
        Ok((model, batch, kept))
    });
    let (model, batch, kept) = asked.await?;
    let (usage, as_base64) = (Usage::new(&batch.inputs), batch.as_base64);
    let (vectors, json_bytes, held) = batch.vectors(&state, "embeddings", "input", &model).await?;
    drop(kept);
    let item = |(index, x): (usize, Vec<f32>)| {
        let embedding = if as_base64 { Numbers::Base64(vector::base64(&x)) } else { Numbers::Floats(x) };
        Item { object: "embedding", index, embedding }
    };
    let data = vectors.into_iter().enumerate().map(item).collect();
    Ok(json_sized(&Answer { object: "list", data, model: &model, usage }, json_bytes, held))
}

/// Returns the most bytes of the answer as JSON, including base64 strings before they are written.
fn answer_bytes(inputs: usize, dimensions: usize, as_base64: bool, model: &str) -> usize {
    let numbers =
        if as_base64 { 2 * (dimensions * size_of::<f32>()).div_ceil(3) * 4 } else { dimensions * FLOAT_BYTES };
    // A name of control characters is written six times as long.
    ANSWER_BYTES + 6 * model.len() + inputs * (ITEM_BYTES + numbers)
}

/// Parses and tokenizes. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<(String, Batch)> {
    let mut fields = Fields::of_body(body)?;
    let model = model_name(&mut fields, state)?;
    let embed = embedding(state)?;
    let Inputs(input) = fields.required("input")?;
    let as_base64 = match fields.take::<String>("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(ApiError::unsupported("encoding_format", "encoding_format is float or base64")),
    };
    let dimensions = dimensions(&mut fields, "dimensions", state)?;
    let add_special = fields.take("add_special_tokens")?.unwrap_or(true);
    let cut = Cut::take(&mut fields, state)?;
    // An identifier of the end user, which has no effect on this server.
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
    let normalize = state.served.pooled.normalize || dimensions.is_some();
    Ok((model, Batch { inputs, dimensions, normalize, as_base64, more_bytes: 0 }))
}

/// Takes the number of dimensions that are kept.
pub(super) fn dimensions(fields: &mut Fields<'_>, name: &str, state: &ModelState) -> ApiResult<Option<usize>> {
    let size = state.served.engine.limits().embedding_size;
    match fields.take::<u32>(name)? {
        Some(n) if n == 0 || n > size => {
            Err(ApiError::invalid(name, format!("{name} is {n}; this model has 1 to {size}")))
        }
        given => Ok(given.map(|n| n as usize)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_answer_is_longer_than_it_was_priced() {
        // Floats with the longest decimal text.
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
