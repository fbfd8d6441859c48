//! How many rows of prompts are computed beside decoding sequences, so that their tokens keep coming: as many as fit
//! into the extra time that they may wait. Pure arithmetic over measurements: output never depends on it.

use arrayvec::ArrayVec;

use crate::cache::PAGE_TOKENS;
use crate::schedule::scheduler::PrefillBudget;
use crate::speculation::pace::{BUCKETS, bucket};

/// All prompts of a step together may take so many seconds of it; or, where a step takes long anyway, so many times as long as one without:
/// then four fifths of it are theirs, and they take a quarter longer than alone. [`FEWEST`] rows go on in any case.
const CALM: f64 = 0.05;
const PATIENCE: f64 = 4.0;
/// Rows of a long prompt's chunk as long as nothing is known.
const FIRST: usize = 32;
/// A prompt goes on, however long it is: its keys and values are read once for all rows of a chunk, so fewer would hardly be quicker.
const FEWEST: usize = 16;
/// A new measurement's weight; that of a layer, which takes longer for every chunk of a prompt than for the one before.
const NEW: f64 = 0.25;
const NEW_LAYER: f64 = 0.5;
/// No measurement counts as more than so many times the estimate: it was interrupted.
const INTERRUPTED: f64 = 3.0;
/// Layers of a model that are told apart; those behind them count as the last.
const LAYERS: usize = 256;

/// What steps and layers have taken.
#[derive(Clone, Debug)]
pub(crate) struct PrefillMeter {
    /// Layers of a long prompt behind each step may take so many times as long as the step does without prompts, as far as a layer of
    /// [`FEWEST`] rows allows.
    slowdown: f64,
    /// Seconds of a step without prompts, by the number of sequences in it; 0 where none was seen.
    plain: [f64; BUCKETS],
    /// Seconds that a row of a prompt adds to a step.
    row: f64,
    /// Seconds of a row of a long prompt, by layers.
    layers: ArrayVec<f64, LAYERS>,
}

impl PrefillMeter {
    /// Nothing is known yet. Beside a long prompt a token may take so many percent longer than without; 0: by a layer, always.
    pub fn new(slowdown: usize) -> Self {
        Self { slowdown: slowdown as f64 / 100.0, plain: [0.0; BUCKETS], row: 0.0, layers: ArrayVec::new() }
    }

    /// Takes note of a step with so many sequences that decode.
    pub fn observe(&mut self, decodes: usize, prompt_rows: usize, seconds: f64) {
        if decodes == 0 {
            return;
        }
        if prompt_rows == 0 {
            update(&mut self.plain[bucket(decodes)], seconds, NEW);
        } else if let Some(plain) = self.plain(decodes).filter(|_| prompt_rows >= FEWEST) {
            // The step as a whole is what was interrupted; the rows' share of it may be small.
            let (rows, usual) = (prompt_rows as f64, plain + prompt_rows as f64 * self.row);
            let seconds = if self.row > 0.0 { seconds.min(INTERRUPTED * usual) } else { seconds };
            let row = (seconds - plain).max(0.0) / rows;
            self.row += if self.row > 0.0 { NEW * (row - self.row) } else { row };
        }
    }

    /// Takes note of a layer of a chunk of so many rows.
    pub fn observe_layer(&mut self, layer: usize, rows: usize, seconds: f64) {
        let row = seconds / rows as f64;
        match self.layers.get_mut(layer.min(LAYERS - 1)) {
            // Few rows take hardly less than more would.
            Some(estimate) if rows >= FEWEST => update(estimate, row, NEW_LAYER),
            Some(_) => {}
            None => self.layers.push(row),
        }
    }

    /// Rows of prompts beside so many sequences that decode.
    pub fn rows(&self, decodes: usize) -> PrefillBudget {
        let plain = self.plain(decodes);
        let fit = |seconds: f64, row: f64| ((seconds / row) as usize).max(FEWEST);
        let prompts = plain.filter(|_| self.row > 0.0);
        let prompts = prompts.map_or(usize::MAX, |plain| fit(CALM.max(PATIENCE * plain), self.row));
        let long = match (plain, self.dear_layer()) {
            // Whole pages, which is what kernels take at once.
            (Some(_), Some(row)) => fit(self.patience(decodes), row) / PAGE_TOKENS * PAGE_TOKENS,
            _ => FIRST,
        };
        PrefillBudget { prompts, long }
    }

    /// Seconds of a row in a dear layer: nine of ten take no longer. The dearest of many that are alike was interrupted.
    fn dear_layer(&self) -> Option<f64> {
        let mut layers = self.layers.clone();
        let rank = layers.len() * 9 / 10;
        (!layers.is_empty()).then(|| *layers.select_nth_unstable_by(rank, f64::total_cmp).1)
    }

    /// Seconds that layers of a long prompt may take between two steps of so many sequences that decode. One layer goes on in any case.
    pub fn patience(&self, decodes: usize) -> f64 {
        if decodes == 0 {
            return f64::INFINITY;
        }
        self.plain(decodes).map_or(0.0, |plain| self.slowdown * plain)
    }

    /// Seconds that a layer of a chunk of so many rows will take, about; 0 if nothing is known.
    pub fn layer(&self, layer: usize, rows: usize) -> f64 {
        self.layers.get(layer.min(LAYERS - 1)).map_or(0.0, |row| row * rows as f64)
    }

    /// Of as many sequences, or of the next smaller number that is known.
    fn plain(&self, decodes: usize) -> Option<f64> {
        self.plain[..=bucket(decodes)].iter().rev().copied().find(|seconds| *seconds > 0.0)
    }
}

fn update(estimate: &mut f64, seconds: f64, weight: f64) {
    *estimate = match *estimate > 0.0 {
        true => *estimate + weight * (seconds.min(INTERRUPTED * *estimate) - *estimate),
        false => seconds,
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::options::Options;

    /// Seconds between tokens while a prompt of 8,000 tokens is computed, and the number of its chunks. A row costs
    /// `row(layer, computed)` in each of thirty layers.
    fn intruded(
        plain: f64,
        row: impl Fn(usize, usize) -> f64,
        interrupted: impl Fn(usize) -> f64,
    ) -> (Vec<f64>, usize) {
        let mut prefill_budget = PrefillMeter::new(Options::default().long_prompt_slowdown);
        for step in 0..100 {
            prefill_budget.observe(4, 0, plain * interrupted(step));
        }
        let (mut computed, mut chunks, mut gaps) = (0, 0, vec![0.0]);
        while computed < 8000 {
            let rows = prefill_budget.rows(4).long.min(512);
            let mut patience = prefill_budget.patience(4);
            for layer in 0..30 {
                if prefill_budget.layer(layer, rows) > patience || layer == 0 {
                    let step = plain * interrupted(gaps.len());
                    prefill_budget.observe(4, 0, step);
                    gaps.push(step);
                    patience = prefill_budget.patience(4);
                }
                let seconds = rows as f64 * row(layer, computed) * interrupted(7 * gaps.len() + layer);
                prefill_budget.observe_layer(layer, rows, seconds);
                patience -= seconds;
                *gaps.last_mut().unwrap() += seconds;
            }
            computed += rows;
            chunks += 1;
        }
        (gaps, chunks)
    }

    fn p99(mut gaps: Vec<f64>) -> f64 {
        gaps.sort_by(f64::total_cmp);
        gaps[gaps.len() * 99 / 100]
    }

    #[test]
    fn streams_are_held_up_for_less_than_twice_a_step() {
        // Rows that cost more the longer the prompt.
        let (gaps, _) = intruded(0.008, |_, computed| 0.000017 + 0.0000000088 * computed as f64, |_| 1.0);
        assert!(p99(gaps.clone()) < 2.0 * 0.008, "{}", p99(gaps));
        // Layers that are not alike: one in four attends to all.
        let unlike =
            |layer: usize, computed| 0.000017 + if layer % 4 == 3 { 0.0000000088 * computed as f64 } else { 0.0 };
        let (gaps, _) = intruded(0.008, unlike, |_| 1.0);
        assert!(p99(gaps.clone()) < 2.0 * 0.008, "{}", p99(gaps));
        // A fast machine takes it in large chunks.
        let (gaps, chunks) = intruded(0.008, |_, _| 0.000001, |_| 1.0);
        assert!(chunks < 30 && p99(gaps.clone()) < 2.0 * 0.008, "{chunks} chunks, {}", p99(gaps));
    }

    #[test]
    fn interruptions_do_not_starve_the_prompt() {
        // One step or layer in ten takes ten times as long.
        let often = |step: usize| if step % 10 == 3 { 10.0 } else { 1.0 };
        let (calm, gaps) = (intruded(0.008, |_, _| 0.00005, |_| 1.0).0, intruded(0.008, |_, _| 0.00005, often).0);
        assert!(gaps.len() < 3 * calm.len(), "{} steps instead of {}", gaps.len(), calm.len());
    }

    /// Steps of few rows, which may be faster than those without, say little about a row.
    #[test]
    fn what_rows_cost_is_not_forgotten_over_short_prompts() {
        let mut prefill_budget = PrefillMeter::new(Options::default().long_prompt_slowdown);
        prefill_budget.observe(4, 0, 0.01);
        prefill_budget.observe(4, 40, 0.02);
        prefill_budget.observe_layer(0, 40, 0.01);
        let before = prefill_budget.rows(4);
        for step in 0..200 {
            prefill_budget.observe(4, 1 + step % 15, 0.009);
            prefill_budget.observe_layer(0, 1 + step % 15, 0.02);
        }
        assert_eq!(prefill_budget.rows(4), before);
        // As many as there may be, that cost nothing; then what is true.
        for _ in 0..30 {
            prefill_budget.observe_layer(0, 16, 0.000_000_1);
        }
        let mut chunks = 0;
        while prefill_budget.rows(4).long > 2 * before.long {
            let rows = prefill_budget.rows(4).long.min(512);
            prefill_budget.observe_layer(0, rows, rows as f64 * 0.000_25);
            chunks += 1;
        }
        assert!(chunks <= 20, "{chunks}");
    }

    #[test]
    fn what_has_not_been_seen_is_taken_from_smaller_batches() {
        let mut prefill_budget = PrefillMeter::new(Options::default().long_prompt_slowdown);
        assert_eq!(prefill_budget.rows(1), PrefillBudget { prompts: usize::MAX, long: FIRST });
        assert_eq!(
            (prefill_budget.patience(0), prefill_budget.patience(1)),
            (f64::INFINITY, 0.0),
            "nobody waits; nothing is known"
        );
        prefill_budget.observe(4, 0, 0.01);
        prefill_budget.observe_layer(0, 20, 0.0025);
        assert_eq!([16, 4, 2].map(|decodes| prefill_budget.rows(decodes).long), [64, 64, FIRST]);
        assert_eq!([0, 1].map(|layer| prefill_budget.layer(layer, 64)), [0.008, 0.0]);
        // Without decoding sequences the step is ignored.
        prefill_budget.observe(0, 100, 9.0);
        assert_eq!(prefill_budget.rows(4).long, 64);
        // Slower than anything: on it goes.
        for _ in 0..50 {
            prefill_budget.observe(4, FEWEST, 60.0);
            prefill_budget.observe_layer(0, FEWEST, 60.0);
        }
        assert_eq!(prefill_budget.rows(4), PrefillBudget { prompts: FEWEST, long: FEWEST });
        // More layers than are told apart.
        (1..LAYERS + 9).for_each(|layer| prefill_budget.observe_layer(layer, 16, 0.1));
        assert_eq!(prefill_budget.layers.len(), LAYERS);
    }

    /// A burst of short prompts delays the first of them that decode by a twentieth of a second. If the model's own
    /// steps take longer, it delays them by four of its steps.
    #[test]
    fn short_prompts_yield_too() {
        let prompts = |plain: f64| {
            let mut prefill_budget = PrefillMeter::new(Options::default().long_prompt_slowdown);
            prefill_budget.observe(8, 0, plain);
            prefill_budget.observe(8, 500, plain + 0.5);
            prefill_budget.rows(8).prompts
        };
        assert_eq!(prompts(0.005), 50);
        assert!((999..=1000).contains(&prompts(0.25)), "{}", prompts(0.25));
    }
}
