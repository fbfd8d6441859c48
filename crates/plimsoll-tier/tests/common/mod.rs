//! Blobs of three sizes, and a store that holds few of them.

use plimsoll_tier::{Limits, Miss, Name, Store};

/// Room for few blobs.
pub const LIMITS: Limits = Limits { bytes: 8 * 4096, entries: 5, write_bytes_per_day: Some(1 << 20) };

/// A name of a blob, in one of two folders.
pub fn name(n: u8) -> Name {
    let mut name = [n; 32];
    // Two directories.
    name[8] = n % 2;
    name
}

/// Blobs of one to three blocks.
pub fn blob(n: u8) -> Vec<u8> {
    (0..3000 * (1 + usize::from(n) % 3)).map(|i| (i as u8).wrapping_mul(n | 1)).collect()
}

/// Returns why a blob is not read; None if it is read.
pub fn read(store: &Store, n: u8) -> Option<Miss> {
    let mut payload = vec![0; blob(n).len()];
    let outcome = store.get(&name(n), &mut payload);
    assert!(outcome.is_err() || payload == blob(n), "blob {n} was read and is another one");
    outcome.err()
}
