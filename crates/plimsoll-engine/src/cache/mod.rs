//! The cache of computed attention state: the pool of KV pages and the prefix index over it.
//!
//! One page holds the KV cache of [`PAGE_TOKENS`] tokens in every layer. The pool counts the holders of each
//! page; the index maps tokens to pages. Neither handles bytes of KV, devices or requests. They hand out numbers, and
//! the owner of the arena turns a [`PageId`] into an address.
//!
//! The life of a sequence: [`PrefixIndex::lookup`] (pages arrive held), [`PagePool::alloc`] for the rest,
//! [`PrefixIndex::insert`] once its prompt is computed so that others can share it while it runs, and at the end
//! either [`PrefixIndex::donate`] (finished, worth keeping) or [`PagePool::release_all`] (aborted).
//!
//! Models with recurrent state have a third table, [`StatePool`]; models with sliding windows [`WindowPool`]. [`KvCache`] keeps the
//! tables consistent. [`KvEventLog`] reports the content of the index to external readers, if there are any. The disk tier can keep
//! [`Part`]s of prefixes: the cache lists the new ones, and `Restore` takes them back.

mod hash;
mod key;
mod kv;
mod kv_event_log;
pub(crate) mod lease;
mod pages;
mod radix;
mod restore;
mod states;
pub mod stats;
#[cfg(test)]
mod tests;
mod unsaved;
mod windows;

pub(crate) use key::PinEnd;
pub use key::{MediaMark, PageKey, Pin};
pub use kv::KvCache;
pub use kv_event_log::{KvCursor, KvEvent, KvEventLog, KvEventStats};
pub use pages::{PAGE_TOKENS, PageId, PagePool, PoolError};
pub use radix::{IndexError, IndexStats, Match, PrefixIndex};
pub(crate) use restore::Restore;
pub use states::{Purpose, SlotId, StateError, StatePool, StateStats};
pub use unsaved::{Link, Part};
pub(crate) use unsaved::{OUTPUT_KIND, SavedPrefixes, block_name, links, part_name, unsaved_bytes};
pub use windows::WindowPool;

/// Sizes of the two pools.
#[derive(Clone, Copy, Debug)]
pub struct Pools {
    /// Pages.
    pub pages: usize,
    /// State slots, or window pages for models with sliding windows; 0 for models without either.
    pub slots: usize,
}
