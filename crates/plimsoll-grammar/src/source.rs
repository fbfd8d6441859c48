//! The sources of grammars, and their conversion to Lark.

use std::fmt::Write;

use plimsoll_schema::Compiled;
use serde_json::value::RawValue;
use serde_json::{Deserializer, Value, json};

use crate::checks::{Layout, Rule};
use crate::depth::{self, Depth};
use crate::error::GrammarError;

/// Most bytes of one source.
pub const SOURCE_BYTES_MAX: usize = 128 << 10;

/// With more tools than this, unsupported schemas are not searched one by one: all are relaxed.
const TOOLS_TRIED_MAX: usize = 64;

/// The constraint on an output.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema allows. The schema is JSON text, so its numbers are exact.
    JsonSchema(String),
    /// Text that a regular expression matches completely.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's Lark dialect.
    Lark(String),
    /// Tool calls.
    Calls(ToolCalls),
    /// Text that may contain tool calls. A call follows its grammar once it has started.
    TextWithCalls(ToolCalls),
    /// Tool calls, or another constraint.
    CallsOr(ToolCalls, Box<Source>),
}

/// Tool calls in an output.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCalls {
    /// The tools that may be called.
    pub tools: Vec<CallableTool>,
    /// Allows more than one call.
    pub several: bool,
    /// The format of a call.
    pub style: CallStyle,
}

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct CallableTool {
    /// Its name.
    pub name: String,
    /// The schema of its arguments; null for any object.
    pub parameters: Value,
    /// Reject an unsupported schema. Otherwise its supported part applies.
    pub strict: bool,
    /// The arguments are `{"input": TEXT}`, and this constrains the text. `None` if `parameters` decide.
    pub input: Option<ToolInput>,
}

/// The constraint on a custom tool's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolInput {
    /// A regular expression in Rust's syntax, which matches the whole text.
    Regex(String),
    /// A grammar in Lark's notation.
    Lark(String),
}

impl ToolInput {
    /// The regular expression or grammar.
    pub fn text(&self) -> &str {
        match self {
            Self::Regex(text) | Self::Lark(text) => text,
        }
    }
}

/// The fixed texts of a call format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallStyle {
    /// Start of `open`, or of `before` if that is empty. In text it starts a call. Empty if the format has no such
    /// marker.
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
    /// Replaces unsupported schemas of tools without `strict` by any object. `is_supported` tests each tool alone.
    /// Replaces all of them if each alone is supported, or if there are more than [`TOOLS_TRIED_MAX`]. `None` without
    /// such tools.
    pub(crate) fn relaxed(&self, is_supported: impl Fn(&Self) -> bool) -> Option<Self> {
        let (Self::Calls(calls) | Self::TextWithCalls(calls) | Self::CallsOr(calls, _)) = self else { return None };
        let is_relaxable = |tool: &CallableTool| !tool.strict && tool.input.is_none() && !tool.parameters.is_null();
        let alone = |tool: &CallableTool| {
            Self::Calls(ToolCalls { tools: vec![tool.clone()], several: false, style: calls.style })
        };
        let with_schema: Vec<&CallableTool> = calls.tools.iter().filter(|tool| is_relaxable(tool)).collect();
        if with_schema.is_empty() {
            return None;
        }
        let many = with_schema.len() > TOOLS_TRIED_MAX;
        let unsupported: Vec<&CallableTool> =
            with_schema.iter().copied().filter(|tool| many || !is_supported(&alone(tool))).collect();
        let unsupported = if unsupported.is_empty() { with_schema } else { unsupported };
        let mut relaxed = calls.clone();
        let those = relaxed.tools.iter_mut().filter(|tool| unsupported.contains(&&**tool));
        those.for_each(|tool| tool.parameters = Value::Null);
        Some(match self {
            Self::CallsOr(_, other) => Self::CallsOr(relaxed, other.clone()),
            Self::TextWithCalls(_) => Self::TextWithCalls(relaxed),
            _ => Self::Calls(relaxed),
        })
    }

    /// Bytes of its texts; a lower limit of its key's bytes.
    pub(crate) fn text_bytes(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(all) => all.iter().map(String::len).sum(),
            Self::JsonObject => 0,
            Self::Calls(calls) | Self::TextWithCalls(calls) => calls.text_bytes(),
            Self::CallsOr(calls, other) => calls.text_bytes() + other.text_bytes(),
        }
    }

    /// The cache key: the complete source.
    pub(crate) fn key(&self, prefix: &str) -> String {
        format!("{prefix}\u{0}{self:?}")
    }

    /// Converts to llguidance's Lark dialect, with fixed text before output that is not a call. `compile` compiles
    /// schemas into rules.
    pub(crate) fn to_lark(&self, prefix: &str, compile: &CompileRules<'_>) -> Result<LarkGrammar, GrammarError> {
        let mut builder =
            GrammarBuilder { compile, rules: String::new(), layout: Layout::default(), depth: Depth::default() };
        let start = match self {
            Self::Lark(text) if prefix.is_empty() => {
                depth::check_lark(text).map_err(invalid)?;
                builder.lark(text)?
            }
            Self::Calls(calls) => format!("start: calls\n{}", builder.calls(calls)?),
            Self::TextWithCalls(calls) => builder.calls_in_text(calls)?,
            Self::CallsOr(calls, other) => {
                let other = builder.answer_rule(other, prefix)?;
                format!("start: calls | other\nother: {}{}{}", literal(prefix), other, builder.calls(calls)?)
            }
            other => format!("start: {}{}", literal(prefix), builder.answer_rule(other, prefix)?),
        };
        let GrammarBuilder { rules, layout, depth: inputs, .. } = builder;
        // Rules of schemas nest as the schemas do, and the layout counts those.
        let depth = Depth::of(&start).max(layout.depth()).max(inputs);
        let lark = start + &rules;
        if lark.len() > LARK_BYTES_MAX {
            let bytes = lark.len();
            return Err(invalid(format!("the grammar has {bytes} bytes in Lark; the limit is {LARK_BYTES_MAX}")));
        }
        let layout = (!layout.rules.is_empty()).then_some(layout);
        Ok(LarkGrammar { lark, depth, layout })
    }
}

/// A source converted to Lark.
pub(crate) struct LarkGrammar {
    /// Text in llguidance's Lark dialect.
    pub lark: String,
    pub depth: Depth,
    /// Positions of JSON documents in an output, and their schemas. `None` without JSON.
    pub layout: Option<Layout>,
}

/// Most bytes of a converted grammar.
const LARK_BYTES_MAX: usize = 2 << 20;

/// The input of rule compilation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RuleSource<'a> {
    /// A schema (JSON text). `lenient` skips unsupported keywords.
    Schema { schema: &'a str, lenient: bool },
    /// Text inside a JSON string.
    Input(&'a ToolInput),
}

/// Compiles rules. The first rule gets the given name.
pub(crate) type CompileRules<'a> = dyn Fn(RuleSource<'_>, &str) -> Result<Compiled, GrammarError> + 'a;

/// Collects rules, and the positions of JSON documents.
struct GrammarBuilder<'a> {
    compile: &'a CompileRules<'a>,
    rules: String,
    layout: Layout,
    /// Depth of the custom tools' grammars.
    depth: Depth,
}

fn invalid(why: impl Into<String>) -> GrammarError {
    GrammarError::Invalid(why.into())
}

impl GrammarBuilder<'_> {
    /// The end of the rule for an answer after `prefix`.
    fn answer_rule(&mut self, source: &Source, prefix: &str) -> Result<String, GrammarError> {
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
            Source::Choice(all) if all.is_empty() => return Err(invalid("the choice is empty")),
            Source::Choice(all) => {
                let texts: Vec<String> = all.iter().map(|text| quote(text)).collect();
                format!("body\nbody: {}\n", texts.join(" | "))
            }
            Source::Lark(_) | Source::Calls(_) | Source::TextWithCalls(_) | Source::CallsOr(..) => {
                return Err(invalid("a grammar in Lark cannot be combined with this model's reply format"));
            }
        })
    }

    /// Adds the rules of a schema, the first of which is `name`, and the check of its documents.
    fn schema(&mut self, schema: &str, name: &str, lenient: bool, validated: bool) -> Result<(), GrammarError> {
        let compiled = (self.compile)(RuleSource::Schema { schema, lenient }, name)?;
        self.rules += &compiled.rules;
        let exact = compiled.validated.is_empty();
        self.layout.rules.push(Rule { tool: None, schema: validated.then(|| schema.to_owned()), exact });
        Ok(())
    }

    /// Adds the rules of a tool's arguments. Errors name the tool.
    fn arguments(&mut self, tool: &CallableTool, name: &str) -> Result<(), GrammarError> {
        let done = match &tool.parameters {
            _ if tool.input.is_some() => self.input(tool.input.as_ref(), name),
            Value::Null => self.schema(&any_object(), name, false, false),
            parameters => object_schema(parameters)
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

    /// Adds the rules of a custom tool's text.
    fn input(&mut self, input: Option<&ToolInput>, name: &str) -> Result<(), GrammarError> {
        let Some(input) = input else { return Ok(()) };
        if let ToolInput::Lark(text) = input {
            depth::check_lark(text).map_err(invalid)?;
            self.depth = self.depth.max(Depth::of(text));
        }
        let inner = format!("{name}_text");
        self.rules += &(self.compile)(RuleSource::Input(input), &inner)?.rules;
        let _ = writeln!(self.rules, "{name}: {} {inner} {}", quote("{\"input\": \""), quote("\"}"));
        self.layout.rules.push(Rule { tool: None, schema: None, exact: true });
        Ok(())
    }

    /// The rule `calls`, with the rules it needs.
    fn calls(&mut self, calls: &ToolCalls) -> Result<String, GrammarError> {
        self.call_rules(calls, calls.style)
    }

    /// Like [`Self::calls`], in a style without the marker that the output has.
    fn call_rules(&mut self, calls: &ToolCalls, style: CallStyle) -> Result<String, GrammarError> {
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
            self.layout.call_openings.push(format!("{}{written}", calls.style.open).into_bytes());
            self.layout.call_heads.push((written.into_bytes(), rule));
            let _ = writeln!(lark, "call_{i}: {} {name} {}", quote(&head), literal(style.after));
        }
        Ok(lark)
    }

    /// Text with calls in it. The `head` of a call is lazy: it ends at the marker, and the text before it ends too.
    fn calls_in_text(&mut self, calls: &ToolCalls) -> Result<String, GrammarError> {
        let style = &calls.style;
        if style.marker.is_empty() {
            return Err(invalid("this call format has no marker, so calls cannot be mixed with text"));
        }
        let strip = |text: &'static str| text.strip_prefix(style.marker).unwrap_or(text);
        let rest = match style.open {
            "" => CallStyle { before: strip(style.before), next: "", ..*style },
            open => CallStyle { open: strip(open), ..*style },
        };
        // Without text around all calls, each call needs its own head.
        let several = calls.several && !style.open.is_empty();
        let start = if calls.several { "(head calls)* free" } else { "head calls | free" };
        let calls = ToolCalls { several, ..calls.clone() };
        Ok(format!(
            "start: {start}\nfree: TEXT\nhead[lazy]: TEXT {}\nTEXT: /(\\n|.)*/\n{}",
            quote(style.marker),
            self.call_rules(&calls, rest)?
        ))
    }

    /// Converts a client's Lark grammar: its schemas (`%json {…}`) become rules.
    fn lark(&mut self, text: &str) -> Result<String, GrammarError> {
        let (mut out, mut rest) = (String::with_capacity(text.len()), text);
        while let Some((before, after)) = rest.split_once("%json") {
            out.push_str(before);
            let mut values = Deserializer::from_str(after).into_iter::<&RawValue>();
            let Some(Ok(schema)) = values.next() else {
                return Err(invalid("%json in the grammar has no schema after it"));
            };
            let name = format!("json_in_lark_{}", self.layout.rules.len());
            self.schema(schema.get(), &name, false, true)?;
            if self.layout.rules.last().is_some_and(|rule| !rule.exact) {
                return Err(invalid(
                    "%json in the grammar has a schema that needs validation of the finished answer \
                     (uniqueItems, for instance): use guided_json",
                ));
            }
            out += &format!(" {name} ");
            rest = &after[values.byte_offset()..];
        }
        // The documents have no known positions, and need none: their rules are exact.
        self.layout = Layout::default();
        Ok(out + rest + "\n")
    }
}

/// A schema of any object.
fn any_object() -> String {
    json!({"type": "object"}).to_string()
}

/// Bytes of the strings in a value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(text_bytes).sum(),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + text_bytes(value)).sum(),
        _ => 0,
    }
}

/// A literal before another expression.
fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{} ", quote(text)) }
}

impl ToolCalls {
    fn text_bytes(&self) -> usize {
        let input = |tool: &CallableTool| tool.input.as_ref().map_or(0, |input| input.text().len());
        self.tools.iter().map(|tool| tool.name.len() + text_bytes(&tool.parameters) + input(tool)).sum()
    }
}

/// A tool's schema with `"type": "object"`: arguments are always an object.
fn object_schema(parameters: &Value) -> Result<Value, String> {
    let mut schema = parameters.clone();
    let Some(fields) = schema.as_object_mut() else { return Ok(schema) };
    let named = |kind: &Value| {
        kind == "object" || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "object"))
    };
    match fields.get("type") {
        Some(kind) if !named(kind) => return Err(format!("the schema of arguments must have type object, not {kind}")),
        _ => drop(fields.insert("type".into(), "object".into())),
    }
    Ok(schema)
}

/// A literal in Lark.
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
