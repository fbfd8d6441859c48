//! The positions of a prompt's tokens in time, height and width, for prompts with images: the `get_rope_index` of transformers.
//!
//! Text advances in all three axes together. An image's tokens share one time and lie in a plane. The text after it continues after the
//! plane's longer side, so positions grow more slowly than tokens. For generated tokens, position and index differ by the same number as at
//! the end of the prompt.

use super::interleave::Interleave;
use crate::Grid;

/// Seconds of a chunk of Qwen2.5-Omni.
const CHUNK_SECONDS: f64 = 2.0;

/// A family's rule for the positions of images and videos.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlaceRule {
    /// Patches per side of a token.
    pub merge: usize,
    /// Whether each group of a video's frames is a separate plane, with text (its time) before it: Qwen3-VL and later.
    pub frames_apart: bool,
    /// Time steps per second of video, if groups of frames are spaced by their times (Qwen2.5-VL, the Omnis). None: groups are one step
    /// apart.
    pub steps_per_second: Option<f32>,
    /// The rounding of these times.
    pub times: FrameTimes,
}

/// The time positions of a video's frames, and of the text after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameTimes {
    /// Frames at whole steps. Text continues after the longer side of the first frame.
    Cut,
    /// Frames at whole steps. Text continues after the last frame. The two tokens before a video with its audio track share a position, and
    /// so do the two after it (Qwen2.5-Omni).
    CutBefore,
    /// Frames also between whole steps. Text continues after the last frame (Qwen3-Omni).
    Exact,
}

/// One image or video of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacedItem {
    /// The patches of the item.
    pub grid: Grid,
    /// Seconds from one group of a video's frames to the next; none for an image.
    pub seconds: Option<f32>,
    /// Tokens of a video's audio track, which are among those of its frames; 0 without a track.
    pub track: usize,
}

impl PlacedItem {
    /// Returns an image.
    pub fn image(grid: Grid) -> Self {
        Self { grid, seconds: None, track: 0 }
    }
}

/// Text without media, or after the last of them: whole steps from its start. Positions are counted and rounded once, so that a generated
/// token has the same position in the next turn's prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextLine {
    start: f32,
    steps: usize,
}

impl TextLine {
    /// The position of the n-th token from here on, the same in all three axes.
    pub fn at(&self, n: usize) -> f32 {
        self.start + (self.steps + n) as f32
    }
}

/// The positions of tokens after a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct After {
    /// The line of positions of the generated text.
    pub text: TextLine,
    /// Whether the positions of a longer prompt would continue differently. Then generated tokens may not be reused as part of a longer
    /// prompt.
    pub apart: bool,
}

impl PlaceRule {
    /// The order of a video's audio track among its frames; none if the family has no such rule.
    #[must_use]
    pub fn interleave(&self) -> Option<Interleave> {
        let steps_per_second = f64::from(self.steps_per_second?);
        let chunk = match self.times {
            FrameTimes::Cut => return None,
            FrameTimes::CutBefore => Some((CHUNK_SECONDS * steps_per_second) as u64),
            FrameTimes::Exact => None,
        };
        Some(Interleave { steps_per_second, chunk })
    }

    /// Writes the position of every token of a prompt. `is_media` returns whether a token is a placeholder of an image or video. `items`
    /// are these images and videos, in order.
    ///
    /// Returns the positions of the tokens after the prompt.
    ///
    /// # Panics
    /// When the items have fewer or more tokens than there are placeholders. The caller that made the prompt has counted both.
    pub fn places(&self, is_media: impl Fn(usize) -> bool, items: &[PlacedItem], out: &mut [[f32; 3]]) -> After {
        let (mut at, mut text, mut greatest) = (0, TextLine { start: 0.0, steps: 0 }, 0.0_f32);
        // Planes of the current item that are still to come; text is between them.
        let (mut items, mut planes) = (items.iter(), 0..0);
        let mut item = PlacedItem::image(Grid { frames: 1, height: 0, width: 0 });
        // The index of a token that shares the position of the next one.
        let mut shared = None;
        while at < out.len() {
            if !is_media(at) {
                out[at] = [text.at(0); 3];
                text.steps += usize::from(shared != Some(at + 1));
                at += 1;
                continue;
            }
            if planes.is_empty() {
                item = *items.next().expect("an item for every placeholder");
                planes = 0..if self.frames_apart { item.grid.frames } else { 1 };
            }
            planes.next();
            let words_share = self.times == FrameTimes::CutBefore && item.track > 0;
            if words_share && text.steps >= 2 {
                text.steps -= 1;
                out[at - 1] = out[at - 2];
            }
            let position = text.at(0);
            let plane = Plane { rule: self, item: &item, position };
            let tokens = plane.tokens();
            let stretch = &mut out[at..at + tokens + item.track];
            let (mut seen, mut heard) = (0, 0);
            for (index, place) in stretch.iter_mut().enumerate() {
                if item.track == 0 || is_media(at + index) {
                    *place = plane.place(seen);
                    seen += 1;
                } else {
                    *place = [position + heard as f32; 3];
                    heard += 1;
                }
            }
            let last = plane.time(plane.times() - 1);
            greatest = greatest.max(last + 1.0);
            let start = match (self.times, item.track) {
                (FrameTimes::Cut, _) => plane.behind(),
                (_, 0) => plane.behind().max(last + 1.0),
                // Text continues after the stretch's last token, frame or audio. Generated tokens continue after all tokens.
                _ => {
                    let all = stretch.iter().flatten().fold(plane.behind(), |most, place| most.max(place + 1.0));
                    greatest = greatest.max(all);
                    stretch.last().into_iter().flatten().fold(0.0, |most: f32, place| most.max(place + 1.0))
                }
            };
            at += tokens + item.track;
            text = TextLine { start, steps: 0 };
            shared = words_share.then_some(at + 1);
        }
        assert!(items.next().is_none() && planes.is_empty(), "a placeholder for every token of every item");
        // The references continue after the latest time, if that is later than the text's position.
        let apart = greatest > text.at(0);
        After { text: if apart { TextLine { start: greatest, steps: 0 } } else { text }, apart }
    }
}

/// The tokens of an image, or of a video's frames without text between them.
struct Plane<'a> {
    rule: &'a PlaceRule,
    item: &'a PlacedItem,
    /// The position of its first token.
    position: f32,
}

impl Plane<'_> {
    fn sides(&self) -> [usize; 2] {
        [self.item.grid.height, self.item.grid.width].map(|side| side / self.rule.merge)
    }

    /// Number of frames, or of groups of frames.
    fn times(&self) -> usize {
        if self.rule.frames_apart { 1 } else { self.item.grid.frames }
    }

    fn tokens(&self) -> usize {
        self.times() * self.sides().iter().product::<usize>()
    }

    /// The time position of a group of frames. Arithmetic is in single precision, truncated before or after the step is applied, as in the
    /// references.
    fn time(&self, group: usize) -> f32 {
        let group = group as f32;
        self.position
            + match self.item.seconds.zip(self.rule.steps_per_second) {
                Some((seconds, steps)) => match self.rule.times {
                    FrameTimes::Cut => (group * (steps * seconds)).trunc(),
                    FrameTimes::CutBefore => (group * seconds * steps).trunc(),
                    FrameTimes::Exact => group * seconds * steps,
                },
                None => group,
            }
    }

    fn place(&self, token: usize) -> [f32; 3] {
        let [height, width] = self.sides();
        let (group, row, column) = (token / (height * width), token / width % height, token % width);
        [self.time(group), self.position + row as f32, self.position + column as f32]
    }

    /// The position after the plane's longer side.
    fn behind(&self) -> f32 {
        self.position + self.sides().into_iter().max().unwrap_or(0) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: PlaceRule = PlaceRule { merge: 2, frames_apart: true, steps_per_second: None, times: FrameTimes::Cut };

    fn next(after: After) -> (f32, bool) {
        (after.text.at(0), after.apart)
    }

    #[test]
    fn i9_what_is_generated_stands_where_the_next_prompt_has_it() {
        let exact = PlaceRule { frames_apart: false, steps_per_second: Some(25.0), times: FrameTimes::Exact, ..RULE };
        let mut repeated_differs = 0;
        for tenth in 1..40 {
            let video = PlacedItem {
                grid: Grid { frames: 3, height: 2, width: 2 },
                seconds: Some(tenth as f32 / 300.0),
                track: 0,
            };
            let (mut first, mut second) = ([[0.0; 3]; 8], [[0.0; 3]; 300]);
            let media = |i: usize| (2..5).contains(&i);
            let after = exact.places(media, &[video], &mut first);
            exact.places(media, &[video], &mut second);
            assert_eq!(first[..], second[..8]);
            let mut repeated = after.text.at(0);
            for (n, place) in second[8..].iter().enumerate() {
                assert_eq!([after.text.at(n).to_bits(); 3], place.map(f32::to_bits), "{tenth}, generated token {n}");
                repeated_differs += usize::from(repeated != after.text.at(n));
                repeated += 1.0;
            }
        }
        assert!(repeated_differs > 0, "starts whose fractions need rounding");
    }

    #[test]
    fn text_alone_counts() {
        let mut out = [[0.0; 3]; 4];
        assert_eq!(next(RULE.places(|_| false, &[], &mut out)), (4.0, false));
        assert_eq!(out, [0.0, 1.0, 2.0, 3.0].map(|at| [at; 3]));
    }

    #[test]
    fn text_goes_on_behind_the_longer_side() {
        let item = PlacedItem::image(Grid { frames: 1, height: 4, width: 6 });
        let mut out = [[0.0; 3]; 8];
        assert_eq!(next(RULE.places(|i| (1..7).contains(&i), &[item], &mut out)), (5.0, false));
        let whole = out.map(|place| place.map(|at| at as u32));
        assert_eq!(whole, [[0; 3], [1; 3], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3], [4; 3]]);
    }

    #[test]
    fn frames_stand_apart_or_are_spaced_by_their_times() {
        let grid = Grid { frames: 2, height: 2, width: 2 };
        let video = PlacedItem { grid, seconds: Some(1.5), track: 0 };
        let mut out = [[0.0; 3]; 4];
        assert_eq!(next(RULE.places(|i| i % 2 == 1, &[video], &mut out)), (4.0, false));
        assert_eq!(out, [0.0, 1.0, 2.0, 3.0].map(|at| [at; 3]));
        let together = PlaceRule { frames_apart: false, steps_per_second: Some(3.0), ..RULE };
        // A late time moves the tokens after the prompt, not those after the video.
        assert_eq!(next(together.places(|i| (1..3).contains(&i), &[video], &mut out)), (6.0, true));
        assert_eq!(out, [[0.0; 3], [1.0; 3], [5.0, 1.0, 1.0], [2.0; 3]]);
        // Exact: frames are between steps, and so is the text after them.
        let exact = PlaceRule { steps_per_second: Some(0.5), times: FrameTimes::Exact, ..together };
        assert_eq!(next(exact.places(|i| (1..3).contains(&i), &[video], &mut out)), (3.75, false));
        assert_eq!(out, [[0.0; 3], [1.0; 3], [1.75, 1.0, 1.0], [2.75; 3]]);
        // Frames at whole steps, and the text after them.
        let cut = PlaceRule { times: FrameTimes::CutBefore, ..together };
        assert_eq!(next(cut.places(|i| (1..3).contains(&i), &[video], &mut out)), (7.0, false));
        assert_eq!(out, [[0.0; 3], [1.0; 3], [5.0, 1.0, 1.0], [6.0; 3]]);
    }

    #[test]
    fn track_of_a_video_goes_on_step_by_step_among_its_frames() {
        let video = PlacedItem { grid: Grid { frames: 2, height: 2, width: 4 }, seconds: Some(2.0), track: 3 };
        let exact = PlaceRule { frames_apart: false, steps_per_second: Some(1.25), times: FrameTimes::Exact, ..RULE };
        let seen = |at: usize| (2..4).contains(&at) || (7..9).contains(&at);
        let mut out = [[0.0; 3]; 11];
        // Two tokens, a frame, the track, a frame, two tokens.
        assert_eq!(next(exact.places(seen, &[video], &mut out)), (7.5, false));
        let times = [0.0, 1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.5, 4.5, 5.5, 6.5];
        assert_eq!(out.map(|place| place[0]), times);
        assert_eq!((out[3], out[6], out[8]), ([2.0, 2.0, 3.0], [4.0; 3], [4.5, 2.0, 3.0]));
        // The tokens before share a position, and so do those after. Text continues after the last token, generated tokens after all.
        let cut = PlaceRule { times: FrameTimes::CutBefore, steps_per_second: Some(10.0), ..exact };
        let seen = |at: usize| (2..6).contains(&at);
        assert_eq!(next(cut.places(seen, &[video], &mut out)), (22.0, true));
        let times = [0.0, 0.0, 1.0, 1.0, 21.0, 21.0, 1.0, 2.0, 3.0, 4.0, 4.0];
        assert_eq!(out.map(|place| place[0]), times);
    }

    #[test]
    #[should_panic(expected = "for every token of every item")]
    fn an_item_too_many_is_a_bug() {
        RULE.places(|_| false, &[PlacedItem::image(Grid { frames: 1, height: 2, width: 2 })], &mut [[0.0; 3]]);
    }
}
