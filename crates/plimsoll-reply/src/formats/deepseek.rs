//! DeepSeek: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, each
//! `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` (V3.1), or with `function` as the name, the name after the
//! separator and the arguments fenced as a block of code (V3, R1).

use super::{Format, JsonArguments, NAME_BYTES_MAX, is_name};
use crate::event::Outlet;
use crate::json::Step;
use crate::watch::Watch;

const CALLS: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
const CALL: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: &str = "```json";

/// The longest head, in bytes: markers, name, fence.
const HEAD_BYTES_MAX: usize = 2 * NAME_BYTES_MAX;

#[derive(Debug)]
pub(crate) struct DeepSeek {
    watch: Watch,
    state: State,
    /// Between the markers around all calls.
    inside: bool,
    /// The opening one with white space after it, while no call has come: it may still be text.
    opened: String,
}

#[derive(Debug)]
enum State {
    Text,
    /// After a call's first marker; holds all that was read.
    Head {
        text: String,
        watch: Watch,
        head: String,
    },
    /// After the separator.
    Name {
        text: String,
        name: String,
        fenced: bool,
    },
    Arguments(JsonArguments),
    /// After the arguments or in such as are no JSON, up to the call's end.
    Tail {
        broken: bool,
        ticks: u8,
    },
}

impl DeepSeek {
    pub fn new() -> Self {
        let watch = Watch::new(&[CALLS, CALLS_END, CALL, CALL_END]);
        Self { watch, state: State::Text, inside: false, opened: String::new() }
    }

    fn text(&mut self, c: char, out: &mut Outlet) {
        self.state = State::Text;
        let mut text = String::new();
        let marker = self.watch.step(c, &mut text);
        if !self.opened.is_empty() && text.trim().is_empty() && self.opened.len() < HEAD_BYTES_MAX {
            self.opened.push_str(&text);
        } else if !text.is_empty() {
            self.not_opened(out);
            out.content(&text);
        }
        self.marker(marker, out);
    }

    fn marker(&mut self, marker: Option<&str>, out: &mut Outlet) {
        match marker {
            Some(CALL) => {
                let text = std::mem::take(&mut self.opened) + CALL;
                self.state = State::Head { text, watch: Watch::new(&[SEPARATOR]), head: String::new() };
            }
            Some(CALLS) if !self.inside => (self.inside, self.opened) = (true, CALLS.into()),
            Some(CALLS_END) if self.inside && self.opened.is_empty() => {
                out.skip();
                self.inside = false;
            }
            Some(marker) => {
                self.not_opened(out);
                out.content(marker);
            }
            None => {}
        }
    }

    /// The opening marker was text: no call came after it.
    fn not_opened(&mut self, out: &mut Outlet) {
        if !self.opened.is_empty() {
            self.inside = false;
            out.content(&std::mem::take(&mut self.opened));
        }
    }

    fn give_back(&mut self, held: &str, c: char, out: &mut Outlet) {
        // The opening marker was text, and so is the closing one.
        self.inside &= !held.starts_with(CALLS);
        out.content(held);
        self.text(c, out);
    }

    /// Between separator and arguments.
    fn name(&mut self, c: char, out: &mut Outlet) {
        let State::Name { text, name, fenced } = &mut self.state else { return };
        if c == '{' && !*fenced && is_name(name.trim()) {
            out.begin(name.trim().to_owned(), None);
            self.state = JsonArguments::open(c, out).map_or(State::Tail { broken: true, ticks: 0 }, State::Arguments);
            return;
        }
        let whole = format!("{name}{c}");
        // `name\n```json\n` where the head said only that a function follows.
        let fits = if *fenced {
            match whole.split_once('\n') {
                None => true,
                Some((name, fence)) => is_name(name.trim()) && FENCE.starts_with(fence.trim()),
            }
        } else {
            whole.trim().is_empty() || is_name(whole.trim())
        };
        if !fits || text.len() > HEAD_BYTES_MAX {
            let text = std::mem::take(text);
            return self.give_back(&text, c, out);
        }
        text.push(c);
        if let (true, Some((before, fence))) = (*fenced, whole.split_once('\n'))
            && fence.trim() == FENCE
        {
            *name = before.trim().to_owned();
            *fenced = false;
            return;
        }
        *name = whole;
    }
}

impl Format for DeepSeek {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Text => self.text(c, out),
            State::Head { text, watch, head } => {
                let separator = watch.step(c, head);
                if head.len() > NAME_BYTES_MAX || head.contains('\n') {
                    let text = std::mem::take(text);
                    return self.give_back(&text, c, out);
                }
                text.push(c);
                if separator.is_some() {
                    let fenced = head.trim() == "function";
                    let name = if fenced { String::new() } else { std::mem::take(head) };
                    self.state = State::Name { text: std::mem::take(text), name, fenced };
                }
            }
            State::Name { .. } => self.name(c, out),
            State::Arguments(arguments) => match arguments.step(c, out) {
                Step::More => {}
                Step::Last | Step::Past => {
                    out.end();
                    self.state = State::Tail { broken: false, ticks: 0 };
                }
                Step::Bad => {
                    self.state = State::Tail { broken: true, ticks: 0 };
                    self.step(c, out);
                }
            },
            State::Tail { broken: true, .. } => {
                let mut text = String::new();
                let marker = self.watch.step(c, &mut text);
                out.arguments(&text);
                match marker {
                    Some(CALL_END) => {
                        out.skip();
                        out.end();
                        self.state = State::Text;
                    }
                    Some(marker) => out.arguments(marker),
                    None => {}
                }
            }
            State::Tail { ticks, .. } => {
                let mut text = String::new();
                let marker = self.watch.step(c, &mut text);
                if text == "`" && *ticks < 3 {
                    // The end of the fence.
                    *ticks += 1;
                } else {
                    out.content(&text);
                    if !text.trim().is_empty() {
                        self.state = State::Text;
                    }
                }
                match marker {
                    Some(CALL_END) => {
                        out.skip();
                        self.state = State::Text;
                    }
                    marker => self.marker(marker, out),
                }
            }
        }
    }

    fn in_call(&self) -> bool {
        !matches!(self.state, State::Text | State::Tail { broken: false, .. })
    }

    fn finish(&mut self, out: &mut Outlet) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text | State::Tail { broken: false, .. } => {
                self.not_opened(out);
                out.content(&self.watch.take_held());
            }
            State::Head { text, .. } | State::Name { text, .. } => out.content(&text),
            State::Arguments(_) => out.end(),
            State::Tail { broken: true, .. } => {
                out.arguments(&self.watch.take_held());
                out.end();
            }
        }
    }
}
