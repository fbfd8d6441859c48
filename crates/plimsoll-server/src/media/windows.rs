//! A long audio clip that goes to the engine window by window.
//!
//! The clip's file, its decoder and the memory for two windows (the one that the engine still has, and the next) stay reserved until the
//! clip is dropped. All of it is reserved at once, so a clip never waits for memory while it holds some.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_engine::{Grid, MediaItem, Pixels};
use plimsoll_media::audio::LongClip;
use plimsoll_media::{ContentKey, MediaError, Modality, Shape, Staged};

use super::decode::{Wanted, decoder};
use super::measure::{Measured, audio_limits};
use super::medium::Windowing;
use super::refused::refused;
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, cut};
use crate::state::model::ModelState;
use crate::state::server::{ServerPhase, reached};

/// A clip and its reading state.
pub(crate) struct ClipWindows {
    state: Arc<ModelState>,
    param: String,
    key: ContentKey,
    shape: Shape,
    grid: Grid,
    /// Frames of the whole clip.
    pub frames: u64,
    reserved: Arc<Staged>,
    /// None while a thread reads from it.
    clip: Option<Box<Open>>,
    wanted: Wanted,
}

/// A clip with its file's share of the byte budget.
struct Open {
    clip: LongClip,
    _file: Option<Held>,
}

impl ClipWindows {
    /// Reserves memory, and reads the clip once in search of its loudest value. `file` is the file's share of the byte budget. Dropping the
    /// future ends the reading.
    pub async fn open(state: &Arc<ModelState>, medium: Measured, file: Option<Held>) -> ApiResult<Self> {
        let (Some(audio), Some(budget), Some(header)) =
            (state.audio().cloned(), &state.media_pipeline.decode_budget, medium.windowed)
        else {
            return Err(ApiError::internal("internal error: a long audio clip reached a model that takes none"));
        };
        let Measured { param, key, shape, grid, clip_frames, decode_bytes, pixel_bytes, mut files, .. } = medium;
        let waiting = state.server.config.media.room_timeout;
        let mut phase = state.server.phase.subscribe();
        let room = tokio::select! {
            biased;
            room = budget.take(decode_bytes + 2 * pixel_bytes, &[], waiting) => room.map_err(|error| refused(&param, &error))?,
            () = reached(&mut phase, ServerPhase::Cut) => return Err(cut()),
        };
        let reserved = Arc::new(room.work);
        let limits = audio_limits(&audio, &state.server.config.media, Windowing::Always);
        let bytes = files.pop().unwrap_or_default();
        let (wanted, kept) = (Wanted::default(), Arc::clone(&reserved));
        let (stop, frames) = (wanted.stop(), grid.patches());
        let read = move || {
            let _kept = kept;
            let clip = LongClip::open(bytes, &header, &limits, &audio.mel, frames, &stop)?;
            Ok(Box::new(Open { clip, _file: file }))
        };
        let own = Arc::clone(state);
        let clip = Some(on_decoder(&own, &param, Some(waiting), read).await?);
        Ok(Self { state: own, param, key, shape, grid, frames: clip_frames, reserved, clip, wanted })
    }

    /// Returns the window that begins at the frame `first`, as an item at the beginning of its prompt.
    pub async fn window(&mut self, first: u64) -> ApiResult<MediaItem> {
        let gone = || ApiError::internal("internal error: an audio clip is read after it has failed");
        let mut open = self.clip.take().ok_or_else(gone)?;
        let audio = self.state.audio().ok_or_else(gone)?;
        let count = self.grid.patches() * audio.mel.bands();
        let (stop, kept) = (self.wanted.stop(), Arc::clone(&self.reserved));
        let read = move || {
            let mut values = vec![0.0; count];
            let done = open.clip.window(first, &mut values, &stop);
            mem::drop(kept);
            done.map(|()| (open, values))
        };
        let (open, spectrogram) = on_decoder(&self.state, &self.param, None, read).await?;
        self.clip = Some(open);
        self.state.media_pipeline.counts.windows.inc();
        let place = format!("a window of {} frames from {first} on", self.grid.patches());
        let pixels = Pixels { frames: Vec::new(), spectrogram, staged: Arc::clone(&self.reserved) };
        Ok(MediaItem {
            key: ContentKey::of(Modality::Audio, &place, self.key.as_bytes()),
            shape: self.shape,
            grid: self.grid,
            first: 0,
            seconds: None,
            of_video: false,
            pixels: Arc::new(pixels),
        })
    }
}

/// Runs `read` on a blocking thread, once a decoder is free. `patience`: the longest wait for a decoder; none for a clip that has begun,
/// which waits without a limit.
async fn on_decoder<T: Send + 'static>(
    state: &Arc<ModelState>,
    param: &str,
    patience: Option<Duration>,
    read: impl FnOnce() -> Result<T, MediaError> + Send + 'static,
) -> ApiResult<T> {
    let mut phase = state.server.phase.subscribe();
    let work = async {
        let decoder = decoder(state, Modality::Audio, patience).await?;
        let reading = tokio::task::spawn_blocking(move || {
            // Held until the thread has ended, also if the client has disconnected.
            let _own = decoder;
            read()
        });
        reading.await.map_err(|_| state.server.panicked("decoding an audio input"))?.map_err(|error| {
            state.media_pipeline.counts.refused.inc();
            refused(param, &error)
        })
    };
    tokio::select! {
        biased;
        done = work => done,
        () = reached(&mut phase, ServerPhase::Cut) => Err(cut()),
    }
}
