//! Random numbers that are a function of (seed, position) and nothing else.
//!
//! Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A counter
//! goes through ten rounds of a keyed bijection. There is no state, hence nothing a batch, an abort or a preemption
//! could disturb. Not here: distributions.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// One block of four random words for a counter of four words and a key of two.
#[must_use]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k0, mut k1]) = (counter, key);
    for _ in 0..ROUNDS {
        let left = u64::from(a) * u64::from(MULTIPLIERS[0]);
        let right = u64::from(c) * u64::from(MULTIPLIERS[1]);
        (a, c) = ((right >> 32) as u32 ^ b ^ k0, (left >> 32) as u32 ^ d ^ k1);
        (b, d) = (right as u32, left as u32);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
    }
    [a, b, c, d]
}

/// 64 uniform random bits for the token at `position` of the request that has `seed`.
#[must_use]
pub fn random_u64(seed: u64, position: u64) -> u64 {
    let counter = [position as u32, (position >> 32) as u32, 0, 0];
    let [low, high, ..] = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    u64::from(high) << 32 | u64::from(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors of the Random123 distribution for `philox4x32 10`.
    #[test]
    fn published_vectors() {
        let ones = u32::MAX;
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([ones; 4], [ones; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let more_pi = [0xa409_3822, 0x299f_31d0];
        assert_eq!(philox4x32(pi, more_pi), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn every_bit_of_seed_and_position_counts() {
        let all = (0..64).flat_map(|bit| [random_u64(1 << bit, 0), random_u64(0, 1 << bit)]);
        let distinct: std::collections::HashSet<u64> = all.chain([random_u64(0, 0)]).collect();
        assert_eq!(distinct.len(), 129);
    }
}
