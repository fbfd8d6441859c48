//! Shared parts of this crate's tests: instruction sets to try, random and awkward numbers, comparison by bits.

use plimsoll_kernels::Isa;

/// The instruction sets this machine can run, the oracle first.
pub(crate) fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available())
}

/// Bits to compare by: NaNs count as equal.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

/// A small generator (xorshift64*): tests must repeat.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// Uniform in −1..1.
    pub(crate) fn uniform(&mut self) -> f32 {
        self.next() as f32 / 2f32.powi(31) - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.uniform()).collect()
    }

    /// Mostly ordinary numbers, now and then a zero, a subnormal, something huge or tiny; no NaN, no infinity.
    pub(crate) fn awkward(&mut self, n: usize) -> Vec<f32> {
        let odd = [0.0, -0.0, 1e-40, -3e-42, 1e-38, 1e-20, -1e15, 3e18, 1.0, -1.0, 65_504.0, f32::MIN_POSITIVE];
        (0..n).map(|_| if self.below(8) == 0 { odd[self.below(odd.len())] } else { self.uniform() }).collect()
    }

    /// Any bits: NaN, infinity and all.
    pub(crate) fn any(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| f32::from_bits(self.next())).collect()
    }
}

/// A buffer of bytes aligned to 64, as arenas give them.
pub(crate) struct Aligned {
    lines: Vec<[u64; 8]>,
    offset: usize,
    len: usize,
}

impl Aligned {
    pub(crate) fn new(len: usize) -> Aligned {
        let lines = vec![[0u64; 8]; len.div_ceil(64) + 1];
        let offset = lines.as_ptr().addr().wrapping_neg() % 64;
        Aligned { lines, offset, len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: one more line than needed was allocated, so that `offset + len` is within.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast::<u8>().add(self.offset), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<u8>().add(self.offset), self.len) }
    }
}
