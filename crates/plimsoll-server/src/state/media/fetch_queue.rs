//! Limits on concurrent fetches, in total and for each host name. Waiting fetches start in order of arrival. A slow host thus delays only
//! the requests for its own files.
//!
//! This is no defence against a client with many host names. Such a client can take all turns for as long as a fetch
//! may last. Other clients are then told to try again later.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The most files that are fetched at once.
pub(crate) const FETCHES: usize = 16;

/// The most files that are fetched at once from one host.
pub(crate) const FETCHES_OF_A_HOST: usize = 4;

/// The fetches that run and the fetches that wait.
#[derive(Default)]
pub(crate) struct FetchQueue(Arc<Inner>);

#[derive(Default)]
struct Inner {
    hashes: RandomState,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// A hash of the host name for each running fetch, at most [`FETCHES`]. Hosts with equal hashes share one limit.
    held: Vec<u64>,
    /// In order of arrival: no more than there are requests.
    line: VecDeque<InLine>,
}

/// A waiting fetch.
struct InLine {
    host: u64,
    /// Closed when the fetch has stopped waiting.
    given: oneshot::Sender<FetchPermit>,
}

/// The permit for one fetch, given back on drop.
pub(crate) struct FetchPermit {
    fetch_queue: Arc<Inner>,
    host: u64,
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // Both lists stay valid after a panic in any holder of the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives free turns to the longest-waiting fetches, except those of a host at its limit.
    fn give(self: &Arc<Self>) {
        let mut given = Vec::new();
        let mut state = self.state();
        state.line.retain(|waiting| !waiting.given.is_closed());
        let mut at = 0;
        while let Some(host) = state.line.get(at).map(|waiting| waiting.host)
            && state.held.len() < FETCHES
        {
            if state.held.iter().filter(|held| **held == host).count() < FETCHES_OF_A_HOST {
                state.held.push(host);
                given.extend(state.line.remove(at));
            } else {
                at += 1;
            }
        }
        drop(state);
        for InLine { host, given } in given {
            // If this fetch has just stopped waiting, the turn is dropped. Its drop gives it to the next fetch.
            let _ = given.send(FetchPermit { fetch_queue: Arc::clone(self), host });
        }
    }
}

impl FetchQueue {
    /// Waits until a file of `host` may be fetched. Cancel-safe.
    pub(crate) async fn take(&self, host: &str) -> FetchPermit {
        let fetch_queue = &self.0;
        let host = fetch_queue.hashes.hash_one(host.to_ascii_lowercase());
        loop {
            let (given, turn) = oneshot::channel();
            fetch_queue.state().line.push_back(InLine { host, given });
            fetch_queue.give();
            // An error cannot occur: the queue drops no sender while its fetch waits.
            if let Ok(turn) = turn.await {
                return turn;
            }
        }
    }

    /// Returns the number of permits taken, and of fetches that wait for one.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.0.state();
        (state.held.len(), state.line.iter().filter(|waiting| !waiting.given.is_closed()).count())
    }
}

impl Drop for FetchPermit {
    fn drop(&mut self) {
        let mut state = self.fetch_queue.state();
        if let Some(at) = state.held.iter().position(|held| *held == self.host) {
            state.held.swap_remove(at);
        }
        drop(state);
        self.fetch_queue.give();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn slow_host_delays_only_itself() {
        let fetch_queue = FetchQueue::default();
        let mut slow = Vec::new();
        for _ in 0..FETCHES_OF_A_HOST {
            slow.push(fetch_queue.take("slow.example").await);
        }
        assert!(timeout(SOON, fetch_queue.take("SLOW.example")).await.is_err(), "it has its share");
        assert_eq!(fetch_queue.counts(), (FETCHES_OF_A_HOST, 0), "who stops waiting leaves nothing behind");
        let mut others = Vec::new();
        for i in 0..FETCHES - FETCHES_OF_A_HOST {
            let turn = timeout(SOON, fetch_queue.take(&format!("host-{i}.example"))).await;
            others.push(turn.expect("there is room for others"));
        }
        assert_eq!(fetch_queue.counts(), (FETCHES, 0));
        let late = fetch_queue.take("late.example");
        tokio::pin!(late);
        assert!(timeout(SOON, &mut late).await.is_err(), "all turns are taken");
        assert_eq!(fetch_queue.counts(), (FETCHES, 1));
        drop(slow.pop());
        let late = timeout(SOON, late).await.expect("it is its turn");
        assert_eq!(fetch_queue.counts(), (FETCHES, 0));
        drop((late, slow, others));
        assert_eq!(fetch_queue.counts(), (0, 0));
    }

    #[tokio::test]
    async fn first_request_is_served_first() {
        let fetch_queue = FetchQueue::default();
        let mut held = Vec::new();
        for i in 0..FETCHES {
            held.push(fetch_queue.take(&format!("host-{}.example", i % 4)).await);
        }
        // In the queue: a fetch from a host at its limit, then two from other hosts.
        let blocked = fetch_queue.take("host-0.example");
        let early = fetch_queue.take("early.example");
        let gone = fetch_queue.take("gone.example");
        tokio::pin!(blocked, early);
        assert!(timeout(SOON, &mut blocked).await.is_err());
        assert!(timeout(SOON, &mut early).await.is_err());
        assert!(timeout(SOON, gone).await.is_err());
        assert_eq!(fetch_queue.counts(), (FETCHES, 2));
        // A new fetch asks right after a turn ends, before any waiting fetch has run.
        drop(held.pop());
        assert!(timeout(SOON, fetch_queue.take("newcomer.example")).await.is_err(), "another was first");
        let early = timeout(SOON, early).await.expect("it waited longest of those who may");
        assert!(timeout(SOON, &mut blocked).await.is_err(), "its host has its share");
        drop(held.swap_remove(0));
        let blocked = timeout(SOON, blocked).await.expect("one of its host's is over");
        drop((held, early, blocked));
        assert_eq!(fetch_queue.counts(), (0, 0));
        assert!(fetch_queue.0.state().line.is_empty());
    }
}
