//! A word that ends a start which nobody waits for any more. It is looked at between two tensors and between two steps of the proof: what
//! has begun ends by itself, so nothing is left half done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use plimsoll_device::DeviceError;

/// The word, for whoever says it and whoever looks for it. The default is one that nobody can say.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Option<Arc<AtomicBool>>);

impl Cancel {
    /// One that can be said.
    pub fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// Says it. There is no way back.
    pub fn cancel(&self) {
        self.0.iter().for_each(|word| word.store(true, Ordering::Release));
    }

    /// Whether it was said.
    pub fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|word| word.load(Ordering::Acquire))
    }

    /// [`DeviceError::Stopped`] once it was said.
    pub(crate) fn checkpoint(&self) -> Result<(), DeviceError> {
        if self.is_cancelled() { Err(DeviceError::Stopped) } else { Ok(()) }
    }
}
