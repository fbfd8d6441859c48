//! What towers are made of: norms, feed-forward parts, layers, and the mergers that make tokens of patches.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, VectorId,
};
use plimsoll_formats::{Tower, Vision};

use crate::block::activation;

/// Epsilon of every norm of a tower, which no configuration mentions.
const EPS: f32 = 1e-6;

/// A norm, with a bias where the family subtracts the mean.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    weight: VectorId,
    bias: Option<VectorId>,
}

impl Norm {
    fn declare(vision: &Vision, prefix: &str, width: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let bias = match vision.tower {
            Tower::Qwen2_5 => None,
            Tower::Qwen2 | Tower::Qwen3 => Some(declare.vector(&format!("{prefix}.bias"), width, 0.0)?),
        };
        Ok(Self { weight: declare.vector(&format!("{prefix}.weight"), width, 0.0)?, bias })
    }

    fn apply(self, device: &mut dyn Device, out: Buf, x: Buf) {
        match self.bias {
            Some(bias) => device.layer_norm(out, x, self.weight, bias, EPS),
            None => device.rms_norm(out, x, self.weight, EPS),
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
            Tower::Qwen2 => (None, "fc1", "fc2"),
            Tower::Qwen2_5 => (Some(matrix("gate_proj", width, hidden)?), "up_proj", "down_proj"),
            Tower::Qwen3 => (None, "linear_fc1", "linear_fc2"),
        };
        let (up, down) = (matrix(up, width, hidden)?, matrix(down, hidden, width)?);
        Ok(Self { gate, up, down, width, act: activation(vision.act) })
    }

    /// `x += mlp(normed)`.
    fn forward(&self, device: &mut dyn Device, normed: Buf, x: Buf) -> Result<(), DeviceError> {
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
        device.linear(inner, &[(self.down, x)], Mode::Add)?;
        device.release(scope);
        Ok(())
    }
}

/// One layer of a tower.
pub(super) struct Layer {
    attention_norm: Norm,
    q: LinearId,
    k: LinearId,
    v: LinearId,
    o: LinearId,
    mlp_norm: Norm,
    mlp: Mlp,
    head_dim: usize,
    spec: Attention,
}

impl Layer {
    /// Declares `{prefix}.*`.
    pub fn declare(vision: &Vision, prefix: &str, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (hidden, head_dim) = (vision.hidden_size, vision.head_dim());
        let name = format!("{prefix}.attn.qkv");
        let mut part = |i: usize| declare.part_with_bias(&name, 3 * hidden, (i * hidden, hidden), hidden);
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        Ok(Self {
            attention_norm: Norm::declare(vision, &format!("{prefix}.norm1"), hidden, declare)?,
            q,
            k,
            v,
            o: declare.linear_with_bias(&format!("{prefix}.attn.proj"), hidden, hidden)?,
            mlp_norm: Norm::declare(vision, &format!("{prefix}.norm2"), hidden, declare)?,
            mlp: Mlp::declare(vision, prefix, declare)?,
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

    /// `x += attention(norm(x)); x += mlp(norm(x))`. `sequences` are first row and rows of what attends to itself; `normed` has the
    /// shape of `x` and is overwritten.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        x: Buf,
        normed: Buf,
        angles: Buf,
        sequences: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError> {
        self.attention_norm.apply(device, normed, x);
        let scope = device.mark();
        let q = device.temp(x.rows, x.cols)?;
        let k = device.temp(x.rows, x.cols)?;
        let v = device.temp(x.rows, x.cols)?;
        device.linear(normed, &[(self.q, q), (self.k, k), (self.v, v)], Mode::Store)?;
        device.rope(q, angles, self.head_dim, false);
        device.rope(k, angles, self.head_dim, false);
        // The projections have used up the normed rows: what attention gives takes their place.
        for (first, rows) in sequences {
            let [out, q, k, v] = [normed, q, k, v].map(|all| all.span(first, rows));
            device.attend_all(&self.spec, out, q, k, v)?;
        }
        device.linear(normed, &[(self.o, x)], Mode::Add)?;
        device.release(scope);
        self.mlp_norm.apply(device, normed, x);
        self.mlp.forward(device, normed, x)
    }
}

/// Makes one row of a token's patches, and an embedding of it.
pub(super) struct Merger {
    norm: Norm,
    /// Whether the norm sees the patches of a token as one row.
    norm_merged: bool,
    up: LinearId,
    down: LinearId,
    width: usize,
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
        };
        let norm_width = if norm_merged { width } else { vision.hidden_size };
        Ok(Self {
            norm: Norm::declare(vision, &format!("{prefix}.{norm}"), norm_width, declare)?,
            norm_merged,
            up: declare.linear_with_bias(&format!("{prefix}.{up}"), width, width)?,
            down: declare.linear_with_bias(&format!("{prefix}.{down}"), out, width)?,
            width,
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
        let inner = device.temp(merged.rows, self.width)?;
        device.linear(merged, &[(self.up, inner)], Mode::Store)?;
        device.activate(inner, Activation::Gelu);
        device.linear(inner, &[(self.down, out)], Mode::Store)?;
        device.release(scope);
        Ok(())
    }
}
