//! Responses that are made without a connection (`background: true`): how many at once, and their end at shutdown.

use std::any::Any;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::http::error::{ApiError, ApiResult};

/// The most responses that may be made in the background at once.
pub(crate) const BACKGROUND_MAX: u32 = 16;

/// The permits of responses in the background.
pub(crate) struct Background(Arc<Semaphore>);

impl Background {
    pub fn new() -> Self {
        Self(Arc::new(Semaphore::new(BACKGROUND_MAX as usize)))
    }

    /// Takes the permit for one response.
    pub fn take(&self) -> ApiResult<OwnedSemaphorePermit> {
        Arc::clone(&self.0).try_acquire_owned().map_err(|_| {
            let message = format!(
                "{BACKGROUND_MAX} responses are made in the background, which is the limit; try again later, or without background"
            );
            ApiError::unavailable(message, 5)
        })
    }

    /// The number of responses that are being made in the background.
    pub fn running(&self) -> u64 {
        u64::from(BACKGROUND_MAX).saturating_sub(self.0.available_permits() as u64)
    }

    /// Waits until no response is being made in the background.
    pub async fn idle(&self) {
        // The semaphore is never closed.
        let _ = self.0.acquire_many(BACKGROUND_MAX).await;
    }
}

/// A use of a model, on a server with several models: the model stays loaded while this value lives.
#[derive(Clone)]
pub(crate) struct ModelUse(#[expect(dead_code, reason = "it is held, not read")] pub Arc<dyn Any + Send + Sync>);
