//! Encoder outputs: embeddings that wait for prefill, and a cache of earlier ones.
//!
//! Pages of equal size are allocated once and move between the free list and the entries. So the pool's bytes never
//! change and nothing fragments. A request claims the outputs of all its items at once or none of them: a pool full of
//! half-served requests would wait for itself. Unused entries stay until their pages are needed; the oldest is evicted first.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{ContentKey, MediaError};

type Page = Box<[f32]>;

/// The byte-bounded pool of encoder outputs.
#[derive(Clone, Debug)]
pub struct OutputPool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    width: usize,
    page_rows: usize,
    pages_total: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Page>,
    /// Entries by key. An entry is idle if this map is its only owner.
    cached: HashMap<ContentKey, Cached>,
    /// Pages of idle entries.
    idle: usize,
    clock: u64,
    hits: u64,
    evictions: u64,
}

#[derive(Debug)]
struct Cached {
    entry: Arc<Entry>,
    last_used: u64,
}

#[derive(Debug)]
struct Entry {
    key: ContentKey,
    pages: Vec<Page>,
    rows: usize,
}

/// Figures for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputStats {
    /// Bytes of all pages; constant.
    pub bytes: u64,
    /// All pages.
    pub pages: usize,
    /// Free pages.
    pub pages_free: usize,
    /// Pages of idle entries, which are freed when they are needed.
    pub pages_idle: usize,
    /// Entries that a claim can find.
    pub entries: usize,
    /// Claims that found an entry in the pool.
    pub hits: u64,
    /// Entries that were evicted for their pages.
    pub evictions: u64,
}

impl OutputStats {
    /// Bytes of the pages of idle entries.
    pub fn idle_bytes(&self) -> u64 {
        (self.bytes * self.pages_idle as u64).checked_div(self.pages as u64).unwrap_or(0)
    }
}

/// The result of a claim for one item.
#[derive(Debug)]
pub enum Claim {
    /// The outputs, if the item was encoded before.
    Ready(Pinned),
    /// Room for the outputs, to be filled.
    Vacant(Vacant),
}

impl OutputPool {
    /// Returns a pool of `pages` pages, each `page_rows` rows of `width` values. All memory is allocated and touched here; values that
    /// are not written yet are NaN.
    ///
    /// # Errors
    /// [`MediaError::OutOfMemory`].
    pub fn new(width: usize, page_rows: usize, pages: usize) -> Result<Self, MediaError> {
        assert!(width > 0 && page_rows > 0, "a page holds at least one value");
        let refused = |_| MediaError::OutOfMemory {
            what: "encoder outputs",
            bytes: Self::bytes_for(width, page_rows, page_rows, pages),
            flag: "--encoder-output-bytes",
        };
        let mut free = Vec::new();
        free.try_reserve_exact(pages).map_err(refused)?;
        for _ in 0..pages {
            let mut page = Vec::new();
            page.try_reserve_exact(width * page_rows).map_err(refused)?;
            page.resize(width * page_rows, f32::NAN);
            free.push(page.into_boxed_slice());
        }
        // Every entry has at least one page.
        let mut cached = HashMap::new();
        cached.try_reserve(pages).map_err(refused)?;
        let state = Mutex::new(State { free, cached, ..State::default() });
        Ok(Self(Arc::new(Inner { width, page_rows, pages_total: pages, state })))
    }

    /// Bytes of a pool with room for `rows` rows in each of `items` items.
    pub fn bytes_for(width: usize, page_rows: usize, rows: usize, items: usize) -> u64 {
        (rows.div_ceil(page_rows) * items * page_rows * width * size_of::<f32>()) as u64
    }

    /// Values per row.
    pub fn width(&self) -> usize {
        self.0.width
    }

    /// Refuses a request if its outputs (rows of each item) exceed this pool even when it is empty.
    pub fn check(&self, items: impl IntoIterator<Item = usize>) -> Result<(), MediaError> {
        let pages: usize = items.into_iter().map(|rows| self.pages_of(rows)).sum();
        if pages <= self.0.pages_total {
            return Ok(());
        }
        Err(MediaError::OverLimit {
            what: "a request's media",
            asked: (pages * self.0.page_rows) as u64,
            limit: (self.0.pages_total * self.0.page_rows) as u64,
            unit: "tokens of encoder output",
            flag: "--encoder-output-bytes",
        })
    }

    /// Claims the outputs of all of a request's items (key and rows), or none.
    ///
    /// Equal keys of one request share an entry only if it exists already. Never waits.
    pub fn claim(&self, items: &[(ContentKey, usize)]) -> Result<Vec<Claim>, MediaError> {
        self.check(items.iter().map(|&(_, rows)| rows))?;
        let mut state = self.lock();
        let found: Vec<_> = items.iter().map(|(key, _)| self.pin(&mut state, key)).collect();
        let missing = items.iter().zip(&found).filter(|(_, pinned)| pinned.is_none());
        let pages: usize = missing.map(|(&(_, rows), _)| self.pages_of(rows)).sum();
        let busy = state.make_room(pages).err();
        if let Some(free) = busy {
            // Dropped pins take the lock to return their pages.
            drop(state);
            drop(found);
            let total = self.0.pages_total as u64;
            return Err(MediaError::OutputsBusy { asked: pages as u64, free: free as u64, total });
        }
        state.hits += found.iter().flatten().count() as u64;
        let claims = items.iter().zip(found).map(|(&(key, rows), pinned)| match pinned {
            Some(pinned) => Claim::Ready(pinned),
            None => {
                let at = state.free.len() - self.pages_of(rows);
                let entry = Entry { key, pages: state.free.split_off(at), rows };
                Claim::Vacant(Vacant { pool: self.clone(), entry: Some(entry) })
            }
        });
        Ok(claims.collect())
    }

    /// Returns the outputs of an item, to copy them. This counts neither as a hit nor as a use.
    pub fn look(&self, key: &ContentKey) -> Option<Pinned> {
        let mut state = self.lock();
        let cached = state.cached.get(key)?;
        let (idle, entry) = (cached.is_idle(), Arc::clone(&cached.entry));
        state.idle -= if idle { entry.pages.len() } else { 0 };
        Some(Pinned { pool: self.clone(), entry: Some(entry) })
    }

    /// Removes every entry. The pages of entries in use stay until their users drop them.
    pub fn clear(&self) {
        let mut state = self.lock();
        let State { cached, free, idle, .. } = &mut *state;
        for (_, Cached { entry, .. }) in cached.drain() {
            if let Some(mut entry) = Arc::into_inner(entry) {
                free.append(&mut entry.pages);
            }
        }
        *idle = 0;
    }

    /// Frees the memory: removes entries and frees free pages. No claim succeeds any more. Pages in use are freed only by a call
    /// after their users have dropped them.
    pub fn retire(&self) {
        self.clear();
        self.lock().free = Vec::new();
    }

    /// Figures for metrics.
    pub fn stats(&self) -> OutputStats {
        let state = self.lock();
        OutputStats {
            bytes: (self.0.pages_total * self.0.page_rows * self.0.width * size_of::<f32>()) as u64,
            pages: self.0.pages_total,
            pages_free: state.free.len(),
            pages_idle: state.idle,
            entries: state.cached.len(),
            hits: state.hits,
            evictions: state.evictions,
        }
    }

    fn pin(&self, state: &mut State, key: &ContentKey) -> Option<Pinned> {
        state.clock += 1;
        let cached = state.cached.get_mut(key)?;
        cached.last_used = state.clock;
        if cached.is_idle() {
            state.idle -= cached.entry.pages.len();
        }
        Some(Pinned { pool: self.clone(), entry: Some(Arc::clone(&cached.entry)) })
    }

    fn pages_of(&self, rows: usize) -> usize {
        rows.div_ceil(self.0.page_rows)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here calls foreign code under the lock, so a poisoned lock holds a sound state.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Cached {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.entry) == 1
    }
}

impl State {
    /// Evicts unused entries, oldest first, until `pages` are free. `Err` has the pages that could be freed; then nothing is evicted.
    fn make_room(&mut self, pages: usize) -> Result<(), usize> {
        if self.free.len() + self.idle < pages {
            return Err(self.free.len() + self.idle);
        }
        while self.free.len() < pages {
            let idle = self.cached.iter().filter(|(_, cached)| cached.is_idle());
            let Some(key) = idle.min_by_key(|(_, cached)| cached.last_used).map(|(key, _)| *key) else {
                return Err(self.free.len());
            };
            if let Some(cached) = self.cached.remove(&key) {
                self.idle -= cached.entry.pages.len();
                self.release(cached.entry);
                self.evictions += 1;
            }
        }
        Ok(())
    }

    /// Removes one owner of an entry. With the last owner its pages become free; if only the map is left, they are idle.
    fn release(&mut self, entry: Arc<Entry>) {
        let (key, pages, this) = (entry.key, entry.pages.len(), Arc::as_ptr(&entry));
        match Arc::into_inner(entry) {
            Some(mut entry) => self.free.append(&mut entry.pages),
            None => {
                // A newer entry of the same name may have taken its place.
                let is_this = |cached: &&Cached| std::ptr::eq(Arc::as_ptr(&cached.entry), this);
                let idle = self.cached.get(&key).filter(is_this).is_some_and(Cached::is_idle);
                self.idle += if idle { pages } else { 0 };
            }
        }
    }
}

/// Room for one item's outputs. If it is dropped unfilled, its pages are free again.
#[derive(Debug)]
pub struct Vacant {
    pool: OutputPool,
    /// `Some` until it is filled or dropped.
    entry: Option<Entry>,
}

impl Vacant {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.entry.as_ref().map_or(0, |entry| entry.rows)
    }

    /// Returns one row, to write it.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        let (width, page_rows) = (self.pool.0.width, self.pool.0.page_rows);
        let entry = self.entry.as_mut().expect("a vacant place has its pages until it is consumed");
        assert!(row < entry.rows, "row {row} of {}", entry.rows);
        &mut entry.pages[row / page_rows][row % page_rows * width..][..width]
    }

    /// Returns the entry that another request has filled in under the same key since the claim, if there is one. This room is
    /// then not needed.
    pub fn filled_meanwhile(self) -> Result<Pinned, Vacant> {
        let key = self.entry.as_ref().map(|entry| entry.key);
        let pinned = key.and_then(|key| self.pool.pin(&mut self.pool.lock(), &key));
        pinned.ok_or(self)
    }

    /// Enters the written rows into the pool: from now on claims of the key find them.
    pub fn fill(mut self) -> Pinned {
        let entry = Arc::new(self.entry.take().expect("a vacant place has its pages until it is consumed"));
        let mut state = self.pool.lock();
        state.clock += 1;
        let cached = Cached { entry: Arc::clone(&entry), last_used: state.clock };
        if let Some(older) = state.cached.remove(&entry.key) {
            if older.is_idle() {
                state.idle -= older.entry.pages.len();
            }
            state.release(older.entry);
        }
        state.cached.insert(entry.key, cached);
        drop(state);
        Pinned { pool: self.pool.clone(), entry: Some(entry) }
    }
}

impl Drop for Vacant {
    fn drop(&mut self) {
        if let Some(mut entry) = self.entry.take() {
            self.pool.lock().free.append(&mut entry.pages);
        }
    }
}

/// Outputs in use: their pages stay until this is dropped.
#[derive(Debug)]
pub struct Pinned {
    pool: OutputPool,
    /// `Some` until it is dropped.
    entry: Option<Arc<Entry>>,
}

impl Pinned {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.entry.as_ref().map_or(0, |entry| entry.rows)
    }

    /// Returns one row.
    pub fn row(&self, row: usize) -> &[f32] {
        let (width, page_rows) = (self.pool.0.width, self.pool.0.page_rows);
        let entry = self.entry.as_ref().expect("a pin has its entry until it is dropped");
        assert!(row < entry.rows, "row {row} of {}", entry.rows);
        &entry.pages[row / page_rows][row % page_rows * width..][..width]
    }

    /// Returns the values of a row.
    pub fn width(&self) -> usize {
        self.pool.0.width
    }

    /// Returns up to `most` rows from `first` on, as many as are contiguous.
    pub fn rows_from(&self, first: usize, most: usize) -> &[f32] {
        let (width, page_rows) = (self.pool.0.width, self.pool.0.page_rows);
        let entry = self.entry.as_ref().expect("a pin has its entry until it is dropped");
        assert!(first < entry.rows && most > 0, "row {first} of {}", entry.rows);
        let rows = most.min(entry.rows - first).min(page_rows - first % page_rows);
        &entry.pages[first / page_rows][first % page_rows * width..][..rows * width]
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take() {
            self.pool.lock().release(entry);
        }
    }
}

#[cfg(test)]
#[path = "outputs_tests.rs"]
mod tests;
