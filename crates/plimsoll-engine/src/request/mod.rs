//! One engine request: the prompt's token ids, sampling parameters and limits.
//!
//! Its numbers bound all memory it can use. Admission computes that before it allocates.

pub mod outbox;
pub(crate) mod state;

use std::sync::Arc;
use std::time::Instant;

use arrayvec::ArrayVec;
use plimsoll_memory::heap::chunk_bytes;

use crate::api::constraint::Grammar;
use crate::api::error::Refusal;
use crate::api::limits::Limits;
use crate::api::output::{TEXT_BYTES_PER_TOKEN, TokenLogprobs, TokenOut};
use crate::api::pooling::{Embed, Pooling};
use crate::cache::{PAGE_TOKENS, Pin};
use crate::media::{MediaItem, SeqMedia};
use crate::sampling::{SamplingParams, TokenCounts};

/// One sequence to generate. `n` completions are `n` requests; they share their prompt's pages.
#[derive(Clone, Debug)]
pub struct Request {
    /// When the server received it: time to first token counts from here. None: from `submit`.
    pub received: Option<Instant>,
    /// Prompt token ids; at least one.
    pub prompt: Vec<u32>,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// At most this many tokens are generated; at least 1, except 0 with `prompt_logprobs` (echo only).
    pub max_tokens: u32,
    /// End-of-sequence and stop tokens are not sampled before this many tokens were generated.
    pub min_tokens: u32,
    /// Stop strings: generation ends at the first of them; it is no part of the text, unless `keep_stop`.
    pub stop: Vec<String>,
    /// The stop string or stop token's text stays in the output.
    pub keep_stop: bool,
    /// Token ids that end generation in addition to the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Do not stop at the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Report the log-probability of each generated token with this many alternatives (0 = only its own).
    pub logprobs: Option<u32>,
    /// Report the log-probability of each prompt token with this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Drop special tokens from the text.
    pub skip_special_tokens: bool,
    /// Special tokens that keep their text even so: the markers of tool calls and reasoning blocks.
    pub kept_special_ids: Vec<u32>,
    /// The grammar that the output must match.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// Allow speculative decoding for this request, if the engine speculates.
    pub speculate: bool,
    /// Requests with different salts never share cached pages.
    pub cache_salt: u64,
    /// Pools the prompt's hidden states into a vector or score, and generates nothing: `max_tokens` is 0.
    pub embed: Option<Embed>,
    /// The media of the prompt's placeholders, in order of position.
    pub media: Vec<MediaItem>,
    /// Prefixes of the prompt that the cache is to keep, at most [`Pin::MOST`].
    pub pins: ArrayVec<Pin, { Pin::MOST }>,
}

impl Request {
    /// Checks the request against the limits, without allocating.
    pub fn check(&self, limits: &Limits) -> Result<(), Refusal> {
        let invalid = |param, message| Err(Refusal::Invalid { param, message });
        if self.prompt.is_empty() {
            return invalid("prompt", "the prompt is empty: at least one token is needed".into());
        }
        match &self.embed {
            Some(embed) => self.check_pooled(embed, limits)?,
            None if limits.encoder => {
                return invalid("model", "this model makes embeddings only: it generates no text".into());
            }
            None => {}
        }
        if self.max_tokens == 0 && self.prompt_logprobs.is_none() && self.embed.is_none() {
            return invalid("max_tokens", "max_tokens must be at least 1".into());
        }
        if self.min_tokens > self.max_tokens {
            let (min, max) = (self.min_tokens, self.max_tokens);
            return invalid("min_tokens", format!("min_tokens is {min}, more than max_tokens ({max})"));
        }
        let total = self.prompt.len() as u64 + u64::from(self.max_tokens);
        if total > u64::from(limits.max_req_total_len) {
            return invalid(
                "max_tokens",
                format!(
                    "this server's maximum context length is {} tokens; the request asks for {total} ({} in the prompt, {} to generate)",
                    limits.max_req_total_len,
                    self.prompt.len(),
                    self.max_tokens
                ),
            );
        }
        let outside = |id: &&u32| **id >= limits.vocab_size;
        if let Some(id) = self.prompt.iter().find(outside) {
            return invalid("prompt", format!("token id {id} is outside the vocabulary of {}", limits.vocab_size));
        }
        if let Some(id) = self.stop_token_ids.iter().find(outside) {
            return invalid(
                "stop_token_ids",
                format!("token id {id} is outside the vocabulary of {}", limits.vocab_size),
            );
        }
        self.check_bounds(limits)
    }

    fn check_pooled(&self, embed: &Embed, limits: &Limits) -> Result<(), Refusal> {
        let invalid = |param, message| Err(Refusal::Invalid { param, message });
        if self.max_tokens > 0 || self.logprobs.is_some() || self.prompt_logprobs.is_some() || self.grammar.is_some() {
            return invalid("max_tokens", "an embedding is not generated: it has no tokens and no grammar".into());
        }
        if limits.pooled_size(embed.pooling) == 0 {
            let why = match embed.pooling {
                Pooling::Score => "this model has no classifier: it makes embeddings, no scores",
                Pooling::Dense => "this model has no dense layers: ask for another pooling",
                _ => "this model's dense layers make the embedding: ask for the model's own pooling",
            };
            return invalid("model", why.into());
        }
        let (len, most) = (self.prompt.len(), limits.max_req_total_len);
        if len as u64 <= u64::from(most) {
            return Ok(());
        }
        let why = match limits.encoder {
            true => ": the least of the model's positions, --max-req-total-len and --batch-max-tokens",
            false => " (--max-req-total-len)",
        };
        invalid("prompt", format!("the input has {len} tokens, more than this server's limit of {most}{why}"))
    }

    fn check_bounds(&self, limits: &Limits) -> Result<(), Refusal> {
        let invalid = |param, message| Err(Refusal::Invalid { param, message });
        for (param, n) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if let Some(n) = n.filter(|n| *n > limits.max_logprobs) {
                return invalid(param, format!("{param} is {n}, more than the limit of {}", limits.max_logprobs));
            }
        }
        if self.stop.len() > limits.max_stop_strings as usize {
            let n = self.stop.len();
            return invalid("stop", format!("{n} stop strings, more than the limit of {}", limits.max_stop_strings));
        }
        if self.stop_token_ids.len() > limits.max_stop_strings as usize {
            let n = self.stop_token_ids.len();
            return invalid(
                "stop_token_ids",
                format!("{n} stop token ids, more than the limit of {}", limits.max_stop_strings),
            );
        }
        if let Some(stop) = self.stop.iter().find(|s| s.is_empty() || s.len() > limits.max_stop_bytes as usize) {
            let n = stop.len();
            return invalid("stop", format!("a stop string has {n} bytes; 1 to {} are allowed", limits.max_stop_bytes));
        }
        if self.kept_special_ids.len() > limits.max_stop_strings as usize {
            let n = self.kept_special_ids.len();
            return invalid(
                "kept_special_ids",
                format!("{n} kept tokens, more than the limit of {}", limits.max_stop_strings),
            );
        }
        if let Err(error) = self.sampling.validate(limits.vocab_size as usize) {
            return invalid("sampling", error.to_string());
        }
        Ok(())
    }

    /// Most bytes this request may hold on the host, heap chunks included: state until it ends, and output that is not
    /// read yet. Admission reserves them; they go back when it ends.
    pub fn host_bytes(&self) -> u64 {
        let output = self.max_tokens as usize;
        let reports = |n: Option<u32>, tokens: usize| {
            n.map_or(0, |n| (tokens as u64).saturating_mul(chunk(n as usize * size_of::<(u32, f32)>())))
        };
        let prompt = self.prompt_logprobs.map_or(0, |_| self.prompt.len());
        self.sequence_bytes()
            + chunk(output * size_of::<TokenOut>())
            + chunk(output * TEXT_BYTES_PER_TOKEN + self.held_back_max())
            + chunk(prompt * size_of::<TokenLogprobs>())
            + reports(self.logprobs, output)
            + reports(self.prompt_logprobs, prompt)
            + self.grammar.as_ref().map_or(0, |grammar| grammar.bytes_max(self.max_tokens))
    }

    /// The part that the engine holds until the request ends: ids, pages, counts, stop strings, fixed state.
    pub(crate) fn sequence_bytes(&self) -> u64 {
        let total = self.total_max();
        // A place for each page, and for its window page.
        let pages = 2 * chunk(total.div_ceil(PAGE_TOKENS) * size_of::<u32>());
        // As text in the request, as text and table in the matcher.
        let stops: u64 = self.stop.iter().map(|s| STOP_FIXED_BYTES + 2 * chunk(s.len()) + chunk(2 * s.len())).sum();
        let bias = chunk(self.sampling.logit_bias.len() * size_of::<(u32, f32)>());
        let counts = match self.distinct_tokens_max() {
            0 => 0,
            distinct => chunk(TokenCounts::bytes_for(distinct)) + COUNTS_FIXED_BYTES,
        };
        let pooled = self.embed.map_or(0, |embed| chunk(embed.size as usize * size_of::<f32>()));
        let media = SeqMedia::bytes_for(&self.media, self.prompt.len());
        REQUEST_FIXED_BYTES + chunk(total * size_of::<u32>()) + pages + stops + bias + counts + pooled + media
    }

    /// Tokens of its prompt, and the most it may generate.
    pub(crate) fn total_max(&self) -> usize {
        self.prompt.len() + self.max_tokens as usize
    }

    /// Most text that may come out with one token beyond its own: bytes that a stop string held back, and a broken
    /// character.
    pub(crate) fn held_back_max(&self) -> usize {
        self.stop.iter().map(String::len).max().unwrap_or(0) + BROKEN_TEXT_BYTES
    }

    /// Top logits of a row that decide its next token; 0: all logits are needed. `constrained`: a
    /// grammar chooses among them.
    pub(crate) fn candidates(&self, vocab: usize, constrained: bool) -> u32 {
        let reported = self.logprobs.is_some() || self.prompt_logprobs.is_some() || self.embed.is_some();
        let narrowed = constrained || self.min_tokens > 0;
        if reported { 0 } else { self.sampling.candidates(vocab, narrowed) }
    }

    /// Distinct tokens with a count of their occurrences: 0 without penalties.
    pub(crate) fn distinct_tokens_max(&self) -> usize {
        if self.sampling.needs_counts() { self.total_max() } else { 0 }
    }
}

/// A request's fixed state on the heap: its outbox and the piece of text in work.
const REQUEST_FIXED_BYTES: u64 = 1280;

/// A stop string's records in request and matcher. The matcher's list may be half empty.
const STOP_FIXED_BYTES: u64 = 256;

/// The headers of the two lists that count tokens.
const COUNTS_FIXED_BYTES: u64 = 32;

/// Marks in place of an unfinished character at the end.
const BROKEN_TEXT_BYTES: usize = 16;

fn chunk(bytes: usize) -> u64 {
    chunk_bytes(bytes) as u64
}
