//! Random numbers of tests, also of other crates.

#![allow(dead_code)] // each test file uses its part

/// A small generator (xorshift64*): tests must repeat.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }

    /// Uniform in −1..1.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0).collect()
    }

    pub fn rows(&mut self, rows: usize, cols: usize) -> Vec<Vec<f32>> {
        (0..rows).map(|_| self.floats(cols)).collect()
    }
}
