//! Files that ffmpeg reads before they are measured: it reports a video's size and frames, and decodes an audio track to WAV.

use std::sync::Arc;

use plimsoll_media::Modality;
use plimsoll_media::audio::AudioLimits;
use plimsoll_media::ffmpeg::{Container, Ffmpeg, Film, RUN_BYTES};

use super::decode::{Wanted, decoder};
use super::measure::audio_limits;
use super::medium::{Medium, Source};
use super::refused::{refused, track_refused};
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, cut};
use crate::state::model::ModelState;
use crate::state::server::{ServerPhase, reached};

/// The result of ffmpeg for a file.
enum Seen {
    Film(Film),
    Wave(Vec<u8>),
}

/// Has ffmpeg read the files that only it can read, one at a time, where the operator allows it. `held` follows the files' bytes.
pub(super) async fn read(state: &Arc<ModelState>, media: &mut [Medium], held: &mut Held) -> ApiResult<()> {
    let Some(ffmpeg) = &state.server.config.media.ffmpeg else { return Ok(()) };
    let mut phase = state.server.phase.subscribe();
    for at in 0..media.len() {
        // The track is in the file of the video before it.
        let track = media[at].of_video;
        let Some(bytes) = external(&mut media[at - usize::from(track)]) else { continue };
        let file = std::mem::take(bytes);
        let (file, seen) = tokio::select! {
            biased;
            done = run(state, ffmpeg.clone(), &media[at], file, held) => done?,
            () = reached(&mut phase, ServerPhase::Cut) => return Err(cut()),
        };
        let (param, bytes) = (&media[at].param, file.capacity() as u64);
        match seen {
            Seen::Film(film) => {
                media[at].film = Some(film);
                media[at].sources = vec![Source::Bytes(file)];
            }
            Seen::Wave(wave) => {
                let kept = if track { 0 } else { bytes };
                held.grow_for(param, (wave.capacity() as u64).saturating_sub(kept))?;
                media[at].sources = vec![Source::Bytes(wave)];
                if track {
                    media[at - 1].sources = vec![Source::Bytes(file)];
                }
            }
        }
    }
    Ok(())
}

/// Returns the bytes of a medium that ffmpeg must read; none for other media.
fn external(medium: &mut Medium) -> Option<&mut Vec<u8>> {
    let whole = medium.listed.is_none() && medium.kind != Modality::Image;
    match medium.sources.as_mut_slice() {
        [Source::Bytes(bytes)] if whole && Container::of(bytes).is_some() => Some(bytes),
        _ => None,
    }
}

async fn run(
    state: &Arc<ModelState>,
    ffmpeg: Ffmpeg,
    medium: &Medium,
    file: Vec<u8>,
    held: &mut Held,
) -> ApiResult<(Vec<u8>, Seen)> {
    let (Some(spec), Some(budget)) = (state.served.engine.media(), &state.media_pipeline.decode_budget) else {
        return Err(ApiError::internal("internal error: media input reached a model without an encoder"));
    };
    let (config, param, kind) = (&state.server.config.media, medium.param.as_str(), medium.kind);
    let audio = spec.audio.as_ref().filter(|_| kind == Modality::Audio);
    let audio = audio.map(|audio| {
        let (rate, limits) = (audio.rule.rate as u32, audio_limits(audio, config, medium.windows));
        // A longer clip becomes a WAV over the limit of bytes, and is refused.
        let seconds = limits.seconds.min(limits.file_bytes.div_ceil(2 * u64::from(rate)));
        (rate, AudioLimits { seconds, ..limits })
    });
    let wave_bytes = audio.map_or(0, |(rate, limits)| Ffmpeg::audio_bytes(rate, &limits).min(limits.file_bytes));
    let work = RUN_BYTES + file.len() as u64 + wave_bytes;
    let work = budget.take(work, &[], config.room_timeout).await.map_err(|error| refused(param, &error))?;
    let decoder = decoder(state, kind, Some(config.room_timeout)).await?;
    let (wanted, image, share) = (Wanted::default(), config.image, held.split(file.capacity() as u64));
    let stop = wanted.stop();
    let reading = tokio::task::spawn_blocking(move || {
        // Held until ffmpeg has ended, also if the client has disconnected.
        let _own = (decoder, work);
        let seen = match audio {
            Some((rate, limits)) => ffmpeg.audio(&file, rate, &limits, &stop).map(Seen::Wave),
            None => ffmpeg.film(&file, &image, &stop).map(Seen::Film),
        };
        (file, share, seen)
    });
    let (file, share, seen) = reading.await.map_err(|_| state.server.panicked("reading a file with ffmpeg"))?;
    held.join(share);
    state.media_pipeline.counts.ffmpeg_runs.inc();
    let seen = seen.map_err(|error| {
        state.media_pipeline.counts.refused.inc();
        if medium.of_video { track_refused(param, &error) } else { refused(param, &error) }
    })?;
    Ok((file, seen))
}
