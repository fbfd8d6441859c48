//! Prefixes that are saved under a name, through the handle. Their calls wait for the disk.

use plimsoll_tier::{Name, SaveError};
use serde::Serialize;
use thiserror::Error;

use super::EngineHandle;
use crate::cache::{PageKey, Part, SavedPrefixes, links, part_name};

/// A saved prefix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SavedPrefix {
    /// Its name.
    pub name: String,
    /// Tokens of its prompt.
    pub tokens: usize,
    /// Seconds since 1970 at which it was saved.
    pub created: u64,
}

/// Why a prefix was not saved.
#[derive(Debug, Error)]
pub enum SavePrefixError {
    /// The engine has no cache on disk.
    #[error("prefixes are saved on disk: start the server with --cache-dir")]
    Off,
    /// Pinned prefixes would exceed the limit.
    #[error(
        "the prefix takes {needed} bytes of the disk, but of the {limit} bytes for pinned prefixes (a quarter of --cache-bytes) {pinned} are taken: remove a saved prefix, or raise --cache-bytes"
    )]
    Budget {
        /// Bytes of the prefix's pages.
        needed: u64,
        /// Bytes that are pinned.
        pinned: u64,
        /// The most bytes that can be pinned.
        limit: u64,
    },
    /// The directory accepts no more names.
    #[error(transparent)]
    Refused(#[from] SaveError),
}

impl EngineHandle {
    fn saved(&self) -> Option<&SavedPrefixes> {
        self.shared.facts.saved.get()
    }

    /// The saved prefixes; none without a cache on disk.
    pub fn saved_prefixes(&self) -> Option<Vec<SavedPrefix>> {
        let of = self.saved()?;
        let own = of.store.saved().into_iter().filter(|saved| saved.tag == of.tag);
        let mut all: Vec<SavedPrefix> = own
            .filter_map(|saved| {
                let tokens = saved.data_bytes / size_of::<u32>();
                Some(SavedPrefix { name: saved.label?, tokens, created: saved.created })
            })
            .collect();
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Some(all)
    }

    /// Saves a prompt under a name. Its pages are pinned on disk when a request with a pin of [`crate::Pin::SAVED`] has computed them.
    ///
    /// # Errors
    /// [`SavePrefixError`].
    pub fn save_prefix(&self, name: &str, tokens: &[u32]) -> Result<(), SavePrefixError> {
        let of = self.saved().ok_or(SavePrefixError::Off)?;
        let key = PageKey::text(0, tokens);
        let (mut parts, mut unpinned, mut pinned) = (Vec::<Name>::new(), [0; 3], [0; 3]);
        for link in links(of.root, key) {
            for part in Part::ALL.into_iter().filter(|part| of.part_bytes[*part as usize] > 0) {
                let name = part_name(&of.tag, &link, part);
                let count = if of.store.is_pinned(&name) { &mut pinned } else { &mut unpinned };
                count[part as usize] += 1;
                parts.push(name);
            }
        }
        // Window pages and states exist at few positions of a prefix. One of each is counted, or none if one is pinned already.
        let count = |part: Part| match (part, pinned[part as usize]) {
            (Part::Whole, _) => unpinned[part as usize],
            (_, 0) => unpinned[part as usize].min(1),
            _ => 0,
        };
        let bytes = |part: Part| count(part) * of.store.disk_bytes(of.part_bytes[part as usize]);
        let (needed, limit) = (Part::ALL.into_iter().map(bytes).sum::<u64>(), of.store.pinned_bytes_max());
        let pinned = of.store.pinned_bytes_beside(&of.tag, name, &parts);
        if pinned + needed > limit {
            return Err(SavePrefixError::Budget { needed, pinned, limit });
        }
        let data = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        Ok(of.store.save_name(&of.tag, name, data, parts)?)
    }

    /// Returns the prompt that is saved under a name.
    pub fn load_prefix(&self, name: &str) -> Option<Vec<u32>> {
        let of = self.saved()?;
        let data = of.store.load_name(&of.tag, name)?;
        Some(data.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)).collect())
    }

    /// Removes a name and its pins. False if the name does not exist.
    pub fn remove_prefix(&self, name: &str) -> bool {
        self.saved().is_some_and(|of| of.store.remove_name(&of.tag, name))
    }
}
