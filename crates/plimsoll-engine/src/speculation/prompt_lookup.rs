//! Drafts without a draft head: a text that repeats itself (code that is edited, a document that is quoted, a loop) goes on as it did where
//! its last tokens stood before. Nothing is kept between steps: the text is searched from its end.

/// Tokens that must be the same, at least.
const FEWEST: usize = 2;
/// So many are enough: the latest place with these is taken.
const ENOUGH: usize = 16;
/// Tokens looked at together.
const TOGETHER: usize = 16;

/// The last tokens of a text stood in it before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Repeat {
    /// How many of them.
    pub length: usize,
    /// Where it went on then.
    next: usize,
}

impl Repeat {
    /// The place where the most of the last tokens stood before, of several the latest.
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

    /// How it goes on if it goes on as it did, and then as it did before that.
    pub fn guesses(self, tokens: &[u32]) -> impl Iterator<Item = u32> {
        tokens[self.next..].iter().copied().cycle()
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

    /// The same, looked for place by place.
    fn slowly(text: &[u32]) -> Option<Repeat> {
        let places = (1..text.len()).rev().map(|next| Repeat { length: same_at_end(&text[..next], text), next });
        let best = places.rev().max_by_key(|repeat| repeat.length)?;
        (best.length >= FEWEST).then_some(best)
    }

    proptest! {
        #[test]
        fn no_place_is_better(text in prop::collection::vec(0u32..3, 0..200)) {
            prop_assert_eq!(Repeat::find(&text), slowly(&text));
        }
    }
}
