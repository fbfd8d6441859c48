//! Protections that a test may take away, to show that the exhibit of the museum they stand behind fails without them.
//!
//! `MUSEUM_BROKEN=T-31,V-F` takes those away that carry these ids. It is read once, and only where assertions are on and the
//! feature `fault-injection` is, which nothing but tests switches on; in a release the answer is `false` at compile time.

/// Whether a test has taken away what keeps the failure `id` of the catalogue out.
#[cfg(all(debug_assertions, any(test, feature = "fault-injection")))]
pub fn broken(id: &str) -> bool {
    use std::sync::OnceLock;

    static IDS: OnceLock<Vec<String>> = OnceLock::new();
    let read = || std::env::var("MUSEUM_BROKEN").unwrap_or_default().split(',').map(str::to_owned).collect();
    IDS.get_or_init(read).iter().any(|known| known == id)
}

/// Whether a test has taken away what keeps the failure `id` of the catalogue out; no.
#[cfg(not(all(debug_assertions, any(test, feature = "fault-injection"))))]
#[inline(always)]
pub fn broken(_id: &str) -> bool {
    false
}
