//! Shows an answer: on a terminal wrapped and with dimmed reasoning, elsewhere unchanged and without the reasoning.

use std::io::{IsTerminal, stdin, stdout};

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use super::answer::Piece;
use super::wrap::Wrap;
use crate::output::{say, say_part};

/// Columns of a terminal that does not report its width.
const COLUMNS: usize = 80;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Shows one answer.
pub struct Screen {
    terminal: bool,
    wrap: Wrap,
    reasoning: bool,
    ends_line: bool,
    _quiet: Option<Quiet>,
}

impl Screen {
    /// A screen for an answer that begins now. On a terminal, turns the echo of keys off.
    pub fn new() -> Self {
        let terminal = stdout().is_terminal();
        let quiet = (terminal && stdin().is_terminal()).then(Quiet::begin).flatten();
        Self { terminal, wrap: Wrap::default(), reasoning: false, ends_line: true, _quiet: quiet }
    }

    /// Shows a piece.
    pub fn show(&mut self, piece: Piece<'_>) {
        let (text, reasoning) = match piece {
            Piece::Content(text) => (text, false),
            Piece::Reasoning(text) => (text, true),
        };
        if !self.terminal {
            if !reasoning {
                self.put(text);
            }
            return;
        }
        if reasoning != self.reasoning {
            self.turn(reasoning);
        }
        let shown = self.wrap.push(text, columns());
        self.put(&shown);
    }

    /// Switches between reasoning and answer.
    fn turn(&mut self, reasoning: bool) {
        let rest = self.wrap.end(columns());
        self.put(&rest);
        match reasoning {
            true => say_part!("{DIM}"),
            false => say_part!("{PLAIN}{}\n", if self.ends_line { "" } else { "\n" }),
        }
        self.reasoning = reasoning;
    }

    /// Ends the answer's last line.
    pub fn end(&mut self) {
        let rest = self.wrap.end(columns());
        self.put(&rest);
        if self.reasoning {
            say_part!("{PLAIN}");
        }
        if !self.ends_line {
            say!("");
        }
    }

    fn put(&mut self, text: &str) {
        if !text.is_empty() {
            say_part!("{text}");
            self.ends_line = text.ends_with('\n');
        }
    }
}

/// Reads the terminal's current width in columns: it may be resized during an answer.
fn columns() -> usize {
    let size = tcgetwinsize(stdout()).ok();
    size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0).unwrap_or(COLUMNS)
}

/// Keeps the terminal from echoing keys until it is dropped. Signals still work.
struct Quiet(Termios);

impl Quiet {
    fn begin() -> Option<Self> {
        let before = tcgetattr(stdin()).ok()?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        tcsetattr(stdin(), OptionalActions::Now, &quiet).ok()?;
        Some(Self(before))
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // A terminal that has gone needs no setting.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.0);
    }
}
