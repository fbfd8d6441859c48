//! Images from clients: first the header, then limits, then pixels.
//!
//! [`probe`] reads sizes and counts frames without decoding anything, and refuses images over a limit. Only then may
//! [`decode`] or [`frames`] touch the pixels, at a cost that [`Header::decode_bytes`] bounds beforehand. Colours are those of
//! transformers' image processors: transparent pixels laid on white, palettes resolved, 16 bits cut to 8, turned upright by EXIF.

mod decode;
mod header;
mod patchify;
mod resize;
mod tile;
mod vp8;
mod vp8l;
mod webp;

pub use decode::{Rgb, decode, frames};
pub use header::Format;
pub use patchify::{Normalize, patchify, patchify_len};
pub use resize::{Filter, resize, resize_bytes};
pub use tile::{pieces, squares, tiles};

use crate::error::contained;
use crate::{MediaError, Size};

const WHAT: &str = "an image";

/// Walks over the headers of a file.
fn scan(bytes: &[u8]) -> Result<header::Scan, MediaError> {
    let found = match bytes {
        [0x89, b'P', b'N', b'G', 0x0D, 0x0A, 0x1A, 0x0A, ..] => header::png(bytes),
        [0xFF, 0xD8, 0xFF, ..] => header::jpeg(bytes),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => header::gif(bytes),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => return webp::scan(bytes),
        _ => return Err(MediaError::Unsupported { what: WHAT, supported: "PNG, JPEG, GIF and WebP" }),
    };
    found.ok_or_else(|| malformed("its header is cut off"))
}

/// Limits of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Pixels of one frame, before any resize.
    pub pixels: u64,
    /// Frames of an animation.
    pub frames: u64,
    /// Pixels of all frames of an animation together, which decide the time of decoding.
    pub animation_pixels: u64,
}

impl Default for ImageLimits {
    /// 20 MiB, 4096 × 4096 pixels, 768 frames of 640 × 480 pixels together.
    fn default() -> Self {
        Self { file_bytes: 20 << 20, pixels: 1 << 24, frames: 768, animation_pixels: 768 * 640 * 480 }
    }
}

/// The properties that a file declares, within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The format.
    pub format: Format,
    /// The size, upright.
    pub size: Size,
    /// Frames; 1 for a still image.
    pub frames: u64,
    /// Duration of all frames, as the file declares it; 0 if it does not.
    pub duration_ms: u64,
    /// Pixels of the largest frame, which may be larger than the image.
    largest_pixels: u64,
    /// Bytes that decoding takes for each of these pixels.
    pixel_bytes: u64,
    /// Bytes that decoding takes beside pixels and copies of the file.
    beside_bytes: u64,
    file_bytes: u64,
}

impl Header {
    /// Returns the most heap bytes that decoding takes at any instant, the result included.
    pub fn decode_bytes(&self) -> u64 {
        // `header.rs` has the bytes per pixel of each format. Most decoders copy the file once, into a buffer that
        // may double; the decoder of WebP makes one more copy of a partition. Their other memory is small, except for rows of a PNG
        // or JPEG and the trees of prefix codes of a lossless WebP.
        let copies = if self.format == Format::WebP { 3 } else { 2 };
        self.largest_pixels * self.pixel_bytes + self.beside_bytes + copies * self.file_bytes + (2 << 20)
    }
}

/// Reads the header of an image and refuses an image over a limit. Decodes nothing.
pub fn probe(bytes: &[u8], limits: &ImageLimits) -> Result<Header, MediaError> {
    over("bytes", bytes.len() as u64, limits.file_bytes, "--max-image-bytes")?;
    contained(WHAT, || probe_here(bytes, limits))
}

fn probe_here(bytes: &[u8], limits: &ImageLimits) -> Result<Header, MediaError> {
    let scan = scan(bytes)?;
    if scan.size.pixels() == 0 {
        return Err(malformed(format!("{} × {} has no pixels", scan.size.width, scan.size.height)));
    }
    over("pixels", scan.largest_pixels, limits.pixels, "--max-decode-pixels")?;
    over("frames", scan.frames, limits.frames, "--max-animation-frames")?;
    if scan.frames > 1 {
        let all = scan.frames.saturating_mul(scan.largest_pixels);
        over("pixels in all frames", all, limits.animation_pixels, "--max-animation-pixels")?;
    }
    let file_bytes = bytes.len() as u64;
    // The file is too short for its declared size: the header is wrong or the file is cut off.
    if file_bytes < scan.fewest_bytes {
        return Err(malformed(format!("{file_bytes} bytes cannot hold {} pixels", scan.size.pixels())));
    }
    let size = decode::upright(bytes, &scan)?;
    let trees = if scan.format == Format::WebP { webp::tree_bytes(bytes)? } else { 0 };
    let header::Scan { format, frames, duration_ms, largest_pixels, pixel_bytes, beside_bytes, .. } = scan;
    let beside_bytes = beside_bytes + trees;
    Ok(Header { format, size, frames, duration_ms, largest_pixels, pixel_bytes, beside_bytes, file_bytes })
}

fn over(unit: &'static str, asked: u64, limit: u64, flag: &'static str) -> Result<(), MediaError> {
    if asked > limit {
        return Err(MediaError::OverLimit { what: WHAT, asked, limit, unit, flag });
    }
    Ok(())
}

fn malformed(why: impl Into<String>) -> MediaError {
    MediaError::Malformed { what: WHAT, why: why.into() }
}
