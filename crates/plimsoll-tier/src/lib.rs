//! A bounded store of byte blobs in one directory, for a cache that outlives its process.
//!
//! [`Store`] is the directory: it writes a blob whole (temporary name, rename), checks length and checksum when it reads,
//! and removes the least recently used blobs when its bounds are reached. [`Tier`] is a thread over a store, with buffers of
//! fixed size and number: its caller never waits for the disk. [`LargeFiles`] is a directory of few files that are mapped.
//!
//! **Architecture invariant:** a fault of a blob is never an error. Every fault is a miss, a counter and a log line. Tokens, pages, models
//! and requests must not be in here.

#![forbid(unsafe_code)]

mod blob;
mod budget;
mod cipher;
mod dir;
mod expiring;
mod files;
mod index;
mod large;
mod names;
mod stats;
mod store;
mod tier;
mod transfer;
mod upkeep;

pub use cipher::{Key, KeyError};
pub use dir::{DirLock, OpenError, Saved};
pub use expiring::Expiring;
pub use files::{Files, Found, System, free_bytes};
pub use index::{Index, Sum};
pub use large::{FILES_MAX, KeepError, LargeFiles};
pub use names::{NAMES_MAX, SaveError, saved_id};
pub use stats::{Counts, KindCounts, Miss, Refused};
pub use store::{Access, Limits, Put, Store};
pub use tier::{Class, Read, Tier};
pub use upkeep::Checked;

/// The name of a blob, by which it is found. The first 8 bytes belong to its owner ([`tag_of`]), and the last byte is its kind
/// ([`kind_of`]).
pub type Name = [u8; 32];

/// The first bytes of a name, which are the same for all blobs of one owner.
pub type Tag = [u8; 8];

/// Number of kinds of blobs with separate counters.
pub const KINDS: usize = 4;

/// Returns the kind of a blob, below [`KINDS`]: the last byte of its name.
pub fn kind_of(name: &Name) -> usize {
    usize::from(name[31]).min(KINDS - 1)
}

/// Returns the owner's part of a name.
pub fn tag_of(name: &Name) -> Tag {
    let mut tag = [0; 8];
    tag.copy_from_slice(&name[..8]);
    tag
}
