//! Decoders that differ from Llama in facts only: the places of norms, the layers that rotate and slide, the factors.
//!
//! The facts are in [`plimsoll_formats::Variant`]; a family's file is in `plimsoll-formats/src/family`. This file declares the resulting
//! layers and runs them.

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, EncoderShape, Input, KvDtype, KvShape, Mode, ModelShape,
    StateShape, StepInput, VectorId,
};
use plimsoll_formats::{Mixer as MixerKind, ModelConfig, Norms, RopeScaling, VisionKind};

use crate::block::{AttentionBlock, AttentionPlace, norm};
use crate::dense::Dense;
use crate::ends::Ends;
use crate::latent::LatentBlock;
use crate::mamba::MambaBlock;
use crate::moe::MoeBlock;
use crate::parallel::ParallelBlock;
use crate::per_layer::{PerLayerBlock, PerLayerInputs, layer_scalar};
use crate::rope::{has_local_angles, rope};
use crate::rotary::Rotary;
use crate::short_conv::ShortConvBlock;
use crate::text_encoder::head::Head;
use crate::text_encoder::logits_of;
use crate::{Drafter, Encoder, Model, Output, Pass, Vision, audio, vision};
use beside::Beside;
use mixer::Mixer;
use mtp::MtpHead;

mod beside;
mod mixer;
mod mtp;

/// The norms around one half of a layer; none where the family has no norm.
#[derive(Clone, Copy)]
struct HalfNorms {
    before: Option<VectorId>,
    after: Option<VectorId>,
}

enum Transform {
    Dense(Dense),
    Experts(Box<MoeBlock>),
    /// Both parts, side by side on the same residual stream.
    Beside(Box<Beside>),
}

struct Layer {
    mixer_norms: HalfNorms,
    mixer: Option<Mixer>,
    transform_norms: HalfNorms,
    transform: Option<Transform>,
    per_layer: Option<PerLayerBlock>,
    /// The factor on the layer's result.
    scalar: Option<f32>,
    /// The index of the layer's rotary angles in the step: [`GLOBAL`] or [`LOCAL`]; none if the layer does not rotate.
    angles: Option<usize>,
    sliding: bool,
}

/// The indexes of the angles of global and of sliding layers.
const GLOBAL: usize = 0;
const LOCAL: usize = 1;

/// A decoder of one of these families.
pub struct Family {
    ends: Ends,
    layers: Vec<Layer>,
    /// The first layer from which on no layer has keys and values. The number of layers if the last layer has some.
    first_reader: usize,
    global: Rotary,
    /// The frequencies of sliding layers; none if they are the same as in global layers.
    local: Option<VectorId>,
    per_layer: Option<PerLayerInputs>,
    residual_scale: f32,
    eps: f32,
    /// Epsilon of the norms after each half of a layer.
    post_eps: f32,
    rotary_dim: usize,
    widest_norm: usize,
    state: Option<StateShape>,
    /// The draft head, if it was requested.
    head: Option<MtpHead>,
    vision: Option<Box<dyn Vision>>,
    audio: Option<Box<dyn Encoder>>,
    /// Whether an image's tokens attend to each other in sliding layers only.
    global_is_causal: bool,
    /// For models in which every position attends to earlier and later ones: the encoder's shape for devices, and the head, if there is
    /// one.
    encodes: Option<(EncoderShape, Option<Head>)>,
}

/// Numbers of layers of each kind that have been declared.
#[derive(Default)]
struct Counts {
    attention: usize,
    recurrent: usize,
}

/// Declares a checkpoint of one of these families. Declares the draft head's weights only `with_drafter`.
pub fn build(
    config: &ModelConfig,
    declare: &mut Declare<'_>,
    with_drafter: bool,
) -> Result<Box<dyn Model>, DeclareError> {
    let ends = Ends::declare(config, declare)?;
    let mut counts = Counts::default();
    let name = |layer: usize| format!("model.layers.{layer}");
    let layers = (0..config.layers).map(|layer| declare_layer(config, layer, &name(layer), &mut counts, declare));
    let layers = layers.collect::<Result<Vec<_>, DeclareError>>()?;
    let mixers = || layers.iter().filter_map(|layer| layer.mixer.as_ref());
    let state = mixers().find_map(|mixer| mixer.state_shape(counts.recurrent));
    let widest_norm = mixers().map(|mixer| mixer.norm_width(config)).max().unwrap_or(0);
    let global = Rotary::declare(config, declare)?;
    let local = has_local_angles(config)
        .then(|| declare.values(rope(config.rotary_dim, config.rope_local_theta, &RopeScaling::None).inv_freq));
    let per_layer = PerLayerInputs::declare(config, declare)?;
    let encodes = match &config.encoder {
        Some(encoder) => Some((encoder_shape(config), Head::declare(config, encoder, declare)?)),
        None => None,
    };
    let head = match with_drafter {
        true => Some(MtpHead::declare(config, ends, &mut counts, declare)?),
        false => None,
    };
    Ok(Box::new(Family {
        ends,
        layers,
        first_reader: config.layers - config.variant.shared_kv_layers,
        global,
        local,
        per_layer,
        residual_scale: config.variant.residual_scale,
        eps: config.norm_eps,
        post_eps: config.variant.post_norm_eps.unwrap_or(config.norm_eps),
        rotary_dim: config.rotary_dim,
        widest_norm: widest_norm.max(config.variant.per_layer_input.map_or(0, |input| input.width)),
        state,
        head,
        vision: vision::declare(config, declare)?,
        audio: audio::declare(config, declare)?,
        global_is_causal: config.vision.as_ref().is_some_and(|vision| matches!(vision.encoder, VisionKind::Gemma4(_))),
        encodes,
    }))
}

fn encoder_shape(config: &ModelConfig) -> EncoderShape {
    EncoderShape::new(config.head_dim, 0).shared(config.heads / config.kv_heads)
}

fn declare_layer(
    config: &ModelConfig,
    layer: usize,
    prefix: &str,
    counts: &mut Counts,
    declare: &mut Declare<'_>,
) -> Result<Layer, DeclareError> {
    let norms = |before: Option<&str>, after: Option<&str>, declare: &mut Declare<'_>| {
        let mut one = |name: Option<&str>| {
            let name = name.map(|name| format!("{prefix}.{name}.weight"));
            name.map(|name| norm(config, &name, config.hidden_size, declare)).transpose()
        };
        Ok::<_, DeclareError>(HalfNorms { before: one(before)?, after: one(after)? })
    };
    let (input, post) = (Some("input_layernorm"), Some("post_attention_layernorm"));
    let after = Some("post_feedforward_layernorm");
    let (mixer_norms, transform_norms) = match config.variant.norms {
        Norms::Before => (norms(input, None, declare)?, norms(post, None, declare)?),
        Norms::After => (norms(None, post, declare)?, norms(None, after, declare)?),
        Norms::Single => {
            let norms = norms(input, None, declare)?;
            (norms, norms)
        }
        Norms::Around => (norms(input, post, declare)?, norms(Some("pre_feedforward_layernorm"), after, declare)?),
    };
    let (sliding, source) = (config.slides(layer), config.kv_source(layer));
    let mixer = match config.variant.mixer(layer) {
        MixerKind::Attention => {
            counts.attention += 1;
            let cache = source.unwrap_or(counts.attention - 1);
            let place = AttentionPlace { layer, cache, sliding, shared: source.is_some() };
            Some(match config.variant.latent {
                Some(latent) => Mixer::Latent(Box::new(LatentBlock::declare(config, latent, prefix, cache, declare)?)),
                None => Mixer::Attention(AttentionBlock::declare(config, prefix, place, declare)?),
            })
        }
        MixerKind::ShortConv => {
            counts.recurrent += 1;
            Some(Mixer::ShortConv(ShortConvBlock::declare(config, prefix, counts.recurrent - 1, declare)?))
        }
        MixerKind::Mamba => {
            counts.recurrent += 1;
            Some(Mixer::Mamba(MambaBlock::declare(config, prefix, counts.recurrent - 1, declare)?))
        }
        MixerKind::Parallel => {
            (counts.attention, counts.recurrent) = (counts.attention + 1, counts.recurrent + 1);
            let places = [layer, counts.attention - 1, counts.recurrent - 1];
            Some(Mixer::Parallel(Box::new(ParallelBlock::declare(config, prefix, places, declare)?)))
        }
        MixerKind::None => None,
    };
    let transform = match config.variant.transforms(layer) {
        true => Some(declare_transform(config, layer, prefix, declare)?),
        false => None,
    };
    let per_layer = PerLayerBlock::declare(config, prefix, declare)?;
    let scalar = if config.variant.layer_scalar { Some(layer_scalar(prefix, declare)?) } else { None };
    let angles = if sliding && has_local_angles(config) { LOCAL } else { GLOBAL };
    let angles = config.variant.rotates(layer).then_some(angles);
    Ok(Layer { mixer_norms, mixer, transform_norms, transform, per_layer, scalar, angles, sliding })
}

fn declare_transform(
    config: &ModelConfig,
    layer: usize,
    prefix: &str,
    declare: &mut Declare<'_>,
) -> Result<Transform, DeclareError> {
    let mlp = format!("{prefix}.mlp");
    let experts = config.experts_of(layer);
    let experts = experts.map(|experts| MoeBlock::declare(config, experts, &mlp, declare)).transpose()?;
    Ok(match experts {
        Some(experts) if config.variant.mlp_beside_experts => {
            Transform::Beside(Box::new(Beside::declare(config, layer, prefix, experts, declare)?))
        }
        Some(experts) => Transform::Experts(Box::new(experts)),
        None => {
            // MLX's converter uses the common names.
            let shared = config.variant.dense_is_shared && !declare.has(&format!("{mlp}.gate_proj.weight"));
            let mlp = if shared { format!("{mlp}.shared_expert") } else { mlp };
            Transform::Dense(Dense::declare(config, &mlp, config.mlp_width(layer), declare)?)
        }
    })
}

impl Family {
    /// Adds the result of half a layer to the residual stream: `part` is added to `x`.
    fn join(&self, device: &mut dyn Device, x: Buf, part: Buf, after: Option<VectorId>) {
        if let Some(after) = after {
            device.rms_norm(part, part, after, self.post_eps);
        }
        if self.residual_scale != 1.0 {
            device.scale_rows(part, &|_| self.residual_scale);
        }
        device.add(x, part);
    }

    /// Returns the target of half a layer: `part` if a norm or factor follows, otherwise the residual stream.
    fn target(&self, norms: HalfNorms, x: Buf, part: Buf) -> (Buf, Mode) {
        match norms.after.is_some() || self.residual_scale != 1.0 {
            true => (part, Mode::Store),
            false => (x, Mode::Add),
        }
    }

    /// Runs one layer over all rows of `step`.
    fn layer(
        &self,
        layer: &Layer,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let i = pass.layer;
        let (rows, cols) = (pass.x.rows, pass.x.cols);
        let (normed, part) = (device.temp(rows, cols)?, device.temp(rows, cols)?);
        if let Some(mixer) = &layer.mixer {
            self.mix(layer, mixer, device, pass, [normed, part], step)?;
        }
        let mut bf16_rows = step.bf16_rows;
        if i + 1 == self.layers.len() && pass.x.rows == step.tokens.len() {
            (pass.x, bf16_rows) = self.ends.wanted(device, pass.x, i, step);
        }
        let rows = pass.x.rows;
        let [normed, part] = [normed.span(0, rows), part.span(0, rows)];
        self.transform(layer, device, pass.x, [normed, part], bf16_rows)?;
        if let Some((block, all)) = layer.per_layer.as_ref().zip(pass.per_layer).filter(|_| rows > 0) {
            let kept = (rows != all.rows).then_some(step.logit_rows);
            block.forward(device, pass.x, (all, i), kept, part, bf16_rows)?;
        }
        if let Some(scalar) = layer.scalar {
            device.scale_rows(pass.x, &|_| scalar);
        }
        Ok(())
    }

    /// Runs the first half of a layer. The two temporaries have the shape of the hidden state.
    fn mix(
        &self,
        layer: &Layer,
        mixer: &Mixer,
        device: &mut dyn Device,
        pass: &Pass,
        [normed, part]: [Buf; 2],
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let norms = layer.mixer_norms;
        let (out, mode) = self.target(norms, pass.x, part);
        let input = input(norms, pass.x, normed, self.eps);
        let angles = layer.angles.map(|which| pass.angles[which].expect("taken when the step began"));
        match mixer {
            Mixer::Attention(attention) => attention.forward(device, input, angles, out, mode, step)?,
            Mixer::Latent(latent) => {
                let angles = pass.angles[GLOBAL].expect("taken when the step began");
                latent.forward(device, input, angles, out, mode, step)?;
            }
            Mixer::ShortConv(conv) => conv.forward(device, input, out, mode, step)?,
            Mixer::Mamba(mamba) => mamba.forward(device, input, out, mode, step)?,
            Mixer::Parallel(both) => return both.forward(device, input, angles, [pass.x, part], step),
        }
        if mode == Mode::Store {
            self.join(device, pass.x, part, norms.after);
        }
        Ok(())
    }

    /// Runs the second half of a layer. The two temporaries have the shape of `x`.
    fn transform(
        &self,
        layer: &Layer,
        device: &mut dyn Device,
        x: Buf,
        [normed, part]: [Buf; 2],
        bf16_rows: usize,
    ) -> Result<(), DeviceError> {
        let Some(transform) = layer.transform.as_ref().filter(|_| x.rows > 0) else { return Ok(()) };
        let norms = layer.transform_norms;
        let (out, mode) = self.target(norms, x, part);
        let input = input(norms, x, normed, self.eps);
        match transform {
            Transform::Dense(dense) => dense.forward(device, input, out, mode, bf16_rows)?,
            Transform::Experts(experts) => {
                if let Some(norm) = norms.before {
                    device.rms_norm(normed, x, norm, self.eps);
                }
                experts.forward(device, input.x, out, mode, bf16_rows)?;
            }
            Transform::Beside(beside) => beside.forward(device, input, out, x, bf16_rows)?,
        }
        if mode == Mode::Store {
            self.join(device, x, part, norms.after);
        }
        Ok(())
    }
}

/// The input of half a layer: the residual stream, or its norm, which is computed in `normed`.
fn input(norms: HalfNorms, x: Buf, normed: Buf, eps: f32) -> Input {
    match norms.before {
        Some(norm) => Input::normed(normed, x, norm, eps),
        None => x.into(),
    }
}

impl Model for Family {
    fn begin(&self, device: &mut dyn Device, step: &StepInput<'_>) -> Result<Pass, DeviceError> {
        let x = self.ends.embed(device, step)?;
        let scope = device.mark();
        let global = self.global.angles(device, step)?;
        let local = match self.local {
            Some(frequencies) => {
                let angles = device.temp(x.rows, self.rotary_dim)?;
                device.rope_angles(angles, frequencies, step.positions, 1.0);
                Some(angles)
            }
            None => None,
        };
        let per_layer = self.per_layer.as_ref().map(|inputs| inputs.of_step(device, x, step)).transpose()?;
        Ok(Pass { per_layer, ..Pass::new(x, scope, [Some(global), local]) })
    }

    fn advance(
        &self,
        device: &mut dyn Device,
        pass: &mut Pass,
        step: &StepInput<'_>,
    ) -> Result<Option<Output>, DeviceError> {
        let (i, layer, scope) = (pass.layer, &self.layers[pass.layer], device.mark());
        // The head of a text encoder reads all rows.
        let step = &StepInput { only_logits: step.only_logits && self.encodes.is_none(), ..*step };
        // Rows without logits are needed only for their keys and values.
        let wanted = step.wanted().filter(|_| i >= self.first_reader);
        if wanted.is_some() && i == self.first_reader {
            pass.keep(device, step.logit_rows);
        }
        if pass.x.rows > 0 {
            let step = wanted.as_ref().unwrap_or(step);
            let causal = StepInput { ends: &[], ..*step };
            let sees_ahead = layer.sliding || !self.global_is_causal;
            self.layer(layer, device, pass, if sees_ahead { step } else { &causal })?;
        }
        device.release(scope);
        match (pass.passed(device, self.layers.len()), &self.encodes) {
            (true, Some((_, head))) => {
                let hidden = self.ends.normed(device, pass.x);
                let logits = logits_of(head.as_ref(), device, hidden, step)?;
                Ok(Some(Output { logits, hidden }))
            }
            (true, None) => self.ends.output(device, pass.x, step).map(Some),
            (false, _) => Ok(None),
        }
    }

    fn shape(&self, dtype: KvDtype) -> ModelShape {
        let layers = self.layers.iter().chain(self.head.as_ref().map(|head| &head.layer));
        let layers = layers.filter_map(|layer| layer.mixer.as_ref()?.kv());
        let kv = KvShape::of(dtype, self.state.is_some(), layers);
        let hidden = self.ends.hidden.max(self.widest_norm);
        if let Some((shape, _)) = &self.encodes {
            return ModelShape { kv: KvShape::none(), state: None, hidden, encoder: Some(*shape), bf16: false };
        }
        ModelShape { kv, state: self.state, hidden, encoder: self.encoders(), bf16: false }
    }

    fn drafter(&self) -> Option<&dyn Drafter> {
        self.head.as_ref().map(|_| self as &dyn Drafter)
    }

    fn vision(&self) -> Option<&dyn Vision> {
        self.vision.as_deref()
    }

    fn audio(&self) -> Option<&dyn Encoder> {
        self.audio.as_deref()
    }

    fn vocab_size(&self) -> usize {
        self.ends.vocab
    }
}
