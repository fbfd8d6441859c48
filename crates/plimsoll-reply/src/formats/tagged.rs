//! Calls with arguments between tags instead of in JSON: Qwen3-Coder's
//! `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` and GLM's
//! `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`.
//!
//! A value is a string if the tool declares one; it goes out as it comes. Any other is held until it ends: JSON if it is
//! JSON, a string if not.

use std::sync::Arc;

use super::{Format, NAME_BYTES_MAX, is_name};
use crate::Tools;
use crate::event::Outlet;
use crate::hold::{HELD_BYTES_MAX, hold};
use crate::tools::Kind;
use crate::watch::Watch;

/// The tags of one family.
#[derive(Debug)]
pub(crate) struct Tags {
    /// Opening tags. The second may follow the first.
    open: &'static [&'static str],
    /// Stands before the name; empty if `open` is enough.
    before_name: &'static str,
    /// Ends the name; the first ones are swallowed, the others are markers of what follows.
    after_name: &'static [&'static str],
    key: &'static str,
    key_end: &'static str,
    /// Stands between key and value.
    value: &'static str,
    value_end: &'static [&'static str],
    /// Tags that may follow an argument: of the next key, or of the end.
    next: &'static [&'static str],
    end: &'static str,
    /// Follows the end; may be missing.
    close: &'static str,
    close_watch: &'static [&'static str],
}

/// Qwen3-Coder and Qwen3.5.
pub(crate) const QWEN_XML: Tags = Tags {
    open: &["<tool_call>", "<function="],
    before_name: "<function=",
    after_name: &[">"],
    key: "<parameter=",
    key_end: ">",
    value: "",
    // The model forgets a closing tag now and then.
    value_end: &["</parameter>", "<parameter=", "</function>"],
    next: &["<parameter=", "</function>"],
    end: "</function>",
    close: "</tool_call>",
    close_watch: &["<tool_call>", "<function=", "</tool_call>"],
};

/// GLM 4.5 and later.
pub(crate) const GLM: Tags = Tags {
    open: &["<tool_call>"],
    before_name: "",
    after_name: &["\n", "<arg_key>", "</tool_call>"],
    key: "<arg_key>",
    key_end: "</arg_key>",
    value: "<arg_value>",
    value_end: &["</arg_value>"],
    next: &["<arg_key>", "</tool_call>"],
    end: "</tool_call>",
    close: "",
    close_watch: &["<tool_call>"],
};

#[derive(Debug)]
pub(crate) struct Tagged {
    tags: &'static Tags,
    tools: Arc<Tools>,
    watch: Watch,
    state: State,
    /// A call has ended, but its closing tag has not come.
    closing: bool,
    name: String,
    /// An argument was emitted.
    some: bool,
}

#[derive(Debug)]
enum State {
    Text,
    /// Between the first tag and the name's; holds what was read.
    Gap(String),
    /// In the name; holds what was read before it.
    Name {
        before: String,
        name: String,
        watch: Watch,
    },
    /// Before a key or the end; holds white space and the like.
    Between {
        watch: Watch,
        skipped: String,
    },
    Key {
        key: String,
        watch: Watch,
    },
    /// Between key and value.
    BeforeValue {
        key: String,
        seen: String,
    },
    Value(Value),
}

/// A value on its way.
#[derive(Debug)]
struct Value {
    watch: Watch,
    /// A line break that ends the value if nothing follows it.
    newline: bool,
    /// Nothing has come yet: a line break is not part of it.
    first: bool,
    /// The value so far, where it must end before it can go out.
    held: Option<String>,
    /// The declared type of the parameter.
    kind: Kind,
}

impl Tagged {
    pub fn new(tags: &'static Tags, tools: Arc<Tools>) -> Self {
        let watch = Watch::new(tags.close_watch);
        Self { tags, tools, watch, state: State::Text, closing: false, name: String::new(), some: false }
    }

    fn text(&mut self, c: char, out: &mut Outlet) {
        let mut text = String::new();
        let marker = self.watch.step(c, &mut text);
        out.content(&text);
        self.closing &= text.trim().is_empty();
        let Some(marker) = marker else { return };
        if marker == self.tags.close {
            match std::mem::take(&mut self.closing) {
                true => out.skip(),
                false => out.content(marker),
            }
        } else if marker == self.tags.before_name || self.tags.before_name.is_empty() {
            self.enter_name(marker.into());
        } else {
            self.state = State::Gap(marker.into());
        }
    }

    fn give_back(&mut self, held: &str, out: &mut Outlet) {
        out.content(held);
        self.state = State::Text;
    }

    fn enter_name(&mut self, before: String) {
        self.state = State::Name { before, name: String::new(), watch: Watch::new(self.tags.after_name) };
    }

    fn between(&mut self) {
        self.state = State::Between { watch: Watch::new(self.tags.next), skipped: String::new() };
    }

    fn enter_key(&mut self) {
        let ends: &'static [&'static str] = if self.tags.key_end == ">" { &[">"] } else { &["</arg_key>"] };
        self.state = State::Key { key: String::new(), watch: Watch::new(ends) };
    }

    fn end(&mut self, out: &mut Outlet) {
        out.arguments(if self.some { "}" } else { "{}" });
        out.end();
        self.closing = !self.tags.close.is_empty();
        self.state = State::Text;
    }

    /// A marker after the name, between arguments, or where a value ended without its own.
    fn marker(&mut self, marker: &str, out: &mut Outlet) {
        if marker == self.tags.end {
            self.end(out);
        } else if marker == self.tags.key {
            self.enter_key();
        } else {
            self.between();
        }
    }

    fn name(&mut self, c: char, out: &mut Outlet) {
        let State::Name { before, name, watch } = &mut self.state else { return };
        let marker = watch.step(c, name);
        let fits = name.is_empty() || is_name(name.trim());
        match marker {
            Some(marker) if is_name(name.trim()) => {
                self.name = name.trim().to_owned();
                self.some = false;
                out.begin(self.name.clone(), None);
                self.marker(marker, out);
            }
            None if fits => {}
            // No name: what was read is text, and so is what looked like its end.
            marker => {
                let text = format!("{before}{name}{}{}", marker.unwrap_or(""), watch.take_held());
                self.give_back(&text, out);
            }
        }
    }

    fn value(&mut self, key: &str, out: &mut Outlet) {
        let key = serde_json::Value::from(key.trim()).to_string();
        out.arguments(if self.some { ", " } else { "{" });
        self.some = true;
        out.arguments(&key);
        out.arguments(": ");
        let kind = self.tools.kind(&self.name, &serde_json::from_str::<String>(&key).unwrap_or_default());
        let held = (kind != Kind::Text).then(String::new);
        if held.is_none() {
            out.arguments("\"");
        }
        let watch = Watch::new(self.tags.value_end);
        self.state = State::Value(Value { watch, newline: false, first: true, held, kind });
    }
}

impl Value {
    fn write(&mut self, text: &str, out: &mut Outlet) {
        for c in text.chars() {
            if std::mem::take(&mut self.first) && c == '\n' {
                continue;
            }
            if std::mem::take(&mut self.newline) {
                self.emit('\n', out);
            }
            if c == '\n' {
                self.newline = true;
            } else {
                self.emit(c, out);
            }
        }
    }

    fn emit(&mut self, c: char, out: &mut Outlet) {
        match &mut self.held {
            Some(held) if held.len() < HELD_BYTES_MAX => hold(held, c),
            Some(held) => {
                // Too long to wait for its end: a string.
                let text = std::mem::take(held);
                self.held = None;
                out.arguments("\"");
                text.chars().for_each(|c| escape(c, out));
                escape(c, out);
            }
            None => escape(c, out),
        }
    }

    fn end(&mut self, out: &mut Outlet) {
        let Some(text) = self.held.take() else { return out.arguments("\"") };
        let trimmed = text.trim();
        match trimmed {
            "null" | "None" => out.arguments("null"),
            _ if self.kind == Kind::TextOrNull => out.arguments(&serde_json::Value::from(text).to_string()),
            "True" => out.arguments("true"),
            "False" => out.arguments("false"),
            _ if serde_json::from_str::<serde_json::Value>(trimmed).is_ok() => out.arguments(trimmed),
            _ => out.arguments(&serde_json::Value::from(text).to_string()),
        }
    }
}

/// One character inside a JSON string.
pub(super) fn escape(c: char, out: &mut Outlet) {
    match c {
        '"' => out.arguments("\\\""),
        '\\' => out.arguments("\\\\"),
        '\n' => out.arguments("\\n"),
        '\r' => out.arguments("\\r"),
        '\t' => out.arguments("\\t"),
        c if c < ' ' => out.arguments(&format!("\\u{:04x}", u32::from(c))),
        c => out.argument(c),
    }
}

impl Format for Tagged {
    fn step(&mut self, c: char, out: &mut Outlet) {
        match &mut self.state {
            State::Text => self.text(c, out),
            State::Gap(held) => {
                held.push(c);
                let after = held[self.tags.open[0].len()..].trim_start();
                if after == self.tags.before_name {
                    let before = std::mem::take(held);
                    self.enter_name(before);
                } else if !self.tags.before_name.starts_with(after) || held.len() > 128 {
                    held.pop();
                    let held = std::mem::take(held);
                    self.give_back(&held, out);
                    self.text(c, out);
                }
            }
            State::Name { .. } => self.name(c, out),
            State::Between { watch, skipped } => {
                let marker = watch.step(c, skipped);
                if let Some(marker) = marker {
                    self.marker(marker, out);
                } else if !skipped.trim().is_empty() {
                    // Something else than arguments: the call ends with what it has, the rest is text.
                    let rest = format!("{}{}", skipped.trim_start(), watch.take_held());
                    self.end(out);
                    rest.chars().for_each(|c| self.text(c, out));
                } else {
                    skipped.clear();
                }
            }
            State::Key { key, watch } => {
                if watch.step(c, key).is_some() {
                    let key = std::mem::take(key);
                    if self.tags.value.is_empty() {
                        self.value(&key, out);
                    } else {
                        self.state = State::BeforeValue { key, seen: String::new() };
                    }
                } else if key.len() > NAME_BYTES_MAX {
                    let rest = format!("{}{key}{}", self.tags.key, watch.take_held());
                    self.end(out);
                    rest.chars().for_each(|c| self.text(c, out));
                }
            }
            State::BeforeValue { key, seen } => {
                seen.push(c);
                let after = seen.trim_start();
                if after == self.tags.value {
                    let key = std::mem::take(key);
                    self.value(&key, out);
                } else if !self.tags.value.starts_with(after) || seen.len() > 128 {
                    let rest = format!("{}{key}{}{seen}", self.tags.key, self.tags.key_end);
                    self.end(out);
                    rest.chars().for_each(|c| self.text(c, out));
                }
            }
            State::Value(value) => {
                let mut text = String::new();
                let marker = value.watch.step(c, &mut text);
                value.write(&text, out);
                if let Some(marker) = marker {
                    value.end(out);
                    self.marker(marker, out);
                }
            }
        }
    }

    fn in_call(&self) -> bool {
        !matches!(self.state, State::Text)
    }

    fn finish(&mut self, out: &mut Outlet) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => out.content(&self.watch.take_held()),
            State::Gap(held) => out.content(&held),
            State::Name { before, name, mut watch } => out.content(&format!("{before}{name}{}", watch.take_held())),
            State::Between { mut watch, .. } => {
                let rest = watch.take_held();
                self.end(out);
                out.content(&rest);
            }
            State::Key { key, mut watch } => {
                let rest = format!("{}{key}{}", self.tags.key, watch.take_held());
                self.end(out);
                out.content(&rest);
            }
            State::BeforeValue { key, seen } => {
                let rest = format!("{}{key}{}{seen}", self.tags.key, self.tags.key_end);
                self.end(out);
                out.content(&rest);
            }
            // Cut off inside a value: closing it would make a whole call of half a one.
            State::Value(mut value) => {
                let rest = value.watch.take_held();
                value.write(&rest, out);
                if let Some(text) = value.held.take() {
                    out.arguments(&text);
                }
                out.end();
            }
        }
    }
}
