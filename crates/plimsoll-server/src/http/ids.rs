//! Request ids, seeds and timestamps. Ids are unique and unpredictable enough, without a random number crate.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A source of numbers: a keyed hash (key from the operating system) of a counter.
#[derive(Default)]
pub(crate) struct Ids {
    key: RandomState,
    count: AtomicU64,
}

impl Ids {
    /// Returns 64 bits that no other call of this process gets from the same counter value.
    pub fn next(&self) -> u64 {
        self.key.hash_one(self.count.fetch_add(1, Ordering::Relaxed))
    }

    /// An id such as `chatcmpl-0123456789abcdef0123456789abcdef`.
    pub fn request(&self, prefix: &str) -> String {
        format!("{prefix}-{:016x}{:016x}", self.next(), self.next())
    }

    /// An id such as `msg_0123456789abcdef01234567`.
    pub fn named(&self, prefix: &str) -> String {
        format!("{prefix}_{:016x}{:08x}", self.next(), self.next() as u32)
    }

    /// Returns an id for a tool call: `call_…`, or nine characters where the model's template requires that.
    pub fn call(&self, prefix: Option<&str>) -> String {
        prefix.map_or_else(
            || {
                let mut id = format!("{:016x}", self.next());
                id.truncate(9);
                id
            },
            |prefix| self.named(prefix),
        )
    }

    /// Returns a client's cache salt as a number; never 0, which stands for no salt. The hash is keyed, so that clients cannot construct a
    /// collision.
    pub fn salt(&self, text: &str) -> u64 {
        self.key.hash_one(text).max(1)
    }
}
