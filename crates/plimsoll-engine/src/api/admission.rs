//! Admission: places in the system and host bytes, each returned when its holder is dropped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use plimsoll_memory::broken;

/// What requests in the system have reserved.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    /// The most host bytes that may be reserved.
    host_limit: u64,
    host_reserved: AtomicU64,
    /// What requests really hold of them.
    host_held: AtomicU64,
    in_system: AtomicU64,
}

impl Reservations {
    /// No requests yet; they may reserve `host_limit` bytes together.
    pub fn new(host_limit: u64) -> Self {
        Self { host_limit, ..Self::default() }
    }

    /// Takes one of `places` places. None when all are taken.
    pub fn admit(self: &Arc<Self>, places: u64) -> Option<AdmissionPermit> {
        take(&self.in_system, 1, if broken("V-AB") { u64::MAX } else { places })
            .then(|| AdmissionPermit(Arc::clone(self)))
    }

    /// Reserves `bytes`. None when all bytes for requests are reserved.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<HostBytes> {
        take(&self.host_reserved, bytes, if broken("V-O") { u64::MAX } else { self.host_limit }).then(|| HostBytes {
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

/// A request's place among those in the system; given back when the engine is done with it.
pub(crate) struct AdmissionPermit(Arc<Reservations>);

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        self.0.in_system.fetch_sub(u64::from(!broken("V-3")), Ordering::AcqRel);
    }
}

/// Host bytes reserved for one request, and how many of them it holds; given back when neither engine nor client holds any
/// of its output.
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

    /// Notes that `before` bytes of the heap have become `after`.
    pub fn hold(&self, before: u64, after: u64) {
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
        let reserved = if broken("V-C") { 0 } else { *self.reserved.get_mut() };
        self.reservations.host_reserved.fetch_sub(reserved, Ordering::AcqRel);
        self.reservations.host_held.fetch_sub(*self.held.get_mut(), Ordering::AcqRel);
    }
}

/// Adds `more` to `sum` unless the result would exceed `limit`. Other threads never see a sum that was not granted.
fn take(sum: &AtomicU64, more: u64, limit: u64) -> bool {
    let granted = |sum: u64| sum.checked_add(more).filter(|sum| *sum <= limit);
    sum.fetch_update(Ordering::AcqRel, Ordering::Acquire, granted).is_ok()
}
