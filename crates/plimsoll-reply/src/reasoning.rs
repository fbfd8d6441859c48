//! Thinking blocks: text before the answer, between two tags.
//!
//! A template may open the block itself. Then all text up to the closing tag is reasoning, even if the output ends
//! before it. Otherwise the block must be the first text of the reply. Inside the block and after it, further tags are
//! text. Line breaks next to the tags belong to the tags.

use crate::event::Outlet;
use crate::watch::Watch;

/// Most white space before an opening tag, in bytes.
const SPACE_BYTES_MAX: usize = 256;

/// A thinking block's tags.
#[derive(Debug)]
pub(crate) struct Block {
    pub open: &'static str,
    /// The closing tag, in the form a watch takes.
    pub close: &'static [&'static str; 1],
}

#[derive(Debug)]
pub(crate) struct Splitter {
    block: &'static Block,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Only white space so far, and perhaps a part of the opening tag.
    Start(String),
    Inside {
        watch: Watch,
        newlines: usize,
        first: bool,
    },
    /// After the block, before any other text.
    After,
    Answer,
}

impl Splitter {
    /// With `opened`, the template has opened the block.
    pub fn new(block: &'static Block, opened: bool) -> Self {
        let start = State::Start(String::new());
        Self { block, state: if opened { inside(block) } else { start } }
    }

    /// Takes a character. Text that is not reasoning goes to `rest`.
    pub fn step(&mut self, c: char, out: &mut Outlet, rest: &mut String) {
        match &mut self.state {
            State::Answer => rest.push(c),
            State::After if c == '\n' => out.skip(),
            State::After => {
                rest.push(c);
                self.state = State::Answer;
            }
            State::Start(seen) => {
                seen.push(c);
                let tag = seen.trim_start();
                if tag == self.block.open {
                    out.skip();
                    self.state = inside(self.block);
                } else if !self.block.open.starts_with(tag) || seen.len() > SPACE_BYTES_MAX {
                    rest.push_str(seen);
                    self.state = State::Answer;
                }
            }
            State::Inside { watch, newlines, first } => {
                let mut text = String::new();
                let closed = watch.step(c, &mut text).is_some();
                for c in text.chars() {
                    if c == '\n' {
                        *newlines += usize::from(!*first);
                    } else {
                        *first = false;
                        out.reasoning(&"\n".repeat(std::mem::take(newlines)));
                        out.reasoning(c.encode_utf8(&mut [0; 4]));
                    }
                }
                out.skip();
                if closed {
                    self.state = State::After;
                }
            }
        }
    }

    /// The reply has ended.
    pub fn finish(&mut self, out: &mut Outlet, rest: &mut String) {
        match &mut self.state {
            State::Start(seen) => rest.push_str(seen),
            State::Inside { watch, newlines, .. } => {
                let held = watch.take_held();
                out.reasoning(&"\n".repeat(*newlines));
                out.reasoning(&held);
            }
            State::After | State::Answer => {}
        }
    }
}

fn inside(block: &'static Block) -> State {
    State::Inside { watch: Watch::new(block.close), newlines: 0, first: true }
}
