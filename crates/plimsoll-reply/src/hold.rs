//! The limit of text held back until its meaning is known.

/// Most bytes that a parser of one reply holds back. Beyond it an incomplete call head or value is text.
pub const HELD_BYTES_MAX: usize = 64 << 10;

/// Adds a character to held text of less than [`HELD_BYTES_MAX`] bytes. Its capacity stays within that limit.
pub(crate) fn hold(held: &mut String, c: char) {
    if held.capacity() - held.len() < c.len_utf8() {
        let more = held.len().min(HELD_BYTES_MAX - held.len());
        held.reserve_exact(more.max(32));
    }
    held.push(c);
}
