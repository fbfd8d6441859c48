//! Decoding of pixels, after the header was accepted.

use std::io::Cursor;

use ::image::codecs::gif::GifDecoder;
use ::image::codecs::jpeg::JpegDecoder;
use ::image::codecs::png::PngDecoder;
use ::image::codecs::webp::WebPDecoder;
use ::image::metadata::Orientation;
use ::image::{AnimationDecoder, DynamicImage, ImageDecoder, ImageError, ImageResult, Limits, RgbImage};

use super::header::{Format, Scan, essential_png};
use super::{Header, ImageLimits, WHAT, malformed, over, probe};
use crate::error::contained;
use crate::{MediaError, Size};

/// An image in rows of red, green, blue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb {
    /// The size.
    pub size: Size,
    /// `height` × `width` × 3 bytes.
    pub data: Vec<u8>,
}

/// Decodes an image; of an animation, the first frame.
pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Rgb, MediaError> {
    let header = probe(bytes, limits)?;
    contained(WHAT, || decode_still(bytes, &header))
}

fn decode_still(bytes: &[u8], header: &Header) -> Result<Rgb, MediaError> {
    let mut decoder = open(bytes, header.format).map_err(unreadable)?;
    decoder.set_limits(decoder_limits(header)).map_err(unreadable)?;
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let decoded = DynamicImage::from_decoder(decoder).map_err(unreadable)?;
    let mut image = DynamicImage::ImageRgb8(without_alpha(decoded));
    image.apply_orientation(orientation);
    rgb(image, header.size)
}

/// Decodes the frames of an animation at `indices`, which ascend, and passes each to `take`, so that memory holds at most one frame
/// at a time. A still image has one frame.
pub fn frames(
    bytes: &[u8],
    indices: &[u64],
    limits: &ImageLimits,
    mut take: impl FnMut(&Rgb),
) -> Result<(), MediaError> {
    over("sampled frames", indices.len() as u64, limits.frames, "--max-animation-frames")?;
    let header = probe(bytes, limits)?;
    let ascending = indices.is_sorted() && indices.last().is_none_or(|&last| last < header.frames);
    if !ascending {
        return Err(malformed(format!("it has {} frames, of which {indices:?} are asked for", header.frames)));
    }
    contained(WHAT, || {
        let mut wanted = indices.iter().copied().peekable();
        for (at, frame) in (0..).zip(all_frames(bytes, &header)?) {
            if wanted.peek() == Some(&at) {
                let image = DynamicImage::ImageRgb8(without_alpha(frame.map_err(unreadable)?));
                let image = rgb(image, header.size)?;
                while wanted.next_if_eq(&at).is_some() {
                    take(&image);
                }
            }
            if wanted.peek().is_none() {
                return Ok(());
            }
        }
        Err(malformed("not all of the frames that it announces are there"))
    })
}

type Decoded<'a> = Box<dyn Iterator<Item = ImageResult<DynamicImage>> + 'a>;

fn all_frames<'a>(bytes: &'a [u8], header: &Header) -> Result<Decoded<'a>, MediaError> {
    let cursor = Cursor::new(bytes);
    let frames = match header.format {
        Format::Gif => {
            let mut decoder = GifDecoder::new(cursor).map_err(unreadable)?;
            decoder.set_limits(decoder_limits(header)).map_err(unreadable)?;
            decoder.into_frames()
        }
        Format::WebP if header.frames > 1 => WebPDecoder::new(cursor).map_err(unreadable)?.into_frames(),
        _ => {
            let still = decode_still(bytes, header)?;
            let image = RgbImage::from_raw(still.size.width, still.size.height, still.data).unwrap_or_default();
            return Ok(Box::new(std::iter::once(Ok(image.into()))));
        }
    };
    Ok(Box::new(frames.map(|frame| frame.map(|frame| frame.into_buffer().into()))))
}

/// Returns the size after the turn that EXIF declares. Reads headers only.
pub(super) fn upright(bytes: &[u8], scan: &Scan) -> Result<Size, MediaError> {
    let mut decoder = open(bytes, scan.format).map_err(unreadable)?;
    let (width, height) = decoder.dimensions();
    let same = Size { height, width };
    if same != scan.size {
        return Err(malformed(format!("its headers disagree: {same} and {}", scan.size)));
    }
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    Ok(match decoder.orientation() {
        Ok(Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH) => Size { height: width, width: height },
        _ => same,
    })
}

fn open<'a>(bytes: &'a [u8], format: Format) -> ImageResult<Box<dyn ImageDecoder + 'a>> {
    let cursor = Cursor::new(bytes);
    Ok(match format {
        Format::Png => Box::new(PngDecoder::new(Cursor::new(essential_png(bytes)))?),
        Format::Jpeg => Box::new(JpegDecoder::new(cursor)?),
        Format::Gif => Box::new(GifDecoder::new(cursor)?),
        Format::WebP => Box::new(WebPDecoder::new(cursor)?),
    })
}

fn decoder_limits(header: &Header) -> Limits {
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(header.decode_bytes());
    limits
}

/// Lays transparent pixels on white, as transformers' image processors do; of 16 bits the upper eight stay.
fn without_alpha(image: DynamicImage) -> RgbImage {
    let size = (image.width(), image.height());
    let rgb = match image {
        DynamicImage::ImageRgb8(rgb) => return rgb,
        DynamicImage::ImageLuma8(gray) => gray.iter().flat_map(|value| [*value; 3]).collect(),
        DynamicImage::ImageLumaA8(gray) => on_white::<1>(gray.iter().copied()),
        DynamicImage::ImageRgba8(rgba) => on_white::<3>(rgba.iter().copied()),
        DynamicImage::ImageLuma16(gray) => upper_halves(&gray).flat_map(|value| [value; 3]).collect(),
        DynamicImage::ImageLumaA16(gray) => on_white::<1>(upper_halves(&gray)),
        DynamicImage::ImageRgb16(rgb) => upper_halves(&rgb).collect(),
        DynamicImage::ImageRgba16(rgba) => on_white::<3>(upper_halves(&rgba)),
        other => return other.into_rgb8(),
    };
    RgbImage::from_raw(size.0, size.1, rgb).unwrap_or_default()
}

/// Lays pixels of `COLORS` colours (one is grey) and an alpha on white.
fn on_white<const COLORS: usize>(mut values: impl ExactSizeIterator<Item = u8>) -> Vec<u8> {
    let pixels = values.len() / (COLORS + 1);
    let mut rgb = Vec::with_capacity(3 * pixels);
    for _ in 0..pixels {
        let color: [u8; COLORS] = std::array::from_fn(|_| values.next().unwrap_or_default());
        let alpha = values.next().unwrap_or_default();
        rgb.extend((0..3).map(|at| blended(color[at % COLORS], alpha)));
    }
    rgb
}

/// Returns a value over white, rounded as Pillow's `alpha_composite` rounds.
fn blended(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    let scaled = ((value * alpha + 255 * (255 - alpha)) << 7) + (0x80 << 7);
    ((((scaled >> 8) + scaled) >> 8) >> 7) as u8
}

fn upper_halves(values: &[u16]) -> impl ExactSizeIterator<Item = u8> {
    values.iter().map(|value| (value >> 8) as u8)
}

fn rgb(image: DynamicImage, expected: Size) -> Result<Rgb, MediaError> {
    let size = Size { height: image.height(), width: image.width() };
    if size != expected {
        return Err(malformed(format!("it decodes to {size} instead of {expected}")));
    }
    Ok(Rgb { size, data: image.into_rgb8().into_raw() })
}

fn unreadable(error: ImageError) -> MediaError {
    malformed(error.to_string())
}
