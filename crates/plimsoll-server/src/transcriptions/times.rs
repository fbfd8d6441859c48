//! The rules of Whisper's times: which tokens may follow which.
//!
//! Reference: transformers, `WhisperTimeStampLogitsProcessor`. A text begins with a time. Times come in pairs, the end of a segment and the
//! beginning of the next, and never go backwards. The sampler applies the rule that all times count together.

use std::sync::Arc;

use plimsoll_engine::constraint::{Constraint, Grammar, Unfit};

use super::masks::mask;

/// The range of ids that time tokens have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Times {
    /// The id of zero seconds.
    pub first: u32,
    /// The id of the last time.
    pub last: u32,
    /// The id of the last time that a text may begin with.
    pub initial: u32,
}

impl Times {
    /// Whether a token is a time.
    pub fn has(self, token: u32) -> bool {
        (self.first..=self.last).contains(&token)
    }
}

/// A set of tokens.
type Mask = Box<[u32]>;

/// The rules for texts between times.
#[derive(Debug)]
pub(super) struct Timed {
    /// Text tokens, and tokens that end a text.
    text: Box<[u32]>,
    /// Tokens that end a text.
    ends: Box<[u32]>,
    vocab: u32,
    times: Times,
}

impl Timed {
    /// `text` has the text tokens and the tokens that end a text, `ends` only the latter.
    pub fn new(text: Box<[u32]>, ends: &[u32], vocab: u32, times: Times) -> Arc<Self> {
        Arc::new(Self { text, ends: mask(vocab, ends.iter().copied()), vocab, times })
    }
}

/// The rules for one output: the tokens of a heading, each from its own set, then texts between times.
#[derive(Debug)]
pub(super) struct Rules {
    rules: Arc<Timed>,
    heading: Arc<[Mask]>,
    /// The token of silence. Its log-probability is reported with the first token.
    silence: Option<u32>,
}

impl Rules {
    pub fn new(rules: &Arc<Timed>, heading: Vec<Mask>, silence: Option<u32>) -> Self {
        Self { rules: Arc::clone(rules), heading: heading.into(), silence }
    }
}

impl Grammar for Rules {
    fn begin(&self) -> Result<Box<dyn Constraint>, String> {
        let (rules, heading) = (Arc::clone(&self.rules), Arc::clone(&self.heading));
        let (now, silence) = (mask(self.rules.vocab, []), self.silence);
        Ok(Box::new(Walk { rules, heading, silence, now, headed: 0, latest: None, last: None, before: true }))
    }

    fn bytes_max(&self, _max_tokens: u32) -> u64 {
        // The mask for texts, its copy for the next token, the mask of the ends, and the report of silence.
        (self.heading.len() as u64 + 3) * size_of_val(&*self.rules.text) as u64 + REPORT_BYTES
    }
}

/// Heap bytes of a report of one token.
const REPORT_BYTES: u64 = 32;

struct Walk {
    rules: Arc<Timed>,
    heading: Arc<[Mask]>,
    silence: Option<u32>,
    /// The mask of the next token.
    now: Box<[u32]>,
    /// The number of heading tokens so far.
    headed: usize,
    /// The id of the latest time.
    latest: Option<u32>,
    /// Whether the last token is a time; none before the first.
    last: Option<bool>,
    /// Whether the token before the last is a time, or missing.
    before: bool,
}

impl Walk {
    /// Returns the text tokens that may follow, and the times.
    fn next(&self) -> (Option<&[u32]>, std::ops::Range<u32>) {
        let Times { first, last, initial } = self.rules.times;
        let end = last + 1;
        match (self.last, self.latest) {
            (None, _) => (None, first..initial + 1),
            // The last token is a time that begins a segment.
            (Some(true), _) if self.before => (Some(&self.rules.text), end..end),
            // The last token is a time that ends a segment: the next one begins at once, or the text ends.
            (Some(true), Some(latest)) => (Some(&self.rules.ends), latest..end),
            // The next time must be later than the segment's beginning.
            (_, Some(latest)) => (Some(&self.rules.text), latest + 1..end),
            (_, None) => (Some(&self.rules.text), first..end),
        }
    }
}

impl Constraint for Walk {
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit> {
        if let Some(heading) = self.heading.get(self.headed) {
            return Ok(Some(heading));
        }
        let mut now = std::mem::take(&mut self.now);
        let (text, times) = self.next();
        match text {
            Some(text) => now.copy_from_slice(text),
            None => now.fill(0),
        }
        for id in times {
            now[id as usize / 32] |= 1 << (id % 32);
        }
        self.now = now;
        Ok(Some(&self.now))
    }

    fn takes_most_likely(&self) -> bool {
        self.headed < self.heading.len()
    }

    fn also_report(&self) -> Option<u32> {
        self.silence.filter(|_| self.headed == 0 && self.last.is_none())
    }

    fn grouped_from(&self) -> Option<u32> {
        (self.headed == self.heading.len()).then_some(self.rules.times.first)
    }

    fn accept(&mut self, token: u32) -> Result<(), Unfit> {
        if self.headed < self.heading.len() {
            self.headed += 1;
            return Ok(());
        }
        let time = self.rules.times.has(token);
        self.before = self.last.unwrap_or(true);
        self.last = Some(time);
        self.latest = if time { Some(token) } else { self.latest };
        Ok(())
    }

    fn complete(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transcriptions::masks::text_mask;

    /// Text tokens are 0 to 9, of which 9 ends a text; 10 to 19 are special, times are 20 to 29.
    fn walk(heading: &[u32]) -> Box<dyn Constraint> {
        let heading = heading.iter().map(|id| mask(30, [*id])).collect();
        let times = Times { first: 20, last: 29, initial: 23 };
        Rules::new(&Timed::new(text_mask(30, 10, &[9], &[3]), &[9], 30, times), heading, Some(19)).begin().unwrap()
    }

    fn allowed(walk: &mut dyn Constraint) -> Vec<u32> {
        let words = walk.allowed().unwrap().unwrap();
        (0..30).filter(|id| words[0] >> id & 1 == 1).collect()
    }

    /// Returns the tokens that may follow these tokens.
    fn after(tokens: &[u32]) -> Vec<u32> {
        let mut walk = walk(&[]);
        for token in tokens {
            assert!(allowed(&mut *walk).contains(token), "{token} of {tokens:?}");
            assert_eq!(walk.grouped_from(), Some(20));
            walk.accept(*token).unwrap();
        }
        allowed(&mut *walk)
    }

    const TEXT: [u32; 9] = [0, 1, 2, 4, 5, 6, 7, 8, 9];

    fn with(texts: &[u32], times: std::ops::RangeInclusive<u32>) -> Vec<u32> {
        texts.iter().copied().chain(times).collect()
    }

    #[test]
    fn a_text_begins_with_a_time_that_is_not_too_late() {
        assert_eq!(after(&[]), with(&[], 20..=23));
    }

    #[test]
    fn the_time_that_begins_a_segment_is_followed_by_text() {
        assert_eq!(after(&[21]), TEXT);
        assert_eq!(after(&[21, 5, 24, 24]), TEXT);
    }

    #[test]
    fn the_time_that_ends_a_segment_is_followed_by_a_time_or_the_end() {
        assert_eq!(after(&[21, 5, 24]), with(&[9], 24..=29));
    }

    #[test]
    fn times_never_go_backwards_and_segments_have_a_length() {
        assert_eq!(after(&[21, 5]), with(&TEXT, 22..=29));
        assert_eq!(after(&[21, 5, 24, 26, 5]), with(&TEXT, 27..=29));
        assert_eq!(after(&[21, 5, 29, 29, 5]), TEXT, "no time is left");
    }

    #[test]
    fn a_heading_comes_first_and_follows_no_rule_of_times() {
        let mut walk = walk(&[12, 15]);
        assert_eq!(allowed(&mut *walk), [12]);
        assert!(walk.takes_most_likely() && walk.grouped_from().is_none());
        walk.accept(12).unwrap();
        assert_eq!(allowed(&mut *walk), [15]);
        walk.accept(15).unwrap();
        assert_eq!(allowed(&mut *walk), with(&[], 20..=23));
        assert!(!walk.takes_most_likely() && !walk.complete());
    }

    #[test]
    fn silence_is_reported_with_the_first_token_alone() {
        for heading in [&[][..], &[12, 15]] {
            let mut walk = walk(heading);
            for token in heading.iter().copied().chain([21, 5]) {
                assert_eq!(walk.also_report().is_some(), token == *heading.first().unwrap_or(&21), "before {token}");
                walk.accept(token).unwrap();
            }
            assert_eq!(walk.also_report(), None);
        }
    }
}
