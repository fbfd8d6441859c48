//! Sizing by measurement, one test per acceptance criterion (`a01` to `a40`), on a simulated device.
//!
//! Criteria that need a real engine, encoder or trace (A12, A26 to A32, A34, A38) are tested in the crates that have them.

mod arithmetic;
mod attempts;
mod drafts;
mod edges;
mod fake;
mod planned;
mod ranks;
