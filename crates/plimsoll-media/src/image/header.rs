//! Sizes and frame counts from headers: a walk over chunks, markers and blocks that checks every offset.

use crate::Size;

/// The formats that are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PNG; of an animation only the first image.
    Png,
    /// JPEG, baseline and progressive.
    Jpeg,
    /// GIF, animated or not.
    Gif,
    /// WebP, lossy and lossless, animated or not.
    WebP,
}

/// Results of a walk over the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scan {
    pub(super) format: Format,
    pub(super) size: Size,
    pub(super) frames: u64,
    /// Pixels of the largest surface that a decoder would allocate. A malicious file may put it inside a small canvas.
    pub(super) largest_pixels: u64,
    /// Duration of all frames, as the file declares it; 0 if it does not.
    pub(super) duration_ms: u64,
    /// Bytes that decoding takes for each pixel of the largest surface.
    pub(super) pixel_bytes: u64,
    /// Bytes that decoding takes beside pixels and copies of the file.
    pub(super) beside_bytes: u64,
    /// The fewest file bytes that can encode the image, if the format has such a bound.
    pub(super) fewest_bytes: u64,
}

impl Scan {
    /// Returns the scan of a still image with ordinary sizes.
    pub(super) fn new(format: Format, size: Size) -> Self {
        let pixel_bytes = match format {
            // Four values of 16 bits, and three of 8 bits of the result.
            Format::Png => 8 + 3,
            // Four coefficients of 16 bits if there is black, the output, and a margin.
            Format::Jpeg => 4 * 2 + 3 + 1,
            // The canvas, a frame, and the combination of both, each with alpha; or two of them, and the result.
            Format::Gif => 3 * 4 + 1,
            // The output with alpha, planes of 12 bits per pixel and data of their blocks. Then a lossless image of alpha, the
            // blocks of its transforms, and its kept values.
            Format::WebP => 4 + 2 + (4 + 1 + 1),
        };
        let largest_pixels = size.pixels();
        Self { format, size, frames: 1, largest_pixels, duration_ms: 0, pixel_bytes, beside_bytes: 0, fewest_bytes: 0 }
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn le16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

pub(super) fn le24(bytes: &[u8], at: usize) -> Option<u32> {
    let three = bytes.get(at..at + 3)?;
    Some(u32::from_le_bytes([three[0], three[1], three[2], 0]))
}

pub(super) fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn png(bytes: &[u8]) -> Option<Scan> {
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
    Some(Scan { frames, beside_bytes: unfiltering(row, size), fewest_bytes: fewest, ..Scan::new(Format::Png, size) })
}

/// Returns the bytes that a PNG's decoder holds beside the image, for rows of `row` bytes in the file. It unpacks into a buffer that
/// it moves only after four of its rows are done. Behind them are the previous row, the current row and the window of
/// deflate, and the buffer doubles as it grows. Interlaced rows have a buffer of their own.
fn unfiltering(row: u64, size: Size) -> u64 {
    2 * row * u64::from(size.height.min(6)) + 8 * u64::from(size.width)
}

/// Returns a PNG with only the chunks that its pixels and its orientation need. Profiles and texts may unpack to a thousand times their
/// size, and the decoder unpacks them before it accepts a limit. It keeps up to five copies of the other chunks, so only
/// pixels may be long.
pub(super) fn essential_png(bytes: &[u8]) -> Vec<u8> {
    let mut kept = Vec::with_capacity(bytes.len());
    kept.extend(&bytes[..8.min(bytes.len())]);
    let mut at = 8_usize;
    while let (Some(length), Some(kind)) = (be32(bytes, at), bytes.get(at + 4..at + 8)) {
        let end = at.saturating_add(length as usize).saturating_add(12).min(bytes.len());
        let short = length <= u32::from(u16::MAX) && matches!(kind, b"IHDR" | b"PLTE" | b"tRNS" | b"eXIf" | b"IEND");
        if short || kind == b"IDAT" {
            kept.extend(&bytes[at..end]);
        }
        at = end;
    }
    kept
}

pub(super) fn jpeg(bytes: &[u8]) -> Option<Scan> {
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
            // Start of a scan. Without an end marker behind it the image is cut off.
            0xDA => {
                bytes[at..].windows(2).rposition(|two| two == [0xFF, 0xD9])?;
                let size = size?;
                // At least one bit for the first coefficient of a block of 64 pixels.
                let fewest_bytes = size.pixels() / 64 / 8;
                // Blocks at the edges are whole ones, of up to 32 pixels a side, and rows of them are held several times. At most 990 bytes
                // per pixel of the side were measured.
                let beside_bytes = 1280 * (u64::from(size.width) + u64::from(size.height));
                return Some(Scan { beside_bytes, fewest_bytes, ..Scan::new(Format::Jpeg, size) });
            }
            0xD9 => return None,
            // Markers without a body.
            0x00 | 0x01 | 0xD0..=0xD8 => continue,
            _ => {}
        }
        at += be16(bytes, at)?.max(2) as usize;
    }
}

pub(super) fn gif(bytes: &[u8]) -> Option<Scan> {
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
                // A graphic control has the duration of the next image, in hundredths of a second.
                if bytes.get(at + 1) == Some(&0xF9) {
                    duration_ms += u64::from(le16(bytes, at + 4).unwrap_or(0)) * 10;
                }
                at = skip_blocks(bytes, at + 2);
            }
            // The end, or its place: decoding a truncated image fails.
            _ => break,
        }
    }
    if frames == 0 {
        return None;
    }
    // A code of at most twelve bits encodes at most 4095 pixels of one frame.
    let still = Scan::new(Format::Gif, Size { height, width });
    let largest_pixels = largest.max(still.largest_pixels);
    Some(Scan { frames, largest_pixels, duration_ms, fewest_bytes: largest / 4095, ..still })
}

/// Returns the offset behind a chain of sub-blocks.
fn skip_blocks(bytes: &[u8], mut at: usize) -> usize {
    while let Some(&length) = bytes.get(at) {
        at += 1 + length as usize;
        if length == 0 {
            break;
        }
    }
    at
}
