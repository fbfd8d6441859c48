//! Truncation of inputs, for clients that prefer it to an error. The end of a text is cut off; the tokens that a model needs around the
//! text stay.

use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::state::model::ModelState;

/// vLLM's field for inputs.
const WHOLE: &str = "truncate_prompt_tokens";
/// Cohere's field for documents.
const DOCUMENT: &str = "max_tokens_per_doc";

/// The most tokens that are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// The most tokens of an input, with the tokens around it.
    input: Option<usize>,
    /// The most tokens of a document itself.
    document: Option<usize>,
}

impl Cut {
    /// Truncates nothing.
    pub fn never() -> Self {
        Self { input: None, document: None }
    }

    /// Truncates inputs to the model's maximum length.
    pub fn to_limit(state: &ModelState) -> Self {
        Self { input: Some(state.served.engine.limits().max_req_total_len as usize), document: None }
    }

    /// Truncates inputs to `most` tokens; `param` is the field with this number.
    pub fn to(most: u32, param: &str, state: &ModelState) -> ApiResult<Self> {
        let limit = state.served.engine.limits().max_req_total_len;
        if most == 0 || most > limit {
            return Err(ApiError::invalid(param, format!("{param} is {most}; it may be 1 to {limit}")));
        }
        Ok(Self { input: Some(most as usize), document: None })
    }

    /// Takes the field for inputs.
    pub fn take(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let limit = state.served.engine.limits().max_req_total_len;
        let input = match fields.take::<i64>(WHOLE)? {
            None => None,
            Some(-1) => Some(limit as usize),
            Some(n) if (1..=i64::from(limit)).contains(&n) => Some(n as usize),
            Some(n) => {
                let message = format!("{WHOLE} is {n}; it may be 1 to {limit}, or -1 for as many as the model takes");
                return Err(ApiError::invalid(WHOLE, message));
            }
        };
        Ok(Self { input, document: None })
    }

    /// Takes the fields for inputs and for documents.
    pub fn take_with_documents(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let document = fields.take::<usize>(DOCUMENT)?;
        if document == Some(0) {
            return Err(ApiError::invalid(DOCUMENT, format!("{DOCUMENT} is 0; at least 1 is needed")));
        }
        Ok(Self { document, ..Self::take(fields, state)? })
    }

    /// Returns the limits for texts that are not documents.
    pub fn of_others(self) -> Self {
        Self { document: None, ..self }
    }

    /// Returns the token ids of a text that is a whole input.
    pub fn encode(self, state: &ModelState, param: &str, text: &str, add_special: bool) -> ApiResult<Vec<u32>> {
        let mut ids = self.readable(state, text, |text| state.encode(param, &[text], add_special))?;
        let (before, after) = if add_special { state.served.tokenizer.around() } else { (0, 0) };
        let own = ids.len() - before - after;
        let keep = self.room(before + after)?.min(self.document.unwrap_or(usize::MAX)).min(own);
        ids.drain(before + keep..before + own);
        ids.shrink_to_fit();
        Ok(ids)
    }

    /// Returns the token ids of a text that becomes a part of a longer input.
    pub fn encode_part(self, state: &ModelState, param: &str, text: &str) -> ApiResult<Vec<u32>> {
        let mut ids = self.readable(state, text, |text| state.encode(param, &[text], false))?;
        ids.truncate(self.document.unwrap_or(usize::MAX));
        ids.shrink_to_fit();
        Ok(ids)
    }

    /// Returns the token ids of a text followed by a document, in an input with `around` other tokens. Special tokens in it are plain text.
    pub fn encode_behind(
        self,
        state: &ModelState,
        param: &str,
        before: &str,
        document: &str,
        around: usize,
    ) -> ApiResult<Vec<u32>> {
        let encode = |text: &str| state.encode_plain(param, &[text]);
        let mut ids = self.readable(state, &[before, document].concat(), encode)?;
        if let Some(most) = self.document {
            ids.truncate(encode(before)?.len().saturating_add(most));
        }
        ids.truncate(self.room(around)?);
        ids.shrink_to_fit();
        Ok(ids)
    }

    /// Refuses to truncate token ids from the client: the client can decide better which end to cut off.
    pub fn check_ids(self) -> ApiResult<()> {
        match self.input {
            None => Ok(()),
            Some(_) => Err(ApiError::unsupported(WHOLE, format!("{WHOLE} is for texts; send fewer token ids"))),
        }
    }

    /// Returns how many tokens are read of two texts with `around` tokens around and between them.
    pub fn pair(self, lens: (usize, usize), around: usize) -> ApiResult<(usize, usize)> {
        Ok(longest_first(lens, self.room(around)?))
    }

    /// Returns the token ids of a text. If it will be truncated, only its beginning may be tokenized.
    fn readable(
        self,
        state: &ModelState,
        text: &str,
        encode: impl Fn(&str) -> ApiResult<Vec<u32>>,
    ) -> ApiResult<Vec<u32>> {
        let beginning = if self.input.or(self.document).is_some() { state.beginning(text) } else { text };
        let ids = encode(beginning)?;
        // Some texts, such as blanks, have few tokens for their length: the beginning may not fill the context, so all is tokenized.
        let enough = ids.len() >= state.served.engine.limits().max_req_total_len as usize;
        if enough || beginning.len() == text.len() { Ok(ids) } else { encode(text) }
    }

    /// Returns the number of tokens left for the client's text.
    fn room(self, around: usize) -> ApiResult<usize> {
        match self.input {
            None => Ok(usize::MAX),
            Some(most) if most > around => Ok(most - around),
            Some(most) => {
                let message = format!("{WHOLE} is {most}, and {around} stand around the text already");
                Err(ApiError::invalid(WHOLE, message))
            }
        }
    }
}

/// Returns two lengths with the sum `most`, like transformers' `longest_first`: the longer one shrinks to the other's length, then both
/// shrink.
fn longest_first((first, second): (usize, usize), most: usize) -> (usize, usize) {
    if first.saturating_add(second) <= most {
        return (first, second);
    }
    let half = most / 2;
    // An odd rest of one token goes to the longer text; of two equal ones to the second.
    match (first <= second, first.min(second)) {
        (true, short) if short <= half => (short, most - short),
        (false, short) if short <= half => (most - short, short),
        (true, _) => (half, most - half),
        (false, _) => (most - half, half),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths, their limit, and the result of `tokenizers` 0.23.3 with `enable_truncation(limit, strategy="longest_first")`.
    #[test]
    fn pairs_are_cut_as_transformers_cuts_them() {
        for (lens, most, expected) in [
            ((3, 4), 9, (3, 4)),
            ((3, 9), 8, (3, 5)),
            ((9, 3), 8, (5, 3)),
            ((9, 9), 8, (4, 4)),
            ((9, 9), 7, (3, 4)),
            ((5, 9), 8, (4, 4)),
            ((9, 5), 8, (4, 4)),
            ((4, 9), 8, (4, 4)),
            ((1, 20), 3, (1, 2)),
            ((20, 1), 3, (2, 1)),
            ((8, 9), 7, (3, 4)),
            ((9, 8), 7, (4, 3)),
            ((6, 6), 7, (3, 4)),
            ((2, 2), 1, (0, 1)),
            ((2, 9), 2, (1, 1)),
        ] {
            assert_eq!(longest_first(lens, most), expected, "{lens:?} in {most}");
        }
    }
}
