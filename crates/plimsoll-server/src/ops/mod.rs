//! The pages and commands of an operator: health, metrics, memory, status, caches, and the documents of the API.

pub(crate) mod cache;
pub(crate) mod cancel;
pub(crate) mod gateway;
pub(crate) mod health;
pub(crate) mod index;
pub(crate) mod kv_events;
pub(crate) mod memory;
pub(crate) mod metrics;
pub(crate) mod models;
pub(crate) mod openapi;
pub(crate) mod page;
pub(crate) mod saved;
pub(crate) mod status;
pub(crate) mod tokenize;
