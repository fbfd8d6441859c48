//! Checks the media of a request against what the model takes.

use plimsoll_media::Modality;
use plimsoll_models::Grid;

use super::placed;
use super::spec::{AudioSpec, MediaItem, MediaSpec, TRANSCRIBES_ONLY, Transcript};
use crate::api::error::Refusal;

impl MediaSpec {
    /// Checks that a model that decodes one audio clip gets exactly one clip; other models take any items.
    pub(crate) fn check_decoded(&self, items: &[MediaItem]) -> Result<(), Refusal> {
        let alone = matches!(items, [item] if item.first == 0);
        match self.transcript() {
            Some(Transcript::Decoded(_)) if !alone => {
                Err(Refusal::Invalid { param: "model", message: TRANSCRIBES_ONLY.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Checks a request's items against the limits and against its prompt.
    pub(crate) fn check(&self, prompt: &[u32], items: &[MediaItem]) -> Result<(), Refusal> {
        let invalid = |message: String| Refusal::Invalid { param: "messages", message };
        // An image can consist of several items, its pieces.
        let pieces = self.image.as_ref().map_or(1, |image| image.rule.pieces_max() as usize);
        let most = self.items_max.saturating_mul(pieces);
        if items.len() > most {
            let n = items.len();
            return Err(invalid(format!("the request has {n} media; the limit is {most} (--max-media-per-request)")));
        }
        for item in items {
            self.check_item(item).map_err(invalid)?;
        }
        let rows = items.iter().map(|item| item.shape.tokens as usize);
        self.outputs.check(rows).map_err(|error| invalid(error.to_string()))?;
        placed::check(self, prompt, items).map_err(invalid)
    }

    /// Checks that an item is no larger than the self-test's (I6).
    fn check_item(&self, item: &MediaItem) -> Result<(), String> {
        let (shape, grid) = (&item.shape, item.grid);
        let what = shape.modality.noun();
        let Some((_, most)) = self.kind(shape.modality) else {
            return Err(format!("this model does not take {what}"));
        };
        if shape.tokens > most || shape.tokens == 0 {
            let (n, flag) = (shape.tokens, shape.modality.flag());
            return Err(format!("{what} has {n} tokens; 1 to {most} are allowed ({flag})"));
        }
        if let (Modality::Audio, Some(audio)) = (shape.modality, &self.audio) {
            return audio.check(item);
        }
        let Some((rule, _)) = self.patches(shape.modality) else {
            return Err(format!("{what} is not an audio input, so it has no patches"));
        };
        let merge = rule.merge as usize;
        let rows = grid.frames * grid.height * grid.width;
        let whole = grid.height % merge == 0 && grid.width % merge == 0;
        let frames = grid.frames * if shape.modality == Modality::Video { rule.temporal as usize } else { 1 };
        let fits = item.pixels.frames.iter().all(|frame| {
            let side = |patches: usize| patches as u64 * rule.patch;
            (u64::from(frame.size.height), u64::from(frame.size.width)) == (side(grid.height), side(grid.width))
                && self.tile(shape.modality).is_none_or(|tile| tile == frame.size)
        });
        let frames_given = item.pixels.frames.len().next_multiple_of(frames / grid.frames.max(1));
        if !whole || !fits || frames_given != frames || rows as u64 != shape.tokens * rule.merge * rule.merge {
            return Err(format!("{what}: pixels, grid and tokens do not agree ({grid:?}, {} tokens)", shape.tokens));
        }
        let within = match shape.modality {
            Modality::Image => {
                self.image.as_ref().is_some_and(|image| image.bounds.iter().any(|most| inside(grid, *most)))
            }
            _ => self.video.as_ref().is_some_and(|video| video.bounds.iter().any(|most| no_larger(grid, *most))),
        };
        if !within {
            let (height, width, flag) = (grid.height / merge, grid.width / merge, shape.modality.flag());
            return Err(format!("{what} has {height} x {width} tokens: nothing becomes that large here ({flag})"));
        }
        Ok(())
    }
}

impl AudioSpec {
    /// Checks that an audio clip is no larger than the self-test's (I6).
    fn check(&self, item: &MediaItem) -> Result<(), String> {
        let (what, frames) = (Modality::Audio.noun(), item.grid.patches() as u64);
        let values = item.pixels.spectrogram.len() as u64;
        let agree = item.grid == Grid::audio(frames as usize)
            && values == frames * self.mel.bands() as u64
            && item.shape.tokens == self.rule.tokens(frames);
        if !agree {
            let tokens = item.shape.tokens;
            let why = format!("({frames} frames, {tokens} tokens)");
            return Err(format!("{what}: spectrogram, frames and tokens do not agree {why}"));
        }
        let most = self.rule.frames_max();
        if frames > most {
            let flag = Modality::Audio.flag();
            return Err(format!("{what} has {frames} frames; the limit is {most} ({flag})"));
        }
        Ok(())
    }
}

/// Whether an image fits into another, turned if need be.
fn inside(own: Grid, most: Grid) -> bool {
    let sides = |grid: Grid| (grid.height.min(grid.width), grid.height.max(grid.width));
    let ((short, long), (most_short, most_long)) = (sides(own), sides(most));
    own.frames <= most.frames && short <= most_short && long <= most_long
}

/// Whether an item takes no more of an encoder than another. Its needs depend on all patches, and on the patches of a frame.
fn no_larger(own: Grid, most: Grid) -> bool {
    own.patches() <= most.patches() && own.height * own.width <= most.height * most.width
}
