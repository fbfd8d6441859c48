//! A model with a draft model: a smaller model with the same vocabulary drafts in place of a draft head.
//!
//! Keys and values of the draft model are further layers of the KV cache, so that pages, prefixes and preemption cover them. As with a
//! draft head, the cache has at a token's place the draft model's keys and values of the next token. The draft model never reads a
//! sequence's first token.

use plimsoll_device::{Buf, DeclareError, Device, DeviceError, KvDtype, ModelShape, StepInput};
use plimsoll_formats::ModelConfig;

use crate::{Drafter, Encoder, Model, Output, Pass, Vision};

/// The model and its draft model.
pub struct WithDraft {
    model: Box<dyn Model>,
    draft: Box<dyn Model>,
}

impl WithDraft {
    /// # Errors
    /// [`DeclareError::Unsupported`] if the draft model is wider than the model, is an encoder, or needs more than keys and values of whole
    /// contexts.
    pub fn new(model: Box<dyn Model>, draft: Box<dyn Model>, config: &ModelConfig) -> Result<Self, DeclareError> {
        let ModelShape { kv, state, hidden, .. } = draft.shape(KvDtype::F16);
        let width = model.shape(KvDtype::F16).hidden;
        if hidden > width {
            return Err(DeclareError::Unsupported(format!(
                "--draft-model is {hidden} wide, wider than the model ({width}): use a smaller one"
            )));
        }
        let lacking = [
            (config.encoder.is_some(), "an encoder, which writes no text"),
            (state.is_some(), "a model with recurrent state"),
            (kv.window().is_some(), "a model with sliding windows"),
        ];
        match lacking.into_iter().find(|(so, _)| *so) {
            Some((_, what)) => Err(DeclareError::Unsupported(format!(
                "--draft-model is {what}: use a Llama, Qwen2 or Qwen3 model, or another one with attention over all tokens"
            ))),
            None => Ok(Self { model, draft }),
        }
    }
}

impl Drafter for WithDraft {
    fn continues_hidden(&self) -> bool {
        false
    }

    fn draft(
        &self,
        device: &mut dyn Device,
        _hidden: Buf,
        _rows: &[u32],
        step: &StepInput<'_>,
    ) -> Result<Output, DeviceError> {
        self.draft.forward(device, step)
    }
}

impl Model for WithDraft {
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError> {
        self.model.begin(device, step)
    }

    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError> {
        self.model.advance(device, pass, step)
    }

    fn drafter(&self) -> Option<&dyn Drafter> {
        Some(self)
    }

    fn vision(&self) -> Option<&dyn Vision> {
        self.model.vision()
    }

    fn audio(&self) -> Option<&dyn Encoder> {
        self.model.audio()
    }

    fn shape(&self, dtype: KvDtype) -> ModelShape {
        let (shape, draft) = (self.model.shape(dtype), self.draft.shape(dtype));
        ModelShape { kv: shape.kv.with_draft(&draft.kv), ..shape }
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }
}
