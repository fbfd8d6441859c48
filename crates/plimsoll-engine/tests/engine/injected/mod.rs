//! Injected faults: for every n, the n-th allocation is refused or the n-th passage of a site panics. At most one request ends with an
//! error. No other request changes, nothing leaks, and the engine continues to serve.
//!
//! Faults and the counted heap belong to the process, so each test runs in a separate process.

mod images;
mod kernels;
mod life;
mod lost;
mod memory;
mod panics;
mod residence;
mod starts;

use std::time::{Duration, Instant};

use plimsoll_memory::heap;

/// Keeps panics that were asked for out of the log.
fn hide_injected_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let words = info.payload_as_str().unwrap_or_default();
        if !words.starts_with("injected") && !words.contains("kernel panicked") && !words.contains("of a matrix") {
            usual(info);
        }
    }));
}

/// Waits until all blocks of the emergency reserve are mapped again.
fn whole_reserve() {
    let deadline = Instant::now() + Duration::from_secs(10);
    while heap::reserve_blocks_missing() > 0 {
        assert!(
            Instant::now() < deadline,
            "{} blocks of the emergency reserve do not come back",
            heap::reserve_blocks_missing()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}
