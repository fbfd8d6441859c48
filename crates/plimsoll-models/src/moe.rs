//! A mixture of experts in place of a feed-forward part: a router, experts of which each token takes a few, and perhaps one
//! that every token takes.
//!
//! Checkpoints store experts one by one, or stacked with gate and up projection apart or together; here they are the same.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, Experts, FeedForward, LinearId, Mode, RowPiece,
};
use plimsoll_formats::{Architecture, Experts as ExpertsConfig, ModelConfig};

use crate::block::{activation, feed_forward};

/// Weights of one layer's experts.
pub struct MoeBlock {
    router: LinearId,
    gate: Vec<LinearId>,
    up: Vec<LinearId>,
    down: Vec<LinearId>,
    top_k: usize,
    renormalise: bool,
    act: Activation,
    shared: Option<Shared>,
}

/// The expert that every token goes through, and the gate that weighs it.
struct Shared {
    expert: FeedForward,
    gate: LinearId,
}

impl MoeBlock {
    /// Declares `{prefix}.gate`, `{prefix}.experts.*` and what is shared.
    pub fn declare(
        config: &ModelConfig,
        experts: &ExpertsConfig,
        prefix: &str,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let hidden = config.hidden_size;
        let router = declare.linear(&format!("{prefix}.gate.weight"), experts.count, hidden)?;
        let stored = Stored::of(config, experts, prefix, declare);
        let shared = match experts.shared_width {
            0 => None,
            width => Some(Shared {
                expert: feed_forward(config, &format!("{prefix}.shared_expert"), width, declare)?,
                gate: declare.linear(&format!("{prefix}.shared_expert_gate.weight"), 1, hidden)?,
            }),
        };
        let prefix = format!("{prefix}.experts");
        let mut matrices = |part| {
            let each = 0..experts.count;
            each.map(|expert| stored.declare(&prefix, part, expert, (experts, hidden), declare))
                .collect::<Result<Vec<_>, _>>()
        };
        Ok(Self {
            router,
            gate: matrices(Part::Gate)?,
            up: matrices(Part::Up)?,
            down: matrices(Part::Down)?,
            top_k: experts.top_k,
            renormalise: experts.renormalise,
            act: activation(config.hidden_act),
            shared,
        })
    }

    /// `out (+)= Σ weight · expert(x) (+ sigmoid(gate(x)) · shared(x))`; the last `rounded_rows` rows are rounded where they can be.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        x: Buf,
        out: Buf,
        mode: Mode,
        rounded_rows: usize,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let router = device.temp(x.rows, self.gate.len())?;
        // Allocated in any case; a model without a shared expert writes nothing there.
        let gate = device.temp(x.rows, 1)?;
        match &self.shared {
            Some(shared) => device.linear(x, &[(self.router, router), (shared.gate, gate)], Mode::Store)?,
            None => device.linear(x, &[(self.router, router)], Mode::Store)?,
        }
        let experts = Experts {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            top_k: self.top_k,
            renormalise: self.renormalise,
            act: self.act,
        };
        device.experts(&experts, out, x, router, mode)?;
        if let Some(shared) = &self.shared {
            let part = device.temp(x.rows, x.cols)?;
            device.feed_forward(&shared.expert, x.into(), part, Mode::Store, rounded_rows)?;
            device.add_gated(out, part, gate);
        }
        device.release(scope);
        Ok(())
    }
}

/// A matrix of an expert.
#[derive(Clone, Copy)]
enum Part {
    Gate,
    Up,
    Down,
}

/// Which of a layer's fused tensors, `gate_up_proj` and `down_proj`, have their inputs before their outputs. Qwen3-VL-MoE is published
/// so; transformers 5.24 and later save it the other way round, and tell the two apart by each tensor's shape.
///
/// A square tensor fits both. The other one of its layer is not square then, and decides: one program has written both. transformers
/// takes a square one for outputs first, also where it is not.
fn inputs_first(prefix: &str, (width, hidden): (usize, usize), declare: &Declare<'_>) -> [bool; 2] {
    let turned = |name: &str, out: usize, k: usize| {
        let shape = declare.shape(&format!("{prefix}.experts.{name}.weight")).filter(|_| out != k)?;
        Some(shape.get(1..) == Some(&[k, out][..]))
    };
    let (gate_up, down) = (turned("gate_up_proj", 2 * width, hidden), turned("down_proj", hidden, width));
    [gate_up.or(down).unwrap_or(false), down.or(gate_up).unwrap_or(false)]
}

/// How a checkpoint stores the experts of a layer.
#[derive(Clone, Copy)]
enum Stored {
    /// One tensor for each expert and matrix.
    Single,
    /// One tensor for each matrix: [experts, out, in].
    Stacked,
    /// Gate and up projection in one tensor, gate first: [experts, 2 · width, hidden]; and one for down. Each may have its inputs before
    /// its outputs: [experts, hidden, 2 · width].
    Fused { inputs_first: [bool; 2] },
}

impl Stored {
    /// As the checkpoint has it; for a configuration alone, as it is published.
    fn of(config: &ModelConfig, experts: &ExpertsConfig, prefix: &str, declare: &Declare<'_>) -> Self {
        let has = |name: &str| declare.has(&format!("{prefix}.experts.{name}.weight"));
        let fused = Self::Fused { inputs_first: [false; 2] };
        match config.architecture {
            Architecture::Qwen3Moe if has("gate_up_proj") => {
                Self::Fused { inputs_first: inputs_first(prefix, (experts.width, config.hidden_size), declare) }
            }
            _ if has("gate_up_proj") => fused,
            _ if has("gate_proj") => Self::Stacked,
            _ if has("0.gate_proj") => Self::Single,
            _ if config.quantization.is_some() => Self::Stacked,
            Architecture::Qwen3_5Moe => fused,
            _ => Self::Single,
        }
    }

    fn declare(
        self,
        prefix: &str,
        part: Part,
        expert: usize,
        (experts, hidden): (&ExpertsConfig, usize),
        declare: &mut Declare<'_>,
    ) -> Result<LinearId, DeclareError> {
        let width = experts.width;
        let (name, out, k) = match part {
            Part::Gate => ("gate_proj", width, hidden),
            Part::Up => ("up_proj", width, hidden),
            Part::Down => ("down_proj", hidden, width),
        };
        let turned = match (self, part) {
            (Self::Fused { inputs_first: [gate_up, _] }, Part::Gate | Part::Up) => gate_up,
            (Self::Fused { inputs_first: [_, down] }, Part::Down) => down,
            _ => false,
        };
        if turned {
            let (name, width, column) = match part {
                Part::Gate => ("gate_up_proj", 2 * out, 0),
                Part::Up => ("gate_up_proj", 2 * out, out),
                Part::Down => ("down_proj", out, 0),
            };
            let (name, stored) = (format!("{prefix}.{name}.weight"), [experts.count, k, width]);
            return declare.turned(&name, &stored, (expert * k, column), (out, k));
        }
        let (name, stored_rows, first) = match (self, part) {
            (Self::Single, _) => return declare.linear(&format!("{prefix}.{expert}.{name}.weight"), out, k),
            (Self::Fused { .. }, Part::Gate) => ("gate_up_proj", 2 * out, 0),
            (Self::Fused { .. }, Part::Up) => ("gate_up_proj", 2 * out, out),
            _ => (name, out, 0),
        };
        let rows = RowPiece::span(expert * stored_rows + first, out);
        declare.linear_rows(&format!("{prefix}.{name}.weight"), &[experts.count, stored_rows, k], &[rows], k)
    }
}
