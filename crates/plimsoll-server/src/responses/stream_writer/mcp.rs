//! The steps of a response with MCP servers, and their events.

use std::sync::Arc;

use plimsoll_engine::FinishReason;

use super::super::mcp_object::{CallError, ListedTool, McpCall};
use super::super::mcp_run::{Done, McpRun, Todo, list_failed};
use super::super::object::{Output, Status, What};
use super::super::unreported::Unreported;
use super::{Body, Responding};
use crate::conversation::active::{ActiveRequest, Event};
use crate::conversation::reply_reader::ReplyReader;
use crate::http::error::ApiResult;
use crate::http::sse::Events;
use crate::mcp::{CallResult, McpError};

/// The end of a response. None: it continues.
pub(crate) type Ended = Option<ApiResult<()>>;

impl Responding {
    /// Adds MCP servers, whose tools are listed before the first turn.
    pub fn with_mcp(mut self, run: McpRun) -> Self {
        self.mcp = Some(Box::new(run));
        self
    }

    /// Takes the next step of the response. Cancel-safe.
    pub async fn advance(&mut self, request: &mut ActiveRequest, out: &mut Events) -> Ended {
        if let Some(run) = &mut self.mcp {
            if let Some(job) = &mut run.job {
                let done = tokio::select! {
                    biased;
                    error = request.interrupted() => return Some(Err(error)),
                    done = job => done,
                };
                run.job = None;
                return failing(request, |request| self.done(request, done, out));
            }
            if let Some(todo) = run.todo.pop_front() {
                return failing(request, |request| self.begins(request, todo, out));
            }
            if run.ended {
                request.record_finish();
                return Some(Ok(()));
            }
        }
        match request.next().await {
            Event::Delta(_, delta) => {
                self.take(request, delta, out);
                None
            }
            Event::Done if self.mcp.is_some() => {
                self.turn_ended(out);
                request.turn_ended();
                None
            }
            Event::Done => Some(Ok(())),
            Event::Failed(error) => Some(Err(error)),
        }
    }

    /// Begins a step of the work between turns.
    fn begins(&mut self, request: &ActiveRequest, todo: Todo, out: &mut Events) -> ApiResult<()> {
        let Some(run) = &mut self.mcp else { return Ok(()) };
        match todo {
            Todo::List(server) => {
                run.list(server);
                if !run.servers[server].listed {
                    let label = run.servers[server].tool.label.clone();
                    let what = What::McpTools { label, tools: Vec::new(), error: None };
                    let id = request.state.server.ids.named("mcpl");
                    self.begin_mcp(id, what, "response.mcp_list_tools.in_progress", out);
                }
            }
            Todo::Call(at) => {
                let What::McpCall(call) = &self.output[at].what else { return Ok(()) };
                if let Err(error) = run.call(at, call) {
                    self.called(at, Err(error), out)?;
                }
            }
            Todo::Turn => {
                if !run.turn(&self.output, request.usage().completion_tokens)? {
                    self.finish = Some(FinishReason::Length);
                    run.ended = true;
                }
            }
        }
        Ok(())
    }

    /// Takes the result of a step.
    fn done(&mut self, request: &mut ActiveRequest, done: Done, out: &mut Events) -> ApiResult<()> {
        let Some(run) = &mut self.mcp else { return Ok(()) };
        match done {
            Done::Listed { server, session, result } => {
                let server = &mut run.servers[server];
                server.session = Some(session);
                server.tools = result.as_ref().ok().cloned();
                self.listed(result, out)
            }
            Done::Called { output, server, session, result } => {
                run.servers[server].session = Some(session);
                self.called(output, result, out)
            }
            Done::Prepared { base, result } => {
                run.base = Some(base);
                request.resume((*result)?, "responses")?;
                self.reasoning_before += self.reading.reasoning_tokens();
                self.reading = ReplyReader::new(&request.submission.rules);
                self.unreported = Unreported::default();
                self.finish = None;
                Ok(())
            }
        }
    }

    /// Handles the answer of a server that was asked for its tools. Its list is the last item if it is shown.
    fn listed(&mut self, result: Result<Arc<crate::mcp::ToolSet>, McpError>, out: &mut Events) -> ApiResult<()> {
        let Some(run) = &mut self.mcp else { return Ok(()) };
        let at = self.output.len().saturating_sub(1);
        let shown = self.output.last_mut().filter(|last| last.status == Status::InProgress);
        if let Some(Output { status, what: What::McpTools { label, tools: shown, error }, .. }) = shown {
            let server = run.servers.iter().find(|server| server.tool.label == *label);
            let kind = match &result {
                Ok(tools) => {
                    let of = |index| ListedTool { tools: Arc::clone(tools), index };
                    let allowed = |index: &usize| server.is_some_and(|of| of.tool.shows(&tools.tools[*index]));
                    *shown = (0..tools.tools.len()).filter(allowed).map(of).collect();
                    *status = Status::Completed;
                    "response.mcp_list_tools.completed"
                }
                Err(failed) => {
                    *error = Some(failed.to_string());
                    *status = Status::Failed;
                    "response.mcp_list_tools.failed"
                }
            };
            self.end_mcp(at, kind, out);
        }
        let Some(run) = &mut self.mcp else { return Ok(()) };
        if let Err(error) = result {
            let failed = run.servers.iter().find(|server| server.tools.is_none());
            let label = failed.map_or("", |server| server.tool.label.as_str());
            return Err(list_failed(label, &error));
        }
        if run.todo.iter().any(|todo| matches!(todo, Todo::List(_))) {
            return Ok(());
        }
        run.tools_are_here()?;
        let (approved, ids) = (std::mem::take(&mut run.approved), Arc::clone(&run.state));
        for call in approved {
            let ready = McpCall {
                label: call.label,
                name: call.name,
                arguments: call.arguments,
                ready: false,
                result: None,
                request: Some(call.request),
            };
            let at = self.output.len();
            let id = ids.server.ids.named("mcp");
            self.begin_mcp(id, What::McpCall(ready), "response.mcp_call.in_progress", out);
            self.arguments_end(at, out);
            self.mcp.iter_mut().for_each(|run| run.todo.push_back(Todo::Call(at)));
        }
        self.mcp.iter_mut().for_each(|run| run.todo.push_back(Todo::Turn));
        Ok(())
    }

    /// Handles the end of a call.
    fn called(&mut self, at: usize, result: Result<CallResult, McpError>, out: &mut Events) -> ApiResult<()> {
        let Output { status, what: What::McpCall(call), .. } = &mut self.output[at] else { return Ok(()) };
        let result = match result {
            Ok(CallResult { failed: Some(content), .. }) => Err(CallError::McpToolExecutionError { content }),
            Ok(CallResult { text, failed: None }) => Ok(text),
            Err(error) => Err(error.into()),
        };
        let bytes = match &result {
            Ok(text) => text.len(),
            Err(CallError::McpToolExecutionError { content }) => content.get().len(),
            Err(_) => 0,
        };
        self.mcp.as_mut().map_or(Ok(()), |run| run.keep(bytes))?;
        *status = if result.is_ok() { Status::Completed } else { Status::Failed };
        let kind = if result.is_ok() { "response.mcp_call.completed" } else { "response.mcp_call.failed" };
        call.result = Some(result);
        self.end_mcp(at, kind, out);
        Ok(())
    }

    /// Handles the end of the model's turn. Its calls of MCP servers are made, and another turn follows unless the client must act.
    fn turn_ended(&mut self, out: &mut Events) {
        let whole = self.finish != Some(FinishReason::Length);
        if whole {
            self.end_text();
            self.end_item(Status::Completed, out);
        }
        let Some(run) = &mut self.mcp else { return };
        let turn = self.output.iter().enumerate().skip(run.told);
        let open = |output: &Output| output.status == Status::InProgress && matches!(output.what, What::McpCall(_));
        let calls: Vec<usize> = turn.clone().filter(|(_, output)| open(output)).map(|(at, _)| at).collect();
        let of_client = |what: &What| matches!(what, What::Call { .. } | What::Custom { .. } | What::McpRequest { .. });
        if !whole || calls.is_empty() {
            run.ended = true;
            return;
        }
        run.ended = turn.clone().any(|(_, output)| of_client(&output.what));
        run.todo.extend(calls.into_iter().map(Todo::Call));
        if !run.ended {
            run.todo.push_back(Todo::Turn);
        }
    }

    /// Begins the item of a call if `name` is a tool of an MCP server. Returns whether it is.
    pub(super) fn calls_mcp(&mut self, ids: &crate::http::ids::Ids, name: &str, out: &mut Events) -> bool {
        let Some(run) = &mut self.mcp else { return false };
        let Some((server, tool, approval)) = run.find(name) else { return false };
        let (label, name, arguments) = (server.tool.label.clone(), tool.name.clone(), String::new());
        if approval {
            self.end_item(Status::Completed, out);
            let what = What::McpRequest { label, name, arguments };
            self.output.push(Output { id: ids.named("mcpr"), status: Status::InProgress, what });
            return true;
        }
        if run.calls_left == 0 {
            self.ignores = true;
            self.end_item(Status::Completed, out);
            return true;
        }
        run.calls_left -= 1;
        let call = McpCall { label, name, arguments, ready: false, result: None, request: None };
        self.begin_mcp(ids.named("mcp"), What::McpCall(call), "response.mcp_call.in_progress", out);
        true
    }

    fn begin_mcp(&mut self, id: String, what: What, kind: &'static str, out: &mut Events) {
        self.begin(id, what, out);
        let output_index = self.output.len() - 1;
        let item_id = &self.output[output_index].id;
        self.teller.tell(kind, Body::Step { output_index, item_id }, out);
    }

    fn end_mcp(&mut self, output_index: usize, kind: &'static str, out: &mut Events) {
        let output = &self.output[output_index];
        self.teller.tell(kind, Body::Step { output_index, item_id: &output.id }, out);
        let item = output.shown(false);
        self.teller.tell("response.output_item.done", Body::Item { output_index, item }, out);
    }

    /// Marks the arguments of a call as complete. The call is made later.
    pub(super) fn arguments_end(&mut self, output_index: usize, out: &mut Events) {
        let Output { id, what: What::McpCall(call), .. } = &mut self.output[output_index] else { return };
        if !std::mem::replace(&mut call.ready, true) {
            let body = Body::McpArgumentsDone { output_index, item_id: id, arguments: &call.arguments };
            self.teller.tell("response.mcp_call_arguments.done", body, out);
        }
    }

    /// Ends the request for an approval. A truncated request is not shown.
    pub(super) fn request_ends(&mut self, status: Status, out: &mut Events) {
        if status != Status::Completed {
            self.output.pop();
            return;
        }
        let output_index = self.output.len().saturating_sub(1);
        let Some(output) = self.output.last_mut() else { return };
        output.status = status;
        for kind in ["response.output_item.added", "response.output_item.done"] {
            self.teller.tell(kind, Body::Item { output_index, item: output.shown(false) }, out);
        }
    }

    /// Ends the work, the sessions and the items that wait for a server.
    pub(super) fn close_mcp(&mut self, out: &mut Events) {
        if let Some(run) = &mut self.mcp {
            run.job = None;
            run.servers.clear();
        }
        for output_index in 0..self.output.len() {
            let output = &mut self.output[output_index];
            if output.status == Status::InProgress {
                output.status = Status::Incomplete;
                let item = output.shown(false);
                self.teller.tell("response.output_item.done", Body::Item { output_index, item }, out);
            }
        }
    }
}

/// Takes a step. An error ends the response.
fn failing(request: &mut ActiveRequest, step: impl FnOnce(&mut ActiveRequest) -> ApiResult<()>) -> Ended {
    let error = step(request).err()?;
    request.record_failure(error.clone());
    Some(Err(error))
}
