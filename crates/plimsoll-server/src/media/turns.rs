//! Turns of fetches: so many at once, first come, first served, and of one host's name no more than its share. So a slow host holds up
//! those who ask for it, and nobody else. It is no defence against a client who has many names at hand: that one can have all turns, for
//! as long as a fetch may take, and the others are told to come again.

use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Files that are fetched at once.
pub(super) const FETCHES: usize = 16;

/// Of these, files of one host.
pub(super) const FETCHES_OF_A_HOST: usize = 4;

/// Who has a turn and who waits for one.
#[derive(Default)]
pub(crate) struct Turns(Arc<Inner>);

#[derive(Default)]
struct Inner {
    hashes: RandomState,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// A hash of the host of each turn: never more than [`FETCHES`]. Hosts whose hashes are equal share a share.
    held: Vec<u64>,
    /// In the order in which they came: no more than there are requests.
    line: VecDeque<InLine>,
}

/// One who waits.
struct InLine {
    host: u64,
    /// Closed where nobody waits any more.
    given: oneshot::Sender<Turn>,
}

/// One turn; over when it is dropped.
pub(super) struct Turn {
    turns: Arc<Inner>,
    host: u64,
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // Two lists are whole whoever panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the turns that there are to those who have waited longest and whose host has not its share yet.
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
            // Whoever has gone in this very moment drops it, which gives it to the next.
            let _ = given.send(Turn { turns: Arc::clone(self), host });
        }
    }
}

impl Turns {
    /// Waits until a file of `host` may be fetched. Cancel-safe.
    pub(super) async fn take(&self, host: &str) -> Turn {
        let turns = &self.0;
        let host = turns.hashes.hash_one(host.to_ascii_lowercase());
        loop {
            let (given, turn) = oneshot::channel();
            turns.state().line.push_back(InLine { host, given });
            turns.give();
            // The line lets go of nobody who waits.
            if let Ok(turn) = turn.await {
                return turn;
            }
        }
    }

    /// Turns that are taken, and fetches that wait for one.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.0.state();
        (state.held.len(), state.line.iter().filter(|waiting| !waiting.given.is_closed()).count())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        if let Some(at) = state.held.iter().position(|held| *held == self.host) {
            state.held.swap_remove(at);
        }
        drop(state);
        self.turns.give();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn a_slow_host_holds_up_itself_and_nobody_else() {
        let turns = Turns::default();
        let mut slow = Vec::new();
        for _ in 0..FETCHES_OF_A_HOST {
            slow.push(turns.take("slow.example").await);
        }
        assert!(timeout(SOON, turns.take("SLOW.example")).await.is_err(), "it has its share");
        assert_eq!(turns.counts(), (FETCHES_OF_A_HOST, 0), "who stops waiting leaves nothing behind");
        let mut others = Vec::new();
        for i in 0..FETCHES - FETCHES_OF_A_HOST {
            let turn = timeout(SOON, turns.take(&format!("host-{i}.example"))).await;
            others.push(turn.expect("there is room for others"));
        }
        assert_eq!(turns.counts(), (FETCHES, 0));
        let late = turns.take("late.example");
        tokio::pin!(late);
        assert!(timeout(SOON, &mut late).await.is_err(), "all turns are taken");
        assert_eq!(turns.counts(), (FETCHES, 1));
        drop(slow.pop());
        let late = timeout(SOON, late).await.expect("it is its turn");
        assert_eq!(turns.counts(), (FETCHES, 0));
        drop((late, slow, others));
        assert_eq!(turns.counts(), (0, 0));
    }

    #[tokio::test]
    async fn who_came_first_is_served_first() {
        let turns = Turns::default();
        let mut held = Vec::new();
        for i in 0..FETCHES {
            held.push(turns.take(&format!("host-{}.example", i % 4)).await);
        }
        // In line: of a host that has its share, then two others.
        let blocked = turns.take("host-0.example");
        let early = turns.take("early.example");
        let gone = turns.take("gone.example");
        tokio::pin!(blocked, early);
        assert!(timeout(SOON, &mut blocked).await.is_err());
        assert!(timeout(SOON, &mut early).await.is_err());
        assert!(timeout(SOON, gone).await.is_err());
        assert_eq!(turns.counts(), (FETCHES, 2));
        // A newcomer looks in the very moment in which a turn is over, before anybody who waits has run.
        drop(held.pop());
        assert!(timeout(SOON, turns.take("newcomer.example")).await.is_err(), "another was first");
        let early = timeout(SOON, early).await.expect("it waited longest of those who may");
        assert!(timeout(SOON, &mut blocked).await.is_err(), "its host has its share");
        drop(held.swap_remove(0));
        let blocked = timeout(SOON, blocked).await.expect("one of its host's is over");
        drop((held, early, blocked));
        assert_eq!(turns.counts(), (0, 0));
        assert!(turns.0.state().line.is_empty());
    }
}
