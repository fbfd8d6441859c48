//! Where the tokens of a prompt with pictures stand in time, height and width: the `get_rope_index` of transformers.
//!
//! Text advances in all three together. A picture's tokens share one time and lie in a plane; text after it goes on behind the
//! plane's longer side, so positions grow more slowly than tokens. What is generated later stands at the same distance
//! from its index as the end of the prompt does.

use crate::Grid;

/// How a family places pictures and videos.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlaceRule {
    /// Patches per side of a token.
    pub merge: usize,
    /// Whether each group of a video's frames stands alone, with text (its time) before it: Qwen3-VL and later.
    pub frames_apart: bool,
    /// Steps of time to a second of video, where groups of frames are spaced by their times (Qwen2.5-VL); otherwise by 1.
    pub steps_per_second: Option<f32>,
}

/// One picture or video of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacedItem {
    /// Its patches.
    pub grid: Grid,
    /// Of a video, the seconds from one group of frames to the next; none for a picture.
    pub seconds: Option<f32>,
}

impl PlacedItem {
    /// A picture.
    pub fn picture(grid: Grid) -> Self {
        Self { grid, seconds: None }
    }
}

impl PlaceRule {
    /// Writes the place of every token of a prompt. `is_media` says which tokens are placeholders, `items` are what they stand for,
    /// in order.
    ///
    /// Returns the place (the same in all three) of the first token after the prompt; the n-th after it stands n further.
    ///
    /// # Panics
    /// When the items have fewer or more tokens than there are placeholders, which whoever made the prompt has counted.
    pub fn places(&self, is_media: impl Fn(usize) -> bool, items: &[PlacedItem], out: &mut [[u32; 3]]) -> u32 {
        let (mut at, mut position, mut greatest) = (0, 0, 0);
        // Planes of one item that have text between them, after the one at hand.
        let (mut items, mut planes) = (items.iter(), 0..0);
        let mut item = PlacedItem::picture(Grid { frames: 1, height: 0, width: 0 });
        while at < out.len() {
            if !is_media(at) {
                out[at] = [position; 3];
                (greatest, position, at) = (greatest.max(position + 1), position + 1, at + 1);
                continue;
            }
            if planes.is_empty() {
                item = *items.next().expect("an item for every placeholder");
                planes = 0..if self.frames_apart { item.grid.frames } else { 1 };
            }
            planes.next();
            let times = if self.frames_apart { 1 } else { item.grid.frames };
            let (height, width) = (item.grid.height / self.merge, item.grid.width / self.merge);
            let step = item.seconds.zip(self.steps_per_second).map_or(1.0, |(seconds, steps)| steps * seconds);
            for time in 0..times {
                // Single precision and cut off, as the reference does.
                let time = position + (time as f32 * step) as u32;
                for row in 0..height as u32 {
                    for (column, place) in (0..).zip(&mut out[at..at + width]) {
                        *place = [time, position + row, position + column];
                    }
                    at += width;
                }
                greatest = greatest.max(time + 1);
            }
            position += height.max(width) as u32;
            greatest = greatest.max(position);
        }
        assert!(items.next().is_none() && planes.is_empty(), "a placeholder for every token of every item");
        greatest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: PlaceRule = PlaceRule { merge: 2, frames_apart: true, steps_per_second: None };

    #[test]
    fn text_alone_counts() {
        let mut out = [[0; 3]; 4];
        assert_eq!(RULE.places(|_| false, &[], &mut out), 4);
        assert_eq!(out, [[0; 3], [1; 3], [2; 3], [3; 3]]);
    }

    #[test]
    fn text_goes_on_behind_the_longer_side() {
        let item = PlacedItem::picture(Grid { frames: 1, height: 4, width: 6 });
        let mut out = [[0; 3]; 8];
        assert_eq!(RULE.places(|i| (1..7).contains(&i), &[item], &mut out), 5);
        assert_eq!(out, [[0; 3], [1; 3], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3], [4; 3]]);
    }

    #[test]
    fn frames_stand_apart_or_are_spaced_by_their_times() {
        let grid = Grid { frames: 2, height: 2, width: 2 };
        let video = PlacedItem { grid, seconds: Some(1.5) };
        let mut out = [[0; 3]; 4];
        assert_eq!(RULE.places(|i| i % 2 == 1, &[video], &mut out), 4);
        assert_eq!(out, [[0; 3], [1; 3], [2; 3], [3; 3]]);
        let together = PlaceRule { frames_apart: false, steps_per_second: Some(3.0), ..RULE };
        // A time far ahead moves what comes after the prompt, not what comes after the video.
        assert_eq!(together.places(|i| (1..3).contains(&i), &[video], &mut out), 6);
        assert_eq!(out, [[0; 3], [1; 3], [5, 1, 1], [2; 3]]);
    }

    #[test]
    #[should_panic(expected = "for every token of every item")]
    fn an_item_too_many_is_a_bug() {
        RULE.places(|_| false, &[PlacedItem::picture(Grid { frames: 1, height: 2, width: 2 })], &mut [[0; 3]]);
    }
}
