//! Prompt lookup: drafts without a draft head. A text that repeats itself (edited code, a quoted document, a loop) continues as it did
//! after an earlier occurrence of its last tokens. The text is searched from its end. One place is kept between steps ([`Trail`]): the
//! place that the text repeats. If the copy differs in a token, drafts continue after it, although its last tokens are new to the text.

/// The least matching last tokens.
const FEWEST: usize = 2;
/// Matching tokens that end the search: the latest place with these is taken.
const ENOUGH: usize = 16;
/// Tokens compared in one batch.
const TOGETHER: usize = 16;

/// An earlier occurrence of a text's last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Repeat {
    /// Number of matching tokens.
    pub length: usize,
    /// Index of the token after it.
    next: usize,
}

impl Repeat {
    /// Finds the place with the most matching last tokens; of several, the latest.
    pub fn find(tokens: &[u32]) -> Option<Self> {
        let (last, before) = tokens.split_last()?;
        let mut best = Self { length: FEWEST - 1, next: 0 };
        let mut first = before.len();
        for part in before.rchunks(TOGETHER) {
            first -= part.len();
            // Without an early end, so that vectors compare.
            if !part.iter().fold(false, |found, token| found | (token == last)) {
                continue;
            }
            for (index, _) in part.iter().enumerate().rev().filter(|(_, token)| *token == last) {
                let next = first + index + 1;
                let length = same_at_end(&tokens[..next], tokens);
                if length > best.length {
                    best = Self { length, next };
                }
                if length == ENOUGH {
                    return Some(best);
                }
            }
        }
        (best.length >= FEWEST).then_some(best)
    }

    /// Returns guesses without end: the tokens after the earlier occurrence, repeated from there at the text's end.
    pub fn guesses(self, tokens: &[u32]) -> impl Iterator<Item = u32> {
        tokens[self.next..].iter().copied().cycle()
    }
}

/// Last tokens that a new place must share to replace the place that is followed.
const BETTER: usize = 4;
/// Credit that a place needs to be followed past a token that differs.
const CREDIT_LEAST: u32 = 4;
/// The most credit. Each token that differs halves it, so a place is left after seven such tokens in a row.
const CREDIT_MOST: u32 = 1 << 8;

/// How a text may continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Continuation {
    /// The place that the text repeats.
    pub repeat: Repeat,
    /// The last tokens differ from the tokens before the place.
    pub resumed: bool,
}

/// The place that a text repeats. It depends on the text alone, not on drafts or other requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trail {
    /// Index of the token that the text's next one should equal.
    next: u32,
    /// Tokens of the text at the last call of [`Self::follow`].
    at: u32,
    /// Counts tokens that were equal; a token that differs halves it.
    credit: u32,
}

impl Trail {
    /// Takes in the tokens that were added, and finds how the text may continue.
    pub fn follow(&mut self, tokens: &[u32]) -> Option<Continuation> {
        self.advance(tokens);
        let next = self.next as usize;
        let kept = (self.credit > 0 && next < tokens.len()).then_some(next);
        let same = kept.map_or(0, |next| same_at_end(&tokens[..next], tokens));
        if let (Some(next), ENOUGH) = (kept, same) {
            return Some(Continuation { repeat: Repeat { length: ENOUGH, next }, resumed: false });
        }
        let found = Repeat::find(tokens);
        match (kept, found) {
            (Some(next), found) if found.is_none_or(|found| found.length < BETTER) && self.credit >= CREDIT_LEAST => {
                let resumed = same < FEWEST;
                Some(Continuation { repeat: Repeat { length: same.max(FEWEST), next }, resumed })
            }
            (_, Some(repeat)) => {
                if kept != Some(repeat.next) {
                    (self.next, self.credit) = (repeat.next as u32, repeat.length as u32);
                }
                Some(Continuation { repeat, resumed: false })
            }
            (_, None) => None,
        }
    }

    /// Moves the place on by the tokens that were added since.
    fn advance(&mut self, tokens: &[u32]) {
        let (at, next) = (self.at as usize, self.next as usize);
        self.at = tokens.len() as u32;
        let Some(added) = tokens.get(at..).filter(|_| self.credit > 0) else {
            // A shorter text is another one.
            self.credit = 0;
            return;
        };
        for (index, token) in added.iter().enumerate() {
            let same = tokens[next + index] == *token;
            self.credit = if same { (self.credit + 1).min(CREDIT_MOST) } else { self.credit / 2 };
        }
        self.next += added.len() as u32;
    }
}

/// How many of their last tokens are the same, up to [`ENOUGH`].
fn same_at_end(a: &[u32], b: &[u32]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(ENOUGH).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn find(text: &[u32]) -> Option<(usize, Vec<u32>)> {
        Repeat::find(text).map(|repeat| (repeat.length, repeat.guesses(text).take(4).collect()))
    }

    #[test]
    fn a_text_goes_on_as_it_did() {
        assert_eq!(find(&[]), None);
        assert_eq!(find(&[7]), None);
        assert_eq!(find(&[1, 2, 3, 2]), None, "one token says little");
        assert_eq!(find(&[1, 2, 3, 4, 5, 9, 2, 3]), Some((2, vec![4, 5, 9, 2])));
        // The longer one, though it is older; of equals the latest.
        assert_eq!(find(&[1, 2, 3, 50, 8, 2, 3, 60, 1, 2, 3]), Some((3, vec![50, 8, 2, 3])));
        assert_eq!(find(&[2, 3, 50, 8, 2, 3, 60, 61, 62, 2, 3]), Some((2, vec![60, 61, 62, 2])));
    }

    #[test]
    fn a_loop_goes_round_beyond_its_end() {
        assert_eq!(find(&[5, 5, 5]), Some((2, vec![5, 5, 5, 5])));
        assert_eq!(find(&[9, 1, 2, 1, 2, 1, 2]), Some((4, vec![1, 2, 1, 2])));
        let long: Vec<u32> = (0..40).map(|i| i % 3).collect();
        assert_eq!(find(&long), Some((ENOUGH, vec![1, 2, 0, 1])));
    }

    /// A slow [`Repeat::find`] that compares every place.
    fn slowly(text: &[u32]) -> Option<Repeat> {
        let places = (1..text.len()).rev().map(|next| Repeat { length: same_at_end(&text[..next], text), next });
        let best = places.rev().max_by_key(|repeat| repeat.length)?;
        (best.length >= FEWEST).then_some(best)
    }

    /// The texts that [`accepted`] measures, each with the tokens that are there before it is written.
    fn records() -> (Vec<u32>, usize) {
        // Records of 24 tokens: names of fields, and three values that are seldom the same.
        let record = |n: u32| {
            (0..24).map(move |at| match at {
                5 => 1000 + n,
                11 => 2000 + n * n % 91,
                19 => 3000 + n * 7 % 83,
                _ => at,
            })
        };
        ((0..60).flat_map(record).collect(), 24 * 4)
    }

    fn edited() -> (Vec<u32>, usize) {
        let text: Vec<u32> = (0..800u32).map(|i| i * i % 617 + i % 13).collect();
        // In the copy, one token of every forty differs.
        let copy = text.iter().enumerate().map(|(i, token)| if i % 40 == 7 { 5000 + token % 3 } else { *token });
        (text.iter().copied().chain([9001, 9002]).chain(text[..6].iter().copied()).chain(copy.skip(6)).collect(), 808)
    }

    /// Returns the steps that write a text with at most `drafts` drafts each, the right drafts, and the checked drafts.
    fn accepted(
        text: &[u32],
        from: usize,
        drafts: usize,
        mut find: impl FnMut(&[u32]) -> Option<Repeat>,
    ) -> [usize; 3] {
        let (mut at, mut counts) = (from, [0; 3]);
        while at < text.len() {
            let guesses: Vec<u32> =
                find(&text[..at]).into_iter().flat_map(|repeat| repeat.guesses(&text[..at]).take(drafts)).collect();
            let right = guesses.iter().zip(&text[at..]).take_while(|(guess, token)| guess == token).count();
            at += right + 1;
            counts = [counts[0] + 1, counts[1] + right, counts[2] + guesses.len()];
        }
        counts
    }

    #[test]
    fn a_place_that_is_followed_behind_differences_gains_steps() {
        for (name, (text, from), most) in [("records", records(), 0.6), ("edited", edited(), 0.8)] {
            for drafts in [3, 8] {
                let searched = accepted(&text, from, drafts, Repeat::find);
                let mut trail = Trail::default();
                let followed =
                    accepted(&text, from, drafts, |text| trail.follow(text).map(|continuation| continuation.repeat));
                println!(
                    "{name}, {drafts} drafts: steps, right, checked: searched {searched:?}, followed {followed:?}"
                );
                let most = if drafts == 8 { most } else { 0.86 };
                assert!(followed[0] as f64 <= most * searched[0] as f64, "{name}: {followed:?} {searched:?}");
            }
        }
    }

    #[test]
    fn a_text_without_repetition_is_not_followed() {
        let mut random = 1u32;
        let text: Vec<u32> = std::iter::repeat_with(|| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            random >> 26
        })
        .take(3000)
        .collect();
        let mut trail = Trail::default();
        let (mut resumed, mut at) = (0, 100);
        while at < text.len() {
            resumed += usize::from(trail.follow(&text[..at]).is_some_and(|continuation| continuation.resumed));
            at += 1;
        }
        assert!(resumed < 300, "{resumed} of 2900 steps");
    }

    #[test]
    fn a_trail_is_that_of_the_text_whatever_was_drafted() {
        let (text, from) = edited();
        let mut often = Trail::default();
        for end in from..text.len() {
            let step = often.follow(&text[..end]);
            // A trail that reached the text's end in a longer step is at the same place.
            if end % 7 == 0 && step.is_some_and(|step| step.repeat.length == ENOUGH) {
                let mut seldom = Trail::default();
                seldom.follow(&text[..end - 3]);
                assert_eq!(
                    seldom.follow(&text[..end]).map(|step| step.repeat.guesses(&text[..end]).next()),
                    step.map(|step| step.repeat.guesses(&text[..end]).next())
                );
            }
        }
        // A text shorter than before, and an empty one, do not panic.
        assert_eq!(often.follow(&text[..3]).map(|step| step.resumed), None);
        assert_eq!(often.follow(&[]), None);
    }

    proptest! {
        #[test]
        fn a_trail_stays_within_its_text(text in prop::collection::vec(0u32..3, 0..200), steps in prop::collection::vec(0usize..9, 0..60)) {
            let (mut trail, mut end) = (Trail::default(), 0);
            for step in steps {
                end = (end + step).min(text.len());
                if let Some(continuation) = trail.follow(&text[..end]) {
                    prop_assert!(continuation.repeat.next < end);
                }
            }
        }

        #[test]
        fn no_place_is_better(text in prop::collection::vec(0u32..3, 0..200)) {
            prop_assert_eq!(Repeat::find(&text), slowly(&text));
        }
    }
}
