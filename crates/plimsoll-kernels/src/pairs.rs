//! Products of bfloat16 by vectors (AVX-512 BF16), of the tiles that the matrix unit takes: where a processor has no unit, and for attention
//! alone. As fast as it has multipliers, twice as many products as of floats.

use std::arch::x86_64::*;

use crate::sizes::{LANES, TILE_BYTES, TILE_LINE};

/// Whether this processor multiplies so.
pub(crate) fn available() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")
}

/// The first `rows` lines of a tile times the first `P` of some panels, of `groups` groups each: tiles of the rows and of a panel lie one
/// behind the other. A sum begins with zero and gets both products of every pair, ascending, of a pair the second one's first; what is
/// smaller than normal numbers counts as 0, in products and sums. A panel's sums are sixteen floats of each row, rows `row_bytes` apart.
///
/// # Safety
/// [`available`] said so, and all pointers are valid for as much as this says.
pub(crate) unsafe fn strip<const P: usize>(
    rows: usize,
    row: *const u8,
    panels: [*const u8; 4],
    groups: usize,
    (sums, row_bytes): (*mut f32, usize),
) {
    const { assert!(P > 0 && P <= 4) };
    let mut done = 0;
    while done < rows {
        // SAFETY: the caller's word.
        unsafe {
            let (row, sums) = (row.add(done * TILE_LINE), sums.byte_add(done * row_bytes));
            done += if rows - done >= 4 {
                block::<4, P>(row, panels, groups, (sums, row_bytes));
                4
            } else {
                block::<1, P>(row, panels, groups, (sums, row_bytes));
                1
            };
        }
    }
}

/// [`strip`] of `R` rows: sixteen sums at most, which fill the multipliers and leave registers for what they multiply.
///
/// # Safety
/// As for [`strip`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn block<const R: usize, const P: usize>(
    row: *const u8,
    panels: [*const u8; 4],
    groups: usize,
    (sums, row_bytes): (*mut f32, usize),
) {
    let mut acc = [[_mm512_setzero_ps(); P]; R];
    for group in 0..groups {
        for pair in 0..LANES {
            // SAFETY: the caller's word; sixteen pairs are a line, and sixteen lines a tile.
            unsafe {
                let mut line = [_mm512_setzero_si512(); P];
                for (p, line) in line.iter_mut().enumerate() {
                    *line = _mm512_loadu_si512(panels[p].add(group * TILE_BYTES + pair * TILE_LINE).cast());
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let at = row.add(group * TILE_BYTES + r * TILE_LINE + pair * 4).cast::<i32>();
                    let both = bfloats(_mm512_set1_epi32(at.read_unaligned()));
                    for (acc, line) in acc.iter_mut().zip(line) {
                        *acc = _mm512_dpbf16_ps(*acc, both, bfloats(line));
                    }
                }
            }
        }
    }
    for (r, acc) in acc.into_iter().enumerate() {
        for (p, acc) in acc.into_iter().enumerate() {
            // SAFETY: the caller's word.
            unsafe { _mm512_storeu_ps(sums.byte_add(r * row_bytes).add(p * LANES), acc) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn bfloats(v: __m512i) -> __m512bh {
    // SAFETY: the same 64 bytes.
    unsafe { std::mem::transmute(v) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::half::{bf16_to_f32, f32_to_bf16};
    use crate::testing::{Aligned, Random, bits};

    /// Tiles of bfloats, from tiny ones to great ones.
    fn tiles(count: usize, seed: u64) -> (Vec<f32>, Aligned) {
        let mut random = Random::new(seed);
        let (values, powers) = (random.floats(count * TILE_BYTES / 2), random.floats(count * TILE_BYTES / 2));
        // Products of two are subnormal, and so are sums; and some are as they are.
        let scaled = values
            .iter()
            .zip(powers)
            .map(|(value, power)| value * (64.0 * power.min(0.0) - 34.0 * (seed % 2) as f32).exp2());
        let words: Vec<u16> = scaled.map(f32_to_bf16).collect();
        let mut memory = Aligned::new(count * TILE_BYTES);
        for (to, word) in memory.bytes_mut().chunks_exact_mut(2).zip(&words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        (words.into_iter().map(bf16_to_f32).collect(), memory)
    }

    #[test]
    fn sums_follow_the_documented_order() {
        if !available() {
            return;
        }
        let normal = |x: f32| if x.is_subnormal() { 0f32.copysign(x) } else { x };
        let (groups, floats) = (3, TILE_BYTES / 2);
        for seed in 0..8 {
            let (mut x, mut row) = tiles(groups, 2 * seed + seed / 4);
            let (weights, panels) = tiles(4 * groups, 2 * seed + 17 * (seed / 4) + 16);
            if seed == 3 {
                x[5] = f32::INFINITY;
                row.bytes_mut()[10..12].copy_from_slice(&f32_to_bf16(f32::INFINITY).to_ne_bytes());
            }
            let places = [0, 1, 2, 3].map(|p| panels.bytes()[p * groups * TILE_BYTES..].as_ptr());
            for rows in 1..=16 {
                let (mut sums, first) = (vec![f32::NAN; rows * 64], row.bytes().as_ptr());
                // SAFETY: the tiles are there, and the sums of so many rows.
                unsafe { strip::<4>(rows, first, places, groups, (sums.as_mut_ptr(), 64 * size_of::<f32>())) };
                for (at, sum) in sums.iter().enumerate() {
                    let (r, panel, column) = (at / 64, at / 16 % 4, at % 16);
                    let mut expected = 0f32;
                    for (pair, i) in (0..16 * groups).flat_map(|pair| [(pair, 1), (pair, 0)]) {
                        let (group, pair) = (pair / 16, pair % 16);
                        let x = normal(x[group * floats + r * 32 + 2 * pair + i]);
                        let weight = normal(weights[(panel * groups + group) * floats + pair * 32 + 2 * column + i]);
                        expected = normal(x.mul_add(weight, expected));
                    }
                    assert!(
                        bits(&[*sum]) == bits(&[expected]) || sum.is_nan() && expected.is_nan(),
                        "seed {seed}, {rows} rows, sum {at}: {sum:e}, not {expected:e}"
                    );
                }
            }
        }
    }
}
