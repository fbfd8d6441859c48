//! Devices: one model code, several interpreters.
//!
//! Models are written against the [`Device`] trait. [`PlanDevice`] runs their `forward` without data and yields exact
//! bytes and work; [`CpuDevice`] executes it. No operation allocates: temporaries come from the step arena.
//! **Architecture invariant:** this crate knows shapes and bytes, but no architecture and no request.

mod ahead;
mod buf;
pub mod cpu;
pub mod device;
mod experts;
pub mod kv;
pub mod plan_device;
pub mod pool;
pub mod weights;

pub use cpu::{CpuDevice, CpuMemory, CpuWeights};
pub use device::{
    Activation, Attention, Blend, Buf, Device, DeviceError, Experts, FeedForward, GatedDelta, Input, Mark, MediaRows,
    Mode, NO_STATE, Norm, Places, Rotary, SeqSpan, StepInput, Unfold,
};
pub use kv::{EncoderShape, KvDtype, KvShape, ModelShape, PAGE_TOKENS, SPLIT_PAGES, StateShape, parse_kv_dtype};
pub use plan_device::{PlanDevice, Work};
pub use plimsoll_kernels::Isa;
pub use pool::ThreadPool;
pub use weights::{
    Change, ComputeDtype, Declare, DeclareError, DtypePolicy, Form, LinearId, Rounded, RowPiece, VectorId, WeightTable,
};
