//! The outbox: a request's output until its reader takes it.
//!
//! The engine never waits for a slow reader: an outbox holds all output of its request, and admission has reserved
//! those bytes. Lists grow by an eighth, up to the request's maximum. Text beyond `TEXT_BYTES_PER_TOKEN` per token
//! reserves more bytes as it comes. Dropping the reader aborts the request: the engine sees that in its next step, also
//! when idle.

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use plimsoll_memory::heap::chunk_bytes;
use tokio::sync::Notify;

use crate::api::admission::HostBytes;
use crate::api::backlog::Backlog;
use crate::api::constraint::Unfit;
use crate::api::error::Failure;
use crate::api::output::{Cause, Delta, FinishReason, TEXT_BYTES_PER_TOKEN, TokenLogprobs, TokenOut};
use crate::api::progress::{Progress, Snapshot};
use crate::request::Request;

/// Text beyond [`TEXT_BYTES_PER_TOKEN`] is reserved in steps of this many bytes.
const EXTRA_TEXT_BYTES: usize = 1024;

/// The state that the engine, the reader and every [`Watch`] of a request share.
#[derive(Debug)]
struct OutboxState {
    pending: Mutex<Pending>,
    wake: Notify,
    reader_gone: AtomicBool,
    /// Bytes reserved for the output. Unread output counts until the last reference to this state is dropped.
    reserved: HostBytes,
    progress: Progress,
}

/// Unread output, and its heap bytes.
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

/// Reserves at least one more entry: an eighth of the list, at most `left`.
fn one_more<T>(list: &mut Vec<T>, left: usize) -> Result<(), TryReserveError> {
    match list.len() == list.capacity() && left > 0 {
        true => list.try_reserve_exact((list.len() / 8).max(8).min(left)),
        false => Ok(()),
    }
}

/// Reserves one more entry of each list, and `bytes` of text or an eighth of what there is.
fn make_room(delta: &mut Delta, bytes: usize, left: &Left) -> Result<(), TryReserveError> {
    one_more(&mut delta.tokens, left.tokens)?;
    one_more(&mut delta.prompt_logprobs, left.prompt)?;
    if delta.text.capacity() - delta.text.len() < bytes {
        delta.text.try_reserve_exact(bytes.max((delta.text.len() / 8).min(left.text)))?;
    }
    Ok(())
}

impl OutboxState {
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
    shared: Arc<OutboxState>,
    finished: bool,
    /// There is output since the reader was last woken.
    wake_pending: bool,
    /// Tokens, text bytes and prompt reports that the reserved bytes still have room for.
    left: Left,
    /// Bytes that the engine holds for the request besides its output, until this end is dropped.
    sequence_bytes: u64,
    /// Allocated beforehand, for an error message when memory is short.
    error_buffer: String,
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
    shared: Arc<OutboxState>,
    done: bool,
    /// Output taken from the engine, returned piece by piece.
    backlog: Backlog,
    /// Bytes of the output taken last. They count until the next output is taken.
    taken: u64,
}

/// Bytes of the longest message of [`Outbox::fail_without_alloc`].
const ERROR_BYTES: usize = 96;

/// A connected pair over the bytes reserved for `request`. None if memory is short.
pub(crate) fn outbox(reserved: HostBytes, request: &Request) -> Option<(Outbox, Reader)> {
    let mut error_buffer = String::new();
    error_buffer.try_reserve_exact(ERROR_BYTES).ok()?;
    let sequence_bytes = request.sequence_bytes();
    reserved.record(0, sequence_bytes);
    let (pending, wake, reader_gone) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
    let progress = Progress::new(request.prompt.len());
    let shared = Arc::new(OutboxState { pending, wake, reader_gone, reserved, progress });
    let tokens = request.max_tokens as usize;
    let prompt = request.prompt_logprobs.map_or(0, |_| request.prompt.len());
    let left = Left { tokens, text: tokens * TEXT_BYTES_PER_TOKEN + request.held_back_max(), prompt };
    let writer = Outbox {
        shared: Arc::clone(&shared),
        finished: false,
        wake_pending: false,
        left,
        sequence_bytes,
        error_buffer,
    };
    Some((writer, Reader { shared, done: false, backlog: Backlog::default(), taken: 0 }))
}

impl Outbox {
    /// Lets `write` add to the unread output. [`Self::wake_reader`] wakes the reader. After the last delta nothing is
    /// added. A `write` that allocates goes through `Self::try_push`.
    pub fn push(&mut self, write: impl FnOnce(&mut Delta)) {
        let written = self.try_push(None, write);
        debug_assert!(written.is_ok(), "no room was asked for");
    }

    /// As [`Self::push`]. With `text_bytes`, `write` may add one entry to each list and this many bytes of text: memory is
    /// reserved first, so a failure leaves the delta unchanged.
    pub(crate) fn try_push(
        &mut self,
        text_bytes: Option<usize>,
        write: impl FnOnce(&mut Delta),
    ) -> Result<(), Failure> {
        if self.finished {
            return Ok(());
        }
        if text_bytes.is_some_and(|bytes| !self.reserve_text(bytes)) {
            let why = "the text of this answer takes more bytes than were reserved for it, and all bytes for requests are taken \
                       (--request-bytes)";
            return Err(Unfit::Memory(why.into()).into());
        }
        let reserved = &self.shared.reserved;
        let mut pending = self.shared.pending();
        let Pending { delta, bytes: before, .. } = &mut *pending;
        let (before, tokens, prompt, text) =
            (*before, delta.tokens.len(), delta.prompt_logprobs.len(), delta.text.len());
        let made = text_bytes.map_or(Ok(()), |bytes| make_room(delta, bytes, &self.left));
        if made.is_ok() {
            write(delta);
            self.left.tokens = self.left.tokens.saturating_sub(delta.tokens.len() - tokens);
            self.left.prompt = self.left.prompt.saturating_sub(delta.prompt_logprobs.len() - prompt);
            self.left.text = self.left.text.saturating_sub(delta.text.len() - text);
            self.shared.progress.delivered(delta.tokens.len() - tokens, delta.cached_tokens);
        }
        self.finished = delta.is_last();
        self.wake_pending |= !delta.is_empty();
        pending.count(tokens, prompt);
        reserved.record(before, pending.bytes);
        Ok(made?)
    }

    /// Wakes the reader if there is output since the last wake. The engine wakes all readers together, once a step,
    /// after it has written all output of the step. A reader that wakes earlier takes a core from the step, to send a
    /// token or two.
    pub fn wake_reader(&mut self) {
        if std::mem::take(&mut self.wake_pending) {
            self.shared.wake.notify_one();
        }
    }

    /// Reserves `bytes` of text beyond the request's own share, if needed. False if no bytes are left.
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
        self.shared.reserved.record(bytes, 0);
        self.sequence_bytes -= bytes;
        self.push(|delta| {
            delta.pooled = Some(values);
            delta.finish = Some(FinishReason::Stop);
        });
    }

    /// Ends the request with an error, without an allocation. `message` is at most `ERROR_BYTES` long.
    pub fn fail_without_alloc(&mut self, message: &str, cause: Cause) {
        debug_assert!(message.len() <= ERROR_BYTES);
        let mut error = std::mem::take(&mut self.error_buffer);
        self.push(|delta| {
            error.push_str(message);
            (delta.error, delta.cause) = (Some(error), cause);
        });
    }

    /// The request's progress, for other threads.
    pub(crate) fn progress(&self) -> &Progress {
        &self.shared.progress
    }

    /// Whether the client has gone.
    pub fn reader_gone(&self) -> bool {
        self.shared.reader_gone.load(Ordering::Acquire)
    }
}

impl Drop for Outbox {
    /// An unfinished outbox ends its request with an error, so the reader never waits forever.
    fn drop(&mut self) {
        if !self.finished {
            self.fail_without_alloc("the engine stopped before the request was complete", Cause::Engine);
        }
        self.wake_reader();
        self.shared.progress.ended();
        self.shared.reserved.record(self.sequence_bytes, 0);
    }
}

impl Reader {
    /// A view of the request, for use while another task reads the output.
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.shared))
    }

    /// Waits for output. Returns none once the last delta was read. Cancel-safe.
    pub async fn next(&mut self) -> Option<Delta> {
        while !self.done {
            if let Some(delta) = self.take() {
                return Some(delta);
            }
            // A push between the check and the wait leaves a permit, so it is not missed.
            self.shared.wake.notified().await;
        }
        None
    }

    /// The next piece of output, without waiting; at most [`crate::api::backlog::DELTA_BYTES`].
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
        // The output before it is no longer used.
        self.shared.reserved.record(std::mem::replace(&mut self.taken, bytes), 0);
        Some(delta)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.abort();
    }
}

/// A view of one request from outside, and the means to cancel it. It keeps the request's output and byte reservation
/// alive, so drop it together with the reader.
#[derive(Clone, Debug)]
pub struct Watch(Arc<OutboxState>);

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
