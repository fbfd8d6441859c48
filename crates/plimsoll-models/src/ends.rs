//! The two ends of a decoder: token embedding before the first layer, final norm and output projection after the last.

use plimsoll_device::{Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, StepInput, VectorId};
use plimsoll_formats::ModelConfig;

use crate::Output;
use crate::encoder_parts::Norm;

/// Token embedding, final norm and output projection.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    embedding: LinearId,
    /// The weights, all ones, of the norm of embeddings; none if the family has no such norm.
    embedding_norm: Option<VectorId>,
    /// None if the last layer's rows are already normed.
    norm: Option<Norm>,
    head: LinearId,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Width of the hidden state.
    pub hidden: usize,
    /// Width of a row that comes from an encoder: the hidden state, and the additions to the first layers.
    media_width: usize,
    eps: f32,
    embedding_scale: f32,
    logit_scale: f32,
    softcap: Option<f32>,
}

impl Ends {
    /// Declares `model.embed_tokens`, `model.norm` and `lm_head`; tied weights are one copy.
    pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        Self::declare_with(config, false, declare)
    }

    /// Declares the same; `biased` is whether the norm has a bias.
    pub fn declare_with(config: &ModelConfig, biased: bool, declare: &mut Declare<'_>) -> Result<Self, DeclareError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let name = "model.embed_tokens.weight";
        let embedding = match config.tie_word_embeddings {
            true => declare.linear(name, vocab, hidden)?,
            false => declare.token_table(name, vocab, hidden)?,
        };
        let offset = if config.variant.plain_final_norm { 0.0 } else { config.norm_weight_offset };
        let norm = match config.variant.qwen4.is_some() {
            true => None,
            false => {
                let weight = declare.vector("model.norm.weight", hidden, offset)?;
                let bias = if biased { Some(declare.vector("model.norm.bias", hidden, 0.0)?) } else { None };
                Some(Norm { weight, bias, eps: config.norm_eps })
            }
        };
        let head = match config.tie_word_embeddings {
            true => embedding,
            false => declare.linear("lm_head.weight", vocab, hidden)?,
        };
        Ok(Self {
            embedding,
            embedding_norm: config.variant.embedding_norm.then(|| declare.values(vec![1.0; hidden])),
            norm,
            head,
            vocab,
            hidden,
            media_width: hidden * (1 + config.vision.as_ref().map_or(0, |vision| vision.deepstack.len())),
            eps: config.norm_eps,
            embedding_scale: config.embedding_scale,
            logit_scale: config.variant.logit_scale,
            softcap: config.final_logit_softcap,
        })
    }

    /// Returns the hidden state of every row of the step.
    pub fn embed(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Buf, DeviceError> {
        let x = self.embed_tokens(device, step)?;
        self.place(device, x, step);
        Ok(x)
    }

    /// Returns the embedding of every row's token.
    pub fn embed_tokens(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Buf, DeviceError> {
        let x = device.temp(step.tokens.len(), self.hidden)?;
        device.embed(x, self.embedding, step.tokens, self.embedding_scale);
        if let Some(ones) = self.embedding_norm {
            device.rms_norm(x, x, ones, self.eps);
        }
        Ok(x)
    }

    /// Replaces the rows that come from an encoder with the encoder's outputs.
    pub fn place(&self, device: &mut dyn Device, x: Buf, step: &StepInput<'_>) {
        for media in step.media {
            device.place(x, media.first_row, media.values, self.media_width, 0, Mode::Store);
        }
    }

    /// Returns the rows that are still computed after the mixer of the last layer, `layer`, and how many of them are in
    /// bfloat16. These are all rows of `x`. If the step uses hidden states only for logits, they are the rows that need
    /// logits, moved to the beginning.
    pub fn wanted(&self, device: &mut dyn Device, x: Buf, layer: usize, step: &StepInput<'_>) -> (Buf, usize) {
        // The encoders' additions to this layer are matched to rows by their index in the step, so all rows must stay.
        match step.only_logits && !self.deepens(layer) {
            true => (device.keep_rows(x, step.logit_rows), step.bf16_logit_rows()),
            false => (x, step.bf16_rows),
        }
    }

    /// Whether encoders have an addition to layer `layer`.
    fn deepens(&self, layer: usize) -> bool {
        (layer + 1) * self.hidden < self.media_width
    }

    /// Adds the encoders' additions to layer `layer`, one of the first, to the rows that come from the encoders.
    pub fn deepen(&self, device: &mut dyn Device, x: Buf, layer: usize, step: &StepInput<'_>) {
        for media in step.media.iter().filter(|_| self.deepens(layer)) {
            let column = (layer + 1) * self.hidden;
            device.place(x, media.first_row, media.values, self.media_width, column, Mode::Add);
        }
    }

    /// Applies the final norm to the hidden states `x` in place.
    pub fn normed(&self, device: &mut dyn Device, x: Buf) -> Buf {
        if let Some(norm) = self.norm {
            norm.apply(device, x, x);
        }
        x
    }

    /// Returns the logits of the wanted rows. `x` has the hidden states of all rows or of the wanted ones, and is normed in place.
    pub fn output(&self, device: &mut dyn Device, x: Buf, step: &StepInput<'_>) -> Result<Output, DeviceError> {
        let x = self.normed(device, x);
        self.logits(device, x, step)
    }

    /// As [`Ends::output`], with another norm: a draft head shares only the output projection.
    pub(crate) fn output_through(
        &self,
        device: &mut dyn Device,
        x: Buf,
        norm: Norm,
        step: &StepInput<'_>,
    ) -> Result<Output, DeviceError> {
        norm.apply(device, x, x);
        self.logits(device, x, step)
    }

    /// Returns the logits of the wanted rows of normed hidden states.
    fn logits(&self, device: &mut dyn Device, x: Buf, step: &StepInput<'_>) -> Result<Output, DeviceError> {
        let logits = device.temp(step.logit_rows.len(), self.vocab)?;
        let output = Output { logits, hidden: x };
        if step.logit_rows.is_empty() {
            return Ok(output);
        }
        let mut last = x;
        // If only logits are wanted, `x` may have only these rows already. The plan, which asks for all rows, always has room for both.
        if !step.only_logits || x.rows > step.logit_rows.len() {
            last = device.temp(step.logit_rows.len(), self.hidden)?;
            device.gather(last, x, step.logit_rows);
        }
        let bf16 = if step.bf16_logits { last.rows } else { 0 };
        device.linear_rows(last.into(), &[(self.head, logits)], Mode::Store, bf16)?;
        if self.logit_scale != 1.0 {
            device.scale_rows(logits, &|_| self.logit_scale);
        }
        if let Some(cap) = self.softcap {
            device.softcap(logits, cap);
        }
        Ok(output)
    }
}
