//! The sum of amounts that are pinned until a minute. Amounts that end in the same minute are one number, so no list is needed.

/// The most minutes ahead that an amount can be pinned; a power of two.
const MINUTES: u32 = 64;

/// Amounts, by the minute in which they end.
#[derive(Debug)]
pub struct Expiring {
    now: u32,
    ends: [u64; MINUTES as usize],
    total: u64,
}

impl Default for Expiring {
    fn default() -> Self {
        Self { now: 0, ends: [0; MINUTES as usize], total: 0 }
    }
}

impl Expiring {
    /// The end of an amount that is pinned until it is removed.
    pub const NEVER: u32 = u32::MAX;

    /// The sum.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Whether an amount with this end is pinned now.
    pub fn is_pinned(&self, end: u32) -> bool {
        end > self.now
    }

    /// Returns the end of an amount that is pinned for this many whole minutes from now on: about an hour at most.
    pub fn after(&self, minutes: u32) -> u32 {
        self.now + 1 + minutes.min(MINUTES - 2)
    }

    /// Sets the current minute; amounts that have ended leave the sum.
    pub fn advance(&mut self, now: u32) {
        let passed = now.saturating_sub(self.now);
        for end in (self.now + 1..).take(passed.min(MINUTES) as usize) {
            self.total -= std::mem::take(&mut self.ends[(end % MINUTES) as usize]);
        }
        self.now = self.now.max(now);
    }

    /// Adds an amount with an end from [`Self::after`], or [`Self::NEVER`].
    pub fn add(&mut self, end: u32, amount: u64) {
        if self.is_pinned(end) {
            self.total += amount;
            if end != Self::NEVER {
                self.ends[(end % MINUTES) as usize] += amount;
            }
        }
    }

    /// Removes an amount that was added with this end, unless the end has passed.
    pub fn remove(&mut self, end: u32, amount: u64) {
        if self.is_pinned(end) {
            self.total -= amount;
            if end != Self::NEVER {
                self.ends[(end % MINUTES) as usize] -= amount;
            }
        }
    }

    /// Removes all amounts.
    pub fn clear(&mut self) {
        *self = Self { now: self.now, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_end_in_their_minute() {
        let mut pinned = Expiring::default();
        pinned.advance(29_000_000);
        let (five, hour) = (pinned.after(5), pinned.after(60));
        pinned.add(five, 100);
        pinned.add(hour, 10);
        pinned.add(Expiring::NEVER, 1);
        assert_eq!((five, hour, pinned.total()), (29_000_006, 29_000_061, 111));
        pinned.advance(29_000_005);
        assert!(pinned.is_pinned(five) && pinned.total() == 111);
        pinned.advance(29_000_006);
        assert!(!pinned.is_pinned(five) && pinned.total() == 11);
        pinned.remove(five, 100);
        assert_eq!(pinned.total(), 11, "it has ended already");
        pinned.add(five, 100);
        pinned.remove(hour, 4);
        assert_eq!(pinned.total(), 7);
        pinned.advance(29_000_003);
        assert!(!pinned.is_pinned(five), "time does not go back");
        pinned.advance(30_000_000);
        assert_eq!(pinned.total(), 1);
        assert_eq!(pinned.after(1000), 30_000_063);
        pinned.clear();
        assert_eq!((pinned.total(), pinned.is_pinned(30_000_001)), (0, true));
    }
}
