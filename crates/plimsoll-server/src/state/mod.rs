//! State that lives as long as the server: its configuration, its models, its budgets, and the records of requests.

pub(crate) mod background;
pub(crate) mod config;
pub(crate) mod counters;
pub(crate) mod documents;
pub(crate) mod media;
pub(crate) mod model;
pub(crate) mod record;
pub(crate) mod request_log;
pub(crate) mod response_store;
pub(crate) mod running;
pub(crate) mod server;
pub(crate) mod spans;
pub(crate) mod threads;
pub(crate) mod trace_file;
