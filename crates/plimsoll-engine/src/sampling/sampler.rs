//! The sampler: one row of logits in, one token out, no allocation.
//!
//! Tokens are drawn by walking the kept ones in order of their ids until their weights pass a random integer below the
//! total. Nothing depends on the order in which a selection algorithm left its candidates.
//!
//! Not here: weights (`weights`), the choice of kept tokens (`select`), random numbers (`rng`).

use plimsoll_device::CANDIDATES_MAX;
use thiserror::Error;

use super::counts::TokenCounts;
use super::params::SamplingParams;
use super::rng::random_u64;
use super::select::{Candidate, Kept, Row};
use super::weights::{BLOCK, Weigher, apply_group, block_max};

/// Why a sampler could not be built.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SamplerError {
    /// A vocabulary without tokens or with more than any model has.
    #[error("the vocabulary has {vocab} tokens, a sampler takes between 1 and {limit}")]
    Vocab {
        /// The requested vocabulary size.
        vocab: usize,
        /// The largest vocabulary.
        limit: usize,
    },
    /// The host has no memory left for the scratch space.
    #[error("no host memory for a sampler over {vocab} tokens ({bytes} bytes)")]
    OutOfMemory {
        /// The requested vocabulary size.
        vocab: usize,
        /// The bytes the scratch space would have taken.
        bytes: usize,
    },
}

/// Why no token could be chosen; ends one request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SampleError {
    /// The row does not have one logit for each token.
    #[error("a row of {given} logits was given to a sampler over {vocab} tokens")]
    WrongLength {
        /// Logits in the row.
        given: usize,
        /// The vocabulary the sampler was built for.
        vocab: usize,
    },
    /// The model computed no number for any token that may be chosen.
    #[error("the model computed no usable logit: NaN in {nans} of {vocab}")]
    NotANumber {
        /// Logits that are NaN.
        nans: usize,
        /// Logits in the row.
        vocab: usize,
    },
    /// Mask and model together rule every token out.
    #[error("none of {vocab} tokens may be chosen: mask and logits rule all of them out")]
    NothingAllowed {
        /// Logits in the row.
        vocab: usize,
    },
}

/// Chooses tokens for rows of one vocabulary size. One sampler serves any number of requests, one row at a time; it
/// keeps nothing between rows.
#[derive(Debug)]
pub struct Sampler {
    vocab: usize,
    /// Largest logit of each block of the current row.
    block_max: Vec<f32>,
    /// Weight of each block of the current row.
    block_sum: Vec<u64>,
    /// Block maxima again, to be partitioned.
    maxima: Vec<f32>,
    candidates: Vec<Candidate>,
    /// The top tokens of a row and their logits, sorted by id, while the other logits are not known.
    likely: Vec<(u32, f32)>,
    row: Vec<f32>,
}

impl Sampler {
    /// The largest vocabulary a sampler can be built for.
    pub const VOCAB_MAX: usize = plimsoll_formats::VOCAB_MAX;

    /// A sampler for rows of `vocab` logits; the only allocation it ever makes.
    ///
    /// # Errors
    /// [`SamplerError::Vocab`] for 0 or more than [`Self::VOCAB_MAX`] tokens, [`SamplerError::OutOfMemory`] without
    /// memory.
    pub fn new(vocab: usize) -> Result<Self, SamplerError> {
        if vocab == 0 || vocab > Self::VOCAB_MAX {
            return Err(SamplerError::Vocab { vocab, limit: Self::VOCAB_MAX });
        }
        let full = |_| SamplerError::OutOfMemory { vocab, bytes: Self::bytes_for(vocab) };
        let blocks = vocab.div_ceil(BLOCK);
        let (mut block_max, mut block_sum) = (Vec::new(), Vec::new());
        let (mut maxima, mut candidates) = (Vec::new(), Vec::new());
        let (mut likely, mut row) = (Vec::new(), Vec::new());
        block_max.try_reserve_exact(blocks).map_err(full)?;
        block_sum.try_reserve_exact(blocks).map_err(full)?;
        maxima.try_reserve_exact(blocks).map_err(full)?;
        candidates.try_reserve_exact(vocab).map_err(full)?;
        likely.try_reserve_exact(CANDIDATES_MAX).map_err(full)?;
        row.try_reserve_exact(CANDIDATES_MAX).map_err(full)?;
        Ok(Self { vocab, block_max, block_sum, maxima, candidates, likely, row })
    }

    /// Bytes of host memory a sampler over `vocab` tokens takes.
    #[must_use]
    pub const fn bytes_for(vocab: usize) -> usize {
        let a_block = 2 * size_of::<f32>() + size_of::<u64>();
        let likely = CANDIDATES_MAX * (size_of::<(u32, f32)>() + size_of::<f32>());
        vocab.div_ceil(BLOCK) * a_block + vocab * size_of::<Candidate>() + likely
    }

    /// Bytes of host memory this sampler takes; constant.
    #[must_use]
    pub fn bytes(&self) -> usize {
        Self::bytes_for(self.vocab)
    }

    /// Chooses the token at `position` of a sequence.
    ///
    /// `logits` is the model's row, one per token, and is overwritten. `params` have passed
    /// [`SamplingParams::validate`] for this vocabulary. `counts` is what prompt and output contain (empty if
    /// [`SamplingParams::needs_counts`] is false). `allowed` is a bit mask, 32 tokens a word, token 0 in the lowest bit
    /// of the first word. Tokens beyond its end are not allowed. A NaN is never chosen; equal logits prefer the lower
    /// id.
    ///
    /// # Errors
    /// [`SampleError`] if the row has the wrong length or leaves no token to choose.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        params: &SamplingParams,
        counts: &TokenCounts,
        position: u64,
        allowed: Option<&[u32]>,
    ) -> Result<u32, SampleError> {
        self.sample_grouped(logits, params, counts, position, allowed, None)
    }

    /// As [`Self::sample`], with Whisper's rule for timestamps: if the tokens from the id `grouped_from` on are together more likely
    /// than each single token before it, those before it are not chosen. Compared after bias, penalties and mask, at temperature 1.
    ///
    /// # Errors
    /// [`SampleError`] if the row has the wrong length or leaves no token to choose.
    pub fn sample_grouped(
        &mut self,
        logits: &mut [f32],
        params: &SamplingParams,
        counts: &TokenCounts,
        position: u64,
        allowed: Option<&[u32]>,
        grouped_from: Option<u32>,
    ) -> Result<u32, SampleError> {
        if logits.len() != self.vocab {
            return Err(SampleError::WrongLength { given: logits.len(), vocab: self.vocab });
        }
        apply_bias(logits, params);
        apply_penalties(logits, params, counts);
        if let Some(words) = allowed {
            apply_mask(logits, words);
        }
        if let Some(first) = grouped_from {
            apply_group(logits, first);
        }
        self.draw(logits, params, position)
    }

    /// The token that [`Self::sample`] chooses, from the top logits of a row alone; `None` where these do not decide.
    ///
    /// `found` are pairs of a logit and an id, the most likely first, equal ones by id; an id below 0 stands behind the last token that
    /// has a logit. At least `SamplingParams::candidates` pairs are given. `banned` tokens may not be chosen.
    pub fn sample_from_top(
        &mut self,
        found: &[[f32; 2]],
        params: &SamplingParams,
        counts: &TokenCounts,
        position: u64,
        allowed: Option<&[u32]>,
        banned: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let mut likely = std::mem::take(&mut self.likely);
        likely.clear();
        // The device writes NaN if it was lost.
        likely.extend(found.iter().take_while(|[_, id]| *id >= 0.0).map(|[logit, id]| (*id as u32, *logit)));
        let whole = likely.len() < found.len() || likely.len() == self.vocab;
        let token = likely.last().copied().and_then(|(id, logit)| {
            let least = (!whole).then(|| Candidate::new(logit, id));
            likely.sort_unstable_by_key(|(id, _)| *id);
            lower(&mut likely, params, counts, allowed, banned);
            // Every other token is less likely than the least, also after it was lowered.
            likely.retain(|(id, logit)| {
                *logit > f32::NEG_INFINITY && least.is_none_or(|least| Candidate::new(*logit, *id) <= least)
            });
            self.draw_from_top(&likely, least, params, position)
        });
        self.likely = likely;
        token
    }

    /// Chooses among the top tokens of a row, sorted by id. All other tokens are less likely than `least`; none: there are no others.
    fn draw_from_top(
        &mut self,
        likely: &[(u32, f32)],
        least: Option<Candidate>,
        params: &SamplingParams,
        position: u64,
    ) -> Option<u32> {
        let max = likely.iter().map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY || (max == f32::INFINITY && !params.is_greedy()) {
            return None;
        }
        let told = |least: Candidate| {
            let of_top_k = params.top_k_of(self.vocab).is_some_and(|k| likely.len() >= k);
            // Tokens less likely than `least` have no weight.
            of_top_k || Weigher::new(max, params.temperature, params.min_p).is_nothing(least.logit())
        };
        if !params.is_greedy() && !least.is_none_or(told) {
            return None;
        }
        // Places among the likely tokens are in the order of ids, so that they are chosen as ids would be.
        let mut row = std::mem::take(&mut self.row);
        row.clear();
        row.extend(likely.iter().map(|(_, logit)| *logit));
        let place = self.draw(&mut row, params, position);
        self.row = row;
        place.ok().map(|place| likely[place as usize].0)
    }

    /// Chooses among logits that bias, penalties and mask were applied to.
    fn draw(&mut self, logits: &mut [f32], params: &SamplingParams, position: u64) -> Result<u32, SampleError> {
        let max = self.measure(logits)?;
        if params.is_greedy() {
            return Ok(self.first_of(logits, max));
        }
        let weigher = Weigher::new(max, params.temperature, params.min_p);
        let kept = self.keep(logits, params, weigher);
        let random = random_u64(params.seed, position);
        // A uniform integer below the total, which is at most 2^63.
        let target = ((u128::from(random) * u128::from(kept.mass)) >> 64) as u64;
        let row = Row { logits, block_max: &self.block_max, weigher };
        Ok(if kept.is_all() { draw_from_all(&row, &self.block_sum, &kept, target) } else { draw(&row, &kept, target) })
    }

    /// Finds the largest logit of every block and of the row. A row with +∞ becomes one where those tokens are equal
    /// and all others impossible, which is what its softmax tends to.
    fn measure(&mut self, logits: &mut [f32]) -> Result<f32, SampleError> {
        loop {
            self.block_max.clear();
            self.block_max.extend(logits.chunks(BLOCK).map(block_max));
            let max = block_max(&self.block_max);
            if max == f32::NEG_INFINITY {
                let (nans, vocab) = (logits.iter().filter(|logit| logit.is_nan()).count(), self.vocab);
                let nothing = SampleError::NothingAllowed { vocab };
                return Err(if nans > 0 { SampleError::NotANumber { nans, vocab } } else { nothing });
            }
            if max < f32::INFINITY {
                return Ok(max);
            }
            for logit in logits.iter_mut() {
                *logit = if *logit == f32::INFINITY { 0.0 } else { f32::NEG_INFINITY };
            }
        }
    }

    /// The lowest token id with the logit `max`.
    fn first_of(&self, logits: &[f32], max: f32) -> u32 {
        let block = self.block_max.iter().position(|&largest| largest == max).unwrap_or(0);
        let first = block * BLOCK;
        let within = logits[first..].iter().position(|&logit| logit == max).unwrap_or(0);
        (first + within) as u32
    }

    /// Returns the head of a measured row that min-p, top-k and top-p keep, applied in this order.
    pub(super) fn keep(&mut self, logits: &[f32], params: &SamplingParams, weigher: Weigher) -> Kept {
        let row = Row { logits, block_max: &self.block_max, weigher };
        let (found, temperature) = (&mut self.candidates, params.temperature);
        if let Some(k) = params.top_k_of(logits.len()) {
            row.top_k(k, temperature, &mut self.maxima, found);
            let total = row.mass(found);
            return row.head(found, share_of(total, params.top_p));
        }
        self.block_sum.clear();
        let blocks = logits.chunks(BLOCK).zip(&self.block_max);
        let sums = blocks.map(|(block, &max)| if weigher.is_nothing(max) { 0 } else { weigher.sum(block) });
        self.block_sum.extend(sums);
        let total = self.block_sum.iter().sum();
        if params.top_p < 1.0 {
            let target = share_of(total, params.top_p);
            row.reach(target, temperature, found);
            return row.head(found, target);
        }
        Kept::all(total)
    }
}

/// The least weight that is at least a share `top_p` of `total`.
fn share_of(total: u64, top_p: f32) -> u64 {
    if top_p < 1.0 { (total as f64 * f64::from(top_p)).ceil() as u64 } else { total }
}

/// The kept token at which the weights, added up in order of ids, pass `target`, with its weight.
fn draw(row: &Row<'_>, kept: &Kept, target: u64) -> u32 {
    let mut passed = 0;
    for (first, block) in row.blocks_from(kept.last.logit()) {
        if let Some(drawn) = draw_from(row, kept, first, block, target, &mut passed) {
            return drawn;
        }
    }
    kept.last.id()
}

/// As [`draw`], if every token is kept: the weight of every block is known.
fn draw_from_all(row: &Row<'_>, sums: &[u64], kept: &Kept, target: u64) -> u32 {
    let (mut passed, mut block) = (0, 0);
    while block + 1 < sums.len() && passed + sums[block] <= target {
        passed += sums[block];
        block += 1;
    }
    let first = block * BLOCK;
    let logits = &row.logits[first..row.logits.len().min(first + BLOCK)];
    let drawn = draw_from(row, kept, first as u32, logits, target, &mut passed);
    drawn.unwrap_or(first as u32)
}

/// The token of one block at which the weights pass `target`. If there is none, `passed` grows by the kept weights of the block.
fn draw_from(row: &Row<'_>, kept: &Kept, first: u32, block: &[f32], target: u64, passed: &mut u64) -> Option<u32> {
    for (id, &logit) in (first..).zip(block) {
        if kept.has(logit, id) {
            *passed += row.weigher.weigh(logit);
            if *passed > target {
                return Some(id);
            }
        }
    }
    None
}

fn apply_bias(logits: &mut [f32], params: &SamplingParams) {
    for &(token, bias) in &params.logit_bias {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
}

/// Repetition penalty (Keskar et al., CTRL, 2019) on tokens of prompt and output, then OpenAI's frequency and presence
/// penalty on tokens of the output.
fn apply_penalties(logits: &mut [f32], params: &SamplingParams, counts: &TokenCounts) {
    if !params.needs_counts() {
        return;
    }
    for (token, times) in counts.iter() {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit = penalised(*logit, params, times);
        }
    }
}

/// Returns the penalised logit of a token of prompt or output. `times`: its occurrences in the output.
fn penalised(logit: f32, params: &SamplingParams, times: u32) -> f32 {
    let repeated = if logit > 0.0 { logit / params.repetition_penalty } else { logit * params.repetition_penalty };
    if times > 0 { repeated - (times as f32 * params.frequency_penalty + params.presence_penalty) } else { repeated }
}

/// Applies bias, penalties and mask to some tokens' logits, sorted by id. The results have the same bits as in the whole row.
fn lower(
    likely: &mut [(u32, f32)],
    params: &SamplingParams,
    counts: &TokenCounts,
    allowed: Option<&[u32]>,
    banned: impl Fn(u32) -> bool,
) {
    likely.iter_mut().filter(|(id, _)| banned(*id)).for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
    for &(token, bias) in &params.logit_bias {
        if let Ok(place) = likely.binary_search_by_key(&token, |(id, _)| *id) {
            likely[place].1 += bias;
        }
    }
    let may = |id: u32| {
        allowed.is_none_or(|words| words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1))
    };
    for (id, logit) in likely {
        let (times, in_prompt) = if params.needs_counts() { counts.get(*id) } else { (0, false) };
        if times > 0 || in_prompt {
            *logit = penalised(*logit, params, times);
        }
        if !may(*id) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn apply_mask(logits: &mut [f32], words: &[u32]) {
    let words = words.iter().copied().chain(std::iter::repeat(0));
    for (chunk, word) in logits.chunks_mut(32).zip(words) {
        match word {
            0 => chunk.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            _ => {
                for (bit, logit) in chunk.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::weights::UNITS;
    use super::*;

    /// The boundaries between the shares of two tokens. Random tests draw one once in 2⁴³ draws.
    #[test]
    fn shares_end_where_the_next_begin() {
        let logits = [2.0; BLOCK + 2];
        let weigher = Weigher::new(2.0, 1.0, 0.0);
        let (block_max, sums) = ([2.0; 2], [UNITS * BLOCK as u64, UNITS * 2]);
        let row = Row { logits: &logits, block_max: &block_max, weigher };
        let some = Kept { last: Candidate::new(2.0, BLOCK as u32), mass: UNITS * (BLOCK as u64 + 1) };
        let all = Kept::all(UNITS * logits.len() as u64);
        for id in 0..=BLOCK as u32 {
            let first = UNITS * u64::from(id);
            for target in [first, first + UNITS - 1] {
                assert_eq!(draw(&row, &some, target), id);
                assert_eq!(draw_from_all(&row, &sums, &all, target), id);
            }
        }
        assert_eq!(draw_from_all(&row, &sums, &all, all.mass - 1), BLOCK as u32 + 1);
    }

    #[test]
    fn a_share_is_rounded_up() {
        assert_eq!((share_of(10, 0.25), share_of(10, 0.5), share_of(10, 1.0)), (3, 5, 10));
        assert_eq!(share_of(UNITS, 1e-30), 1);
    }
}
