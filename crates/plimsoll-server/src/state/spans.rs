//! The data of a running request for its spans.

use std::sync::Arc;

use plimsoll_engine::{FinishReason, Watch};

use crate::http::trace_parent::Parent;
use crate::otlp::{Asked, Choice, TRACED_CHOICES, Trace, cut};
use crate::state::model::ModelState;
use crate::state::server::ServerState;

/// The data for the spans of a traced request.
pub(crate) struct Spans {
    pub server: Arc<ServerState>,
    pub trace: Trace,
    pub model: String,
    pub asked: Option<Asked>,
    pub finished: [Option<FinishReason>; TRACED_CHOICES],
    pub parts: [Option<Choice>; TRACED_CHOICES],
    /// Views of the first choices. They keep the requests' bytes, so they are dropped with the answer's reader.
    pub watches: Vec<Watch>,
}

impl Spans {
    /// Returns none where no traces are exported or the trace is not sampled.
    pub fn begin(state: &ModelState, parent: Option<Parent>) -> Option<Box<Self>> {
        let trace = state.server.tracer.as_ref()?.begin(parent)?;
        Some(Box::new(Self {
            server: Arc::clone(&state.server),
            trace,
            model: cut(state.served.names.first().map_or("", String::as_str)).into(),
            asked: None,
            finished: [None; TRACED_CHOICES],
            parts: [None; TRACED_CHOICES],
            watches: Vec::new(),
        }))
    }

    /// Reads the progress of the choices, and drops the views.
    pub fn unwatch(&mut self) {
        for (part, watch) in self.parts.iter_mut().zip(self.watches.drain(..)) {
            *part = Some(watch.snapshot().into());
        }
    }
}
