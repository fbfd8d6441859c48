//! HTTP code shared by all handlers: bodies, fields, errors, JSON and events, and the client behind a request.

pub(crate) mod access;
pub(crate) mod body;
pub(crate) mod budget;
pub(crate) mod caller;
pub(crate) mod error;
pub(crate) mod fields;
pub(crate) mod form;
pub(crate) mod ids;
pub(crate) mod json;
pub(crate) mod path;
pub(crate) mod rates;
pub(crate) mod sse;
pub(crate) mod thread_value;
pub(crate) mod trace_parent;
pub(crate) mod unknown;
