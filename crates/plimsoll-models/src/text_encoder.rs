//! Text encoders: BERT, RoBERTa, ModernBERT and nomic-bert, with or without a head.
//!
//! Every position attends to all positions of its sequence, or to those of a window around it. So a sequence is computed in one step and
//! leaves no state for later steps. The rows that need logits are the first of each sequence: they get the head's result for the sequence.
//!
//! The families differ only in the facts of [`plimsoll_formats::Encoder`]; a family's file is in `plimsoll-formats/src/hf/encoder`.
//! Reference: transformers, `modeling_bert.py`, `modeling_modernbert.py` and similar files.

pub(crate) mod head;
mod layer;

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, KvDtype, KvShape, LinearId, ModelShape, RowPiece,
    StepInput, VectorId,
};
use plimsoll_formats::{Encoder as EncoderConfig, ModelConfig, RopeScaling};

use crate::rope::{has_local_angles, rope};
use crate::rotary::Rotary;
use crate::{Model, Output, Pass};
use head::Head;
use layer::Layer;

/// A norm with a bias. The bias is 0 if the family has none.
#[derive(Clone, Copy, Debug)]
struct Norm {
    weight: VectorId,
    bias: VectorId,
    eps: f32,
}

impl Norm {
    fn declare(config: &ModelConfig, name: &str, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let hidden = config.hidden_size;
        let weight = declare.vector(&format!("{name}.weight"), hidden, 0.0)?;
        let bias = match config.encoder.is_some_and(|encoder| encoder.norm_bias) {
            true => declare.vector(&format!("{name}.bias"), hidden, 0.0)?,
            false => declare.values(vec![0.0; hidden]),
        };
        Ok(Self { weight, bias, eps: config.norm_eps })
    }

    /// Writes the normed rows of `x` to `out`, which may be `x`.
    fn apply(self, device: &mut dyn Device, out: Buf, x: Buf) {
        device.layer_norm(out, x, self.weight, self.bias, self.eps);
    }
}

/// Declares a matrix of the module `name`, with its bias if it has one.
fn matrix(
    name: &str,
    bias: bool,
    (out, k): (usize, usize),
    declare: &mut Declare<'_>,
) -> Result<LinearId, DeclareError> {
    match bias {
        true => declare.linear_with_bias(name, out, k),
        false => declare.linear(&format!("{name}.weight"), out, k),
    }
}

/// Rotary angles of layers that attend to all positions, and frequencies of layers with a window if these differ.
struct Angles {
    global: Rotary,
    local: Option<VectorId>,
    dim: usize,
}

impl Angles {
    fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (dim, theta) = (config.rotary_dim, config.rope_local_theta);
        let global = Rotary::declare(config, declare)?;
        let local = has_local_angles(config).then(|| declare.values(rope(dim, theta, &RopeScaling::None).inv_freq));
        Ok(Self { global, local, dim })
    }

    fn of_step(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<[Option<Buf>; 2], DeviceError> {
        let global = self.global.angles(device, step)?;
        let Some(frequencies) = self.local else { return Ok([Some(global); 2]) };
        let local = device.temp(step.positions.len(), self.dim)?;
        device.rope_angles(local, frequencies, step.positions, 1.0);
        Ok([Some(global), Some(local)])
    }
}

/// Returns the head's result for each sequence: one row for each row that needs logits. Without a head the rows are empty.
pub(crate) fn logits_of(
    head: Option<&Head>,
    device: &mut dyn Device,
    x: Buf,
    step: &StepInput<'_>,
) -> Result<Buf, DeviceError> {
    let logits = device.temp(step.logit_rows.len(), head.map_or(0, Head::width))?;
    if let Some(head) = head.filter(|_| !step.logit_rows.is_empty()) {
        head.forward(device, x, step, logits)?;
    }
    Ok(logits)
}

/// A text encoder.
pub struct TextEncoder {
    words: LinearId,
    positions: Option<LinearId>,
    types: Option<LinearId>,
    embedding_norm: Norm,
    angles: Option<Angles>,
    layers: Vec<Layer>,
    final_norm: Option<Norm>,
    head: Option<Head>,
    hidden: usize,
    head_dim: usize,
    vocab: usize,
}

/// Declares the checkpoint of a text encoder.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    let Some(encoder) = config.encoder else {
        return Err(DeclareError::Unsupported("internal error: an encoder without encoder settings".into()));
    };
    let EncoderConfig { positions, first_position, token_types, .. } = encoder;
    let (hidden, head_dim) = (config.hidden_size, config.head_dim);
    if head_dim % 16 != 0 {
        return Err(DeclareError::Unsupported(format!(
            "heads of {head_dim} elements are not supported: the width must be a multiple of 16"
        )));
    }
    // The rows before the first position belong to the padding.
    let used = RowPiece::span(first_position, positions - first_position);
    let table = "embeddings.position_embeddings.weight";
    let words = declare.linear("embeddings.word_embeddings.weight", config.vocab_size, hidden)?;
    let positions = match positions {
        0 => None,
        rows => Some(declare.linear_rows(table, &[rows, hidden], &[used], hidden)?),
    };
    let types = match token_types {
        0 => None,
        rows => Some(declare.linear("embeddings.token_type_embeddings.weight", rows, hidden)?),
    };
    Ok(Box::new(TextEncoder {
        words,
        types,
        embedding_norm: Norm::declare(config, "embeddings.LayerNorm", declare)?,
        angles: positions.is_none().then(|| Angles::declare(config, declare)).transpose()?,
        positions,
        layers: (0..config.layers)
            .map(|layer| Layer::declare(config, &encoder, layer, declare))
            .collect::<Result<_, _>>()?,
        final_norm: encoder.norms_before.then(|| Norm::declare(config, "model.norm", declare)).transpose()?,
        head: Head::declare(config, &encoder, declare)?,
        hidden,
        head_dim,
        vocab: config.vocab_size,
    }))
}

impl Model for TextEncoder {
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError> {
        let x = device.temp(step.tokens.len(), self.hidden)?;
        let scope = device.mark();
        device.embed(x, self.words, step.tokens, 1.0);
        let tables = [(self.types, step.types), (self.positions, step.positions)];
        if tables.iter().any(|(table, _)| table.is_some()) {
            let part = device.temp(x.rows, x.cols)?;
            for (table, rows) in tables.into_iter().filter_map(|(table, rows)| Some((table?, rows))) {
                device.embed(part, table, rows, 1.0);
                device.add(x, part);
            }
            device.release(scope);
        }
        self.embedding_norm.apply(device, x, x);
        let angles = match &self.angles {
            Some(angles) => angles.of_step(device, step)?,
            None => [None, None],
        };
        Ok(Pass::new(x, scope, angles))
    }

    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError> {
        self.layers[pass.layer].forward(device, pass, step)?;
        if !pass.passed(device, self.layers.len()) {
            return Ok(None);
        }
        let x = pass.x;
        if let Some(norm) = self.final_norm {
            norm.apply(device, x, x);
        }
        let logits = logits_of(self.head.as_ref(), device, x, step)?;
        Ok(Some(Output { logits, hidden: x }))
    }

    fn shape(&self, _: KvDtype) -> ModelShape {
        // The model has no cache and no state. No rows are computed in bfloat16.
        let encoder = Some(EncoderShape::new(self.head_dim, 0));
        ModelShape { kv: KvShape::none(), state: None, hidden: self.hidden, encoder, bf16: false }
    }

    fn vocab_size(&self) -> usize {
        self.vocab
    }
}
