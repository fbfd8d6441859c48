//! Counters of exchanges with MCP servers.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::McpError;

/// Upper bounds of the buckets, in seconds.
const SECONDS: [f64; 9] = [0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Exchange {
    method: &'static str,
    outcome: &'static str,
}

/// Exchanges by method and outcome, and their seconds.
pub(crate) struct Counts {
    exchanges: Family<Exchange, Counter>,
    seconds: Histogram,
    pub cached: Counter,
}

impl Default for Counts {
    fn default() -> Self {
        Self { exchanges: Family::default(), seconds: Histogram::new(SECONDS), cached: Counter::default() }
    }
}

impl Counts {
    /// Counts an exchange. `tool_failed`: the server answered that its tool failed.
    pub fn count(&self, method: &'static str, error: Option<&McpError>, tool_failed: bool, took: Duration) {
        let outcome = error.map_or(if tool_failed { "tool_error" } else { "ok" }, McpError::cause);
        self.exchanges.get_or_create(&Exchange { method, outcome }).inc();
        self.seconds.observe(took.as_secs_f64());
    }

    /// Adds the metrics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Exchanges with MCP servers by method and outcome";
        registry.register("plimsoll_mcp_exchanges", help, self.exchanges.clone());
        registry.register("plimsoll_mcp_exchange_seconds", "Time of an exchange", self.seconds.clone());
        let help = "Lists of tools that were taken from the cache";
        registry.register("plimsoll_mcp_lists_cached", help, self.cached.clone());
    }
}
