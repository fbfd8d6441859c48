//! The step arena's bookkeeping: offsets with stack discipline, and the high-water mark.
//!
//! Temporaries of one forward step are taken in order and given back in scopes. The peak is therefore a property of the code that runs, not
//! of an allocator. The planner runs the same code over the same bookkeeping without memory behind it, so its numbers are exact.

use thiserror::Error;

/// Alignment of every temporary: a cache line of 64 bytes, which is also the width of the widest vector.
pub const ALIGN: usize = 64;

/// A step asked for more than its arena holds.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("step workspace: {needed} bytes needed, {capacity} planned")]
pub struct StepOverflow {
    /// Bytes that would be in use.
    pub needed: usize,
    /// Bytes planned.
    pub capacity: usize,
}

/// A position to return to; see [`StepStack::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(usize);

/// Stack-wise offsets into a step arena of a fixed capacity.
#[derive(Clone, Debug)]
pub struct StepStack {
    capacity: usize,
    top: usize,
    high_water: usize,
}

impl StepStack {
    /// A stack over `capacity` bytes. The planner uses `usize::MAX`.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, top: 0, high_water: 0 }
    }

    /// Takes `bytes`, rounded up to whole cache lines. Returns the offset of the first byte.
    pub fn take(&mut self, bytes: usize) -> Result<usize, StepOverflow> {
        let offset = self.top;
        let top = bytes.checked_next_multiple_of(ALIGN).and_then(|b| offset.checked_add(b)).unwrap_or(usize::MAX);
        if top > self.capacity {
            return Err(StepOverflow { needed: top, capacity: self.capacity });
        }
        self.top = top;
        self.high_water = self.high_water.max(top);
        Ok(offset)
    }

    /// Returns the current top of the stack.
    pub fn mark(&self) -> Mark {
        Mark(self.top)
    }

    /// Gives back everything that was taken since `mark`.
    pub fn release(&mut self, mark: Mark) {
        debug_assert!(mark.0 <= self.top, "released out of order");
        self.top = mark.0;
    }

    /// The most bytes that were ever in use.
    pub fn high_water(&self) -> usize {
        self.high_water
    }

    /// Starts over: nothing taken, the high-water mark kept.
    pub fn clear(&mut self) {
        self.top = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_overlay_and_the_peak_is_remembered() {
        let mut stack = StepStack::new(1024);
        let scope = stack.mark();
        assert_eq!(stack.take(1), Ok(0));
        assert_eq!(stack.take(100), Ok(64));
        stack.release(scope);
        assert_eq!(stack.take(64), Ok(0));
        assert_eq!(stack.high_water(), 192);
    }

    #[test]
    fn an_overflow_is_an_error_and_takes_nothing() {
        let mut stack = StepStack::new(128);
        assert!(stack.take(129).is_err());
        assert!(stack.take(usize::MAX).is_err());
        assert_eq!(stack.take(128), Ok(0));
    }
}
