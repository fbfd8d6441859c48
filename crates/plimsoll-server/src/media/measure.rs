//! What a medium will take, from its header alone: tokens, pixels, bytes. Refused here is refused before anything is decoded.

use plimsoll_engine::{AudioSpec, Grid, MediaSpec, Spelling, VideoSpec};
use plimsoll_media::audio::{self, AudioLimits, resampled_len};
use plimsoll_media::geometry::{Fit, ImageRule};
use plimsoll_media::image::{Header, probe};
use plimsoll_media::{ContentKey, MediaError, Modality, Shape, Size};

use super::config::MediaConfig;
use super::medium::{Medium, Source};
use super::refused::refused;
use super::source::formats;
use crate::http::error::ApiResult;
use crate::state::model::ModelState;

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
    /// What its pixels, or its spectrogram, take.
    pub pixel_bytes: u64,
    pub(super) files: Vec<Vec<u8>>,
    /// Frames of an animation that are taken; none for pictures and lists.
    pub(super) frames: Option<Vec<u64>>,
    /// To this it is resized; nothing of a sound.
    pub(super) canvas: Size,
    /// Pictures that the tower sees and that lie in the canvas: of this size.
    pub(super) tile: Size,
    /// Placeholders that a prompt has for it before they are repeated.
    pub(super) runs: u64,
}

impl Measured {
    /// Bytes of its files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.capacity() as u64).sum()
    }
}

/// Reads the headers of a request's media, and refuses media over a limit. All their bytes must be in memory. Runs on a
/// text worker.
pub(crate) fn measure_all(state: &ModelState, spec: &MediaSpec, media: Vec<Medium>) -> ApiResult<Vec<Measured>> {
    let mut measured = Vec::with_capacity(media.len());
    for medium in media {
        let param = medium.param.clone();
        let one = measure(spec, &state.server.config.media, medium);
        measured.push(one.map_err(|error| {
            state.media_pipeline.counts.refused.inc();
            refused(&param, &error)
        })?);
    }
    let rows = measured.iter().map(|medium| medium.shape.tokens as usize);
    let param = measured.first().map_or("messages", |first| &first.param);
    spec.outputs.check(rows).map_err(|error| refused(param, &error))?;
    Ok(measured)
}

/// Reads the headers. Every byte of it must be here.
fn measure(spec: &MediaSpec, limits: &MediaConfig, medium: Medium) -> Result<Measured, MediaError> {
    let (wanted, files) = (medium.kind, medium.sources.into_iter());
    let files: Vec<Vec<u8>> =
        files.filter_map(|source| if let Source::Bytes(bytes) = source { Some(bytes) } else { None }).collect();
    if let (Modality::Audio, Some(audio)) = (wanted, &spec.audio) {
        return sound(spec, audio, limits, medium.param, files);
    }
    let headers = files.iter().map(|file| probe(file, &limits.image)).collect::<Result<Vec<_>, _>>();
    let headers = headers.map_err(|error| match error {
        MediaError::Unsupported { what, .. } => MediaError::Unsupported { what, supported: formats(wanted) },
        error => error,
    })?;
    let first = *headers.first().ok_or_else(|| malformed(wanted, "it has no frames".into()))?;
    let (plan, tokens_max) = match (&spec.image, &spec.video) {
        (Some(image), _) if wanted == Modality::Image => {
            (picture(&image.rule, medium.pixels_max, first.size)?, image.tokens_max)
        }
        (_, Some(video)) if wanted == Modality::Video => {
            (film(video, &spec.spelling, medium.listed, &headers)?, video.tokens_max)
        }
        _ => return Err(malformed(wanted, "the model takes none".into())),
    };
    let Plan { fit, patch, frames, times, seconds, runs } = plan;
    let Fit { canvas, size, pictures, groups, shape } = fit;
    if shape.tokens > tokens_max {
        let (what, asked, flag) = (wanted.noun(), shape.tokens, wanted.flag());
        return Err(MediaError::OverLimit { what, asked, limit: tokens_max, unit: "tokens", flag });
    }
    let decoding = |header: &Header| {
        // Bytes of the decoded image, of the image after resizing one side, and of the canvas that is cut into tiles.
        let halfway = u64::from(header.size.height) * u64::from(canvas.width);
        let whole = if canvas == size { 0 } else { canvas.pixels() };
        header.decode_bytes().max(RGB * (header.size.pixels() + halfway + whole))
    };
    Ok(Measured {
        key: key(spec, wanted, &files, canvas, frames.as_deref()),
        param: medium.param,
        shape,
        grid: Grid {
            frames: groups as usize,
            height: (u64::from(size.height) / patch) as usize,
            width: (u64::from(size.width) / patch) as usize,
        },
        times,
        seconds,
        first: 0,
        decode_bytes: headers.iter().map(decoding).max().unwrap_or(0),
        pixel_bytes: pictures * RGB * size.pixels(),
        files,
        frames,
        canvas,
        tile: size,
        runs,
    })
}

/// What a sound may be, by the engine's rule and the server's.
pub(super) fn sound_limits(audio: &AudioSpec, limits: &MediaConfig) -> AudioLimits {
    AudioLimits { file_bytes: limits.audio_bytes, seconds: audio.rule.max_seconds }
}

/// A sound: its samples, counted, say how many tokens it will have.
fn sound(
    spec: &MediaSpec,
    audio: &AudioSpec,
    limits: &MediaConfig,
    param: String,
    files: Vec<Vec<u8>>,
) -> Result<Measured, MediaError> {
    let file = files.first().ok_or_else(|| malformed(Modality::Audio, "it is not there".into()))?;
    let header = audio::probe(file, &sound_limits(audio, limits))?;
    let samples = resampled_len(header.samples, header.rate, audio.rule.rate as u32);
    let shape = audio.rule.shape(samples)?;
    let frames = audio.rule.frames(samples);
    let bytes = size_of::<f32>() as u64;
    Ok(Measured {
        key: ContentKey::of(Modality::Audio, &spec.parameters, file),
        param,
        shape,
        grid: Grid::sound(frames as usize),
        times: Vec::new(),
        seconds: None,
        first: 0,
        decode_bytes: header.decode_bytes() + samples * bytes,
        pixel_bytes: frames * audio.mel.bands() as u64 * bytes,
        files,
        frames: None,
        canvas: Size::new(0, 0),
        tile: Size::new(0, 0),
        runs: 1,
    })
}

/// How a medium is processed.
struct Plan {
    fit: Fit,
    patch: u64,
    frames: Option<Vec<u64>>,
    times: Vec<f64>,
    seconds: Option<f32>,
    runs: u64,
}

fn picture(rule: &ImageRule, pixels_max: Option<u64>, size: Size) -> Result<Plan, MediaError> {
    let rule = match pixels_max {
        Some(asked) => rule.limited(asked)?,
        None => rule.clone(),
    };
    let patch = rule.patches().patch;
    Ok(Plan { fit: rule.fit(size)?, patch, frames: None, times: Vec::new(), seconds: None, runs: 1 })
}

fn film(video: &VideoSpec, spelling: &Spelling, listed: Option<f64>, headers: &[Header]) -> Result<Plan, MediaError> {
    let (sampling, size) = (video.rule.sampling(), headers[0].size);
    let (indices, fps, total) = match listed {
        Some(fps) => {
            if let Some(other) = headers.iter().find(|header| header.size != size) {
                return Err(malformed(
                    Modality::Video,
                    format!("its frames have different sizes: {size} and {}", other.size),
                ));
            }
            let total = headers.len() as u64;
            ((0..total).collect(), fps, total)
        }
        None => {
            let Header { frames, duration_ms, .. } = headers[0];
            let known = duration_ms > 0 && frames > 1;
            let fps = if known { frames as f64 * 1000.0 / duration_ms as f64 } else { ANIMATION_RATE };
            (sampling.indices(frames, fps)?, fps, frames)
        }
    };
    let count = indices.len() as u64;
    // As often as they are sampled.
    let sampled = fps * count as f64 / total as f64;
    let fit = video.rule.fit(count, size)?;
    let stamped = *spelling == Spelling::Timed;
    let patches = video.rule.patches();
    Ok(Plan {
        patch: patches.patch,
        times: if stamped { sampling.timestamps(&indices, fps) } else { Vec::new() },
        frames: listed.is_none().then_some(indices),
        seconds: Some((patches.temporal as f64 / sampled) as f32),
        runs: if *spelling == Spelling::Plain { 1 } else { fit.groups },
        fit,
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
    MediaError::Malformed { what: kind.noun(), why }
}
