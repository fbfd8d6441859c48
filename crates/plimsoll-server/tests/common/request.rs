//! The requests that a test's server receives, one after another on a connection.

use std::io::Read;

/// Returns the next request's head, in lower case, and its body; None if the connection ends. `bytes` keeps what was read beyond them.
pub fn next_request(stream: &mut impl Read, bytes: &mut Vec<u8>) -> Option<(String, Vec<u8>)> {
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        more(stream, bytes)?;
    };
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_ascii_lowercase();
    let length = head.split("content-length: ").nth(1).map_or("0", |rest| rest.split("\r\n").next().unwrap());
    let length: usize = length.parse().unwrap();
    while bytes.len() < end + length {
        more(stream, bytes)?;
    }
    let body = bytes[end..end + length].to_vec();
    bytes.drain(..end + length);
    Some((head, body))
}

/// Reads more bytes; None at the end.
pub fn more(stream: &mut impl Read, bytes: &mut Vec<u8>) -> Option<()> {
    let mut buffer = [0; 64 << 10];
    let n = stream.read(&mut buffer).unwrap_or(0);
    bytes.extend_from_slice(&buffer[..n]);
    (n > 0).then_some(())
}
