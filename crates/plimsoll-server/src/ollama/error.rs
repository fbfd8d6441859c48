//! Errors in Ollama's form, for every answer of its routes: from a handler, the middleware or the router.

use axum::body::Body;
use axum::http::header;
use axum::response::Response;
use serde::Serialize;

use crate::http::error::ApiError;
use crate::http::sse::Events;

#[derive(Serialize)]
struct Inner<'a> {
    error: &'a str,
}

/// Returns whether a path is one of Ollama's.
pub(crate) fn owns(path: &str) -> bool {
    path.starts_with("/api/")
}

/// Converts an error of these routes to Ollama's form.
pub(crate) fn reshape(mut response: Response) -> Response {
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    // A string: serializing it into memory cannot fail.
    let body = serde_json::to_vec(&Inner { error: &message(&error) }).unwrap_or_default();
    Response::from_parts(parts, Body::from(body))
}

/// An error as the last line of a stream.
pub(crate) fn broken(error: &ApiError, out: &mut Events) {
    out.push_line(&Inner { error: &message(error) });
}

/// Returns the message, with the field's name, which has no other place in Ollama's form.
fn message(error: &ApiError) -> String {
    let named = error.param.as_ref().filter(|param| !error.message.contains(param.as_str()));
    named.map_or_else(|| error.message.clone(), |param| format!("{param}: {}", error.message))
}
