//! The sampling parameters of a request, and the check of their ranges.
//!
//! Names and neutral values are those of OpenAI and vLLM. Not here: parsing, defaults of a model.

use plimsoll_device::CANDIDATES_MAX;
use thiserror::Error;

/// The most tokens one request may bias.
pub const LOGIT_BIAS_MAX: usize = 1024;

/// Temperatures below this are greedy, as in vLLM: dividing by them would only overflow.
const GREEDY_BELOW: f32 = 1e-5;

/// Candidates beside those that are kept, where tokens may be ruled out or made less likely.
const CANDIDATES_SPARE: usize = 31;

/// Why sampling parameters were refused; every message names the field, its value and what is allowed.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ParamError {
    /// A number outside its range, or not a number.
    #[error("{field} is {value}, it must be {range}")]
    OutOfRange {
        /// The field as the client spells it.
        field: &'static str,
        /// The value that was given.
        value: f32,
        /// The legal range in words.
        range: &'static str,
    },
    /// A `top_k` that is neither a count nor "off".
    #[error("top_k is {value}, it must be -1 or 0 (off) or at least 1")]
    TopK {
        /// The value that was given.
        value: i64,
    },
    /// More biased tokens than a request may have.
    #[error("logit_bias has {count} entries, it must have at most {limit}")]
    TooManyBiases {
        /// The number of entries given.
        count: usize,
        /// [`LOGIT_BIAS_MAX`].
        limit: usize,
    },
    /// A biased token the model does not have.
    #[error("logit_bias names token {token}, it must be below the vocabulary size {vocab}")]
    UnknownToken {
        /// The token id given.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: usize,
    },
}

/// How to choose the next token of one request.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits, 0 to 100; 0 (anything below 1e-5) takes the most likely token.
    pub temperature: f32,
    /// Keeps the k most likely tokens; 0 and -1 keep all.
    pub top_k: i64,
    /// Keeps the most likely tokens until their probabilities reach this sum, above 0 to 1; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the most likely one, 0 to 1; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens of prompt and output, 0.01 to 10; 1 is neutral.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens of the output, -2 to 2; 0 is neutral.
    pub presence_penalty: f32,
    /// Subtracted once for every time a token is in the output, -2 to 2; 0 is neutral.
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens, -100 to 100 each; at most [`LOGIT_BIAS_MAX`] of them.
    pub logit_bias: Vec<(u32, f32)>,
    /// With the position, all that the draw depends on.
    pub seed: u64,
}

impl Default for SamplingParams {
    /// Temperature 1 and everything else neutral, as in OpenAI's API; seed 0.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Parameters that take the most likely token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every field against its range for a model of `vocab` tokens.
    ///
    /// # Errors
    /// The first field that is out of range, with its value and the range.
    pub fn validate(&self, vocab: usize) -> Result<(), ParamError> {
        let within = |field, value: f32, legal: bool, range| {
            // A NaN compares false with everything, hence is never legal.
            if legal { Ok(()) } else { Err(ParamError::OutOfRange { field, value, range }) }
        };
        let Self { temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, .. } = *self;
        within("temperature", temperature, (0.0..=100.0).contains(&temperature), "between 0 and 100")?;
        within("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        within("min_p", min_p, (0.0..=1.0).contains(&min_p), "between 0 and 1")?;
        let repetition = (0.01..=10.0).contains(&repetition_penalty);
        within("repetition_penalty", repetition_penalty, repetition, "between 0.01 and 10")?;
        let presence = (-2.0..=2.0).contains(&presence_penalty);
        within("presence_penalty", presence_penalty, presence, "between -2 and 2")?;
        let frequency = (-2.0..=2.0).contains(&frequency_penalty);
        within("frequency_penalty", frequency_penalty, frequency, "between -2 and 2")?;
        if self.top_k < -1 {
            return Err(ParamError::TopK { value: self.top_k });
        }
        if self.logit_bias.len() > LOGIT_BIAS_MAX {
            return Err(ParamError::TooManyBiases { count: self.logit_bias.len(), limit: LOGIT_BIAS_MAX });
        }
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab {
                return Err(ParamError::UnknownToken { token, vocab });
            }
            within("logit_bias", bias, (-100.0..=100.0).contains(&bias), "between -100 and 100")?;
        }
        Ok(())
    }

    /// Whether the most likely token is taken and no random number is used.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Whether the sampler needs the tokens of prompt and output, so that
    /// [`TokenCounts`](super::TokenCounts) must be kept for this request.
    #[must_use]
    pub fn needs_counts(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether bias and penalties make no token more likely.
    fn only_lowers(&self) -> bool {
        self.logit_bias.iter().all(|(_, bias)| *bias <= 0.0)
            && self.repetition_penalty >= 1.0
            && self.presence_penalty >= 0.0
            && self.frequency_penalty >= 0.0
    }

    /// Top logits of a row of `vocab` logits that decide the token in all but rare cases, at most [`CANDIDATES_MAX`]; 0 where all
    /// logits are needed: to report log probabilities, for bias or penalties that make a token more likely, and for draws from more
    /// tokens. `narrowed`: some tokens may not be chosen, by a grammar or before `min_tokens`.
    pub(crate) fn candidates(&self, vocab: usize, narrowed: bool) -> u32 {
        let lowered = narrowed || self.needs_counts() || !self.logit_bias.is_empty();
        let spare = if lowered { CANDIDATES_SPARE } else { 0 };
        let count = match self.top_k_of(vocab) {
            _ if !self.only_lowers() => 0,
            _ if self.is_greedy() => 1 + spare,
            Some(k) if k + spare <= CANDIDATES_MAX => k + spare,
            // Few tokens have any weight.
            _ if self.min_p > 0.0 => CANDIDATES_MAX,
            _ => 0,
        };
        count.min(vocab) as u32
    }

    /// The number of tokens top-k keeps, `None` where it keeps all `vocab` of them.
    pub(super) fn top_k_of(&self, vocab: usize) -> Option<usize> {
        usize::try_from(self.top_k).ok().filter(|&k| k > 0 && k < vocab)
    }
}
