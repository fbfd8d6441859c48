//! The parts of vision encoders: the layers of each family, and the mergers that turn patches into tokens.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, RowPiece, VectorId,
};
use plimsoll_formats::{Intern, Vision, VisionKind};

use crate::block::activation;
use crate::encoder_parts::{Layer, Mlp, Norm, spec};

/// Epsilon of every norm except those of Llama 4, and of the projectors of InternVL and LFM2-VL.
const EPS: f32 = 1e-6;
/// Epsilon of Llama 4's norms.
const LLAMA_4_EPS: f32 = 1e-5;
/// Epsilon of the norms of InternVL's and LFM2-VL's projectors.
const PROJECTOR_EPS: f32 = 1e-5;

/// Declares the norm `{prefix}.*`.
pub(super) fn norm(
    vision: &Vision,
    prefix: &str,
    width: usize,
    declare: &mut Declare<'_>,
) -> Result<Norm, DeclareError> {
    match vision.encoder {
        VisionKind::Qwen2_5 | VisionKind::Omni2_5 | VisionKind::Intern(Intern { rms_norm: true, .. }) => {
            Ok(Norm { weight: declare.vector(&format!("{prefix}.weight"), width, 0.0)?, bias: None, eps: EPS })
        }
        VisionKind::Llama4(_) => Norm::declare(prefix, width, LLAMA_4_EPS, declare),
        _ => layer_norm(prefix, width, declare),
    }
}

/// Declares the norm `{prefix}.*`, which subtracts the mean even if the encoder's other norms do not.
pub(super) fn layer_norm(prefix: &str, width: usize, declare: &mut Declare<'_>) -> Result<Norm, DeclareError> {
    Norm::declare(prefix, width, EPS, declare)
}

fn mlp(vision: &Vision, prefix: &str, declare: &mut Declare<'_>) -> Result<Mlp, DeclareError> {
    let (hidden, width) = (vision.hidden_size, vision.intermediate_size);
    let mut matrix =
        |name: &str, out: usize, k: usize| declare.linear_with_bias(&format!("{prefix}.mlp.{name}"), out, k);
    let (gate, up, down) = match vision.encoder {
        VisionKind::Qwen2_5 | VisionKind::Omni2_5 => {
            (Some(matrix("gate_proj", width, hidden)?), "up_proj", "down_proj")
        }
        VisionKind::Qwen3 | VisionKind::Omni => (None, "linear_fc1", "linear_fc2"),
        _ => (None, "fc1", "fc2"),
    };
    let (up, down) = (matrix(up, width, hidden)?, matrix(down, hidden, width)?);
    Ok(Mlp { gate, up, down, width, act: activation(vision.act) })
}

/// The matrices with the rows of queries, keys and values.
enum Rows {
    /// One matrix of this name, with the rows in this order.
    Joined(String),
    /// Three matrices of these names.
    Apart([String; 3]),
}

impl Rows {
    /// Declares the three projections.
    fn declare(self, hidden: usize, bias: bool, declare: &mut Declare<'_>) -> Result<[LinearId; 3], DeclareError> {
        let mut part = |i: usize| match (&self, bias) {
            (Rows::Joined(name), true) => declare.part_with_bias(name, 3 * hidden, (i * hidden, hidden), hidden),
            (Rows::Joined(name), false) => declare.linear_rows(
                &format!("{name}.weight"),
                &[3 * hidden, hidden],
                &[RowPiece::span(i * hidden, hidden)],
                hidden,
            ),
            (Rows::Apart(names), true) => declare.linear_with_bias(&names[i], hidden, hidden),
            (Rows::Apart(names), false) => declare.linear(&format!("{}.weight", names[i]), hidden, hidden),
        };
        Ok([part(0)?, part(1)?, part(2)?])
    }
}

/// Declares the layer `{prefix}.*`.
pub(super) fn layer(vision: &Vision, prefix: &str, declare: &mut Declare<'_>) -> Result<Layer, DeclareError> {
    let (hidden, head_dim) = (vision.hidden_size, vision.head_dim());
    let ([q, k, v], names) = match vision.encoder {
        VisionKind::Intern(intern) => {
            let joined = format!("{prefix}.attention.qkv");
            // The original form has one matrix.
            let rows = match declare.has(&format!("{joined}.weight")) {
                true => Rows::Joined(joined),
                false => Rows::Apart(["q", "k", "v"].map(|name| format!("{prefix}.attention.{name}_proj"))),
            };
            let names = ["attention.projection_layer", "layernorm_before", "layernorm_after"];
            (rows.declare(hidden, intern.attention_bias, declare)?, names)
        }
        VisionKind::Siglip | VisionKind::Siglip2(_) | VisionKind::Idefics3 | VisionKind::Llama4(_) => {
            let rows = Rows::Apart(["q", "k", "v"].map(|name| format!("{prefix}.self_attn.{name}_proj")));
            let names = match vision.encoder {
                VisionKind::Llama4(_) => ["self_attn.o_proj", "input_layernorm", "post_attention_layernorm"],
                _ => ["self_attn.out_proj", "layer_norm1", "layer_norm2"],
            };
            (rows.declare(hidden, true, declare)?, names)
        }
        _ => {
            let name = format!("{prefix}.attn");
            // llama.cpp's converter splits the joined matrix in some families.
            let apart = vision.encoder == VisionKind::Omni2_5 || declare.has(&format!("{name}.q.weight"));
            let rows = match apart {
                true => Rows::Apart(["q", "k", "v"].map(|part| format!("{name}.{part}"))),
                false => Rows::Joined(format!("{name}.qkv")),
            };
            (rows.declare(hidden, true, declare)?, ["attn.proj", "norm1", "norm2"])
        }
    };
    let [o, attention_norm, mlp_norm] = names.map(|name| format!("{prefix}.{name}"));
    let mut vectors = |names: [&str; 2]| -> Result<[VectorId; 2], DeclareError> {
        let mut one = |name: &str| declare.vector(&format!("{prefix}.{name}"), hidden, 0.0);
        Ok([one(names[0])?, one(names[1])?])
    };
    let (qk_norms, scales) = match vision.encoder {
        VisionKind::Intern(intern) => {
            let norms = ["attention.q_norm.weight", "attention.k_norm.weight"];
            let norms = intern.qk_norm.then(|| vectors(norms)).transpose()?;
            (norms, Some(vectors(["lambda_1", "lambda_2"])?))
        }
        _ => (None, None),
    };
    Ok(Layer {
        attention_norm: norm(vision, &attention_norm, hidden, declare)?,
        q,
        k,
        v,
        o: declare.linear_with_bias(&o, hidden, hidden)?,
        qk_norms,
        mlp_norm: norm(vision, &mlp_norm, hidden, declare)?,
        mlp: mlp(vision, prefix, declare)?,
        scales,
        rope_interleaved: false,
        head_dim,
        spec: spec(vision.heads, head_dim),
    })
}

/// SigLIP up to its last norm.
pub(super) struct Siglip {
    pub patch: LinearId,
    /// The learned positions, from left to right and from top to bottom.
    pub positions: LinearId,
    pub layers: Vec<Layer>,
    pub last_norm: Norm,
}

impl Siglip {
    /// Declares SigLIP's parts of `visual.*`.
    pub fn declare(vision: &Vision, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let hidden = vision.hidden_size;
        let window = [vision.channels, vision.patch, vision.patch];
        let patch = declare.convolution("visual.embeddings.patch_embedding", hidden, &window, true)?;
        let rows = vision.table_side * vision.table_side;
        let positions = declare.linear("visual.embeddings.position_embedding.weight", rows, hidden)?;
        let mut layers = Vec::with_capacity(vision.depth);
        for nth in 0..vision.depth {
            layers.push(layer(vision, &format!("visual.encoder.layers.{nth}"), declare)?);
        }
        Ok(Self { patch, positions, layers, last_norm: layer_norm("visual.post_layernorm", hidden, declare)? })
    }
}

/// `out = matrix(patches)`, for input patches of `width` numbers.
pub(super) fn embed(
    device: &mut dyn Device,
    patches: &[f32],
    (matrix, width): (LinearId, usize),
    out: Buf,
) -> Result<(), DeviceError> {
    let scope = device.mark();
    let input = device.temp(out.rows, width)?;
    device.place(input, 0, patches, width, 0, Mode::Store);
    device.linear(input, &[(matrix, out)], Mode::Store)?;
    device.release(scope);
    Ok(())
}

/// Joins a token's patches into one row, and computes an embedding of it.
pub(super) struct Merger {
    /// None in some checkpoints of LFM2-VL.
    norm: Option<Norm>,
    /// Whether the norm reads the patches of a token as one row.
    norm_merged: bool,
    up: LinearId,
    down: LinearId,
    /// Width of a token's joined patches, and width between the projections.
    width: usize,
    inner: usize,
}

impl Merger {
    /// Declares `{prefix}.*` for rows of `out` numbers.
    pub fn declare(
        vision: &Vision,
        prefix: &str,
        norm_merged: bool,
        out: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let width = vision.hidden_size * vision.merge * vision.merge;
        let (own_norm, up, down) = match vision.encoder {
            VisionKind::Qwen2 | VisionKind::Qwen2_5 | VisionKind::Omni2_5 | VisionKind::Omni => {
                ("ln_q", "mlp.0", "mlp.2")
            }
            VisionKind::Qwen3 => ("norm", "linear_fc1", "linear_fc2"),
            _ => ("layer_norm", "linear_1", "linear_2"),
        };
        let own_norm = format!("{prefix}.{own_norm}");
        let mut of_tokens = || Norm::declare(&own_norm, width, PROJECTOR_EPS, declare);
        let (norm, inner, bias) = match vision.encoder {
            VisionKind::Intern(_) => (Some(of_tokens()?), out, true),
            VisionKind::Siglip2(own) => {
                (own.projector_norm.then(of_tokens).transpose()?, own.projector_width, own.projector_bias)
            }
            _ => {
                let norm_width = if norm_merged { width } else { vision.hidden_size };
                (Some(norm(vision, &own_norm, norm_width, declare)?), width, true)
            }
        };
        let mut matrix = |name: &str, out: usize, k: usize| match bias {
            true => declare.linear_with_bias(&format!("{prefix}.{name}"), out, k),
            false => declare.linear(&format!("{prefix}.{name}.weight"), out, k),
        };
        Ok(Self { norm, norm_merged, up: matrix(up, inner, width)?, down: matrix(down, out, inner)?, width, inner })
    }

    /// `out = merger(x)`; `normed` has the shape of `x` and is overwritten.
    pub fn forward(&self, device: &mut dyn Device, x: Buf, normed: Buf, out: Buf) -> Result<(), DeviceError> {
        if let Some(norm) = self.norm {
            let [to, from] = match self.norm_merged {
                true => [normed, x].map(|rows| rows.reshape(self.width)),
                false => [normed, x],
            };
            norm.apply(device, to, from);
        }
        let merged = if self.norm.is_some() { normed } else { x }.reshape(self.width);
        let scope = device.mark();
        let inner = device.temp(merged.rows, self.inner)?;
        device.linear(merged, &[(self.up, inner)], Mode::Store)?;
        device.activate(inner, Activation::Gelu);
        device.linear(inner, &[(self.down, out)], Mode::Store)?;
        device.release(scope);
        Ok(())
    }
}
