//! The bytes that the system's allocator takes for a buffer.

/// Returns the bytes that glibc's allocator takes for a buffer of `bytes`: a header of one word, multiples of 16, never less than 32. Other
/// allocators differ by a few per cent, except for the smallest sizes.
pub const fn chunk_bytes(bytes: usize) -> usize {
    match bytes {
        0 => 0,
        1..=24 => 32,
        _ => (bytes.saturating_add(8)).div_ceil(16).saturating_mul(16),
    }
}

#[cfg(test)]
mod tests {
    use super::chunk_bytes;

    #[test]
    fn chunks_are_what_glibc_says() {
        let sizes = [(0, 0), (1, 32), (24, 32), (25, 48), (40, 48), (41, 64), (4096, 4112), (4104, 4112)];
        for (asked, taken) in sizes {
            assert_eq!(chunk_bytes(asked), taken, "{asked}");
        }
        assert!(chunk_bytes(usize::MAX) > 0, "no overflow");
    }
}
