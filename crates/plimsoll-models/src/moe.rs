//! A mixture of experts in place of a feed-forward part: a router, experts of which each token takes a few, and in some models a shared
//! expert that every token takes.
//!
//! Checkpoints store experts one by one or stacked, with gate and up projection separate or in one tensor. Here all are separate matrices.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, Experts, LinearId, Mode, RowPiece, Scoring, VectorId,
};
use plimsoll_formats::{Architecture, Experts as ExpertsConfig, Method, ModelConfig, Routing};

use crate::block::activation;
use crate::dense::Dense;

/// Weights of one layer's experts.
pub struct MoeBlock {
    router: LinearId,
    gate: Vec<LinearId>,
    up: Vec<LinearId>,
    down: Vec<LinearId>,
    top_k: usize,
    renormalise: bool,
    act: Activation,
    scoring: Option<Scoring>,
    shared: Option<Shared>,
    /// The factor on the router's logits.
    pub(crate) logit_scale: f32,
    /// Bound of the tanh soft cap on the router's logits.
    logit_softcap: Option<f32>,
    weighs_inputs: bool,
    /// The bias that is added to the sum of the experts.
    bias: Option<VectorId>,
    /// The projections to the experts' narrower width and back, and that width; none if experts read rows of full width.
    latent: Option<([LinearId; 2], usize)>,
}

/// The expert that every token takes. `gate` projects to its weight; without a gate the weight is 1.
struct Shared {
    expert: Dense,
    gate: Option<LinearId>,
}

impl MoeBlock {
    /// Declares `{prefix}.gate`, `{prefix}.experts.*` and the shared expert.
    pub fn declare(
        config: &ModelConfig,
        experts: &ExpertsConfig,
        prefix: &str,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let hidden = config.hidden_size;
        let router = match experts.biases {
            true => declare.linear_with_bias(&format!("{prefix}.gate"), experts.count, hidden)?,
            false => declare.linear(&format!("{prefix}.gate.weight"), experts.count, hidden)?,
        };
        let scoring = scoring(experts, prefix, declare)?;
        let stored = Stored::of(config, experts, prefix, declare);
        let shared = match experts.shared_width {
            0 => None,
            width => Some(Shared {
                expert: Dense::declare(config, &format!("{prefix}.shared_expert"), width, declare)?,
                gate: match experts.routing.shared_gate {
                    true => Some(declare.linear(&format!("{prefix}.shared_expert_gate.weight"), 1, hidden)?),
                    false => None,
                },
            }),
        };
        let latent = match config.variant.expert_latent {
            Some(width) => {
                let to = declare.linear(&format!("{prefix}.fc1_latent_proj.weight"), width, hidden)?;
                let from = declare.linear(&format!("{prefix}.fc2_latent_proj.weight"), hidden, width)?;
                Some(([to, from], width))
            }
            None => None,
        };
        let bias = match stored {
            Stored::Flat => Some(declare.vector(&format!("{prefix}.experts.bias"), hidden, 0.0)?),
            _ => None,
        };
        let hidden = latent.map_or(hidden, |(_, width)| width);
        let prefix = format!("{prefix}.experts");
        let mut matrices = |part| {
            let each = 0..experts.count;
            let ids = each.map(|expert| stored.declare(&prefix, part, expert, (experts, hidden), declare));
            let ids = ids.collect::<Result<Vec<_>, _>>()?;
            declare.experts(&ids);
            Ok::<_, DeclareError>(ids)
        };
        // Without a gate, the activation is applied to the up projection.
        let (gate, up) = match config.variant.ungated {
            true => (matrices(Part::Up)?, Vec::new()),
            false => (matrices(Part::Gate)?, matrices(Part::Up)?),
        };
        Ok(Self {
            router,
            gate,
            up,
            down: matrices(Part::Down)?,
            top_k: experts.top_k,
            renormalise: experts.renormalise,
            act: activation(config.hidden_act),
            scoring,
            shared,
            logit_scale: 1.0,
            logit_softcap: experts.routing.logit_softcap,
            weighs_inputs: experts.routing.weighs_inputs,
            bias,
            latent,
        })
    }

    /// `out (+)= Σ weight · expert(x) (+ sigmoid(gate(x)) · shared(x))`. The last `bf16_rows` rows are computed in bfloat16 where the
    /// device supports it.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        x: Buf,
        out: Buf,
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        self.forward_routed(device, x, x, out, mode, bf16_rows)
    }

    /// As `forward`, with a router that reads other rows, `routed`, which `out` may overwrite.
    pub fn forward_routed(
        &self,
        device: &mut dyn Device,
        routed: Buf,
        x: Buf,
        out: Buf,
        mode: Mode,
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let router = device.temp(x.rows, self.gate.len())?;
        // Allocated in any case; a model without a shared expert writes nothing there.
        let gate = device.temp(x.rows, 1)?;
        let shared_gate = self.shared.as_ref().and_then(|shared| shared.gate);
        match shared_gate {
            Some(id) => device.linear(routed, &[(self.router, router), (id, gate)], Mode::Store)?,
            None => device.linear(routed, &[(self.router, router)], Mode::Store)?,
        }
        if self.logit_scale != 1.0 {
            device.scale_rows(router, &|_| self.logit_scale);
        }
        if let Some(cap) = self.logit_softcap {
            device.softcap(router, cap);
        }
        let experts = Experts {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            top_k: self.top_k,
            renormalise: self.renormalise,
            act: self.act,
            scoring: self.scoring,
            weighs_inputs: self.weighs_inputs,
        };
        match self.latent {
            None => device.experts(&experts, out, x, router, mode)?,
            Some(([to, from], width)) => {
                let (inner, result) = (device.temp(x.rows, width)?, device.temp(x.rows, width)?);
                device.linear_rows(x.into(), &[(to, inner)], Mode::Store, bf16_rows)?;
                device.experts(&experts, result, inner, router, Mode::Store)?;
                device.linear_rows(result.into(), &[(from, out)], mode, bf16_rows)?;
            }
        }
        if let Some(bias) = self.bias {
            device.add_rows(out, bias, &|_| 0);
        }
        if let Some(shared) = &self.shared {
            let part = device.temp(x.rows, x.cols)?;
            shared.expert.forward(device, x.into(), part, Mode::Store, bf16_rows)?;
            match shared_gate {
                Some(_) => device.add_gated(out, part, gate),
                None => device.add(out, part),
            }
        }
        device.release(scope);
        Ok(())
    }
}

/// The scoring of a router that is not a plain softmax; none for a plain softmax.
fn scoring(experts: &ExpertsConfig, prefix: &str, declare: &mut Declare<'_>) -> Result<Option<Scoring>, DeclareError> {
    let Routing { sigmoid, correction, groups, top_groups, scale, expert_scales, .. } = experts.routing;
    if !sigmoid && !correction && groups == 1 && scale == 1.0 && !expert_scales {
        return Ok(None);
    }
    let name = format!("{prefix}.gate.e_score_correction_bias");
    let correction = match correction {
        true => Some(declare.flat_vector(&name, &[&[experts.count], &[1, experts.count]])?),
        false => None,
    };
    let expert_scales = match expert_scales {
        true => Some(declare.vector(&format!("{prefix}.expert_scale"), experts.count, 0.0)?),
        false => None,
    };
    Ok(Some(Scoring { sigmoid, correction, groups, top_groups, scale, expert_scales }))
}

/// The kind of an expert's matrix.
#[derive(Clone, Copy)]
enum Part {
    Gate,
    Up,
    Down,
}

/// Whether a layer's fused tensors, `gate_up_proj` and `down_proj`, have their inputs before their outputs. Qwen3-VL-MoE is published in
/// this form. transformers 5.24 and later save the other form, and distinguish the two by each tensor's shape.
///
/// A square tensor fits both forms. The layer's other tensor is then not square and decides, since one program has written both.
/// transformers always takes a square one as outputs first, even if it is not.
fn inputs_first(prefix: &str, (width, hidden): (usize, usize), declare: &Declare<'_>) -> [bool; 2] {
    let turned = |name: &str, out: usize, k: usize| {
        let shape = declare.shape(&format!("{prefix}.experts.{name}.weight")).filter(|_| out != k)?;
        Some(shape.get(1..) == Some(&[k, out][..]))
    };
    let (gate_up, down) = (turned("gate_up_proj", 2 * width, hidden), turned("down_proj", hidden, width));
    [gate_up.or(down).unwrap_or(false), down.or(gate_up).unwrap_or(false)]
}

/// The form in which a checkpoint stores a layer's experts.
#[derive(Clone, Copy)]
enum Stored {
    /// One tensor for each expert and matrix.
    Single,
    /// One tensor for each matrix: [experts, out, in].
    Stacked,
    /// Gate and up projection in one tensor, gate first or alternating: [experts, 2 · width, hidden]; and one tensor for down. Each may
    /// have its inputs before its outputs: [experts, hidden, 2 · width].
    Fused { inputs_first: [bool; 2] },
    /// One tensor for each matrix, in two dimensions: [experts · width, hidden]. The inputs of down come before its outputs, and a bias is
    /// added to the sum of the experts. nomic-bert.
    Flat,
}

impl Stored {
    /// Returns the form in the checkpoint. For a configuration alone: the published form.
    fn of(config: &ModelConfig, experts: &ExpertsConfig, prefix: &str, declare: &Declare<'_>) -> Self {
        let has = |name: &str| declare.has(&format!("{prefix}.experts.{name}.weight"));
        let fused = Self::Fused { inputs_first: [false; 2] };
        match config.architecture {
            Architecture::Qwen3Moe | Architecture::Family(_) if has("gate_up_proj") => {
                Self::Fused { inputs_first: inputs_first(prefix, (experts.width, config.hidden_size), declare) }
            }
            _ if has("gate_up_proj") => fused,
            Architecture::NomicBert if !has("up_proj") => Self::Flat,
            Architecture::NomicBert
                if declare.shape(&format!("{prefix}.experts.up_proj.weight")).is_some_and(|shape| shape.len() == 2) =>
            {
                Self::Flat
            }
            _ if has("gate_proj") || has("up_proj") => Self::Stacked,
            _ if has("0.gate_proj") || has("0.up_proj") => Self::Single,
            _ if experts.alternating => fused,
            _ if config
                .quantization
                .as_ref()
                .is_some_and(|declared| matches!(declared.method, Method::Mlx | Method::Mxfp4)) =>
            {
                Self::Stacked
            }
            Architecture::Qwen3_5Moe | Architecture::Qwen4Exp => fused,
            _ => Self::Single,
        }
    }

    /// Declares one matrix of one expert.
    fn declare(
        self,
        prefix: &str,
        part: Part,
        expert: usize,
        (experts, hidden): (&ExpertsConfig, usize),
        declare: &mut Declare<'_>,
    ) -> Result<LinearId, DeclareError> {
        let (width, count) = (experts.width, experts.count);
        let (own, out, k) = match part {
            Part::Gate => ("gate_proj", width, hidden),
            Part::Up => ("up_proj", width, hidden),
            Part::Down => ("down_proj", hidden, width),
        };
        // The tensor, its outputs per expert, the first output and step of this matrix among them, and whether inputs come first.
        let (name, outputs, first, step, turned) = match (self, part) {
            (Self::Single, _) => {
                let module = format!("{prefix}.{expert}.{own}");
                return match experts.biases {
                    true => declare.linear_with_bias(&module, out, k),
                    false => declare.linear(&format!("{module}.weight"), out, k),
                };
            }
            (Self::Flat, part) => {
                let (name, stored) = (format!("{prefix}.{own}.weight"), [count * width, hidden]);
                return match part {
                    Part::Down => declare.turned(&name, &stored, (expert * width, 0, 1), (out, k), None),
                    _ => declare.linear_rows(&name, &stored, &[RowPiece::span(expert * width, width)], k),
                };
            }
            (Self::Stacked, _) => (own, out, 0, 1, false),
            (Self::Fused { inputs_first }, Part::Down) => (own, out, 0, 1, inputs_first[1]),
            (Self::Fused { inputs_first }, _) => {
                let second = usize::from(matches!(part, Part::Up));
                let (first, step) = if experts.alternating { (second, 2) } else { (second * out, 1) };
                ("gate_up_proj", 2 * out, first, step, inputs_first[0])
            }
        };
        let module = format!("{prefix}.{name}");
        let bias = match experts.biases {
            true => {
                let place = (expert * outputs + first, step);
                Some(declare.part_of_vector(&format!("{module}.bias"), &[count, outputs], place, out)?)
            }
            false => None,
        };
        let name = format!("{module}.weight");
        match turned {
            true => declare.turned(&name, &[count, k, outputs], (expert * k, first, step), (out, k), bias),
            false => {
                let run = if step == 1 { out } else { 1 };
                let rows = RowPiece { first: expert * outputs + first, rows: out, run, stride: run * step };
                declare.biased_rows(&name, &[count, outputs, k], rows, k, bias)
            }
        }
    }
}
