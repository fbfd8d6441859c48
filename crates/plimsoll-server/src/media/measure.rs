//! What a medium will take, from its header alone: tokens, pixels, bytes. Refused here is refused before anything is decoded.

use plimsoll_engine::{Grid, ImageSpec, MediaSpec, VideoSpec};
use plimsoll_media::geometry::Patches;
use plimsoll_media::image::{Header, ImageLimits, probe};
use plimsoll_media::{ContentKey, MediaError, Modality, Shape, Size};

use super::gallery::{Medium, Source, formats};

/// Frames a second of an animation that does not say how fast it is.
const ANIMATION_RATE: f64 = 10.0;

/// Bytes of a pixel.
const RGB: u64 = 3;

/// A medium that is within the limits.
#[derive(Debug)]
pub(crate) struct Measured {
    /// Where it stands in the body.
    pub param: String,
    pub key: ContentKey,
    pub shape: Shape,
    pub grid: Grid,
    /// When each group of frames is shown, in seconds, where the model is told; else none.
    pub times: Vec<f64>,
    /// Of a video, the seconds from one group of frames to the next.
    pub seconds: Option<f32>,
    /// Index of its first placeholder in the prompt, once there is one.
    pub first: u32,
    /// What decoding it takes at most beside its pixels.
    pub decode_bytes: u64,
    /// What its pixels take.
    pub pixel_bytes: u64,
    pub(super) files: Vec<Vec<u8>>,
    /// Frames of an animation that are taken; none for pictures and lists.
    pub(super) frames: Option<Vec<u64>>,
    /// The size of its pixels.
    pub(super) size: Size,
}

impl Measured {
    /// Bytes of its files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.capacity() as u64).sum()
    }
}

/// Reads the headers. Every byte of it must be here.
pub(crate) fn measure(spec: &MediaSpec, limits: &ImageLimits, medium: Medium) -> Result<Measured, MediaError> {
    let (wanted, files) = (medium.kind, medium.sources.into_iter());
    let files: Vec<Vec<u8>> =
        files.filter_map(|source| if let Source::Bytes(bytes) = source { Some(bytes) } else { None }).collect();
    let headers = files.iter().map(|file| probe(file, limits)).collect::<Result<Vec<_>, _>>();
    let headers = headers.map_err(|error| match error {
        MediaError::Unsupported { what, .. } => MediaError::Unsupported { what, supported: formats(wanted) },
        error => error,
    })?;
    let first = *headers.first().ok_or_else(|| malformed(wanted, "it has no frames".into()))?;
    let plan = match (&spec.image, &spec.video) {
        (Some(image), _) if wanted == Modality::Image => picture(image, medium.pixels_max, first.size)?,
        (_, Some(video)) if wanted == Modality::Video => {
            film(video, spec.places.frames_apart, medium.listed, &headers)?
        }
        _ => return Err(malformed(wanted, "the model takes none".into())),
    };
    let Plan { size, shape, tokens_max, patch, groups, frames, times, seconds } = plan;
    if shape.tokens > tokens_max {
        let what = if wanted == Modality::Image { "an image" } else { "a video" };
        let (asked, flag) = (shape.tokens, wanted.flag());
        return Err(MediaError::OverLimit { what, asked, limit: tokens_max, unit: "tokens", flag });
    }
    let count = frames.as_ref().map_or(headers.len(), Vec::len) as u64;
    let decoding = |header: &Header| {
        // The picture, and the picture whose one side is resized already.
        let halfway = u64::from(header.size.height) * u64::from(size.width);
        header.decode_bytes().max(RGB * (header.size.pixels() + halfway))
    };
    Ok(Measured {
        key: key(spec, wanted, &files, size, frames.as_deref()),
        param: medium.param,
        shape,
        grid: Grid {
            frames: groups,
            height: (u64::from(size.height) / patch) as usize,
            width: (u64::from(size.width) / patch) as usize,
        },
        times,
        seconds,
        first: 0,
        decode_bytes: headers.iter().map(decoding).max().unwrap_or(0),
        pixel_bytes: count * RGB * size.pixels(),
        files,
        frames,
        size,
    })
}

/// How a medium is processed.
struct Plan {
    size: Size,
    shape: Shape,
    tokens_max: u64,
    patch: u64,
    groups: usize,
    frames: Option<Vec<u64>>,
    times: Vec<f64>,
    seconds: Option<f32>,
}

fn picture(image: &ImageSpec, pixels_max: Option<u64>, size: Size) -> Result<Plan, MediaError> {
    let rule = match pixels_max {
        Some(asked) => image.rule.with_max_pixels(asked.clamp(image.rule.min_pixels, image.rule.max_pixels))?,
        None => image.rule.clone(),
    };
    Ok(Plan {
        size: rule.resize(size)?,
        shape: rule.shape(size)?,
        tokens_max: image.tokens_max,
        patch: rule.patch,
        groups: 1,
        frames: None,
        times: Vec::new(),
        seconds: None,
    })
}

fn film(video: &VideoSpec, stamped: bool, listed: Option<f64>, headers: &[Header]) -> Result<Plan, MediaError> {
    let rule = &video.rule;
    let size = headers[0].size;
    let (indices, fps, total) = match listed {
        Some(fps) => {
            if let Some(other) = headers.iter().find(|header| header.size != size) {
                return Err(malformed(Modality::Video, format!("its frames have sizes {size:?} and {:?}", other.size)));
            }
            let total = headers.len() as u64;
            ((0..total).collect(), fps, total)
        }
        None => {
            let Header { frames, duration_ms, .. } = headers[0];
            let known = duration_ms > 0 && frames > 1;
            let fps = if known { frames as f64 * 1000.0 / duration_ms as f64 } else { ANIMATION_RATE };
            (rule.sampling.indices(frames, fps)?, fps, frames)
        }
    };
    let count = indices.len() as u64;
    let Patches { temporal, patch, .. } = rule.patches;
    // As often as they are sampled.
    let sampled = fps * count as f64 / total as f64;
    Ok(Plan {
        size: rule.resize(count, size)?,
        shape: rule.shape(count, size)?,
        tokens_max: video.tokens_max,
        patch,
        groups: count.div_ceil(temporal) as usize,
        times: if stamped { rule.sampling.timestamps(&indices, fps) } else { Vec::new() },
        frames: listed.is_none().then_some(indices),
        seconds: Some((temporal as f64 / sampled) as f32),
    })
}

/// All of the content, and all that decides what becomes of it.
fn key(spec: &MediaSpec, kind: Modality, files: &[Vec<u8>], size: Size, frames: Option<&[u64]>) -> ContentKey {
    let parameters = format!("{} {}x{} {frames:?}", spec.parameters, size.height, size.width);
    match files {
        [file] => ContentKey::of(kind, &parameters, file),
        files => {
            let own = |file: &Vec<u8>| *ContentKey::of(kind, "a frame", file).as_bytes();
            ContentKey::of(
                kind,
                &format!("{parameters} listed"),
                files.iter().map(own).collect::<Vec<_>>().as_flattened(),
            )
        }
    }
}

fn malformed(kind: Modality, why: String) -> MediaError {
    MediaError::Malformed { what: if kind == Modality::Image { "an image" } else { "a video" }, why }
}
