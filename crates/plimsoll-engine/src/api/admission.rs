//! Admission: places in the system and host bytes, each returned when its holder is dropped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Reservations of all requests in the system.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// The most host bytes that may be reserved.
    host_limit: u64,
    host_reserved: AtomicU64,
    /// Host bytes that requests really hold.
    host_held: AtomicU64,
    in_system: AtomicU64,
}

impl Reservations {
    /// No requests yet; they may reserve `host_limit` bytes together.
    pub fn new(host_limit: u64) -> Self {
        Self { host_limit, ..Self::default() }
    }

    /// Takes one of `places` places. None when all are taken.
    pub fn take_place(self: &Arc<Self>, places: u64) -> Option<AdmissionPermit> {
        take(&self.in_system, 1, places).then(|| AdmissionPermit(Arc::clone(self)))
    }

    /// Reserves `bytes`. None when all bytes for requests are reserved.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<HostBytes> {
        take(&self.host_reserved, bytes, self.host_limit).then(|| HostBytes {
            reservations: Arc::clone(self),
            reserved: bytes.into(),
            held: 0.into(),
        })
    }

    /// Host bytes reserved.
    pub fn reserved(&self) -> u64 {
        self.host_reserved.load(Ordering::Acquire)
    }

    /// Host bytes held of those that are reserved.
    pub fn held(&self) -> u64 {
        self.host_held.load(Ordering::Acquire)
    }

    /// Requests accepted and not yet ended.
    pub fn in_system(&self) -> u64 {
        self.in_system.load(Ordering::Acquire)
    }
}

/// A request's place in the system. Given back when the engine is done with the request.
pub(crate) struct AdmissionPermit(Arc<Reservations>);

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        self.0.in_system.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Host bytes reserved for one request, and how many of them it holds. Given back when neither the engine nor the
/// client holds its output.
pub(crate) struct HostBytes {
    reservations: Arc<Reservations>,
    reserved: AtomicU64,
    held: AtomicU64,
}

impl HostBytes {
    /// Reserves `more`. False when all bytes for requests are reserved.
    pub fn grow(&self, more: u64) -> bool {
        let taken = take(&self.reservations.host_reserved, more, self.reservations.host_limit);
        self.reserved.fetch_add(if taken { more } else { 0 }, Ordering::AcqRel);
        taken
    }

    /// Counts heap bytes that grew or shrank from `before` to `after`.
    pub fn record(&self, before: u64, after: u64) {
        for sum in [&self.held, &self.reservations.host_held] {
            sum.fetch_add(after.wrapping_sub(before), Ordering::AcqRel);
        }
    }

    /// How many of them are held.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Acquire)
    }
}

impl fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", self.held.load(Ordering::Relaxed), self.reserved.load(Ordering::Relaxed))
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        self.reservations.host_reserved.fetch_sub(*self.reserved.get_mut(), Ordering::AcqRel);
        self.reservations.host_held.fetch_sub(*self.held.get_mut(), Ordering::AcqRel);
    }
}

/// Adds `more` to `sum` unless the result would exceed `limit`. Other threads never see a sum that was not granted.
fn take(sum: &AtomicU64, more: u64, limit: u64) -> bool {
    let granted = |sum: u64| sum.checked_add(more).filter(|sum| *sum <= limit);
    sum.fetch_update(Ordering::AcqRel, Ordering::Acquire, granted).is_ok()
}
