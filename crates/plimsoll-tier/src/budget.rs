//! Bytes that a store may write in a day, so that it does not wear its disk out. The count survives restarts.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::dir::replace;
use crate::files::Files;

const DAY_SECONDS: u64 = 24 * 60 * 60;
/// The count is saved each time that this part of the day's limit has been written.
const SAVES_A_DAY: u64 = 256;

/// The bytes written on the current day (UTC).
#[derive(Debug)]
pub(crate) struct DayBudget {
    limit: Option<u64>,
    file: PathBuf,
    day: u64,
    written: u64,
    saved: u64,
}

impl DayBudget {
    /// Reads the count of the day; a file that cannot be read counts as nothing written.
    pub fn open(files: &dyn Files, dir: &Path, limit: Option<u64>, now: u64) -> Self {
        let mut budget = Self { limit, file: dir.join("day"), day: now / DAY_SECONDS, written: 0, saved: 0 };
        let mut saved = [0; 16];
        if limit.is_some() && files.read(&budget.file, &mut [&mut saved]).is_ok() {
            let [day, written] = [&saved[..8], &saved[8..]].map(|part| {
                let mut number = [0; 8];
                number.copy_from_slice(part);
                u64::from_le_bytes(number)
            });
            if day == budget.day {
                // Includes the most that can have been written since the count was saved.
                let unsaved = limit.unwrap_or(0) / SAVES_A_DAY;
                (budget.written, budget.saved) = (written.saturating_add(unsaved), written);
            }
        }
        budget
    }

    /// Whether this many bytes may be written now.
    pub fn allows(&mut self, bytes: u64, now: u64) -> bool {
        if now / DAY_SECONDS != self.day {
            (self.day, self.written, self.saved) = (now / DAY_SECONDS, 0, 0);
        }
        self.limit.is_none_or(|limit| self.written.saturating_add(bytes) <= limit)
    }

    /// Counts bytes that were written, or that a failed write may have written.
    pub fn count(&mut self, bytes: u64, files: &dyn Files) {
        self.written += bytes;
        let Some(limit) = self.limit else { return };
        if self.written - self.saved > limit / SAVES_A_DAY {
            self.save(files);
        }
    }

    /// Saves the count. If that fails, a restart begins with an older count.
    pub fn save(&mut self, files: &dyn Files) {
        if self.limit.is_none() || self.written == self.saved {
            return;
        }
        if replace(files, &self.file, &[&self.day.to_le_bytes(), &self.written.to_le_bytes()]).is_ok() {
            self.saved = self.written;
        }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::System;

    #[test]
    fn the_day_s_bytes_are_kept_over_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let now = 20_000 * DAY_SECONDS + 5;
        let mut budget = DayBudget::open(&System, dir.path(), Some(2560), now);
        assert!(budget.allows(2560, now) && !budget.allows(2561, now));
        budget.count(1000, &System);
        budget.save(&System);
        let mut again = DayBudget::open(&System, dir.path(), Some(2560), now);
        assert!(again.allows(1550, now) && !again.allows(1551, now), "10 bytes may not have been saved");
        assert!(again.allows(2560, now + DAY_SECONDS));
        let mut free = DayBudget::open(&System, dir.path(), None, now);
        assert!(free.allows(u64::MAX, now));
    }
}
