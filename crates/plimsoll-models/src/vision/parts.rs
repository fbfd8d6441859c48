//! What towers are made of: norms, feed-forward parts, layers, and the mergers that make tokens of patches.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, VectorId,
};
use plimsoll_formats::{Intern, Tower, Vision};

use crate::block::activation;

/// Epsilon of every norm of a tower but InternVL's projector.
const EPS: f32 = 1e-6;
/// Epsilon of that.
const PROJECTOR_EPS: f32 = 1e-5;

/// A norm, with a bias where the family subtracts the mean.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    weight: VectorId,
    bias: Option<VectorId>,
    eps: f32,
}

impl Norm {
    pub fn declare(
        vision: &Vision,
        prefix: &str,
        width: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let bias = match vision.tower {
            Tower::Qwen2_5 | Tower::Intern(Intern { rms_norm: true, .. }) => None,
            _ => Some(declare.vector(&format!("{prefix}.bias"), width, 0.0)?),
        };
        Ok(Self { weight: declare.vector(&format!("{prefix}.weight"), width, 0.0)?, bias, eps: EPS })
    }

    pub fn apply(self, device: &mut dyn Device, out: Buf, x: Buf) {
        match self.bias {
            Some(bias) => device.layer_norm(out, x, self.weight, bias, self.eps),
            None => device.rms_norm(out, x, self.weight, self.eps),
        }
    }
}

/// The feed-forward part of a layer.
struct Mlp {
    /// Of a gated one.
    gate: Option<LinearId>,
    up: LinearId,
    down: LinearId,
    width: usize,
    act: Activation,
}

impl Mlp {
    fn declare(vision: &Vision, prefix: &str, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, width) = (vision.hidden_size, vision.intermediate_size);
        let mut matrix =
            |name: &str, out: usize, k: usize| declare.linear_with_bias(&format!("{prefix}.mlp.{name}"), out, k);
        let (gate, up, down) = match vision.tower {
            Tower::Qwen2 | Tower::Intern(_) => (None, "fc1", "fc2"),
            Tower::Qwen2_5 => (Some(matrix("gate_proj", width, hidden)?), "up_proj", "down_proj"),
            Tower::Qwen3 => (None, "linear_fc1", "linear_fc2"),
        };
        let (up, down) = (matrix(up, width, hidden)?, matrix(down, hidden, width)?);
        Ok(Self { gate, up, down, width, act: activation(vision.act) })
    }

    /// `x += mlp(normed)`, scaled if asked; `normed` is overwritten.
    fn forward(
        &self,
        device: &mut dyn Device,
        normed: Buf,
        x: Buf,
        scale: Option<VectorId>,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        let up = device.temp(x.rows, self.width)?;
        let inner = match self.gate {
            Some(gate) => {
                let buf = device.temp(x.rows, self.width)?;
                device.linear(normed, &[(gate, buf), (self.up, up)], Mode::Store)?;
                device.glu(buf, up, self.act);
                buf
            }
            None => {
                device.linear(normed, &[(self.up, up)], Mode::Store)?;
                device.activate(up, self.act);
                up
            }
        };
        join(device, x, self.down, inner, normed, scale)?;
        device.release(scope);
        Ok(())
    }
}

/// `x += scale · matrix(from)`, or without a scale; `part` has the shape of `x` and is overwritten.
fn join(
    device: &mut dyn Device,
    x: Buf,
    matrix: LinearId,
    from: Buf,
    part: Buf,
    scale: Option<VectorId>,
) -> Result<(), DeviceError> {
    let Some(scale) = scale else { return device.linear(from, &[(matrix, x)], Mode::Add) };
    device.linear(from, &[(matrix, part)], Mode::Store)?;
    device.multiply(part, scale);
    device.add(x, part);
    Ok(())
}

/// One layer of a tower.
pub(super) struct Layer {
    attention_norm: Norm,
    q: LinearId,
    k: LinearId,
    v: LinearId,
    o: LinearId,
    /// Norms of all queries and keys of a row, where the family has them.
    qk_norms: Option<[VectorId; 2]>,
    mlp_norm: Norm,
    mlp: Mlp,
    /// What attention and feed-forward part are multiplied with before they join, where the family does so.
    scales: Option<[VectorId; 2]>,
    head_dim: usize,
    spec: Attention,
}

impl Layer {
    /// Declares `{prefix}.*`.
    pub fn declare(vision: &Vision, prefix: &str, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, head_dim) = (vision.hidden_size, vision.head_dim());
        let ([q, k, v], names) = match vision.tower {
            Tower::Intern(intern) => {
                let mut one = |name: &str| {
                    let name = format!("{prefix}.attention.{name}_proj");
                    match intern.attention_bias {
                        true => declare.linear_with_bias(&name, hidden, hidden),
                        false => declare.linear(&format!("{name}.weight"), hidden, hidden),
                    }
                };
                let names = ["attention.projection_layer", "layernorm_before", "layernorm_after"];
                ([one("q")?, one("k")?, one("v")?], names)
            }
            _ => {
                let name = format!("{prefix}.attn.qkv");
                let mut part = |i: usize| declare.part_with_bias(&name, 3 * hidden, (i * hidden, hidden), hidden);
                ([part(0)?, part(1)?, part(2)?], ["attn.proj", "norm1", "norm2"])
            }
        };
        let [o, attention_norm, mlp_norm] = names.map(|name| format!("{prefix}.{name}"));
        let mut vectors = |names: [&str; 2]| -> Result<[VectorId; 2], DeclareError> {
            let mut one = |name: &str| declare.vector(&format!("{prefix}.{name}"), hidden, 0.0);
            Ok([one(names[0])?, one(names[1])?])
        };
        let (qk_norms, scales) = match vision.tower {
            Tower::Intern(intern) => {
                let norms = ["attention.q_norm.weight", "attention.k_norm.weight"];
                let norms = intern.qk_norm.then(|| vectors(norms)).transpose()?;
                (norms, Some(vectors(["lambda_1", "lambda_2"])?))
            }
            _ => (None, None),
        };
        Ok(Self {
            attention_norm: Norm::declare(vision, &attention_norm, hidden, declare)?,
            q,
            k,
            v,
            o: declare.linear_with_bias(&o, hidden, hidden)?,
            qk_norms,
            mlp_norm: Norm::declare(vision, &mlp_norm, hidden, declare)?,
            mlp: Mlp::declare(vision, prefix, declare)?,
            scales,
            head_dim,
            spec: Attention {
                layer: 0,
                heads: vision.heads,
                scale: (head_dim as f64).powf(-0.5) as f32,
                window: None,
                softcap: None,
            },
        })
    }

    /// `x += attention(norm(x)); x += mlp(norm(x))`. `angles` are the rotary ones, if there are any; `sequences` are first row and rows of what attends to itself; `normed` has the
    /// shape of `x` and is overwritten.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        x: Buf,
        normed: Buf,
        angles: Option<Buf>,
        sequences: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError> {
        self.attention_norm.apply(device, normed, x);
        let scope = device.mark();
        let q = device.temp(x.rows, x.cols)?;
        let k = device.temp(x.rows, x.cols)?;
        let v = device.temp(x.rows, x.cols)?;
        device.linear(normed, &[(self.q, q), (self.k, k), (self.v, v)], Mode::Store)?;
        for (i, heads) in [q, k].into_iter().enumerate() {
            if let Some(norms) = self.qk_norms {
                device.rms_norm(heads, heads, norms[i], EPS);
            }
            if let Some(angles) = angles {
                device.rope(heads, angles, self.head_dim, false);
            }
        }
        // The projections have used up the normed rows: what attention gives takes their place.
        for (first, rows) in sequences {
            let [out, q, k, v] = [normed, q, k, v].map(|all| all.span(first, rows));
            device.attend_all(&self.spec, out, q, k, v)?;
        }
        join(device, x, self.o, normed, q, self.scales.map(|[attention, _]| attention))?;
        device.release(scope);
        self.mlp_norm.apply(device, normed, x);
        self.mlp.forward(device, normed, x, self.scales.map(|[_, mlp]| mlp))
    }
}

/// Makes one row of a token's patches, and an embedding of it.
pub(super) struct Merger {
    norm: Norm,
    /// Whether the norm sees the patches of a token as one row.
    norm_merged: bool,
    up: LinearId,
    down: LinearId,
    /// Width of a token's patches together, and between the projections.
    width: usize,
    inner: usize,
}

impl Merger {
    /// Declares `{prefix}.*`, giving rows of `out` numbers.
    pub fn declare(
        vision: &Vision,
        prefix: &str,
        norm_merged: bool,
        out: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let width = vision.hidden_size * vision.merge * vision.merge;
        let (norm, up, down) = match vision.tower {
            Tower::Qwen2 | Tower::Qwen2_5 => ("ln_q", "mlp.0", "mlp.2"),
            Tower::Qwen3 => ("norm", "linear_fc1", "linear_fc2"),
            Tower::Intern(_) => ("layer_norm", "linear_1", "linear_2"),
        };
        let norm = format!("{prefix}.{norm}");
        let (norm, inner) = match vision.tower {
            Tower::Intern(_) => {
                // Whatever the tower's norms are, the projector's subtracts the mean.
                let mut part = |name: &str| declare.vector(&format!("{norm}.{name}"), width, 0.0);
                (Norm { weight: part("weight")?, bias: Some(part("bias")?), eps: PROJECTOR_EPS }, out)
            }
            _ => {
                let norm_width = if norm_merged { width } else { vision.hidden_size };
                (Norm::declare(vision, &norm, norm_width, declare)?, width)
            }
        };
        Ok(Self {
            norm,
            norm_merged,
            up: declare.linear_with_bias(&format!("{prefix}.{up}"), inner, width)?,
            down: declare.linear_with_bias(&format!("{prefix}.{down}"), out, inner)?,
            width,
            inner,
        })
    }

    /// `out = merger(x)`; `normed` has the shape of `x` and is overwritten.
    pub fn forward(&self, device: &mut dyn Device, x: Buf, normed: Buf, out: Buf) -> Result<(), DeviceError> {
        let merged = normed.reshape(self.width);
        match self.norm_merged {
            true => self.norm.apply(device, merged, x.reshape(self.width)),
            false => self.norm.apply(device, normed, x),
        }
        let scope = device.mark();
        let inner = device.temp(merged.rows, self.inner)?;
        device.linear(merged, &[(self.up, inner)], Mode::Store)?;
        device.activate(inner, Activation::Gelu);
        device.linear(inner, &[(self.down, out)], Mode::Store)?;
        device.release(scope);
        Ok(())
    }
}
