//! Sizes and frame counts out of headers: a walk over chunks, markers and blocks that follows no offset blindly.

use super::{WHAT, malformed, vp8};
use crate::{MediaError, Size};

/// The formats that are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PNG, of which an animation's first picture.
    Png,
    /// JPEG, baseline and progressive.
    Jpeg,
    /// GIF, animated or not.
    Gif,
    /// WebP, lossy and lossless, animated or not.
    WebP,
}

/// What a walk over the file finds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scan {
    pub(super) format: Format,
    pub(super) size: Size,
    pub(super) frames: u64,
    /// Pixels of the largest surface that a decoder would make, which liars put inside a small canvas.
    pub(super) largest_pixels: u64,
    /// How long all frames are shown, as the file says.
    pub(super) duration_ms: u64,
    /// The fewest file bytes that can stand for the picture, where the format has such a bound.
    fewest_bytes: u64,
    file_bytes: u64,
}

impl Scan {
    /// The file is too short for its own size: a liar or cut off.
    pub(super) fn pixels_impossible(&self) -> bool {
        self.file_bytes < self.fewest_bytes
    }
}

pub(super) fn scan(bytes: &[u8]) -> Result<Scan, MediaError> {
    let found = match bytes {
        [0x89, b'P', b'N', b'G', 0x0D, 0x0A, 0x1A, 0x0A, ..] => png(bytes),
        [0xFF, 0xD8, 0xFF, ..] => jpeg(bytes),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => gif(bytes),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => webp(bytes),
        _ => return Err(MediaError::Unsupported { what: WHAT, supported: "PNG, JPEG, GIF and WebP" }),
    };
    let (format, size, Frames { count, duration_ms }, largest, fewest_bytes) =
        found.ok_or_else(|| malformed("its header is cut off"))?;
    let largest_pixels = largest.max(size.pixels());
    Ok(Scan { format, size, frames: count, largest_pixels, duration_ms, fewest_bytes, file_bytes: bytes.len() as u64 })
}

/// Format, size, frames, pixels of the largest surface, fewest bytes. `None`: cut off.
type Found = Option<(Format, Size, Frames, u64, u64)>;

/// How many frames there are, and how long all of them are shown.
struct Frames {
    count: u64,
    duration_ms: u64,
}

impl From<u64> for Frames {
    fn from(count: u64) -> Self {
        Self { count, duration_ms: 0 }
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn le16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn le24(bytes: &[u8], at: usize) -> Option<u32> {
    let three = bytes.get(at..at + 3)?;
    Some(u32::from_le_bytes([three[0], three[1], three[2], 0]))
}

fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn png(bytes: &[u8]) -> Found {
    let (width, height) = (be32(bytes, 16)?, be32(bytes, 20)?);
    let size = Size { height, width };
    let (depth, color) = (*bytes.get(24)?, *bytes.get(25)?);
    let channels = [1, 1, 3, 1, 2, 1, 4].get(color as usize).copied().unwrap_or(1);
    // Deflate makes at most 1032 bytes of one; each row begins with a byte for its filter.
    let row = (u64::from(width) * channels * u64::from(depth)).div_ceil(8) + 1;
    let fewest = row.saturating_mul(u64::from(height)) / 1032;
    let (mut at, mut frames) = (8_usize, 1);
    while let (Some(length), Some(kind)) = (be32(bytes, at), bytes.get(at + 4..at + 8)) {
        match kind {
            b"acTL" => frames = u64::from(be32(bytes, at + 8)?).max(1),
            b"IDAT" | b"IEND" => break,
            _ => {}
        }
        at = at.checked_add(length as usize)?.checked_add(12)?;
    }
    Some((Format::Png, size, frames.into(), 0, fewest))
}

/// A PNG without what its pixels and its orientation do not need. Profiles and texts may unpack to a thousand times their
/// size, and the decoder unpacks them before it can be told a limit.
pub(super) fn essential_png(bytes: &[u8]) -> Vec<u8> {
    let mut kept = bytes[..8.min(bytes.len())].to_vec();
    let mut at = 8_usize;
    while let (Some(length), Some(kind)) = (be32(bytes, at), bytes.get(at + 4..at + 8)) {
        let end = at.saturating_add(length as usize).saturating_add(12).min(bytes.len());
        if matches!(kind, b"IHDR" | b"PLTE" | b"tRNS" | b"eXIf" | b"IDAT" | b"IEND") {
            kept.extend(&bytes[at..end]);
        }
        at = end;
    }
    kept
}

fn jpeg(bytes: &[u8]) -> Found {
    let mut at = 2;
    let mut size = None;
    loop {
        while *bytes.get(at)? != 0xFF {
            at += 1;
        }
        while *bytes.get(at)? == 0xFF {
            at += 1;
        }
        let marker = bytes[at];
        at += 1;
        match marker {
            // Start of a frame: precision, then height, then width.
            0xC0..=0xC3 | 0xC5..=0xC7 | 0xC9..=0xCB | 0xCD..=0xCF => {
                size = Some(Size { height: be16(bytes, at + 3)?, width: be16(bytes, at + 5)? });
            }
            // Start of a scan. Without an end marker behind it the picture is cut off.
            0xDA => {
                bytes[at..].windows(2).rposition(|two| two == [0xFF, 0xD9])?;
                let size = size?;
                // At least one bit for the first coefficient of a block of 64 pixels.
                return Some((Format::Jpeg, size, 1.into(), 0, size.pixels() / 64 / 8));
            }
            0xD9 => return None,
            // Markers without a body.
            0x00 | 0x01 | 0xD0..=0xD8 => continue,
            _ => {}
        }
        at += be16(bytes, at)?.max(2) as usize;
    }
}

fn gif(bytes: &[u8]) -> Found {
    let (width, height) = (le16(bytes, 6)?, le16(bytes, 8)?);
    let table = |packed: u8| if packed & 0x80 == 0 { 0 } else { 3_usize << ((packed & 7) + 1) };
    let mut at = 13 + table(*bytes.get(10)?);
    let (mut frames, mut largest, mut duration_ms) = (0, 0, 0);
    loop {
        match bytes.get(at) {
            Some(0x2C) => {
                let (w, h) = (le16(bytes, at + 5)?, le16(bytes, at + 7)?);
                largest = largest.max(u64::from(w) * u64::from(h));
                frames += 1;
                // The descriptor, its colours, the code size; then the data.
                at = skip_blocks(bytes, at + 11 + table(*bytes.get(at + 9)?));
            }
            Some(0x21) => {
                // A graphic control says how long the next picture is shown, in hundredths of a second.
                if bytes.get(at + 1) == Some(&0xF9) {
                    duration_ms += u64::from(le16(bytes, at + 4).unwrap_or(0)) * 10;
                }
                at = skip_blocks(bytes, at + 2);
            }
            // The end, or where it should be: what is cut off fails when it is decoded.
            _ => break,
        }
    }
    if frames == 0 {
        return None;
    }
    // A code of at most twelve bits stands for at most 4095 pixels of one frame.
    let frames = Frames { count: frames, duration_ms };
    Some((Format::Gif, Size { height, width }, frames, largest, largest / 4095))
}

/// The place after a chain of sub-blocks.
fn skip_blocks(bytes: &[u8], mut at: usize) -> usize {
    while let Some(&length) = bytes.get(at) {
        at += 1 + length as usize;
        if length == 0 {
            break;
        }
    }
    at
}

fn webp(bytes: &[u8]) -> Found {
    let mut canvas = None;
    let (mut first, mut frames, mut largest, mut duration_ms) = (None, 0, 0, 0);
    let mut at = 12_usize;
    while let (Some(kind), Some(length)) = (bytes.get(at..at + 4), le32(bytes, at + 4)) {
        let body = at + 8;
        // Decoders take a chunk's length at its word.
        let end = body.checked_add(length as usize).filter(|&end| end <= bytes.len())?;
        let size = match kind {
            b"VP8X" => {
                canvas = Some(Size { width: le24(bytes, body + 4)? + 1, height: le24(bytes, body + 7)? + 1 });
                canvas
            }
            b"ANMF" => {
                frames += 1;
                duration_ms += u64::from(le24(bytes, body + 12)?);
                let inner = webp_bitstream(bytes, body + 16);
                check_inner_chunks(bytes.get(body + 16..end)?)?;
                let own = Size { width: le24(bytes, body + 6)? + 1, height: le24(bytes, body + 9)? + 1 };
                largest = largest.max(inner.map_or(0, Size::pixels));
                Some(own)
            }
            _ => {
                check_bitstream(kind, bytes.get(body..end)?)?;
                let found = webp_bitstream(bytes, at);
                first = first.or(found);
                found
            }
        };
        largest = largest.max(size.map_or(0, Size::pixels));
        // Chunks are padded to even lengths.
        at = end + length as usize % 2;
    }
    Some((Format::WebP, canvas.or(first)?, Frames { count: frames.max(1), duration_ms }, largest, 0))
}

/// Chunks inside a frame must end inside it.
fn check_inner_chunks(mut chunks: &[u8]) -> Option<()> {
    while chunks.len() >= 8 {
        let length = le32(chunks, 4)? as usize;
        check_bitstream(chunks.get(..4)?, chunks.get(8..length.checked_add(8)?)?)?;
        chunks = chunks.get(length.checked_add(8)?..)?;
        chunks = &chunks[(length % 2).min(chunks.len())..];
    }
    Some(())
}

/// What a lossy picture says of its parts must be there.
fn check_bitstream(kind: &[u8], body: &[u8]) -> Option<()> {
    (kind != b"VP8 " || vp8::partitions_fit(body)).then_some(())
}

/// The size in the bitstream's own header, where a chunk at `at` has one.
fn webp_bitstream(bytes: &[u8], at: usize) -> Option<Size> {
    let body = at + 8;
    match bytes.get(at..at + 4)? {
        b"VP8 " => Some(Size { width: le16(bytes, body + 6)? & 0x3FFF, height: le16(bytes, body + 8)? & 0x3FFF }),
        b"VP8L" => {
            let bits = le32(bytes, body + 1)?;
            Some(Size { width: (bits & 0x3FFF) + 1, height: (bits >> 14 & 0x3FFF) + 1 })
        }
        _ => None,
    }
}
