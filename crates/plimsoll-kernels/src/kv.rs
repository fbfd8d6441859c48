//! The paged KV cache: the layout of a page of 16 positions in memory, and storing one position. `attention` reads pages; the engine
//! assigns them to sequences.
//!
//! One layer's part of a page holds, per head, K then V, each padded to 64 bytes:
//! - K: `[head_dim][16 positions]`; under Q8 followed by f32 scales `[ceil(head_dim / 32)][16 positions]`.
//! - V: `[16 positions][head_dim]`; under Q8 followed by f32 scales `[16 positions][ceil(head_dim / 32)]`.
//!
//! Under bf16 the layout is the matrix unit's, which sums pairs: K `[head_dim / 16][8][16 positions][2]`, with dimensions i and i + 8
//! of every sixteen side by side, and V `[8][head_dim][2]`, with positions i and i + 8.
//!
//! Heads whose width is not a multiple of 16 are stored with zeros behind them ([`KvLayout::padded`]). Slots that were never stored may
//! hold any bytes.

use std::fmt;

use crate::isa::{Isa, Kernel};
use crate::math;
use crate::simd::{LANES, Simd};

/// Positions in a page.
pub const PAGE: usize = 16;
/// Dimensions that share a scale under [`KvDtype::Q8`].
pub(crate) const KV_BLOCK: usize = 32;
/// Under bf16, the first this many of sixteen dimensions of K, or positions of V, are paired with the others.
pub(crate) const PAIRS: usize = LANES / 2;
/// Largest head dimension.
const HEAD_DIM_MAX: usize = 1024;

/// The element format of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// Single precision.
    F32,
    /// Half precision, rounded to nearest even.
    F16,
    /// bfloat16, rounded to nearest even.
    Bf16,
    /// Signed bytes with one f32 scale per position and 32 dimensions (amax / 127).
    Q8,
}

/// Why a layout was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvLayoutError {
    /// The head dimension is not a multiple of 16 up to 1024.
    HeadDim(usize),
    /// There is no head, or there are too many for a page to be addressed.
    KvHeads(usize),
}

impl fmt::Display for KvLayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvLayoutError::HeadDim(dim) => {
                write!(f, "head dimension {dim} is not a multiple of {LANES} in {LANES}..={HEAD_DIM_MAX}")
            }
            KvLayoutError::KvHeads(heads) => {
                write!(f, "{heads} key/value heads; 1..=65536 are possible")
            }
        }
    }
}

impl std::error::Error for KvLayoutError {}

/// The shape of one layer's part of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    kv_heads: usize,
    head_dim: usize,
    /// Elements of a head in rows of activations; the others up to `head_dim` are zeros.
    width: usize,
    dtype: KvDtype,
}

impl KvLayout {
    /// Describes a layer's cache. Fails if `head_dim` is not a multiple of 16 up to 1024 or `kv_heads` is not in 1..=65536.
    pub fn new(kv_heads: usize, head_dim: usize, dtype: KvDtype) -> Result<KvLayout, KvLayoutError> {
        if head_dim == 0 || head_dim > HEAD_DIM_MAX || !head_dim.is_multiple_of(LANES) {
            return Err(KvLayoutError::HeadDim(head_dim));
        }
        if kv_heads == 0 || kv_heads > 1 << 16 {
            return Err(KvLayoutError::KvHeads(kv_heads));
        }
        Ok(KvLayout { kv_heads, head_dim, width: head_dim, dtype })
    }

    /// Describes a cache of heads of any width up to 1024, stored as wide as the next multiple of 16.
    pub fn padded(kv_heads: usize, width: usize, dtype: KvDtype) -> Result<KvLayout, KvLayoutError> {
        Ok(KvLayout { width, ..KvLayout::new(kv_heads, width.next_multiple_of(LANES), dtype)? })
    }

    /// Returns the layout of `kv_heads` of these heads. Panics if there are not as many.
    pub fn heads(self, kv_heads: usize) -> KvLayout {
        assert!((1..=self.kv_heads).contains(&kv_heads), "{kv_heads} of {} heads", self.kv_heads);
        KvLayout { kv_heads, ..self }
    }

    /// Key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Dimensions of a head as they are stored.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Dimensions of a head as queries, keys, values and results have them.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The element format.
    pub fn dtype(&self) -> KvDtype {
        self.dtype
    }

    /// Bytes of one layer's part of a page.
    pub fn bytes_per_page(&self) -> usize {
        self.kv_heads * self.head_bytes()
    }

    /// Bytes of one head's part: K, then V. Head h starts at `h · head_bytes`.
    pub fn head_bytes(&self) -> usize {
        2 * self.half_bytes()
    }

    /// Bytes of K, and of V, of one head: the offset of V within a head's part.
    pub fn half_bytes(&self) -> usize {
        let values = PAGE * self.head_dim;
        let bytes = match self.dtype {
            KvDtype::F32 => 4 * values,
            KvDtype::F16 | KvDtype::Bf16 => 2 * values,
            KvDtype::Q8 => values + 4 * PAGE * self.scale_blocks(),
        };
        bytes.next_multiple_of(64)
    }

    /// Scales per position and head under Q8.
    pub(crate) fn scale_blocks(&self) -> usize {
        self.head_dim.div_ceil(KV_BLOCK)
    }
}

/// Stores the keys and values of one position (`kv_heads · width` floats each, head after head) in slot `slot` of `page`,
/// one layer's part (`bytes_per_page` bytes).
///
/// Panics if a length or the slot does not fit.
pub fn kv_store(isa: Isa, layout: &KvLayout, page: &mut [u8], slot: usize, k_row: &[f32], v_row: &[f32]) {
    let width = layout.kv_heads * layout.width;
    assert!(k_row.len() == width && v_row.len() == width, "{} and {} values, {width} each", k_row.len(), v_row.len());
    assert_eq!(page.len(), layout.bytes_per_page(), "bytes of a page");
    assert!(slot < PAGE, "slot {slot} of {PAGE}");
    isa.run(Store { layout, page, slot, k_row, v_row });
}

struct Store<'a> {
    layout: &'a KvLayout,
    page: &'a mut [u8],
    slot: usize,
    k_row: &'a [f32],
    v_row: &'a [f32],
}

impl Kernel for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Store { layout, page, slot, k_row, v_row } = self;
        let heads = k_row.chunks_exact(layout.width).zip(v_row.chunks_exact(layout.width));
        for ((k, v), part) in heads.zip(page.chunks_exact_mut(layout.head_bytes())) {
            let (k_part, v_part) = part.split_at_mut(layout.half_bytes());
            let head = Head { dim: layout.head_dim, slot, k, v, k_part, v_part };
            match layout.dtype {
                KvDtype::F32 => head.store(|x| x.map(f32::to_le_bytes)),
                KvDtype::F16 => head.store(|x| halves(s, x)),
                KvDtype::Bf16 => head.store_pairs(s),
                KvDtype::Q8 => head.store_q8(s),
            }
        }
    }
}

/// One position of one head.
struct Head<'a> {
    dim: usize,
    slot: usize,
    k: &'a [f32],
    v: &'a [f32],
    k_part: &'a mut [u8],
    v_part: &'a mut [u8],
}

/// Returns sixteen elements from `from` on; zeros after the last one.
#[inline(always)]
fn sixteen(row: &[f32], from: usize) -> [f32; LANES] {
    let mut all = [0.0; LANES];
    let given = &row[from.min(row.len())..(from + LANES).min(row.len())];
    all[..given.len()].copy_from_slice(given);
    all
}

impl Head<'_> {
    /// Stores K as a column of slots, and V as a row.
    #[inline(always)]
    fn store<const N: usize>(self, bytes: impl Fn([f32; LANES]) -> [[u8; N]; LANES]) {
        let slot = self.slot % PAGE;
        let keys = self.k_part.as_chunks_mut::<N>().0.chunks_exact_mut(LANES * PAGE);
        for (keys, from) in keys.zip((0..self.dim).step_by(LANES)) {
            for (i, value) in bytes(sixteen(self.k, from)).into_iter().enumerate() {
                keys[i * PAGE + slot] = value;
            }
        }
        let values = &mut self.v_part.as_chunks_mut::<N>().0[slot * self.dim..][..self.dim];
        for (values, from) in values.as_chunks_mut::<LANES>().0.iter_mut().zip((0..).step_by(LANES)) {
            *values = bytes(sixteen(self.v, from));
        }
    }

    /// Stores K and V in bfloat16, in pairs.
    #[inline(always)]
    fn store_pairs<S: Simd>(self, s: S) {
        let slot = self.slot % PAGE;
        let keys = self.k_part.as_chunks_mut::<4>().0.chunks_exact_mut(PAIRS * PAGE);
        for (keys, from) in keys.zip((0..self.dim).step_by(LANES)) {
            let halves = s.to_array(upper_half(s, &sixteen(self.k, from)));
            for i in 0..PAIRS {
                let pair = halves[i].to_bits() >> 16 | halves[i + PAIRS].to_bits();
                keys[i * PAGE + slot] = pair.to_le_bytes();
            }
        }
        // The slot has one half of every pair; the other half is kept.
        let lines = self.v_part.as_chunks_mut::<{ 4 * LANES }>().0[slot % PAIRS * self.dim / LANES..].iter_mut();
        for (line, from) in lines.zip((0..self.dim).step_by(LANES)) {
            let value = upper_half(s, &sixteen(self.v, from));
            // SAFETY: a line is as long as sixteen floats.
            unsafe {
                let other = s.load(line.as_ptr().cast());
                let low = s.as_floats(s.shl_i::<16>(s.bits(other)));
                let pair = if slot < PAIRS { s.upper_halves(value, other) } else { s.upper_halves(low, value) };
                s.store(line.as_mut_ptr().cast(), pair);
            }
        }
    }

    #[inline(always)]
    fn store_q8<S: Simd>(self, s: S) {
        let Head { dim, slot, k, v, k_part, v_part } = self;
        // Codes past the end of a narrower head stay unchanged: the queries have zeros there, and such results are never read.
        let (k_codes, k_scales) = k_part.split_at_mut(PAGE * dim);
        let (v_codes, v_scales) = v_part.split_at_mut(PAGE * dim);
        for (index, x) in k.chunks(KV_BLOCK).enumerate() {
            let (codes, scale) = quantize(s, x);
            for (offset, code) in codes[..x.len()].iter().enumerate() {
                k_codes[(index * KV_BLOCK + offset) * PAGE + slot] = *code;
            }
            k_scales.as_chunks_mut::<4>().0[index * PAGE + slot] = scale.to_le_bytes();
        }
        for (index, x) in v.chunks(KV_BLOCK).enumerate() {
            let (codes, scale) = quantize(s, x);
            v_codes[slot * dim + index * KV_BLOCK..][..x.len()].copy_from_slice(&codes[..x.len()]);
            v_scales.as_chunks_mut::<4>().0[slot * dim.div_ceil(KV_BLOCK) + index] = scale.to_le_bytes();
        }
    }
}

/// Returns the nearest bfloat16 of each, ties to even, as the upper half of a float.
#[inline(always)]
fn upper_half<S: Simd>(s: S, x: &[f32; LANES]) -> S::F {
    // SAFETY: sixteen floats.
    let x = unsafe { s.load(x.as_ptr()) };
    let (bits, upper) = (s.bits(x), s.splat_i(!0xffff));
    let odd = s.and_i(s.sra_i::<16>(bits), s.splat_i(1));
    let bf16 = s.as_floats(s.and_i(s.add_i(bits, s.add_i(odd, s.splat_i(0x7fff))), upper));
    // A NaN must not be rounded to another value, nor cut down to an infinity.
    let beyond = s.sub_i(s.splat_i(0x7f80_0000), s.bits(s.abs(x)));
    let quiet = s.and_i(s.sra_i::<31>(beyond), s.splat_i(0x40_0000));
    let kept = s.as_floats(s.or_i(s.and_i(bits, upper), quiet));
    s.select_lt(s.abs(x), s.splat(f32::INFINITY), bf16, kept)
}

#[inline(always)]
fn halves<S: Simd>(s: S, x: [f32; LANES]) -> [[u8; 2]; LANES] {
    let mut halves = [[0; 2]; LANES];
    // SAFETY: sixteen floats, and room for as many halves.
    unsafe { s.store_f16(halves.as_mut_ptr().cast(), s.load(x.as_ptr())) };
    halves
}

/// Returns the greatest magnitude among 32 values; NaN if there is one.
#[inline(always)]
fn amax<S: Simd>(s: S, low: S::F, high: S::F) -> f32 {
    // Magnitudes compare like their bits, and NaN is the greatest: it cannot get lost.
    let bits = s.max_i(s.bits(s.abs(low)), s.bits(s.abs(high)));
    let mut lanes = s.to_array(s.as_floats(bits)).map(f32::to_bits);
    // Halves first, so that the compiler uses vector operations.
    let mut width = LANES / 2;
    while width > 0 {
        let mut lane = 0;
        while lane < width {
            lanes[lane] = lanes[lane].max(lanes[lane + width]);
            lane += 1;
        }
        width /= 2;
    }
    f32::from_bits(lanes[0])
}

/// Quantizes up to 32 values to signed bytes and returns their scale.
#[inline(always)]
fn quantize<S: Simd>(s: S, x: &[f32]) -> ([u8; KV_BLOCK], f32) {
    let low = s.load_part(x, 0.0);
    let high = s.load_part(x.get(LANES..).unwrap_or(&[]), 0.0);
    let amax = amax(s, low, high);
    // 127 / amax must not overflow.
    let tiny = amax < f32::from_bits((127 - 100) << 23);
    let (scale, inverse) = if tiny { (0.0, 0.0) } else { (amax / 127.0, 127.0 / amax) };
    let inverse = s.splat(inverse);
    let mut codes = [0; KV_BLOCK];
    // SAFETY: `codes` has two vectors of 16 bytes.
    unsafe {
        s.store_low_bytes(codes.as_mut_ptr(), math::round(s, s.mul(low, inverse)));
        s.store_low_bytes(codes.as_mut_ptr().add(LANES), math::round(s, s.mul(high, inverse)));
    }
    (codes, scale)
}
