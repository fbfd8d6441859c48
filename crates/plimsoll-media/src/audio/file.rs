//! The bytes of an audio clip for a decoder: one of the formats, with correct lengths.

use std::io::{Cursor, Read, Result as IoResult, Seek, SeekFrom};

use symphonia::core::io::MediaSource;

use super::{SUPPORTED, WHAT, malformed};
use crate::MediaError;

/// The least length that a program declares when it writes to a pipe and has no length: `0x7FFFF000`, `0x80000000`,
/// `0xFFFFFFFF` minus a header.
const PIPED_LEAST: usize = 0x7FFF_0000;

/// The position of a wrong number in the file, and the correct number.
type Correction = (usize, [u8; 4]);

/// A file that is read in place. The correct lengths replace the header's while it is read.
pub(super) struct File<B> {
    bytes: Cursor<B>,
    /// Corrections for the length of the file and of its last part.
    corrections: [Option<Correction>; 2],
}

impl<B: AsRef<[u8]>> File<B> {
    /// Refuses a file in none of the formats, so that the decoder does not search for one.
    pub fn new(bytes: B) -> Result<Self, MediaError> {
        let corrections = match bytes.as_ref() {
            whole @ [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => true_lengths(whole)?,
            [b'f', b'L', b'a', b'C', ..] | [b'O', b'g', b'g', b'S', ..] | [b'I', b'D', b'3', ..] => [None; 2],
            [0xFF, second, ..] if second & 0xE0 == 0xE0 => [None; 2],
            _ => return Err(MediaError::Unsupported { what: WHAT, supported: SUPPORTED }),
        };
        Ok(Self { bytes: Cursor::new(bytes), corrections })
    }
}

/// Returns the corrections of a WAV's lengths: a WAV from a pipe declares no length or the largest one. Refuses a file that is cut off.
fn true_lengths(bytes: &[u8]) -> Result<[Option<Correction>; 2], MediaError> {
    let whole = Some((4, ((bytes.len() - 8) as u32).to_le_bytes()));
    let mut at = 12_usize;
    while let Some(head) = bytes.get(at..at.saturating_add(8)) {
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        let left = bytes.len() - at - 8;
        if length > left {
            if length < PIPED_LEAST {
                return Err(malformed(format!("it is cut off: of {length} bytes {left} are there")));
            }
            return Ok([whole, Some((at + 4, (left as u32).to_le_bytes()))]);
        }
        at += 8 + length + length % 2;
    }
    Ok([whole, None])
}

impl<B: AsRef<[u8]>> Read for File<B> {
    fn read(&mut self, out: &mut [u8]) -> IoResult<usize> {
        let from = usize::try_from(self.bytes.position()).unwrap_or(usize::MAX);
        let count = self.bytes.read(out)?;
        for (place, correct) in self.corrections.into_iter().flatten() {
            for (at, byte) in (place..).zip(correct) {
                if let Some(out) = at.checked_sub(from).and_then(|at| out[..count].get_mut(at)) {
                    *out = byte;
                }
            }
        }
        Ok(count)
    }
}

impl<B: AsRef<[u8]>> Seek for File<B> {
    fn seek(&mut self, to: SeekFrom) -> IoResult<u64> {
        self.bytes.seek(to)
    }
}

impl<B: AsRef<[u8]> + Send + Sync> MediaSource for File<B> {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.bytes.get_ref().as_ref().len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pipe_could_not_know_is_corrected_however_it_is_read() {
        let piped = b"RIFF\xff\xff\xff\xffWAVEfmt \x04\0\0\0abcddata\xff\xff\xff\xff123456";
        let expected = b"RIFF\x1e\0\0\0WAVEfmt \x04\0\0\0abcddata\x06\0\0\x00123456";
        for step in [1, 3, 7, 64] {
            let (mut file, mut all) = (File::new(piped).unwrap(), Vec::<u8>::new());
            let mut some = vec![0; step];
            while let Ok(count @ 1..) = file.read(&mut some) {
                all.extend(&some[..count]);
            }
            assert_eq!(all, expected, "{step} at once");
            let mut tail = [0; 9];
            file.seek(SeekFrom::Start(29)).unwrap();
            file.read_exact(&mut tail).unwrap();
            assert_eq!(tail, expected[29..38]);
        }
    }
}
