//! The canary: memory that is held for nothing but to be given back when the system refuses an allocation, so that the refusal can be
//! handled instead of ending the process.
//!
//! It lies in slices, each a mapping of its own, and a refused allocation costs one. So a row of refusals is survived, one for each
//! slice, before anybody has had time to bring them back. What must not be in here: when it is given up (`heap`), when it
//! is brought back (the engine's watching thread).

use std::sync::Arc;

use crate::{Component, Ledger, OutOfMemory, Region};

/// Refusals in a row that a canary pays for.
pub const SLICES: usize = 8;

/// The slices, and the places of those that were given up.
#[derive(Debug)]
pub struct Canary {
    ledger: Arc<Ledger>,
    bytes: u64,
    slices: [Option<Region>; SLICES],
}

impl Canary {
    /// Maps and touches all slices, `bytes` together, and enters them in the ledger.
    ///
    /// # Errors
    /// When the system refuses one of them; those before it are given back.
    pub fn map(ledger: &Arc<Ledger>, bytes: u64) -> Result<Self, OutOfMemory> {
        if !ledger.count_allocation() {
            return Err(OutOfMemory::Sealed { component: Component::Canary.name(), bytes });
        }
        let mut canary = Self { ledger: Arc::clone(ledger), bytes, slices: [const { None }; SLICES] };
        for slice in 0..SLICES {
            canary.slices[slice] = Some(Self::map_slice(ledger, canary.slice_bytes(slice))?);
        }
        Ok(canary)
    }

    /// Bytes of the `slice`-th slice: the division's rest is the last one's.
    fn slice_bytes(&self, slice: usize) -> u64 {
        let each = self.bytes / SLICES as u64;
        if slice + 1 == SLICES { self.bytes - each * (SLICES as u64 - 1) } else { each }
    }

    /// Slices that are there.
    pub fn left(&self) -> usize {
        self.slices.iter().flatten().count()
    }

    /// Bytes that are there.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.slices.iter().flatten().map(|region| region.len() as u64).sum()
    }

    /// Gives one slice back to the system; its bytes, none when none was left.
    pub fn give(&mut self) -> Option<u64> {
        let region = self.slices.iter_mut().find_map(Option::take)?;
        Some(region.len() as u64)
    }

    /// Bytes of the largest slice that is missing, and the ledger it is entered in; none when all are there.
    pub(crate) fn wants(&self) -> Option<(Arc<Ledger>, u64)> {
        let missing = (0..SLICES).filter(|slice| self.slices[*slice].is_none());
        missing.map(|slice| self.slice_bytes(slice)).max().map(|bytes| (Arc::clone(&self.ledger), bytes))
    }

    /// Maps a slice of `bytes` again, its pages touched: the one allocation that is allowed after ready, since the plan still holds
    /// its place.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn map_slice(ledger: &Arc<Ledger>, bytes: u64) -> Result<Region, OutOfMemory> {
        Region::map_planned(ledger, Component::Canary, bytes)
    }

    /// Puts a slice where one of its size is missing, if it was mapped for this canary.
    pub(crate) fn put(&mut self, ledger: &Arc<Ledger>, region: Region) -> Option<Region> {
        let fits = |slice: &usize| self.slices[*slice].is_none() && self.slice_bytes(*slice) == region.len() as u64;
        match (0..SLICES).find(fits) {
            Some(slice) if Arc::ptr_eq(ledger, &self.ledger) => self.slices[slice].replace(region),
            _ => Some(region),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_go_one_by_one_and_come_back_after_the_seal() {
        let ledger = Arc::new(Ledger::new());
        ledger.plan(Component::Canary, 2 << 20);
        let committed = || ledger.row(Component::Canary).committed;
        let mut canary = Canary::map(&ledger, (1 << 20) - 3).unwrap();
        assert_eq!((canary.left(), committed()), (SLICES, (1 << 20) - 3));
        ledger.seal();
        let before = ledger.allocations();
        for left in (0..SLICES).rev() {
            assert_eq!(canary.give().is_some(), canary.left() == left);
            assert!(canary.wants().is_some());
        }
        assert_eq!((canary.give(), committed()), (None, 0));
        while let Some((ledger, bytes)) = canary.wants() {
            let slice = Canary::map_slice(&ledger, bytes).unwrap();
            assert!(canary.put(&ledger, slice).is_none());
        }
        assert_eq!((canary.left(), committed()), (SLICES, (1 << 20) - 3));
        let foreign = Canary::map_slice(&ledger, 4096).unwrap();
        assert!(canary.put(&ledger, foreign).is_some(), "nothing is missing");
        assert_eq!(ledger.allocations(), before, "they are in the plan");
        drop(canary);
        assert_eq!(committed(), 0);
    }
}
