//! The server that clients ask, and how long they wait for it.

use std::time::Duration;

use crate::client::Target;

/// The server, its model and the time limits of its answers.
pub struct Endpoint {
    /// The server.
    pub target: Target,
    /// The model to ask for.
    pub model: String,
    /// An answer's head, and each event after it, must come within this time, waiting in the queue included.
    pub patience: Duration,
    /// An answer that needs no work must come within this time.
    pub at_once: Duration,
}
