//! Custom tools: a model's call carries a text instead of an object. For the model such a tool is a function with one parameter, `input`.
//! The client gets the text in the model's `{"input": "…"}`.

use plimsoll_grammar::ToolInput;
use serde_json::{Value, json};

use crate::conversation::tools::{Custom, checked_name};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Fields;

/// The only parameter of the function.
const PARAMETER: &str = "input";

/// The most bytes of arguments that are held back because they do not begin with the parameter. Longer ones are passed on unchanged.
pub(crate) const HELD_BYTES_MAX: usize = 16 << 10;

/// Takes a tool's `name`, `description` and `format`, and makes the function that the model sees. `nested`: the grammar
/// is a member of the format, as in Chat completions.
pub(crate) fn take(fields: &mut Fields<'_>, nested: bool) -> ApiResult<(Custom, Value)> {
    let name = checked_name(fields)?;
    let description = fields.take::<String>("description")?;
    let path = fields.param("format");
    let input = match fields.raw("format") {
        None => None,
        Some(raw) => format(Fields::of(path, raw)?, nested)?,
    };
    let function = function(&name, description, input.as_ref());
    Ok((Custom { name, input }, function))
}

fn format(mut fields: Fields<'_>, nested: bool) -> ApiResult<Option<ToolInput>> {
    let at = fields.param("type");
    let kind: String = fields.required("type")?;
    match kind.as_str() {
        "text" => fields.finish().map(|()| None),
        "grammar" if nested => {
            let (param, raw) = fields.needed("grammar")?;
            fields.finish()?;
            grammar(Fields::of(param, raw)?).map(Some)
        }
        "grammar" => grammar(fields).map(Some),
        other => {
            let message = format!("{at} is `{}`; known are text and grammar", quote(other));
            Err(ApiError::unsupported(at, message))
        }
    }
}

fn grammar(mut fields: Fields<'_>) -> ApiResult<ToolInput> {
    let at = fields.param("syntax");
    let (syntax, definition): (String, String) = (fields.required("syntax")?, fields.required("definition")?);
    fields.finish()?;
    match syntax.as_str() {
        "lark" => Ok(ToolInput::Lark(definition)),
        "regex" => Ok(ToolInput::Regex(definition)),
        other => {
            let message = format!("{at} is `{}`; known are lark and regex", quote(other));
            Err(ApiError::unsupported(at, message))
        }
    }
}

/// Makes the function that stands for the tool: a model knows no custom tools.
fn function(name: &str, description: Option<String>, input: Option<&ToolInput>) -> Value {
    let says = match input {
        None => "Any text.".to_owned(),
        Some(ToolInput::Lark(text)) => format!("Text that matches this Lark grammar:\n{text}"),
        Some(ToolInput::Regex(text)) => format!("Text that matches this regular expression: {text}"),
    };
    let mut function = json!({"name": name});
    if let Some(description) = description {
        function["description"] = description.into();
    }
    function["parameters"] = json!({
        "type": "object",
        "properties": {PARAMETER: {"type": "string", "description": says}},
        "required": [PARAMETER],
        "additionalProperties": false,
    });
    json!({"type": "function", "function": function})
}

/// Returns the arguments of a call with this input.
pub(crate) fn arguments(input: &str) -> Value {
    json!({PARAMETER: input})
}

/// Extracts the text from a call's arguments as they arrive.
#[derive(Debug, Default)]
pub(crate) struct InputReader {
    state: State,
    /// Arguments that have not been decoded yet: the beginning, or a part of an escape.
    held: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Before the text.
    #[default]
    Head,
    Text,
    Done,
    /// The arguments have another form: they are parsed when they are complete.
    Other,
    /// The arguments are too long to be held back, and are passed on unchanged.
    Verbatim,
}

impl InputReader {
    /// Takes more of the arguments and returns more of the text.
    pub fn push(&mut self, more: &str) -> String {
        match self.state {
            State::Done => return String::new(),
            State::Verbatim => return more.into(),
            State::Head | State::Text | State::Other => self.held.push_str(more),
        }
        if self.state == State::Head {
            match begins(&self.held) {
                Some(Some(at)) => {
                    self.held.drain(..at);
                    self.state = State::Text;
                }
                Some(None) => {}
                None => self.state = State::Other,
            }
        }
        match self.state {
            State::Text => self.text(),
            _ if self.held.len() > HELD_BYTES_MAX => {
                self.state = State::Verbatim;
                std::mem::take(&mut self.held)
            }
            _ => String::new(),
        }
    }

    /// Ends the call, and returns the rest of its text.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Done) {
            State::Head | State::Other => match serde_json::from_str::<Value>(&held) {
                Ok(Value::Object(mut fields)) if fields.get(PARAMETER).is_some_and(Value::is_string) => {
                    fields.remove(PARAMETER).and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_default()
                }
                _ => held,
            },
            // An incomplete escape is not a character.
            State::Text | State::Done | State::Verbatim => String::new(),
        }
    }

    /// Decodes the held part of the string, up to its end or to an incomplete escape.
    fn text(&mut self) -> String {
        let mut out = String::new();
        let mut rest = self.held.as_str();
        loop {
            let plain = rest.find(['"', '\\']).unwrap_or(rest.len());
            out.push_str(&rest[..plain]);
            rest = &rest[plain..];
            if rest.is_empty() {
                break;
            }
            if rest.starts_with('"') {
                self.state = State::Done;
                rest = "";
                break;
            }
            let Some(length) = escape(rest) else { break };
            let (escape, after) = rest.split_at(length);
            match serde_json::from_str::<String>(&format!("\"{escape}\"")) {
                Ok(text) => out.push_str(&text),
                Err(_) => out.push(char::REPLACEMENT_CHARACTER),
            }
            rest = after;
        }
        self.held = rest.to_owned();
        out
    }
}

/// Returns the index after `{"input": "`, where the text begins. `Some(None)`: the beginning is incomplete; none: the arguments begin
/// differently.
fn begins(text: &str) -> Option<Option<usize>> {
    let mut rest = text;
    for mark in ["{", "\"input\"", ":", "\""] {
        rest = rest.trim_start();
        match rest.strip_prefix(mark) {
            Some(after) => rest = after,
            None if mark.starts_with(rest) => return Some(None),
            None => return None,
        }
    }
    Some(Some(text.len() - rest.len()))
}

/// Returns the bytes of the escape at the beginning of a text, with both halves of a surrogate pair. None if it is incomplete.
fn escape(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    if *bytes.get(1)? != b'u' {
        let c = text[1..].chars().next()?;
        return Some(1 + c.len_utf8());
    }
    let code = |at: usize| text.get(at + 2..at + 6).and_then(|digits| u16::from_str_radix(digits, 16).ok());
    if text.len() < 6 {
        return None;
    }
    match code(0) {
        Some(0xd800..=0xdbff) if "\\u".starts_with(text[6..].get(..2).unwrap_or(&text[6..])) => {
            if text.len() < 12 {
                return None;
            }
            Some(if matches!(code(6), Some(0xdc00..=0xdfff)) { 12 } else { 6 })
        }
        // Not four hexadecimal digits: the escape ends before them.
        None if !text.is_char_boundary(6) => Some(2),
        _ => Some(6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(arguments: &str, pace: usize) -> (String, Vec<String>) {
        let mut reader = InputReader::default();
        let chars: Vec<char> = arguments.chars().collect();
        let mut pieces: Vec<String> =
            chars.chunks(pace).map(|piece| reader.push(&piece.iter().collect::<String>())).collect();
        pieces.push(reader.finish());
        (pieces.concat(), pieces)
    }

    #[test]
    fn the_text_is_read_while_it_comes() {
        let text = "a \"quoted\" \\ line\n\t\u{1}ä😀 end";
        let plain = arguments(text).to_string();
        let escaped = plain.replace('ä', "\\u00e4").replace('😀', "\\ud83d\\ude00").replace(":\"", " : \"");
        for arguments in [&plain, &escaped] {
            for pace in 1..=arguments.len() {
                assert_eq!(read(arguments, pace).0, text, "{arguments} in pieces of {pace}");
            }
            let (_, pieces) = read(arguments, 1);
            assert!(pieces.iter().filter(|piece| !piece.is_empty()).count() > 20);
        }
        assert_eq!(read("{\"input\": \"\\ud83dx\", \"more\": 1}", 3).0, "\u{fffd}x");
        assert_eq!(read("{\"input\": \"cut \\u00", 2).0, "cut ");
        assert_eq!(read("{\"input\": \"odd \\u00ä0\"}", 2).0.chars().next(), Some('o'));
    }

    #[test]
    fn arguments_of_another_form_are_the_text() {
        assert_eq!(read("{\"why\": 1, \"input\": \"ls\"}", 2).0, "ls");
        assert_eq!(read("{\"command\": \"ls\"}", 2).0, "{\"command\": \"ls\"}");
        assert_eq!(read("ls -l", 1).0, "ls -l");
        assert_eq!(read("{\"inp", 1).0, "{\"inp");
        let long = format!("[{}]", "1,".repeat(HELD_BYTES_MAX));
        let (text, pieces) = read(&long, 1000);
        assert_eq!(text, long);
        assert!(pieces.last().unwrap().is_empty() && pieces[pieces.len() - 2].len() <= 1000, "the rest streams");
    }
}
