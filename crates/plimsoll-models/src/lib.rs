//! Models, written once against the device trait.
//!
//! `family.rs` runs most decoders from the facts in their configurations, `decoder.rs` Llama and the Qwens. Parts of few models have
//! separate files. `docs/adding-a-model.md` describes where to add a new model.
//! **Architecture invariant:** a model does not depend on the device that runs it, does not allocate, and does not see requests.

#![forbid(unsafe_code)]

pub mod audio;
pub mod block;
mod clipped;
pub mod decoder;
pub mod delta;
pub mod dense;
pub mod draft;
mod encoder_parts;
pub mod ends;
pub mod family;
mod indexer;
mod latent;
pub mod llama;
pub mod mamba;
pub mod moe;
mod mtp;
mod ngrams;
mod parallel;
mod per_layer;
pub mod qwen2;
pub mod qwen3;
pub mod qwen3_5;
pub mod qwen3_moe;
pub mod qwen3_next;
pub mod qwen4_exp;
pub mod rope;
mod rotary;
pub mod short_conv;
mod streams;
pub mod text_encoder;
pub mod vision;
pub mod whisper;

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, KvDtype, Mark, ModelShape, StepInput,
};
use plimsoll_formats::{Architecture, ModelConfig};

use draft::WithDraft;
pub use vision::{After, FrameTimes, Interleave, PlaceRule, PlacedItem, Stretch, TextLine};

/// The results of a step. They stay in the workspace until the next step begins.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The logits of the wanted rows, [logit rows, vocabulary]. For a text encoder: its classifier's scores, if it has a classifier.
    pub logits: Buf,
    /// Every row's hidden state after the final norm. With [`StepInput::only_logits`]: of the rows with logits, or of all rows.
    pub hidden: Buf,
}

/// A step between two layers. Its buffers stay in the workspace until the last layer is done, below the layers' temporaries.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// The hidden state of every row.
    x: Buf,
    /// Every row's rotary angles, then those of sliding layers if they differ. None if positions are embedded.
    angles: [Option<Buf>; 2],
    /// The per-layer inputs of every row, [rows, layers · width]; none if the family has no such inputs.
    per_layer: Option<Buf>,
    /// The mark of the workspace after `x`.
    scope: Mark,
    /// The next layer.
    layer: usize,
}

impl Pass {
    /// Returns the step before its first layer.
    fn new(x: Buf, scope: Mark, angles: [Option<Buf>; 2]) -> Self {
        Self { x, angles, per_layer: None, scope, layer: 0 }
    }

    /// Drops all rows but these for the following layers.
    fn keep(&mut self, device: &mut dyn Device, rows: &[u32]) {
        let kept = [Some(self.x), self.angles[0], self.angles[1], self.per_layer];
        let [x, global, local, per_layer] = kept.map(|buf| buf.map(|buf| device.keep_rows(buf, rows)));
        self.x = x.expect("there are rows");
        (self.angles, self.per_layer) = ([global, local], per_layer);
    }

    /// Counts a finished layer. Returns whether it was the last of `layers`; the workspace then holds only `x`.
    fn passed(&mut self, device: &mut dyn Device, layers: usize) -> bool {
        self.layer += 1;
        let last = self.layer == layers;
        if last {
            device.release(self.scope);
        }
        last
    }
}

/// A multi-token-prediction head, or a draft model. It predicts the token after the next one.
pub trait Drafter: Send + Sync {
    /// Whether a pass needs the hidden states of the previous one. A draft model needs tokens only.
    fn continues_hidden(&self) -> bool {
        true
    }

    /// Runs one pass over rows with a known next token, after [`Model::forward`] in the same step's workspace.
    ///
    /// Row r of `step` has the position of row `rows[r]` of `hidden`, and the token that *follows* that position. `hidden` is the output of
    /// the model or of an earlier draft pass. Keys and values go to the cache's last layers.
    fn draft(
        &self,
        device: &mut dyn Device,
        hidden: Buf,
        rows: &[u32],
        step: &StepInput<'_>,
    ) -> Result<Output, DeviceError>;
}

/// The patches of one image or list of frames: `frames` × `height` × `width`. For an audio clip, the frames of its spectrogram in one line,
/// see [`Grid::audio`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Groups of frames; 1 for an image.
    pub frames: usize,
    /// Patches from top to bottom.
    pub height: usize,
    /// Patches from left to right.
    pub width: usize,
}

/// Images, or audio clips, that an encoder processes together.
#[derive(Clone, Copy, Debug)]
pub struct EncoderInput<'a> {
    /// The grids of the items.
    pub grids: &'a [Grid],
    /// All patches, [patches, [`Encoder::patch_width`]], in the order of the Hugging Face processors: by groups of frames, then by the
    /// blocks that become one token, then within the blocks. For an audio clip, the frames of its spectrogram, each with all its bands.
    /// Empty in the planner, which has no patches.
    pub patches: &'a [f32],
}

/// The kinds of encoder that a model may have, at most one of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EncoderKind {
    /// For images and videos.
    Vision,
    /// For audio clips.
    Audio,
}

impl EncoderKind {
    /// All kinds.
    pub const ALL: [EncoderKind; 2] = [EncoderKind::Vision, EncoderKind::Audio];
}

/// An encoder: patches in, one embedding a token out.
pub trait Encoder: Send + Sync {
    /// Numbers of a patch.
    fn patch_width(&self) -> usize;

    /// Numbers of an output row: the model's width, and the same again for every layer with additions from the encoder.
    fn output_width(&self) -> usize;

    /// The encoder's shape, from which a device reserves memory.
    fn shape(&self) -> EncoderShape;

    /// Encodes items as the first computation in a step's workspace: [tokens, [`Self::output_width`]]. Items do not attend to each other.
    ///
    /// The workspace never shrinks with more patches of an item or of its longest frame, and depends on nothing else of the item. So the
    /// planner searches the largest legal item among those with the most of either.
    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError>;
}

/// An encoder of images and videos.
pub trait Vision: Encoder {
    /// The rule for the positions of images within a text; none if every token's position is its index.
    fn place_rule(&self) -> Option<PlaceRule>;

    /// Whether all tokens of an image attend to each other in the language model. Then the rows of an image are computed in one step
    /// ([`StepInput::ends`]).
    fn tokens_see_each_other(&self) -> bool {
        false
    }
}

/// A model, ready to run on any device that holds its weights.
pub trait Model: Send + Sync {
    /// Runs a step up to its first layer.
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError>;

    /// Runs the next layer of a step. The workspace must be as the layer before left it. Returns the output after the last layer. Between
    /// two layers the device may compute other steps.
    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError>;

    /// Runs one step from its beginning to its end.
    fn forward(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Output, DeviceError> {
        let mut pass = self.begin(device, step)?;
        loop {
            if let Some(output) = self.advance(device, &mut pass, step)? {
                return Ok(output);
            }
        }
    }

    /// The model's draft head or draft model, if its checkpoint has one and it was requested.
    fn drafter(&self) -> Option<&dyn Drafter> {
        None
    }

    /// The model's vision encoder, if its checkpoint has one.
    fn vision(&self) -> Option<&dyn Vision> {
        None
    }

    /// The model's audio encoder, if its checkpoint has one.
    fn audio(&self) -> Option<&dyn Encoder> {
        None
    }

    /// The model's encoder of this kind, if its checkpoint has one.
    fn encoder(&self, sense: EncoderKind) -> Option<&dyn Encoder> {
        match sense {
            EncoderKind::Vision => self.vision().map(|encoder| encoder as &dyn Encoder),
            EncoderKind::Audio => self.audio(),
        }
    }

    /// The common shape of the model's encoders, from which a device reserves memory.
    fn encoders(&self) -> Option<EncoderShape> {
        let encoders = EncoderKind::ALL.into_iter().filter_map(|sense| self.encoder(sense));
        encoders.map(Encoder::shape).reduce(EncoderShape::and)
    }

    /// The model's shape, from which a device reserves memory. The KV cache stores `dtype`.
    fn shape(&self, dtype: KvDtype) -> ModelShape;

    /// Size of the vocabulary, the width of the logits.
    fn vocab_size(&self) -> usize;
}

/// Declares the weights of the architecture that `config` names, and the draft model's weights, if there is one.
pub fn build_all(
    config: &ModelConfig,
    declare: &mut Declare<'_>,
    with_drafter: bool,
) -> Result<Box<dyn Model>, DeclareError> {
    let model = build(config, declare, with_drafter)?;
    let Some(config) = declare.begin_draft(model.shape(KvDtype::F16).kv.layers().len()) else { return Ok(model) };
    let draft = build(config, declare, false)?;
    Ok(Box::new(WithDraft::new(model, draft, config)?))
}

/// Declares the weights of the architecture that `config` names. Declares the draft head's weights only `with_drafter`.
pub fn build(
    config: &ModelConfig,
    declare: &mut Declare<'_>,
    with_drafter: bool,
) -> Result<Box<dyn Model>, DeclareError> {
    if with_drafter && !config.architecture.has_draft_head() {
        if config.architecture == Architecture::Qwen4Exp {
            return Err(DeclareError::Unsupported(
                "--enable-mtp: the draft head of Qwen4-Exp is not supported: use --prompt-lookup-num-tokens".to_owned(),
            ));
        }
        return Err(DeclareError::Unsupported(format!(
            "--enable-mtp needs a draft head, and {} models have none",
            config.architecture
        )));
    }
    match &config.architecture {
        Architecture::Llama => llama::build(config, declare),
        Architecture::Qwen2 => qwen2::build(config, declare),
        Architecture::Qwen3 => qwen3::build(config, declare),
        Architecture::Qwen3Moe => qwen3_moe::build(config, declare),
        Architecture::Qwen3Next => qwen3_next::build(config, declare, with_drafter),
        Architecture::Qwen3_5 | Architecture::Qwen3_5Moe => qwen3_5::build(config, declare, with_drafter),
        Architecture::Qwen4Exp => qwen4_exp::build(config, declare),
        Architecture::Family(_) => family::build(config, declare, with_drafter),
        Architecture::Bert | Architecture::Roberta | Architecture::ModernBert | Architecture::NomicBert => {
            text_encoder::build(config, declare)
        }
        Architecture::Whisper => whisper::build(config, declare),
        Architecture::Other(name) => Err(DeclareError::Unsupported(format!(
            "architecture '{name}' is not supported; supported are {}",
            plimsoll_formats::supported_models()
        ))),
    }
}
