//! The tools of a request: their names, and the parameters that are text.

use serde_json::Value;

/// The tools of a request.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    list: Vec<Tool>,
}

#[derive(Clone, Debug)]
struct Tool {
    name: String,
    parameters: Vec<(String, Kind)>,
}

/// The declared type of a parameter, as far as it decides how a value without quotes is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A string and nothing else.
    Text,
    /// A string or null.
    TextOrNull,
    /// Another type, or none declared.
    Any,
}

impl Tools {
    /// From OpenAI's `tools` list. Skips tools without a name.
    pub fn from_openai(tools: &Value) -> Self {
        let tool = |tool: &Value| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?.to_owned();
            let properties = function.pointer("/parameters/properties").and_then(Value::as_object);
            let parameters = properties.into_iter().flatten().map(|(key, schema)| (key.clone(), kind(schema)));
            Some(Tool { name, parameters: parameters.collect() })
        };
        Self { list: tools.as_array().into_iter().flatten().filter_map(tool).collect() }
    }

    /// Whether a tool has this name.
    pub fn has(&self, name: &str) -> bool {
        self.list.iter().any(|tool| tool.name == name)
    }

    /// Whether a tool's name starts with `seen` and then this character.
    pub(crate) fn begins(&self, seen: &str, c: char) -> bool {
        self.list.iter().any(|tool| tool.name.strip_prefix(seen).is_some_and(|left| left.starts_with(c)))
    }

    /// The declared type of a parameter.
    pub(crate) fn kind(&self, name: &str, parameter: &str) -> Kind {
        let tool = self.list.iter().find(|tool| tool.name == name);
        let found = tool.and_then(|tool| tool.parameters.iter().find(|(known, _)| known == parameter));
        found.map_or(Kind::Any, |(_, kind)| *kind)
    }
}

fn kind(schema: &Value) -> Kind {
    match texts_and_null(schema) {
        Some([true, false]) => Kind::Text,
        Some([true, true]) => Kind::TextOrNull,
        _ => Kind::Any,
    }
}

/// Whether a schema allows strings, and null. `None` if it allows other types.
fn texts_and_null(schema: &Value) -> Option<[bool; 2]> {
    let either = |all: &Value, of: fn(&Value) -> Option<[bool; 2]>| {
        let all = all.as_array()?.iter().map(of);
        all.reduce(|a, b| Some([a?[0] | b?[0], a?[1] | b?[1]])).flatten()
    };
    let of_name = |name: &Value| Some([name == "string", name == "null"]).filter(|both| both[0] | both[1]);
    let of_value = |value: &Value| Some([value.is_string(), value.is_null()]).filter(|both| both[0] | both[1]);
    let by = |key| schema.get(key);
    match (by("type"), by("anyOf").or(by("oneOf")), by("enum")) {
        (Some(names @ Value::Array(_)), ..) => either(names, of_name),
        (Some(name), ..) => of_name(name),
        (None, Some(several), _) => either(several, texts_and_null),
        (None, None, Some(values)) => either(values, of_value),
        (None, None, None) => by("const").and_then(of_value),
    }
}
