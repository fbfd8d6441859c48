//! Cuts a window's tokens into segments, and finds the beginning of the next window.
//!
//! Reference: transformers, `WhisperGenerationMixin._retrieve_segment`. The text after the last pair of times is dropped: the next window
//! begins there. In this implementation a window also moves by at least a thirtieth of its length, or else as a whole.

use std::ops::Range;

use super::times::Times;

/// Frames from one time token to the next.
pub(super) const STEP_FRAMES: u64 = 2;

/// A segment of a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Its tokens, times included.
    pub tokens: Range<usize>,
    /// Its beginning and end, in steps from the window's beginning.
    pub steps: [u64; 2],
}

/// Returns the segments of a window's tokens, and the number of frames from this window's beginning to the next window's. The clip fills
/// `frames` frames of the window. A move by less than `least` frames becomes a move by all of them.
pub(super) fn cuts(tokens: &[u32], times: Times, frames: u64, least: u64) -> (Vec<Cut>, u64) {
    let step = |at: usize| u64::from(tokens[at].saturating_sub(times.first));
    let time = |at: usize| tokens.get(at).is_some_and(|token| times.has(*token));
    // The end of the text that no pair of times has ended.
    let rest = |from: usize| {
        let last = (from..tokens.len()).rev().find(|at| time(*at)).map(step);
        last.filter(|last| *last > 0).unwrap_or(frames / STEP_FRAMES)
    };
    let pairs: Vec<usize> = (1..tokens.len()).filter(|at| time(at - 1) && time(*at)).collect();
    let Some(last) = pairs.last().copied() else {
        let whole = Cut { tokens: 0..tokens.len(), steps: [0, rest(0)] };
        return (if tokens.is_empty() { Vec::new() } else { vec![whole] }, frames);
    };
    let mut begin = 0;
    let mut found = Vec::with_capacity(pairs.len() + 1);
    for end in pairs {
        found.push(Cut { tokens: begin..end, steps: [step(begin), step(end - 1)] });
        begin = end;
    }
    let ends_with_one = tokens.len() >= 2 && time(tokens.len() - 1) && !time(tokens.len() - 2);
    let moved = step(last - 1) * STEP_FRAMES;
    if ends_with_one {
        found.push(Cut { tokens: begin..tokens.len(), steps: [step(begin), step(tokens.len() - 1)] });
        return (found, frames);
    }
    if moved < least {
        // The next window would begin at nearly the same frame and repeat the text after the last pair.
        if tokens.len() > last + 1 {
            found.push(Cut { tokens: begin..tokens.len(), steps: [step(begin), rest(last + 1).max(step(begin))] });
        }
        return (found, frames);
    }
    // The second time of the last pair belongs to the segment that it ends.
    if let Some(cut) = found.last_mut() {
        cut.tokens.end = last + 1;
    }
    (found, moved)
}

/// Returns the index at which the last segment ended by a pair of times ends; 0 if there is none.
pub(super) fn ended(tokens: &[u32], times: Times) -> usize {
    let pair = |at: &usize| times.has(tokens[at - 1]) && times.has(tokens[*at]);
    (1..tokens.len()).rev().find(pair).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The id of the first time token.
    const T: u32 = 100;
    const TIMES: Times = Times { first: T, last: T + 1500, initial: T + 50 };

    /// Tokens and steps of a cut.
    type Part = (Range<usize>, [u64; 2]);

    fn cut(tokens: &[u32], frames: u64) -> (Vec<Part>, u64) {
        let (cuts, moved) = cuts(tokens, TIMES, frames, 100);
        (cuts.into_iter().map(|cut| (cut.tokens, cut.steps)).collect(), moved)
    }

    #[test]
    fn what_follows_the_last_pair_is_left_to_the_next_window() {
        let tokens = [T, 1, 2, T + 100, T + 110, 3, T + 200, T + 200, 4, 5];
        assert_eq!(cut(&tokens, 3000), (vec![(0..4, [0, 100]), (4..8, [110, 200])], 400));
        assert_eq!(ended(&tokens, TIMES), 7);
        assert_eq!(cut(&tokens[..8], 3000), cut(&tokens, 3000));
    }

    #[test]
    fn one_time_at_the_end_ends_the_window() {
        let tokens = [T + 5, 1, T + 100, T + 100, 3, T + 200];
        assert_eq!(cut(&tokens, 2900), (vec![(0..3, [5, 100]), (3..6, [100, 200])], 2900));
    }

    #[test]
    fn a_window_without_a_pair_is_one_segment() {
        assert_eq!(cut(&[T + 5, 1, 2], 2900), (vec![(0..3, [0, 5])], 2900), "the last time there is");
        assert_eq!(cut(&[T, 1, 2], 2901), (vec![(0..3, [0, 1450])], 2901), "zero is no end");
        assert_eq!(cut(&[T, 1, 2, T + 77], 2900), (vec![(0..4, [0, 77])], 2900));
        assert_eq!(cut(&[], 2900), (vec![], 2900));
        assert_eq!(ended(&[T, 1, 2], TIMES), 0);
    }

    #[test]
    fn a_window_that_would_hardly_move_counts_as_a_whole() {
        let tokens = [T, 1, T + 3, T + 3, 4, 5];
        assert_eq!(cut(&tokens, 2900), (vec![(0..3, [0, 3]), (3..6, [3, 1450])], 2900));
        assert_eq!(cut(&tokens[..4], 2900), (vec![(0..3, [0, 3])], 2900));
    }
}
