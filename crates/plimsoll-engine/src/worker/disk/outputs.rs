//! Encoder outputs on disk: blocks of rows, named by the content of their medium and by the model's identity.
//!
//! The outputs of a medium are written after the batch that encoded it. When a request has claimed pages for outputs that are on disk, the
//! outputs are read into these pages, unless encoding is faster. The request waits at the medium meanwhile; other requests continue. One
//! medium is read at a time.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use plimsoll_media::{ContentKey, OutputPool, Vacant};
use plimsoll_models::EncoderKind;
use plimsoll_tier::{Name, Read};
use sha2::{Digest, Sha256};

use super::read::{LIMIT_MIN, LIMIT_UNKNOWN, SLOW_PROBE, STALL_LIMIT};
use super::{Disk, Unread};
use crate::cache::{Link, block_name};
use crate::media::{OUTPUT_PAGE_ROWS as BLOCK_ROWS, SeqMedia};
use crate::plan::disk::{DiskPlan, OUTPUTS_MAX};
use crate::schedule::scheduler::Scheduler;

/// The encoder outputs to write and to read.
pub(super) struct Outputs {
    /// The class of buffers for blocks; none for a model without encoders.
    class: Option<usize>,
    block_bytes: usize,
    /// Media to write, and their rows.
    unsaved: VecDeque<(ContentKey, usize)>,
    /// Blocks of the first medium that were copied to buffers.
    saved: usize,
    reading: Option<OutputRead>,
    /// Seconds for a row of each encoder; 0 until measured.
    row_seconds: [f64; 2],
    /// Media that were read, and blocks of them.
    pub media: u64,
    pub blocks: u64,
    /// Media that were not read.
    pub unread: [u64; 4],
}

/// The read of a medium's outputs.
struct OutputRead {
    /// Its sequence, and the index of the medium.
    order: u64,
    item: usize,
    key: ContentKey,
    room: Vacant,
    blocks: usize,
    /// The ticket of its first block.
    ticket: u64,
    asked: usize,
    filled: usize,
    failed: bool,
    until: Instant,
    /// Time of the last block, or of the first request.
    moved: Instant,
}

impl Outputs {
    pub fn new(plan: &DiskPlan) -> Self {
        Self {
            class: plan.output_class,
            block_bytes: plan.output_class.map_or(0, |class| plan.classes[class].bytes),
            unsaved: VecDeque::with_capacity(plan.output_class.map_or(0, |_| OUTPUTS_MAX)),
            saved: 0,
            reading: None,
            row_seconds: [0.0; 2],
            media: 0,
            blocks: 0,
            unread: [0; 4],
        }
    }

    /// Whether outputs wait to be handed to the disk's thread.
    pub fn unsaved(&self) -> bool {
        !self.unsaved.is_empty()
    }

    /// Blocks that wait to be handed to the disk's thread.
    pub fn waiting(&self) -> usize {
        let all: usize = self.unsaved.iter().map(|(_, rows)| rows.div_ceil(BLOCK_ROWS)).sum();
        all - self.saved
    }

    /// Whether a medium is being read.
    pub fn reads(&self) -> bool {
        self.reading.is_some()
    }

    /// Drops outputs that wait to be written, and marks the current read as failed.
    pub fn clear(&mut self) {
        self.unsaved.clear();
        self.saved = 0;
        self.reading.iter_mut().for_each(|reading| reading.failed = true);
    }

    /// Drops the current read: all sequences start over and give up their pages.
    pub fn forget(&mut self) {
        self.reading = None;
    }

    /// Records that the disk delivered a part at `now`.
    pub fn moved(&mut self, now: Instant) {
        self.reading.iter_mut().for_each(|reading| reading.moved = now);
    }
}

impl Disk {
    /// The names of these blocks of a medium.
    fn names(&self, key: &ContentKey, blocks: Range<usize>) -> impl Iterator<Item = Name> + use<> {
        let mut medium = Sha256::new();
        medium.update(self.root);
        medium.update("encoder output");
        medium.update(key.as_bytes());
        let tag = self.tag;
        blocks.map(move |block| {
            let mut own = medium.clone();
            own.update((block as u64).to_le_bytes());
            let link: Link = own.finalize().into();
            block_name(&tag, &link)
        })
    }

    /// Measures a batch of an encoder: `rows` rows took `seconds`.
    pub fn encoded(&mut self, kind: EncoderKind, rows: usize, seconds: f64) {
        if rows > 0 {
            let (row, now) = (&mut self.outputs.row_seconds[kind as usize], seconds / rows as f64);
            *row = if *row == 0.0 { now } else { *row * 0.875 + now * 0.125 };
        }
    }

    /// Queues an encoded medium to be written. If the queue is full, the oldest one is dropped.
    pub fn keep_output(&mut self, key: ContentKey, rows: usize) {
        if self.outputs.unsaved.len() == OUTPUTS_MAX {
            self.lose_output();
        }
        self.outputs.unsaved.push_back((key, rows));
    }

    /// Drops the oldest medium that waits to be written.
    fn lose_output(&mut self) {
        if let Some((_, rows)) = self.outputs.unsaved.pop_front() {
            self.lost += (rows.div_ceil(BLOCK_ROWS) - self.outputs.saved) as u64;
            self.outputs.saved = 0;
        }
    }

    /// Copies blocks that are not on disk into free buffers. Not while files are read: a damaged one would count as on disk.
    pub(super) fn save_outputs(&mut self, pool: &OutputPool) {
        let Some(class) = self.outputs.class.filter(|_| self.outstanding == 0) else { return };
        while let Some((key, rows)) = self.outputs.unsaved.front().copied() {
            let Some(outputs) = pool.look(&key) else {
                self.lose_output();
                continue;
            };
            for name in self.names(&key, self.outputs.saved..rows.div_ceil(BLOCK_ROWS)) {
                let block = outputs.rows_from(self.outputs.saved * BLOCK_ROWS, BLOCK_ROWS);
                debug_assert_eq!(block.len(), BLOCK_ROWS.min(rows - self.outputs.saved * BLOCK_ROWS) * outputs.width());
                let fill = |bytes: &mut [u8]| {
                    let (own, rest) = bytes.split_at_mut(size_of_val(block));
                    own.as_chunks_mut::<4>().0.iter_mut().zip(block).for_each(|(to, value)| *to = value.to_le_bytes());
                    // The buffer still holds an earlier block.
                    rest.fill(0);
                };
                if !self.tier.contains(&name) && !self.tier.write(class, &name, fill) {
                    return;
                }
                self.outputs.saved += 1;
            }
            self.outputs.unsaved.pop_front();
            self.outputs.saved = 0;
        }
    }

    /// Whether a medium with room for its outputs gets them from the disk. Starts the read, or lets the medium wait until another one
    /// is read.
    pub fn brings(&mut self, order: u64, media: &mut SeqMedia, item: usize) -> bool {
        let Some((key, rows, kind)) = media.on_disk(item).filter(|_| self.outputs.class.is_some()) else {
            return false;
        };
        let (now, blocks) = (Instant::now(), rows.div_ceil(BLOCK_ROWS));
        if self.outputs.reading.is_some() {
            return self.names(&key, 0..1).all(|name| self.tier.contains(&name));
        }
        if blocks == 0 || !self.names(&key, 0..blocks).all(|name| self.tier.touch(&name)) {
            return false;
        }
        let row_seconds = self.outputs.row_seconds[kind as usize];
        let encoding = (row_seconds > 0.0).then(|| Duration::from_secs_f64(row_seconds * rows as f64));
        let unread = if self.is_paused(now) {
            Some(Unread::Paused)
        } else {
            let reading = self.time_of(blocks * self.outputs.block_bytes);
            let slow = encoding.is_some_and(|encoding| !self.read_always && reading > Some(encoding));
            slow.then_some(Unread::Slow)
        };
        if let Some(unread) = unread {
            let count = &mut self.outputs.unread[unread as usize];
            *count += 1;
            // Only reads measure the rate. One in `SLOW_PROBE` is made, so that a rate that was low can rise.
            if unread == Unread::Paused || !count.is_multiple_of(SLOW_PROBE) {
                media.encode_it(item);
                return false;
            }
        }
        let Some(room) = media.take_room(item) else { return false };
        let limit = encoding.map_or(LIMIT_UNKNOWN, |encoding| (2 * encoding).clamp(LIMIT_MIN, LIMIT_UNKNOWN));
        let (ticket, until) = (self.tickets, now + limit);
        self.tickets += blocks as u64;
        let (asked, filled, failed, moved) = (0, 0, false, now);
        self.outputs.reading =
            Some(OutputRead { order, item, key, room, blocks, ticket, asked, filled, failed, until, moved });
        self.ask_output();
        true
    }

    /// Asks for the next blocks, as many as there are buffers for.
    pub(super) fn ask_output(&mut self) {
        let (Some(mut reading), Some(class)) = (self.outputs.reading.take(), self.outputs.class) else { return };
        for name in self.names(&reading.key, reading.asked..reading.blocks) {
            if reading.failed || !self.tier.read(class, reading.ticket + reading.asked as u64, &name) {
                break;
            }
            reading.asked += 1;
            self.outstanding += 1;
        }
        self.outputs.reading = Some(reading);
    }

    /// Puts a block into the room of the medium that is being read. False if the block is not of that medium.
    pub(super) fn place_output(&mut self, read: &Read) -> bool {
        let Some(reading) = &mut self.outputs.reading else { return false };
        // Blocks are read in the order of their requests.
        let of_it = (reading.ticket..reading.ticket + reading.blocks as u64).contains(&read.ticket);
        if of_it && !reading.failed && read.outcome.is_ok() {
            let mut values = read.bytes().as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value));
            let first = reading.filled * BLOCK_ROWS;
            for row in first..(first + BLOCK_ROWS).min(reading.room.rows()) {
                reading.room.row_mut(row).iter_mut().zip(&mut values).for_each(|(to, value)| *to = value);
            }
            reading.filled += 1;
            self.outputs.blocks += 1;
        } else if of_it {
            reading.failed = true;
        }
        of_it
    }

    /// Ends the read when all blocks are there, when no more will come, or when the request does not wait any more.
    pub(super) fn end_output<T>(&mut self, scheduler: &mut Scheduler<T>) {
        let Some(reading) = &self.outputs.reading else { return };
        let (now, item, order) = (Instant::now(), reading.item, reading.order);
        let done = reading.filled == reading.blocks && !reading.failed;
        let late = !done && (now > reading.until.min(reading.moved + STALL_LIMIT) || self.tier.is_dead());
        let waits = scheduler.running_mut().iter_mut().find(|seq| seq.order == order && seq.media.awaits(item));
        if !(done || late || reading.failed || waits.is_none()) {
            return;
        }
        let Some(reading) = self.outputs.reading.take() else { return };
        self.outputs.media += u64::from(done);
        // Without a request that waits, the room becomes free, or its outputs are kept for later requests.
        let outputs = if done { Ok(reading.room.fill()) } else { Err(reading.room) };
        if let Some(seq) = waits {
            seq.media.bring(item, outputs);
        }
        if late {
            self.outputs.unread[Unread::Late as usize] += 1;
            self.pause(now);
        }
    }
}
