//! A request on its way to the engine thread.

use std::time::Instant;

use crate::api::admission::AdmissionPermit;
use crate::api::byte_reservation::ByteReservation;
use crate::api::outbox::Outbox;
use crate::api::request::Request;

/// What the engine thread waits for: an arrival, or nothing but to be woken.
pub(crate) type Message = Option<Arrival>;

/// A request on its way to the engine thread, with its reserved memory.
pub(crate) struct Arrival {
    pub request: Request,
    pub outbox: Outbox,
    pub timestamps: Timestamps,
    pub permit: AdmissionPermit,
    pub buffers: ByteReservation,
}

/// When a request reached the server and the engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timestamps {
    /// The server received it.
    pub received: Instant,
    /// It was submitted to the engine.
    pub arrived: Instant,
}
