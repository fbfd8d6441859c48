//! The media of one sequence: what its positions wait for, what it holds of the output pool, and what its pages depend on.
//!
//! Outputs are held from the claim until the prompt is past them, or the sequence gives up its place; pixels as long as the sequence
//! lives, so that a preempted one can claim and encode anew. So nobody who waits holds outputs, and the oldest is served sooner or
//! later (I5).

use std::collections::TryReserveError;
use std::sync::Arc;

use plimsoll_media::{Claim, ContentKey, MediaError, Modality, OutputPool, Pinned, Vacant};
use plimsoll_memory::heap::chunk_bytes;
use plimsoll_models::Grid;

use super::placed::Run;
use super::{MediaItem, MediaSpec, Pixels, placed};
use crate::cache::MediaMark;

/// One item as its sequence holds it.
#[derive(Debug)]
pub(crate) struct Medium {
    /// What its outputs are found by; other salts have other keys.
    key: ContentKey,
    pub grid: Grid,
    pub modality: Modality,
    pub pixels: Arc<Pixels>,
    tokens: usize,
    /// The position after its last placeholder.
    end: usize,
    output: Output,
}

/// What is held of an item's outputs.
#[derive(Debug)]
enum Output {
    Nothing,
    Room(Vacant),
    Rows(Pinned),
}

/// All media of one sequence, in order of position.
#[derive(Debug, Default)]
pub struct SeqMedia {
    items: Vec<Medium>,
    runs: Vec<Run>,
    marks: Vec<MediaMark>,
}

impl SeqMedia {
    /// Of a request that was checked. All memory that it will ever take is taken here.
    pub(crate) fn reserve(
        spec: &MediaSpec,
        prompt: &[u32],
        media: &[MediaItem],
        salt: u64,
    ) -> Result<Self, TryReserveError> {
        let runs = placed::runs(spec, prompt, media)?;
        let (mut items, mut marks) = (Vec::new(), Vec::new());
        items.try_reserve_exact(media.len())?;
        marks.try_reserve_exact(media.len())?;
        let mut before = [0; 32];
        for (index, item) in (0..).zip(media) {
            let last = runs.iter().rev().find(|run| run.item == index);
            let content = chained(&before, item);
            before = *content.as_bytes();
            marks.push(MediaMark { from: item.first, content });
            items.push(Medium {
                key: salted(item.key, salt),
                grid: item.grid,
                modality: item.shape.modality,
                pixels: Arc::clone(&item.pixels),
                tokens: item.shape.tokens as usize,
                end: last.map_or(0, |run| (run.start + run.len) as usize),
                output: Output::Nothing,
            });
        }
        Ok(Self { items, runs, marks })
    }

    /// Heap bytes that [`Self::reserve`] takes at most.
    pub(crate) fn bytes_for(media: &[MediaItem]) -> u64 {
        let chunk = |bytes| chunk_bytes(bytes) as u64;
        let runs: usize = media.iter().map(|item| item.grid.frames).sum();
        let each = size_of::<Medium>() + size_of::<MediaItem>();
        chunk(runs * size_of::<Run>()) + chunk(media.len() * each) + chunk(media.len() * size_of::<MediaMark>())
    }

    /// What its pages depend on besides tokens.
    pub(crate) fn marks(&self) -> &[MediaMark] {
        &self.marks
    }

    /// Placeholders without a gap, in order of position.
    pub(crate) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The items.
    pub(crate) fn items(&self) -> &[Medium] {
        &self.items
    }

    /// The first position from `computed` on that cannot be computed yet.
    pub(crate) fn wall(&self, computed: usize) -> Option<usize> {
        let ahead = self.runs.iter().filter(|run| (run.start + run.len) as usize > computed);
        let mut missing = ahead.filter(|run| !matches!(self.items[run.item as usize].output, Output::Rows(_)));
        missing.next().map(|run| (run.start as usize).max(computed))
    }

    /// The next item to encode, room for it claimed; none if there is nothing to encode, or no room yet.
    pub(crate) fn next_to_encode(&self, from: usize) -> Option<usize> {
        let waits = |medium: &Medium| matches!(medium.output, Output::Room(_));
        self.items.iter().skip(from).position(waits).map(|more| from + more)
    }

    /// Whether it needs outputs beyond `computed` for which nothing is claimed.
    pub(crate) fn unclaimed(&self, computed: usize) -> bool {
        self.items.iter().any(|medium| medium.end > computed && matches!(medium.output, Output::Nothing))
    }

    /// Claims the outputs of everything beyond `computed`, or nothing.
    pub(crate) fn claim(&mut self, pool: &OutputPool, computed: usize) -> Result<(), MediaError> {
        let needed = |medium: &&mut Medium| medium.end > computed && matches!(medium.output, Output::Nothing);
        let keys: Vec<_> = self.items.iter_mut().filter(needed).map(|medium| (medium.key, medium.tokens)).collect();
        let claims = pool.claim(&keys)?;
        for (medium, claim) in self.items.iter_mut().filter(needed).zip(claims) {
            medium.output = match claim {
                Claim::Ready(rows) => Output::Rows(rows),
                Claim::Vacant(room) => Output::Room(room),
            };
        }
        Ok(())
    }

    /// Takes what somebody else has encoded meanwhile; says whether that was so.
    pub(crate) fn found(&mut self, item: usize) -> bool {
        let output = &mut self.items[item].output;
        if let Output::Room(room) = std::mem::replace(output, Output::Nothing) {
            *output = match room.filled_meanwhile() {
                Ok(rows) => Output::Rows(rows),
                Err(room) => Output::Room(room),
            };
        }
        matches!(output, Output::Rows(_))
    }

    /// Stores an item's outputs, `rows` after `rows` from its encoder.
    pub(crate) fn fill<'a>(&mut self, item: usize, mut row: impl FnMut(usize) -> &'a [f32]) {
        let output = &mut self.items[item].output;
        if let Output::Room(mut room) = std::mem::replace(output, Output::Nothing) {
            (0..room.rows()).for_each(|i| room.row_mut(i).copy_from_slice(row(i)));
            *output = Output::Rows(room.fill());
        }
    }

    /// Everything before `computed` is computed: outputs that no position needs any more are let go.
    pub(crate) fn passed(&mut self, computed: usize) {
        self.items.iter_mut().filter(|item| item.end <= computed).for_each(|item| item.output = Output::Nothing);
    }

    /// It starts anew, with `computed` positions found: all outputs are let go.
    pub(crate) fn start_at(&mut self, _computed: usize) {
        self.items.iter_mut().for_each(|item| item.output = Output::Nothing);
    }

    /// Tells the outputs of the `rows` positions from `start` on in pieces without a gap: offset from `start`, and values.
    pub(crate) fn each_piece<'a>(&'a self, start: usize, rows: usize, mut each: impl FnMut(usize, &'a [f32])) {
        let end = start + rows;
        for run in &self.runs {
            let (first, last) = ((run.start as usize).max(start), ((run.start + run.len) as usize).min(end));
            let Output::Rows(outputs) = &self.items[run.item as usize].output else { continue };
            let mut at = first;
            while at < last {
                let row = run.row as usize + at - run.start as usize;
                let values = outputs.rows_from(row, last - at);
                each(at - start, values);
                at += values.len() / outputs.width();
            }
        }
    }
}

/// A name for an item after others.
fn chained(before: &[u8; 32], item: &MediaItem) -> ContentKey {
    let Grid { frames, height, width } = item.grid;
    let mut content = Vec::with_capacity(64 + 3 * size_of::<u64>());
    content.extend_from_slice(before);
    content.extend_from_slice(item.key.as_bytes());
    [frames, height, width].iter().for_each(|side| content.extend_from_slice(&(*side as u64).to_le_bytes()));
    ContentKey::of(item.shape.modality, "media of a prompt", &content)
}

/// Requests of different salts share no outputs either: how fast an answer comes would tell that somebody has sent this picture.
fn salted(key: ContentKey, salt: u64) -> ContentKey {
    let mut content = [0; 40];
    content[..32].copy_from_slice(key.as_bytes());
    content[32..].copy_from_slice(&salt.to_le_bytes());
    ContentKey::of(Modality::Image, "encoder output", &content)
}
