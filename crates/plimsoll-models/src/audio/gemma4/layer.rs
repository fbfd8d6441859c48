//! A layer of the conformer: half a feed-forward part, attention, a convolution, half a feed-forward part.

use plimsoll_device::{
    Activation, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, Near, RowPiece, VectorId,
};
use plimsoll_formats::{Audio, Conformer};

use crate::clipped::Clipped;

/// Epsilon of every norm.
pub(super) const EPS: f32 = 1e-6;

/// Half a feed-forward part.
struct FeedForward {
    before: VectorId,
    up: Clipped,
    down: Clipped,
    after: VectorId,
}

/// Attention to the rows before and to the row itself.
struct Attention {
    before: VectorId,
    q: Clipped,
    k: Clipped,
    v: Clipped,
    out: Clipped,
    /// The projection from a distance to its key.
    distance: LinearId,
    /// The factors on the elements of a head's query.
    query_scale: VectorId,
    after: VectorId,
}

/// A gated causal convolution.
struct Convolution {
    before: VectorId,
    value: Clipped,
    gate: Clipped,
    /// The factors on every channel: first of the row itself, then of the row before it, and so on.
    taps: Vec<VectorId>,
    after: VectorId,
    out: Clipped,
}

/// A layer.
pub(super) struct Layer {
    first: FeedForward,
    attention: Attention,
    convolution: Convolution,
    second: FeedForward,
    last: VectorId,
}

/// The declaration of a layer's parts, and the values that they share.
struct Parts<'a, 'b> {
    declare: &'a mut Declare<'b>,
    prefix: String,
    hidden: usize,
    clipped: bool,
}

impl Parts<'_, '_> {
    fn norm(&mut self, name: &str) -> Result<VectorId, DeclareError> {
        self.declare.vector(&format!("{}.{name}.weight", self.prefix), self.hidden, 0.0)
    }

    fn linear(&mut self, name: &str, shape: (usize, usize), rows: &[RowPiece]) -> Result<Clipped, DeclareError> {
        Clipped::declare(&format!("{}.{name}", self.prefix), shape, rows, self.clipped, self.declare)
    }

    fn feed_forward(&mut self, name: &str, width: usize) -> Result<FeedForward, DeclareError> {
        Ok(FeedForward {
            before: self.norm(&format!("{name}.pre_layer_norm"))?,
            up: self.linear(&format!("{name}.ffw_layer_1"), (width, self.hidden), &[])?,
            down: self.linear(&format!("{name}.ffw_layer_2"), (self.hidden, width), &[])?,
            after: self.norm(&format!("{name}.post_layer_norm"))?,
        })
    }

    fn attention(&mut self, head_dim: usize) -> Result<Attention, DeclareError> {
        let square = (self.hidden, self.hidden);
        Ok(Attention {
            before: self.norm("norm_pre_attn")?,
            q: self.linear("self_attn.q_proj", square, &[])?,
            k: self.linear("self_attn.k_proj", square, &[])?,
            v: self.linear("self_attn.v_proj", square, &[])?,
            out: self.linear("self_attn.post", square, &[])?,
            distance: self.declare.linear(
                &format!("{}.self_attn.relative_k_proj.weight", self.prefix),
                self.hidden,
                self.hidden,
            )?,
            query_scale: query_scale(&format!("{}.self_attn", self.prefix), head_dim, self.declare)?,
            after: self.norm("norm_post_attn")?,
        })
    }

    fn convolution(&mut self, taps: usize) -> Result<Convolution, DeclareError> {
        let (hidden, both) = (self.hidden, (2 * self.hidden, self.hidden));
        let name = format!("{}.lconv1d.depthwise_conv1d.weight", self.prefix);
        // GGUF files omit the dimension of 1.
        let flat = self.declare.shape(&name).is_some_and(|shape| shape.len() == 2);
        let stored = if flat { vec![hidden, taps] } else { vec![hidden, 1, taps] };
        Ok(Convolution {
            before: self.norm("lconv1d.pre_layer_norm")?,
            value: self.linear("lconv1d.linear_start", both, &[RowPiece::span(0, hidden)])?,
            gate: self.linear("lconv1d.linear_start", both, &[RowPiece::span(hidden, hidden)])?,
            taps: (0..taps)
                .rev()
                .map(|tap| self.declare.part_of_vector(&name, &stored, (tap, taps), hidden))
                .collect::<Result<_, _>>()?,
            after: self.norm("lconv1d.conv_norm")?,
            out: self.linear("lconv1d.linear_end", (hidden, hidden), &[])?,
        })
    }
}

/// Declares the factors on a head's query: `softplus(scale) / (ln 2 · √width)`, element by element. GGUF files store the softplus.
fn query_scale(prefix: &str, head_dim: usize, declare: &mut Declare<'_>) -> Result<VectorId, DeclareError> {
    let (scale, factor) = (format!("{prefix}.per_dim_scale"), format!("{prefix}.per_dim_factor"));
    let given = declare.has(&factor);
    let name = if given { factor } else { scale };
    let scales = declare.read_values(&name, head_dim, 0.0)?;
    let common = (head_dim as f64).powf(-0.5) / std::f64::consts::LN_2;
    let softplus = |scale: f64| if given { scale } else { scale.exp().ln_1p() };
    Ok(declare.values(scales.iter().map(|scale| (common * softplus(f64::from(*scale))) as f32).collect()))
}

impl Layer {
    pub fn declare(
        audio: &Audio,
        own: &Conformer,
        layer: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let prefix = format!("audio.layers.{layer}");
        let mut parts = Parts { declare, prefix, hidden: audio.hidden_size, clipped: own.clipped };
        Ok(Self {
            first: parts.feed_forward("feed_forward1", audio.intermediate_size)?,
            attention: parts.attention(audio.head_dim())?,
            convolution: parts.convolution(own.taps)?,
            second: parts.feed_forward("feed_forward2", audio.intermediate_size)?,
            last: parts.norm("norm_out")?,
        })
    }
}

/// The values that all layers share.
pub(super) struct Shared {
    pub hidden: usize,
    /// Width between the projections of a feed-forward part.
    pub width: usize,
    pub heads: usize,
    /// The activation of feed-forward parts and after the convolution.
    pub act: Activation,
    pub own: Conformer,
    /// The factor on every key.
    pub key_scale: f32,
}

impl Shared {
    /// Runs a layer. `normed` and `scratch` have the shape of `x` and are overwritten. `sequences` returns first row and row count of each
    /// clip.
    pub fn layer<S: Iterator<Item = (usize, usize)>>(
        &self,
        layer: &Layer,
        device: &mut dyn Device,
        [x, normed, scratch, distances]: [Buf; 4],
        sequences: impl Fn() -> S,
    ) -> Result<(), DeviceError> {
        self.feed(&layer.first, device, x, normed)?;
        self.attend(&layer.attention, device, [x, normed, scratch, distances], &mut sequences())?;
        self.mix(&layer.convolution, device, [x, normed, scratch], &mut sequences())?;
        self.feed(&layer.second, device, x, normed)?;
        self.bounded(device, x);
        device.rms_norm(x, x, layer.last, EPS);
        Ok(())
    }

    /// Clamps a residual sum to the model's bounds.
    fn bounded(&self, device: &mut dyn Device, x: Buf) {
        device.clamp(x, -self.own.bound, self.own.bound);
    }

    /// `normed = norm(x)`, with `x` clamped to the bounds first.
    fn norm_bounded(&self, device: &mut dyn Device, normed: Buf, x: Buf, weight: VectorId) {
        device.take(normed, x, 0);
        self.bounded(device, normed);
        device.rms_norm(normed, normed, weight, EPS);
    }

    /// `x += residual · norm(down(act(up(norm(x)))))`; `normed` is overwritten.
    fn feed(&self, part: &FeedForward, device: &mut dyn Device, x: Buf, normed: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        self.norm_bounded(device, normed, x, part.before);
        let inner = device.temp(x.rows, self.width)?;
        part.up.apply(device, normed, normed, inner)?;
        device.activate(inner, self.act);
        part.down.apply(device, inner, inner, normed)?;
        self.bounded(device, normed);
        device.rms_norm(normed, normed, part.after, EPS);
        device.scale_rows(normed, &|_| self.own.residual);
        device.add(x, normed);
        device.release(scope);
        Ok(())
    }

    /// `x += norm(attention(norm(x)))`; `normed` and `scratch` are overwritten.
    fn attend(
        &self,
        part: &Attention,
        device: &mut dyn Device,
        [x, normed, scratch, distances]: [Buf; 4],
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        self.norm_bounded(device, normed, x, part.before);
        let [q, k, v] = [device.temp(x.rows, x.cols)?, device.temp(x.rows, x.cols)?, device.temp(x.rows, x.cols)?];
        for (linear, out) in [(&part.q, q), (&part.k, k), (&part.v, v)] {
            linear.apply(device, normed, scratch, out)?;
        }
        device.multiply(q.reshape(self.hidden / self.heads), part.query_scale);
        device.scale_rows(k, &|_| self.key_scale);
        let keys = device.temp(distances.rows, distances.cols)?;
        device.linear(distances, &[(part.distance, keys)], Mode::Store)?;
        let near = Near { heads: self.heads, rows: self.own.seen, cap: self.own.cap };
        device.attend_near(&near, normed, [q, k, v], keys, sequences);
        part.out.apply(device, normed, normed, q)?;
        self.bounded(device, q);
        device.rms_norm(q, q, part.after, EPS);
        device.add(x, q);
        device.release(scope);
        Ok(())
    }

    /// `x += out(act(norm(convolution(value(norm(x)) · sigmoid(gate(norm(x)))))))`; `normed` and `scratch` are overwritten.
    fn mix(
        &self,
        part: &Convolution,
        device: &mut dyn Device,
        [x, normed, scratch]: [Buf; 3],
        sequences: &mut dyn Iterator<Item = (usize, usize)>,
    ) -> Result<(), DeviceError> {
        let scope = device.mark();
        device.rms_norm(normed, x, part.before, EPS);
        let (value, gate) = (device.temp(x.rows, x.cols)?, device.temp(x.rows, x.cols)?);
        part.value.apply(device, normed, scratch, value)?;
        part.gate.apply(device, normed, normed, gate)?;
        device.glu(gate, value, Activation::Sigmoid);
        // The row's own tap comes first, then the tap of every earlier row, if there is such a row.
        let mixed = value;
        device.take(mixed, gate, 0);
        device.multiply(mixed, part.taps[0]);
        for (first, rows) in sequences {
            for (back, tap) in part.taps.iter().enumerate().skip(1).take_while(|(back, _)| *back < rows) {
                let earlier = scratch.span(first, rows - back);
                device.take(earlier, gate.span(first, rows - back), 0);
                device.multiply(earlier, *tap);
                device.add(mixed.span(first + back, rows - back), earlier);
            }
        }
        self.bounded(device, mixed);
        device.rms_norm(mixed, mixed, part.after, EPS);
        device.activate(mixed, self.act);
        part.out.apply(device, mixed, mixed, normed)?;
        device.add(x, normed);
        device.release(scope);
        Ok(())
    }
}
