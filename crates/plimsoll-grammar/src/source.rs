//! What a grammar is made from, and the making.

use std::fmt::Write;

use plimsoll_schema::Compiled;
use serde_json::value::RawValue;
use serde_json::{Deserializer, Value, json};

use crate::checks::{Layout, Rule};
use crate::depth::{self, Depth};
use crate::error::GrammarError;

/// The longest text of one grammar, in bytes.
pub const SOURCE_BYTES_MAX: usize = 128 << 10;

/// Up to this many tools have their schemas tried one by one if they cannot be followed together.
const TRIED_ALONE_MAX: usize = 64;

/// What output must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema allows, which is given as JSON text: numbers in it are exact.
    JsonSchema(String),
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
    /// The arguments are `{"input": TEXT}`, and the text has this form. None where `parameters` decide.
    pub input: Option<Input>,
}

/// The form of the text that a custom tool takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A regular expression in Rust's syntax, which matches the whole text.
    Regex(String),
    /// A grammar in Lark's notation.
    Lark(String),
}

impl Input {
    /// Its text.
    pub fn text(&self) -> &str {
        match self {
            Self::Regex(text) | Self::Lark(text) => text,
        }
    }
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
        let holds = |tool: &Call| !tool.strict && tool.input.is_none() && !tool.parameters.is_null();
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
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
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

    /// As llguidance takes it, with fixed text before what is no call. `compile` makes rules of a schema.
    pub(crate) fn grammar(&self, prefix: &str, compile: &Compile<'_>) -> Result<Made, GrammarError> {
        let mut making = Making { compile, rules: String::new(), layout: Layout::default(), depth: Depth::default() };
        let start = match self {
            Self::Lark(text) if prefix.is_empty() => {
                depth::lark(text).map_err(invalid)?;
                making.lark(text)?
            }
            Self::Calls(calls) => format!("start: calls\n{}", making.calls(calls)?),
            Self::TextWithCalls(calls) => making.calls_in_text(calls)?,
            Self::CallsOr(calls, other) => {
                let other = making.whole(other, prefix)?;
                format!("start: calls | other\nother: {}{}{}", literal(prefix), other, making.calls(calls)?)
            }
            other => format!("start: {}{}", literal(prefix), making.whole(other, prefix)?),
        };
        let Making { rules, layout, depth: inputs, .. } = making;
        // Rules made of schemas lie within each other as the schemas do, and those are counted.
        let depth = Depth::of(&start).max(layout.depth()).max(inputs);
        let lark = start + &rules;
        if lark.len() > LARK_BYTES_MAX {
            let bytes = lark.len();
            return Err(invalid(format!(
                "the grammar has {bytes} bytes when it is written out; {LARK_BYTES_MAX} are allowed"
            )));
        }
        let layout = (!layout.rules.is_empty()).then_some(layout);
        Ok(Made { lark, depth, layout })
    }
}

/// A source as a grammar.
pub(crate) struct Made {
    /// In llguidance's Lark dialect.
    pub lark: String,
    pub depth: Depth,
    /// Where documents stand in its texts, and what they must satisfy. None where nothing in it is JSON.
    pub layout: Option<Layout>,
}

/// The longest grammar that is made of a source.
const LARK_BYTES_MAX: usize = 2 << 20;

/// What rules are made of. The first rule gets `name`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part<'a> {
    /// A schema (JSON text); `lenient` leaves out what is not supported.
    Schema { schema: &'a str, lenient: bool },
    /// A text inside a JSON string.
    Input(&'a Input),
}

/// Makes rules of a part, the first of which has this name.
pub(crate) type Compile<'a> = dyn Fn(Part<'_>, &str) -> Result<Compiled, GrammarError> + 'a;

/// Collects the rules of schemas, and where their documents stand.
struct Making<'a> {
    compile: &'a Compile<'a>,
    rules: String,
    layout: Layout,
    /// Of the tools' own grammars.
    depth: Depth,
}

fn invalid(why: impl Into<String>) -> GrammarError {
    GrammarError::Invalid(why.into())
}

impl Making<'_> {
    /// The end of the rule of a whole answer, which stands behind `prefix`.
    fn whole(&mut self, source: &Source, prefix: &str) -> Result<String, GrammarError> {
        Ok(match source {
            Source::JsonObject => {
                self.schema(&any_object(), "body", false, false)?;
                self.layout.whole = Some((prefix.as_bytes().to_vec(), self.layout.rules.len() - 1));
                "body\n".into()
            }
            Source::JsonSchema(schema) => {
                self.schema(schema, "body", false, true)?;
                self.layout.whole = Some((prefix.as_bytes().to_vec(), self.layout.rules.len() - 1));
                "body\n".into()
            }
            Source::Regex(pattern) => format!("BODY\nBODY: /{}/\n", escape_slashes(pattern)),
            Source::Choice(all) if all.is_empty() => return Err(invalid("there is nothing to choose from")),
            Source::Choice(all) => {
                let texts: Vec<String> = all.iter().map(|text| quote(text)).collect();
                format!("body\nbody: {}\n", texts.join(" | "))
            }
            Source::Lark(_) | Source::Calls(_) | Source::TextWithCalls(_) | Source::CallsOr(..) => {
                return Err(invalid("a grammar of one's own cannot be joined with this model's reply format"));
            }
        })
    }

    /// Adds the rules of a schema, the first of which is `name`, and what its documents must satisfy.
    fn schema(&mut self, schema: &str, name: &str, lenient: bool, validated: bool) -> Result<(), GrammarError> {
        let compiled = (self.compile)(Part::Schema { schema, lenient }, name)?;
        self.rules += &compiled.rules;
        let exact = compiled.validated.is_empty();
        self.layout.rules.push(Rule { tool: None, schema: validated.then(|| schema.to_owned()), exact });
        Ok(())
    }

    /// The same for the arguments of a tool, which an error names.
    fn arguments(&mut self, tool: &Call, name: &str) -> Result<(), GrammarError> {
        let done = match &tool.parameters {
            _ if tool.input.is_some() => self.input(tool.input.as_ref(), name),
            Value::Null => self.schema(&any_object(), name, false, false),
            parameters => object(parameters)
                .map_err(invalid)
                .and_then(|schema| self.schema(&schema.to_string(), name, !tool.strict, tool.strict)),
        };
        done.map_err(|error| match error {
            GrammarError::Invalid(why) => invalid(format!("tool '{}': {why}", tool.name)),
            other => other,
        })?;
        if let Some(rule) = self.layout.rules.last_mut() {
            rule.tool = Some(tool.name.clone());
        }
        Ok(())
    }

    /// The arguments of a tool that takes a text.
    fn input(&mut self, input: Option<&Input>, name: &str) -> Result<(), GrammarError> {
        let Some(input) = input else { return Ok(()) };
        if let Input::Lark(text) = input {
            depth::lark(text).map_err(invalid)?;
            self.depth = self.depth.max(Depth::of(text));
        }
        let inner = format!("{name}_text");
        self.rules += &(self.compile)(Part::Input(input), &inner)?.rules;
        let _ = writeln!(self.rules, "{name}: {} {inner} {}", quote("{\"input\": \""), quote("\"}"));
        self.layout.rules.push(Rule { tool: None, schema: None, exact: true });
        Ok(())
    }

    /// The rule `calls`, and the rules it needs.
    fn calls(&mut self, calls: &Calls) -> Result<String, GrammarError> {
        self.calls_written(calls, calls.style)
    }

    /// The same, written in a style that may differ from the one that the text has in the end.
    fn calls_written(&mut self, calls: &Calls, style: CallStyle) -> Result<String, GrammarError> {
        let more = if calls.several { format!("({}call)* ", literal(style.next)) } else { String::new() };
        let mut lark = format!("calls: {}call {more}{}\n", literal(style.open), literal(style.close));
        let names: Vec<String> = (0..calls.tools.len()).map(|i| format!("call_{i}")).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(lark, "call: {}", names.join(" | "));
        for (i, tool) in calls.tools.iter().enumerate() {
            let head = format!("{}{}{}", style.before, tool.name, style.between);
            let name = format!("arguments_{i}");
            self.arguments(tool, &name)?;
            let rule = self.layout.rules.len() - 1;
            let written = format!("{}{}{}", calls.style.before, tool.name, calls.style.between);
            self.layout.openings.push(format!("{}{written}", calls.style.open).into_bytes());
            self.layout.heads.push((written.into_bytes(), rule));
            let _ = writeln!(lark, "call_{i}: {} {name} {}", quote(&head), literal(style.after));
        }
        Ok(lark)
    }

    /// Free text with these calls in it. The head of a call is read lazily: it is over as soon as the marker is there, and with it the
    /// text that might have gone on.
    fn calls_in_text(&mut self, calls: &Calls) -> Result<String, GrammarError> {
        let style = &calls.style;
        if style.marker.is_empty() {
            return Err(invalid("calls without a mark cannot be told from text"));
        }
        let strip = |text: &'static str| text.strip_prefix(style.marker).unwrap_or(text);
        let rest = match style.open {
            "" => CallStyle { before: strip(style.before), next: "", ..*style },
            open => CallStyle { open: strip(open), ..*style },
        };
        // Calls without anything around them all have a head each.
        let several = calls.several && !style.open.is_empty();
        let start = if calls.several { "(head calls)* free" } else { "head calls | free" };
        let calls = Calls { several, ..calls.clone() };
        Ok(format!(
            "start: {start}\nfree: TEXT\nhead[lazy]: TEXT {}\nTEXT: /(\\n|.)*/\n{}",
            quote(style.marker),
            self.calls_written(&calls, rest)?
        ))
    }

    /// Converts a grammar of the client's: its schemas (`%json {…}`) become rules.
    fn lark(&mut self, text: &str) -> Result<String, GrammarError> {
        let (mut out, mut rest) = (String::with_capacity(text.len()), text);
        while let Some((before, after)) = rest.split_once("%json") {
            out.push_str(before);
            let mut values = Deserializer::from_str(after).into_iter::<&RawValue>();
            let Some(Ok(schema)) = values.next() else {
                return Err(invalid("%json in the grammar is not followed by a schema"));
            };
            let name = format!("json_in_lark_{}", self.layout.rules.len());
            self.schema(schema.get(), &name, false, true)?;
            if self.layout.rules.last().is_some_and(|rule| !rule.exact) {
                return Err(invalid(
                    "%json in the grammar has a schema that only a finished answer can be validated for \
                     (uniqueItems, for instance): use guided_json",
                ));
            }
            out += &format!(" {name} ");
            rest = &after[values.byte_offset()..];
        }
        // Where they stand in the text is not known here: they are exact.
        self.layout = Layout::default();
        Ok(out + rest + "\n")
    }
}

/// The schema of any object.
fn any_object() -> String {
    json!({"type": "object"}).to_string()
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
        let input = |tool: &Call| tool.input.as_ref().map_or(0, |input| input.text().len());
        self.tools.iter().map(|tool| tool.name.len() + texts(&tool.parameters) + input(tool)).sum()
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
        _ => drop(fields.insert("type".into(), "object".into())),
    }
    Ok(schema)
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
