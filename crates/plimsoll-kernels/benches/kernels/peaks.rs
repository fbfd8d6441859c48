//! The rates of this processor's product instructions: a loop of them on registers, without loads and stores. No kernel of the same
//! arithmetic can be faster.
//!
//! One thread. Two threads of one core share its units: to measure several threads, run this bench as often at once.

use std::arch::asm;

use divan::Bencher;
use divan::counter::ItemsCount;
use plimsoll_kernels::Isa;

use crate::isa;

/// Turns of a loop. A turn has twelve independent sums, so that no product waits for the one before it.
const TURNS: usize = 4096;
const SUMS: usize = 12;

/// Eight tiles of sixteen rows of 64 bytes, as the matrix unit's configuration.
static SHAPES: [u8; 64] = {
    let mut shapes = [0; 64];
    shapes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        shapes[16 + 2 * tile] = 64;
        shapes[48 + tile] = 16;
        tile += 1;
    }
    shapes
};

/// Defines a function that runs instructions `TURNS` times for each of twelve sums: `\\i` is the sum's number, 14 and 15 are the inputs.
macro_rules! vectors {
    ($name:ident: $($line:literal),+) => {
        /// # Safety
        /// The processor has these instructions.
        unsafe fn $name() {
            // SAFETY: the caller's word; the registers that change are declared.
            unsafe {
                asm!(
                    "2:",
                    ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11",
                    $($line,)+
                    ".endr",
                    "dec {turns}",
                    "jnz 2b",
                    turns = inout(reg) TURNS => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _, out("xmm6") _,
                    out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _, out("xmm14") _,
                    out("xmm15") _,
                    options(nostack, nomem),
                );
            }
        }
    };
}

vectors!(avx2_bytes: "vpmaddubsw ymm12, ymm14, ymm15", "vpaddw ymm\\i, ymm\\i, ymm12");
vectors!(avx2_words: "vpmaddwd ymm12, ymm14, ymm15", "vpaddd ymm\\i, ymm\\i, ymm12");
vectors!(avx2_floats: "vfmadd231ps ymm\\i, ymm14, ymm15");
vectors!(avx512_bytes: "vpdpbusd zmm\\i, zmm14, zmm15");
vectors!(avx512_floats: "vfmadd231ps zmm\\i, zmm14, zmm15");

/// Defines a function that multiplies tiles into four sums, `TURNS` times each.
macro_rules! tiles {
    ($name:ident: $instruction:literal) => {
        /// # Safety
        /// The processor has the matrix unit, and this process may use it.
        unsafe fn $name() {
            // SAFETY: the caller's word; the unit is released at the end.
            unsafe {
                asm!(
                    "ldtilecfg [{shapes}]",
                    "2:",
                    ".irp i, 0, 1, 2, 3",
                    concat!($instruction, " tmm\\i, tmm6, tmm7"),
                    ".endr",
                    "dec {turns}",
                    "jnz 2b",
                    "tilerelease",
                    shapes = in(reg) &raw const SHAPES, turns = inout(reg) TURNS => _,
                    options(nostack, readonly),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                    out("tmm5") _, out("tmm6") _, out("tmm7") _,
                );
            }
        }
    };
}

tiles!(amx_bytes: "tdpbssd");
tiles!(amx_bf16: "tdpbf16ps");

/// A loop of product instructions. # Safety: the processor has them.
type Loop = unsafe fn();

/// Measures a loop with this many products a turn. A product counts as two operations: the second one is the addition.
fn measure(bencher: Bencher, products: usize, run: Loop) {
    assert!(isa().available(), "this processor has no {}", isa().name());
    // SAFETY: the instruction set is there.
    bencher.counter(ItemsCount::new(2 * products * TURNS)).bench_local(|| unsafe { run() });
}

/// Products of 4-bit weights with 8-bit activations: `--compute-dtype int8`.
#[divan::bench(ignore = isa() < Isa::Avx2, max_time = 0.5)]
fn int8(bencher: Bencher) {
    match isa() {
        Isa::Amx => measure(bencher, 4 * 16 * 16 * 64, amx_bytes),
        Isa::Avx512 => measure(bencher, SUMS * 64, avx512_bytes),
        _ => measure(bencher, SUMS * 32, avx2_bytes),
    }
}

/// Products of a prompt in `--compute-dtype auto`: with 16-bit activations, which AVX-512 multiplies as two planes of bytes; in bf16 on the
/// matrix unit.
#[divan::bench(ignore = isa() < Isa::Avx2, max_time = 0.5)]
fn auto(bencher: Bencher) {
    match isa() {
        Isa::Amx => measure(bencher, 4 * 16 * 16 * 32, amx_bf16),
        Isa::Avx512 => measure(bencher, SUMS * 64 / 2, avx512_bytes),
        _ => measure(bencher, SUMS * 16, avx2_words),
    }
}

/// Fused products of float32.
#[divan::bench(ignore = isa() < Isa::Avx2, max_time = 0.5)]
fn float32(bencher: Bencher) {
    match isa() {
        Isa::Avx2 => measure(bencher, SUMS * 8, avx2_floats),
        _ => measure(bencher, SUMS * 16, avx512_floats),
    }
}
