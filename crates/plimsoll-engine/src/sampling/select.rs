//! Truncation without sorting the vocabulary: which tokens top-k and top-p keep.
//!
//! Tokens are ordered by logit, the larger first, equal ones by id, the smaller first. Every truncation keeps a head of
//! that order, so its last token alone describes it. Block maxima limit the search. The k-th largest of them bounds the
//! k-th largest logit from below. A block with a smaller maximum is skipped. The results are exactly those of a full
//! sort, since weights add up without rounding.
//!
//! Not here: random numbers, penalties.

use super::weights::{BLOCK, DEPTH_MAX, Weigher};

/// A token that may be kept, as a number that sorts like tokens, the most likely first. Its high bits are the logit,
/// arranged so that a larger logit is a smaller number. Its low bits are the id. Numbers partition several times faster
/// than pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate(u64);

impl Candidate {
    /// The token `id` with a logit that is not NaN.
    pub(super) fn new(logit: f32, id: u32) -> Self {
        // Adding zero makes −0 a +0, so that the two stay equal.
        let bits = (logit + 0.0).to_bits();
        let descending = if bits >> 31 == 1 { bits } else { !bits & 0x7FFF_FFFF };
        Self(u64::from(descending) << 32 | u64::from(id))
    }

    /// The token's logit.
    #[inline]
    pub(super) fn logit(self) -> f32 {
        let descending = (self.0 >> 32) as u32;
        f32::from_bits(if descending >> 31 == 1 { descending } else { !descending & 0x7FFF_FFFF })
    }

    /// The token's id.
    #[inline]
    pub(super) fn id(self) -> u32 {
        self.0 as u32
    }
}

/// The head of the order that truncation keeps, and its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Kept {
    /// The last token that is kept.
    pub last: Candidate,
    /// Weight of all kept tokens.
    pub mass: u64,
}

impl Kept {
    /// Keeps every token that has a weight.
    pub(super) fn all(mass: u64) -> Self {
        Self { last: Candidate::new(f32::NEG_INFINITY, u32::MAX), mass }
    }

    /// Whether all tokens are kept, so that the weights of whole blocks count.
    pub(super) fn is_all(&self) -> bool {
        self.last.id() == u32::MAX
    }

    /// Whether a token is kept.
    #[inline]
    pub(super) fn has(&self, logit: f32, id: u32) -> bool {
        logit > self.last.logit() || (logit == self.last.logit() && id <= self.last.id())
    }
}

/// One row of logits with the largest of each block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'a> {
    pub logits: &'a [f32],
    pub block_max: &'a [f32],
    pub weigher: Weigher,
}

impl<'a> Row<'a> {
    /// Blocks that reach `threshold`, each with the id of its first token.
    pub(super) fn blocks_from(&self, threshold: f32) -> impl Iterator<Item = (u32, &'a [f32])> + use<'a> {
        let blocks = self.logits.chunks(BLOCK).zip(self.block_max);
        let numbered = (0_u32..).step_by(BLOCK).zip(blocks);
        numbered.filter(move |&(_, (_, &max))| max >= threshold).map(|(first, (block, _))| (first, block))
    }

    /// The logit `depth` temperatures below the largest, or the min-p floor if that is higher.
    fn threshold(&self, temperature: f32, depth: f32) -> f32 {
        (self.weigher.max - depth * temperature).max(self.weigher.floor)
    }

    /// Replaces `found` by all tokens with a logit of at least `threshold`.
    fn collect(&self, threshold: f32, found: &mut Vec<Candidate>) {
        found.clear();
        for (first, block) in self.blocks_from(threshold) {
            let numbered = (first..).zip(block.iter().copied());
            let reaching = numbered.filter(|&(_, logit)| logit >= threshold && logit > f32::NEG_INFINITY);
            found.extend(reaching.map(|(id, logit)| Candidate::new(logit, id)));
        }
    }

    /// The `k` most likely tokens (k ≥ 1), in no particular order, in `found`. Tokens without weight may be missing.
    pub(super) fn top_k(&self, k: usize, temperature: f32, maxima: &mut Vec<f32>, found: &mut Vec<Candidate>) {
        let mut threshold = self.threshold(temperature, DEPTH_MAX);
        if k <= self.block_max.len() {
            maxima.clear();
            maxima.extend_from_slice(self.block_max);
            // k blocks have a token of at least this, so the k most likely tokens are no smaller.
            let (_, kth, _) = maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
            threshold = threshold.max(*kth);
        }
        self.collect(threshold, found);
        if found.len() > k {
            found.select_nth_unstable(k - 1);
            found.truncate(k);
        }
    }

    /// Tokens that together weigh at least `target`, and at least all that are as likely as any of them, in `found`.
    pub(super) fn reach(&self, target: u64, temperature: f32, found: &mut Vec<Candidate>) {
        // Most rows are peaked: look at the few tokens near the top first, and deeper only if they do not suffice.
        let mut depth = DEPTH_MAX / 8.0;
        loop {
            self.collect(self.threshold(temperature, depth), found);
            if depth >= DEPTH_MAX || self.mass(found) >= target {
                return;
            }
            depth *= 2.0;
        }
    }

    /// Weight of all of `found`.
    pub(super) fn mass(&self, found: &[Candidate]) -> u64 {
        let blocks = found.chunks(BLOCK).map(|some| {
            let mut logits = [f32::NEG_INFINITY; BLOCK];
            logits.iter_mut().zip(some).for_each(|(logit, one)| *logit = one.logit());
            self.weigher.sum_block(&logits)
        });
        blocks.sum()
    }

    /// The shortest head of `found` that weighs at least `target`; all of `found` if it does not weigh that much.
    ///
    /// Halves the part that holds the end again and again: linear time on the whole. `found` must not be empty.
    pub(super) fn head(&self, found: &mut [Candidate], target: u64) -> Kept {
        let (mut part, mut before) = (found, 0);
        while part.len() > 1 {
            let half = part.len() / 2;
            part.select_nth_unstable(half - 1);
            let (likely, rest) = part.split_at_mut(half);
            let mass = self.mass(likely);
            if before + mass >= target {
                part = likely;
            } else {
                before += mass;
                part = rest;
            }
        }
        Kept { last: part[0], mass: before + self.weigher.weigh(part[0].logit()) }
    }
}
