//! Names in paths.

use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;

use crate::http::error::{ApiError, quote};

/// The name in the last variable part of a path. A part that is not UTF-8 is refused in the same form as every other error.
pub(crate) struct Name(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(name) = Path::<String>::from_request_parts(parts, state).await.map_err(|_| {
            let message = format!("{} is not valid UTF-8", quote(parts.uri.path()));
            ApiError { code: Some("invalid_path"), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
        })?;
        Ok(Self(name))
    }
}
