//! Errors of media as a client sees them.

use plimsoll_media::MediaError;

use crate::http::error::ApiError;

/// The error for a medium at `param`.
pub(super) fn refused(param: &str, error: &MediaError) -> ApiError {
    match error {
        MediaError::StagingBusy { .. } | MediaError::OutputsBusy { .. } => ApiError::unavailable(error.to_string(), 1),
        error if error.is_the_clients() => ApiError::invalid(param, format!("{param}: {error}")),
        error => ApiError::internal(error.to_string()),
    }
}
