//! A reader of server-sent events that arrive in pieces.

/// Finds the data of events in bytes that arrive in pieces. The caller bounds the bytes.
#[derive(Debug, Default)]
pub(super) struct EventReader {
    /// A line that has not ended.
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    after_return: bool,
}

impl EventReader {
    /// Reads more. Calls `take` with the data of each whole event, until it returns a value.
    pub fn push<T>(&mut self, bytes: &[u8], mut take: impl FnMut(&[u8]) -> Option<T>) -> Option<T> {
        for &byte in bytes {
            let follows_return = std::mem::take(&mut self.after_return);
            match byte {
                // `\r\n` is one line end.
                b'\n' if follows_return => {}
                b'\n' | b'\r' => {
                    self.after_return = byte == b'\r';
                    if let Some(found) = self.line_ends(&mut take) {
                        return Some(found);
                    }
                }
                byte => self.line.push(byte),
            }
        }
        None
    }

    fn line_ends<T>(&mut self, take: &mut impl FnMut(&[u8]) -> Option<T>) -> Option<T> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            return std::mem::take(&mut self.has_data).then(|| take(&data)).flatten();
        }
        if let Some(value) = line.strip_prefix(b"data") {
            let value = value.strip_prefix(b":").unwrap_or(value);
            if std::mem::replace(&mut self.has_data, true) {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_events_is_found_however_the_bytes_are_cut() {
        let text = b": hello\r\nevent: message\r\nid: 1\r\ndata: {\"a\":\r\ndata: 1}\r\n\r\n\r\nretry: 5\n\ndata:x\n\ndata: cut";
        for step in 1..text.len() {
            let (mut reader, mut all) = (EventReader::default(), Vec::new());
            for piece in text.chunks(step) {
                let none = reader.push(piece, |data| {
                    all.push(String::from_utf8(data.to_vec()).unwrap());
                    None::<()>
                });
                assert!(none.is_none());
            }
            assert_eq!(all, ["{\"a\":\n1}", "x"], "{step}");
        }
        let first = EventReader::default().push(b"data: 1\n\ndata: 2\n\n", |data| Some(data.to_vec()));
        assert_eq!(first.unwrap(), b"1");
    }
}
