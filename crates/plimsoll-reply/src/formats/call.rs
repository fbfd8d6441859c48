//! A call as one JSON object, `{"name": …, "arguments": {…}}`: the arguments go out while they come, once the name is known.

use std::sync::Arc;

use super::{HELD_BYTES_MAX, is_name};
use crate::Tools;
use crate::event::Outlet;
use crate::json::{Scanner, Step};

/// What has become of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// More must follow.
    More,
    /// It is complete, and its call has ended.
    Done,
    /// It is no call, or not any more; the character was not taken. [`JsonCall::into_text`] is content.
    Not,
    /// The arguments that are going out are no JSON; the character was not taken.
    Broken,
}

#[derive(Debug)]
pub(super) struct JsonCall {
    /// What would be content if this turned out to be no call: all of it, or what came after the arguments.
    text: String,
    place: Place,
    name: Option<String>,
    id: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    begun: bool,
    /// Nothing says that this is a call but the name of one of these.
    among: Option<Arc<Tools>>,
}

#[derive(Debug)]
enum Place {
    Open,
    /// Before a key; `first` where the object may end.
    Key {
        first: bool,
    },
    InKey {
        scanner: Scanner,
        text: String,
    },
    Colon(Role),
    Value {
        role: Role,
        scanner: Scanner,
        text: String,
    },
    /// In arguments that go out as they come.
    Stream(Scanner),
    Next,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Name,
    Id,
    Arguments,
    Other,
}

impl JsonCall {
    /// An object that a marker says is a call. `before` is what stands before it and comes back with it if it is none.
    pub fn marked(before: String) -> Self {
        Self { text: before, place: Place::Open, name: None, id: None, early: None, begun: false, among: None }
    }

    /// An object that is a call only if it has arguments and the name of a tool.
    pub fn among(tools: &Arc<Tools>, before: String) -> Self {
        Self { among: Some(Arc::clone(tools)), ..Self::marked(before) }
    }

    /// What is content after [`Progress::Not`].
    pub fn into_text(self) -> String {
        self.text
    }

    /// The reply ends here.
    pub fn finish(self, out: &mut Outlet) {
        if self.begun {
            out.end();
        }
        out.content(&self.text);
    }

    /// Takes a character.
    pub fn step(&mut self, c: char, out: &mut Outlet) -> Progress {
        if let Place::Stream(scanner) = &mut self.place {
            return match scanner.step(c) {
                Step::Bad | Step::Past => Progress::Broken,
                step => {
                    out.argument(c);
                    if step == Step::Last {
                        self.place = Place::Next;
                    }
                    Progress::More
                }
            };
        }
        match self.advance(c, out) {
            Progress::More if self.text.len() < HELD_BYTES_MAX => {
                if !matches!(self.place, Place::Stream(_)) {
                    self.text.push(c);
                }
                Progress::More
            }
            Progress::Done => Progress::Done,
            _ => {
                if self.begun {
                    out.end();
                }
                Progress::Not
            }
        }
    }

    fn advance(&mut self, c: char, out: &mut Outlet) -> Progress {
        match &mut self.place {
            Place::Open if c == '{' => self.place = Place::Key { first: true },
            Place::Key { .. } | Place::Next | Place::Colon(_) | Place::Open if c.is_ascii_whitespace() => {}
            Place::Key { .. } if c == '"' => {
                let mut scanner = Scanner::new();
                scanner.step(c);
                self.place = Place::InKey { scanner, text: c.into() };
            }
            Place::InKey { scanner, text } => {
                text.push(c);
                match scanner.step(c) {
                    Step::More => {}
                    Step::Last => self.place = Place::Colon(role(text)),
                    Step::Past | Step::Bad => return Progress::Not,
                }
            }
            Place::Colon(role) if c == ':' => {
                self.place = Place::Value { role: *role, scanner: Scanner::new(), text: String::new() };
            }
            Place::Value { .. } => return self.value(c, out),
            Place::Next if c == ',' => self.place = Place::Key { first: false },
            Place::Next | Place::Key { first: true } if c == '}' => return self.end(out),
            _ => return Progress::Not,
        }
        Progress::More
    }

    fn value(&mut self, c: char, out: &mut Outlet) -> Progress {
        let Place::Value { role, scanner, text } = &mut self.place else { return Progress::Not };
        let role = *role;
        let step = scanner.step(c);
        match step {
            Step::Bad => return Progress::Not,
            Step::More if text.is_empty() && c.is_ascii_whitespace() => return Progress::More,
            Step::More if text.is_empty() && c == '{' && role == Role::Arguments && !self.begun => {
                if let Some(name) = self.name.clone() {
                    let scanner = scanner.clone();
                    self.begin(name, out);
                    out.argument(c);
                    self.place = Place::Stream(scanner);
                    return Progress::More;
                }
            }
            _ => {}
        }
        if step != Step::Past {
            text.push(c);
        }
        if step == Step::More {
            return Progress::More;
        }
        let text = std::mem::take(text);
        self.place = Place::Next;
        if !self.take(role, &text, out) {
            return Progress::Not;
        }
        if step == Step::Past { self.advance(c, out) } else { Progress::More }
    }

    fn begin(&mut self, name: String, out: &mut Outlet) {
        self.begun = true;
        self.text.clear();
        out.begin(name, self.id.take());
    }

    /// A value that was held has ended. False if it cannot be what its key says.
    fn take(&mut self, role: Role, text: &str, out: &mut Outlet) -> bool {
        let string = || serde_json::from_str::<String>(text).ok();
        match role {
            Role::Other => {}
            // A call that has begun has its name and its arguments.
            _ if self.begun => {}
            Role::Id => self.id = string(),
            Role::Name => {
                let known = |name: &String| self.among.as_ref().is_none_or(|tools| tools.has(name));
                self.name = string().filter(|name| is_name(name) && known(name));
                if self.name.is_none() {
                    return false;
                }
            }
            Role::Arguments => {
                self.early = match text.as_bytes().first() {
                    Some(b'{') => Some(text.to_owned()),
                    Some(b'n') => Some("{}".into()),
                    // Arguments as a string that holds JSON: OpenAI's own spelling.
                    Some(b'"') => string().map(|text| if text.is_empty() { "{}".into() } else { text }),
                    _ => None,
                };
                if self.early.is_none() {
                    return false;
                }
            }
        }
        if let (Some(name), false) = (self.name.clone(), self.begun)
            && let Some(early) = self.early.take()
        {
            self.begin(name, out);
            out.arguments(&early);
        }
        true
    }

    fn end(&mut self, out: &mut Outlet) -> Progress {
        if !self.begun {
            let Some(name) = self.name.take().filter(|_| self.among.is_none()) else { return Progress::Not };
            self.begin(name, out);
            out.arguments("{}");
        }
        out.end();
        Progress::Done
    }
}

/// What a key, quotes included, says about its value.
fn role(key: &str) -> Role {
    match key {
        "\"name\"" => Role::Name,
        "\"id\"" => Role::Id,
        "\"arguments\"" | "\"parameters\"" => Role::Arguments,
        _ => Role::Other,
    }
}
