//! Every operation of every instruction set against the portable one, on ordinary, awkward and arbitrary bits.

use super::{CodeWidth, LANES, Simd};
use crate::isa::Kernel;
use crate::testing::{Random, bits, isas};

struct AllOps<'a> {
    a: &'a [f32],
    b: &'a [f32],
    c: &'a [f32],
    bytes: &'a [u8],
}

impl Kernel for AllOps<'_> {
    type Output = Vec<(&'static str, Vec<u32>)>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (a, b, c) = (s.load_part(self.a, 0.0), s.load_part(self.b, 0.0), s.load_part(self.c, 0.0));
        let (ia, ib) = (s.bits(a), s.bits(b));
        let p = self.bytes.as_ptr();
        let mut out = Vec::new();
        let mut float = |name, v: S::F| out.push((name, bits(&s.to_array(v))));
        float("add", s.add(a, b));
        float("sub", s.sub(a, b));
        float("mul", s.mul(a, b));
        float("div", s.div(a, b));
        float("fma", s.fma(a, b, c));
        float("max", s.max(a, b));
        float("min", s.min(a, b));
        float("abs", s.abs(a));
        float("select_lt", s.select_lt(a, b, c, a));
        float("splat", s.splat(self.a[3]));
        float("float", s.float(ia));
        float("load_part", s.load_part(&self.a[..5], 7.0));
        float("upper_halves", s.upper_halves(a, b));
        s.unzip(a, b).into_iter().for_each(|v| float("unzip", v));
        s.zip(a, b).into_iter().for_each(|v| float("zip", v));
        s.eights(a, b).into_iter().for_each(|v| float("eights", v));
        for n in [f32::NEG_INFINITY, -1e9, -160.5, -127.0, -30.1, 0.0, 5.9] {
            // Between ½ and 1.
            let v = s.as_floats(s.or_i(s.and_i(ia, s.splat_i(0x7f_ffff)), s.splat_i(0x3f00_0000)));
            float("scale", s.scale(v, s.splat(n)));
            float("fraction", s.abs(s.fraction(s.fma(v, s.splat(100.0), s.splat(n)))));
            float("fraction of less", s.abs(s.fraction(s.mul(v, s.splat(-1e-6)))));
        }
        // SAFETY: there are 64 bytes.
        unsafe {
            float("load_f16", s.load_f16(p));
            float("pick", s.pick::<20>(a, s.load_bytes(p)));
            float("pick the last", s.pick::<28>(a, s.load_bytes(p)));
            float("load_bf16", s.load_bf16(p));
            float("load_f8", s.load_f8(p));
            float("load_i8", s.load_i8(p));
            float("load_u8", s.load_u8(p.add(3)));
            float("load_u8_i", s.as_floats(s.load_u8_i(p.add(5))));
        }
        out.push(("sum", bits(&[s.sum(a)])));
        // No lane may be NaN. On ARM LLVM makes NaN of the maximum of a signalling NaN and 0.
        let numbers = s.as_floats(s.and_i(ia, s.splat_i(0x7f7f_ffff)));
        out.push(("max_lane", bits(&[s.max_lane(numbers)])));
        let mut int = |name, v: S::I| out.push((name, s.to_array(s.as_floats(v)).map(f32::to_bits).to_vec()));
        int("add_i", s.add_i(ia, ib));
        int("sub_i", s.sub_i(ia, ib));
        int("and_i", s.and_i(ia, ib));
        int("or_i", s.or_i(ia, ib));
        int("max_i", s.max_i(ia, ib));
        int("shl_i", s.shl_i::<23>(ia));
        int("sra_i", s.sra_i::<5>(ia));
        int("splat_i", s.splat_i(-7));
        let mut halves = [0f32; LANES / 2];
        // SAFETY: room for sixteen halves.
        unsafe { s.store_f16(halves.as_mut_ptr().cast(), a) };
        out.push(("store_f16", bits(&halves)));
        let mut low = [0u8; LANES];
        // SAFETY: `low` has 16 bytes.
        unsafe { s.store_low_bytes(low.as_mut_ptr(), ia) };
        out.push(("store_low_bytes", low.map(u32::from).to_vec()));
        let mut words = [0u8; 2 * LANES];
        // SAFETY: `words` has 32 bytes.
        unsafe { s.store_high_words(words.as_mut_ptr(), ib) };
        out.push(("store_high_words", words.map(u32::from).to_vec()));
        byte_ops(s, self.bytes, &mut out);
        let mut part = [1.0; 5];
        s.store_part(&mut part, a);
        out.push(("store_part", bits(&part)));
        out
    }
}

/// Operations on sixty-four bytes.
#[inline(always)]
fn byte_ops<S: Simd>(s: S, bytes: &[u8], out: &mut Vec<(&'static str, Vec<u32>)>) {
    let p = bytes.as_ptr();
    let mut looked = [0u8; 128];
    let table = super::Words(std::array::from_fn(|i| (i * 1009) as u16));
    // SAFETY: `looked` has 128 bytes.
    unsafe { s.store_words::<true>(looked.as_mut_ptr(), &table, s.shift_mask(s.load_bytes(p), 0, 63)) };
    out.push(("store_words", looked.map(u32::from).to_vec()));
    // SAFETY: as above.
    unsafe { s.store_words::<false>(looked.as_mut_ptr(), &table, s.shift_mask(s.load_bytes(p), 0, 31)) };
    out.push(("store_words, narrow", looked.map(u32::from).to_vec()));
    let mut whole = [0u8; 64];
    // SAFETY: `whole` has 64 bytes, as many as lie at `p`.
    unsafe { s.store_bytes(whole.as_mut_ptr(), s.sub_bytes(s.load_bytes(p), 131)) };
    out.push(("store_bytes, sub_bytes", whole.map(u32::from).to_vec()));
    let table = bytes[40..].first_chunk().expect("there are sixty-four");
    // SAFETY: as above.
    unsafe { s.store_bytes(whole.as_mut_ptr(), s.look_up(table, s.shift_mask(s.load_bytes(p), 0, 15))) };
    out.push(("look_up", whole.map(u32::from).to_vec()));
}

#[test]
fn operations_agree_with_portable() {
    let mut random = Random::new(1);
    for round in 0..2000 {
        let mut draw = || {
            if round % 3 == 0 { random.awkward(LANES) } else { random.any(LANES) }
        };
        let (a, b, c) = (draw(), draw(), draw());
        let bytes: Vec<u8> = (0..64).map(|_| random.next() as u8).collect();
        let mut expected = None;
        for isa in isas() {
            let actual = isa.run(AllOps { a: &a, b: &b, c: &c, bytes: &bytes });
            let expected = expected.get_or_insert_with(|| actual.clone());
            for (actual, expected) in actual.iter().zip(expected.iter()) {
                assert_eq!(actual, expected, "{isa} {a:?} {b:?} {c:?}");
            }
        }
    }
}

/// The quads of a block.
#[inline(always)]
fn load_codes<S: Simd>(s: S, codes: &[u8; 512]) -> [S::B; 8] {
    // SAFETY: 8 vectors of 64 bytes.
    let quad = |n: usize| unsafe { s.load_bytes(codes.as_ptr().add(64 * n)) };
    [quad(0), quad(1), quad(2), quad(3), quad(4), quad(5), quad(6), quad(7)]
}

/// Three rows of activations, 40 bytes apart.
struct Dots<'a> {
    width: CodeWidth,
    codes: &'a [u8; 512],
    acts: &'a [i8; 120],
}

impl Kernel for Dots<'_> {
    type Output = Vec<Vec<u32>>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        // SAFETY: 32 activations of each row.
        unsafe {
            let codes = load_codes(s, self.codes);
            let [c0, c1, c2, c3, ..] = codes;
            let acts = (self.acts.as_ptr().cast::<u8>(), 40);
            let init = [s.splat_i(-5), s.splat_i(9), s.splat_i(0)];
            let [whole, half] =
                [s.dots(self.width, &codes, acts, init), s.dots(self.width, &[c0, c1, c2, c3], acts, init)];
            let dots = whole.into_iter().chain(half).chain(s.dots(self.width, &codes, acts, [s.splat_i(7)]));
            dots.map(|dot| s.to_array(s.as_floats(dot)).map(f32::to_bits).to_vec()).collect()
        }
    }
}

#[test]
fn dots_are_exact_up_to_their_extremes() {
    let mut random = Random::new(2);
    let widths = [(CodeWidth::Four, 15u8), (CodeWidth::Five, 31), (CodeWidth::Six, 63), (CodeWidth::Eight, 255)];
    for (width, top) in widths {
        for round in 0..200 {
            let mut codes = [top; 512];
            let mut acts = [if round % 2 == 0 { 127i8 } else { -128 }; 120];
            if round > 1 {
                codes.fill_with(|| if random.below(4) == 0 { top } else { (random.next() as u8) & top });
                acts.fill_with(|| random.next() as i8);
            }
            let exact = |n: usize, row: usize, init: i32| -> Vec<u32> {
                let lane = |lane: usize| -> i32 {
                    let term =
                        |i: usize| i32::from(codes[i / 4 * 64 + lane * 4 + i % 4]) * i32::from(acts[40 * row + i]);
                    init + (0..4 * n).map(term).sum::<i32>()
                };
                (0..LANES).map(|l| lane(l) as u32).collect()
            };
            let rows = |n: usize| [exact(n, 0, -5), exact(n, 1, 9), exact(n, 2, 0)];
            let expected: Vec<_> = rows(8).into_iter().chain(rows(4)).chain([exact(8, 0, 7)]).collect();
            for isa in isas() {
                assert_eq!(isa.run(Dots { width, codes: &codes, acts: &acts }), expected, "{isa}");
            }
        }
    }
}

/// Four rows of numbers of 16 bits.
struct WordDots<'a> {
    width: CodeWidth,
    codes: &'a [u8; 512],
    numbers: &'a [[i32; 32]; 4],
}

impl Kernel for WordDots<'_> {
    type Output = Vec<Vec<i32>>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut blocks = [[0u8; 96]; 4];
        // SAFETY: blocks of 64 bytes and more, numbers of two vectors.
        unsafe {
            for (block, numbers) in blocks.iter_mut().zip(self.numbers) {
                for half in 0..2 {
                    let numbers = s.bits(s.load(numbers.as_ptr().add(16 * half).cast()));
                    s.store_numbers(block.as_mut_ptr(), half, numbers);
                }
            }
            let codes = load_codes(s, self.codes);
            let [.., c4, c5, c6, c7] = codes;
            let (acts, init) = ((blocks.as_ptr().cast::<u8>(), 96), [s.splat_i(-5); 4]);
            let whole = s.dots_of_words(self.width, &codes, acts, 0, init);
            let half = s.dots_of_words(self.width, &[c4, c5, c6, c7], acts, 4, init);
            let lanes = |dot| s.to_array(s.as_floats(dot)).map(|lane| lane.to_bits() as i32).to_vec();
            whole.into_iter().chain(half).map(lanes).collect()
        }
    }
}

#[test]
fn dots_of_words_are_exact_up_to_their_extremes() {
    const MOST: i32 = 32_639;
    let mut random = Random::new(4);
    for (width, top) in [(CodeWidth::Four, 15u8), (CodeWidth::Five, 31), (CodeWidth::Six, 63), (CodeWidth::Eight, 255)]
    {
        for round in 0..200 {
            let mut codes = [top; 512];
            let mut numbers = [[if round % 2 == 0 { MOST } else { -MOST }; 32]; 4];
            if round > 1 {
                codes.fill_with(|| if random.below(4) == 0 { top } else { (random.next() as u8) & top });
                numbers.as_flattened_mut().fill_with(|| random.next() as i32 % (MOST + 1));
            }
            let exact = |row: &[i32; 32], first: usize| -> Vec<i32> {
                let term = |lane: usize, i: usize| i32::from(codes[i / 4 * 64 + lane * 4 + i % 4]) * row[i];
                (0..LANES).map(|lane| (first..32).map(|i| term(lane, i)).sum::<i32>() - 5).collect()
            };
            let whole = numbers.iter().map(|row| exact(row, 0));
            let expected: Vec<_> = whole.chain(numbers.iter().map(|row| exact(row, 16))).collect();
            for isa in isas() {
                assert_eq!(isa.run(WordDots { width, codes: &codes, numbers: &numbers }), expected, "{isa}");
            }
        }
    }
}

struct ShiftMask<'a>(&'a [u8; 64]);

impl Kernel for ShiftMask<'_> {
    type Output = Vec<Vec<u8>>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        // SAFETY: there are 64 bytes.
        let v = unsafe { s.load_bytes(self.0.as_ptr()) };
        let mut out = Vec::new();
        for (shift, mask) in [(4, 15), (0, 15), (-4, 0x30), (2, 0x30), (6, 3), (7, 1), (-4, 16), (3, 16), (-6, 0xc0)] {
            let v = s.or_b(s.shift_mask(v, shift, mask), s.shift_mask(v, 0, 0));
            // Byte b of all lanes, read back by integer dot products with unit vectors.
            let mut bytes = vec![0; 64];
            for b in 0..4 {
                let mut unit = [0u8; 16];
                unit[b] = 1;
                // SAFETY: four quads of activations.
                let [lanes] = unsafe { s.dots(CodeWidth::Eight, &[v; 4], (unit.as_ptr(), 0), [s.splat_i(0)]) };
                for (lane, byte) in s.to_array(s.float(lanes)).into_iter().enumerate() {
                    bytes[4 * lane + b] = byte as u8;
                }
            }
            out.push(bytes);
        }
        out
    }
}

#[test]
fn shifts_stay_within_their_byte() {
    let mut random = Random::new(3);
    let mut source = [0; 64];
    for _ in 0..100 {
        source.fill_with(|| random.next() as u8);
        let expected = crate::Isa::Portable.run(ShiftMask(&source));
        assert_eq!(expected[0], source.map(|byte| byte >> 4));
        assert_eq!(expected[2], source.map(|byte| (byte << 4) & 0x30));
        for isa in isas() {
            assert_eq!(isa.run(ShiftMask(&source)), expected, "{isa}");
        }
    }
}
