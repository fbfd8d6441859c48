//! One blob's file: a header of 80 bytes, then the payload.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..8 | `plimtier` |
//! | 8..12 | version of the format: 1, or 2 if the payload is encrypted; little endian as all numbers here |
//! | 12..16 | 0 |
//! | 16..24 | bytes of the payload |
//! | 24..56 | the blob's name |
//! | 56..72 | XXH3 of 128 bits of what follows the header |
//! | 72..80 | the first half of the same of bytes 0..72 |
//!
//! Before an encrypted payload stand 12 bytes of nonce and 16 of tag. Bytes 0..56 are authentic with it.

use twox_hash::XxHash3_128;

use crate::Name;
use crate::cipher::lead_bytes;

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 80;
/// Bytes of a header before its checksums.
pub(crate) const ABOUT_BYTES: usize = 56;
/// A file takes whole blocks of the disk.
const BLOCK_BYTES: u64 = 4096;
const MAGIC: [u8; 8] = *b"plimtier";
const PLAIN: u32 = 1;
const ENCRYPTED: u32 = 2;

/// Bytes of the disk that a payload of this size takes.
pub(crate) fn disk_bytes(payload: usize, encrypted: bool) -> u64 {
    ((HEADER_BYTES + lead_bytes(encrypted) + payload) as u64).next_multiple_of(BLOCK_BYTES)
}

/// The same for a file of this length.
pub(crate) fn blocks_of(file_bytes: u64) -> u64 {
    file_bytes.next_multiple_of(BLOCK_BYTES)
}

/// Returns the part of a header before its checksums. In an encrypted blob it is authenticated.
pub(crate) fn about(name: &Name, encrypted: bool, payload: usize) -> [u8; ABOUT_BYTES] {
    let mut about = [0; ABOUT_BYTES];
    about[..8].copy_from_slice(&MAGIC);
    about[8..12].copy_from_slice(&(if encrypted { ENCRYPTED } else { PLAIN }).to_le_bytes());
    about[16..24].copy_from_slice(&(payload as u64).to_le_bytes());
    about[24..].copy_from_slice(name);
    about
}

/// Returns the header of a payload; `lead` stands between header and payload.
pub(crate) fn header(about: &[u8; ABOUT_BYTES], lead: &[u8], payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..56].copy_from_slice(about);
    header[56..72].copy_from_slice(&sum_of(lead, payload));
    let own = own_sum(&header);
    header[72..].copy_from_slice(&own);
    header
}

fn own_sum(header: &[u8; HEADER_BYTES]) -> [u8; 8] {
    (XxHash3_128::oneshot(&header[..72]) as u64).to_le_bytes()
}

fn sum_of(lead: &[u8], payload: &[u8]) -> [u8; 16] {
    let mut sum = XxHash3_128::new();
    sum.write(lead);
    sum.write(payload);
    sum.finish_128().to_le_bytes()
}

/// Reads a header: whether the blob is encrypted, and the length of its payload. `None` if a file of `file_bytes` bytes with this header is
/// no blob of this name.
pub(crate) fn parse(header: &[u8; HEADER_BYTES], name: &Name, file_bytes: u64) -> Option<(bool, u64)> {
    let own = header[..8] == MAGIC && header[72..] == own_sum(header);
    let encrypted = header[8..12] == ENCRYPTED.to_le_bytes();
    let version = encrypted || header[8..12] == PLAIN.to_le_bytes();
    let payload = file_bytes.checked_sub((HEADER_BYTES + lead_bytes(encrypted)) as u64)?;
    (own && version && header[24..56] == *name && header[16..24] == payload.to_le_bytes())
        .then_some((encrypted, payload))
}

/// Whether lead and payload match the checksum in the header.
pub(crate) fn is_whole(header: &[u8; HEADER_BYTES], lead: &[u8], payload: &[u8]) -> bool {
    header[56..72] == sum_of(lead, payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let (name, payload) = ([7; 32], [3_u8; 100]);
        let header = header(&about(&name, false, 100), &[], &payload);
        let fits = |header: &[u8; HEADER_BYTES], payload: &[u8]| {
            parse(header, &name, (HEADER_BYTES + payload.len()) as u64).is_some() && is_whole(header, &[], payload)
        };
        assert!(fits(&header, &payload));
        for bit in 0..HEADER_BYTES * 8 {
            let mut flipped = header;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!fits(&flipped, &payload), "bit {bit} of the header");
        }
        for bit in 0..payload.len() * 8 {
            let mut flipped = payload;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!fits(&header, &flipped), "bit {bit} of the payload");
        }
        assert!(!fits(&header, &payload[1..]) && parse(&header, &[8; 32], 180).is_none());
        assert_eq!([disk_bytes(3988, true), disk_bytes(3989, true)], [4096, 8192]);
        assert_eq!([disk_bytes(0, false), disk_bytes(4016, false), disk_bytes(4017, false)], [4096, 4096, 8192]);
    }
}
