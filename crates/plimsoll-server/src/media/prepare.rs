//! From measured media to pixels: room first, then decoding, on a bounded number of blocking threads.
//!
//! A request takes all the room it needs at once or none, and only one at a time looks for it: nobody waits while holding what
//! another waits for. Room comes back as requests end.

use std::sync::Arc;
use std::time::Duration;

use plimsoll_engine::{MediaItem, Pixels};
use plimsoll_media::image::{ImageLimits, Rgb, decode, frames, resize};
use plimsoll_media::{MediaError, Staged, Staging};
use tokio::time::{Instant, sleep, timeout_at};

use super::measure::Measured;
use super::refused;
use crate::app::{App, Phase, reached};
use crate::error::{ApiError, ApiResult};
use crate::generation::cut;
use crate::limits::Held;

/// How often who is next looks for room.
const LOOK: Duration = Duration::from_millis(5);

/// What a request's media may take while they are prepared.
struct Room {
    /// Of each item's pixels.
    pixels: Vec<Staged>,
    /// For decoding, one item after the other.
    work: Staged,
}

/// Decodes and resizes; `files` is what the files hold of the byte budget. What is dropped in between lets go of everything, but for the one item that is being decoded, which goes
/// when it is.
pub(crate) async fn prepare(
    app: &Arc<App>,
    media: Vec<Measured>,
    mut files: Option<Held>,
) -> ApiResult<Vec<MediaItem>> {
    let Some(first) = media.first() else { return Ok(Vec::new()) };
    let Some(spec) = app.served.engine.media() else {
        return Err(ApiError::internal("media were taken for a model without"));
    };
    let param = first.param.clone();
    let mut phase = app.phase.subscribe();
    let Room { pixels, mut work } = tokio::select! {
        biased;
        room = room(app, &spec.staging, &media) => room.map_err(|error| refused(&param, &error))?,
        () = reached(&mut phase, Phase::Cut) => return Err(cut()),
    };
    let mut items = Vec::with_capacity(media.len());
    for (medium, staged) in media.into_iter().zip(pixels) {
        let decoder = Arc::clone(&app.studio.decoders).acquire_owned().await;
        let decoder = decoder.map_err(|_| ApiError::unavailable("the server is shutting down", 5))?;
        let limits = app.config.media.image;
        let file = files.as_mut().map(|files| files.split(medium.file_bytes()));
        let decoding = tokio::task::spawn_blocking(move || {
            // Held until it is over, also when the client has gone meanwhile.
            let _own = (decoder, file);
            (item(medium, staged, &limits), work)
        });
        let (item, back) = decoding.await.map_err(|_| app.panicked())?;
        work = back;
        items.push(item.map_err(|(param, error)| {
            app.studio.counts.refused.inc();
            refused(&param, &error)
        })?);
        app.studio.counts.prepared.inc();
    }
    Ok(items)
}

/// Reserves all room that the items need, when it is this request's turn and there is some.
async fn room(app: &App, staging: &Staging, media: &[Measured]) -> Result<Room, MediaError> {
    let deadline = Instant::now() + app.config.media.room_timeout;
    let work = media.iter().map(|medium| medium.decode_bytes).max().unwrap_or(0);
    let pixels: u64 = media.iter().map(|medium| medium.pixel_bytes).sum();
    if work + pixels > staging.limit() {
        return Err(MediaError::OverLimit {
            what: "the request's media",
            asked: work + pixels,
            limit: staging.limit(),
            unit: "bytes on the host while they are prepared",
            flag: "--media-bytes",
        });
    }
    let busy = |_| MediaError::StagingBusy { asked: work + pixels, used: staging.used(), total: staging.limit() };
    let _next = timeout_at(deadline, app.studio.next.lock()).await.map_err(busy)?;
    loop {
        let all = || {
            let work = staging.reserve(work)?;
            let pixels = media.iter().map(|medium| staging.reserve(medium.pixel_bytes)).collect::<Result<_, _>>()?;
            Ok(Room { pixels, work })
        };
        match all() {
            Err(MediaError::StagingBusy { .. }) if Instant::now() < deadline => sleep(LOOK).await,
            result => return result,
        }
    }
}

fn item(medium: Measured, staged: Staged, limits: &ImageLimits) -> Result<MediaItem, (String, MediaError)> {
    match pixels(&medium, limits) {
        Ok(frames) => {
            let pixels = Arc::new(Pixels { frames, staged });
            let Measured { key, shape, grid, first, seconds, .. } = medium;
            Ok(MediaItem { key, shape, grid, first, seconds, pixels })
        }
        Err(error) => Err((medium.param, error)),
    }
}

fn pixels(medium: &Measured, limits: &ImageLimits) -> Result<Vec<Rgb>, MediaError> {
    let fitted = |picture: &Rgb| {
        let mut picture = resize(picture, medium.size);
        picture.data.shrink_to_fit();
        picture
    };
    match &medium.frames {
        None => medium.files.iter().map(|file| Ok(fitted(&decode(file, limits)?))).collect(),
        Some(indices) => {
            let mut taken = Vec::with_capacity(indices.len());
            frames(&medium.files[0], indices, limits, |frame| taken.push(fitted(frame)))?;
            Ok(taken)
        }
    }
}
