//! Errors of media as a client sees them.

use plimsoll_media::MediaError;

use crate::http::error::ApiError;

/// The processor's option that adds the audio tracks of videos to the input.
pub(super) const TRACKS: &str = "mm_processor_kwargs.use_audio_in_video";

/// The error for a medium at `param`.
pub(super) fn refused(param: &str, error: &MediaError) -> ApiError {
    match error {
        MediaError::StagingBusy { .. } | MediaError::OutputsBusy { .. } => ApiError::unavailable(error.to_string(), 1),
        error if error.is_the_clients() => ApiError::invalid(param, format!("{param}: {error}")),
        error => ApiError::internal(error.to_string()),
    }
}

/// The error for the audio track of a video at `param`.
pub(super) fn track_refused(param: &str, error: &MediaError) -> ApiError {
    let next = format!("this is about the video's audio track; shorten the video, or leave out {TRACKS}");
    match error {
        MediaError::NoAudioTrack => {
            ApiError::invalid(param, format!("{param}: the video has no audio track; leave out {TRACKS}"))
        }
        error if error.is_the_clients() => ApiError::invalid(param, format!("{param}: {error}; {next}")),
        error => refused(param, error),
    }
}
