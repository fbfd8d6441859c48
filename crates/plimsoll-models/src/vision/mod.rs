//! Vision towers: images cut into patches become embeddings that stand among a text's.

mod class_rows;
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
mod tower;
mod unified;

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::{Gemma4, ModelConfig, Tower};

use crate::Vision;
use gemma4::Gemma4Tower;
use intern::InternTower;
use llama4::Llama4Tower;
use pixtral::PixtralTower;
use siglip::SiglipTower;
use siglip2::Siglip2Tower;
use tower::VisionTower;
use unified::UnifiedTower;

pub use interleave::{Interleave, Stretch};
pub use places::{After, FrameTimes, PlaceRule, PlacedItem, TextLine};

/// Declares the tower; none where the configuration has none, or the checkpoint no weights for it: a conversion for text.
pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Option<Box<dyn Vision>>, DeclareError> {
    let Some(vision) = config.vision.clone() else { return Ok(None) };
    let first = match vision.tower {
        Tower::Intern(_) => "visual.embeddings.patch_embeddings.projection.weight",
        Tower::Siglip | Tower::Siglip2(_) | Tower::Idefics3 => "visual.embeddings.patch_embedding.weight",
        Tower::Pixtral(_) => "visual.patch_conv.weight",
        Tower::Llama4(_) => "visual.patch_embedding.linear.weight",
        Tower::Gemma4(Gemma4 { unified: true, .. }) => "visual.patch_dense.weight",
        Tower::Gemma4(_) => "visual.patch_embedder.input_proj.weight",
        Tower::Qwen2 | Tower::Qwen2_5 | Tower::Omni2_5 | Tower::Qwen3 | Tower::Omni => "visual.patch_embed.proj.weight",
    };
    if !declare.is_plan() && !declare.has(first) {
        return Ok(None);
    }
    Ok(Some(match vision.tower {
        Tower::Intern(intern) => Box::new(InternTower::declare(vision, intern, config.hidden_size, declare)?),
        Tower::Gemma4(own @ Gemma4 { unified: true, .. }) => {
            Box::new(UnifiedTower::declare(vision, own, config.hidden_size, declare)?)
        }
        Tower::Gemma4(own) => Box::new(Gemma4Tower::declare(vision, own, config.hidden_size, declare)?),
        Tower::Siglip | Tower::Idefics3 => Box::new(SiglipTower::declare(vision, config.hidden_size, declare)?),
        Tower::Llama4(own) => Box::new(Llama4Tower::declare(vision, own, config.hidden_size, declare)?),
        Tower::Pixtral(own) => {
            let model = (config.hidden_size, config.norm_eps);
            Box::new(PixtralTower::declare(vision, own, model, declare)?)
        }
        Tower::Siglip2(_) => Box::new(Siglip2Tower::declare(vision, config.hidden_size, declare)?),
        _ => Box::new(VisionTower::declare(vision, config.hidden_size, declare)?),
    }))
}
