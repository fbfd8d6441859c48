//! The emergency reserve ([`EmergencyReserve`]): memory that is held only to be given back when the system refuses an allocation.
//! The refusal can then be handled instead of ending the process.
//!
//! The reserve consists of blocks, each a mapping of its own. A refused allocation costs one block. The process therefore survives one
//! refusal for each block in a row before any is restored. Not in here: `heap` decides when the reserve is given up, and the engine's
//! watching thread decides when it is restored.

use std::sync::Arc;

use crate::{Component, Ledger, OutOfMemory, Region};

/// The number of refusals in a row that an emergency reserve pays for.
pub const BLOCKS: usize = 8;

/// The blocks, with `None` for each block that was given up.
#[derive(Debug)]
pub struct EmergencyReserve {
    ledger: Arc<Ledger>,
    bytes: u64,
    blocks: [Option<Region>; BLOCKS],
}

impl EmergencyReserve {
    /// Maps and touches all blocks, `bytes` together, and enters them in the ledger.
    ///
    /// # Errors
    /// When the system refuses a block; the blocks before it are given back.
    pub fn map(ledger: &Arc<Ledger>, bytes: u64) -> Result<Self, OutOfMemory> {
        if !ledger.count_allocation() {
            return Err(OutOfMemory::Sealed { component: Component::EmergencyReserve.name(), bytes });
        }
        let mut emergency_reserve = Self { ledger: Arc::clone(ledger), bytes, blocks: [const { None }; BLOCKS] };
        for block in 0..BLOCKS {
            emergency_reserve.blocks[block] = Some(Self::map_block(ledger, emergency_reserve.block_bytes(block))?);
        }
        Ok(emergency_reserve)
    }

    /// Bytes of the `block`-th block: the last one includes the remainder of the division.
    fn block_bytes(&self, block: usize) -> u64 {
        let each = self.bytes / BLOCKS as u64;
        if block + 1 == BLOCKS { self.bytes - each * (BLOCKS as u64 - 1) } else { each }
    }

    /// Number of blocks that are left.
    pub fn left(&self) -> usize {
        self.blocks.iter().flatten().count()
    }

    /// Bytes of the blocks that are left.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.blocks.iter().flatten().map(|region| region.len() as u64).sum()
    }

    /// Gives one block back to the system and returns its bytes; `None` when no block was left.
    pub fn give(&mut self) -> Option<u64> {
        let region = self.blocks.iter_mut().find_map(Option::take)?;
        Some(region.len() as u64)
    }

    /// Returns the bytes of the largest missing block, and the ledger that it is entered in; `None` when no block is missing.
    pub(crate) fn missing(&self) -> Option<(Arc<Ledger>, u64)> {
        let missing = (0..BLOCKS).filter(|block| self.blocks[*block].is_none());
        missing.map(|block| self.block_bytes(block)).max().map(|bytes| (Arc::clone(&self.ledger), bytes))
    }

    /// Maps a block of `bytes` again and touches its pages. It is the one allocation that is allowed after ready, since the plan still
    /// counts the block.
    ///
    /// # Errors
    /// When the system refuses.
    pub(crate) fn map_block(ledger: &Arc<Ledger>, bytes: u64) -> Result<Region, OutOfMemory> {
        Region::map_planned(ledger, Component::EmergencyReserve, bytes)
    }

    /// Puts a block in the place of a missing one of the same size, if it was mapped for the same ledger. Otherwise returns it.
    pub(crate) fn put(&mut self, ledger: &Arc<Ledger>, region: Region) -> Option<Region> {
        let fits = |block: &usize| self.blocks[*block].is_none() && self.block_bytes(*block) == region.len() as u64;
        match (0..BLOCKS).find(fits) {
            Some(block) if Arc::ptr_eq(ledger, &self.ledger) => self.blocks[block].replace(region),
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
        ledger.plan(Component::EmergencyReserve, 2 << 20);
        let committed = || ledger.row(Component::EmergencyReserve).committed;
        let mut emergency_reserve = EmergencyReserve::map(&ledger, (1 << 20) - 3).unwrap();
        assert_eq!((emergency_reserve.left(), committed()), (BLOCKS, (1 << 20) - 3));
        ledger.seal();
        let before = ledger.allocations();
        for left in (0..BLOCKS).rev() {
            assert_eq!(emergency_reserve.give().is_some(), emergency_reserve.left() == left);
            assert!(emergency_reserve.missing().is_some());
        }
        assert_eq!((emergency_reserve.give(), committed()), (None, 0));
        while let Some((ledger, bytes)) = emergency_reserve.missing() {
            let block = EmergencyReserve::map_block(&ledger, bytes).unwrap();
            assert!(emergency_reserve.put(&ledger, block).is_none());
        }
        assert_eq!((emergency_reserve.left(), committed()), (BLOCKS, (1 << 20) - 3));
        let foreign = EmergencyReserve::map_block(&ledger, 4096).unwrap();
        assert!(emergency_reserve.put(&ledger, foreign).is_some(), "nothing is missing");
        assert_eq!(ledger.allocations(), before, "they are in the plan");
        drop(emergency_reserve);
        assert_eq!(committed(), 0);
    }
}
