//! The parts that vision and audio encoders share: norms, feed-forward parts, layers. The module of a family has the names and shapes of
//! its tensors.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, VectorId,
};

/// A norm. A norm with a bias also subtracts the mean.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub weight: VectorId,
    pub bias: Option<VectorId>,
    pub eps: f32,
}

impl Norm {
    /// Declares `{prefix}.weight` and `{prefix}.bias` of a norm that subtracts the mean.
    pub fn declare(prefix: &str, width: usize, eps: f32, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let mut part = |name: &str| declare.vector(&format!("{prefix}.{name}"), width, 0.0);
        Ok(Self { weight: part("weight")?, bias: Some(part("bias")?), eps })
    }

    pub fn apply(self, device: &mut dyn Device, out: Buf, x: Buf) {
        match self.bias {
            Some(bias) => device.layer_norm(out, x, self.weight, bias, self.eps),
            None => device.rms_norm(out, x, self.weight, self.eps),
        }
    }
}

/// Returns `rows` rows of `width` values from row `first` on. Empty in a plan, which has no values.
pub(crate) fn values_of(values: &[f32], first: usize, rows: usize, width: usize) -> &[f32] {
    if values.is_empty() { &[] } else { &values[first * width..][..rows * width] }
}

/// The head width that an encoder without attention declares: any width that devices support.
pub(crate) const NO_HEAD: usize = 16;

/// The feed-forward part of a layer.
pub(crate) struct Mlp {
    /// The gate's projection; none for a part without a gate.
    pub gate: Option<LinearId>,
    pub up: LinearId,
    pub down: LinearId,
    pub width: usize,
    pub act: Activation,
}

impl Mlp {
    /// `x += mlp(normed)`, with an optional scale on the result; `normed` is overwritten.
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

/// `x += scale · matrix(from)`, or the same without a scale. `part` has the shape of `x` and is overwritten.
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

/// Computes the mean of every `block` consecutive rows.
pub(crate) fn mean(device: &mut dyn Device, x: Buf, block: usize, out: Buf) -> Result<(), DeviceError> {
    let scope = device.mark();
    let part = device.temp(out.rows, x.cols)?;
    let merged = x.reshape(x.cols * block);
    device.take(out, merged, 0);
    for patch in 1..block {
        device.take(part, merged, patch * x.cols);
        device.add(out, part);
    }
    device.scale_rows(out, &|_| 1.0 / block as f32);
    device.release(scope);
    Ok(())
}

/// Returns the attention of an encoder's layer.
pub(crate) fn spec(heads: usize, head_dim: usize) -> Attention {
    Attention { heads, scale: (head_dim as f64).powf(-0.5) as f32, ..Attention::WHOLE }
}

/// One layer of an encoder.
pub(crate) struct Layer {
    pub attention_norm: Norm,
    pub q: LinearId,
    pub k: LinearId,
    pub v: LinearId,
    pub o: LinearId,
    /// Norms over all queries and over all keys of a row; none if the family has no such norms.
    pub qk_norms: Option<[VectorId; 2]>,
    pub mlp_norm: Norm,
    pub mlp: Mlp,
    /// The factors on the results of attention and feed-forward part before the residual sums; none if the family has none.
    pub scales: Option<[VectorId; 2]>,
    /// Whether the numbers of a rotary pair are neighbours.
    pub rope_interleaved: bool,
    pub head_dim: usize,
    pub spec: Attention,
}

impl Layer {
    /// `x += attention(norm(x)); x += mlp(norm(x))`. `angles` are the rotary angles, if there are any. `sequences` has the first row and
    /// the row count of each group of rows that attend to each other, in order. `normed` has the shape of `x` and is overwritten.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        x: Buf,
        normed: Buf,
        angles: Option<Buf>,
        mut sequences: impl Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError> {
        self.attention_norm.apply(device, normed, x);
        let scope = device.mark();
        let q = device.temp(x.rows, x.cols)?;
        let k = device.temp(x.rows, x.cols)?;
        let v = device.temp(x.rows, x.cols)?;
        device.linear(normed, &[(self.q, q), (self.k, k), (self.v, v)], Mode::Store)?;
        for (i, heads) in [q, k].into_iter().enumerate() {
            if let Some(norms) = self.qk_norms {
                device.rms_norm(heads, heads, norms[i], self.attention_norm.eps);
            }
            if let Some(angles) = angles {
                device.rope(heads, angles, self.head_dim, self.rope_interleaved);
            }
        }
        // The projections no longer need the normed rows, so attention writes its result there.
        device.attend_all(&self.spec, normed, q, k, v, &mut sequences)?;
        join(device, x, self.o, normed, q, self.scales.map(|[attention, _]| attention))?;
        device.release(scope);
        self.mlp_norm.apply(device, normed, x);
        self.mlp.forward(device, normed, x, self.scales.map(|[_, mlp]| mlp))
    }
}
