//! The work of a response with MCP servers between the model's turns: list tools, call them, prepare the next turn.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;

use axum::http::StatusCode;

use super::items::{Item, Said, What as InputItem};
use super::mcp_items::{Approved, CallEnd, McpItem};
use super::mcp_object::McpCall;
use super::mcp_tools::{CALLS, McpTool};
use super::object::{Output, What};
use super::prompt;
use super::tools::McpAsked;
use crate::conversation::ChatRequest;
use crate::conversation::prompt::{Conversation, value_bytes};
use crate::conversation::submission::Submission;
use crate::conversation::tools::ToolChoice;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::mcp::{CallResult, McpError, McpServers, Session, Tool, ToolSet};
use crate::state::model::ModelState;

/// Copies of a server's answer: in the item, in its JSON twice, and in the stream.
const COPIES: u64 = 4;

/// The MCP servers of a response, and the work that is left.
pub(crate) struct McpRun {
    pub state: Arc<ModelState>,
    /// The request's tools; none once all servers have listed theirs.
    pub asked: Option<McpAsked>,
    pub servers: Vec<Server>,
    pub todo: VecDeque<Todo>,
    /// The work that runs. Dropping it cancels it.
    pub job: Option<Job>,
    /// None while a turn is being prepared.
    pub base: Option<Box<Base>>,
    pub calls_left: u32,
    /// The number of output items that are in the conversation already.
    pub told: usize,
    pub approved: Vec<Approved>,
    /// Whether the next turn is not the first.
    pub again: bool,
    /// Whether no turn follows.
    pub ended: bool,
}

pub(crate) type Job = Pin<Box<dyn Future<Output = Done> + Send>>;

/// One MCP server of a response.
pub(crate) struct Server {
    pub tool: McpTool,
    /// None while a job uses it.
    pub session: Option<Session>,
    pub tools: Option<Arc<ToolSet>>,
    /// Whether the conversation has its list already; the output then shows none.
    pub listed: bool,
}

/// A step of the work between turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Todo {
    /// Ask a server for its tools.
    List(usize),
    /// Make the call of an item of the output.
    Call(usize),
    /// Start the model's next turn.
    Turn,
}

/// The result of a step.
pub(crate) enum Done {
    Listed { server: usize, session: Session, result: Result<Arc<ToolSet>, McpError> },
    Called { output: usize, server: usize, session: Session, result: Result<CallResult, McpError> },
    Prepared { base: Box<Base>, result: Box<ApiResult<Submission>> },
}

/// The state from which every turn begins.
pub(crate) struct Base {
    pub request: ChatRequest,
    /// The share of the byte budget of the conversation and the servers' answers.
    pub held: Held,
    /// Tokens that all turns together may generate.
    pub tokens_max: Option<u32>,
    fetched: bool,
}

impl McpRun {
    pub fn new(
        state: &Arc<ModelState>,
        mut asked: McpAsked,
        request: ChatRequest,
        held: Held,
        (approved, listed): (Vec<Approved>, Vec<String>),
        calls: Option<u32>,
    ) -> ApiResult<Self> {
        let known = state.server.mcp.as_ref().ok_or_else(none_known)?;
        let (limit, made) = (calls.unwrap_or(CALLS), approved.len());
        let calls_left = u32::try_from(made).ok().and_then(|made| limit.checked_sub(made)).ok_or_else(|| {
            let message = format!("input: it approves {made} calls; the limit is {limit} (max_tool_calls)");
            ApiError::invalid("input", message)
        })?;
        let server = |tool: McpTool| Server {
            session: Some(Session::new(Arc::<McpServers>::clone(known), Arc::clone(&tool.endpoint))),
            tools: None,
            listed: listed.contains(&tool.label),
            tool,
        };
        let servers: Vec<Server> = std::mem::take(&mut asked.servers).into_iter().map(server).collect();
        let tokens_max = request.common.max_tokens;
        Ok(Self {
            state: Arc::clone(state),
            asked: Some(asked),
            todo: (0..servers.len()).map(Todo::List).collect(),
            servers,
            job: None,
            base: Some(Box::new(Base { request, held, tokens_max, fetched: false })),
            calls_left,
            told: 0,
            approved,
            again: false,
            ended: false,
        })
    }

    /// Finds a tool by its name in the prompt: the server, the tool, and whether a call needs an approval.
    pub fn find(&self, full: &str) -> Option<(&Server, &Tool, bool)> {
        self.servers.iter().find_map(|server| {
            let name = full.strip_prefix(&server.tool.label)?.strip_prefix('.')?;
            let (tool, approval) = server.tool.find(server.tools.as_ref()?, name)?;
            Some((server, tool, approval))
        })
    }

    /// Starts to list a server's tools.
    pub fn list(&mut self, server: usize) {
        let Some(mut session) = self.servers[server].session.take() else { return };
        self.job = Some(Box::pin(async move {
            let result = session.tools().await;
            Done::Listed { server, session, result }
        }));
    }

    /// Starts a call.
    ///
    /// # Errors
    /// [`McpError`] if the call cannot be made.
    pub fn call(&mut self, output: usize, call: &McpCall) -> Result<(), McpError> {
        let McpCall { label, name, arguments, .. } = call;
        let refused = |message: String| Err(McpError::Rpc { code: INVALID_PARAMS, message });
        let Some(server) = self.servers.iter().position(|server| server.tool.label == *label) else {
            return refused(format!("no MCP server `{label}` is among the tools"));
        };
        let tools = self.servers[server].tools.as_ref();
        if tools.and_then(|tools| self.servers[server].tool.find(tools, name)).is_none() {
            return refused(format!("the MCP server `{label}` has no tool `{name}` that may be called"));
        }
        let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
        if !serde_json::from_str::<serde_json::Value>(arguments).is_ok_and(|value| value.is_object()) {
            return refused("the arguments are not a JSON object".into());
        }
        let Some(mut session) = self.servers[server].session.take() else {
            return refused("the MCP server is in use".into());
        };
        let (name, arguments) = (name.clone(), arguments.to_owned());
        self.job = Some(Box::pin(async move {
            let result = session.call(&name, &arguments).await;
            Done::Called { output, server, session, result }
        }));
        Ok(())
    }

    /// Adds the tools to the conversation, when all servers have listed theirs.
    pub fn tools_are_here(&mut self) -> ApiResult<()> {
        let (Some(mut asked), Some(base)) = (self.asked.take(), &mut self.base) else { return Ok(()) };
        for server in &self.servers {
            if let Some(tools) = &server.tools {
                add(&mut asked, &server.tool, tools, &mut base.held)?;
            }
        }
        use_tools(asked, &mut base.request.conversation, &mut base.held)
    }

    /// Counts the bytes of an answer against the budget.
    pub fn keep(&mut self, bytes: usize) -> ApiResult<()> {
        self.base.as_mut().map_or(Ok(()), |base| base.held.grow_for("tools", COPIES * bytes as u64))
    }

    /// Starts to prepare the next turn, with the output so far in the conversation. `used`: the number of tokens generated so far. Returns
    /// false if no tokens are left.
    pub fn turn(&mut self, outputs: &[Output], used: u64) -> ApiResult<bool> {
        let Some(mut base) = self.base.take() else { return Ok(false) };
        if let Some(most) = base.tokens_max {
            let left = u64::from(most).saturating_sub(used);
            if left == 0 {
                self.base = Some(base);
                return Ok(false);
            }
            base.request.common.max_tokens = u32::try_from(left).ok();
        }
        let conversation = &mut base.request.conversation;
        let items: Vec<Item> = outputs[self.told..].iter().filter_map(item).collect();
        self.told = outputs.len();
        let before = value_bytes(&conversation.messages);
        if let serde_json::Value::Array(messages) = std::mem::take(&mut conversation.messages) {
            conversation.messages = prompt::continued(conversation.param, messages, &items)?.into();
        }
        base.held.grow_for(conversation.param, value_bytes(&conversation.messages).saturating_sub(before))?;
        if self.calls_left == 0 {
            conversation.tools = None;
        } else if let Some(tools) = conversation.tools.as_mut().filter(|_| self.again) {
            // A forced call is forced in the first turn only.
            tools.choice = ToolChoice::Auto;
        }
        self.again = true;
        let state = Arc::clone(&self.state);
        self.job = Some(Box::pin(async move {
            let result = Box::new(base.submission(&state).await);
            Done::Prepared { base, result }
        }));
        Ok(true)
    }
}

/// Lists the tools of MCP servers, one server after the other, and adds them to a conversation for a token count.
pub(super) async fn add_tools(
    state: &ModelState,
    mut asked: McpAsked,
    conversation: &mut Conversation,
    held: &mut Held,
) -> ApiResult<()> {
    let known = state.server.mcp.as_ref().ok_or_else(none_known)?;
    for tool in std::mem::take(&mut asked.servers) {
        let mut session = Session::new(Arc::<McpServers>::clone(known), Arc::clone(&tool.endpoint));
        let tools = session.tools().await.map_err(|error| list_failed(&tool.label, &error))?;
        add(&mut asked, &tool, &tools, held)?;
    }
    use_tools(asked, conversation, held)
}

/// Adds the tools of a server, and counts their bytes against the budget.
fn add(asked: &mut McpAsked, tool: &McpTool, tools: &ToolSet, held: &mut Held) -> ApiResult<()> {
    held.grow_for("tools", COPIES * tools.bytes)?;
    tool.add_to(&mut asked.list, tools)
}

/// Adds the tools of all servers to a conversation.
fn use_tools(asked: McpAsked, conversation: &mut Conversation, held: &mut Held) -> ApiResult<()> {
    held.grow_for("tools", asked.list.values().iter().map(value_bytes).sum())?;
    conversation.tools = asked.used()?;
    Ok(())
}

fn none_known() -> ApiError {
    ApiError::internal("no MCP server may be used")
}

/// Returns the error for a server that did not list its tools.
pub(super) fn list_failed(label: &str, error: &McpError) -> ApiError {
    let message = format!("the tools of the MCP server `{}` cannot be listed: {error}", quote(label));
    let (param, code) = (Some("tools".into()), Some("mcp_server_failed"));
    ApiError { param, code, ..ApiError::new(StatusCode::FAILED_DEPENDENCY, message) }
}

/// JSON-RPC's code for invalid parameters.
const INVALID_PARAMS: i64 = -32602;

impl Base {
    async fn submission(&mut self, state: &Arc<ModelState>) -> ApiResult<Submission> {
        if !std::mem::replace(&mut self.fetched, true) {
            self.request.conversation.fetch(state, &mut self.held).await?;
        }
        let held = state.server.bytes.hold(self.request.bytes())?;
        let mut submission = self.request.clone().prepare_on_worker(state, held).await?;
        submission.decode(state).await?;
        Ok(submission)
    }
}

/// Returns an item of the output as an item of the conversation; none for items that the model does not see.
fn item(output: &Output) -> Option<Item> {
    let text = |text: &String| vec![Said::Text(text.clone())];
    let what = match &output.what {
        What::Reasoning { text: said } => InputItem::Reasoning { said: text(said) },
        What::Text { text: said, .. } => InputItem::Message { role: "assistant".into(), said: text(said) },
        What::Call { call_id, namespace, name, arguments } => InputItem::Call {
            call_id: call_id.clone(),
            namespace: namespace.clone(),
            name: name.clone(),
            arguments: arguments.clone(),
        },
        What::Custom { call_id, name, input } => {
            InputItem::Custom { call_id: call_id.clone(), name: name.clone(), input: input.clone() }
        }
        What::McpCall(call) => InputItem::Mcp(McpItem::Call {
            label: call.label.clone(),
            name: call.name.clone(),
            arguments: call.arguments.clone(),
            ended: match &call.result {
                Some(Ok(text)) => CallEnd::Output(text.clone()),
                Some(Err(error)) => serde_json::value::to_raw_value(error).map_or(CallEnd::Open, CallEnd::Error),
                None => CallEnd::Open,
            },
            request: call.request.clone(),
        }),
        What::McpTools { .. } | What::McpRequest { .. } => return None,
    };
    Some(Item { id: output.id.clone(), what })
}
