//! A stream of bytes cut into server-sent events. Lines end with a line feed, or all with a carriage return before it.

/// The bytes that have arrived and are not a complete event yet.
#[derive(Debug, Default)]
pub struct Events {
    pending: Vec<u8>,
    /// Bytes at the beginning that hold no end of an event. They are not searched again when more bytes arrive.
    searched: usize,
}

impl Events {
    /// Appends bytes that have arrived.
    pub fn push(&mut self, piece: &[u8]) {
        self.pending.extend_from_slice(piece);
    }

    /// Returns the number of bytes that are not a complete event yet.
    pub fn waiting(&self) -> usize {
        self.pending.len()
    }

    /// Takes the bytes that are left.
    pub fn take_rest(&mut self) -> Vec<u8> {
        self.searched = 0;
        std::mem::take(&mut self.pending)
    }

    /// Takes the data of the first complete event; none if there is no complete event. Comments are skipped.
    pub fn pop(&mut self) -> Option<String> {
        let mut begin = 0;
        let data = loop {
            let Some((end, gap)) = self.end_of_block(begin) else { break None };
            let block = String::from_utf8_lossy(&self.pending[begin..end]);
            begin = end + gap;
            if let Some(data) = data_of(&block) {
                break Some(data);
            }
        };
        self.pending.drain(..begin);
        // The last three bytes may belong to an end that is still incomplete.
        self.searched = if data.is_some() { 0 } else { self.pending.len().saturating_sub(3) };
        data
    }

    /// Returns the end of the block that begins at `begin`, and the length of its terminator.
    fn end_of_block(&self, begin: usize) -> Option<(usize, usize)> {
        let from = begin.max(self.searched);
        let feeds = |at: usize| match &self.pending[at..] {
            [b'\n', b'\n', ..] => Some((at, 2)),
            [b'\r', b'\n', b'\r', b'\n', ..] => Some((at, 4)),
            _ => None,
        };
        (from..self.pending.len()).find_map(feeds)
    }
}

/// Returns the `data:` lines of a block, joined; none when it has none.
fn data_of(block: &str) -> Option<String> {
    let data = block.lines().filter_map(|line| line.strip_prefix("data:"));
    let lines: Vec<&str> = data.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::Events;

    #[test]
    fn events_are_cut_at_empty_lines_wherever_pieces_end() {
        let text = "data: one\n\n: note\n\ndata: two\ndata: three\r\n\r\ndata: [DONE]\n\n";
        let mut cut = Events::default();
        let mut events = Vec::new();
        for byte in text.bytes() {
            cut.push(&[byte]);
            events.extend(std::iter::from_fn(|| cut.pop()));
        }
        assert_eq!(events, ["one", "two\nthree", "[DONE]"]);
        assert_eq!(cut.waiting(), 0);
    }

    #[test]
    fn a_long_event_is_searched_once() {
        let mut cut = Events::default();
        let begun = std::time::Instant::now();
        for _ in 0..20_000 {
            cut.push(b"data: 0123456789012345678901234567890123456789\n");
            assert_eq!(cut.pop(), None);
        }
        cut.push(b"\n");
        assert_eq!(cut.pop().map(|data| data.len()), Some(20_000 * 41 - 1));
        // If every piece caused a new search from the start, this would take minutes.
        assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
    }
}
