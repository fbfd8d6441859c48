//! Progress of a pull: reports to the user, and the check whether the pull is cancelled.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::error::HubError;
use crate::size::human_bytes;

/// A receiver of a pull's events. Stages do not nest: `start`, any number of `advance`, `done`; a `start`
/// without a `done` before it begins the stage anew. `note` may come at any time.
pub trait Progress {
    /// Begins a stage; `total` is its size in bytes, if known.
    fn start(&mut self, what: &str, total: Option<u64>);
    /// Adds `bytes` bytes to the stage.
    fn advance(&mut self, bytes: u64);
    /// Ends the stage, whether it succeeded or not.
    fn done(&mut self);
    /// Reports one line to the user, such as a failed source and the next one.
    fn note(&mut self, line: &str);
    /// Whether the pull is still needed. Called between pieces and between tries, and never again once it has returned
    /// false.
    fn wanted(&self) -> bool {
        true
    }
}

/// Returns [`HubError::GivenUp`] once the pull is cancelled.
pub(crate) fn still_wanted(progress: &dyn Progress) -> Result<(), HubError> {
    if progress.wanted() { Ok(()) } else { Err(HubError::GivenUp) }
}

/// A receiver that reports nothing.
#[derive(Debug, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn start(&mut self, _what: &str, _total: Option<u64>) {}
    fn advance(&mut self, _bytes: u64) {}
    fn done(&mut self) {}
    fn note(&mut self, _line: &str) {}
}

/// A shorter stage is not reported.
const PATIENCE: Duration = Duration::from_secs(1);

/// Writes to stderr: a bar for stages that take longer than a second on a terminal; elsewhere one line for each such
/// stage. Notes are always written.
#[derive(Debug)]
pub struct TerminalProgress {
    /// Whether stderr is a terminal, looked up once.
    terminal: bool,
    stage: Option<Stage>,
}

#[derive(Debug)]
struct Stage {
    what: String,
    total: Option<u64>,
    bytes: u64,
    since: Instant,
    /// Whether the stage was reported, by a bar or by a line.
    shown: bool,
    bar: Option<ProgressBar>,
}

impl TerminalProgress {
    /// Returns a reporter for this process's stderr.
    #[must_use]
    pub fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), stage: None }
    }
}

impl Default for TerminalProgress {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress for TerminalProgress {
    fn start(&mut self, what: &str, total: Option<u64>) {
        self.done();
        self.stage =
            Some(Stage { what: what.to_owned(), total, bytes: 0, since: Instant::now(), shown: false, bar: None });
    }

    fn advance(&mut self, bytes: u64) {
        let Some(stage) = &mut self.stage else { return };
        stage.bytes = stage.bytes.saturating_add(bytes);
        if !stage.shown && stage.since.elapsed() >= PATIENCE {
            stage.shown = true;
            if self.terminal {
                stage.bar = Some(bar(&stage.what, stage.total));
            } else {
                let size = stage.total.map_or_else(String::new, |total| format!(", {}", human_bytes(total)));
                say(&format!("{}{size}", stage.what));
            }
        }
        if let Some(bar) = &stage.bar {
            bar.set_position(stage.bytes);
        }
    }

    fn done(&mut self) {
        if let Some(bar) = self.stage.take().and_then(|stage| stage.bar) {
            bar.finish_and_clear();
        }
    }

    fn note(&mut self, line: &str) {
        match self.stage.as_ref().and_then(|stage| stage.bar.as_ref()) {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }
}

/// Writes one line to stderr. A closed stderr is ignored.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn bar(what: &str, total: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
    let template = if total.is_some() {
        "{msg} [{bar:30}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}"
    } else {
        "{msg} {spinner} {decimal_bytes} {decimal_bytes_per_sec}"
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}
