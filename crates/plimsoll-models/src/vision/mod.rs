//! Vision encoders: images cut into patches become embeddings among those of a text.

mod class_rows;
mod encoder;
mod gemma4;
mod interleave;
mod intern;
mod llama4;
mod order;
mod parts;
mod pixtral;
mod places;
mod siglip;
mod siglip2;
mod unified;

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::{Gemma4, ModelConfig, VisionKind};

use crate::Vision;
use encoder::VisionEncoder;
use gemma4::Gemma4Encoder;
use intern::InternEncoder;
use llama4::Llama4Encoder;
use pixtral::PixtralEncoder;
use siglip::SiglipEncoder;
use siglip2::Siglip2Encoder;
use unified::UnifiedEncoder;

pub use interleave::{Interleave, Stretch};
pub use places::{After, FrameTimes, PlaceRule, PlacedItem, TextLine};

/// Declares the encoder. None if the configuration has no encoder, or if the checkpoint, a conversion for text, lacks its weights.
pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Option<Box<dyn Vision>>, DeclareError> {
    let Some(vision) = config.vision.clone() else { return Ok(None) };
    let first = match vision.encoder {
        VisionKind::Intern(_) => "visual.embeddings.patch_embeddings.projection.weight",
        VisionKind::Siglip | VisionKind::Siglip2(_) | VisionKind::Idefics3 => {
            "visual.embeddings.patch_embedding.weight"
        }
        VisionKind::Pixtral(_) => "visual.patch_conv.weight",
        VisionKind::Llama4(_) => "visual.patch_embedding.linear.weight",
        VisionKind::Gemma4(Gemma4 { unified: true, .. }) => "visual.patch_dense.weight",
        VisionKind::Gemma4(_) => "visual.patch_embedder.input_proj.weight",
        VisionKind::Qwen2 | VisionKind::Qwen2_5 | VisionKind::Omni2_5 | VisionKind::Qwen3 | VisionKind::Omni => {
            "visual.patch_embed.proj.weight"
        }
    };
    if !declare.is_plan() && !declare.has(first) {
        return Ok(None);
    }
    Ok(Some(match vision.encoder {
        VisionKind::Intern(intern) => Box::new(InternEncoder::declare(vision, intern, config.hidden_size, declare)?),
        VisionKind::Gemma4(own @ Gemma4 { unified: true, .. }) => {
            Box::new(UnifiedEncoder::declare(vision, own, config.hidden_size, declare)?)
        }
        VisionKind::Gemma4(own) => Box::new(Gemma4Encoder::declare(vision, own, config.hidden_size, declare)?),
        VisionKind::Siglip | VisionKind::Idefics3 => {
            Box::new(SiglipEncoder::declare(vision, config.hidden_size, declare)?)
        }
        VisionKind::Llama4(own) => Box::new(Llama4Encoder::declare(vision, own, config.hidden_size, declare)?),
        VisionKind::Pixtral(own) => {
            let model = (config.hidden_size, config.norm_eps);
            Box::new(PixtralEncoder::declare(vision, own, model, declare)?)
        }
        VisionKind::Siglip2(_) => Box::new(Siglip2Encoder::declare(vision, config.hidden_size, declare)?),
        _ => Box::new(VisionEncoder::declare(vision, config.hidden_size, declare)?),
    }))
}
