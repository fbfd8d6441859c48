//! Plimsoll's inner loops: slices in, slices out. No allocation, no threads, no dependency; splitting work among threads and
//! owning memory is `plimsoll-device`'s business, reading files `plimsoll-formats`'.
//!
//! **One arithmetic.** The result of a row depends on nothing but that row and the weights: not on how many rows are
//! computed together, not on tiles or threads, and not on the instruction set. What is rounded to bfloat16 first
//! ([`round_row`], [`AttendParams::bf16`]) is another input, which AMX multiplies, the second also AVX-512 BF16,
//! each in an order of its own. Every floating-point kernel is written once over sixteen lanes (`simd::Simd`). Their
//! operations are exactly rounded on every instruction set; sums have one fixed order; elementary functions are our own
//! polynomials. [`Isa::Portable`] is therefore an oracle for the others, bit for bit. (NaN stays NaN, but its payload
//! may differ.)
//!
//! Lengths that do not fit are the caller's bug and panic with both numbers; data from files is checked by [`Packing::new`]
//! and the packing functions, which return errors.

mod acts;
#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod bf16;
mod conv;
mod delta;
mod half;
mod index;
mod isa;
mod kv;
mod linear;
mod math;
mod near;
mod norm;
mod ops;
mod pack;
mod packing;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod rope;
mod route;
mod simd;
mod sizes;
mod softmax;
mod streams;
#[cfg(test)]
#[path = "../tests/kernels/support.rs"]
mod testing;

// `testing` is a file of the tests outside, too, which name the crate.
#[cfg(test)]
extern crate self as plimsoll_kernels;

pub use acts::{ActForm, ActLayout, Acts, quantize_acts};
pub use attention::{
    AttendOutput, AttendParams, KvPages, Queries, SPLIT, SPLIT_PAGES, Span, attend, attend_combine, attend_merge,
    attend_partial_len, attend_runs, attend_scratch_len, attend_split, attend_split_scratch_len, attend_splits,
};
pub use bf16::{Bf16Acts, Bf16Layout, round_row};
pub use conv::{
    ConvRows, ConvSpec, HeadNorm, causal_conv, conv_scratch_len, conv_weights, conv_weights_len, dilated_conv_weights,
};
pub use delta::{
    DeltaInput, DeltaOutput, NO_SLOT, STATE_TILE, StateRule, StateSlots, delta_gates, delta_scratch_len, gated_delta,
    time_steps,
};
pub use half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use index::{Best, index_score};
pub use isa::{Isa, UnknownIsa};
pub use kv::{KvDtype, KvLayout, KvLayoutError, PAGE, kv_store};
pub use linear::{Input, Mode, Target, Weights, linear, linear_glu};
pub use near::{NEAR_MAX, Near, attend_near};
pub use norm::{layer_norm, rms_norm};
pub use ops::{Activation, activate, add, glu, glu_rough, mul, scale, softcap};
pub use pack::{F8Row, QuantRow, QuantRowScales, pack_panel_f8, pack_panel_f32, pack_panel_quant, unpack_row};
pub use packing::{BLOCK, Codebook, PANEL, PackError, PackKind, PackScales, Packing, QuantPacking, SUPER};
pub use rope::{RopeStyle, rope};
pub use route::{Scoring, add_gated, combine, group_by_expert, route, route_scored};
pub use simd::prefetch;
pub use softmax::softmax;
pub use streams::gate_stream;
