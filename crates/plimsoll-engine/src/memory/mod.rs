//! Memory: what everything takes, what is left, and what gives way when it is short.

pub(crate) mod footprint;
pub mod governor;
pub(crate) mod lease;
pub(crate) mod process;
pub(crate) mod trim;
