//! Calls in a section, each between markers of its own, with the name outside of the JSON:
//!
//! - DeepSeek: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, each
//!   `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` (V3.1), or with `function` as the name, the name after the
//!   separator and the arguments fenced as a block of code (V3, R1).
//! - Kimi K2: the same with other markers. The name stands in an id, `functions.name:0`.

use super::{Format, JsonArguments, NAME_BYTES_MAX, is_name};
use crate::event::Outlet;
use crate::json::Step;
use crate::watch::Watch;

const FENCE: &str = "```json";

/// The markers of one family.
#[derive(Debug)]
pub(crate) struct Markers {
    calls: &'static str,
    calls_end: &'static str,
    call: &'static str,
    call_end: &'static str,
    separator: &'static [&'static str; 1],
    /// All but the separator.
    outside: &'static [&'static str; 4],
    /// Names stand in ids.
    ids: bool,
}

/// DeepSeek V3, V3.1 and R1.
pub(crate) const DEEPSEEK: Markers = Markers {
    calls: "<｜tool▁calls▁begin｜>",
    calls_end: "<｜tool▁calls▁end｜>",
    call: "<｜tool▁call▁begin｜>",
    call_end: "<｜tool▁call▁end｜>",
    separator: &["<｜tool▁sep｜>"],
    outside: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"],
    ids: false,
};

/// Kimi K2.
pub(crate) const KIMI: Markers = Markers {
    calls: "<|tool_calls_section_begin|>",
    calls_end: "<|tool_calls_section_end|>",
    call: "<|tool_call_begin|>",
    call_end: "<|tool_call_end|>",
    separator: &["<|tool_call_argument_begin|>"],
    outside: &[
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
    ],
    ids: true,
};

/// The longest head, in bytes: markers, name, fence.
const HEAD_BYTES_MAX: usize = 2 * NAME_BYTES_MAX;

#[derive(Debug)]
pub(crate) struct Sections {
    markers: &'static Markers,
    watch: Watch,
    state: State,
    /// Between the markers around all calls.
    inside: bool,
    /// The opening one with white space after it, while no call has come: it may still be text.
    opened: String,
    /// The number in the last id of the reply. A lower one, or the same, would give two calls one id.
    last: Option<u32>,
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

impl Sections {
    pub fn new(markers: &'static Markers) -> Self {
        let watch = Watch::new(markers.outside);
        Self { markers, watch, state: State::Text, inside: false, opened: String::new(), last: None }
    }

    /// Emits the start of a call. `head` is its name, or the id with the name in it.
    fn begin(&mut self, head: &str, out: &mut Outlet) {
        if !self.markers.ids {
            return out.begin(head.to_owned(), None);
        }
        let numbered = head.rsplit_once(':').and_then(|(name, number)| Some((name, number.parse().ok()?)));
        let (name, number) = numbered.filter(|(name, _)| !name.is_empty()).unzip();
        let name: &str = name.unwrap_or(head);
        let plain = name.strip_prefix("functions.").filter(|plain| !plain.is_empty());
        let counts_up = number.is_some_and(|number| self.last.replace(number).is_none_or(|last| last < number));
        out.begin(plain.unwrap_or(name).to_owned(), counts_up.then(|| head.to_owned()));
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
            Some(marker) if marker == self.markers.call => {
                let text = std::mem::take(&mut self.opened) + marker;
                self.state = State::Head { text, watch: Watch::new(self.markers.separator), head: String::new() };
            }
            Some(marker) if marker == self.markers.calls && !self.inside => {
                (self.inside, self.opened) = (true, marker.into());
            }
            Some(marker) if marker == self.markers.calls_end && self.inside && self.opened.is_empty() => {
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
        self.inside &= !held.starts_with(self.markers.calls);
        out.content(held);
        self.text(c, out);
    }

    /// Between separator and arguments.
    fn name(&mut self, c: char, out: &mut Outlet) {
        let State::Name { text, name, fenced } = &mut self.state else { return };
        if c == '{' && !*fenced && is_name(name.trim()) {
            let head = name.trim().to_owned();
            self.begin(&head, out);
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

impl Format for Sections {
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
                    let fenced = head.trim() == "function" && !self.markers.ids;
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
                    Some(marker) if marker == self.markers.call_end => {
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
                    Some(marker) if marker == self.markers.call_end => {
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
