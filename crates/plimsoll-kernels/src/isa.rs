//! Which instruction set the kernels run on: detection, naming and the one place where a generic kernel becomes machine
//! code for it. No arithmetic lives here.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};

#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::simd::{Portable, Simd};

/// An instruction set for the kernels. All of them give the same bits for the same input. They differ in speed, and only AMX takes
/// input that is rounded to bfloat16 (for attention see [`Isa::rounds_attention`]). Each has its own layout for the numbers of
/// [`crate::quantize_acts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust for any processor: the oracle the others are tested against.
    Portable,
    /// 64-bit ARM; all such processors have NEON.
    Neon,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// AVX-512 with AMX's products of bytes and of bfloat16, for quantized weights and several rows.
    Amx,
}

/// The name given to [`Isa::from_str`] is none of `portable`, `neon`, `avx2`, `avx512`, `amx`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownIsa(String);

impl fmt::Display for UnknownIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown instruction set {:?}; expected portable, neon, avx2, avx512 or amx", self.0)
    }
}

impl std::error::Error for UnknownIsa {}

/// A kernel written once, generic over the instruction set. `run` must be `#[inline(always)]`, and so must everything
/// hot that it calls: only then does the body inherit the target features of the wrapper it is instantiated in.
pub(crate) trait Kernel {
    /// The kernel's result.
    type Output;
    /// Runs the kernel with the operations of `S`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

impl Isa {
    /// Every instruction set; for each processor the slowest first.
    pub const ALL: [Isa; 5] = [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// The fastest instruction set this processor has.
    pub fn detect() -> Isa {
        // A plain cache: every thread that races here computes the same value.
        static LEVEL: AtomicU8 = AtomicU8::new(u8::MAX);
        match LEVEL.load(Ordering::Relaxed) {
            0 => Isa::Portable,
            1 => Isa::Neon,
            2 => Isa::Avx2,
            3 => Isa::Avx512,
            4 => Isa::Amx,
            _ => {
                let isa = probe();
                LEVEL.store(isa as u8, Ordering::Relaxed);
                isa
            }
        }
    }

    /// Whether this processor can run the kernels of this instruction set.
    pub fn available(self) -> bool {
        // A processor has all of its kind up to its best, and none of another kind.
        match (self, Isa::detect()) {
            (Isa::Portable, _) => true,
            (Isa::Neon, best) => best == Isa::Neon,
            (_, best) => self <= best,
        }
    }

    /// Whether attention in bfloat16 runs on it ([`crate::AttendParams::bf16`]): by the matrix unit, or by vectors if the processor has
    /// AVX-512 BF16. For another processor, as in a plan, the answer is yes: the plan then reserves more.
    pub fn rounds_attention(self) -> bool {
        match self {
            Isa::Amx => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if self.available() => crate::pairs::available(),
            Isa::Avx512 => true,
            _ => false,
        }
    }

    /// The name [`FromStr`] accepts: `portable`, `neon`, `avx2`, `avx512` or `amx`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

    /// Runs `kernel` on this instruction set.
    ///
    /// Panics if the processor lacks it: running on would be undefined behaviour.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        if self == Isa::Portable { kernel.run(Portable) } else { self.run_vector(kernel) }
    }

    /// [`Isa::run`] for a kernel that is not compiled for the portable set, such as a large tile.
    #[inline]
    pub(crate) fn run_vector<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "aarch64")]
            Isa::Neon if self.available() => {
                // SAFETY: the feature `run_neon` is compiled with has just been confirmed.
                unsafe { run_neon(kernel) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 if self.available() => {
                // SAFETY: the features `run_avx2` is compiled with have just been confirmed.
                unsafe { run_avx2(kernel) }
            }
            _ => self.run_widest(kernel),
        }
    }

    /// [`Isa::run`] for a kernel that needs the registers of AVX-512.
    #[inline]
    pub(crate) fn run_widest<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx if self.available() => {
                // SAFETY: the features `run_avx512` is compiled with have just been confirmed.
                unsafe { run_avx512(kernel) }
            }
            _ => panic!("this processor has no {self}, or it was given {}", std::any::type_name_of_val(&kernel)),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = UnknownIsa;

    fn from_str(name: &str) -> Result<Self, UnknownIsa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| UnknownIsa(name.into()))
    }
}

#[cfg(target_arch = "x86_64")]
fn probe() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni");
    match (avx2, avx512) {
        (true, true) if crate::amx::available() => Isa::Amx,
        (true, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        _ => Isa::Portable,
    }
}

#[cfg(target_arch = "aarch64")]
fn probe() -> Isa {
    if std::arch::is_aarch64_feature_detected!("neon") { Isa::Neon } else { Isa::Portable }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn probe() -> Isa {
    Isa::Portable
}

/// # Safety
/// The processor has NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn run_neon<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller vouches for exactly the feature the token stands for.
    kernel.run(unsafe { Neon::assume() })
}

/// # Safety
/// The processor has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller vouches for exactly the features the token stands for.
    kernel.run(unsafe { Avx2::assume() })
}

/// # Safety
/// The processor has AVX-512 F, BW, DQ, VL and VNNI (and with them AVX2, FMA and F16C).
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller vouches for exactly the features the token stands for.
    kernel.run(unsafe { Avx512::assume() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_strangers_are_named() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        let error = "sse9".parse::<Isa>().unwrap_err();
        assert!(error.to_string().contains("sse9"));
    }

    #[test]
    fn portable_is_always_available() {
        assert!(Isa::Portable.available());
        assert!(Isa::detect().available());
    }

    #[test]
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    fn amx_is_tested_wherever_avx512_is() {
        assert_eq!(Isa::Amx.available(), Isa::Avx512.available());
    }

    #[test]
    fn a_processor_has_the_sets_of_its_own_kind_alone() {
        assert_eq!(Isa::Neon.available(), cfg!(target_arch = "aarch64"));
        let of_x86 = [Isa::Avx2, Isa::Avx512, Isa::Amx];
        assert!(cfg!(target_arch = "x86_64") || of_x86.iter().all(|isa| !isa.available()));
    }
}
