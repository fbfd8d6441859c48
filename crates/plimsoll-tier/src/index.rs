//! The blobs of a store, in the order of their last use. No operation allocates after [`Index::new`].

use hashbrown::HashTable;

use crate::{Expiring, KINDS, Name, kind_of};

/// The end of a linked list.
const NIL: u32 = u32::MAX;

/// Number of places that [`Index::batch`] visits.
const BATCH: usize = 256;

/// One blob.
#[derive(Clone, Copy, Debug)]
struct Slot {
    name: Name,
    /// Bytes of the disk that it takes.
    bytes: u64,
    /// Seconds since 1970 at which its file was last touched.
    touched: u64,
    prev: u32,
    next: u32,
    /// The minute since 1970 until which it is pinned.
    pinned_until: u32,
    /// Reads in a row that the system refused.
    failures: u8,
}

/// Number of blobs of a kind, and their bytes of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// Blobs.
    pub blobs: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Names and sizes of blobs, the coldest first.
#[derive(Debug)]
pub struct Index {
    slots: Vec<Slot>,
    table: HashTable<u32>,
    free: u32,
    coldest: u32,
    warmest: u32,
    bytes: u64,
    kinds: [Sum; KINDS],
    entries_max: usize,
    /// Pinned bytes, and number of pinned blobs.
    pinned: [Expiring; 2],
}

/// A part of the name: names are hashes themselves.
fn hash(name: &Name) -> u64 {
    let mut part = [0; 8];
    part.copy_from_slice(&name[16..24]);
    u64::from_le_bytes(part)
}

impl Index {
    /// An empty index with room for `entries_max` blobs.
    pub fn new(entries_max: usize) -> Self {
        Self {
            slots: Vec::with_capacity(entries_max),
            // Half full at most: removed places are then cleared in place, and the table never grows.
            table: HashTable::with_capacity(2 * entries_max),
            free: NIL,
            coldest: NIL,
            warmest: NIL,
            bytes: 0,
            kinds: [Sum::default(); KINDS],
            entries_max,
            pinned: Default::default(),
        }
    }

    /// Bytes of host memory that an index of `entries_max` blobs takes: the table is a power of two, with a byte beside each place.
    pub const fn bytes_for(entries_max: usize) -> usize {
        let places = (2 * entries_max * 8 / 7 + 4).next_power_of_two();
        entries_max * size_of::<Slot>() + places * (size_of::<u32>() + 1) + 64
    }

    /// Number of blobs.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether there is no blob.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Whether there is no room for another blob.
    pub fn is_full(&self) -> bool {
        self.len() == self.entries_max
    }

    /// Bytes of the disk of all blobs.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Blobs and bytes of each kind.
    pub fn kinds(&self) -> &[Sum; KINDS] {
        &self.kinds
    }

    fn find(&self, name: &Name) -> Option<u32> {
        self.table.find(hash(name), |at| self.slots[*at as usize].name == *name).copied()
    }

    /// Whether the index has a blob.
    pub fn contains(&self, name: &Name) -> bool {
        self.find(name).is_some()
    }

    /// Adds a blob as the warmest one. False if the index already has it or is full.
    pub fn insert(&mut self, name: &Name, bytes: u64, touched: u64) -> bool {
        if self.is_full() || self.contains(name) {
            return false;
        }
        let slot = Slot { name: *name, bytes, touched, prev: NIL, next: NIL, pinned_until: 0, failures: 0 };
        let at = match self.free {
            NIL => {
                self.slots.push(slot);
                self.slots.len() as u32 - 1
            }
            at => {
                self.free = self.slots[at as usize].next;
                self.slots[at as usize] = slot;
                at
            }
        };
        let slots = &self.slots;
        self.table.insert_unique(hash(name), at, |at| hash(&slots[*at as usize].name));
        self.bytes += bytes;
        let kind = &mut self.kinds[kind_of(name)];
        (kind.blobs, kind.bytes) = (kind.blobs + 1, kind.bytes + bytes);
        self.push(at);
        true
    }

    /// Makes a blob the warmest one. Returns the time at which its file was last touched, in seconds since 1970.
    pub fn warm(&mut self, name: &Name) -> Option<u64> {
        let at = self.find(name)?;
        self.unlink(at);
        self.push(at);
        Some(self.slots[at as usize].touched)
    }

    /// Sets the time at which a blob's file was touched.
    pub fn touched(&mut self, name: &Name, seconds: u64) {
        if let Some(at) = self.find(name) {
            self.slots[at as usize].touched = seconds;
        }
    }

    /// Notes whether a blob could be read. Returns the number of failed reads in a row.
    pub fn was_read(&mut self, name: &Name, read: bool) -> u8 {
        let Some(at) = self.find(name) else { return 0 };
        let failures = &mut self.slots[at as usize].failures;
        *failures = if read { 0 } else { failures.saturating_add(1) };
        *failures
    }

    /// The bytes of the disk that a blob takes.
    pub fn bytes_of(&self, name: &Name) -> Option<u64> {
        self.find(name).map(|at| self.slots[at as usize].bytes)
    }

    /// Adds the names of a batch of blobs to `names`: the blobs in places from `from` on. Returns the beginning of the next batch; `None`
    /// at the end. Blobs that are added between two batches can be left out.
    pub fn batch(&self, from: usize, names: &mut Vec<Name>) -> Option<usize> {
        let places = self.slots.get(from..)?;
        for (at, slot) in (from..).zip(places).take(BATCH) {
            // A removed blob stays in its place until another blob takes the place.
            names.extend((self.find(&slot.name) == Some(at as u32)).then_some(slot.name));
        }
        (places.len() > BATCH).then_some(from + BATCH)
    }

    /// Bytes of a blob that is pinned; 0 for any other.
    pub fn pinned_bytes_of(&self, name: &Name) -> u64 {
        let slot = self.find(name).map(|at| self.slots[at as usize]);
        slot.filter(|slot| self.pinned[0].is_pinned(slot.pinned_until)).map_or(0, |slot| slot.bytes)
    }

    /// Sets the current minute since 1970; pins that have ended count no longer.
    pub fn advance(&mut self, minute: u32) {
        self.pinned.iter_mut().for_each(|kept| kept.advance(minute));
    }

    /// Bytes of blobs that are pinned.
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned[0].total()
    }

    /// Pins a blob for this many minutes, or until it is removed: [`Self::coldest`] then skips it. A longer pin stays as it is. False if
    /// there is no such blob, or if more than `bytes_max` bytes or a quarter of all blobs would be pinned.
    pub fn pin(&mut self, name: &Name, minutes: Option<u32>, bytes_max: u64) -> bool {
        let Some(at) = self.find(name) else { return false };
        let Slot { bytes, pinned_until: before, .. } = self.slots[at as usize];
        let until = minutes.map_or(Expiring::NEVER, |minutes| self.pinned[0].after(minutes));
        if before >= until {
            return true;
        }
        let amounts = [bytes, 1];
        self.pinned.iter_mut().zip(amounts).for_each(|(kept, amount)| kept.remove(before, amount));
        let fits = self.pinned[0].total() + bytes <= bytes_max && self.pinned[1].total() < self.entries_max as u64 / 4;
        let until = if fits { until } else { before };
        self.pinned.iter_mut().zip(amounts).for_each(|(kept, amount)| kept.add(until, amount));
        self.slots[at as usize].pinned_until = until;
        fits
    }

    /// Ends the pin of a blob.
    pub fn unpin(&mut self, name: &Name) {
        let Some(at) = self.find(name) else { return };
        let slot = &mut self.slots[at as usize];
        let (until, amounts) = (std::mem::take(&mut slot.pinned_until), [slot.bytes, 1]);
        self.pinned.iter_mut().zip(amounts).for_each(|(kept, amount)| kept.remove(until, amount));
    }

    /// Removes a blob. Returns its bytes of the disk.
    pub fn remove(&mut self, name: &Name) -> Option<u64> {
        self.unpin(name);
        let slots = &self.slots;
        let entry = self.table.find_entry(hash(name), |at| slots[*at as usize].name == *name).ok()?;
        let (at, _) = entry.remove();
        self.unlink(at);
        let bytes = self.slots[at as usize].bytes;
        self.slots[at as usize].next = self.free;
        self.free = at;
        self.bytes -= bytes;
        let kind = &mut self.kinds[kind_of(name)];
        (kind.blobs, kind.bytes) = (kind.blobs - 1, kind.bytes - bytes);
        Some(bytes)
    }

    /// Returns the least recently used blob that is not pinned; a pinned blob if there is no other. Pinned blobs that it skips become the
    /// warmest.
    pub fn coldest(&mut self) -> Option<Name> {
        for _ in 0..self.len() {
            let Slot { name, pinned_until, .. } = *self.slots.get(self.coldest as usize)?;
            if !self.pinned[0].is_pinned(pinned_until) {
                return Some(name);
            }
            self.warm(&name);
        }
        self.slots.get(self.coldest as usize).map(|slot| slot.name)
    }

    fn push(&mut self, at: u32) {
        let last = self.warmest;
        (self.slots[at as usize].prev, self.slots[at as usize].next) = (last, NIL);
        match self.slots.get_mut(last as usize) {
            Some(before) => before.next = at,
            None => self.coldest = at,
        }
        self.warmest = at;
    }

    fn unlink(&mut self, at: u32) {
        let Slot { prev, next, .. } = self.slots[at as usize];
        match self.slots.get_mut(prev as usize) {
            Some(before) => before.next = next,
            None => self.coldest = next,
        }
        match self.slots.get_mut(next as usize) {
            Some(after) => after.prev = prev,
            None => self.warmest = prev,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u64) -> Name {
        let mut name = [0; 32];
        // Few values in the bytes that the table hashes, so that names collide.
        name[16] = (n % 5) as u8;
        name[31] = (n % 4) as u8;
        name[..8].copy_from_slice(&n.to_le_bytes());
        name
    }

    #[test]
    fn kept_blobs_leave_last_and_within_their_bounds() {
        let mut index = Index::new(40);
        index.advance(1000);
        (0..40).for_each(|n| assert!(index.insert(&name(n), 10, 0)));
        assert!(index.pin(&name(0), Some(5), 100) && index.pin(&name(1), None, 100));
        assert!(!index.pin(&name(2), Some(5), 29) && !index.pin(&name(99), Some(5), 100));
        assert_eq!((index.pinned_bytes(), index.coldest()), (20, Some(name(2))));
        assert!((3..20).all(|n| index.pin(&name(n), Some(5), 1000) == (n < 11)), "a quarter of the blobs");
        index.advance(1006);
        assert_eq!(index.pinned_bytes(), 10, "what is kept for good");
        assert!(index.pin(&name(1), Some(5), 100));
        assert_eq!(index.pinned_bytes(), 10);
        let mut order = Vec::new();
        while let Some(coldest) = index.coldest() {
            index.remove(&coldest);
            order.push(coldest);
        }
        assert_eq!((order.len(), *order.last().unwrap(), index.pinned_bytes()), (40, name(1), 0));
    }

    /// Compares the index with a plain list, over thousands of steps.
    #[test]
    fn blobs_leave_in_the_order_of_their_last_use() {
        let (mut index, mut list, mut dice) = (Index::new(37), Vec::<(u64, u64)>::new(), 1_u64);
        let places = index.table.allocation_size();
        for _ in 0..20_000 {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (what, n) = (dice >> 60, (dice >> 33) % 60);
            let known = list.iter().position(|(other, _)| *other == n);
            match what {
                0..8 => {
                    assert_eq!(index.insert(&name(n), n + 1, 0), known.is_none() && list.len() < 37);
                    if known.is_none() && list.len() < 37 {
                        list.push((n, n + 1));
                    }
                }
                8..12 => {
                    assert_eq!(index.warm(&name(n)).is_some(), known.is_some());
                    known.into_iter().for_each(|at| {
                        let entry = list.remove(at);
                        list.push(entry);
                    });
                }
                12..14 => {
                    assert_eq!(index.remove(&name(n)), known.map(|at| list.remove(at).1));
                }
                _ => {
                    assert_eq!(index.coldest(), list.first().map(|(n, _)| name(*n)));
                    if let Some(coldest) = index.coldest() {
                        index.remove(&coldest);
                        list.remove(0);
                    }
                }
            }
            assert_eq!((index.len(), index.bytes()), (list.len(), list.iter().map(|(_, bytes)| bytes).sum()));
            assert!(list.iter().all(|(n, _)| index.contains(&name(*n))));
            let of_kind = |kind: usize| list.iter().filter(move |(n, _)| *n as usize % KINDS == kind);
            for (kind, sum) in index.kinds().iter().enumerate() {
                let bytes = of_kind(kind).map(|(_, bytes)| bytes).sum();
                assert_eq!(*sum, Sum { blobs: of_kind(kind).count() as u64, bytes });
            }
        }
        assert!(index.slots.len() <= 37 && index.table.allocation_size() == places, "neither grows");
    }
}
