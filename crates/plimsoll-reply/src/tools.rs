//! The tools of a request, as far as reading calls needs them: their names, and which of their parameters are text.

use serde_json::Value;

/// What is known about the tools of a request.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    list: Vec<Tool>,
}

#[derive(Clone, Debug)]
struct Tool {
    name: String,
    /// Parameters with whether they are strings and nothing else.
    parameters: Vec<(String, bool)>,
}

impl Tools {
    /// From OpenAI's `tools` list; what has no name is left out.
    pub fn from_openai(tools: &Value) -> Self {
        let tool = |tool: &Value| {
            let function = tool.get("function")?;
            let name = function.get("name")?.as_str()?.to_owned();
            let properties = function.pointer("/parameters/properties").and_then(Value::as_object);
            let parameters = properties.into_iter().flatten().map(|(key, schema)| (key.clone(), is_text(schema)));
            Some(Tool { name, parameters: parameters.collect() })
        };
        Self { list: tools.as_array().into_iter().flatten().filter_map(tool).collect() }
    }

    /// Whether there is a tool of this name.
    pub fn has(&self, name: &str) -> bool {
        self.list.iter().any(|tool| tool.name == name)
    }

    /// Whether a parameter is declared to be a string; none where nothing is declared.
    pub(crate) fn is_text(&self, name: &str, parameter: &str) -> Option<bool> {
        let tool = self.list.iter().find(|tool| tool.name == name)?;
        tool.parameters.iter().find(|(known, _)| known == parameter).map(|(_, text)| *text)
    }
}

fn is_text(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        _ => schema.get("enum").and_then(Value::as_array).is_some_and(|all| all.iter().all(Value::is_string)),
    }
}
