//! Errors: answers to clients in OpenAI's form, and the reasons why serving ends.

use std::io;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use plimsoll_engine::Refusal;
use prometheus_client::metrics::counter::Counter;
use serde::Serialize;
use thiserror::Error;

/// The reason why `serve` could not start or continue.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {reason}{}", next_step(.reason))]
    Bind {
        /// The address.
        address: String,
        /// The system's reason.
        reason: io::Error,
    },
    /// The configuration contradicts itself.
    #[error("server configuration: {0}")]
    Config(String),
}

/// Returns the next step for the operator, where an address cannot be listened on.
fn next_step(reason: &io::Error) -> &'static str {
    match reason.kind() {
        io::ErrorKind::AddrInUse => "; stop the program that uses the port, or choose another port with --port",
        io::ErrorKind::AddrNotAvailable => "; give an address of this machine with --host",
        io::ErrorKind::PermissionDenied => "; choose a port from 1024 on with --port",
        _ => "",
    }
}

/// An error answer. `{"error": {"message", "type", "param", "code"}}` with its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub message: String,
    pub param: Option<String>,
    pub code: Option<&'static str>,
    pub retry_after_s: Option<u32>,
    /// Whether the rest of the request's body was not read: the connection ends with this answer.
    pub close: bool,
    /// Whether the engine has refused the request, and counted it.
    pub counted: bool,
}

pub(crate) type ApiResult<T> = Result<T, ApiError>;

/// A header in which official clients look for whether a retry makes sense: some retry a refused key for minutes.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The most characters of a client's own text that an error message repeats.
const QUOTE_CHARS: usize = 120;

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, message, param: None, code: None, retry_after_s: None, close: false, counted: false }
    }

    /// 400: the field named `param` cannot be served.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = Some(param.into());
        Self { param, code: Some("invalid_value"), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 400: the body as a whole cannot be served.
    pub fn bad_body(message: impl Into<String>) -> Self {
        Self { code: Some("invalid_json"), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 400: a field or value this server does not have.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported"), ..Self::invalid(param, message) }
    }

    /// 400: the output cannot follow its grammar any further. The request's grammar causes this, not the server's load.
    pub fn unfit_grammar(message: impl Into<String>) -> Self {
        Self { code: Some("grammar_too_complex"), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 503: the server shuts down.
    pub fn shutting_down() -> Self {
        Self::unavailable("the server is shutting down", 5)
    }

    /// 503: the request cannot be served at the moment.
    pub fn unavailable(message: impl Into<String>, retry_after_s: u32) -> Self {
        let retry_after_s = Some(retry_after_s);
        Self { retry_after_s, code: Some("unavailable"), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// 500: an error of the server.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { code: Some("engine_error"), ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, message) }
    }

    /// Counts an answer to a request that can never be served, unless the engine has counted it.
    pub fn count_invalid(response: &Response, invalid: &Counter) {
        let error = response.extensions().get::<Self>().filter(|error| !error.counted);
        if error.is_some_and(|error| matches!(error.status.as_u16(), 400 | 404 | 413 | 415)) {
            invalid.inc();
        }
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            // OpenAI's type for an MCP server that fails.
            StatusCode::FAILED_DEPENDENCY => "external_connector_error",
            status if status.is_server_error() => "server_error",
            _ if self.code == Some(CANCELLED) => "request_cancelled_error",
            _ => "invalid_request_error",
        }
    }

    /// The body of the answer; also an SSE event's data.
    pub fn body(&self) -> Vec<u8> {
        let error = Inner { message: &self.message, kind: self.kind(), param: self.param.as_deref(), code: self.code };
        // Strings only: serializing them into memory cannot fail.
        serde_json::to_vec(&Outer { error }).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct Outer<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
        let mut response = (self.status, json, self.body()).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        let another_time = matches!(self.status.as_u16(), 408 | 409 | 429);
        if self.status.is_client_error() && !another_time {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if self.close {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        // Later layers read the error: Anthropic's routes reshape the body, and the request log shows the code.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::Invalid { param, .. } => Self { counted: true, ..Self::invalid(param, message) },
            Refusal::Full { retry_after_s, .. } => Self {
                retry_after_s: Some(retry_after_s),
                code: Some("server_full"),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
            },
            Refusal::Unavailable { retry_after_s, .. } => Self::unavailable(message, retry_after_s),
        }
    }
}

/// The error of a request that a client has cancelled.
pub(crate) fn cancelled() -> ApiError {
    // Nginx's status for a request that the client closed. Google's and Azure's APIs use it, too.
    let status = StatusCode::from_u16(499).unwrap_or(StatusCode::CONFLICT);
    ApiError { code: Some(CANCELLED), ..ApiError::new(status, "the request was cancelled") }
}

/// The code for a prompt that is longer than the context. Clients look for it, and then shorten the conversation.
pub(crate) const CONTEXT_LENGTH: &str = "context_length_exceeded";

/// The code of [`cancelled`].
pub(crate) const CANCELLED: &str = "request_cancelled";

/// The error of a request that a shutdown has ended.
pub(crate) fn cut() -> ApiError {
    ApiError::unavailable("the server is shutting down and could not finish the request in time", 5)
}

/// Shortens `text` for a message.
pub(crate) fn quote(text: &str) -> String {
    let mut cut = text.chars();
    let head: String = cut.by_ref().take(QUOTE_CHARS).collect();
    if cut.next().is_some() { format!("{head}…") } else { head }
}
