//! The outbox: where a request's output waits for its reader.
//!
//! The engine never waits for a slow reader: an outbox can hold everything its request may produce, and admission has
//! reserved those bytes. Its lists grow by an eighth and never beyond what the request can fill, so that a full one takes what was
//! reserved and no more; text beyond `TEXT_BYTES_PER_TOKEN` in the mean is reserved as it comes. Dropping the reader's end is
//! the abort: the engine sees it in its next step, also when idle.

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use plimsoll_memory::broken;
use plimsoll_memory::heap::chunk_bytes;
use tokio::sync::Notify;

use crate::api::admission::HostBytes;
use crate::api::backlog::Backlog;
use crate::api::constraint::Unfit;
use crate::api::error::Failure;
use crate::api::output::{Cause, Delta, FinishReason, TEXT_BYTES_PER_TOKEN, TokenLogprobs, TokenOut};
use crate::api::progress::{Progress, Snapshot};
use crate::api::request::Request;

/// Text beyond [`TEXT_BYTES_PER_TOKEN`] is reserved in steps of this many bytes.
const EXTRA_TEXT_BYTES: usize = 1024;

/// What the engine, the reader and every [`Watch`] share of a request.
#[derive(Debug)]
struct Shared {
    pending: Mutex<Pending>,
    wake: Notify,
    reader_gone: AtomicBool,
    /// What was reserved for the output; unread output counts until the last reference to this state is dropped.
    reserved: HostBytes,
    progress: Progress,
}

/// What waits, and the heap it takes.
#[derive(Debug, Default)]
struct Pending {
    delta: Delta,
    /// Bytes of log-probability reports inside it.
    reports: u64,
    /// All its bytes.
    bytes: u64,
}

impl Pending {
    /// Counts again after the lists have grown from `tokens` and `prompt` entries.
    fn count(&mut self, tokens: usize, prompt: usize) {
        let of_tokens = self.delta.tokens[tokens..].iter().filter_map(|token| token.logprobs.as_ref());
        let reports = of_tokens.chain(&self.delta.prompt_logprobs[prompt..]);
        self.reports += reports.map(|report| chunk(report.top.len(), size_of::<(u32, f32)>())).sum::<u64>();
        self.bytes = chunk(self.delta.tokens.capacity(), size_of::<TokenOut>())
            + chunk(self.delta.prompt_logprobs.capacity(), size_of::<TokenLogprobs>())
            + chunk(self.delta.text.capacity(), 1)
            + self.delta.pooled.as_ref().map_or(0, |values| chunk(values.capacity(), size_of::<f32>()))
            + self.reports;
    }
}

fn chunk(len: usize, size: usize) -> u64 {
    chunk_bytes(len * size) as u64
}

/// Room for one more entry, an eighth more than there is at most, and never for more than `left`.
fn make_room<T>(list: &mut Vec<T>, left: usize) -> Result<(), TryReserveError> {
    match list.len() == list.capacity() && left > 0 {
        true => list.try_reserve_exact((list.len() / 8).max(8).min(left)),
        false => Ok(()),
    }
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        // A panic while holding the lock leaves a delta that is still well formed.
        self.pending.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Cancels the rest of the output: the reader is gone, or a [`Watch`] ends the request.
    fn abort(&self) {
        self.reader_gone.store(true, Ordering::Release);
    }
}

/// The engine's end.
#[derive(Debug)]
pub struct Outbox {
    shared: Arc<Shared>,
    finished: bool,
    /// Something waits of which the reader was not told.
    untold: bool,
    /// Tokens, text bytes and prompt reports that may still come within what is reserved.
    left: Left,
    /// Bytes that the engine holds for the request besides its output, for as long as this end lives.
    of_sequence: u64,
    /// Room for words that are said when nothing can be asked for any more.
    spare: String,
}

#[derive(Clone, Copy, Debug)]
struct Left {
    tokens: usize,
    text: usize,
    prompt: usize,
}

/// The client's end; dropping it aborts the request.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    done: bool,
    /// What was taken and is handed on piece by piece.
    backlog: Backlog,
    /// Bytes of what was taken last, part of which is being worked on until more is taken.
    taken: u64,
}

/// Bytes of the longest last words.
const LAST_WORDS_BYTES: usize = 96;

/// A connected pair over the bytes reserved for `request`; none without memory for it.
pub(crate) fn outbox(reserved: HostBytes, request: &Request) -> Option<(Outbox, Reader)> {
    let mut spare = String::new();
    spare.try_reserve_exact(LAST_WORDS_BYTES).ok()?;
    let of_sequence = request.sequence_bytes();
    reserved.hold(0, of_sequence);
    let (pending, wake, reader_gone) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
    let progress = Progress::new(request.prompt.len());
    let shared = Arc::new(Shared { pending, wake, reader_gone, reserved, progress });
    let tokens = request.max_tokens as usize;
    let prompt = request.prompt_logprobs.map_or(0, |_| request.prompt.len());
    let left = Left { tokens, text: tokens * TEXT_BYTES_PER_TOKEN + request.held_back_max(), prompt };
    let writer = Outbox { shared: Arc::clone(&shared), finished: false, untold: false, left, of_sequence, spare };
    Some((writer, Reader { shared, done: false, backlog: Backlog::default(), taken: 0 }))
}

impl Outbox {
    /// Lets `write` add to what waits; [`Self::tell`] wakes the reader. After the last delta nothing is added. What needs memory goes
    /// through `Self::try_push`.
    pub fn push(&mut self, write: impl FnOnce(&mut Delta)) {
        let written = self.push_into(|_, _| Ok(()), write);
        debug_assert!(written.is_ok(), "no room was asked for");
    }

    /// The same for a `write` that adds at most one entry to each list and up to `text_bytes` of text: room is made before, so
    /// that a refusal leaves the delta as it was.
    pub(crate) fn try_push(&mut self, text_bytes: usize, write: impl FnOnce(&mut Delta)) -> Result<(), Failure> {
        if !self.finished && !self.reserve_text(text_bytes) {
            let why = "the text of this answer takes more bytes than were reserved for it, and all bytes for requests are taken \
                       (--request-bytes)";
            return Err(Unfit::Room(why.into()).into());
        }
        let room = |delta: &mut Delta, left: &Left| {
            make_room(&mut delta.tokens, left.tokens)?;
            make_room(&mut delta.prompt_logprobs, left.prompt)?;
            if delta.text.capacity() - delta.text.len() < text_bytes {
                delta.text.try_reserve_exact(text_bytes.max((delta.text.len() / 8).min(left.text)))?;
            }
            Ok(())
        };
        Ok(self.push_into(room, write)?)
    }

    fn push_into(
        &mut self,
        room: impl FnOnce(&mut Delta, &Left) -> Result<(), TryReserveError>,
        write: impl FnOnce(&mut Delta),
    ) -> Result<(), TryReserveError> {
        if self.finished {
            return Ok(());
        }
        let reserved = &self.shared.reserved;
        let mut pending = self.shared.pending();
        let Pending { delta, bytes: before, .. } = &mut *pending;
        let (before, tokens, prompt, text) =
            (*before, delta.tokens.len(), delta.prompt_logprobs.len(), delta.text.len());
        let made = room(delta, &self.left);
        if made.is_ok() {
            write(delta);
            self.left.tokens = self.left.tokens.saturating_sub(delta.tokens.len() - tokens);
            self.left.prompt = self.left.prompt.saturating_sub(delta.prompt_logprobs.len() - prompt);
            self.left.text = self.left.text.saturating_sub(delta.text.len() - text);
            self.shared.progress.delivered(delta.tokens.len() - tokens, delta.cached_tokens);
        }
        self.finished = delta.is_last();
        self.untold |= !delta.is_empty();
        pending.count(tokens, prompt);
        reserved.hold(before, pending.bytes);
        made
    }

    /// Wakes the reader if there is output that it was not told of. The engine does this for all readers together,
    /// once a step, after it has written all output of the step. A reader that wakes earlier takes a core from the
    /// step, to send a token or two.
    pub fn tell(&mut self) {
        if std::mem::take(&mut self.untold) {
            self.shared.wake.notify_one();
        }
    }

    /// Whether `bytes` of text may be added, reserving more where the request's own share is used up.
    fn reserve_text(&mut self, bytes: usize) -> bool {
        if bytes <= self.left.text {
            return true;
        }
        let more = bytes.max(EXTRA_TEXT_BYTES);
        let grown = self.shared.reserved.grow(more as u64);
        self.left.text += if grown { more } else { 0 };
        grown
    }

    /// Ends a pooled request with its result. The block of `values` moves from the engine's share to the output's.
    pub(crate) fn pooled(&mut self, values: Vec<f32>) {
        let bytes = chunk(values.capacity(), size_of::<f32>());
        self.shared.reserved.hold(bytes, 0);
        self.of_sequence -= bytes;
        self.push(|delta| {
            delta.pooled = Some(values);
            delta.finish = Some(FinishReason::Stop);
        });
    }

    /// Ends the request with an error without asking for memory. `words` are few.
    pub fn last_words(&mut self, words: &str, cause: Cause) {
        debug_assert!(words.len() <= LAST_WORDS_BYTES);
        let mut spare = std::mem::take(&mut self.spare);
        self.push(|delta| {
            spare.push_str(words);
            (delta.error, delta.cause) = (Some(spare), cause);
        });
    }

    /// Where to say how far the request has come.
    pub(crate) fn progress(&self) -> &Progress {
        &self.shared.progress
    }

    /// Whether the client has gone.
    pub fn reader_gone(&self) -> bool {
        self.shared.reader_gone.load(Ordering::Acquire)
    }
}

impl Drop for Outbox {
    /// An outbox that goes without having finished ends its request with an error, and its reader is told: it never waits for ever.
    fn drop(&mut self) {
        if !self.finished {
            self.last_words("the engine stopped before the request was complete", Cause::Engine);
        }
        self.tell();
        self.shared.progress.ended();
        self.shared.reserved.hold(self.of_sequence, 0);
    }
}

impl Reader {
    /// The progress of the request, for a look at it while another task reads the output.
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.shared))
    }

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

    /// What is there now, without waiting; of much that has waited, the next piece ([`crate::api::backlog::DELTA_BYTES`]).
    pub fn take(&mut self) -> Option<Delta> {
        if self.backlog.is_empty() {
            let delta = self.take_all()?;
            self.backlog.refill(delta);
        }
        let piece = self.backlog.piece();
        self.done = piece.is_last();
        Some(piece)
    }

    fn take_all(&mut self) -> Option<Delta> {
        let mut pending = self.shared.pending();
        if pending.delta.is_empty() {
            return None;
        }
        let Delta { cached_tokens, drafted_tokens, accepted_tokens, .. } = pending.delta;
        let Pending { delta, bytes, .. } = std::mem::take(&mut *pending);
        pending.delta = Delta { cached_tokens, drafted_tokens, accepted_tokens, ..Delta::default() };
        drop(pending);
        // The one before is done with.
        self.shared.reserved.hold(std::mem::replace(&mut self.taken, bytes), 0);
        Some(delta)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if !broken("V-27") {
            self.shared.abort();
        }
    }
}

/// A view of one request from outside, and the means to cancel it. It keeps the request's output and byte reservation
/// alive, so drop it together with the reader.
#[derive(Clone, Debug)]
pub struct Watch(Arc<Shared>);

impl Watch {
    /// Reads everything now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.0.progress.snapshot(self.0.reserved.held())
    }

    /// Ends the request as if its reader had gone: the engine gives back what it holds in its next step.
    pub fn abort(&self) {
        self.0.abort();
    }
}
