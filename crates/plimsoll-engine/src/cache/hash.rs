//! The hash step that the prefix tree and the KV event log share.

/// The two halves of a 128-bit product, folded: every input bit reaches every output bit.
pub(super) fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}
