//! The preparation of audio clips, from the feature extractor's file and the encoder's configuration.

use std::sync::Arc;

use plimsoll_formats::{Audio as AudioConfig, AudioKind, AudioTask, Whisper};
use plimsoll_media::MediaError;
use plimsoll_media::audio::Mel;
use plimsoll_media::geometry::{AudioRule, ProcessorFiles};

use super::pieces::Limits;
use super::spec::{AudioSpec, Transcript};
use crate::api::plan_error::PlanError;

/// Samples to which Qwen3-ASR's feature extractor fills up a clip, where its file gives no number.
const SHORTEST_SAMPLES: u64 = 8000;

/// Returns the transform that makes spectrograms. The feature extractor and the encoder must agree on the bands.
pub(super) fn mel(files: &ProcessorFiles, config: &AudioConfig) -> Result<Mel, PlanError> {
    let bands = files.audio.bands().unwrap_or(config.bands as u64);
    if bands != config.bands as u64 {
        let why = format!("the feature extractor says {bands}, the encoder {}", config.bands);
        return Err(MediaError::BadConfig { key: "feature_size, num_mel_bins", why }.into());
    }
    Ok(Mel::new(&rule(files, config, 1)?, config.bands))
}

/// Returns the rule that divides a clip into frames and tokens, for clips of up to `seconds`.
fn rule(files: &ProcessorFiles, config: &AudioConfig, seconds: u64) -> Result<AudioRule, MediaError> {
    let windows = match &config.encoder {
        AudioKind::Windows(windows) => windows,
        AudioKind::Chunks(chunks) => return AudioRule::chunks(&files.audio, chunks.half_window as u64, seconds),
        AudioKind::Conformer(_) => return AudioRule::gemma4(&files.audio, seconds),
        AudioKind::Whisper(own) => return AudioRule::fixed(&files.audio, own.frames() as u64, seconds),
        AudioKind::Samples => return AudioRule::samples(&files.audio, config.bands as u64, seconds),
    };
    let (half, together) = (windows.half_window as u64, windows.attention_window as u64);
    let rule = AudioRule::windows(&files.audio, half, together, seconds)?;
    match windows.task {
        AudioTask::Any => Ok(rule),
        AudioTask::Transcribe => rule.filled_up(&files.audio, SHORTEST_SAMPLES),
    }
}

/// Returns the preparation of audio clips: as the feature extractor says, within the options' limit and a request's tokens. `None` if a
/// request cannot carry a clip of one second.
pub(super) fn spec(
    files: &ProcessorFiles,
    config: &AudioConfig,
    mel: &Arc<Mel>,
    limits: &Limits<'_>,
) -> Result<Option<AudioSpec>, PlanError> {
    let Limits { options, usual, context } = *limits;
    let rule = rule(files, config, options.max_audio_seconds.unwrap_or(usual))?;
    let usual = match &config.encoder {
        AudioKind::Whisper(own) => whole_clip(own, context)?,
        _ => usual,
    };
    let most = if options.max_audio_seconds.is_some() { context } else { context.min(usual) };
    let Some(rule) = rule.carried_in(most) else { return Ok(None) };
    agree_on_rows(&rule, config)?;
    let (placeholder, tokens_max) = (config.placeholder, rule.worst().tokens);
    let transcript = match &config.encoder {
        AudioKind::Windows(windows) if windows.task == AudioTask::Transcribe => Transcript::Tagged,
        AudioKind::Whisper(own) => Transcript::Decoded(Arc::new(own.clone())),
        _ => Transcript::Instructed,
    };
    Ok(Some(AudioSpec { mel: Arc::clone(mel), placeholder, tokens_max, rule, transcript }))
}

/// Returns the tokens of a clip of Whisper, which has no other use. The context must hold these tokens, the tokens around language and
/// task, and one token of text.
fn whole_clip(own: &Whisper, context: u64) -> Result<u64, PlanError> {
    let clip = own.positions as u64;
    let least = clip + if own.multilingual { 5 } else { 3 };
    if context < least {
        let problem = format!("leaves {context} tokens; a clip takes {clip}: give at least {least}");
        return Err(PlanError::Option { flag: "--max-req-total-len", problem });
    }
    Ok(clip)
}

/// Checks that the encoder makes as many rows as the rule counts tokens, for every legal audio clip. Tokens are counted before the encoder
/// runs.
fn agree_on_rows(rule: &AudioRule, config: &AudioConfig) -> Result<(), PlanError> {
    let counts = |frames: u64| (rule.tokens(frames), config.rows(frames as usize) as u64);
    let mismatch =
        (1..=rule.frames_max()).map(|frames| (frames, counts(frames))).find(|(_, (said, made))| said != made);
    let Some((frames, (said, made))) = mismatch else { return Ok(()) };
    let why = format!("{frames} frames of audio are counted as {said} tokens, the encoder makes {made}");
    let key = match config.encoder {
        AudioKind::Windows(_) | AudioKind::Chunks(_) => "n_window",
        AudioKind::Conformer(_) => "subsampling_conv_channels",
        AudioKind::Whisper(_) => "max_source_positions",
        AudioKind::Samples => "audio_embed_dim",
    };
    Err(MediaError::BadConfig { key, why }.into())
}

#[cfg(test)]
mod tests {
    use plimsoll_formats::{Activation, AudioWindows};

    use super::*;

    #[test]
    fn what_is_counted_is_what_the_encoder_makes() {
        let encoder = |half_window| AudioConfig {
            depth: 1,
            hidden_size: 24,
            heads: 2,
            intermediate_size: 40,
            act: Activation::Gelu,
            bands: 20,
            placeholder: 390,
            encoder: AudioKind::Windows(AudioWindows {
                channels: 6,
                half_window,
                attention_window: 200,
                task: AudioTask::Any,
            }),
        };
        for own in [1, 7, 50, 100] {
            let rule = rule(&ProcessorFiles::default(), &encoder(own), 60).unwrap();
            agree_on_rows(&rule, &encoder(own)).unwrap();
            let error = agree_on_rows(&rule, &encoder(own + 1)).unwrap_err().to_string();
            assert!(error.contains("frames of audio are counted as"), "{error}");
        }
    }
}
