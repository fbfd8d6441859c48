//! A request on its way to the engine thread.

use std::time::Instant;

use crate::api::admission::AdmissionPermit;
use crate::api::byte_reservation::ByteReservation;
use crate::api::outbox::Outbox;
use crate::api::request::Request;

/// A request on its way to the engine thread, with all it has reserved.
pub(crate) struct Arrival {
    pub request: Request,
    pub outbox: Outbox,
    pub timestamps: Timestamps,
    pub place: AdmissionPermit,
    pub room: ByteReservation,
}

/// Since when a request is on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timestamps {
    /// Its client asked.
    pub asked: Instant,
    /// It was submitted.
    pub arrived: Instant,
}
