//! Models, written once against the device trait.
//!
//! `family.rs` runs most decoders from the facts in their configurations, `decoder.rs` Llama and the Qwens. Parts that few of them have
//! stand in files of their own. `docs/adding-a-model.md` says where a new one goes.
//! **Architecture invariant:** no model knows which device runs it, allocates, or sees a request.

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

/// What a step leaves in the workspace until the next one begins.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// The logits of the wanted rows, [logit rows, vocabulary]; of an encoder, its classifier's scores, if it has one.
    pub logits: Buf,
    /// Every row's hidden state, after the final norm; with [`StepInput::only_logits`], that of the rows that have logits, or of all.
    pub hidden: Buf,
}

/// A step between two layers. What it needs stays in the workspace until the last one is through, below whatever is computed meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// The hidden state of every row.
    x: Buf,
    /// Every row's rotary angles; those of sliding layers, where they have others; none where places are embedded.
    angles: [Option<Buf>; 2],
    /// For every row what each layer is given besides, where the family has that: [rows, layers · width].
    per_layer: Option<Buf>,
    /// Where the workspace stood behind `x`.
    scope: Mark,
    /// The next layer.
    layer: usize,
}

impl Pass {
    /// Before the first layer.
    fn new(x: Buf, scope: Mark, angles: [Option<Buf>; 2]) -> Self {
        Self { x, angles, per_layer: None, scope, layer: 0 }
    }

    /// Keeps these rows alone, for all layers that follow.
    fn keep(&mut self, device: &mut dyn Device, rows: &[u32]) {
        let kept = [Some(self.x), self.angles[0], self.angles[1], self.per_layer];
        let [x, global, local, per_layer] = kept.map(|buf| buf.map(|buf| device.keep_rows(buf, rows)));
        self.x = x.expect("there are rows");
        (self.angles, self.per_layer) = ([global, local], per_layer);
    }

    /// A layer is through; says whether it was the last of `layers`, behind which the workspace holds `x` alone.
    fn passed(&mut self, device: &mut dyn Device, layers: usize) -> bool {
        self.layer += 1;
        let last = self.layer == layers;
        if last {
            device.release(self.scope);
        }
        last
    }
}

/// A multi-token-prediction head, or a draft model: guesses the token after the next one.
pub trait Drafter: Send + Sync {
    /// Whether a pass goes on from hidden states; a model of its own goes on from tokens alone.
    fn continues_hidden(&self) -> bool {
        true
    }

    /// One pass over rows with a known next token, after [`Model::forward`] in the same step's workspace.
    ///
    /// Row r of `step` stands at the position of row `rows[r]` of `hidden` (the model's output, or an earlier draft
    /// pass's) and names the token that *follows* that position. Keys and values go to the cache's last layers.
    fn draft(
        &self,
        device: &mut dyn Device,
        hidden: Buf,
        rows: &[u32],
        step: &StepInput<'_>,
    ) -> Result<Output, DeviceError>;
}

/// The patches of one image or list of frames: `frames` × `height` × `width` of them. Of an audio clip, the frames of its spectrogram:
/// one line of them, see [`Grid::audio`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Groups of frames; 1 for an image.
    pub frames: usize,
    /// Patches from top to bottom.
    pub height: usize,
    /// Patches from left to right.
    pub width: usize,
}

/// Images, or audio clips, on their way through an encoder, together.
#[derive(Clone, Copy, Debug)]
pub struct EncoderInput<'a> {
    /// Their grids.
    pub grids: &'a [Grid],
    /// All patches, [patches, [`Encoder::patch_width`]], in the order of the Hugging Face processors: by groups of frames, then by
    /// the blocks that become one token, then within them. Of an audio clip, the frames of its spectrogram, each with all its bands. The
    /// planner has none: empty.
    pub patches: &'a [f32],
}

/// The encoders that a model may have, one for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EncoderKind {
    /// For images and videos.
    Vision,
    /// For audio clips.
    Audio,
}

impl EncoderKind {
    /// Both.
    pub const ALL: [EncoderKind; 2] = [EncoderKind::Vision, EncoderKind::Audio];
}

/// An encoder: patches in, one embedding a token out.
pub trait Encoder: Send + Sync {
    /// Numbers of a patch.
    fn patch_width(&self) -> usize;

    /// Numbers of an output row: the model's width, and as many again for every layer that is given more of the image.
    fn output_width(&self) -> usize;

    /// What a device must know of it.
    fn shape(&self) -> EncoderShape;

    /// Encodes items as the first thing in a step's workspace: [tokens, [`Self::output_width`]]. Items do not see each
    /// other.
    ///
    /// What it takes never shrinks with the patches of an item or of its longest frame, and depends on nothing else of it: the
    /// planner looks for the worst legal item among those that have most of either.
    fn encode(&self, device: &mut dyn Device, images: &EncoderInput<'_>) -> Result<Buf, DeviceError>;
}

/// An encoder of images and videos.
pub trait Vision: Encoder {
    /// How the family places images among the positions of a text; none where every token stands at its index.
    fn place_rule(&self) -> Option<PlaceRule>;

    /// Whether all tokens of an image attend to each other in the language model. Then the rows of an image are computed in one step
    /// ([`StepInput::ends`]).
    fn tokens_see_each_other(&self) -> bool {
        false
    }
}

/// A model, ready to run on any device that holds its weights.
pub trait Model: Send + Sync {
    /// A step up to its first layer.
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError>;

    /// The next layer of a step, with the workspace as the one before left it; behind the last one, what comes out. Between two layers the
    /// device may compute other steps.
    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError>;

    /// One step, from its beginning to its end.
    fn forward(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Output, DeviceError> {
        let mut pass = self.begin(device, step)?;
        loop {
            if let Some(output) = self.advance(device, &mut pass, step)? {
                return Ok(output);
            }
        }
    }

    /// The model's draft head or draft model, if its checkpoint has one and it was asked for.
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

    /// One of its encoders.
    fn encoder(&self, sense: EncoderKind) -> Option<&dyn Encoder> {
        match sense {
            EncoderKind::Vision => self.vision().map(|encoder| encoder as &dyn Encoder),
            EncoderKind::Audio => self.audio(),
        }
    }

    /// What a device must know of its encoders.
    fn encoders(&self) -> Option<EncoderShape> {
        let encoders = EncoderKind::ALL.into_iter().filter_map(|sense| self.encoder(sense));
        encoders.map(Encoder::shape).reduce(EncoderShape::and)
    }

    /// What a device must know to reserve its memory, with keys and values stored as `dtype`.
    fn shape(&self, dtype: KvDtype) -> ModelShape;

    /// Size of the vocabulary, the width of the logits.
    fn vocab_size(&self) -> usize;
}

/// Declares the weights of the architecture that `config` names, and those of its draft model, if the checkpoint has one.
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

/// Declares the weights of the architecture that `config` names, those of its draft head only `with_drafter`.
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
