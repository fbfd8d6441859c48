//! BERT and its relatives (MiniLM, RoBERTa, XLM-RoBERTa): encoders, with or without a classifier on the first position.
//!
//! Reference: transformers, `modeling_bert.py`, `modeling_roberta.py`. Every position sees every other of its sequence,
//! so a sequence is computed in one step and leaves nothing for later steps. Norms stand after the residual sum. The
//! rows that need logits are the ones that the classifier reads: the first of each sequence.

use plimsoll_device::{
    Activation, Attention, Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, KvDtype, KvShape, LinearId,
    Mode, ModelShape, RowPiece, StepInput, VectorId,
};
use plimsoll_formats::{Architecture, Encoder as EncoderConfig, ModelConfig};

use crate::{Model, Output, Pass};

/// A norm with a bias.
#[derive(Clone, Copy, Debug)]
struct Norm {
    weight: VectorId,
    bias: VectorId,
    eps: f32,
}

impl Norm {
    fn declare(config: &ModelConfig, prefix: &str, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let mut part = |name: &str| declare.vector(&format!("{prefix}.LayerNorm.{name}"), config.hidden_size, 0.0);
        Ok(Self { weight: part("weight")?, bias: part("bias")?, eps: config.norm_eps })
    }

    fn apply(self, device: &mut dyn Device, x: Buf) {
        device.layer_norm(x, x, self.weight, self.bias, self.eps);
    }
}

/// One layer: attention and a plain feed-forward part, each added to the residual stream and normed with it.
struct Layer {
    q: LinearId,
    k: LinearId,
    v: LinearId,
    o: LinearId,
    attention_norm: Norm,
    up: LinearId,
    down: LinearId,
    width: usize,
    act: Activation,
    output_norm: Norm,
    spec: Attention,
}

impl Layer {
    fn declare(config: &ModelConfig, layer: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let prefix = format!("encoder.layer.{layer}");
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let mut matrix =
            |name: &str, out: usize, k: usize| declare.linear_with_bias(&format!("{prefix}.{name}"), out, k);
        let (q, k, v) = (
            matrix("attention.self.query", hidden, hidden)?,
            matrix("attention.self.key", hidden, hidden)?,
            matrix("attention.self.value", hidden, hidden)?,
        );
        let o = matrix("attention.output.dense", hidden, hidden)?;
        let (up, down) = (matrix("intermediate.dense", width, hidden)?, matrix("output.dense", hidden, width)?);
        Ok(Self {
            q,
            k,
            v,
            o,
            attention_norm: Norm::declare(config, &format!("{prefix}.attention.output"), declare)?,
            up,
            down,
            width,
            act: crate::block::activation(config.hidden_act),
            output_norm: Norm::declare(config, &format!("{prefix}.output"), declare)?,
            spec: Attention {
                layer: 0,
                heads: config.heads,
                scale: config.query_scale,
                window: None,
                softcap: None,
                sinks: None,
            },
        })
    }

    /// `x = norm(x + attention(x)); x = norm(x + down(act(up(x))))`.
    fn forward(&self, device: &mut dyn Device, x: Buf, step: &StepInput<'_>) -> Result<(), DeviceError> {
        let scope = device.mark();
        let q = device.temp(x.rows, x.cols)?;
        let k = device.temp(x.rows, x.cols)?;
        let v = device.temp(x.rows, x.cols)?;
        device.linear(x, &[(self.q, q), (self.k, k), (self.v, v)], Mode::Store)?;
        let attended = device.temp(x.rows, x.cols)?;
        device.attend_within(&self.spec, attended, q, k, v, step)?;
        device.linear(attended, &[(self.o, x)], Mode::Add)?;
        device.release(scope);
        self.attention_norm.apply(device, x);
        let inner = device.temp(x.rows, self.width)?;
        device.linear(x, &[(self.up, inner)], Mode::Store)?;
        device.activate(inner, self.act);
        device.linear(inner, &[(self.down, x)], Mode::Add)?;
        device.release(scope);
        self.output_norm.apply(device, x);
        Ok(())
    }
}

/// What makes scores of a sequence's first position: dense, tanh, dense.
struct Classifier {
    dense: LinearId,
    out: LinearId,
    labels: usize,
}

impl Classifier {
    fn declare(config: &ModelConfig, labels: usize, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (dense, out) = match config.architecture {
            Architecture::Roberta => ("classifier.dense", "classifier.out_proj"),
            _ => ("pooler.dense", "classifier"),
        };
        let hidden = config.hidden_size;
        Ok(Self {
            dense: declare.linear_with_bias(dense, hidden, hidden)?,
            out: declare.linear_with_bias(out, labels, hidden)?,
            labels,
        })
    }

    fn forward(&self, device: &mut dyn Device, x: Buf, rows: &[u32], scores: Buf) -> Result<(), DeviceError> {
        let scope = device.mark();
        let first = device.temp(rows.len(), x.cols)?;
        device.gather(first, x, rows);
        let inner = device.temp(rows.len(), x.cols)?;
        device.linear(first, &[(self.dense, inner)], Mode::Store)?;
        device.activate(inner, Activation::Tanh);
        device.linear(inner, &[(self.out, scores)], Mode::Store)?;
        device.release(scope);
        Ok(())
    }
}

/// An encoder.
pub struct Bert {
    words: LinearId,
    positions: LinearId,
    types: LinearId,
    embedding_norm: Norm,
    layers: Vec<Layer>,
    classifier: Option<Classifier>,
    hidden: usize,
    head_dim: usize,
    vocab: usize,
}

/// Declares an encoder's checkpoint.
pub fn build(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Box<dyn Model>, DeclareError> {
    let Some(EncoderConfig { positions, first_position, token_types, labels, .. }) = config.encoder else {
        return Err(DeclareError::Unsupported("an encoder's configuration without an encoder's part".into()));
    };
    let (hidden, head_dim) = (config.hidden_size, config.head_dim);
    if head_dim % 16 != 0 {
        return Err(DeclareError::Unsupported(format!(
            "heads of {head_dim} elements are not supported: the width must be a multiple of 16"
        )));
    }
    // The rows before the first position are the padding's.
    let used = RowPiece::span(first_position, positions - first_position);
    let table = "embeddings.position_embeddings.weight";
    Ok(Box::new(Bert {
        words: declare.linear("embeddings.word_embeddings.weight", config.vocab_size, hidden)?,
        positions: declare.linear_rows(table, &[positions, hidden], &[used], hidden)?,
        types: declare.linear("embeddings.token_type_embeddings.weight", token_types, hidden)?,
        embedding_norm: Norm::declare(config, "embeddings", declare)?,
        layers: (0..config.layers).map(|layer| Layer::declare(config, layer, declare)).collect::<Result<_, _>>()?,
        classifier: labels.map(|labels| Classifier::declare(config, labels, declare)).transpose()?,
        hidden,
        head_dim,
        vocab: config.vocab_size,
    }))
}

impl Model for Bert {
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError> {
        let x = device.temp(step.tokens.len(), self.hidden)?;
        let scope = device.mark();
        let part = device.temp(x.rows, x.cols)?;
        device.embed(x, self.words, step.tokens, 1.0);
        device.embed(part, self.types, step.types, 1.0);
        device.add(x, part);
        device.embed(part, self.positions, step.positions, 1.0);
        device.add(x, part);
        device.release(scope);
        self.embedding_norm.apply(device, x);
        Ok(Pass::new(x, scope, [None, None]))
    }

    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError> {
        self.layers[pass.layer].forward(device, pass.x, step)?;
        if !pass.passed(device, self.layers.len()) {
            return Ok(None);
        }
        let labels = self.classifier.as_ref().map_or(0, |classifier| classifier.labels);
        let logits = device.temp(step.logit_rows.len(), labels)?;
        if let Some(classifier) = self.classifier.as_ref().filter(|_| !step.logit_rows.is_empty()) {
            classifier.forward(device, pass.x, step.logit_rows, logits)?;
        }
        Ok(Some(Output { logits, hidden: pass.x }))
    }

    fn shape(&self, _: KvDtype) -> ModelShape {
        // Nothing is kept, so nothing is to be saved: what lies in the workspace for one layer is exact.
        let encoder = Some(EncoderShape::new(self.head_dim, 0));
        ModelShape { kv: KvShape::none(), state: None, hidden: self.hidden, encoder, bf16: false }
    }

    fn vocab_size(&self) -> usize {
        self.vocab
    }
}
