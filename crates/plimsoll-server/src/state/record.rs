//! The recorder (`serve --record FILE`): a line of the trace for every request. A separate thread writes it when the request ends. The
//! trace has no content, unless the operator asked for it.
//!
//! Requests never wait for this thread. Lines that cannot be written are lost and counted: a full disk costs lines of
//! the trace, not the service.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use plimsoll_engine::MediaItem;
use plimsoll_engine::trace::{BLOCK_TOKENS, Blinds, Line, Prompt};

use crate::http::budget::{ByteBudget, Held};
use crate::http::caller::Caller;
use crate::http::error::ServeError;
use crate::state::trace_file::{BUFFER_BYTES, Recorded, TraceFile, create};

/// The most lines that wait to be written.
const QUEUE: usize = 256;
/// Bytes of a recorder apart from the recorded lines: the queue's slots, the writer's buffer (which ends a line after it is full) and
/// names.
pub(crate) const RECORDER_BYTES: u64 = (QUEUE * (size_of::<Message>() + size_of::<usize>()) + 2 * BUFFER_BYTES) as u64;
/// A server that shuts down waits this long for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordConfig {
    /// The file; files of earlier servers are kept beside it.
    pub file: PathBuf,
    /// Whether the prompts' tokens are recorded, too.
    pub content: bool,
    /// The most bytes of the file; then no further line is written.
    pub max_bytes: u64,
}

/// The open trace.
pub(crate) struct Recorder {
    began: Instant,
    blinds: Blinds,
    content: bool,
    sender: SyncSender<Message>,
    bytes: Arc<ByteBudget>,
    pub recorded: Arc<Recorded>,
}

/// A message to the writing thread.
enum Message {
    Line(Box<Entry>),
    /// Asks for an answer when all lines before are in the file.
    Flush(SyncSender<()>),
}

/// The line of a request that still runs. It is written only if the request reports its [`Entry::end`].
pub(crate) struct Entry {
    pub line: Line,
    sender: SyncSender<Message>,
    recorded: Arc<Recorded>,
    _held: Held,
}

impl Recorder {
    /// Opens the file, writes its head and starts the writer.
    pub fn open(config: &RecordConfig, bytes: &Arc<ByteBudget>) -> Result<Self, ServeError> {
        let failed = |error: std::io::Error| {
            let file = config.file.display();
            ServeError::Config(format!("--record {file}: {error}"))
        };
        let file = create(&config.file).map_err(failed)?;
        let trace = TraceFile::begin(file, config.max_bytes).map_err(|error| {
            // The unfinished file would block the next start.
            let _ = std::fs::remove_file(&config.file);
            failed(error)
        })?;
        let (sender, messages) = sync_channel(QUEUE);
        let recorded = trace.recorded();
        let spawned = std::thread::Builder::new().name("plimsoll-record".into()).spawn(move || write(trace, &messages));
        spawned.map_err(failed)?;
        let (began, blinds) = (Instant::now(), Blinds::default());
        Ok(Self { began, blinds, content: config.content, sender, bytes: Arc::clone(bytes), recorded })
    }

    /// Waits, for a short time at most, until the lines of all ended requests are in the file.
    pub fn flush(&self) {
        let (done, wait) = sync_channel(1);
        if self.sender.try_send(Message::Flush(done)).is_ok() {
            // Lines that are not written by then are lost: a slow disk does not delay the shutdown any longer.
            let _ = wait.recv_timeout(FLUSH_TIMEOUT);
        }
    }

    /// The salt of a request's prefix cache, disguised for the trace.
    pub fn salt(&self, cache_salt: u64) -> u64 {
        self.blinds.salt(cache_salt)
    }

    /// Begins the line of a request with these prompts, or with inputs that nothing is generated for. Returns none where the byte budget
    /// has no room for the line; the line is then lost. `model`: the model's label.
    pub fn prompts<'a>(
        &self,
        model: Option<&str>,
        api: &'static str,
        all: impl Iterator<Item = &'a [u32]> + Clone,
        media: &[MediaItem],
    ) -> Option<Entry> {
        let tokens: usize = all.clone().map(<[u32]>::len).sum();
        let each = if self.content { size_of::<u32>() } else { 0 };
        let prompts = all.clone().count() * size_of::<Prompt>();
        // Twice: the entry itself, and its JSON.
        let bytes = 2
            * (size_of::<Entry>()
                + prompts
                + tokens * each
                + 16 * tokens.div_ceil(BLOCK_TOKENS as usize)
                + size_of_val(media));
        let Ok(held) = self.bytes.hold(bytes as u64) else {
            self.recorded.lost.fetch_add(1, Relaxed);
            return None;
        };
        let at_ms = Caller::current().arrived().saturating_duration_since(self.began).as_millis() as u64;
        let prompts = all.map(|ids| self.blinds.prompt(ids, media, self.content)).collect();
        let plain = Line::plain(at_ms, Prompt::default(), 0);
        let model = model.map(str::to_owned);
        let line = Line { api: api.into(), model, stream: false, prompts, ..plain };
        let (sender, recorded) = (self.sender.clone(), Arc::clone(&self.recorded));
        Some(Entry { line, sender, recorded, _held: held })
    }
}

impl Entry {
    /// Ends the line and sends it to the writing thread.
    pub fn end(mut self, how: &'static str, output: u64, first_ms: Option<f64>, ms: f64) {
        let line = &mut self.line;
        (line.end, line.output) = (how.into(), output);
        (line.first_ms, line.ms) = (first_ms.map(|ms| ms as u64), ms as u64);
        let sender = self.sender.clone();
        let recorded = Arc::clone(&self.recorded);
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            sender.try_send(Message::Line(Box::new(self)))
        {
            recorded.lost.fetch_add(1, Relaxed);
        }
    }
}

/// The writing thread. It ends when the recorder and all entries are dropped.
fn write(mut file: TraceFile<File>, messages: &Receiver<Message>) {
    while let Ok(mut message) = messages.recv() {
        loop {
            match message {
                Message::Line(entry) => file.put(&entry.line),
                Message::Flush(done) => {
                    file.flush();
                    // The receiver is gone if the flush has timed out.
                    let _ = done.try_send(());
                }
            }
            match messages.try_recv() {
                Ok(next) => message = next,
                Err(_) => break,
            }
        }
        // The queue is empty: whole lines are written out, for readers of the file while the server runs.
        file.flush();
    }
}
