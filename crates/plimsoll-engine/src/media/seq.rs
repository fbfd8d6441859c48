//! The media of one sequence: positions that wait for outputs, rows held in the output pool, and marks that its pages depend on.
//!
//! A sequence holds outputs from the claim until the prompt is past them, or until the sequence is preempted. It
//! holds pixels for its whole life, so that a preempted sequence can claim and encode again. Waiting sequences thus
//! hold no outputs, and the oldest sequence always runs in the end (I5).

use std::collections::TryReserveError;
use std::sync::Arc;

use arrayvec::ArrayVec;
use plimsoll_media::{Claim, ContentKey, MediaError, Modality, OutputPool, Pinned, Vacant};
use plimsoll_memory::heap::chunk_bytes;
use plimsoll_models::{EncoderKind, Grid, Interleave, PlacedItem, TextLine};

use super::placed::{self, Run};
use super::spec::{MediaItem, MediaSpec, Pixels, sense};
use crate::cache::MediaMark;

/// One item of a sequence.
#[derive(Debug)]
pub(crate) struct Medium {
    /// The key of its outputs in the pool; each salt gives other keys.
    pub key: ContentKey,
    pub grid: Grid,
    pub modality: Modality,
    pub pixels: Arc<Pixels>,
    pub tokens: usize,
    /// The position after its last placeholder.
    end: usize,
    output: Output,
    /// Whether it is encoded rather than read from disk, because reading was too slow or failed.
    encode: bool,
}

/// The sequence's hold on an item's outputs in the pool.
#[derive(Debug)]
enum Output {
    Nothing,
    Room(Vacant),
    /// The item's room, which the disk cache fills ([`SeqMedia::take_room`]).
    Awaited,
    Rows(Pinned),
}

/// All media of one sequence, in order of position.
#[derive(Debug, Default)]
pub struct SeqMedia {
    items: Vec<Medium>,
    runs: Vec<Run>,
    marks: Vec<MediaMark>,
    /// Whether the tokens of an image attend to each other and are computed in one step.
    in_one_step: bool,
    /// The places of the prompt's tokens, and the line of places for the tokens after it.
    places: Vec<[f32; 3]>,
    after: Option<TextLine>,
}

impl SeqMedia {
    /// Reserves the media of a checked request. All memory that they ever take is allocated here.
    pub(crate) fn reserve(
        spec: &MediaSpec,
        prompt: &[u32],
        media: &[MediaItem],
        salt: u64,
    ) -> Result<Self, TryReserveError> {
        let runs = placed::runs(spec, prompt, media)?;
        let (mut items, mut marks) = (Vec::new(), Vec::new());
        items.try_reserve_exact(media.len())?;
        // One more mark for generated tokens.
        marks.try_reserve_exact(media.len() + 1)?;
        let mut before = [0; 32];
        for (index, item) in (0..).zip(media) {
            let last = runs.iter().rev().find(|run| run.item == index);
            // The time between its frames determines their places.
            let apart = item.seconds.map_or(0, f32::to_bits).to_le_bytes();
            let (purpose, from) = match track_of(media, index as usize) {
                0 => ("media of a prompt", item.first),
                // The word before a video with its track is placed with them.
                _ => ("video of a prompt with its audio track", item.first.saturating_sub(1)),
            };
            let content = derived(purpose, item, &[&before, &apart[..]]);
            before = *content.as_bytes();
            marks.push(MediaMark { from, content });
            items.push(Medium {
                key: derived("encoder output", item, &[&salt.to_le_bytes()]),
                grid: item.grid,
                modality: item.shape.modality,
                pixels: Arc::clone(&item.pixels),
                tokens: item.shape.tokens as usize,
                end: last.map_or(0, |run| (run.start + run.len) as usize),
                output: Output::Nothing,
                encode: false,
            });
        }
        let (mut places, mut after) = (Vec::new(), None);
        if !media.is_empty() {
            places.try_reserve_exact(prompt.len())?;
            places.resize(prompt.len(), [0.0; 3]);
            let placed = |(index, item): (usize, &MediaItem)| PlacedItem {
                grid: item.grid,
                seconds: item.seconds,
                track: track_of(media, index),
            };
            let seen = media.iter().enumerate().filter(|(_, item)| sense(item.shape.modality) == EncoderKind::Vision);
            let placed: Vec<_> = seen.map(placed).collect();
            match spec.places {
                Some(rule) => {
                    let own = rule.places(|at| spec.is_plane(prompt[at]), &placed, &mut places);
                    if own.apart {
                        // The next turn's prompt has these tokens at other places, so it must not reuse their pages (I9).
                        let content = ContentKey::of(Modality::Video, "generated behind the latest time", &before);
                        marks.push(MediaMark { from: prompt.len() as u32, content });
                    }
                    after = Some(own.text);
                }
                None => places.iter_mut().enumerate().for_each(|(index, place)| *place = [index as f32; 3]),
            }
        }
        Ok(Self { items, runs, marks, in_one_step: spec.image_in_one_step, places, after })
    }

    /// One item with room for its outputs.
    #[cfg(test)]
    pub(crate) fn with_room(key: ContentKey, tokens: usize, room: Vacant) -> Self {
        let staged = plimsoll_media::Staging::new(0).reserve(0).expect("no bytes");
        let pixels = Arc::new(Pixels { frames: Vec::new(), spectrogram: Vec::new(), staged: staged.into() });
        let (grid, modality) = (Grid { frames: 1, height: 1, width: tokens }, Modality::Image);
        let (end, output, encode) = (tokens, Output::Room(room), false);
        let items = vec![Medium { key, grid, modality, pixels, tokens, end, output, encode }];
        Self { items, ..Self::default() }
    }

    /// The most heap bytes that [`Self::reserve`] takes.
    pub(crate) fn bytes_for(media: &[MediaItem], prompt: usize) -> u64 {
        if media.is_empty() {
            return 0;
        }
        let chunk = |bytes| chunk_bytes(bytes) as u64;
        let runs = |(index, item): (usize, &MediaItem)| match track_of(media, index) {
            0 => item.grid.frames,
            track => Interleave::most(item.shape.tokens as usize, track),
        };
        let runs: usize = media.iter().enumerate().map(runs).sum();
        let each = size_of::<Medium>() + size_of::<MediaItem>();
        let marks = chunk((media.len() + 1) * size_of::<MediaMark>());
        chunk(runs * size_of::<Run>()) + chunk(media.len() * each) + marks + chunk(prompt * size_of::<[f32; 3]>())
    }

    /// Returns a position's place in time, height and width.
    pub(crate) fn place(&self, position: usize) -> [f32; 3] {
        match (self.places.get(position), self.after) {
            (Some(place), _) => *place,
            (None, Some(text)) => [text.at(position - self.places.len()); 3],
            (None, None) => [position as f32; 3],
        }
    }

    /// The media that the sequence's pages depend on, beside its tokens.
    pub(crate) fn marks(&self) -> &[MediaMark] {
        &self.marks
    }

    /// One of the items.
    pub(crate) fn item(&self, item: usize) -> &Medium {
        &self.items[item]
    }

    /// The first position from `computed` on whose outputs are missing.
    pub(crate) fn first_missing(&self, computed: usize) -> Option<usize> {
        let ahead = self.runs.iter().filter(|run| (run.start + run.len) as usize > computed);
        let mut missing = ahead.filter(|run| !matches!(self.items[run.item as usize].output, Output::Rows(_)));
        missing.next().map(|run| (run.start as usize).max(computed))
    }

    /// Returns how many of the `rows` positions from `computed` on a step can take without cutting an image that must stay whole. 0 if all
    /// of them are part of one such image.
    pub(crate) fn uncut(&self, computed: usize, rows: usize) -> usize {
        let end = computed + rows;
        let cut = self.uncuttable().find(|run| (run.start as usize) < end && end < (run.start + run.len) as usize);
        cut.map_or(rows, |run| (run.start as usize).saturating_sub(computed))
    }

    /// Returns the number of positions from `computed` on that must be in one step; 0 if the next one can be alone.
    pub(crate) fn together(&self, computed: usize) -> usize {
        let inside = |run: &&Run| (run.start..run.start + run.len).contains(&(computed as u32));
        self.uncuttable().find(inside).map_or(0, |run| (run.start + run.len) as usize - computed)
    }

    /// Runs whose tokens attend to each other. Audio tokens never do.
    fn uncuttable(&self) -> impl Iterator<Item = &Run> {
        let seen = |run: &Run| self.items[run.item as usize].modality != Modality::Audio;
        self.runs.iter().filter(move |run| self.in_one_step && seen(run))
    }

    /// For each of `rows` positions from `start` on: the position after the last one that it attends to.
    pub(crate) fn ends(&self, start: usize, rows: usize) -> impl Iterator<Item = u32> {
        let mut runs = self.uncuttable().peekable();
        (start as u32..(start + rows) as u32).map(move |position| {
            while runs.next_if(|run| run.start + run.len <= position).is_some() {}
            runs.peek().filter(|run| run.start <= position).map_or(position + 1, |run| run.start + run.len)
        })
    }

    /// The next item from the `from`-th on that has room for its outputs and can be encoded.
    pub(crate) fn next_to_encode(&self, from: usize) -> Option<usize> {
        let waits = |medium: &Medium| matches!(medium.output, Output::Room(_));
        self.items.iter().skip(from).position(waits).map(|more| from + more)
    }

    /// Whether an item beyond `computed` has no claim on outputs.
    pub(crate) fn unclaimed(&self, computed: usize) -> bool {
        self.items.iter().any(|medium| medium.end > computed && matches!(medium.output, Output::Nothing))
    }

    /// Claims the outputs of all items beyond `computed`. On an error it claims nothing.
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

    /// Takes outputs that another sequence has encoded meanwhile; returns whether the item has its outputs now.
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

    /// Stores an item's outputs; `write` fills each of its rows.
    pub(crate) fn fill(&mut self, item: usize, mut write: impl FnMut(usize, &mut [f32])) {
        let output = &mut self.items[item].output;
        if let Output::Room(mut room) = std::mem::replace(output, Output::Nothing) {
            (0..room.rows()).for_each(|row| write(row, room.row_mut(row)));
            *output = Output::Rows(room.fill());
        }
    }

    /// The key of an item's outputs on disk, their rows, and the encoder that makes them. `None` if the item must be encoded.
    pub(crate) fn on_disk(&self, item: usize) -> Option<(ContentKey, usize, EncoderKind)> {
        let medium = &self.items[item];
        (!medium.encode).then(|| (medium.key, medium.tokens, sense(medium.modality)))
    }

    /// Marks the item: from now on it is encoded, even if its outputs are on disk.
    pub(crate) fn encode_it(&mut self, item: usize) {
        self.items[item].encode = true;
    }

    /// Takes the room of an item, to fill it from disk. [`Self::bring`] ends the read.
    pub(crate) fn take_room(&mut self, item: usize) -> Option<Vacant> {
        let output = &mut self.items[item].output;
        match std::mem::replace(output, Output::Awaited) {
            Output::Room(room) => Some(room),
            other => {
                *output = other;
                None
            }
        }
    }

    /// Whether the room of an item is being filled from disk.
    pub(crate) fn awaits(&self, item: usize) -> bool {
        self.items.get(item).is_some_and(|medium| matches!(medium.output, Output::Awaited))
    }

    /// Gives an item its outputs, or its room back if they could not be read.
    pub(crate) fn bring(&mut self, item: usize, outputs: Result<Pinned, Vacant>) {
        let medium = &mut self.items[item];
        medium.encode |= outputs.is_err();
        medium.output = match outputs {
            Ok(rows) => Output::Rows(rows),
            Err(room) => Output::Room(room),
        };
    }

    /// Releases the outputs that no position from `computed` on needs.
    pub(crate) fn passed(&mut self, computed: usize) {
        self.items.iter_mut().filter(|item| item.end <= computed).for_each(|item| item.output = Output::Nothing);
    }

    /// Releases all outputs, because the sequence starts over.
    pub(crate) fn start_over(&mut self) {
        self.items.iter_mut().for_each(|item| item.output = Output::Nothing);
    }

    /// Calls `each` with the outputs of the `rows` positions from `start` on, in pieces without a gap: offset from `start`, and values.
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

/// Tokens of the audio track of a video; 0 without one.
fn track_of(media: &[MediaItem], video: usize) -> usize {
    media.get(video + 1).filter(|next| next.of_video).map_or(0, |track| track.shape.tokens as usize)
}

/// Returns a key for an item together with `with`. For pages `with` is the media before it and its place in time, on which the pages
/// depend. For encoder outputs it is the salt of the request: otherwise response times would reveal that another client has sent this
/// image. The size after resizing is part of the key.
fn derived(purpose: &str, item: &MediaItem, with: &[&[u8]]) -> ContentKey {
    let Grid { frames, height, width } = item.grid;
    let mut content = ArrayVec::<u8, 96>::new();
    let sides = [frames, height, width].map(|side| (side as u64).to_le_bytes());
    let with = with.iter().copied().flatten();
    item.key.as_bytes().iter().chain(sides.as_flattened()).chain(with).for_each(|byte| content.push(*byte));
    ContentKey::of(item.shape.modality, purpose, &content)
}
