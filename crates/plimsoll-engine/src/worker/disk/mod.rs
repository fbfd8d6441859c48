//! The disk cache on the engine thread: parts of prefixes are written after a step, and read before their request is admitted. `outputs.rs`
//! does the same with encoder outputs.
//!
//! A [`Tier`] accesses the disk on its own thread. The engine thread copies parts between pools and the tier's buffers, between two steps,
//! and never waits. Without a free buffer a part stays in the list of unsaved parts.

mod outputs;
mod read;
mod save;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use plimsoll_tier::{Miss, Name, Tag, Tier, saved_id, tag_of};
use prometheus_client::metrics::counter::Counter;

use self::outputs::Outputs;
use self::read::{Blocked, ReadAhead};
use super::Worker;
use crate::cache::{Link, OUTPUT_KIND, PAGE_TOKENS, PageKey, Part, Pin, PinEnd, SavedPrefixes, links, part_name};
use crate::metrics::CAUSES;
use crate::plan::disk::{self as plan_of, DiskPlan};
use crate::request::state::RequestState;
use crate::runner::Runner;
use crate::schedule::scheduler::Seq;
use crate::shared::Shared;

/// The time without reads after a read that took too long, so that requests do not wait for a hung disk one after another.
const PAUSE: Duration = Duration::from_secs(60);

/// The most parts that are pinned between two steps.
const PINS_AT_ONCE: usize = 128;

/// Faults of files, in the order of the first [`CAUSES`].
const FAULTS: [Miss; 3] = [Miss::Gone, Miss::Damaged, Miss::Failed];

/// Reasons not to read a prefix or a medium from disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unread {
    /// Computing it is faster.
    Slow,
    /// The disk took too long.
    Late,
    /// Running requests need the pages.
    Room,
    /// The disk took too long for another one shortly before.
    Paused,
}

/// The prefix cache on disk.
pub(crate) struct Disk {
    tier: Tier,
    /// The link of the empty prompt.
    root: Link,
    tag: Tag,
    /// The buffer class of each kind of part.
    class_of: [Option<usize>; 3],
    /// Bytes of each kind of part.
    part_bytes: [usize; 3],
    /// The prefix that is being read.
    reading: Option<ReadAhead>,
    outputs: Outputs,
    /// A request that waits for free pages.
    blocked: Option<Blocked>,
    /// The links of the prefix that is being read, and buffers for those of the next.
    links: [Vec<Link>; 2],
    /// Tickets of reads that were issued since start.
    tickets: u64,
    /// Reads that have not completed.
    outstanding: usize,
    /// Seconds to compute a prompt's row; 0 until measured.
    row_seconds: f64,
    read_always: bool,
    /// Tokens of prefixes that were read.
    tokens: u64,
    /// Parts that left memory before they were written.
    lost: u64,
    unread: [u64; 4],
    /// The end of a pause in reading, after the disk took too long.
    paused: Option<Instant>,
    /// Parts that are to be pinned once they are written.
    pins: VecDeque<(Name, PinEnd)>,
}

/// The parts of a disk cache, to be sent to the engine thread.
pub(crate) struct DiskParts {
    /// The directory and its thread.
    pub tier: Tier,
    /// The link of the empty prompt.
    pub root: Link,
    /// A hash of everything that decides the bits of a page.
    pub print: [u8; 32],
    /// Sizes and numbers of its buffers.
    pub plan: DiskPlan,
    /// Tokens of the longest request.
    pub context: usize,
}

impl Disk {
    /// Builds the cache from its parts.
    pub fn new(parts: DiskParts) -> Self {
        let DiskParts { tier, root, print, plan, context } = parts;
        let room = || Vec::with_capacity(context.div_ceil(PAGE_TOKENS));
        Self {
            tier,
            root,
            tag: tag_of(&print),
            class_of: plan.class_of,
            part_bytes: plan.class_of.map(|class| class.map_or(0, |class| plan.classes[class].bytes)),
            reading: None,
            outputs: Outputs::new(&plan),
            blocked: None,
            links: [room(), room()],
            tickets: 0,
            outstanding: 0,
            row_seconds: 0.0,
            read_always: plan.read_always,
            tokens: 0,
            lost: 0,
            unread: [0; 4],
            paused: None,
            pins: VecDeque::with_capacity(plan_of::pins_max(context)),
        }
    }

    fn name(&self, link: &Link, part: Part) -> Name {
        part_name(&self.tag, link, part)
    }

    /// Returns the parts of the cache with which other threads save prefixes under names.
    pub fn saved_prefixes(&self) -> SavedPrefixes {
        let store = std::sync::Arc::clone(self.tier.store());
        SavedPrefixes { store, root: self.root, tag: self.tag, part_bytes: self.part_bytes }
    }

    /// Measures a step without decoding sequences: `rows` rows of prompts took `seconds`.
    pub fn computed(&mut self, rows: usize, seconds: f64) {
        if rows >= PAGE_TOKENS {
            let now = seconds / rows as f64;
            self.row_seconds = if self.row_seconds == 0.0 { now } else { self.row_seconds * 0.875 + now * 0.125 };
        }
    }

    /// Pauses reads after one that took too long, until the pause is over and the disk has answered.
    fn pause(&mut self, now: Instant) {
        let first = self.paused.replace(now + PAUSE).is_none();
        if first {
            let seconds = PAUSE.as_secs();
            tracing::warn!(
                "the cache on disk took too long: prefixes and encoder outputs are computed for the next {seconds} s"
            );
        }
    }

    /// Whether reads are paused.
    fn is_paused(&mut self, now: Instant) -> bool {
        self.paused = self.paused.filter(|until| now < *until || self.outstanding > 0);
        self.paused.is_some()
    }

    /// Pins the parts of a prefix that are or will be on disk, for `minutes` or while it is saved under a name ([`Pin::SAVED`]). If there
    /// are too many parts, the oldest are dropped.
    pub fn pin(&mut self, key: PageKey<'_>, minutes: u32) {
        let (mut parts, mut last) = (0, None);
        for link in links(self.root, key) {
            for part in Part::ALL.into_iter().filter(|part| self.class_of[*part as usize].is_some()) {
                if self.pins.len() == self.pins.capacity() {
                    self.pins.pop_front();
                }
                let name = self.name(&link, part);
                self.pins.push_back((name, PinEnd::Minutes(minutes)));
                (parts, last) = (parts + 1, Some(name));
            }
        }
        if let (Pin::SAVED, Some(id)) = (minutes, saved_id(last.as_slice())) {
            self.pins.iter_mut().rev().take(parts).for_each(|(_, pinned)| *pinned = PinEnd::Removed(id));
        }
    }

    /// Pins parts that are on disk by now. `all`: no more parts are being written.
    fn apply_pins(&mut self, all: bool) {
        for _ in 0..self.pins.len().min(PINS_AT_ONCE) {
            let Some((name, pinned)) = self.pins.pop_front() else { return };
            if self.tier.contains(&name) {
                match pinned {
                    PinEnd::Minutes(minutes) => self.tier.pin(&name, Some(minutes)),
                    PinEnd::Removed(id) => self.tier.pin_saved_blob(&name, id),
                };
            } else if !all {
                self.pins.push_back((name, pinned));
            }
        }
    }

    /// Drops the current read: the pools start over, so its pages are gone.
    pub fn forget(&mut self) {
        self.reading.take().into_iter().for_each(ReadAhead::forget);
        self.outputs.forget();
    }

    /// Updates the metrics. `waiting`: parts of prefixes that wait for a buffer.
    pub fn refresh(&self, shared: &Shared, waiting: usize) {
        let (counts, told) = (self.tier.counts(), &shared.metrics.disk);
        let load = |value: &std::sync::atomic::AtomicU64| value.load(Relaxed);
        let [gone, damaged, failed] = FAULTS.map(|miss| counts.misses(miss));
        let [slow, late, room, paused] = self.unread;
        let [too_large, day_limit, unwritten, stuck] = counts.refused.each_ref().map(load);
        let now = [
            self.tokens,
            load(&counts.hit_bytes),
            gone,
            damaged,
            failed,
            slow,
            late,
            room,
            paused,
            load(&counts.written_bytes),
            load(&counts.payload_bytes),
            load(&counts.collected),
            too_large,
            day_limit,
            unwritten + stuck,
            self.lost,
            self.outputs.media,
        ];
        let raise = |counter: &Counter, now: u64| counter.inc_by(now - counter.get());
        told.counters().into_iter().zip(now).for_each(|(counter, now)| _ = raise(counter, now));
        for (kind, counts) in counts.kinds.iter().enumerate() {
            raise(&told.kinds.hits(kind), load(&counts.hits));
            for (miss, cause) in FAULTS.into_iter().zip(CAUSES) {
                raise(&told.kinds.misses(kind, cause), load(&counts.misses[miss as usize]));
            }
            let held = [&counts.blobs, &counts.bytes].map(load);
            told.kinds.held(kind).iter().zip(held).for_each(|(gauge, now)| _ = gauge.set(now as i64));
        }
        let [slow, late, _, paused] = self.outputs.unread;
        for (cause, now) in CAUSES.into_iter().skip(FAULTS.len()).zip([slow, late, paused]) {
            raise(&told.kinds.misses(OUTPUT_KIND, cause), now);
        }
        let now = [&counts.blobs, &counts.bytes, &counts.read_rate, &counts.write_rate, &counts.pinned_bytes].map(load);
        let waiting = (waiting + self.outputs.waiting()) as u64;
        for (gauge, now) in told.gauges().into_iter().zip(now.into_iter().chain([waiting])) {
            gauge.set(now as i64);
        }
    }
}

impl<R: Runner> Worker<R> {
    /// Continues the current read, and looks for the next prefix.
    pub(super) fn read_from_disk(&mut self) {
        let Self { disk: Some(disk), scheduler, runner, cache, limits, .. } = self else { return };
        disk.fill(runner, scheduler, (cache, limits), Duration::ZERO);
        disk.look(scheduler, cache, limits);
    }

    /// Waits a moment for the current read while no sequence runs.
    pub(super) fn wait_for_disk(&mut self, wait: Duration) {
        let Self { disk: Some(disk), scheduler, runner, cache, limits, .. } = self else { return };
        disk.fill(runner, scheduler, (cache, limits), wait);
    }

    /// Whether encoder outputs are being read, and the blocks of them that were read since start.
    pub(super) fn outputs_read(&self) -> (bool, u64) {
        self.disk.as_ref().map_or((false, 0), |disk| (disk.outputs.reads(), disk.outputs.blocks))
    }

    /// Copies unsaved parts and outputs into free buffers of the disk's thread.
    pub(super) fn save_to_disk(&mut self) {
        let Self { disk: Some(disk), cache, runner, encoding, .. } = self else { return };
        disk.save(&mut cache.borrow_mut(), runner);
        encoding.iter().for_each(|encoding| disk.save_outputs(&encoding.spec.outputs));
    }

    /// Whether parts or outputs are unsaved.
    pub(super) fn saves_to_disk(&self) -> bool {
        let unsaved = |disk: &Disk| disk.outputs.unsaved() || self.cache.borrow().unsaved() > 0;
        self.disk.as_ref().is_some_and(|disk| !disk.tier.is_dead() && unsaved(disk))
    }

    /// Whether a buffer is not written yet.
    fn writes_to_disk(&mut self) -> bool {
        self.disk.as_mut().is_some_and(|disk| disk.tier.writing() > 0 && !disk.tier.is_dead())
    }

    /// Saves the rest before the engine ends and waits until it is written, unless the disk is too slow.
    pub(super) fn flush_disk(&mut self) {
        let until = Instant::now() + FLUSH_LIMIT;
        self.save_to_disk();
        while (self.saves_to_disk() || self.writes_to_disk()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            // Nothing is written while reads are outstanding.
            self.read_from_disk();
            self.save_to_disk();
        }
    }

    /// Pins the prefixes of a request that has ended well, in memory and on disk.
    pub(super) fn pin(&mut self, seq: &Seq<RequestState>) {
        for (key, minutes) in seq.pinned() {
            if minutes != Pin::SAVED {
                let refused = self.cache.borrow_mut().pin(key, minutes);
                self.shared.metrics.pins.inc();
                self.shared.metrics.unpinned_pages.inc_by(refused as u64);
            }
            if let Some(disk) = self.disk.as_mut().filter(|_| key.salt == 0) {
                disk.pin(key, minutes);
            }
        }
    }

    /// Removes this model's files from the disk.
    pub(super) fn clear_disk(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.reading = None;
            disk.outputs.clear();
            disk.pins.clear();
            disk.tier.clear(Some(disk.tag));
        }
    }
}

/// The longest time that an ending engine waits for unsaved data to be written.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
