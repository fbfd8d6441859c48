//! A prompt that asks a model to fill a gap between two texts (fill-in-the-middle).

use plimsoll_text::FimTokens;
use serde_json::value::RawValue;

use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::{Fields, MAX_NODES};
use crate::state::model::ModelState;

/// llama.cpp's names for a repository without a name, and for the file with the gap.
const REPOSITORY: &str = "myproject\n";
const FILE: &str = "filename\n";

/// Another file in the prompt, as context for the gap.
#[derive(Debug)]
pub(crate) struct Extra {
    name: String,
    text: String,
}

/// The texts around the gap.
#[derive(Debug, Default)]
pub(crate) struct Gap<'a> {
    /// The text after the gap, and the field that holds it.
    pub suffix: &'a str,
    pub suffix_param: &'static str,
    pub extra: &'a [Extra],
    /// The text that already begins the gap's content.
    pub begun: &'a str,
}

/// Returns the model's fill-in-the-middle tokens; `param` is the field that needs them.
///
/// # Errors
/// 400 if the model has no such tokens.
pub(crate) fn tokens<'a>(state: &'a ModelState, param: &str) -> ApiResult<&'a FimTokens> {
    state.served.tokenizer.fim().ok_or_else(|| {
        let name = &state.served.names[0];
        let message = format!(
            "{param}: the served model `{name}` has no fill-in-the-middle tokens; serve a code model that was trained with them"
        );
        ApiError::unsupported(param, message)
    })
}

/// The ids of a prompt before and after the text that precedes the gap.
pub(crate) struct Frame {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Frame {
    /// Returns the prompt for a gap after `prefix`.
    pub fn ids(&self, state: &ModelState, prefix: &[u32]) -> ApiResult<Vec<u32>> {
        let ids = [&self.before, prefix, &self.after].concat();
        state.check_length("prompt", ids.len())?;
        Ok(ids)
    }
}

impl Gap<'_> {
    /// Returns the ids around the text before the gap. Special tokens in the texts are plain text. Runs on a text worker.
    pub fn frame(&self, state: &ModelState) -> ApiResult<Frame> {
        let fim = tokens(state, self.suffix_param)?;
        let mut before = state.served.tokenizer.prefix_ids().to_vec();
        self.files(state, fim, &mut before)?;
        before.push(fim.prefix);
        let mut after = vec![fim.suffix];
        // Some tokenizers read the first piece as if a blank stood before it, which a gap does not have. So the first piece is empty.
        after.extend(state.encode_plain(self.suffix_param, &["", self.suffix])?);
        after.push(fim.middle);
        if !self.begun.is_empty() {
            after.extend(state.encode_plain("prompt", &["", self.begun])?);
        }
        Ok(Frame { before, after })
    }

    /// Adds other files in the form of the model's training, or one after the other.
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
        // The time at which the client last used the file.
        file.hints(&["time"]);
        file.finish()?;
        Ok(Extra { name, text })
    };
    list.iter().enumerate().map(file).collect()
}
