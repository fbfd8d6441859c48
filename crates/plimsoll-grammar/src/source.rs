//! What a grammar is made from, and the making.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::checks::{Layout, Rule};
use crate::depth::{self, Depth};

/// The longest text of one grammar, in bytes.
pub const SOURCE_BYTES_MAX: usize = 128 << 10;

/// Tools whose schemas are tried one by one where they cannot be followed together.
const TRIED_ALONE_MAX: usize = 64;

/// What output must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema allows.
    JsonSchema(Value),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// A grammar in Lark's notation, as llguidance reads it.
    Lark(String),
    /// Tool calls.
    Calls(Calls),
    /// Text that may have tool calls in it: a call that has begun is one of these to its end.
    TextWithCalls(Calls),
    /// Tool calls, or output of another form.
    CallsOr(Calls, Box<Source>),
}

/// Tool calls that must be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Calls {
    /// The tools that may be called.
    pub tools: Vec<Call>,
    /// More than one call may be made.
    pub several: bool,
    /// How a call is written.
    pub style: CallStyle,
}

/// One tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Its name.
    pub name: String,
    /// The schema of its arguments; null for any object.
    pub parameters: Value,
    /// Whether a schema that cannot be followed is refused; else as much of it is followed as can be.
    pub strict: bool,
}

/// How calls are written: what stands before the name, between name and arguments, after the arguments, and around it all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallStyle {
    /// What `open`, or else `before`, begins with: where text has it, a call has begun. Empty where nothing tells so.
    pub marker: &'static str,
    /// Before all calls.
    pub open: &'static str,
    /// Before a name.
    pub before: &'static str,
    /// Between name and arguments.
    pub between: &'static str,
    /// After the arguments.
    pub after: &'static str,
    /// Between two calls.
    pub next: &'static str,
    /// After all calls.
    pub close: &'static str,
}

impl Source {
    /// The same where tools that are not strict take any object if their schemas cannot be followed, as `follows` says of each alone; all of
    /// them if each could, or if they are many. None without such tools.
    pub(crate) fn loosened(&self, follows: impl Fn(&Self) -> bool) -> Option<Self> {
        let (Self::Calls(calls) | Self::TextWithCalls(calls) | Self::CallsOr(calls, _)) = self else { return None };
        let holds = |tool: &Call| !tool.strict && !tool.parameters.is_null();
        let alone = |tool: &Call| Self::Calls(Calls { tools: vec![tool.clone()], several: false, style: calls.style });
        let bound: Vec<&Call> = calls.tools.iter().filter(|tool| holds(tool)).collect();
        if bound.is_empty() {
            return None;
        }
        let many = bound.len() > TRIED_ALONE_MAX;
        let odd: Vec<&Call> = bound.iter().copied().filter(|tool| many || !follows(&alone(tool))).collect();
        let odd = if odd.is_empty() { bound } else { odd };
        let mut loose = calls.clone();
        let those = loose.tools.iter_mut().filter(|tool| odd.contains(&&**tool));
        those.for_each(|tool| tool.parameters = Value::Null);
        Some(match self {
            Self::CallsOr(_, other) => Self::CallsOr(loose, other.clone()),
            Self::TextWithCalls(_) => Self::TextWithCalls(loose),
            _ => Self::Calls(loose),
        })
    }

    /// Bytes of the texts that it is given as: its key has no fewer.
    pub(crate) fn text_bytes(&self) -> usize {
        match self {
            Self::JsonSchema(schema) => texts(schema),
            Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(all) => all.iter().map(String::len).sum(),
            Self::JsonObject => 0,
            Self::Calls(calls) | Self::TextWithCalls(calls) => calls.text_bytes(),
            Self::CallsOr(calls, other) => calls.text_bytes() + other.text_bytes(),
        }
    }

    /// A key that is the same for the same grammar, which is its whole text.
    pub(crate) fn key(&self, prefix: &str) -> String {
        format!("{prefix}\u{0}{self:?}")
    }

    /// As llguidance takes it (a Lark grammar), with fixed text before what is no call; and how deep it is.
    pub(crate) fn grammar(&self, prefix: &str) -> Result<(String, Depth), String> {
        let lark = match self {
            Self::Lark(text) if prefix.is_empty() => {
                depth::lark(text)?;
                text.clone()
            }
            Self::Calls(calls) => format!("start: calls\n{}", calls.lark()?),
            Self::TextWithCalls(calls) => calls.within_text()?,
            Self::CallsOr(calls, other) => {
                format!("start: calls | other\nother: {}{}", literal(prefix), other.lark()? + &calls.lark()?)
            }
            other => format!("start: {}{}", literal(prefix), other.lark()?),
        };
        if lark.len() > 2 * SOURCE_BYTES_MAX {
            return Err(format!(
                "the grammar has {} bytes, more than the limit of {}",
                lark.len(),
                2 * SOURCE_BYTES_MAX
            ));
        }
        let depth = Depth::of(&lark);
        Ok((lark, depth))
    }

    /// Where the documents of an answer stand behind `prefix`, and what they must satisfy. None where nothing in it is JSON.
    pub(crate) fn layout(&self, prefix: &str) -> Result<Option<Layout>, String> {
        let whole = |schema: Option<&Value>| {
            let rule = Rule { schema: schema.map(Value::to_string), exact: false };
            Layout { whole: Some((prefix.as_bytes().to_vec(), 0)), rules: vec![rule], ..Layout::default() }
        };
        Ok(match self {
            Self::JsonObject => Some(whole(None)),
            Self::JsonSchema(schema) => Some(whole(Some(schema))),
            Self::Regex(_) | Self::Choice(_) | Self::Lark(_) => None,
            Self::Calls(calls) | Self::TextWithCalls(calls) => Some(calls.layout(Layout::default())?),
            Self::CallsOr(calls, other) => Some(calls.layout(other.layout(prefix)?.unwrap_or_default())?),
        })
    }

    /// The end of a rule, and the rules it needs.
    fn lark(&self) -> Result<String, String> {
        Ok(match self {
            Self::JsonObject => format!("body\nbody: %json {}\n", schema(&json!({"type": "object"}), true)?),
            Self::JsonSchema(value) => format!("body\nbody: %json {}\n", schema(value, true)?),
            Self::Regex(pattern) => format!("BODY\nBODY: /{}/\n", escape_slashes(pattern)),
            Self::Choice(all) if all.is_empty() => return Err("there is nothing to choose from".into()),
            Self::Choice(all) => {
                let texts: Vec<String> = all.iter().map(|text| quote(text)).collect();
                format!("body\nbody: {}\n", texts.join(" | "))
            }
            Self::Lark(_) | Self::Calls(_) | Self::TextWithCalls(_) | Self::CallsOr(..) => {
                return Err("a grammar of one's own cannot be joined with this model's reply format".into());
            }
        })
    }
}

/// Bytes of the texts in a value.
fn texts(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(texts).sum(),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + texts(value)).sum(),
        _ => 0,
    }
}

/// A text before something else.
fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{} ", quote(text)) }
}

impl Calls {
    fn text_bytes(&self) -> usize {
        self.tools.iter().map(|tool| tool.name.len() + texts(&tool.parameters)).sum()
    }

    /// Free text with these calls in it. The head of a call is read lazily: it is over as soon as the marker is there, and with it the
    /// text that might have gone on.
    fn within_text(&self) -> Result<String, String> {
        let style = &self.style;
        if style.marker.is_empty() {
            return Err("calls without a mark cannot be told from text".into());
        }
        let strip = |text: &'static str| text.strip_prefix(style.marker).unwrap_or(text);
        let rest = match style.open {
            "" => CallStyle { before: strip(style.before), next: "", ..*style },
            open => CallStyle { open: strip(open), ..*style },
        };
        // Calls without anything around them all have a head each.
        let several = self.several && !style.open.is_empty();
        let start = if self.several { "(head calls)* free" } else { "head calls | free" };
        let calls = Self { several, style: rest, ..self.clone() };
        Ok(format!(
            "start: {start}\nfree: TEXT\nhead[lazy]: TEXT {}\nTEXT: /(\\n|.)*/\n{}",
            quote(style.marker),
            calls.lark()?
        ))
    }

    /// `other` with the arguments of these calls.
    fn layout(&self, mut other: Layout) -> Result<Layout, String> {
        let style = &self.style;
        for tool in &self.tools {
            let schema = match &tool.parameters {
                parameters if tool.strict && !parameters.is_null() => Some(object(parameters)?.to_string()),
                _ => None,
            };
            let head = format!("{}{}{}", style.before, tool.name, style.between);
            if other.whole.is_some() {
                other.openings.push(format!("{}{head}", style.open).into_bytes());
            }
            other.heads.push((head.into_bytes(), other.rules.len()));
            other.rules.push(Rule { schema, exact: false });
        }
        Ok(other)
    }

    /// The rule `calls`, and the rules it needs.
    fn lark(&self) -> Result<String, String> {
        let style = &self.style;
        let more = if self.several { format!("({}call)* ", literal(style.next)) } else { String::new() };
        let mut lark = format!("calls: {}call {more}{}\n", literal(style.open), literal(style.close));
        let names: Vec<String> = (0..self.tools.len()).map(|i| format!("call_{i}")).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(lark, "call: {}", names.join(" | "));
        for (i, tool) in self.tools.iter().enumerate() {
            let head = format!("{}{}{}", style.before, tool.name, style.between);
            let parameters = match &tool.parameters {
                Value::Null => schema(&json!({"type": "object"}), true)?,
                parameters => schema(&object(parameters)?, tool.strict)?,
            };
            let _ = writeln!(lark, "call_{i}: {} arguments_{i} {}", quote(&head), literal(style.after));
            let _ = writeln!(lark, "arguments_{i}: %json {parameters}");
        }
        Ok(lark)
    }
}

/// Arguments are an object, also where their schema forgets to say so.
fn object(parameters: &Value) -> Result<Value, String> {
    let mut schema = parameters.clone();
    let Some(fields) = schema.as_object_mut() else { return Ok(schema) };
    let named = |kind: &Value| {
        kind == "object" || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "object"))
    };
    match fields.get("type") {
        Some(kind) if !named(kind) => return Err(format!("arguments are an object, and a tool's schema wants {kind}")),
        None if ["$ref", "anyOf", "oneOf", "allOf"].iter().any(|key| fields.contains_key(*key)) => {}
        _ => drop(fields.insert("type".into(), "object".into())),
    }
    Ok(schema)
}

/// A schema with our own way of spacing: a model that may go on with white space for ever sometimes does. Unless it is `strict`, what of
/// it is not known says nothing.
fn schema(value: &Value, strict: bool) -> Result<String, String> {
    let mut schema = match value {
        Value::Object(schema) => schema.clone(),
        Value::Bool(true) => Map::new(),
        _ => return Err("a JSON schema must be an object".into()),
    };
    depth::schema(value)?;
    let spacing = json!({
        "whitespace_flexible": false, "item_separator": ",[ \n]?", "key_separator": ": ?", "coerce_one_of": true,
        "lenient": !strict
    });
    schema.insert("x-guidance".into(), spacing);
    Ok(Value::Object(schema).to_string())
}

/// A text in Lark's notation.
fn quote(text: &str) -> String {
    Value::from(text).to_string()
}

fn escape_slashes(pattern: &str) -> String {
    let (mut out, mut escaped) = (String::with_capacity(pattern.len()), false);
    for c in pattern.chars() {
        match c {
            '/' if !escaped => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    out
}
