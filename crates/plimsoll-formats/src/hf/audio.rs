//! `audio_config` of Qwen2.5-Omni's or Qwen3-Omni's thinker, Qwen3-ASR or Gemma 4 → the audio encoder, with the defaults of transformers.

use super::gemma4;
use super::json::Lookup;
use super::values::{activation_of, token};
use crate::audio::{Audio, AudioChunks, AudioKind, AudioTask, AudioWindows};
use crate::config::ModelConfig;
use crate::error::FormatError;

/// Whether this is a class or `model_type` of a whole Qwen3-Omni, of its thinker, or of the thinker's language model.
pub(super) fn is(name: &str) -> bool {
    matches!(
        name,
        "Qwen3OmniMoeForConditionalGeneration"
            | "qwen3_omni_moe"
            | "Qwen3OmniMoeThinkerForConditionalGeneration"
            | "qwen3_omni_moe_thinker"
            | "qwen3_omni_moe_text"
    )
}

/// Whether this is a class or `model_type` of Qwen2.5-Omni. Its language model is a Qwen2.
pub(super) fn is_omni2_5(name: &str) -> bool {
    matches!(
        name,
        "Qwen2_5OmniModel"
            | "Qwen2_5OmniForConditionalGeneration"
            | "qwen2_5_omni"
            | "Qwen2_5OmniThinkerForConditionalGeneration"
            | "qwen2_5_omni_thinker"
            | "qwen2_5_omni_text"
    )
}

/// Whether this is a class or `model_type` of Qwen3-ASR. Its language model is a Qwen3.
pub(super) fn is_asr(name: &str) -> bool {
    matches!(name, "Qwen3ASRForConditionalGeneration" | "qwen3_asr" | "qwen3_asr_thinker" | "qwen3_asr_text")
}

/// Values that transformers assumes for absent keys of the encoder.
struct Defaults {
    depth: usize,
    hidden: usize,
    heads: usize,
    intermediate: usize,
    placeholder: u32,
    task: AudioTask,
    /// Half a window or chunk of the spectrogram.
    half_window: usize,
}

const OMNI: Defaults = Defaults {
    depth: 32,
    hidden: 1280,
    heads: 20,
    intermediate: 5120,
    placeholder: 151_646,
    task: AudioTask::Any,
    half_window: 50,
};
const OMNI2_5: Defaults = Defaults { half_window: 100, ..OMNI };
const ASR: Defaults = Defaults {
    depth: 24,
    hidden: 1024,
    heads: 16,
    intermediate: 4096,
    placeholder: 151_676,
    task: AudioTask::Transcribe,
    half_window: 50,
};

/// The tokens that end an answer of Qwen3-ASR, unless the configuration names others: `<|endoftext|>` and `<|im_end|>`.
const ASR_ENDS: [u32; 2] = [151_643, 151_645];

/// The token that ends a turn. It ends an answer in this family, unless the configuration names other tokens.
const TURN_END: u32 = 151_645;

/// Adds the encoder to the text model's configuration, if there is one. `name` is the class or `model_type`.
pub(super) fn add(config: &mut ModelConfig, top: &Lookup, name: &str) -> Result<(), FormatError> {
    let kind = top.str("model_type")?.unwrap_or_default();
    let encoder = top.object("audio_config")?;
    if gemma4::is(name) || gemma4::is(kind) {
        config.audio = encoder.map(|audio| gemma4::read_audio(&audio, top)).transpose()?;
        return Ok(());
    }
    if gemma4::is_unified(name) || gemma4::is_unified(kind) {
        config.audio = encoder.map(|audio| gemma4::read_unified_audio(&audio, top)).transpose()?;
        return Ok(());
    }
    let chunks = is_omni2_5(name) || is_omni2_5(kind);
    let defaults = if chunks {
        OMNI2_5
    } else if is(name) || is(kind) {
        OMNI
    } else if is_asr(name) || is_asr(kind) {
        ASR
    } else {
        return Ok(());
    };
    if config.eos_token_ids.is_empty() {
        config.eos_token_ids = match defaults.task {
            AudioTask::Any => vec![token(top, "im_end_token_id", TURN_END)?],
            AudioTask::Transcribe => ASR_ENDS.to_vec(),
        };
    }
    let Some(audio) = encoder else { return Ok(()) };
    let or = |key: &str, default: usize| audio.size(key).map(|size| size.unwrap_or(default));
    let out = audio.size("output_dim")?;
    if out.is_some_and(|out| out != config.hidden_size) {
        let (out, hidden) = (out.unwrap_or_default(), config.hidden_size);
        return Err(FormatError::Config(format!("an audio encoder of width {out} for a model of width {hidden}")));
    }
    if audio.bool("scale_embedding")? == Some(true) {
        // transformers reads this key and ignores it, so there is no reference for such a checkpoint.
        return Err(FormatError::Unsupported("scale_embedding true; supported is false".to_owned()));
    }
    let half_window = or("n_window", defaults.half_window)?;
    let encoder = match chunks {
        true => AudioKind::Chunks(AudioChunks { half_window: positioned(&audio, half_window)? }),
        false => AudioKind::Windows(AudioWindows {
            channels: or("downsample_hidden_size", 480)?,
            half_window,
            attention_window: or("n_window_infer", 800)?,
            task: defaults.task,
        }),
    };
    config.audio = Some(Audio {
        depth: or("encoder_layers", defaults.depth)?,
        hidden_size: or("d_model", defaults.hidden)?,
        heads: or("encoder_attention_heads", defaults.heads)?,
        intermediate_size: or("encoder_ffn_dim", defaults.intermediate)?,
        act: activation_of(audio.str("activation_function")?.unwrap_or("gelu"))?,
        bands: or("num_mel_bins", 128)?,
        placeholder: token(top, "audio_token_id", token(top, "audio_token_index", defaults.placeholder)?)?,
        encoder,
    });
    Ok(())
}

/// Returns the rows of a chunk. Refuses more rows than the model has positions.
fn positioned(audio: &Lookup, rows: usize) -> Result<usize, FormatError> {
    let positions = audio.size("max_source_positions")?.unwrap_or(1500);
    match rows <= positions {
        true => Ok(rows),
        false => Err(FormatError::Config(format!(
            "n_window: {rows} rows, allowed are {positions}, the model's max_source_positions"
        ))),
    }
}
