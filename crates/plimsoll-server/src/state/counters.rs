//! The server's counters.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answer {
    path: String,
    code: u32,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct End {
    api: &'static str,
    reason: &'static str,
}

/// Generations that have ended, by API and reason; both labels are the server's own words.
#[derive(Clone, Default)]
pub(crate) struct Ended(Family<End, Counter>);

impl Ended {
    pub fn count(&self, api: &'static str, reason: &'static str) {
        self.0.get_or_create(&End { api, reason }).inc();
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Turned {
    reason: &'static str,
}

/// Counters of the HTTP side.
pub(crate) struct Metrics {
    answers: Family<Answer, Counter>,
    turned_away: Family<Turned, Counter>,
    /// Ends of generations: finished, aborted (the client disconnected), cancelled, timeout, shutdown, failed.
    pub ended: Ended,
    /// Open connections, counted by the accept loop.
    pub connections: Arc<AtomicU64>,
    /// Clients that read the events of the prefix cache.
    pub kv_readers: Arc<AtomicU64>,
    /// Connections that got 503 because too many were open.
    pub refused_connections: Counter,
    /// HTTP/2 streams with a client that read nothing for the write timeout.
    pub stalled_streams: Counter,
    /// Unknown fields in requests that were served despite them.
    pub unknown_fields: Counter,
    /// Panics; none where the only engine counts them.
    panics: Option<Counter>,
    /// Loads and unloads of models, on a server with several.
    pub models: Models,
}

/// Loads and unloads of models since start.
#[derive(Default)]
pub(crate) struct Models {
    pub loaded: Counter,
    pub unloaded: Counter,
    /// Loads that failed.
    pub failed: Counter,
    /// Loads cancelled because no request was waiting for the model any more, or at shutdown.
    pub cancelled: Counter,
}

impl Metrics {
    pub fn new(panics: Option<Counter>) -> Self {
        Self {
            answers: Family::default(),
            turned_away: Family::default(),
            ended: Ended::default(),
            connections: Arc::default(),
            kv_readers: Arc::default(),
            refused_connections: Counter::default(),
            stalled_streams: Counter::default(),
            unknown_fields: Counter::default(),
            panics,
            models: Models::default(),
        }
    }

    /// Counts a request that was refused before a handler saw it.
    pub fn turned_away(&self, reason: &'static str) {
        self.turned_away.get_or_create(&Turned { reason }).inc();
    }

    /// Counts an answer. Routes and statuses are few; unknown paths are counted as one.
    pub fn answered(&self, path: &str, code: u16) {
        self.answers.get_or_create(&Answer { path: path.into(), code: code.into() }).inc();
    }

    /// Adds the counters to a registry.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("plimsoll_http_answers", "HTTP answers by route and status", self.answers.clone());
        let help = "Connections refused because too many were open";
        registry.register("plimsoll_http_connections_refused", help, self.refused_connections.clone());
        let help = "Streams of HTTP/2 that were reset because their client took nothing";
        registry.register("plimsoll_http_streams_stalled", help, self.stalled_streams.clone());
        let help = "Generations by API and the way they ended";
        registry.register("plimsoll_generations_ended", help, self.ended.0.clone());
        let help = "Requests turned away before their body was read, by reason";
        registry.register("plimsoll_http_turned_away", help, self.turned_away.clone());
        let help = "Unknown fields in requests that went on all the same (--unknown-fields)";
        registry.register("plimsoll_http_unknown_fields", help, self.unknown_fields.clone());
        if let Some(panics) = &self.panics {
            registry.register("plimsoll_panics", "Panics that were caught", panics.clone());
            let Models { loaded, unloaded, failed, cancelled } = &self.models;
            registry.register("plimsoll_models_loaded", "Models loaded", loaded.clone());
            registry.register("plimsoll_models_unloaded", "Models unloaded", unloaded.clone());
            registry.register("plimsoll_models_failed", "Models that failed to load", failed.clone());
            let help = "Loads cancelled because no request waited for them or the server ended";
            registry.register("plimsoll_models_load_cancelled", help, cancelled.clone());
        }
    }
}
