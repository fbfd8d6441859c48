//! The answer of `GET /v1/status`, with the fields that `top` shows.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The page.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Status {
    pub model: String,
    pub uptime_seconds: f64,
    pub healthy: bool,
    pub draining: bool,
    pub totals: Totals,
    pub pools: BTreeMap<String, Pool>,
    pub degradation: Degradation,
    pub requests: Vec<Row>,
}

/// Sums over all requests.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Totals {
    pub running: u64,
    pub waiting: u64,
    pub memory_bytes: u64,
    pub tokens_per_second: f64,
    pub finished: u64,
    pub aborted: u64,
    pub failed: u64,
}

/// A pool: pages, slots or bytes. The pool of requests has other fields, and is read as an empty one.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pool {
    pub used: u64,
    pub total: u64,
    pub cached: u64,
}

/// The level of degradation.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Degradation {
    pub level: String,
}

/// One request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Row {
    pub id: String,
    pub endpoint: String,
    pub phase: String,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub computed_tokens: u64,
    pub generated_tokens: u64,
    pub memory_bytes: u64,
    pub age_seconds: f64,
    pub tokens_per_second: Option<f64>,
}
