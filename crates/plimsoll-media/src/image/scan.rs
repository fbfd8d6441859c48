//! What a header says of an image, and the integers that headers are made of.

use crate::Size;

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
    /// How long all frames are shown, as the file says; 0 where it does not.
    pub(super) duration_ms: u64,
    /// What decoding takes for each pixel of the largest surface.
    pub(super) pixel_bytes: u64,
    /// What it takes for other things than pixels and copies of the file.
    pub(super) beside_bytes: u64,
    /// The fewest file bytes that can stand for the picture, where the format has such a bound.
    pub(super) fewest_bytes: u64,
}

impl Scan {
    /// A picture that does not move, without surprises.
    pub(super) fn new(format: Format, size: Size) -> Self {
        let pixel_bytes = match format {
            // Four values of 16 bits, and our three of 8 made of them.
            Format::Png => 8 + 3,
            // Four coefficients of 16 bits where there is black, the output, and some.
            Format::Jpeg => 4 * 2 + 3 + 1,
            // The canvas, a frame, and what is laid together of both, each with alpha; or two of them, and ours.
            Format::Gif => 3 * 4 + 1,
            // The output with alpha, planes of 12 bits a pixel and what is known of their blocks; then a lossless picture of alpha, the
            // blocks of its transforms, and what is kept of it.
            Format::WebP => 4 + 2 + (4 + 1 + 1),
        };
        let largest_pixels = size.pixels();
        Self { format, size, frames: 1, largest_pixels, duration_ms: 0, pixel_bytes, beside_bytes: 0, fewest_bytes: 0 }
    }
}

pub(super) fn be16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
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
