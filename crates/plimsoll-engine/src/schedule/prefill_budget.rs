//! The number of prompt rows beside decoding sequences: as many as fit into the extra time that a decoding sequence may wait. Pure
//! arithmetic over measurements: output never depends on it.

use arrayvec::ArrayVec;

use crate::cache::PAGE_TOKENS;
use crate::schedule::scheduler::PrefillBudget;
use crate::speculation::pace::{BUCKETS, bucket};

/// Prompts may add this many seconds to a step at least.
const PROMPT_SECONDS: f64 = 0.05;
/// Or this many times the seconds of a step without prompts, if that is more. Prompts then have four fifths of the step's time.
const PROMPT_STEPS: f64 = 4.0;
/// Rows of a long prompt's chunk before anything was measured.
const CHUNK_ROWS_DEFAULT: usize = 32;
/// The least rows of prompts in a step. A chunk reads the KV cache once for all its rows, so fewer rows would hardly be faster.
const CHUNK_ROWS_MIN: usize = 16;
/// The weight of a new measurement in the moving average.
const EMA_WEIGHT: f64 = 0.25;
/// The weight of a new measurement of a layer, which takes longer with every chunk of a prompt.
const EMA_WEIGHT_LAYER: f64 = 0.5;
/// A measurement counts at most this many times the estimate: the thread was interrupted.
const OUTLIER_FACTOR: f64 = 3.0;
/// Layers that are measured one by one. Further layers count as the last of them.
const LAYERS: usize = 256;

/// The measured times of steps and layers.
#[derive(Clone, Debug)]
pub(crate) struct PrefillMeter {
    /// Layers of a long prompt may take this many times the seconds of a step without prompts, after each step.
    slowdown: f64,
    /// Seconds of a step without prompts, by the number of its sequences; 0: not measured.
    plain: [f64; BUCKETS],
    /// Seconds that a row of a prompt adds to a step.
    row: f64,
    /// Seconds of a row of a long prompt, by layers.
    layers: ArrayVec<f64, LAYERS>,
}

impl PrefillMeter {
    /// Without measurements. `slowdown`: percent by which a token may take longer beside a long prompt; 0: one layer at a time.
    pub fn new(slowdown: usize) -> Self {
        Self { slowdown: slowdown as f64 / 100.0, plain: [0.0; BUCKETS], row: 0.0, layers: ArrayVec::new() }
    }

    /// Records a step with `decodes` decoding sequences.
    pub fn observe(&mut self, decodes: usize, prompt_rows: usize, seconds: f64) {
        if decodes == 0 {
            return;
        }
        if prompt_rows == 0 {
            update(&mut self.plain[bucket(decodes)], seconds, EMA_WEIGHT);
        } else if let Some(plain) = self.plain(decodes).filter(|_| prompt_rows >= CHUNK_ROWS_MIN) {
            // The whole step may have been interrupted, of which the prompts' rows are a small part.
            let (rows, usual) = (prompt_rows as f64, plain + prompt_rows as f64 * self.row);
            let seconds = if self.row > 0.0 { seconds.min(OUTLIER_FACTOR * usual) } else { seconds };
            let row = (seconds - plain).max(0.0) / rows;
            self.row += if self.row > 0.0 { EMA_WEIGHT * (row - self.row) } else { row };
        }
    }

    /// Records a layer of a chunk of `rows` rows.
    pub fn observe_layer(&mut self, layer: usize, rows: usize, seconds: f64) {
        let row = seconds / rows as f64;
        match self.layers.get_mut(layer.min(LAYERS - 1)) {
            // Fewer rows take hardly less time, so they say nothing of a row.
            Some(estimate) if rows >= CHUNK_ROWS_MIN => update(estimate, row, EMA_WEIGHT_LAYER),
            Some(_) => {}
            None => self.layers.push(row),
        }
    }

    /// Rows of prompts beside `decodes` decoding sequences.
    pub fn rows(&self, decodes: usize) -> PrefillBudget {
        let plain = self.plain(decodes);
        let fit = |seconds: f64, row: f64| ((seconds / row) as usize).max(CHUNK_ROWS_MIN);
        let prompts = plain.filter(|_| self.row > 0.0);
        let prompts = prompts.map_or(usize::MAX, |plain| fit(PROMPT_SECONDS.max(PROMPT_STEPS * plain), self.row));
        let long = match (plain, self.slow_layer()) {
            // Kernels take whole pages at once.
            (Some(_), Some(row)) => fit(self.layer_seconds_max(decodes), row) / PAGE_TOKENS * PAGE_TOKENS,
            _ => CHUNK_ROWS_DEFAULT,
        };
        PrefillBudget { prompts, long }
    }

    /// Seconds of a row in the layer of the 90th percentile. The slowest of many equal layers was interrupted.
    fn slow_layer(&self) -> Option<f64> {
        let mut layers = self.layers.clone();
        let rank = layers.len() * 9 / 10;
        (!layers.is_empty()).then(|| *layers.select_nth_unstable_by(rank, f64::total_cmp).1)
    }

    /// Seconds that layers of a long prompt may take between two steps with `decodes` decoding sequences. One layer always runs.
    pub fn layer_seconds_max(&self, decodes: usize) -> f64 {
        if decodes == 0 {
            return f64::INFINITY;
        }
        self.plain(decodes).map_or(0.0, |plain| self.slowdown * plain)
    }

    /// Estimated seconds of a layer of a chunk of `rows` rows; 0 before the first measurement.
    pub fn layer_seconds(&self, layer: usize, rows: usize) -> f64 {
        self.layers.get(layer.min(LAYERS - 1)).map_or(0.0, |row| row * rows as f64)
    }

    /// Seconds of a step without prompts, with `decodes` sequences or the next smaller measured number.
    fn plain(&self, decodes: usize) -> Option<f64> {
        self.plain[..=bucket(decodes)].iter().rev().copied().find(|seconds| *seconds > 0.0)
    }
}

fn update(estimate: &mut f64, seconds: f64, weight: f64) {
    *estimate = match *estimate > 0.0 {
        true => *estimate + weight * (seconds.min(OUTLIER_FACTOR * *estimate) - *estimate),
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
        let mut meter = PrefillMeter::new(Options::default().long_prompt_slowdown);
        for step in 0..100 {
            meter.observe(4, 0, plain * interrupted(step));
        }
        let (mut computed, mut chunks, mut gaps) = (0, 0, vec![0.0]);
        while computed < 8000 {
            let rows = meter.rows(4).long.min(512);
            let mut patience = meter.layer_seconds_max(4);
            for layer in 0..30 {
                if meter.layer_seconds(layer, rows) > patience || layer == 0 {
                    let step = plain * interrupted(gaps.len());
                    meter.observe(4, 0, step);
                    gaps.push(step);
                    patience = meter.layer_seconds_max(4);
                }
                let seconds = rows as f64 * row(layer, computed) * interrupted(7 * gaps.len() + layer);
                meter.observe_layer(layer, rows, seconds);
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
        let mut meter = PrefillMeter::new(Options::default().long_prompt_slowdown);
        meter.observe(4, 0, 0.01);
        meter.observe(4, 40, 0.02);
        meter.observe_layer(0, 40, 0.01);
        let before = meter.rows(4);
        for step in 0..200 {
            meter.observe(4, 1 + step % 15, 0.009);
            meter.observe_layer(0, 1 + step % 15, 0.02);
        }
        assert_eq!(meter.rows(4), before);
        // Layers that take almost no time raise the number of rows to its maximum; later layers take realistic times.
        for _ in 0..30 {
            meter.observe_layer(0, 16, 0.000_000_1);
        }
        let mut chunks = 0;
        while meter.rows(4).long > 2 * before.long {
            let rows = meter.rows(4).long.min(512);
            meter.observe_layer(0, rows, rows as f64 * 0.000_25);
            chunks += 1;
        }
        assert!(chunks <= 20, "{chunks}");
    }

    #[test]
    fn what_has_not_been_seen_is_taken_from_smaller_batches() {
        let mut meter = PrefillMeter::new(Options::default().long_prompt_slowdown);
        assert_eq!(meter.rows(1), PrefillBudget { prompts: usize::MAX, long: CHUNK_ROWS_DEFAULT });
        assert_eq!(
            (meter.layer_seconds_max(0), meter.layer_seconds_max(1)),
            (f64::INFINITY, 0.0),
            "nobody waits; nothing is known"
        );
        meter.observe(4, 0, 0.01);
        meter.observe_layer(0, 20, 0.0025);
        assert_eq!([16, 4, 2].map(|decodes| meter.rows(decodes).long), [64, 64, CHUNK_ROWS_DEFAULT]);
        assert_eq!([0, 1].map(|layer| meter.layer_seconds(layer, 64)), [0.008, 0.0]);
        // Without decoding sequences the step is ignored.
        meter.observe(0, 100, 9.0);
        assert_eq!(meter.rows(4).long, 64);
        // Even with the slowest steps, prompts get the least number of rows.
        for _ in 0..50 {
            meter.observe(4, CHUNK_ROWS_MIN, 60.0);
            meter.observe_layer(0, CHUNK_ROWS_MIN, 60.0);
        }
        assert_eq!(meter.rows(4), PrefillBudget { prompts: CHUNK_ROWS_MIN, long: CHUNK_ROWS_MIN });
        // More layers than are measured one by one.
        (1..LAYERS + 9).for_each(|layer| meter.observe_layer(layer, 16, 0.1));
        assert_eq!(meter.layers.len(), LAYERS);
    }

    /// A burst of short prompts delays the first of them that decode by a twentieth of a second. If the model's own
    /// steps take longer, it delays them by four of its steps.
    #[test]
    fn short_prompts_yield_too() {
        let prompts = |plain: f64| {
            let mut meter = PrefillMeter::new(Options::default().long_prompt_slowdown);
            meter.observe(8, 0, plain);
            meter.observe(8, 500, plain + 0.5);
            meter.rows(8).prompts
        };
        assert_eq!(prompts(0.005), 50);
        assert!((999..=1000).contains(&prompts(0.25)), "{}", prompts(0.25));
    }
}
