//! Measures the inner loops on one thread: bytes a second where weights stream, operations a second where rows share them.
//!
//! `cargo bench -p plimsoll-kernels -- [filter]`, with `ISA=avx2` before it for another instruction set than the best and `K=576` for
//! other columns than 4096. An item of `item/s` is a multiplication or an addition (a fused one is both), or one element of a row.
//!
//! Neighbours on the machine can only make a run slower: of the columns the fastest is the kernel's, the median the machine's
//! at that moment. What the machine itself can do stands beside: a plain read of memory, measured again before each kind
//! of weights, since it changes from minute to minute; and the products of the matrix unit where there is one.

mod attention;
mod cache;
mod delta;
mod memory;
#[cfg(target_arch = "x86_64")]
mod peaks;
mod product;
mod rows;

use std::ops::{Deref, DerefMut};
use std::sync::LazyLock;

use plimsoll_kernels::Isa;

/// The instruction set that is measured.
static CHOSEN: LazyLock<Isa> = LazyLock::new(|| match std::env::var("ISA") {
    Ok(name) => name.parse().unwrap_or_else(|error| panic!("ISA: {error}")),
    Err(_) => Isa::detect(),
});

fn isa() -> Isa {
    *CHOSEN
}

/// Values that begin at a multiple of 64 bytes, as arenas give them.
struct Aligned<T> {
    values: Vec<T>,
    start: usize,
}

impl<T> Aligned<T> {
    fn new(len: usize, value: impl FnMut(usize) -> T) -> Aligned<T> {
        let line = 64 / size_of::<T>();
        let mut values: Vec<T> = Vec::with_capacity(len + line);
        let start = values.as_ptr().addr().wrapping_neg() % 64 / size_of::<T>();
        // The values before `start` are unused but must be initialised.
        values.extend((0..len + line).map(value));
        values.truncate(start + len);
        Aligned { values, start }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values[self.start..]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values[self.start..]
    }
}

/// Bytes that are codes, scales and floats of all kinds: none of them are huge, NaN or subnormal, which processors are slow at.
fn bytes(len: usize) -> Aligned<u8> {
    Aligned::new(len, |i| ((i * 37) >> 5) as u8 & 0x3b | 0x20)
}

fn main() {
    let best = Isa::detect();
    assert!(isa().available(), "{} was asked for, and the best of this processor is {best}", isa());
    eprintln!("Instruction set: {}", isa());
    divan::main();
}
