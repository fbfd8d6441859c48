//! The processor that carries out steps.

use plimsoll_kernels::Isa;

use crate::cpu;
use crate::kv::ModelShape;

/// The processor of an engine's steps. It decides the workspace of a step, and the operations that exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The host's cores, with this instruction set.
    Cpu(Isa),
    /// A GPU, which multiplies quantized weights by inputs in single precision.
    Gpu,
}

impl Target {
    /// Returns the instruction set of the host's cores, if they carry out the steps.
    pub fn isa(self) -> Option<Isa> {
        match self {
            Self::Cpu(isa) => Some(isa),
            Self::Gpu => None,
        }
    }

    /// Bytes of workspace that `threads` compute threads need beside a step's temporaries.
    pub fn scratch_bytes(self, shape: &ModelShape, threads: usize) -> usize {
        match self {
            Self::Cpu(_) => cpu::scratch_bytes(shape, threads),
            Self::Gpu => 0,
        }
    }
}

impl From<Isa> for Target {
    fn from(isa: Isa) -> Self {
        Self::Cpu(isa)
    }
}
