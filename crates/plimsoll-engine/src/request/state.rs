//! The state of one request in the engine: its outbox, detokenizer, stop strings and counts. `token` turns one sampled
//! id into text.
//!
//! State is fixed in size: output already delivered is not kept.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_memory::faults::{self, Site};
use plimsoll_text::{Detokenizer, StopMatcher, Tokenizer};

use crate::api::admission::{AdmissionPermit, HostBytes};
use crate::api::constraint::{Constraint, Unfit};
use crate::api::error::Failure;
use crate::api::output::{Cause, FinishReason, TokenLogprobs, TokenOut};
use crate::api::pooling::PooledRow;
use crate::api::progress::Progress;
use crate::cache::PAGE_TOKENS;
use crate::media::{MediaSpec, SeqMedia};
use crate::metrics::Metrics;
use crate::request::Request;
use crate::request::outbox::{Outbox, Reader, outbox};
use crate::sampling::TokenCounts;
use crate::schedule::scheduler::{NewSeq, Pooled};
use crate::speculation::pace::Drafting;
use crate::speculation::prompt_lookup::Trail;

/// A message to the engine thread: a new sequence with all its memory. None only wakes the thread.
pub(crate) type Arrival = Option<NewSeq<RequestState>>;

/// Bytes reserved for the text of one token.
const PIECE_BYTES: usize = 64;

/// The state of one request, which its sequence carries through the scheduler.
pub(crate) struct RequestState {
    pub request: Request,
    /// Occurrences for the penalties; empty when the request has none.
    pub counts: TokenCounts,
    /// The grammar of the output; none if it is free.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Collected hidden states, for an embedding or a score.
    pub pooled_row: Option<PooledRow>,
    /// The time at which the server received the request.
    received: Instant,
    scheduled: Option<Instant>,
    last_token: Option<Instant>,
    drafting: Drafting,
    /// The earlier place in the text that prompt lookup copies from.
    trail: Trail,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Output tokens delivered.
    pub generated: u32,
    /// Bytes of text seen, held-back ones included.
    text_len: u32,
    /// Characters of text seen, held-back ones included.
    text_chars: u32,
    /// Buffer for the text of one token, reused between tokens.
    piece: String,
    finished: bool,
    failed: bool,
    /// The output. It is dropped after all fields above, and then releases the reserved bytes.
    pub outbox: Outbox,
    /// The place among the requests in the system, which is released last.
    _permit: AdmissionPermit,
}

/// Room for the occurrences of all tokens of a request, with the prompt's counted; empty if it has no penalties.
fn prompt_counts(request: &Request) -> Option<TokenCounts> {
    if !request.sampling.needs_counts() {
        return Some(TokenCounts::default());
    }
    let mut counts = TokenCounts::new(request.distinct_tokens_max()).ok()?;
    for id in &request.prompt {
        counts.add_prompt(*id).expect("room for every distinct token");
    }
    Some(counts)
}

impl RequestState {
    /// The new sequence of a request and its reader, with all fixed-size host buffers: the engine thread allocates none of
    /// them. Not here: unread output, which the outbox grows, and limits. None if memory is short.
    pub fn new_seq(
        mut request: Request,
        constraint: Option<Box<dyn Constraint>>,
        reserved: HostBytes,
        permit: AdmissionPermit,
        vocab: usize,
        spec: Option<&MediaSpec>,
    ) -> Option<(NewSeq<Self>, Reader)> {
        let total_max = request.total_max();
        // A block of exactly the reserved size, whatever capacity the prompt came with.
        let mut tokens = Vec::new();
        tokens.try_reserve_exact(total_max).ok()?;
        tokens.extend_from_slice(&request.prompt);
        request.prompt = tokens;
        let counts = prompt_counts(&request)?;
        let pages_max = total_max.div_ceil(PAGE_TOKENS);
        let (mut pages, mut window_pages) = (Vec::new(), Vec::new());
        pages.try_reserve_exact(pages_max).ok()?;
        window_pages.try_reserve_exact(pages_max).ok()?;
        let mut piece = String::new();
        piece.try_reserve_exact(PIECE_BYTES).ok()?;
        // The strings were checked: only memory can be short.
        let stops = StopMatcher::new(&request.stop).ok()?.keeping(request.keep_stop);
        let pooled_row = match request.embed {
            Some(embed) => Some(PooledRow::reserve(embed.size)?),
            None => None,
        };
        let media = match spec {
            Some(spec) => SeqMedia::reserve(spec, &request.prompt, &request.media, request.cache_salt).ok()?,
            None => SeqMedia::default(),
        };
        // The last: if memory is refused for its shared part, the emergency reserve alone can pay.
        let (outbox, reader) = outbox(reserved, &request)?;
        let tokens = std::mem::take(&mut request.prompt);
        let candidates = request.candidates(vocab, constraint.is_some());
        let pins = std::mem::take(&mut request.pins);
        let salt = request.cache_salt;
        let (output, embed) = (request.max_tokens as usize, request.embed);
        let reports = request.prompt_logprobs.is_some();
        let payload = Self {
            counts,
            constraint,
            pooled_row,
            outbox,
            _permit: permit,
            received: request.received.unwrap_or_else(Instant::now),
            scheduled: None,
            last_token: None,
            drafting: Drafting::new(request.speculate),
            trail: Trail::default(),
            detokenizer: Detokenizer::continuing(request.skip_special_tokens)
                .keeping(std::mem::take(&mut request.kept_special_ids)),
            stops,
            generated: 0,
            text_len: 0,
            text_chars: 0,
            piece,
            finished: false,
            failed: false,
            request,
        };
        let new_seq = NewSeq {
            salt,
            pooled: embed.map(|embed| Pooled {
                logits: embed.pooling.of_model(),
                every_row: embed.pooling.needs_every_row(),
                second_at: embed.second_at.map_or(usize::MAX, |at| at as usize),
            }),
            candidates,
            pages,
            window_pages,
            media,
            pins,
            ..NewSeq::new(tokens, output, payload).reporting(reports)
        };
        Some((new_seq, reader))
    }

    /// The request's progress, for other threads.
    pub fn progress(&self) -> &Progress {
        self.outbox.progress()
    }

    /// Whether the client has disconnected.
    pub fn abandoned(&self) -> bool {
        self.outbox.reader_gone()
    }

    /// Whether the request's last delta has been delivered.
    pub fn finished(&self) -> bool {
        self.finished
    }

    /// Whether the request ended with an error.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// Records the request's first step, and how many of its prompt tokens came from the cache. True if this is the
    /// first step.
    pub fn scheduled(&mut self, now: Instant, cached_tokens: usize, metrics: &Metrics) -> bool {
        if self.scheduled.is_some() {
            return false;
        }
        self.scheduled = Some(now);
        self.progress().scheduled();
        metrics.queue_seconds.observe((now - self.progress().arrived()).as_secs_f64());
        metrics.cached_tokens.inc_by(cached_tokens as u64);
        self.outbox.push(|delta| delta.cached_tokens = cached_tokens as u32);
        true
    }

    /// Whether the grammar's mask for the next token is ready. Waits for `patience` at most.
    pub fn mask_ready(&mut self, patience: Duration) -> bool {
        self.constraint.as_mut().is_none_or(|constraint| constraint.mask_ready(patience))
    }

    /// The work done for its grammar's masks, for the engine's progress check while the request waits.
    pub fn moved(&self) -> u64 {
        self.constraint.as_ref().map_or(0, |constraint| constraint.moved())
    }

    /// The request's draft counts, for deciding on more drafts.
    pub fn drafting(&mut self) -> &mut Drafting {
        &mut self.drafting
    }

    /// The earlier place in the text that prompt lookup copies from.
    pub fn trail(&mut self) -> &mut Trail {
        &mut self.trail
    }

    /// Reports a prompt token's log-probability.
    pub fn prompt_logprobs(&mut self, logprobs: TokenLogprobs) -> Result<(), Failure> {
        self.outbox.try_push(Some(0), |delta| delta.prompt_logprobs.push(logprobs))
    }

    /// Delivers a sampled token, and decides whether it is the last.
    pub fn token(
        &mut self,
        id: u32,
        logprobs: Option<TokenLogprobs>,
        tokenizer: &Tokenizer,
        eos: &[u32],
        metrics: &Metrics,
    ) -> Result<(), Failure> {
        self.note_time(metrics);
        self.generated += 1;
        if self.request.sampling.needs_counts() {
            self.counts.add_output(id).expect("room for every distinct token");
        }
        let may_stop = self.generated > self.request.min_tokens;
        let ends = (!self.request.ignore_eos && eos.contains(&id)) || self.request.stop_token_ids.contains(&id);
        let ends = may_stop && ends;
        let complete = match &mut self.constraint {
            Some(constraint) if !ends => {
                constraint.accept(id)?;
                constraint.complete()
            }
            _ => false,
        };
        self.piece.clear();
        let (text_offset, text_chars) = (self.text_len, self.text_chars);
        self.piece.try_reserve(Detokenizer::appended_max(tokenizer, id))?;
        if !ends || self.request.keep_stop {
            faults::site(Site::Detokenizer);
            self.detokenizer.push(tokenizer, id, &mut self.piece);
            self.text_len += self.piece.len() as u32;
            self.text_chars += self.piece.chars().count() as u32;
        }
        let out = TokenOut { id, text_offset, text_chars, logprobs };
        let Drafting { drafted, accepted, .. } = self.drafting;
        let last = self.generated >= self.request.max_tokens;
        let (piece, stops, detokenizer) = (&mut self.piece, &mut self.stops, &mut self.detokenizer);
        let text_bytes = stops.appended_max(piece.len() + char::REPLACEMENT_CHARACTER.len_utf8());
        let (request, finished) = (&mut self.request, &mut self.finished);
        let written = self.outbox.try_push(Some(text_bytes), |delta| {
            delta.tokens.push(out);
            (delta.drafted_tokens, delta.accepted_tokens) = (drafted, accepted);
            let stopped = may_stop && stops.push(piece, &mut delta.text);
            if !may_stop {
                delta.text.push_str(piece);
            }
            if !stopped && (ends || complete || last) {
                piece.clear();
                detokenizer.finish(piece);
                if !stops.push(piece, &mut delta.text) {
                    stops.finish(&mut delta.text);
                }
            }
            // Taken, not copied: the matcher has its own, and this is the last delta.
            delta.stop_reason = stops.matched().map(|index| std::mem::take(&mut request.stop[index]));
            delta.finish = match (stops.matched().is_some() || ends || complete, last) {
                (true, _) => Some(FinishReason::Stop),
                (false, true) => Some(FinishReason::Length),
                (false, false) => None,
            };
            *finished = delta.finish.is_some();
        });
        metrics.generated_tokens.inc();
        written
    }

    /// Ends a pooled request with its result.
    pub fn pooled(&mut self, metrics: &Metrics) -> Result<(), Failure> {
        if let Some(row) = &mut self.pooled_row {
            let values = row.finish()?;
            self.finished = true;
            self.outbox.pooled(values);
            metrics.pooled.inc();
        }
        Ok(())
    }

    /// Ends a request that wanted no output, only its prompt's log-probabilities.
    pub fn end_without_output(&mut self) {
        self.finished = true;
        self.outbox.push(|delta| delta.finish = Some(FinishReason::Length));
    }

    /// Ends the request with an error.
    pub fn fail(&mut self, failure: impl Into<Failure>) {
        self.finished = true;
        self.failed = true;
        match failure.into() {
            Failure::Other(message) | Failure::NonFinite(message) => {
                self.outbox.push(|delta| delta.error = Some(message));
            }
            Failure::Grammar(unfit) => {
                let (message, cause) = match unfit {
                    Unfit::Grammar(message) => (message, Cause::Grammar),
                    Unfit::Memory(message) => (message, Cause::Memory),
                };
                self.outbox.push(|delta| (delta.error, delta.cause) = (Some(message), cause));
            }
            Failure::Memory => self.outbox.fail_without_alloc(NO_MEMORY, Cause::Memory),
        }
    }

    fn note_time(&mut self, metrics: &Metrics) {
        let now = Instant::now();
        match self.last_token {
            None => metrics.ttft_seconds.observe((now - self.received).as_secs_f64()),
            Some(last) => metrics.inter_token_seconds.observe((now - last).as_secs_f64()),
        }
        self.last_token = Some(now);
    }
}

const NO_MEMORY: &str = "memory ran short on this machine; the request could not go on";

/// The tokenizer, shared with the server.
pub type SharedTokenizer = Arc<Tokenizer>;
