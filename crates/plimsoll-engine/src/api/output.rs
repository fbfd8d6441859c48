//! Output of a request: tokens, text, and the reason for its end.

/// Text bytes of an output token that admission reserves. Tokens of the field's vocabularies are 4 bytes on average.
pub(crate) const TEXT_BYTES_PER_TOKEN: usize = 16;

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End-of-sequence token, stop token or stop string.
    Stop,
    /// `max_tokens` were generated.
    Length,
}

impl FinishReason {
    /// Its name in OpenAI's API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A log-probability report for one token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprobs {
    /// Natural-log probability of the token itself; none for the first prompt token.
    pub own: Option<f32>,
    /// The most likely ids with their log-probabilities, best first, then the one that a
    /// [`Constraint::also_report`](super::constraint::Constraint::also_report) names.
    pub top: Box<[(u32, f32)]>,
}

/// One token of output.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOut {
    /// The token's id.
    pub id: u32,
    /// Bytes of `Delta::text` that precede this token's own text (across deltas: offset in the whole text).
    pub text_offset: u32,
    /// Characters of `Delta::text` that precede it, in the whole text. Characters of a removed stop string count too.
    pub text_chars: u32,
    /// Present if log-probabilities were requested.
    pub logprobs: Option<TokenLogprobs>,
}

/// Bytes for all tokens are reserved with the request, so a larger record means fewer requests.
const _: () = assert!(size_of::<TokenOut>() <= 40);

/// The output since the last read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Text, complete characters only, never part of a stop string.
    pub text: String,
    /// Tokens.
    pub tokens: Vec<TokenOut>,
    /// One report per prompt token, if requested; all come before the first output token.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Prompt tokens that came from the prefix cache; known once the first chunk was scheduled.
    pub cached_tokens: u32,
    /// Drafts of the request that were verified so far.
    pub drafted_tokens: u32,
    /// Drafts that were accepted.
    pub accepted_tokens: u32,
    /// The result of a pooled request, in its last delta.
    pub pooled: Option<Vec<f32>>,
    /// Set in the last delta of a request that did not fail.
    pub finish: Option<FinishReason>,
    /// The stop string that ended the output, if one did.
    pub stop_reason: Option<String>,
    /// Set in the last delta of a failed request. The server turns it into an error answer or event.
    pub error: Option<String>,
    /// The cause of `error`.
    pub cause: Cause,
}

/// The cause of an error, from which the server chooses the status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cause {
    /// The engine: a 5xx.
    #[default]
    Engine,
    /// Memory ran short. The client may send the request again: a 503.
    Memory,
    /// The grammar, which the output cannot follow: a 400.
    Grammar,
}

impl Delta {
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.text.is_empty() && self.prompt_logprobs.is_empty() && !self.is_last()
    }

    /// Whether this is the request's last delta.
    pub fn is_last(&self) -> bool {
        self.finish.is_some() || self.error.is_some()
    }
}
