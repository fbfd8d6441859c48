//! The chunks of a WebP file: a walk over all parts that a decoder would open, even those that it reads as another kind than their name.

use super::header::{Format, Scan, le16, le24, le32};
use super::{malformed, vp8, vp8l};
use crate::{MediaError, Size};

/// A part that a decoder allocates memory for.
enum Part<'a> {
    /// The canvas of everything.
    Canvas(Size),
    /// A frame of an animation.
    Frame { size: Size, duration_ms: u64 },
    /// An image, with the size in its own bitstream's header.
    Image(Size),
    /// A lossless bitstream; the size, if the bitstream lacks it.
    Lossless(&'a [u8], Option<Size>),
}

/// Sizes and frames.
pub(super) fn scan(bytes: &[u8]) -> Result<Scan, MediaError> {
    let (mut canvas, mut first) = (None, None);
    let (mut frames, mut largest_pixels, mut duration_ms) = (0, 0, 0);
    walk(bytes, |part| {
        let size = match part {
            Part::Canvas(size) => *canvas.get_or_insert(size),
            Part::Frame { size, duration_ms: shown } => {
                frames += 1;
                duration_ms += shown;
                size
            }
            Part::Image(size) => {
                first = first.or(Some(size));
                size
            }
            Part::Lossless(..) => return Ok(()),
        };
        largest_pixels = largest_pixels.max(size.pixels());
        Ok(())
    })?;
    let still = Scan::new(Format::WebP, canvas.or(first).ok_or_else(cut_off)?);
    if frames == 0 {
        return Ok(Scan { largest_pixels, ..still });
    }
    // The output, the canvas and a frame, each with alpha; planes of 12 bits per pixel and data of their blocks; and alpha
    // once more.
    let pixel_bytes = 3 * 4 + 2 + 1;
    Ok(Scan { frames, duration_ms, largest_pixels, pixel_bytes, ..still })
}

/// Returns the most bytes that trees of prefix codes take at once: bitstreams are decoded one after the other. Call it after the
/// sizes were accepted, because the time grows with them.
pub(super) fn tree_bytes(bytes: &[u8]) -> Result<u64, MediaError> {
    let (mut most, mut left) = (0, vp8l::GROUPS_MAX);
    walk(bytes, |part| {
        if let Part::Lossless(stream, size) = part {
            most = vp8l::tree_bytes(stream, size, &mut left)?.max(most);
        }
        Ok(())
    })?;
    Ok(most)
}

/// Passes all parts to `see`, in their order.
fn walk<'a>(bytes: &'a [u8], mut see: impl FnMut(Part<'a>) -> Result<(), MediaError>) -> Result<(), MediaError> {
    let (mut canvas, mut moves) = (None, false);
    for chunk in Chunks(bytes.get(12..).unwrap_or_default()) {
        let (kind, body) = chunk?;
        match kind {
            // Decoders read only the first one.
            b"VP8X" if canvas.is_none() => {
                let size = plus_one(body, 4, 7).ok_or_else(cut_off)?;
                canvas = Some(size);
                moves = body[0] & 2 != 0;
                see(Part::Canvas(size))?;
            }
            // Decoders read the parts of such frames as parts of an image as large as the canvas.
            b"ANMF" if !moves => return Err(malformed("it has frames and does not say that it moves")),
            // Decoders look for the next frame where this one ends, padded or not.
            b"ANMF" if body.len() % 2 == 1 => return Err(malformed("one of its frames has an odd length")),
            b"ANMF" => frame(body, &mut see)?,
            b"ALPH" => {
                if let Some(size) = canvas {
                    alpha(body, size, &mut see)?;
                }
            }
            _ => {
                image(kind, body, &mut see)?;
            }
        }
    }
    Ok(())
}

/// Reads the parts of a frame. Their images must be as large as the frame.
fn frame<'a>(body: &'a [u8], see: &mut impl FnMut(Part<'a>) -> Result<(), MediaError>) -> Result<(), MediaError> {
    let size = plus_one(body, 6, 9).ok_or_else(cut_off)?;
    let duration_ms = le24(body, 12).ok_or_else(cut_off)?.into();
    see(Part::Frame { size, duration_ms })?;
    let mut behind_alpha = false;
    for chunk in Chunks(body.get(16..).ok_or_else(cut_off)?) {
        let (kind, body) = chunk?;
        // Decoders read the chunk behind alpha as a lossy image, for any name.
        if behind_alpha && kind != b"VP8 " {
            return Err(malformed("a frame has no lossy image behind its alpha"));
        }
        behind_alpha = kind == b"ALPH";
        if behind_alpha {
            alpha(body, size, see)?;
        } else if let Some(own) = image(kind, body, see)?.filter(|&own| own != size) {
            return Err(malformed(format!("a frame of {size} holds an image of {own}")));
        }
    }
    Ok(())
}

/// Finds the alpha of a lossy image, which may be coded like a lossless one, without a header.
fn alpha<'a>(
    body: &'a [u8],
    size: Size,
    see: &mut impl FnMut(Part<'a>) -> Result<(), MediaError>,
) -> Result<(), MediaError> {
    match body.split_first() {
        Some((how, stream)) if how & 3 == 1 => see(Part::Lossless(stream, Some(size))),
        _ => Ok(()),
    }
}

/// Returns the size of an image, if the chunk is one.
fn image<'a>(
    kind: &[u8],
    body: &'a [u8],
    see: &mut impl FnMut(Part<'a>) -> Result<(), MediaError>,
) -> Result<Option<Size>, MediaError> {
    let size = match kind {
        b"VP8 " => lossy_size(body).filter(|_| vp8::partitions_fit(body)).ok_or_else(cut_off)?,
        b"VP8L" => {
            see(Part::Lossless(body, None))?;
            lossless_size(body).ok_or_else(cut_off)?
        }
        _ => return Ok(None),
    };
    see(Part::Image(size))?;
    Ok(Some(size))
}

fn lossy_size(body: &[u8]) -> Option<Size> {
    Some(Size { width: le16(body, 6)? & 0x3FFF, height: le16(body, 8)? & 0x3FFF })
}

fn lossless_size(body: &[u8]) -> Option<Size> {
    let bits = le32(body, 1)?;
    Some(Size { width: (bits & 0x3FFF) + 1, height: (bits >> 14 & 0x3FFF) + 1 })
}

/// Reads a size with each side stored as one less, in three bytes.
fn plus_one(body: &[u8], width: usize, height: usize) -> Option<Size> {
    Some(Size { width: le24(body, width)? + 1, height: le24(body, height)? + 1 })
}

/// Chunks behind each other: kind and body.
struct Chunks<'a>(&'a [u8]);

impl<'a> Iterator for Chunks<'a> {
    type Item = Result<(&'a [u8; 4], &'a [u8]), MediaError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (kind, rest) = self.0.split_first_chunk::<4>()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        // Decoders trust a chunk's length.
        let Some((body, rest)) = rest.split_at_checked(u32::from_le_bytes(*length) as usize) else {
            self.0 = &[];
            return Some(Err(cut_off()));
        };
        // Chunks are padded to even lengths.
        self.0 = &rest[(body.len() % 2).min(rest.len())..];
        Some(Ok((kind, body)))
    }
}

fn cut_off() -> MediaError {
    malformed("its header is cut off")
}
