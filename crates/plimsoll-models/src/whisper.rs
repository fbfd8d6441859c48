//! Whisper: a decoder that attends to an encoder's output at every layer.
//!
//! Reference: transformers, `modeling_whisper.py`. A sequence has the encoder's rows in its first positions, like a prompt with audio, and
//! the decoder's tokens after them. One layer of the KV cache serves both attentions of a decoder layer. Its first positions hold keys and
//! values of the encoder's rows, which differ between layers only by the projection. Its other positions hold those of the tokens. The
//! encoder's rows are not used otherwise.

use plimsoll_device::{
    Attention, Buf, Declare, DeclareError, Device, DeviceError, Encoded, KvDtype, KvLayer, KvShape, LinearId, Mode,
    ModelShape, StepInput, VectorId,
};
use plimsoll_formats::{AudioKind, ModelConfig};

use crate::dense::Dense;
use crate::encoder_parts::Norm;
use crate::ends::Ends;
use crate::{Encoder, Model, Output, Pass, audio};

/// One of the two attentions of a layer.
struct Part {
    norm: Norm,
    q: LinearId,
    k: LinearId,
    v: LinearId,
    o: LinearId,
    spec: Attention,
}

/// One layer of the decoder.
struct Layer {
    /// Attends to the decoder's tokens.
    own: Part,
    /// Attends to the encoder's rows.
    cross: Part,
    mlp_norm: Norm,
    mlp: Dense,
}

/// A Whisper model.
pub struct Whisper {
    ends: Ends,
    /// A row for every position of the decoder.
    positions: VectorId,
    /// Rows of the table of positions.
    text_positions: usize,
    /// Positions of the encoder's rows.
    output: usize,
    layers: Vec<Layer>,
    audio: Box<dyn Encoder>,
    kv: KvLayer,
}

/// Consecutive rows of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: usize,
    rows: usize,
    /// Whether the rows come from the encoder.
    encoded: bool,
}

impl Run {
    fn of(self, x: Buf) -> Buf {
        x.span(self.first, self.rows)
    }

    /// The number of these rows that are computed in bfloat16: the last rows of a step are.
    fn bf16(self, step: &StepInput<'_>) -> usize {
        (self.first + self.rows).saturating_sub(self.first.max(step.tokens.len() - step.bf16_rows))
    }
}

/// The rows of a step, in order. The planner names no encoder rows: then all rows are the decoder's, which need more memory.
fn runs<'a>(step: &'a StepInput<'_>, width: usize) -> impl Iterator<Item = Run> + use<'a> {
    let encoded = step.media.iter().map(move |media| (media.first_row, media.values.len() / width));
    let (mut encoded, mut at) = (encoded.filter(|(_, rows)| *rows > 0).peekable(), 0);
    std::iter::from_fn(move || {
        let (first, total) = (at, step.tokens.len());
        while let Some((row, rows)) = encoded.next_if(|(row, _)| *row == at) {
            at = row + rows;
        }
        let is_encoded = at > first;
        if !is_encoded {
            at = encoded.peek().map_or(total, |(row, _)| *row);
        }
        (at > first).then_some(Run { first, rows: at - first, encoded: is_encoded })
    })
}

/// Declares a Whisper checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    let Some(AudioKind::Whisper(own)) = config.audio.as_ref().map(|audio| &audio.encoder) else {
        return Err(DeclareError::Unsupported("internal error: a Whisper without its encoder's settings".into()));
    };
    let (hidden, heads, head_dim) = (config.hidden_size, config.heads, config.head_dim);
    if head_dim % 16 != 0 {
        return Err(DeclareError::Unsupported(format!(
            "heads of {head_dim} elements are not supported: the width must be a multiple of 16"
        )));
    }
    let ends = Ends::declare_with(config, true, declare)?;
    let positions = declare.flat_vector("model.embed_positions.weight", &[&[own.text_positions, hidden]])?;
    let layers = (0..config.layers).map(|layer| Layer::declare(config, own.positions, layer, declare));
    let layers = layers.collect::<Result<_, DeclareError>>()?;
    let Some(audio) = audio::declare(config, declare)? else {
        return Err(DeclareError::Missing("audio.conv1.weight".into()));
    };
    Ok(Box::new(Whisper {
        ends,
        positions,
        text_positions: own.text_positions,
        output: own.positions,
        layers,
        audio,
        kv: KvLayer { kv_heads: heads, head_dim, heads, window: None },
    }))
}

impl Part {
    /// Declares `{prefix}.*`, and the norm before it.
    fn declare(
        config: &ModelConfig,
        prefix: &str,
        spec: Attention,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let hidden = config.hidden_size;
        let norm = Norm::declare(&format!("{prefix}_layer_norm"), config.hidden_size, config.norm_eps, declare)?;
        let mut biased = |name: &str| declare.linear_with_bias(&format!("{prefix}.{name}"), hidden, hidden);
        let [q, v, o] = [biased("q_proj")?, biased("v_proj")?, biased("out_proj")?];
        let k = declare.linear(&format!("{prefix}.k_proj.weight"), hidden, hidden)?;
        Ok(Self { norm, q, k, v, o, spec })
    }
}

impl Layer {
    fn declare(
        config: &ModelConfig,
        output: usize,
        layer: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let prefix = format!("model.layers.{layer}");
        let cached = declare.cache_layer(layer);
        let spec = |encoded| Attention {
            layer: cached,
            heads: config.heads,
            scale: config.query_scale,
            encoded: Some(encoded),
            ..Attention::WHOLE
        };
        Ok(Self {
            own: Part::declare(config, &format!("{prefix}.self_attn"), spec(Encoded::Behind(output)), declare)?,
            cross: Part::declare(config, &format!("{prefix}.encoder_attn"), spec(Encoded::Within(output)), declare)?,
            mlp_norm: Norm::declare(
                &format!("{prefix}.final_layer_norm"),
                config.hidden_size,
                config.norm_eps,
                declare,
            )?,
            mlp: Dense::declare(config, &format!("{prefix}.mlp"), config.intermediate_size, declare)?,
        })
    }

    /// Runs both attentions: `x += own(norm(x)); x += cross(norm(x))` in the decoder's rows. `normed` has the shape of `x`.
    fn attend(&self, device: &mut dyn Device, x: Buf, normed: Buf, step: &StepInput<'_>) -> Result<(), DeviceError> {
        let Self { own, cross, .. } = self;
        let scope = device.mark();
        let q = device.temp(x.rows, x.cols)?;
        let k = device.temp(x.rows, x.cols)?;
        let v = device.temp(x.rows, x.cols)?;
        let attended = device.temp(x.rows, x.cols)?;
        for run in runs(step, x.cols) {
            let (input, bf16) = (run.of(normed), run.bf16(step));
            if run.encoded {
                let made = [(cross.k, run.of(k)), (cross.v, run.of(v))];
                device.linear_rows(run.of(x).into(), &made, Mode::Store, bf16)?;
                continue;
            }
            own.norm.apply(device, input, run.of(x));
            let made = [(own.q, run.of(q)), (own.k, run.of(k)), (own.v, run.of(v))];
            device.linear_rows(input.into(), &made, Mode::Store, bf16)?;
        }
        // Queries of the encoder's rows are not initialized: their results are never read.
        device.attention(&own.spec, None, attended, q, Some([k, v]), step);
        for run in runs(step, x.cols).filter(|run| !run.encoded) {
            let (input, bf16) = (run.of(normed), run.bf16(step));
            device.linear_rows(run.of(attended).into(), &[(own.o, run.of(x))], Mode::Add, bf16)?;
            cross.norm.apply(device, input, run.of(x));
            device.linear_rows(input.into(), &[(cross.q, run.of(q))], Mode::Store, bf16)?;
        }
        device.attention(&cross.spec, None, attended, q, None, step);
        for run in runs(step, x.cols).filter(|run| !run.encoded) {
            device.linear_rows(run.of(attended).into(), &[(cross.o, run.of(x))], Mode::Add, run.bf16(step))?;
        }
        device.release(scope);
        Ok(())
    }

    /// `x += mlp(norm(x))`.
    fn transform(&self, device: &mut dyn Device, x: Buf, normed: Buf, bf16: usize) -> Result<(), DeviceError> {
        self.mlp_norm.apply(device, normed, x);
        self.mlp.forward(device, normed.into(), x, Mode::Add, bf16)
    }
}

impl Model for Whisper {
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError> {
        let x = self.ends.embed_tokens(device, step)?;
        // A row of the encoder gets the first token's position; the row is replaced afterwards.
        let position = |row: usize| (step.positions[row] as usize).saturating_sub(self.output);
        device.add_rows(x, self.positions, &|row| position(row).min(self.text_positions - 1));
        self.ends.place(device, x, step);
        Ok(Pass::new(x, device.mark(), [None; 2]))
    }

    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError> {
        let (i, layer, scope) = (pass.layer, &self.layers[pass.layer], device.mark());
        let normed = device.temp(pass.x.rows, pass.x.cols)?;
        layer.attend(device, pass.x, normed, step)?;
        let last = i + 1 == self.layers.len();
        match last && step.only_logits {
            true => {
                let (x, bf16) = self.ends.wanted(device, pass.x, i, step);
                pass.x = x;
                if x.rows > 0 {
                    layer.transform(device, x, normed.span(0, x.rows), bf16)?;
                }
            }
            false => {
                for run in runs(step, pass.x.cols).filter(|run| !run.encoded) {
                    layer.transform(device, run.of(pass.x), run.of(normed), run.bf16(step))?;
                }
            }
        }
        device.release(scope);
        match pass.passed(device, self.layers.len()) {
            true => self.ends.output(device, pass.x, step).map(Some),
            false => Ok(None),
        }
    }

    fn audio(&self) -> Option<&dyn Encoder> {
        Some(&*self.audio)
    }

    fn shape(&self, dtype: KvDtype) -> ModelShape {
        let kv = KvShape::new(dtype, self.layers.iter().map(|_| self.kv));
        ModelShape { kv, state: None, hidden: self.ends.hidden, encoder: self.encoders(), bf16: false }
    }

    fn vocab_size(&self) -> usize {
        self.ends.vocab
    }
}

#[cfg(test)]
mod tests {
    use plimsoll_device::MediaRows;

    use super::*;

    #[test]
    fn rows_are_the_encoders_or_the_decoders_in_order() {
        let values = [0.0; 8];
        let rows = |first_row, rows: usize| MediaRows { first_row, values: &values[..2 * rows] };
        let media = [rows(1, 1), rows(2, 2), rows(6, 1)];
        let step = StepInput { tokens: &[0; 9], media: &media, bf16_rows: 4, ..StepInput::default() };
        let found: Vec<_> = runs(&step, 2).map(|run| (run.first, run.rows, run.encoded, run.bf16(&step))).collect();
        let expected = [(0, 1, false, 0), (1, 3, true, 0), (4, 2, false, 1), (6, 1, true, 1), (7, 2, false, 2)];
        assert_eq!(found, expected);
        let planned = StepInput { tokens: &[0; 9], media: &[rows(0, 0)], ..StepInput::default() };
        assert_eq!(runs(&planned, 2).collect::<Vec<_>>(), [Run { first: 0, rows: 9, encoded: false }]);
        let encoded = StepInput { tokens: &[0; 3], media: &[rows(0, 3)], ..StepInput::default() };
        assert_eq!(runs(&encoded, 2).collect::<Vec<_>>(), [Run { first: 0, rows: 3, encoded: true }]);
    }
}
