//! From measured media to pixels and spectrograms: room first, then decoding, on a bounded number of blocking threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use plimsoll_engine::{AudioSpec, MediaItem, Pixels};
use plimsoll_media::audio::{self, AudioLimits, resample};
use plimsoll_media::image::{ImageLimits, Rgb, decode, frames, resize, tiles};
use plimsoll_media::{MediaError, Modality, Staged};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::decode_memory::DecodeMemory;
use super::measure::{Measured, sound_limits};
use super::refused::refused;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, cut};
use crate::state::model::ModelState;
use crate::state::server::{Phase, reached};

/// Sets the decoder's stop flag on drop: the request no longer waits for the result.
#[derive(Default)]
struct Wanted(Arc<AtomicBool>);

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Decodes and resizes; `files` is what the files hold of the byte budget. What is dropped in between lets go of everything, but for
/// the one item that is being decoded: a picture's goes when it is, a sound's after the next block.
pub(crate) async fn prepare(
    state: &Arc<ModelState>,
    media: Vec<Measured>,
    mut files: Option<Held>,
) -> ApiResult<Vec<MediaItem>> {
    let Some(first) = media.first() else { return Ok(Vec::new()) };
    let (Some(spec), Some(rooms)) = (state.served.engine.media(), &state.media_pipeline.rooms) else {
        return Err(ApiError::internal("media were taken for a model without"));
    };
    let param = first.param.clone();
    let mut phase = state.server.phase.subscribe();
    let work = media.iter().map(|medium| medium.decode_bytes).max().unwrap_or(0);
    let pixels: Vec<u64> = media.iter().map(|medium| medium.pixel_bytes).collect();
    let DecodeMemory { pixels, mut work } = tokio::select! {
        biased;
        room = rooms.take(work, &pixels, state.server.config.media.room_timeout) => room.map_err(|error| refused(&param, &error))?,
        () = reached(&mut phase, Phase::Cut) => return Err(cut()),
    };
    let wanted = Wanted::default();
    let mut items = Vec::with_capacity(media.len());
    for (medium, staged) in media.into_iter().zip(pixels) {
        let decoder = tokio::select! {
            biased;
            decoder = decoder(state, medium.shape.modality) => decoder?,
            () = reached(&mut phase, Phase::Cut) => return Err(cut()),
        };
        let stop = Arc::clone(&wanted.0);
        let limits = state.server.config.media.image;
        let heard = spec.audio.clone().map(|audio| (sound_limits(&audio, &state.server.config.media), audio));
        let file = files.as_mut().map(|files| files.split(medium.file_bytes()));
        let decoding = tokio::task::spawn_blocking(move || {
            // Held until it is over, also when the client has gone meanwhile.
            let _own = (decoder, file);
            (item(medium, staged, &limits, heard.as_ref(), &stop), work)
        });
        let decoded = tokio::select! {
            biased;
            decoded = decoding => decoded,
            () = reached(&mut phase, Phase::Cut) => return Err(cut()),
        };
        let (item, back) = decoded.map_err(|_| state.server.panicked("decoding an image, video or audio input"))?;
        work = back;
        items.push(item.map_err(|(param, error)| {
            state.media_pipeline.counts.refused.inc();
            refused(&param, &error)
        })?);
        state.media_pipeline.counts.prepared.inc();
    }
    Ok(items)
}

/// Waits for a decoder to be free, no longer than for room.
async fn decoder(state: &ModelState, kind: Modality) -> ApiResult<OwnedSemaphorePermit> {
    let decoders = match kind {
        Modality::Image | Modality::Video => &state.media_pipeline.decoders,
        Modality::Audio => &state.media_pipeline.listeners,
    };
    let limit = state.server.config.media.room_timeout;
    let free = timeout(limit, Arc::clone(decoders).acquire_owned()).await;
    let busy = |_| ApiError::unavailable(format!("all decoders of media were busy for {} s", limit.as_secs_f32()), 1);
    free.map_err(busy)?.map_err(|_| ApiError::unavailable("the server is shutting down", 5))
}

fn item(
    medium: Measured,
    staged: Staged,
    limits: &ImageLimits,
    heard: Option<&(AudioLimits, AudioSpec)>,
    stop: &AtomicBool,
) -> Result<MediaItem, (String, MediaError)> {
    let prepared = match heard {
        Some((limits, audio)) if medium.shape.modality == Modality::Audio => {
            spectrogram(&medium, limits, audio, stop).map(|spectrogram| (Vec::new(), spectrogram))
        }
        _ => pixels(&medium, limits).map(|frames| (frames, Vec::new())),
    };
    match prepared {
        Ok((frames, spectrogram)) => {
            let pixels = Arc::new(Pixels { frames, spectrogram, staged });
            let Measured { key, shape, grid, first, seconds, .. } = medium;
            Ok(MediaItem { key, shape, grid, first, seconds, pixels })
        }
        Err(error) => Err((medium.param, error)),
    }
}

fn pixels(medium: &Measured, limits: &ImageLimits) -> Result<Vec<Rgb>, MediaError> {
    let fitted = |picture: &Rgb| {
        let mut picture = resize(picture, medium.canvas);
        picture.data.shrink_to_fit();
        picture
    };
    match &medium.frames {
        None if medium.shape.modality == Modality::Image && medium.canvas != medium.tile => {
            Ok(tiles(&decode(&medium.files[0], limits)?, medium.canvas, medium.tile))
        }
        None => medium.files.iter().map(|file| Ok(fitted(&decode(file, limits)?))).collect(),
        Some(indices) => {
            let mut taken = Vec::with_capacity(indices.len());
            frames(&medium.files[0], indices, limits, |frame| taken.push(fitted(frame)))?;
            Ok(taken)
        }
    }
}

/// What the tower reads of a sound, as many frames as were counted.
fn spectrogram(
    medium: &Measured,
    limits: &AudioLimits,
    audio: &AudioSpec,
    stop: &AtomicBool,
) -> Result<Vec<f32>, MediaError> {
    let sound = audio::decode(&medium.files[0], limits, stop)?;
    let samples = resample(sound.samples, sound.rate, audio.rule.rate as u32, stop)?;
    let mut values = vec![0.0; medium.grid.patches() * audio.mel.bands()];
    audio.mel.spectrogram(&samples, &mut values);
    Ok(values)
}
