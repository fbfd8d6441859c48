//! What a request produces: tokens, text, and why it ended.

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

/// A log-probability report for one token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprobs {
    /// Natural-log probability of the token itself; none for the first prompt token.
    pub own: Option<f32>,
    /// The most likely ids with their log-probabilities, best first.
    pub top: Box<[(u32, f32)]>,
}

/// One token of output.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOut {
    /// The token's id.
    pub id: u32,
    /// Bytes of `Delta::text` that precede this token's own text (across deltas: offset in the whole text).
    pub text_offset: u32,
    /// The same in characters. A stop string's, which never come, count: what a token says of itself depends on no other.
    pub text_chars: u32,
    /// Present when log-probabilities were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Room for all of them is reserved with their request: a larger one means fewer requests.
const _: () = assert!(size_of::<TokenOut>() <= 40);

/// What has come since the last read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Text, complete characters only, never part of a stop string.
    pub text: String,
    /// Tokens.
    pub tokens: Vec<TokenOut>,
    /// One report per prompt token, when asked for; all come before the first output token.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Prompt tokens that came from the prefix cache; known once the first chunk was scheduled.
    pub cached_tokens: u32,
    /// Drafts of the request that were checked so far.
    pub drafted_tokens: u32,
    /// Those of them that were right.
    pub accepted_tokens: u32,
    /// What a pooled request asked for; comes with its last delta.
    pub pooled: Option<Vec<f32>>,
    /// Set in the last delta of a request that ended well.
    pub finish: Option<FinishReason>,
    /// The stop string that ended it, when one did.
    pub stop_reason: Option<String>,
    /// Set in the last delta of a request that failed; the server turns it into an error's answer or event.
    pub error: Option<String>,
    /// With `error`: where it lies.
    pub cause: Cause,
}

/// Where an error lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cause {
    /// In the engine: a 5xx.
    #[default]
    Engine,
    /// Memory ran short. Nothing is wrong with the request, and it may be tried again: a 503.
    Memory,
    /// In the form that the output was to have, which cannot be followed: a 400.
    Form,
}

impl Delta {
    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.text.is_empty() && self.prompt_logprobs.is_empty() && !self.is_last()
    }

    /// Whether nothing follows.
    pub fn is_last(&self) -> bool {
        self.finish.is_some() || self.error.is_some()
    }
}
