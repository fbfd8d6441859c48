//! A prompt that asks a model to fill a gap between two texts (fill-in-the-middle).

use plimsoll_text::FimTokens;
use serde_json::value::RawValue;

use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::{Fields, MAX_NODES};
use crate::state::model::ModelState;

/// What llama.cpp calls a repository without a name, and the file that the gap is in.
const REPOSITORY: &str = "myproject\n";
const FILE: &str = "filename\n";

/// Another file that the model may look at.
#[derive(Debug)]
pub(crate) struct Extra {
    name: String,
    text: String,
}

/// The texts around the gap.
#[derive(Debug, Default)]
pub(crate) struct Gap<'a> {
    /// After the gap, and the field that holds it.
    pub suffix: &'a str,
    pub suffix_param: &'static str,
    pub extra: &'a [Extra],
    /// What stands in the gap already.
    pub begun: &'a str,
}

/// The model's tokens for it; `param` is the field that asks.
///
/// # Errors
/// 400 where the model has none.
pub(crate) fn tokens<'a>(state: &'a ModelState, param: &str) -> ApiResult<&'a FimTokens> {
    state.served.tokenizer.fim().ok_or_else(|| {
        let name = &state.served.names[0];
        let message = format!(
            "{param}: the served model `{name}` has no fill-in-the-middle tokens; serve a code model that was trained with them"
        );
        ApiError::unsupported(param, message)
    })
}

/// The ids of a prompt before and after the text that the gap follows.
pub(crate) struct Frame {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Frame {
    /// The prompt for a gap after `prefix`.
    pub fn ids(&self, state: &ModelState, prefix: &[u32]) -> ApiResult<Vec<u32>> {
        let ids = [&self.before, prefix, &self.after].concat();
        state.check_length("prompt", ids.len())?;
        Ok(ids)
    }
}

impl Gap<'_> {
    /// What stands around the text before the gap. Special tokens that the texts spell are text. Runs on a text worker.
    pub fn frame(&self, state: &ModelState) -> ApiResult<Frame> {
        let fim = tokens(state, self.suffix_param)?;
        let mut before = state.served.tokenizer.prefix_ids().to_vec();
        self.files(state, fim, &mut before)?;
        before.push(fim.prefix);
        let mut after = vec![fim.suffix];
        // Only the first of pieces is read as if a blank stood before it, which no gap has.
        after.extend(state.encode_plain(self.suffix_param, &["", self.suffix])?);
        after.push(fim.middle);
        if !self.begun.is_empty() {
            after.extend(state.encode_plain("prompt", &["", self.begun])?);
        }
        Ok(Frame { before, after })
    }

    /// Other files, as the model was taught to read them, or one after the other.
    fn files(&self, state: &ModelState, fim: &FimTokens, ids: &mut Vec<u32>) -> ApiResult<()> {
        const PARAM: &str = "input_extra";
        if self.extra.is_empty() {
            return Ok(());
        }
        if let Some((repository, _)) = fim.files {
            ids.push(repository);
            ids.extend(state.encode_plain(PARAM, &[REPOSITORY])?);
        }
        for Extra { name, text } in self.extra {
            ids.extend(fim.files.map(|(_, separator)| separator));
            ids.extend(state.encode_plain(PARAM, &[&format!("{name}\n{text}\n")])?);
        }
        if let Some((_, separator)) = fim.files {
            ids.push(separator);
            ids.extend(state.encode_plain(PARAM, &[FILE])?);
        }
        Ok(())
    }
}

/// Takes `input_extra`: a list of files with `filename` and `text`.
pub(crate) fn extra(fields: &mut Fields<'_>) -> ApiResult<Vec<Extra>> {
    let path = fields.param("input_extra");
    let list = fields.take_few::<Vec<&RawValue>>("input_extra", MAX_NODES)?.unwrap_or_default();
    let file = |(i, raw): (usize, &&RawValue)| {
        let mut file = Fields::of(format!("{path}[{i}]"), raw)?;
        let name = file.take::<String>("filename")?.unwrap_or_else(|| "tmp".into());
        let text = file.required("text")?;
        // When the client looked at it.
        file.hints(&["time"]);
        file.finish()?;
        Ok(Extra { name, text })
    };
    list.iter().enumerate().map(file).collect()
}
