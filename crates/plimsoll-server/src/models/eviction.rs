//! Makes room for a model: chooses the models to unload, and unloads them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_memory::Bytes;

use super::Registry;
use super::load::RETRY_AFTER_S;
use super::slot::State;
use crate::http::error::{ApiError, ApiResult};

impl Registry {
    /// Unloads idle models until `needed` bytes are free, those idle for longest first. No model is unloaded if that would not free enough.
    pub(super) async fn make_room(&self, index: usize, needed: u64) -> ApiResult<()> {
        loop {
            let room = self.loader.room();
            if needed <= room {
                return Ok(());
            }
            let (mut idle, mut busy) = (Vec::new(), Vec::new());
            for (other, slot) in self.slots.iter().enumerate() {
                let inner = slot.inner();
                let (State::Loaded(_), Some(planned)) = (&inner.state, inner.needed) else { continue };
                if inner.users == 0 {
                    idle.push((inner.used, other, planned));
                } else {
                    busy.push(format!("`{}` ({})", slot.name(), Bytes(planned)));
                }
            }
            let gain: u64 = idle.iter().map(|(.., planned)| planned).sum();
            let Some(goes) = first_to_go(idle, needed - room) else {
                let name = self.slots[index].name();
                let users = if busy.is_empty() { "others".into() } else { busy.join(", ") };
                let message = format!(
                    "`{name}` needs {}, of which {} are left under the memory limit while {users} are in use; try again later",
                    Bytes(needed),
                    Bytes(room + gain)
                );
                return Err(ApiError {
                    code: Some("model_has_no_room"),
                    ..ApiError::unavailable(message, RETRY_AFTER_S)
                });
            };
            self.unload(goes, None).await;
        }
    }

    /// Returns whether a model has been idle for its `idle_after`.
    pub(super) fn idle_too_long(&self, index: usize) -> bool {
        let slot = &self.slots[index];
        let inner = slot.inner();
        let idle = matches!(inner.state, State::Loaded(_)) && inner.users == 0;
        idle && slot.listed.idle_after.is_some_and(|after| inner.used.elapsed() >= after)
    }

    /// Unloads a model unless a request uses it or has used it within `idle`. The caller holds [`Registry::turn`].
    pub(super) async fn unload(&self, index: usize, idle: Option<Duration>) {
        let slot = &self.slots[index];
        let engine = {
            let mut inner = slot.inner();
            let used = inner.users > 0 || idle.is_some_and(|idle| inner.used.elapsed() < idle);
            let State::Loaded(loaded) = &inner.state else { return };
            if used {
                return;
            }
            let engine = loaded.state.served.engine.clone();
            inner.state = State::Unloading;
            engine
        };
        let loader = Arc::clone(&self.loader);
        let gone = tokio::task::spawn_blocking(move || loader.unload(engine)).await;
        if matches!(gone, Ok(true)) {
            tracing::info!(model = slot.name(), "unloaded");
            self.server.metrics.models.unloaded.inc();
        } else {
            tracing::error!(model = slot.name(), "the engine has not ended; its room is not free until it has");
        }
        slot.inner().state = State::Unloaded;
    }
}

/// Returns the model to unload first so that `missing` bytes become free. `idle`: the start of each model's idle time, its index and its
/// bytes. Takes the models idle for longest that are enough together, leaves out those that are not needed, and returns the oldest of the
/// rest. None where all models together are not enough.
fn first_to_go(mut idle: Vec<(Instant, usize, u64)>, missing: u64) -> Option<usize> {
    idle.sort_unstable();
    let mut gain = 0;
    let enough = idle.iter().position(|(.., planned)| {
        gain += planned;
        gain >= missing
    });
    idle.truncate(enough? + 1);
    // Models that are not needed stay loaded. The last used one is checked first.
    for at in (0..idle.len()).rev() {
        if gain - idle[at].2 >= missing {
            gain -= idle.remove(at).2;
        }
    }
    idle.first().map(|(_, index, _)| *index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_entries_are_evicted_and_only_if_it_helps() {
        let now = Instant::now();
        let idle = |sizes: &[u64]| {
            let ages = sizes.iter().enumerate();
            ages.map(|(i, size)| (now + Duration::from_secs(i as u64), i, *size)).collect::<Vec<_>>()
        };
        for (sizes, missing, goes) in [
            (&[4, 5][..], 4, Some(0)),
            (&[4, 5], 5, Some(1)),
            (&[4, 5], 6, Some(0)),
            (&[4, 5], 9, Some(0)),
            (&[4, 5], 10, None),
            (&[1, 1, 6, 9], 6, Some(2)),
            (&[], 1, None),
        ] {
            assert_eq!(first_to_go(idle(sizes), missing), goes, "{sizes:?} {missing}");
        }
    }
}
