//! Audio towers: a spectrogram's frames become embeddings that stand among a text's. One file a family.

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::{AudioTower, ModelConfig};

use crate::Encoder;

mod gemma4;
mod parts;
mod qwen;
mod qwen2_5;
mod unified;
mod whisper;

/// Kernel size of a spectrogram's convolutions, on each axis.
const TAPS: usize = 3;
/// Their stride: each axis is halved.
const STEP: usize = 2;
/// Their padding on each side.
const PAD: usize = 1;

/// Declares the tower; none where the configuration has none, or the checkpoint no weights for it: a conversion for text.
pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Option<Box<dyn Encoder>>, DeclareError> {
    let Some(audio) = &config.audio else { return Ok(None) };
    let (first, out) = (first_weight(&audio.tower), config.hidden_size);
    if !declare.is_plan() && !declare.has(first) {
        return Ok(None);
    }
    Ok(Some(match &audio.tower {
        AudioTower::Windows(own) => Box::new(qwen::Tower::declare(audio, own, out, declare)?),
        AudioTower::Chunks(own) => Box::new(qwen2_5::Tower::declare(audio, *own, out, declare)?),
        AudioTower::Conformer(own) => Box::new(gemma4::Tower::declare(audio, own, out, declare)?),
        AudioTower::Whisper(own) => Box::new(whisper::Tower::declare(audio, own, declare)?),
        AudioTower::Samples => Box::new(unified::Tower::declare(audio.bands, out, declare)?),
    }))
}

/// A tensor that every checkpoint with the tower has.
fn first_weight(tower: &AudioTower) -> &'static str {
    match tower {
        AudioTower::Windows(_) => "audio.conv2d1.weight",
        AudioTower::Chunks(_) => "audio.conv1.weight",
        AudioTower::Conformer(_) => "audio.subsample_conv_projection.layer0.conv.weight",
        AudioTower::Whisper(_) => "audio.conv1.weight",
        AudioTower::Samples => "audio.projector.embedding_projection.weight",
    }
}
