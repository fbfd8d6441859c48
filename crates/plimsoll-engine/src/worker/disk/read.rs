//! Reads the prefix of a waiting request from disk before its turn, if that is faster than computing it.
//!
//! One prefix is read at a time, so that requests with a common prefix read it once. Its pages are read in order, as many at once as there
//! are buffers. When all are read they enter the prefix cache, where the request finds them as usual.

use std::time::{Duration, Instant};

use plimsoll_tier::Read;

use super::{Disk, Unread};
use crate::cache::lease::SharedCache;
use crate::cache::{KvCache, PAGE_TOKENS, PageKey, Part, Restore, links};
use crate::runner::Runner;
use crate::schedule::scheduler::{DiskRead, Scheduler, StepLimits};

/// The most waiting requests that are looked up on disk in one iteration.
const LOOKS: usize = 16;
/// The least time after which a prefix is given up. Otherwise it is twice the time of computing the prefix.
pub(super) const LIMIT_MIN: Duration = Duration::from_secs(2);
/// The longest time that a request waits for free pages for its prefix. Then the prefix is computed.
const ROOM_LIMIT: Duration = Duration::from_secs(5);
/// The time between two checks for free pages.
const ROOM_EVERY: Duration = Duration::from_millis(20);
/// One in this many prefixes that would be slow to read is read.
pub(super) const SLOW_PROBE: u64 = 32;
/// The longest time between two parts, after which a prefix is given up.
pub(super) const STALL_LIMIT: Duration = Duration::from_secs(10);
/// The longest time of a read. It also applies where the time of computing is not known.
pub(super) const LIMIT_UNKNOWN: Duration = Duration::from_secs(30);

/// The part of a prompt that is worth reading.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    /// Pages of the prefix.
    pages: usize,
    /// Pages of the prefix that the prefix cache has.
    known: usize,
    /// Window pages to read: those of the last pages.
    windows: usize,
    /// Whether the state after the last page is to be read.
    state: bool,
    /// The time of computing the prefix; none before it was measured.
    computing: Option<Duration>,
}

impl Wanted {
    /// Parts to read.
    fn parts(&self) -> usize {
        self.pages - self.known + self.windows + usize::from(self.state)
    }

    /// The `i`-th part, and its page.
    fn part(&self, i: usize) -> (Part, usize) {
        let whole = self.pages - self.known;
        if i < whole {
            (Part::Whole, self.known + i)
        } else if i < whole + self.windows {
            (Part::Window, self.pages - self.windows + i - whole)
        } else {
            (Part::State, self.pages - 1)
        }
    }
}

/// A prefix that is being read.
pub(super) struct ReadAhead {
    /// Arrival number of the request that waits for it.
    order: u64,
    wanted: Wanted,
    restore: Restore,
    /// The ticket of its first part.
    ticket: u64,
    /// Parts that were requested, and parts that are in their pools.
    asked: usize,
    filled: usize,
    /// A part could not be read, or no page was free for it.
    failed: bool,
    until: Instant,
    /// Time of the last part, or of the first request.
    moved: Instant,
}

impl ReadAhead {
    /// Drops it without releasing pages: the pools start over.
    pub fn forget(self) {
        self.restore.forget();
    }
}

/// Pages and window pages that must stay free for the next step. The oldest sequence gets its own in any case (I5): newer ones release all
/// their pages for it.
#[derive(Clone, Copy, Debug, Default)]
struct Spare {
    pages: usize,
    windows: usize,
}

impl Spare {
    fn of<T>(scheduler: &Scheduler<T>, cache: &KvCache, limits: &StepLimits) -> Self {
        let running = scheduler.running().len();
        let mut waiting = scheduler.waiting();
        if running == 0 && (waiting.len() == 1 || waiting.all(|seq| seq.disk_read == DiskRead::Waits)) {
            return Self::default();
        }
        let windows = cache.windows.as_ref().map_or(0, |windows| windows.need(limits.rows) + 2 * running);
        Self { pages: limits.rows.div_ceil(PAGE_TOKENS) + 2 + 2 * running, windows }
    }

    /// Whether the spare pages are available, beside `pages` pages and `windows` window pages.
    fn is_there(self, cache: &KvCache, pages: usize, windows: usize) -> bool {
        let there = cache.windows.as_ref().map_or(usize::MAX, |windows| windows.pool().available());
        cache.pool.available() >= self.pages + pages && there >= self.windows + windows
    }
}

/// A request that found too few free pages for its prefix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocked {
    order: u64,
    since: Instant,
    /// Time of the next check.
    again: Instant,
}

impl Disk {
    /// Copies read parts into their pools, and requests more. Ends the read when all parts are there, or no more will come.
    pub(super) fn fill<R: Runner, T>(
        &mut self,
        runner: &mut R,
        scheduler: &mut Scheduler<T>,
        (cache, limits): (&SharedCache, &StepLimits),
        wait: Duration,
    ) {
        let spare = Spare::of(scheduler, &cache.borrow(), limits);
        let mut wait = wait;
        loop {
            self.ask();
            self.ask_output();
            let Some(read) = self.tier.next_read(wait) else { break };
            self.outstanding -= 1;
            let now = Instant::now();
            self.reading.iter_mut().for_each(|reading| reading.moved = now);
            self.outputs.moved(now);
            if !self.place_output(&read) {
                self.place(&read, runner, spare);
            }
            self.tier.give_back(read);
            wait = Duration::ZERO;
        }
        self.end_output(scheduler);
        let Some(reading) = &mut self.reading else { return };
        let done = reading.filled == reading.wanted.parts();
        let now = Instant::now();
        let late = !done && (now > reading.until.min(reading.moved + STALL_LIMIT) || self.tier.is_dead());
        let gone = !scheduler.waiting().any(|seq| seq.order == reading.order);
        let failed = reading.failed;
        if late {
            self.unread[Unread::Late as usize] += 1;
            self.pause(now);
        }
        if done || late || gone || failed {
            self.end(scheduler);
        }
    }

    /// Requests the next parts, as many as there are buffers.
    fn ask(&mut self) {
        let Some(mut reading) = self.reading.take() else { return };
        while reading.asked < reading.wanted.parts() && !reading.failed {
            let (part, page) = reading.wanted.part(reading.asked);
            let Some(class) = self.class_of[part as usize] else { break };
            let name = self.name(&self.links[0][page], part);
            if !self.tier.read(class, reading.ticket + reading.asked as u64, &name) {
                break;
            }
            reading.asked += 1;
            self.outstanding += 1;
        }
        self.reading = Some(reading);
    }

    /// Copies a part into its pool, if its prefix is still being read.
    fn place<R: Runner>(&mut self, read: &Read, runner: &mut R, spare: Spare) {
        let Some(reading) = &mut self.reading else { return };
        // Parts are read in the order of their requests.
        if reading.failed || read.ticket != reading.ticket + reading.filled as u64 {
            return;
        }
        let (part, _) = reading.wanted.part(reading.filled);
        let restore = &mut reading.restore;
        let id = match (read.outcome, part) {
            (Err(_), _) => None,
            (Ok(()), Part::Whole) => restore.take_page(spare.pages).map(|page| page.0),
            (Ok(()), Part::Window) => restore.take_window(spare.windows).map(|window| window.0),
            (Ok(()), Part::State) => restore.take_slot().map(|slot| slot.0),
        };
        match id {
            Some(id) => {
                runner.restore(part, id, read.bytes());
                reading.filled += 1;
            }
            None => {
                reading.failed = true;
                self.unread[Unread::Room as usize] += u64::from(read.outcome.is_ok());
            }
        }
    }

    /// Publishes the read pages, if they are of use, and lets the request continue.
    fn end<T>(&mut self, scheduler: &mut Scheduler<T>) {
        let Some(ReadAhead { order, wanted, restore, filled, .. }) = self.reading.take() else { return };
        let Some(seq) = scheduler.waiting_mut().find(|seq| seq.order == order) else { return };
        seq.disk_read = DiskRead::Done;
        // A part of a prefix is of use if a sequence can start after any page.
        let pages_alone = wanted.windows == 0 && !wanted.state;
        let whole = filled == wanted.parts();
        if (whole || pages_alone && filled > 0) && restore.publish(seq.key()) {
            let pages = if whole { wanted.pages - wanted.known } else { filled };
            self.tokens += (pages * PAGE_TOKENS) as u64;
        }
    }

    /// Looks waiting requests up on disk, oldest first. A request with a prefix that is worth reading waits until it was read.
    pub(super) fn look<T>(&mut self, scheduler: &mut Scheduler<T>, cache: &SharedCache, limits: &StepLimits) {
        let (now, spare) = (Instant::now(), Spare::of(scheduler, &cache.borrow(), limits));
        let still = |blocked: &Blocked| scheduler.waiting().any(|seq| seq.order == blocked.order);
        self.blocked = self.blocked.filter(still);
        let mut looks = LOOKS;
        for seq in scheduler.waiting_mut() {
            // Not its turn: another prefix is being read, or waits for free pages.
            let held = |blocked: &Blocked| blocked.order != seq.order || now < blocked.again;
            let busy = self.reading.is_some() || self.blocked.as_ref().is_some_and(held);
            if seq.disk_read == DiskRead::Done || busy && seq.disk_read == DiskRead::Waits {
                continue;
            }
            if looks == 0 {
                break;
            }
            looks -= 1;
            let wanted = match seq.salt == 0 && seq.reuses() && !self.tier.is_dead() {
                true => self.wanted(seq.key(), &cache.borrow()),
                false => None,
            };
            let Some(wanted) = wanted else {
                seq.disk_read = DiskRead::Done;
                continue;
            };
            seq.disk_read = DiskRead::Waits;
            if busy {
                continue;
            }
            let since = self.blocked.take().map_or(now, |blocked| blocked.since);
            // Idle pages of the prefix itself do not count as free.
            if spare.is_there(&cache.borrow(), wanted.pages, wanted.windows) {
                self.begin(wanted, seq.order, seq.key(), cache);
            } else if now.duration_since(since) > ROOM_LIMIT {
                seq.disk_read = DiskRead::Done;
                self.unread[Unread::Room as usize] += 1;
            } else {
                self.blocked = Some(Blocked { order: seq.order, since, again: now + ROOM_EVERY });
            }
        }
        self.make_room(scheduler, cache, limits);
    }

    /// Ends the current read if other sequences need its pages.
    fn make_room<T>(&mut self, scheduler: &mut Scheduler<T>, cache: &SharedCache, limits: &StepLimits) {
        let spare = Spare::of(scheduler, &cache.borrow(), limits);
        if self.reading.is_some() && !spare.is_there(&cache.borrow(), 0, 0) {
            self.unread[Unread::Room as usize] += 1;
            self.end(scheduler);
        }
    }

    fn begin(&mut self, wanted: Wanted, order: u64, key: PageKey<'_>, cache: &SharedCache) {
        self.links.swap(0, 1);
        let restore = Restore::begin(cache, key, wanted.pages);
        debug_assert_eq!(restore.known(), wanted.known);
        let limit = wanted.computing.map_or(LIMIT_UNKNOWN, |computing| (2 * computing).clamp(LIMIT_MIN, LIMIT_UNKNOWN));
        let ticket = self.tickets;
        self.tickets += wanted.parts() as u64;
        let moved = Instant::now();
        let until = moved + limit;
        self.reading =
            Some(ReadAhead { order, wanted, restore, ticket, asked: 0, filled: 0, failed: false, until, moved });
        self.ask();
    }

    /// Finds the longest prefix of a prompt that a sequence could start from with the parts on disk. None if memory has as much, or if
    /// computing is faster. Its links are in the second of `links`.
    fn wanted(&mut self, key: PageKey<'_>, cache: &KvCache) -> Option<Wanted> {
        let pages_max = (key.tokens.len() - 1) / PAGE_TOKENS;
        let (known, usable) = (cache.known(key), cache.peek(key));
        let tail = cache.windows.as_ref().map(|windows| windows.tail());
        let stateful = cache.states.is_some();
        let (mut pages, mut covered) = (0, 0);
        let mut found = std::mem::take(&mut self.links[1]);
        found.clear();
        for (at, link) in links(self.root, key).take(pages_max).enumerate() {
            if !self.tier.touch(&self.name(&link, Part::Whole)) && at >= known {
                break;
            }
            found.push(link);
            let has = |part| self.tier.touch(&self.name(&link, part));
            let starts = match tail {
                Some(tail) => {
                    covered = if has(Part::Window) { covered + 1 } else { 0 };
                    covered >= tail.min(at + 1)
                }
                None => !stateful || has(Part::State),
            };
            pages = if starts { at + 1 } else { pages };
        }
        self.links[1] = found;
        let known = known.min(pages);
        let windows = tail.map_or(0, |tail| tail.min(pages));
        let gain = (pages * PAGE_TOKENS).checked_sub(usable).filter(|gain| *gain > 0)?;
        let wanted = Wanted { pages, known, windows, state: stateful, computing: None };
        let computing = (self.row_seconds > 0.0).then(|| Duration::from_secs_f64(gain as f64 * self.row_seconds));
        let wanted = Wanted { computing, ..wanted };
        if self.is_paused(Instant::now()) {
            self.unread[Unread::Paused as usize] += 1;
            return None;
        }
        if computing.is_some_and(|computing| !self.read_always && self.read_time(&wanted) > Some(computing)) {
            self.unread[Unread::Slow as usize] += 1;
            // Only reads measure the rate. One in `SLOW_PROBE` is made, so that a low rate can recover.
            if !self.unread[Unread::Slow as usize].is_multiple_of(SLOW_PROBE) {
                return None;
            }
        }
        Some(wanted)
    }

    /// Pages of a prompt that are worth reading, and how many of them memory has.
    #[cfg(test)]
    pub(super) fn wanted_pages(&mut self, key: PageKey<'_>, cache: &KvCache) -> Option<(usize, usize)> {
        self.wanted(key, cache).map(|wanted| (wanted.pages, wanted.known))
    }

    /// Estimates the time of a read from the measured rate; none before the first measurement.
    fn read_time(&self, wanted: &Wanted) -> Option<Duration> {
        self.time_of((0..wanted.parts()).map(|i| self.part_bytes[wanted.part(i).0 as usize]).sum())
    }

    /// Estimates the time to read `bytes` from the measured rate; none before the first measurement.
    pub(super) fn time_of(&self, bytes: usize) -> Option<Duration> {
        let rate = self.tier.counts().read_rate.load(std::sync::atomic::Ordering::Relaxed);
        (rate > 0).then(|| Duration::from_secs_f64(bytes as f64 / rate as f64))
    }
}
