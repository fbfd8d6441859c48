//! Where the tokens of a prompt with images stand in time, height and width: the `get_rope_index` of transformers.
//!
//! Text advances in all three together. An image's tokens share one time and lie in a plane; text after it goes on behind the
//! plane's longer side, so positions grow more slowly than tokens. What is generated later stands at the same distance
//! from its index as the end of the prompt does.

use crate::Grid;

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
    /// At whole steps. Text goes on behind the last frame (Qwen2.5-Omni).
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
}

impl PlacedItem {
    /// An image.
    pub fn image(grid: Grid) -> Self {
        Self { grid, seconds: None }
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
    /// Writes the place of every token of a prompt. `is_media` says which tokens are placeholders, `items` are what they stand for,
    /// in order.
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
        while at < out.len() {
            let position = text.at(0);
            if !is_media(at) {
                out[at] = [position; 3];
                (text.steps, at) = (text.steps + 1, at + 1);
                continue;
            }
            if planes.is_empty() {
                item = *items.next().expect("an item for every placeholder");
                planes = 0..if self.frames_apart { item.grid.frames } else { 1 };
            }
            planes.next();
            let times = if self.frames_apart { 1 } else { item.grid.frames };
            let (height, width) = (item.grid.height / self.merge, item.grid.width / self.merge);
            let spaced = item.seconds.zip(self.steps_per_second);
            let mut last = position;
            for time in 0..times {
                // Single precision, and cut off before or after the step is known, as the references do.
                last = position
                    + match spaced {
                        Some((seconds, steps)) => match self.times {
                            FrameTimes::Cut => (time as f32 * (steps * seconds)).trunc(),
                            FrameTimes::CutBefore => (time as f32 * seconds * steps).trunc(),
                            FrameTimes::Exact => time as f32 * seconds * steps,
                        },
                        None => time as f32,
                    };
                for row in 0..height {
                    for (column, place) in out[at..at + width].iter_mut().enumerate() {
                        *place = [last, position + row as f32, position + column as f32];
                    }
                    at += width;
                }
                greatest = greatest.max(last + 1.0);
            }
            let behind = position + height.max(width) as f32;
            let start = if self.times == FrameTimes::Cut { behind } else { behind.max(last + 1.0) };
            text = TextLine { start, steps: 0 };
        }
        assert!(items.next().is_none() && planes.is_empty(), "a placeholder for every token of every item");
        // The references go on behind the latest time, where it is ahead of the text.
        let apart = greatest > text.at(0);
        After { text: if apart { TextLine { start: greatest, steps: 0 } } else { text }, apart }
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
            let video =
                PlacedItem { grid: Grid { frames: 3, height: 2, width: 2 }, seconds: Some(tenth as f32 / 300.0) };
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
        let video = PlacedItem { grid, seconds: Some(1.5) };
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
    #[should_panic(expected = "for every token of every item")]
    fn an_item_too_many_is_a_bug() {
        RULE.places(|_| false, &[PlacedItem::image(Grid { frames: 1, height: 2, width: 2 })], &mut [[0.0; 3]]);
    }
}
