//! From measured media to pixels and spectrograms: reserves memory, then decodes on a bounded number of blocking
//! threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use plimsoll_engine::{AudioSpec, MediaItem, Pixels};
use plimsoll_media::audio::{self, AudioLimits, resample};
use plimsoll_media::ffmpeg::Ffmpeg;
use plimsoll_media::image::{ImageLimits, Rgb, decode, frames, pieces, resize, squares, tiles};
use plimsoll_media::{ContentKey, MediaError, Modality, Staged};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::measure::{Measured, Piece, audio_limits};
use super::medium::Windowing;
use super::refused::refused;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, cut};
use crate::state::media::decode_memory::DecodeMemory;
use crate::state::model::ModelState;
use crate::state::server::{ServerPhase, reached};

/// Sets the decoder's stop flag on drop: the request then no longer waits for the result.
#[derive(Default)]
pub(super) struct Wanted(Arc<AtomicBool>);

impl Wanted {
    /// The flag that is set when the request has ended.
    pub fn stop(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Decodes and resizes. `files` is the files' share of the byte budget. Dropping the future frees everything but the
/// item that is being decoded. An image is freed when it is decoded, an audio clip after its next block.
pub(crate) async fn prepare(
    state: &Arc<ModelState>,
    media: Vec<Measured>,
    mut files: Option<Held>,
) -> ApiResult<Vec<MediaItem>> {
    let Some(first) = media.first() else { return Ok(Vec::new()) };
    let (Some(spec), Some(budget)) = (state.served.engine.media(), &state.media_pipeline.decode_budget) else {
        return Err(ApiError::internal("internal error: media input reached a model without an encoder"));
    };
    let param = first.param.clone();
    let mut phase = state.server.phase.subscribe();
    let waiting = state.server.config.media.room_timeout;
    let work = media.iter().map(|medium| medium.decode_bytes).max().unwrap_or(0);
    let pixels: Vec<u64> = media.iter().flat_map(Measured::item_bytes).collect();
    let DecodeMemory { pixels, mut work } = tokio::select! {
        biased;
        reserved = budget.take(work, &pixels, waiting) => reserved.map_err(|error| refused(&param, &error))?,
        () = reached(&mut phase, ServerPhase::Cut) => return Err(cut()),
    };
    let wanted = Wanted::default();
    let mut items = Vec::with_capacity(pixels.len());
    let mut pixels = pixels.into_iter();
    for medium in media {
        let staged: Vec<Staged> = pixels.by_ref().take(medium.item_bytes().count()).collect();
        let decoder = tokio::select! {
            biased;
            decoder = decoder(state, medium.shape.modality, Some(waiting)) => decoder?,
            () = reached(&mut phase, ServerPhase::Cut) => return Err(cut()),
        };
        let stop = wanted.stop();
        let ffmpeg = state.server.config.media.ffmpeg.clone();
        let limits = state.server.config.media.image;
        let audio =
            spec.audio.clone().map(|audio| (audio_limits(&audio, &state.server.config.media, Windowing::Never), audio));
        let file = files.as_mut().map(|files| files.split(medium.file_bytes()));
        let decoding = tokio::task::spawn_blocking(move || {
            // Held until decoding is done, also if the client has disconnected.
            let _own = (decoder, file);
            (items_of(medium, staged, (&limits, ffmpeg.as_ref()), audio.as_ref(), &stop), work)
        });
        let decoded = tokio::select! {
            biased;
            decoded = decoding => decoded,
            () = reached(&mut phase, ServerPhase::Cut) => return Err(cut()),
        };
        let (own, back) = decoded.map_err(|_| state.server.panicked("decoding an image, video or audio input"))?;
        work = back;
        items.extend(own.map_err(|(param, error)| {
            state.media_pipeline.counts.refused.inc();
            refused(&param, &error)
        })?);
        state.media_pipeline.counts.prepared.inc();
    }
    Ok(items)
}

/// Waits for a free decoder, no longer than `limit` if there is one.
pub(super) async fn decoder(
    state: &ModelState,
    kind: Modality,
    limit: Option<Duration>,
) -> ApiResult<OwnedSemaphorePermit> {
    let decoders = match kind {
        Modality::Image | Modality::Video => &state.media_pipeline.decoders,
        Modality::Audio => &state.media_pipeline.listeners,
    };
    let free = Arc::clone(decoders).acquire_owned();
    let free = match limit {
        Some(limit) => timeout(limit, free).await.map_err(|_| {
            let message = format!("all decoders of media were busy for {} s", limit.as_secs_f32());
            ApiError::unavailable(message, 1)
        })?,
        None => free.await,
    };
    free.map_err(|_| ApiError::shutting_down())
}

/// Decodes a medium into its items: one, or one for each of an image's pieces.
fn items_of(
    medium: Measured,
    staged: Vec<Staged>,
    (limits, ffmpeg): (&ImageLimits, Option<&Ffmpeg>),
    audio: Option<&(AudioLimits, AudioSpec)>,
    stop: &AtomicBool,
) -> Result<Vec<MediaItem>, (String, MediaError)> {
    let prepared = match audio {
        Some((limits, audio)) if medium.shape.modality == Modality::Audio => {
            spectrogram(&medium, limits, audio, stop).map(|spectrogram| (Vec::new(), spectrogram))
        }
        _ => pixels(&medium, limits, ffmpeg, stop).map(|frames| (frames, Vec::new())),
    };
    let (frames, spectrogram) = prepared.map_err(|error| (medium.param.clone(), error))?;
    if !medium.pieces.is_empty() {
        return Ok(apart(&medium, frames, staged));
    }
    let item = |staged| {
        let Measured { key, shape, grid, first, seconds, of_video, .. } = medium;
        let pixels = Arc::new(Pixels { frames, spectrogram, staged: Arc::new(staged) });
        MediaItem { key, shape, grid, first, seconds: seconds.map(|seconds| seconds as f32), of_video, pixels }
    };
    Ok(staged.into_iter().next().map(item).into_iter().collect())
}

/// Makes an item of each piece of an image.
fn apart(medium: &Measured, frames: Vec<Rgb>, staged: Vec<Staged>) -> Vec<MediaItem> {
    let item = |(nth, ((piece, frame), staged)): (usize, ((&Piece, Rgb), Staged))| {
        let place = format!("piece {nth} of {:?}", medium.cut);
        MediaItem {
            key: ContentKey::of(Modality::Image, &place, medium.key.as_bytes()),
            shape: piece.shape,
            grid: piece.grid,
            first: piece.first,
            seconds: None,
            of_video: false,
            pixels: Arc::new(Pixels { frames: vec![frame], spectrogram: Vec::new(), staged: Arc::new(staged) }),
        }
    };
    medium.pieces.iter().zip(frames).zip(staged).enumerate().map(item).collect()
}

fn pixels(
    medium: &Measured,
    limits: &ImageLimits,
    ffmpeg: Option<&Ffmpeg>,
    stop: &AtomicBool,
) -> Result<Vec<Rgb>, MediaError> {
    let fitted = |image: &Rgb| {
        let mut image = resize(image, medium.canvas, medium.filter);
        image.data.shrink_to_fit();
        image
    };
    if let Some(steps) = medium.steps {
        let image = decode(&medium.files[0], limits)?;
        return Ok(squares(image, steps, medium.canvas, medium.tile, medium.filter));
    }
    if let Some(cut) = medium.cut {
        let image = decode(&medium.files[0], limits)?;
        return Ok(pieces(&image, medium.canvas, medium.tile, cut.whole, medium.filter));
    }
    match &medium.frames {
        None if medium.shape.modality == Modality::Image && medium.canvas != medium.tile => {
            Ok(tiles(&decode(&medium.files[0], limits)?, medium.canvas, medium.tile, medium.filter))
        }
        None => medium.files.iter().map(|file| Ok(fitted(&decode(file, limits)?))).collect(),
        Some(indices) => {
            let mut taken = Vec::with_capacity(indices.len());
            let take = |frame: &Rgb| taken.push(fitted(frame));
            match (&medium.film, ffmpeg) {
                (Some(film), Some(ffmpeg)) => ffmpeg.frames(&medium.files[0], film, indices, stop, take)?,
                _ => frames(&medium.files[0], indices, limits, take)?,
            }
            Ok(taken)
        }
    }
}

/// Returns the log-mel spectrogram for the audio encoder, with the measured number of frames.
fn spectrogram(
    medium: &Measured,
    limits: &AudioLimits,
    spec: &AudioSpec,
    stop: &AtomicBool,
) -> Result<Vec<f32>, MediaError> {
    let clip = audio::decode(&medium.files[0], limits, stop)?;
    let mut samples = resample(clip.samples, clip.rate, spec.rule.rate as u32, stop)?;
    samples.resize(spec.rule.filled(samples.len() as u64) as usize, 0.0);
    let mut values = vec![0.0; medium.grid.patches() * spec.mel.bands()];
    spec.mel.spectrogram(&samples, &mut values);
    Ok(values)
}
