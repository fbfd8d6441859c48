//! A cache of servers' tool lists, for later responses.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::tools::ToolSet;

/// The time for which a list is used.
const KEPT: Duration = Duration::from_secs(60);

/// The most lists.
const LISTS_MAX: usize = 64;

/// The most bytes of all lists.
pub(super) const CACHE_BYTES: u64 = 1 << 20;

/// Bytes of a list besides its tools.
const ENTRY_BYTES: u64 = 128;

struct Entry {
    key: [u8; 32],
    tools: Arc<ToolSet>,
    since: Instant,
}

/// The lists, the newest last.
#[derive(Default)]
pub(super) struct ToolCache(Mutex<Vec<Entry>>);

impl ToolCache {
    /// Returns a list that is not too old.
    pub fn get(&self, key: &[u8; 32]) -> Option<Arc<ToolSet>> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.since.elapsed() < KEPT);
        entries.iter().find(|entry| entry.key == *key).map(|entry| Arc::clone(&entry.tools))
    }

    /// Stores a list. The oldest ones are dropped if there are too many lists or bytes.
    pub fn put(&self, key: [u8; 32], tools: &Arc<ToolSet>) {
        let bytes = |entry: &Entry| entry.tools.bytes + ENTRY_BYTES;
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.key != key && entry.since.elapsed() < KEPT);
        entries.push(Entry { key, tools: Arc::clone(tools), since: Instant::now() });
        while entries.len() > LISTS_MAX || entries.iter().map(bytes).sum::<u64>() > CACHE_BYTES {
            entries.remove(0);
        }
    }

    pub fn bytes(&self) -> u64 {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.iter().map(|entry| entry.tools.bytes + ENTRY_BYTES).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_lists_are_dropped_beyond_the_limits() {
        let cache = ToolCache::default();
        let of = |bytes: u64| Arc::new(ToolSet { tools: Vec::new(), bytes });
        for n in 0..=LISTS_MAX as u8 {
            cache.put([n; 32], &of(1));
        }
        assert!(cache.get(&[0; 32]).is_none() && cache.get(&[1; 32]).is_some());
        cache.put([200; 32], &of(CACHE_BYTES - 2 * ENTRY_BYTES));
        assert!(cache.bytes() <= CACHE_BYTES);
        assert!(cache.get(&[200; 32]).is_some() && cache.get(&[1; 32]).is_none());
        cache.put([201; 32], &of(CACHE_BYTES));
        assert_eq!(cache.bytes(), 0, "a list of more than all bytes is not kept");
    }
}
