//! A server's tools, and the results of their calls.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::McpError;

/// The most tools of one server.
pub(crate) const TOOLS_MAX: usize = 128;

/// Bytes of a tool besides its texts.
const TOOL_BYTES: usize = 160;

/// The tools of one server.
#[derive(Debug)]
pub(crate) struct ToolSet {
    pub tools: Vec<Tool>,
    /// Heap bytes.
    pub bytes: u64,
}

/// One tool.
#[derive(Debug)]
pub(crate) struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// The schema of the arguments: a JSON object.
    pub schema: Box<RawValue>,
    pub annotations: Option<Box<RawValue>>,
    /// Whether the server declares that the tool changes nothing.
    pub read_only: bool,
}

#[derive(Deserialize)]
struct Page<'a> {
    #[serde(borrow)]
    tools: Vec<&'a RawValue>,
    #[serde(rename = "nextCursor")]
    next: Option<String>,
}

#[derive(Deserialize)]
struct Listed {
    name: String,
    description: Option<String>,
    #[serde(rename = "inputSchema")]
    schema: Box<RawValue>,
    annotations: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Hints {
    #[serde(rename = "readOnlyHint", default)]
    read_only: bool,
}

/// Adds one page of a list to `all`, and returns the cursor of the next page.
pub(super) fn page(result: &RawValue, all: &mut ToolSet, bytes_max: usize) -> Result<Option<String>, McpError> {
    let invalid = |error: serde_json::Error| McpError::invalid(format!("tools/list: {error}"));
    let page: Page<'_> = serde_json::from_str(result.get()).map_err(invalid)?;
    for raw in page.tools {
        if all.tools.len() == TOOLS_MAX {
            return Err(McpError::invalid(format!("it lists more than {TOOLS_MAX} tools, which is the limit")));
        }
        let Listed { name, description, schema, annotations } = serde_json::from_str(raw.get()).map_err(invalid)?;
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
        // In prompts, a label of at most 64 bytes and a dot stand before the name.
        if name.is_empty() || name.len() > 128 || !name.chars().all(legal) {
            let why = "a tool's name must have 1 to 128 letters, digits, or characters of _-./";
            return Err(McpError::invalid(why));
        }
        if all.tools.iter().any(|tool| tool.name == name) {
            return Err(McpError::invalid(format!("it lists the tool `{name}` twice")));
        }
        // The schema is parsed into a value later, which must not fail.
        if !matches!(serde_json::from_str(schema.get()), Ok(Value::Object(_))) {
            return Err(McpError::invalid(format!("the inputSchema of the tool `{name}` is not an object")));
        }
        let hints = annotations.as_ref().and_then(|raw| serde_json::from_str::<Hints>(raw.get()).ok());
        let bytes = TOOL_BYTES
            + name.len()
            + description.as_ref().map_or(0, String::len)
            + schema.get().len()
            + annotations.as_ref().map_or(0, |raw| raw.get().len());
        all.bytes += bytes as u64;
        if all.bytes > bytes_max as u64 {
            return Err(McpError::TooLarge { limit: bytes_max });
        }
        all.tools.push(Tool { name, description, schema, annotations, read_only: hints.is_some_and(|h| h.read_only) });
    }
    Ok(page.next)
}

/// The result of a call.
#[derive(Debug)]
pub(crate) struct CallResult {
    /// The text of the result.
    pub text: String,
    /// The blocks of a result that reports a failed tool, as JSON.
    pub failed: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Called<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    #[serde(borrow, rename = "structuredContent")]
    structured: Option<&'a RawValue>,
    #[serde(rename = "isError", default)]
    failed: bool,
}

#[derive(Deserialize)]
struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    #[serde(rename = "mimeType")]
    media_type: Option<String>,
    uri: Option<String>,
    resource: Option<Resource>,
}

#[derive(Deserialize)]
struct Resource {
    uri: Option<String>,
    text: Option<String>,
    #[serde(rename = "mimeType")]
    media_type: Option<String>,
}

/// Reads the result of a call.
pub(super) fn called(result: &RawValue) -> Result<CallResult, McpError> {
    let invalid = |error: serde_json::Error| McpError::invalid(format!("tools/call: {error}"));
    let called: Called<'_> = serde_json::from_str(result.get()).map_err(invalid)?;
    let blocks: Vec<&RawValue> =
        called.content.map(|raw| serde_json::from_str(raw.get())).transpose().map_err(invalid)?.unwrap_or_default();
    let mut text = String::new();
    for raw in &blocks {
        let block: Block = serde_json::from_str(raw.get()).map_err(invalid)?;
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&said(block));
    }
    if let Some(structured) = called.structured.filter(|_| blocks.is_empty()) {
        text.push_str(structured.get());
    }
    let failed = called.failed.then(|| called.content.map(ToOwned::to_owned)).flatten();
    let failed = failed.or_else(|| called.failed.then(|| RawValue::NULL.to_owned()));
    Ok(CallResult { text, failed })
}

/// Returns a block's text. Other content is replaced by a note to the model.
fn said(block: Block) -> String {
    let left_out = |kind: &str, media_type: Option<String>, uri: Option<String>| {
        let media_type = media_type.map_or_else(String::new, |of| format!(" of type {of}"));
        let uri = uri.map_or_else(String::new, |uri| format!(" at {uri}"));
        format!("[{kind}{media_type}{uri}: only text is passed on]")
    };
    match (block.kind.as_str(), block.text, block.resource) {
        ("text", Some(text), _) => text,
        ("resource", _, Some(Resource { text: Some(text), .. })) => text,
        ("resource", _, Some(Resource { uri, media_type, .. })) => left_out("resource", media_type, uri),
        (kind, ..) => left_out(&kind.chars().take(32).collect::<String>(), block.media_type, block.uri),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        serde_json::from_str(text).unwrap()
    }

    fn listed(text: &str) -> Result<(ToolSet, Option<String>), McpError> {
        let mut all = ToolSet { tools: Vec::new(), bytes: 0 };
        let next = page(&raw(text), &mut all, 4096)?;
        Ok((all, next))
    }

    #[test]
    fn a_list_is_read_and_bounded() {
        let (all, next) = listed(
            r#"{"tools":[{"name":"a","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true},"x":1},
                {"name":"b.c","description":"B","inputSchema":{}}],"nextCursor":"n"}"#,
        )
        .unwrap();
        assert_eq!((all.tools.len(), all.tools[0].read_only, all.tools[1].read_only), (2, true, false));
        assert_eq!(next.as_deref(), Some("n"));
        let tool = |name: &str| format!("{{\"name\":\"{name}\",\"inputSchema\":{{}}}}");
        let many: Vec<String> = (0..=TOOLS_MAX).map(|n| tool(&n.to_string())).collect();
        let large = format!("{{\"name\":\"a\",\"inputSchema\":{{\"d\":\"{}\"}}}}", "x".repeat(4096));
        let deep = format!("{{\"name\":\"a\",\"inputSchema\":{{\"d\":{}{}}}}}", "[".repeat(500), "]".repeat(500));
        for (bad, word) in [
            (tool(""), "name"),
            (tool("a b"), "name"),
            (format!("{},{}", tool("a"), tool("a")), "twice"),
            (r#"{"name":"a"}"#.into(), "inputSchema"),
            (r#"{"name":"a","inputSchema":7}"#.into(), "inputSchema"),
            (deep, "inputSchema"),
            (large, "4096"),
        ] {
            let error = listed(&format!("{{\"tools\":[{bad}]}}")).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let mut all = ToolSet { tools: Vec::new(), bytes: 0 };
        let error = page(&raw(&format!("{{\"tools\":[{}]}}", many.join(","))), &mut all, 1 << 20).unwrap_err();
        assert!(error.to_string().contains("128"), "{error}");
        assert!(listed("{}").is_err() && listed("7").is_err());
    }

    #[test]
    fn an_answer_is_its_text_and_tells_of_the_rest() {
        let text = |json: &str| called(&raw(json)).unwrap();
        let both = text(r#"{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#);
        assert_eq!((both.text.as_str(), both.failed.is_some()), ("a\nb", false));
        assert_eq!(text(r#"{"content":[],"structuredContent":{"n":1}}"#).text, r#"{"n":1}"#);
        let image = text(r#"{"content":[{"type":"image","data":"AAAA","mimeType":"image/png"}]}"#).text;
        assert_eq!(image, "[image of type image/png: only text is passed on]");
        let file = text(r#"{"content":[{"type":"resource","resource":{"uri":"file:///a","text":"said"}}]}"#).text;
        assert_eq!(file, "said");
        let failed = text(r#"{"content":[{"type":"text","text":"no"}],"isError":true}"#);
        assert_eq!((failed.text.as_str(), failed.failed.unwrap().get()), ("no", r#"[{"type":"text","text":"no"}]"#));
        assert_eq!(text(r#"{"isError":true}"#).failed.unwrap().get(), "null");
        assert!(called(&raw(r#"{"content":7}"#)).is_err() && called(&raw("[]")).is_err());
    }
}
