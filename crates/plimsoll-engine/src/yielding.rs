//! How many rows of prompts go into a step beside those who decode, so that their tokens keep coming: as many as fit into the time
//! that the step may take longer than one without prompts. Pure arithmetic over what was measured: output never depends on it.

use crate::scheduler::Beside;
use crate::speculation::{BUCKETS, bucket};

/// A step with rows of a long prompt is to take so many times as long as one without, as far as [`FEWEST`] allows.
const SLOWER: f64 = 1.8;
/// All prompts of a step together may take so many seconds of it; or, where a step takes long anyway, so many times as long as one without:
/// then four fifths of it are theirs, and they take a quarter longer than alone. [`FEWEST`] rows go on in any case.
const CALM: f64 = 0.05;
const PATIENCE: f64 = 4.0;
/// Rows of a long prompt as long as nothing is known.
const FIRST: usize = 32;
/// The prompt goes on, however long it is: its keys and values are read once for all rows of a chunk, so fewer would hardly be quicker.
const FEWEST: usize = 16;
/// A new measurement's weight.
const NEW: f64 = 0.25;
/// No measurement counts as more than so many times the estimate: it was interrupted.
const INTERRUPTED: f64 = 3.0;

/// What steps have taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct Yielding {
    /// Seconds of a step without prompts, by the number of sequences in it; 0 where none was seen.
    plain: [f64; BUCKETS],
    /// Seconds that a row of a prompt adds: of those that come, long or short.
    row: f64,
}

impl Yielding {
    /// Takes note of a step with so many sequences that decode.
    pub fn observe(&mut self, decodes: usize, prompt_rows: usize, seconds: f64) {
        if decodes == 0 {
            return;
        }
        if prompt_rows == 0 {
            update(&mut self.plain[bucket(decodes)], seconds);
        } else if let Some(plain) = self.plain(decodes).filter(|_| prompt_rows >= FEWEST) {
            // The step as a whole is what was interrupted; the rows' share of it may be small.
            let (rows, usual) = (prompt_rows as f64, plain + prompt_rows as f64 * self.row);
            let seconds = if self.row > 0.0 { seconds.min(INTERRUPTED * usual) } else { seconds };
            let row = (seconds - plain).max(0.0) / rows;
            self.row += if self.row > 0.0 { NEW * (row - self.row) } else { row };
        }
    }

    /// Rows of prompts in a step with so many sequences that decode.
    pub fn rows(&self, decodes: usize) -> Beside {
        let Some(plain) = self.plain(decodes).filter(|_| self.row > 0.0) else {
            return Beside { prompts: usize::MAX, long: FIRST };
        };
        let fit = |seconds: f64| ((seconds / self.row) as usize).max(FEWEST);
        let long = fit((SLOWER - 1.0) * plain);
        // A short prompt behind a long one goes on.
        Beside { prompts: fit(CALM.max(PATIENCE * plain)).max(long + FEWEST), long }
    }

    /// Of as many sequences, or of the next smaller number that is known.
    fn plain(&self, decodes: usize) -> Option<f64> {
        self.plain[..=bucket(decodes)].iter().rev().copied().find(|seconds| *seconds > 0.0)
    }
}

fn update(estimate: &mut f64, seconds: f64) {
    *estimate = match *estimate > 0.0 {
        true => *estimate + NEW * (seconds.min(INTERRUPTED * *estimate) - *estimate),
        false => seconds,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds between tokens while a prompt of 8,000 is computed, and the steps it takes, on a machine whose rows cost `row(computed)`.
    fn intruded(plain: f64, row: impl Fn(usize) -> f64, interrupted: impl Fn(usize) -> f64) -> Vec<f64> {
        let mut yielding = Yielding::default();
        for step in 0..100 {
            yielding.observe(4, 0, plain * interrupted(step));
        }
        let (mut computed, mut gaps) = (0, Vec::new());
        while computed < 8000 {
            let rows = yielding.rows(4).long.min(512);
            let seconds = (plain + rows as f64 * row(computed)) * interrupted(gaps.len());
            yielding.observe(4, rows, seconds);
            computed += rows;
            gaps.push(seconds);
        }
        gaps
    }

    fn p99(mut gaps: Vec<f64>) -> f64 {
        gaps.sort_by(f64::total_cmp);
        gaps[gaps.len() * 99 / 100]
    }

    #[test]
    fn streams_are_held_up_for_less_than_twice_a_step() {
        // Rows that cost more the longer the prompt: from a fortieth to a twenty-fifth of a plain step.
        let gaps = intruded(0.008, |computed| 0.0002 + 0.000000015 * computed as f64, |_| 1.0);
        assert!(p99(gaps.clone()) < 2.0 * 0.008, "{}", p99(gaps));
        // A fast machine takes it in large pieces.
        let gaps = intruded(0.008, |_| 0.00002, |_| 1.0);
        assert!(gaps.len() < 40 && p99(gaps.clone()) < 2.0 * 0.008, "{} steps, {}", gaps.len(), p99(gaps));
    }

    #[test]
    fn interruptions_do_not_starve_the_prompt() {
        // One step in ten takes ten times as long.
        let often = |step: usize| if step % 10 == 3 { 10.0 } else { 1.0 };
        let (calm, gaps) = (intruded(0.008, |_| 0.0005, |_| 1.0), intruded(0.008, |_| 0.0005, often));
        assert!(gaps.len() < 3 * calm.len(), "{} steps instead of {}", gaps.len(), calm.len());
    }

    /// Steps of few rows, which may be faster than those without, say little about a row.
    #[test]
    fn what_rows_cost_is_not_forgotten_over_short_prompts() {
        let mut yielding = Yielding::default();
        yielding.observe(4, 0, 0.01);
        yielding.observe(4, 40, 0.02);
        let before = yielding.rows(4).long;
        for step in 0..200 {
            yielding.observe(4, 1 + step % 15, 0.009);
        }
        assert_eq!(yielding.rows(4).long, before);
        // As many as there may be, that cost nothing; then what is true.
        for _ in 0..30 {
            yielding.observe(4, 16, 0.009);
        }
        let mut steps = 0;
        while yielding.rows(4).long > 2 * before {
            let rows = yielding.rows(4).long.min(512);
            yielding.observe(4, rows, 0.01 + rows as f64 * 0.000_25);
            steps += 1;
        }
        assert!(steps <= 5, "{steps}");
    }

    #[test]
    fn what_has_not_been_seen_is_taken_from_smaller_batches() {
        let mut yielding = Yielding::default();
        assert_eq!(yielding.rows(1), Beside { prompts: usize::MAX, long: FIRST });
        yielding.observe(4, 0, 0.01);
        yielding.observe(5, 20, 0.014);
        assert_eq!([16, 4, 2].map(|decodes| yielding.rows(decodes).long), [40, 40, FIRST]);
        // Nobody waits for a token.
        yielding.observe(0, 100, 9.0);
        assert_eq!(yielding.rows(4).long, 40);
        // Slower than anything: on they go.
        for _ in 0..50 {
            yielding.observe(4, FEWEST, 60.0);
        }
        assert_eq!(yielding.rows(4), Beside { prompts: 2 * FEWEST, long: FEWEST });
    }

    /// A burst of short prompts holds up the first of them that decode for a twentieth of a second, or, of a model whose own steps take
    /// longer, for four of them.
    #[test]
    fn short_prompts_yield_too() {
        let prompts = |plain: f64| {
            let mut yielding = Yielding::default();
            yielding.observe(8, 0, plain);
            yielding.observe(8, 500, plain + 0.5);
            yielding.rows(8).prompts
        };
        assert_eq!(prompts(0.005), 50);
        assert!((999..=1000).contains(&prompts(0.25)), "{}", prompts(0.25));
    }
}
