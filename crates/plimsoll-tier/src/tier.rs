//! A thread over a [`Store`]: its caller passes buffers to it and gets them back, and never waits for the disk.
//!
//! Buffers are allocated once, in a few sizes ([`Class`]). A blob without a free buffer is not written. Reads go before writes.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::stats::{Counts, Miss};
use crate::store::Store;
use crate::{Name, Tag};

/// How long a tier that is dropped waits for its last writes.
const LAST_WRITES: Duration = Duration::from_secs(5);

/// Buffers of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// Bytes of each buffer.
    pub bytes: usize,
    /// Number of buffers for blobs that are being written.
    pub writes: usize,
    /// Number of buffers for blobs that are being read.
    pub reads: usize,
}

impl Class {
    /// Bytes of all its buffers.
    pub const fn total_bytes(&self) -> usize {
        self.bytes * (self.writes + self.reads)
    }
}

#[derive(Debug)]
struct Buffer {
    class: usize,
    bytes: Box<[u8]>,
}

/// A finished read.
#[derive(Debug)]
pub struct Read {
    /// The ticket that was passed to [`Tier::read`].
    pub ticket: u64,
    /// Whether the buffer holds the blob.
    pub outcome: Result<(), Miss>,
    buffer: Buffer,
}

impl Read {
    /// The blob's bytes, if it was read.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer.bytes
    }
}

enum Done {
    Wrote(Buffer),
    Read(Read),
}

#[derive(Default)]
struct Jobs {
    reads: VecDeque<(u64, Name, Buffer)>,
    writes: VecDeque<(Name, Buffer)>,
    clear: Option<Option<Tag>>,
    stop: bool,
}

struct Shared {
    store: Arc<Store>,
    jobs: Mutex<Jobs>,
    wake: Condvar,
    /// True from a call of [`Tier::clear`] until all is removed; meanwhile no blob is found or written.
    clearing: AtomicBool,
}

/// A store and its thread.
pub struct Tier {
    shared: Arc<Shared>,
    done: Receiver<Done>,
    /// Free buffers of each class: for writes, for reads.
    free: Vec<[Vec<Buffer>; 2]>,
    /// Number of writes that were handed over and are not done.
    writing: usize,
    /// Finished reads that [`Tier::next_read`] has not returned yet.
    ready: VecDeque<Read>,
    /// Whether the thread has ended: no blob is read or written any more.
    dead: bool,
}

impl Tier {
    /// Starts the thread and allocates all buffers.
    ///
    /// # Errors
    /// The system refused the thread.
    pub fn start(store: Store, classes: &[Class]) -> io::Result<Self> {
        let make = |class: usize, count: usize, bytes: usize| {
            // Not zeros, for which the system would provide memory only on first use: the owner counts all bytes as held.
            (0..count).map(|_| Buffer { class, bytes: vec![1; bytes].into_boxed_slice() }).collect::<Vec<_>>()
        };
        let each = classes.iter().enumerate();
        let free: Vec<_> =
            each.map(|(at, class)| [make(at, class.writes, class.bytes), make(at, class.reads, class.bytes)]).collect();
        let count = |of: fn(&Class) -> usize| classes.iter().map(of).sum::<usize>();
        let (reads, writes) = (count(|class| class.reads), count(|class| class.writes));
        let jobs =
            Jobs { reads: VecDeque::with_capacity(reads), writes: VecDeque::with_capacity(writes), ..Jobs::default() };
        let wake = Condvar::new();
        let store = Arc::new(store);
        let shared = Arc::new(Shared { store, jobs: Mutex::new(jobs), wake, clearing: AtomicBool::new(false) });
        // The channel has a place for every buffer, so the thread never waits for its caller.
        let (sender, done) = sync_channel(reads + writes);
        let own = Arc::clone(&shared);
        std::thread::Builder::new().name("plimsoll-disk".into()).spawn(move || own.run(&sender))?;
        Ok(Self { shared, done, free, writing: 0, ready: VecDeque::with_capacity(reads), dead: false })
    }

    /// Returns the store, which other threads may use too.
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Returns the counters of the store.
    pub fn counts(&self) -> &Counts {
        self.shared.store.counts()
    }

    /// Whether the store has a blob.
    pub fn contains(&self, name: &Name) -> bool {
        !self.dead && !self.shared.clearing.load(Acquire) && self.shared.store.contains(name)
    }

    /// The same for a blob that is needed now, which counts as a use.
    pub fn touch(&self, name: &Name) -> bool {
        !self.dead && !self.shared.clearing.load(Acquire) && self.shared.store.touch(name)
    }

    /// Pins a blob of the store for this many minutes, or until it is removed ([`Store::pin`]).
    pub fn pin(&self, name: &Name, minutes: Option<u32>) -> bool {
        !self.dead && !self.shared.clearing.load(Acquire) && self.shared.store.pin(name, minutes)
    }

    /// The same for a blob of a saved name ([`Store::pin_saved_blob`]).
    pub fn pin_saved_blob(&self, name: &Name, id: u64) -> bool {
        !self.dead && !self.shared.clearing.load(Acquire) && self.shared.store.pin_saved_blob(name, id)
    }

    /// Whether a write of this class has a free buffer.
    pub fn can_write(&mut self, class: usize) -> bool {
        self.collect();
        !self.dead && !self.shared.clearing.load(Acquire) && !self.free[class][0].is_empty()
    }

    /// Hands over a blob that `fill` writes into a buffer; false if there is no free buffer.
    pub fn write(&mut self, class: usize, name: &Name, fill: impl FnOnce(&mut [u8])) -> bool {
        if !self.can_write(class) {
            return false;
        }
        let Some(mut buffer) = self.free[class][0].pop() else { return false };
        fill(&mut buffer.bytes);
        self.writing += 1;
        self.jobs(|jobs| jobs.writes.push_back((*name, buffer)));
        true
    }

    /// Asks for a blob; false if there is no free buffer. [`Self::next_read`] returns it, in the order of these calls.
    pub fn read(&mut self, class: usize, ticket: u64, name: &Name) -> bool {
        let Some(buffer) = self.free[class][1].pop().filter(|_| !self.dead) else { return false };
        self.jobs(|jobs| jobs.reads.push_back((ticket, *name, buffer)));
        true
    }

    /// Returns the next finished read; `None` if that takes longer than `wait`.
    pub fn next_read(&mut self, wait: Duration) -> Option<Read> {
        let until = Instant::now() + wait;
        loop {
            self.collect();
            let left = until.saturating_duration_since(Instant::now());
            match self.ready.pop_front() {
                Some(read) => return Some(read),
                None if left.is_zero() => return None,
                None => match self.done.recv_timeout(left) {
                    Ok(done) => self.take(done),
                    Err(RecvTimeoutError::Timeout) => return None,
                    Err(RecvTimeoutError::Disconnected) => {
                        self.dead = true;
                        return None;
                    }
                },
            }
        }
    }

    /// Gives the buffer of a read back.
    pub fn give_back(&mut self, read: Read) {
        let Read { buffer, .. } = read;
        self.free[buffer.class][1].push(buffer);
    }

    /// Whether the thread has ended by a panic: no blob is read or written any more.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Number of writes that are not done yet.
    pub fn writing(&mut self) -> usize {
        self.collect();
        self.writing
    }

    /// Removes every blob, or the blobs of one owner. From now on none of these is found.
    pub fn clear(&mut self, tag: Option<Tag>) {
        let clearing = &self.shared.clearing;
        self.jobs(|jobs| {
            clearing.store(true, Release);
            jobs.clear = Some(tag);
        });
    }

    fn jobs(&self, change: impl FnOnce(&mut Jobs)) {
        change(&mut self.shared.jobs.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_one();
    }

    fn collect(&mut self) {
        loop {
            match self.done.try_recv() {
                Ok(done) => self.take(done),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.dead = true;
                    return;
                }
            }
        }
    }

    fn take(&mut self, done: Done) {
        match done {
            Done::Wrote(buffer) => {
                self.writing -= 1;
                self.free[buffer.class][0].push(buffer);
            }
            Done::Read(read) => self.ready.push_back(read),
        }
    }
}

impl Drop for Tier {
    /// Waits for the last writes, unless the disk hangs.
    fn drop(&mut self) {
        self.jobs(|jobs| jobs.stop = true);
        let until = Instant::now() + LAST_WRITES;
        // The thread drops its end of the channel when it ends.
        while let Ok(done) = self.done.recv_timeout(until.saturating_duration_since(Instant::now())) {
            self.take(done);
        }
    }
}

impl Shared {
    fn run(&self, done: &SyncSender<Done>) {
        loop {
            let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
            let clear = jobs.clear.take();
            if let Some(tag) = clear {
                let dropped: Vec<Buffer> = jobs.writes.drain(..).map(|(_, buffer)| buffer).collect();
                drop(jobs);
                self.store.clear(tag);
                let again = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
                self.clearing.store(again.clear.is_some(), Release);
                drop(again);
                dropped.into_iter().for_each(|buffer| drop(done.send(Done::Wrote(buffer))));
                continue;
            }
            if let Some((ticket, name, mut buffer)) = jobs.reads.pop_front() {
                drop(jobs);
                let outcome = match self.clearing.load(Acquire) {
                    true => Err(Miss::Absent),
                    false => self.store.get(&name, &mut buffer.bytes),
                };
                let _ = done.send(Done::Read(Read { ticket, outcome, buffer }));
                continue;
            }
            if let Some((name, mut buffer)) = jobs.writes.pop_front() {
                drop(jobs);
                self.store.put_in_place(&name, &mut buffer.bytes);
                let _ = done.send(Done::Wrote(buffer));
                continue;
            }
            if jobs.stop {
                drop(jobs);
                return self.store.save();
            }
            drop(self.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner));
        }
    }
}
