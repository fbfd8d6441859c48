//! Items of MCP in the form of the response object.

use std::sync::Arc;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::mcp::{McpError, ToolSet};

/// A call of an MCP server's tool.
#[derive(Debug)]
pub(crate) struct McpCall {
    pub label: String,
    pub name: String,
    pub arguments: String,
    /// Whether the arguments are complete.
    pub ready: bool,
    /// The text of the tool's answer, or the error. None while the call runs.
    pub result: Option<Result<String, CallError>>,
    /// The id of the approval request that the call follows.
    pub request: Option<String>,
}

/// A tool of an MCP server.
#[derive(Debug)]
pub(crate) struct ListedTool {
    pub tools: Arc<ToolSet>,
    pub index: usize,
}

impl Serialize for ListedTool {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let tool = &self.tools.tools[self.index];
        let mut shown = serializer.serialize_struct("Tool", 4)?;
        shown.serialize_field("name", &tool.name)?;
        shown.serialize_field("description", &tool.description)?;
        shown.serialize_field("input_schema", &tool.schema)?;
        shown.serialize_field("annotations", &tool.annotations)?;
        shown.end()
    }
}

/// The reason why a call failed.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::enum_variant_names)] // OpenAI's names
pub(crate) enum CallError {
    McpProtocolError { code: i64, message: String },
    McpToolExecutionError { content: Box<RawValue> },
    HttpError { code: u16, message: String },
}

impl From<McpError> for CallError {
    fn from(error: McpError) -> Self {
        let message = error.to_string();
        match error {
            McpError::Rpc { code, message } => Self::McpProtocolError { code, message },
            // JSON-RPC's code for a parse error.
            McpError::Invalid(_) => Self::McpProtocolError { code: -32700, message },
            McpError::Status { status: code, .. } => Self::HttpError { code, message },
            McpError::TooSlow { .. } => Self::HttpError { code: 504, message },
            McpError::Busy { .. } => Self::HttpError { code: 503, message },
            McpError::Connect(_) | McpError::TooLarge { .. } | McpError::Broken(_) => {
                Self::HttpError { code: 502, message }
            }
        }
    }
}
