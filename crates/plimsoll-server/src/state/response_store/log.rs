//! The events of streamed responses in the background, so that a stream can be resumed. They count against the store's
//! bytes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::watch;

use super::{ENTRY_BYTES, ResponseStore, State};

/// The events of a response that has ended are kept for this long, unless other responses need their bytes.
pub(crate) const LOG_KEPT: Duration = Duration::from_secs(300);

/// Heap bytes of an event besides its text, in a list that grew by doubling.
const EVENT_FIXED_BYTES: u64 = 128;

/// Bytes of events that are read at once.
const READ_BYTES_MAX: usize = 16 << 10;

/// Divisor of the store's limit: one log may take half of the store.
const PART_MAX: u64 = 2;

/// The logs, by the ids of their responses.
pub(super) type Logs = HashMap<String, Log>;

#[derive(Debug)]
pub(super) struct Log {
    key: Option<usize>,
    events: Vec<Bytes>,
    /// Bytes of the store that the log holds.
    bytes: u64,
    ended_at: Option<Instant>,
    /// Whether the events did not fit; the log is then empty.
    lost: bool,
    /// The number of events, counting the end of the log as one.
    grown: watch::Sender<u64>,
}

/// Events of a log.
#[derive(Debug)]
pub(crate) struct LogRead {
    /// Whole events.
    pub bytes: Bytes,
    /// The number of the event after these.
    pub next: u64,
    /// Whether no event will follow these.
    pub ended: bool,
    /// Whether the events were dropped.
    pub lost: bool,
    /// Changes when an event is added or the log ends.
    pub grown: watch::Receiver<u64>,
}

impl ResponseStore {
    /// Begins the log of a response.
    pub fn log_begins(&self, id: &str, key: Option<usize>) {
        let mut state = self.state();
        let bytes = 2 * id.len() as u64 + ENTRY_BYTES;
        let lost = !state.make_room(bytes, 0, self.limit);
        let bytes = if lost { 0 } else { bytes };
        state.used += bytes;
        let log = Log { key, events: Vec::new(), bytes, ended_at: None, lost, grown: watch::Sender::new(0) };
        state.logs.insert(id.to_owned(), log);
    }

    /// Adds events to the log of a response.
    pub fn log_add(&self, id: &str, events: &[Bytes]) {
        let mut state = self.state();
        let Some(log) = state.logs.get(id).filter(|log| !log.lost) else { return };
        let more: u64 = events.iter().map(|event| event.len() as u64 + EVENT_FIXED_BYTES).sum();
        let fits = log.bytes + more <= self.limit / PART_MAX && state.make_room(more, 0, self.limit);
        let taken = if fits { more } else { 0 };
        let mut back = 0;
        if let Some(log) = state.logs.get_mut(id) {
            if fits {
                log.events.extend_from_slice(events);
                log.bytes += more;
            } else {
                log.lost = true;
                log.events = Vec::new();
                back = std::mem::take(&mut log.bytes);
            }
            log.grown.send_modify(|count| *count += 1);
        }
        state.used = state.used + taken - back;
        state.logs_lost += u64::from(!fits);
    }

    /// Ends the log of a response: no event follows.
    pub fn log_ends(&self, id: &str) {
        let mut state = self.state();
        if let Some(log) = state.logs.get_mut(id) {
            log.ended_at = Some(Instant::now());
            log.grown.send_modify(|count| *count += 1);
        }
    }

    /// Reads a log of this key from the event with the number `from`. None: there is no log.
    pub fn log_read(&self, id: &str, key: Option<usize>, from: u64) -> Option<LogRead> {
        let mut state = self.state();
        state.expire(Instant::now());
        let log = state.logs.get(id).filter(|log| log.key == key)?;
        let rest = log.events.get(usize::try_from(from).unwrap_or(usize::MAX)..).unwrap_or_default();
        let mut bytes = Vec::new();
        let mut next = from;
        for event in rest {
            if !bytes.is_empty() && bytes.len() + event.len() > READ_BYTES_MAX {
                break;
            }
            bytes.extend_from_slice(event);
            next += 1;
        }
        let ended = log.ended_at.is_some() && next >= log.events.len() as u64;
        Some(LogRead { bytes: bytes.into(), next, ended, lost: log.lost, grown: log.grown.subscribe() })
    }
}

impl State {
    /// Drops logs that have been kept long enough.
    fn expire(&mut self, now: Instant) {
        let mut back = 0;
        self.logs.retain(|_, log| {
            let kept = log.ended_at.is_none_or(|at| now.duration_since(at) < LOG_KEPT);
            back += if kept { 0 } else { log.bytes };
            kept
        });
        self.used -= back;
    }

    /// Drops the log that ended first. Returns false if none has ended.
    pub(super) fn drop_ended_log(&mut self) -> bool {
        let ended = self.logs.iter().filter_map(|(id, log)| Some((log.ended_at?, id.clone())));
        let Some((_, id)) = ended.min() else { return false };
        self.used -= self.logs.remove(&id).map_or(0, |log| log.bytes);
        true
    }

    /// Makes room for more responses and bytes: removes logs that were kept long enough, then responses, then logs of ended responses.
    /// Returns false if the room cannot be made.
    pub(super) fn make_room(&mut self, bytes: u64, responses: usize, limit: u64) -> bool {
        self.expire(Instant::now());
        while self.used + bytes > limit || self.entries.len() + responses > super::MAX_RESPONSES {
            if let Some(oldest) = self.order.first_key_value().map(|(_, id)| id.clone()) {
                self.remove(&oldest);
                self.evicted += 1;
            } else if !self.drop_ended_log() {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kept;
    use super::*;

    fn events(count: usize, bytes: usize) -> Vec<Bytes> {
        (0..count).map(|i| Bytes::from(i.to_string().repeat(bytes))).collect()
    }

    #[test]
    fn logs_live_in_the_bytes_of_the_store() {
        let store = ResponseStore::new(10_500);
        store.insert("a", Kept { items: "x".repeat(5000).into(), response: Bytes::new(), key: None });
        store.log_begins("b", Some(1));
        store.log_add("b", &events(3, 100));
        assert!(store.log_read("b", None, 0).is_none(), "another key's");
        let read = store.log_read("b", Some(1), 1).unwrap();
        assert_eq!((read.bytes.len(), read.next, read.ended, read.lost), (200, 3, false, false));
        let used = store.usage().bytes;
        // A growing log evicts a stored response.
        store.log_add("b", &events(9, 300));
        assert!(store.get("a", None).is_none() && store.usage().evicted == 1);
        assert_eq!(store.usage().bytes, used - (2 + 5000 + ENTRY_BYTES) + 9 * (300 + EVENT_FIXED_BYTES));
        // A log that is too long is lost. A response that needs its bytes drops an ended log.
        store.log_add("b", &events(9, 100));
        let read = store.log_read("b", Some(1), 3).unwrap();
        assert!(read.lost && read.bytes.is_empty() && !read.ended);
        assert_eq!((store.usage().bytes, store.usage().logs_lost), (0, 1));
        store.log_begins("c", None);
        store.log_add("c", &events(2, 1000));
        let full = Kept { items: "x".repeat(9000).into(), response: Bytes::new(), key: None };
        store.insert("d", full.clone());
        assert!(store.get("d", None).is_none(), "a log that still grows stays");
        store.log_ends("c");
        assert!(store.log_read("c", None, 2).unwrap().ended);
        store.insert("d", full);
        assert!(store.get("d", None).is_some() && store.log_read("c", None, 0).is_none());
        store.remove("d", None);
        assert_eq!(store.usage().bytes, 0);
    }

    #[test]
    fn long_logs_are_read_in_parts_and_expire() {
        let store = ResponseStore::new(1 << 20);
        store.log_begins("a", None);
        store.log_add("a", &events(9, 10_000));
        let (mut next, mut reads, mut bytes) = (0, 0, 0);
        while next < 9 {
            let read = store.log_read("a", None, next).unwrap();
            assert!(read.bytes.len() <= READ_BYTES_MAX.max(10_000));
            (next, reads, bytes) = (read.next, reads + 1, bytes + read.bytes.len());
        }
        assert_eq!((reads, bytes), (9, 90_000));
        store.log_ends("a");
        store.state().expire(Instant::now() + LOG_KEPT);
        assert!(store.log_read("a", None, 0).is_none() && store.usage().bytes == 0);
    }
}
