//! The cost of a step: operations, bytes moved, and dispatches.

/// Work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Multiplications and additions.
    pub flops: u64,
    /// Bytes of weights read.
    pub weight_bytes: u64,
    /// Bytes of keys and values read and written.
    pub kv_bytes: u64,
    /// Bytes of recurrent state read and written.
    pub state_bytes: u64,
}

impl std::ops::Sub for Work {
    type Output = Self;

    fn sub(self, less: Self) -> Self {
        Self {
            flops: self.flops - less.flops,
            weight_bytes: self.weight_bytes - less.weight_bytes,
            kv_bytes: self.kv_bytes - less.kv_bytes,
            state_bytes: self.state_bytes - less.state_bytes,
        }
    }
}

/// The dispatches of a step, for a device that records them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Operations, counting each matrix of a linear layer and each part of an operation with several parts.
    pub plain: usize,
    /// Products with the matrices of all experts.
    pub grouped: usize,
}

impl Calls {
    /// The larger of each count.
    pub fn max(self, other: Self) -> Self {
        Self { plain: self.plain.max(other.plain), grouped: self.grouped.max(other.grouped) }
    }
}
