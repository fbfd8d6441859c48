//! The convolution against double precision, and against itself: spans, kept histories and instruction sets must not show.

use proptest::prelude::*;

use crate::support::{Random, bits, isas};
use plimsoll_kernels::*;

/// Some channels of a wider layer.
struct Case {
    rows: usize,
    channels: usize,
    ld: usize,
    taps: usize,
    bias: Option<Vec<f32>>,
    silu: bool,
    norm: HeadNorm,
    x: Vec<f32>,
    weights: Vec<f32>,
    /// Inputs before the first row, oldest first.
    history: Option<Vec<f32>>,
}

impl Case {
    /// The input `back` rows before `row`.
    fn x(&self, row: usize, back: usize, channel: usize) -> f64 {
        let past = self.taps - 1;
        match (row.checked_sub(back), &self.history) {
            (Some(row), _) => self.x[row * self.ld + channel].into(),
            (None, Some(history)) => history[(past + row - back) * self.ld + channel].into(),
            (None, None) => 0.0,
        }
    }

    /// Each result, and the factor by which an error before the norm counts in it.
    fn reference(&self) -> Vec<(f64, f64)> {
        let mut out = Vec::new();
        for row in 0..self.rows {
            let convolved = |channel: usize| {
                let taps = (0..self.taps).map(|tap| (tap, self.taps - 1 - tap));
                let weight = |tap| f64::from(self.weights[channel * self.taps + tap]);
                let sum: f64 = taps.map(|(tap, back)| weight(tap) * self.x(row, back, channel)).sum();
                let sum = sum + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel]));
                if self.silu { sum / (1.0 + (-sum).exp()) } else { sum }
            };
            let y: Vec<f64> = (0..self.channels).map(convolved).collect();
            let factor = match self.norm {
                HeadNorm::L2(scale) => f64::from(scale) / (y.iter().map(|y| y * y).sum::<f64>() + 1e-6).sqrt(),
                HeadNorm::None => 1.0,
            };
            out.extend(y.iter().map(|y| (y * factor, factor)));
        }
        out
    }

    /// Results, and the last history.
    fn run(&self, isa: Isa, spans: &[usize], keep_all: bool) -> (Vec<f32>, Vec<f32>) {
        let stride = (self.taps - 1) * self.ld + 5;
        let mut slots = vec![f32::NAN; stride * (self.rows + 1)];
        if let Some(history) = &self.history {
            slots[..history.len()].copy_from_slice(history);
        }
        let mut weights = vec![f32::NAN; conv_weights_len(self.channels, self.taps)];
        conv_weights(&self.weights, self.taps, &mut weights);
        let (bias, silu) = (self.bias.as_deref(), self.silu);
        let spec = ConvSpec { weights: &weights, taps: self.taps, bias, silu, norm: self.norm, history_ld: self.ld };
        let mut x = self.x.clone();
        let (mut first, mut from) = (0, self.history.as_ref().map(|_| 0));
        for rows in spans {
            let mut named: Vec<u32> = (first..first + rows).map(|row| row as u32 + 1).collect();
            if !keep_all {
                named.fill(NO_SLOT);
                named[rows - 1] = 0;
            }
            let mut scratch = vec![f32::NAN; conv_scratch_len(self.channels, self.taps)];
            let view = StateSlots { base: slots.as_mut_ptr(), stride, start: from, out: &named };
            let target = ConvRows { ptr: x[first * self.ld..].as_mut_ptr(), ld: self.ld, channels: self.channels };
            // SAFETY: all rows are in `x`, all slots in `slots`.
            unsafe { causal_conv(isa, &spec, target, &view, &mut scratch) };
            (first, from) = (first + rows, Some(named[rows - 1]));
        }
        let slot = &slots[from.unwrap() as usize * stride..];
        let kept = (0..self.taps - 1).flat_map(|t| slot[t * self.ld..][..self.channels].to_vec()).collect();
        // The bytes between the channels of two rows must stay unchanged.
        for (row, (new, old)) in x.chunks(self.ld).zip(self.x.chunks(self.ld)).enumerate() {
            assert_eq!(bits(&new[self.channels..]), bits(&old[self.channels..]), "row {row}");
        }
        (x.chunks(self.ld).flat_map(|row| row[..self.channels].to_vec()).collect(), kept)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn follows_its_definition_whatever_the_way(
        channels in 1usize..70,
        taps in 1usize..6,
        spans in prop::collection::vec(1usize..6, 1..6),
        scale in prop::option::of(0.1f32..2.0),
        from_zero: bool,
        biased: bool,
        silu: bool,
        seed in 0u64..1000,
    ) {
        let mut random = Random::new(seed);
        let (rows, ld) = (spans.iter().sum(), channels + 3);
        let case = Case {
            rows,
            channels,
            ld,
            taps,
            bias: biased.then(|| random.floats(channels)),
            silu,
            norm: scale.map_or(HeadNorm::None, HeadNorm::L2),
            x: random.floats(rows * ld),
            weights: random.floats(channels * taps),
            history: (!from_zero).then(|| random.floats((taps - 1) * ld)),
        };
        let (out, kept) = case.run(Isa::Portable, &vec![1; rows], true);
        for (actual, (expected, factor)) in out.iter().zip(case.reference()) {
            let bound = 2e-6 * expected.abs().max(factor).max(1.0);
            prop_assert!((f64::from(*actual) - expected).abs() <= bound, "{} {}", actual, expected);
        }
        for (index, kept) in kept.iter().enumerate() {
            let (t, channel) = (index / channels, index % channels);
            prop_assert_eq!(f64::from(*kept), case.x(rows - 1, taps - 2 - t, channel));
        }
        for isa in isas() {
            for keep_all in [false, true] {
                for spans in [spans.clone(), vec![rows], vec![1; rows]] {
                    let other = case.run(isa, &spans, keep_all);
                    prop_assert_eq!(bits(&other.0), bits(&out), "{} {:?}", isa, &spans);
                    prop_assert_eq!(bits(&other.1), bits(&kept), "{} {:?}", isa, &spans);
                }
            }
        }
    }
}
