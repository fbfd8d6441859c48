//! The limit on text that a parser holds back, and the buffer that grows no further.

/// The most bytes that one reply's parser holds back: a call whose head, or a value whose end, has not come by then is
/// text.
pub const HELD_BYTES_MAX: usize = 64 << 10;

/// Adds to what is held back, less than [`HELD_BYTES_MAX`] so far. Its room grows no further than that.
pub(crate) fn hold(held: &mut String, c: char) {
    if held.capacity() - held.len() < c.len_utf8() {
        let more = held.len().min(HELD_BYTES_MAX - held.len());
        held.reserve_exact(more.max(32));
    }
    held.push(c);
}
