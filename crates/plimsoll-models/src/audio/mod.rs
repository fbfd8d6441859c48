//! Audio encoders: a spectrogram's frames become embeddings among those of a text. Each family has a file.

use plimsoll_device::{Declare, DeclareError};
use plimsoll_formats::{AudioKind, ModelConfig};

use crate::Encoder;

mod gemma4;
mod parts;
mod qwen;
mod qwen2_5;
mod unified;
mod whisper;

/// Kernel size of a spectrogram's convolutions on each axis.
const TAPS: usize = 3;
/// Stride of the convolutions: each axis is halved.
const STEP: usize = 2;
/// Padding of the convolutions on each side.
const PAD: usize = 1;

/// Declares the encoder. None if the configuration has no encoder, or if the checkpoint, a conversion for text, lacks its weights.
pub fn declare(config: &ModelConfig, declare: &mut Declare<'_>) -> Result<Option<Box<dyn Encoder>>, DeclareError> {
    let Some(audio) = &config.audio else { return Ok(None) };
    let (first, out) = (first_weight(&audio.encoder), config.hidden_size);
    if !declare.is_plan() && !declare.has(first) {
        return Ok(None);
    }
    Ok(Some(match &audio.encoder {
        AudioKind::Windows(own) => Box::new(qwen::AudioEncoder::declare(audio, own, out, declare)?),
        AudioKind::Chunks(own) => Box::new(qwen2_5::AudioEncoder::declare(audio, *own, out, declare)?),
        AudioKind::Conformer(own) => Box::new(gemma4::AudioEncoder::declare(audio, own, out, declare)?),
        AudioKind::Whisper(own) => Box::new(whisper::AudioEncoder::declare(audio, own, declare)?),
        AudioKind::Samples => Box::new(unified::AudioEncoder::declare(audio.bands, out, declare)?),
    }))
}

/// A tensor that every checkpoint with the encoder has.
fn first_weight(encoder: &AudioKind) -> &'static str {
    match encoder {
        AudioKind::Windows(_) => "audio.conv2d1.weight",
        AudioKind::Chunks(_) => "audio.conv1.weight",
        AudioKind::Conformer(_) => "audio.subsample_conv_projection.layer0.conv.weight",
        AudioKind::Whisper(_) => "audio.conv1.weight",
        AudioKind::Samples => "audio.projector.embedding_projection.weight",
    }
}
