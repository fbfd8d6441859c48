//! The outbox: where a request's output waits for its reader.
//!
//! The engine never waits for a slow reader: an outbox can hold everything its request may produce, and admission has
//! reserved those bytes. Dropping the reader's end is the abort: the engine sees it in its next step, also when idle.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

use crate::handle::HostBytes;

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
    pub top: Vec<(u32, f32)>,
}

/// One token of output.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOut {
    /// The token's id.
    pub id: u32,
    /// Bytes of `Delta::text` that precede this token's own text (across deltas: offset in the whole text).
    pub text_offset: u32,
    /// Present when log-probabilities were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

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
    /// Set in the last delta of a request that ended well.
    pub finish: Option<FinishReason>,
    /// The stop string or stop token that ended it, as text, when there was one.
    pub stop_reason: Option<String>,
    /// Set in the last delta of a request that failed; the server turns it into a 5xx or an error event.
    pub error: Option<String>,
}

impl Delta {
    fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.text.is_empty() && self.prompt_logprobs.is_empty() && !self.is_last()
    }

    /// Whether nothing follows.
    pub fn is_last(&self) -> bool {
        self.finish.is_some() || self.error.is_some()
    }
}

#[derive(Debug)]
struct Shared {
    pending: Mutex<Delta>,
    wake: Notify,
    reader_gone: AtomicBool,
    /// What was reserved for the output; unread output counts for as long as anybody can still hold it.
    _reserved: HostBytes,
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, Delta> {
        // A panic while holding the lock leaves a delta that is still well formed.
        self.pending.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The engine's end.
#[derive(Debug)]
pub struct Outbox {
    shared: Arc<Shared>,
    finished: bool,
}

/// The client's end; dropping it aborts the request.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    done: bool,
}

/// A connected pair over the bytes reserved for what goes through it.
pub(crate) fn outbox(reserved: HostBytes) -> (Outbox, Reader) {
    let (pending, wake, reader_gone) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
    let shared = Arc::new(Shared { pending, wake, reader_gone, _reserved: reserved });
    let writer = Outbox { shared: Arc::clone(&shared), finished: false };
    (writer, Reader { shared, done: false })
}

impl Outbox {
    /// Lets `write` add to what waits, then wakes the reader. After the last delta nothing is added.
    pub fn push(&mut self, write: impl FnOnce(&mut Delta)) {
        if self.finished {
            return;
        }
        let mut pending = self.shared.pending();
        write(&mut pending);
        self.finished = pending.is_last();
        let wake = !pending.is_empty();
        drop(pending);
        if wake {
            self.shared.wake.notify_one();
        }
    }

    /// Whether the client has gone.
    pub fn reader_gone(&self) -> bool {
        self.shared.reader_gone.load(Ordering::Acquire)
    }
}

impl Drop for Outbox {
    /// An outbox that goes without having finished ends its request with an error: a reader never waits for ever.
    fn drop(&mut self) {
        if !self.finished {
            self.push(|delta| delta.error = Some("the engine stopped before the request was complete".into()));
        }
    }
}

impl Reader {
    /// Waits for output. Returns none once the last delta was read. Cancel-safe.
    pub async fn next(&mut self) -> Option<Delta> {
        while !self.done {
            if let Some(delta) = self.take() {
                return Some(delta);
            }
            // A push between the look and the wait leaves a permit behind, so it is not missed.
            self.shared.wake.notified().await;
        }
        None
    }

    /// What is there now, without waiting.
    pub fn take(&mut self) -> Option<Delta> {
        let mut pending = self.shared.pending();
        if pending.is_empty() {
            return None;
        }
        let Delta { cached_tokens, drafted_tokens, accepted_tokens, .. } = *pending;
        let delta = std::mem::take(&mut *pending);
        *pending = Delta { cached_tokens, drafted_tokens, accepted_tokens, ..Delta::default() };
        self.done = delta.is_last();
        Some(delta)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.reader_gone.store(true, Ordering::Release);
    }
}
