//! Progress of loading weights: a bar on a terminal if it takes longer than a second, nothing otherwise.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time before the bar appears: for shorter loads it would only flicker.
const PATIENCE: Duration = Duration::from_secs(1);

/// Counts packed bytes.
pub struct Loading {
    began: Instant,
    bar: Option<ProgressBar>,
    done: u64,
    total: u64,
}

impl Loading {
    /// Progress towards `total` bytes.
    pub fn new(total: u64) -> Self {
        Self { began: Instant::now(), bar: None, done: 0, total }
    }

    /// Adds packed bytes.
    pub fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        if self.bar.is_none() && self.began.elapsed() > PATIENCE && std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(self.total), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("loading {bar:30} {bytes}/{total_bytes}");
            self.bar = Some(bar.with_style(style.expect("a constant template")));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(self.done);
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
