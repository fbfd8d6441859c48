//! Errors in Anthropic's form, for every answer of its routes: from a handler, the middleware or the router.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;

use crate::http::error::ApiError;

/// The header in which Anthropic's clients look for the request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

#[derive(Serialize)]
struct Outer<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    error: Inner<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
}

#[derive(Serialize)]
struct Inner<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
}

#[derive(Serialize)]
struct Details {
    error_code: &'static str,
}

/// Returns whether a path is one of Anthropic's.
pub(crate) fn owns(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

/// Adapts an answer of these routes: the id in the header where clients look for it, and errors in Anthropic's form.
pub(crate) fn reshape(mut response: Response, request_id: &HeaderValue) -> Response {
    response.headers_mut().insert(REQUEST_ID, request_id.clone());
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let (mut parts, _) = response.into_parts();
    parts.status = status(error.status);
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(body(&error, request_id.to_str().ok())))
}

/// Replaces 503 with Anthropic's 529: its clients treat that number as "overloaded" and retry later.
fn status(status: StatusCode) -> StatusCode {
    match status {
        StatusCode::SERVICE_UNAVAILABLE => StatusCode::from_u16(529).unwrap_or(status),
        status => status,
    }
}

fn kind(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        500..=599 => "api_error",
        _ => "invalid_request_error",
    }
}

/// The body of an error; also the data of a stream's error event.
pub(crate) fn body(error: &ApiError, request_id: Option<&str>) -> Vec<u8> {
    // Only the message has room for the field's name.
    let named = error.param.as_ref().filter(|param| !error.message.contains(param.as_str()));
    let message = named.map_or_else(|| error.message.clone(), |param| format!("{param}: {}", error.message));
    let details = error.code.map(|error_code| Details { error_code });
    let error = Inner { kind: kind(error.status), message: &message, details };
    // Strings only: serializing them into memory cannot fail.
    serde_json::to_vec(&Outer { kind: "error", error, request_id }).unwrap_or_default()
}
