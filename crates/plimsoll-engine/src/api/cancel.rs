//! A flag that cancels a start that is no longer needed. The start checks it between two tensors and between two
//! steps of the memory self-test. The current tensor or step always completes, so nothing is left half done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use plimsoll_device::DeviceError;

/// The flag, shared by the start and the part that cancels it. The default can never be set.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Option<Arc<AtomicBool>>);

impl Cancel {
    /// A flag that can be set.
    pub fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// Sets the flag. It cannot be cleared.
    pub fn cancel(&self) {
        self.0.iter().for_each(|word| word.store(true, Ordering::Release));
    }

    /// Whether the flag is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|word| word.load(Ordering::Acquire))
    }

    /// [`DeviceError::Stopped`] once the flag is set.
    pub(crate) fn checkpoint(&self) -> Result<(), DeviceError> {
        if self.is_cancelled() { Err(DeviceError::Stopped) } else { Ok(()) }
    }
}
