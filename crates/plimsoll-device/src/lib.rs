//! Devices: one model code, several interpreters.
//!
//! Models are written against the [`Device`] trait. [`PlanDevice`] runs their `forward` without data and yields exact
//! bytes and work; [`CpuDevice`] executes it. No operation allocates: temporaries come from the step arena.
//! **Architecture invariant:** this crate handles shapes and bytes, but no architecture and no request.

mod ahead;
mod buf;
pub mod cpu;
pub mod device;
mod experts;
pub mod kv;
pub mod plan_device;
pub mod pool;
pub mod weights;
mod work;

pub use cpu::{CpuDevice, CpuMemory, CpuWeights};
pub use device::{
    Activation, Attention, Blend, Buf, CANDIDATE_BLOCK, CANDIDATES_MAX, CausalConv, Device, DeviceError, Encoded,
    Experts, FeedForward, GatedDelta, Input, Mark, MediaRows, Mode, NO_STATE, Near, NgramConv, Ngrams, Norm, Places,
    Rotary, Scoring, Selection, SelectiveScan, SeqSpan, StepInput, Unfold,
};
pub use experts::{GPU_EXPERT_ROWS, GPU_EXPERTS_MAX, GpuExperts};
pub use kv::{
    CachedLayer, EncoderShape, IndexLayout, KvDtype, KvGroup, KvLayer, KvShape, ModelShape, NgramState, PAGE_TOKENS,
    SPLIT_PAGES, StateShape, parse_kv_dtype,
};
pub use plan_device::{PlanDevice, ROW_WORDS};
pub use plimsoll_kernels::{Isa, NEAR_MAX};
pub use pool::ThreadPool;
pub use weights::{
    Bf16Rows, Change, ComputeDtype, Declare, DeclareError, DtypePolicy, FileTable, Form, InFile, LinearId, RowPiece,
    TableCacheSize, TableKind, TablePlace, Target, VectorId, WeightTable,
};
pub use work::{Calls, Work};
