//! Where the tokens of a prompt with images stand in time, height and width: the `get_rope_index` of transformers.
//!
//! Text advances in all three together. An image's tokens share one time and lie in a plane; text after it goes on behind the
//! plane's longer side, so positions grow more slowly than tokens. What is generated later stands at the same distance
//! from its index as the end of the prompt does.

use super::interleave::Interleave;
use crate::Grid;

/// Seconds of a chunk of Qwen2.5-Omni.
const CHUNK_SECONDS: f64 = 2.0;

/// How a family places images and videos.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlaceRule {
    /// Patches per side of a token.
    pub merge: usize,
    /// Whether each group of a video's frames stands alone, with text (its time) before it: Qwen3-VL and later.
    pub frames_apart: bool,
    /// Steps of time to a second of video, where groups of frames are spaced by their times (Qwen2.5-VL, the Omnis); otherwise by 1.
    pub steps_per_second: Option<f32>,
    /// What becomes of these times.
    pub times: FrameTimes,
}

/// Where the frames of a video stand in time, and the text behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameTimes {
    /// At whole steps. Text goes on behind the longer side of the first frame.
    Cut,
    /// At whole steps. Text goes on behind the last frame. The two words before a video with its audio track share a place, and so do
    /// the two behind (Qwen2.5-Omni).
    CutBefore,
    /// Between whole steps, too. Text goes on behind the last frame (Qwen3-Omni).
    Exact,
}

/// One image or video of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacedItem {
    /// Its patches.
    pub grid: Grid,
    /// Of a video, the seconds from one group of frames to the next; none for an image.
    pub seconds: Option<f32>,
    /// Of a video, the tokens of its audio track, which stand among those of its frames; 0 without one.
    pub track: usize,
}

impl PlacedItem {
    /// An image.
    pub fn image(grid: Grid) -> Self {
        Self { grid, seconds: None, track: 0 }
    }
}

/// Text with no medium in it, or behind the last: whole steps from where it starts. Counted and rounded once, so that a token has
/// the same place whether it is generated or comes back in the next turn's prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextLine {
    start: f32,
    steps: usize,
}

impl TextLine {
    /// Where the n-th token from here on stands, in all three.
    pub fn at(&self, n: usize) -> f32 {
        self.start + (self.steps + n) as f32
    }
}

/// What comes after a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct After {
    /// Where it stands.
    pub text: TextLine,
    /// Whether a longer prompt would go on elsewhere: then nothing that is generated may be taken for a part of one.
    pub apart: bool,
}

impl PlaceRule {
    /// How the audio track of a video stands among its frames; none where the family has no such rule.
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

    /// Writes the place of every token of a prompt. `is_media` says which tokens are placeholders of images and videos, `items` are
    /// what they stand for, in order.
    ///
    /// Returns where the tokens after the prompt stand.
    ///
    /// # Panics
    /// When the items have fewer or more tokens than there are placeholders. The caller that made the prompt has
    /// counted them.
    pub fn places(&self, is_media: impl Fn(usize) -> bool, items: &[PlacedItem], out: &mut [[f32; 3]]) -> After {
        let (mut at, mut text, mut greatest) = (0, TextLine { start: 0.0, steps: 0 }, 0.0_f32);
        // Planes of one item that have text between them, after the one at hand.
        let (mut items, mut planes) = (items.iter(), 0..0);
        let mut item = PlacedItem::image(Grid { frames: 1, height: 0, width: 0 });
        // A word that has the place of the one before it.
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
                // Behind the last token, whichever it is; what is generated goes on behind all of them.
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
        // The references go on behind the latest time, where it is ahead of the text.
        let apart = greatest > text.at(0);
        After { text: if apart { TextLine { start: greatest, steps: 0 } } else { text }, apart }
    }
}

/// The tokens of an image, or of the frames of a video, that stand together.
struct Plane<'a> {
    rule: &'a PlaceRule,
    item: &'a PlacedItem,
    /// Where its first token stands.
    position: f32,
}

impl Plane<'_> {
    fn sides(&self) -> [usize; 2] {
        [self.item.grid.height, self.item.grid.width].map(|side| side / self.rule.merge)
    }

    /// Frames, or groups of them.
    fn times(&self) -> usize {
        if self.rule.frames_apart { 1 } else { self.item.grid.frames }
    }

    fn tokens(&self) -> usize {
        self.times() * self.sides().iter().product::<usize>()
    }

    /// Where a group of frames stands in time. Single precision, and cut off before or after the step is known, as the references do.
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

    /// Behind its longer side.
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
        // A time far ahead moves what comes after the prompt, not what comes after the video.
        assert_eq!(next(together.places(|i| (1..3).contains(&i), &[video], &mut out)), (6.0, true));
        assert_eq!(out, [[0.0; 3], [1.0; 3], [5.0, 1.0, 1.0], [2.0; 3]]);
        // Exact: frames stand between steps, and the text behind them.
        let exact = PlaceRule { steps_per_second: Some(0.5), times: FrameTimes::Exact, ..together };
        assert_eq!(next(exact.places(|i| (1..3).contains(&i), &[video], &mut out)), (3.75, false));
        assert_eq!(out, [[0.0; 3], [1.0; 3], [1.75, 1.0, 1.0], [2.75; 3]]);
        // At whole steps, and the text behind them.
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
        // Two words, a frame, the track, a frame, two words.
        assert_eq!(next(exact.places(seen, &[video], &mut out)), (7.5, false));
        let times = [0.0, 1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 4.5, 4.5, 5.5, 6.5];
        assert_eq!(out.map(|place| place[0]), times);
        assert_eq!((out[3], out[6], out[8]), ([2.0, 2.0, 3.0], [4.0; 3], [4.5, 2.0, 3.0]));
        // The words before share a place, and those behind. The text goes on behind the last token, what is generated behind all.
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
