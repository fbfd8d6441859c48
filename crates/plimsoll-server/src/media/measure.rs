//! Measures a medium from its header alone: tokens, pixels, bytes. A medium over a limit is refused before any decoding.

use plimsoll_engine::{AudioSpec, Grid, MediaSpec, Spelling, Stretch, VideoSpec};
use plimsoll_media::audio::{self, AudioLimits, LongClip, resampled_len};
use plimsoll_media::ffmpeg::{Film, RUN_BYTES};
use plimsoll_media::geometry::{Cut, Fit, ImageRule, Steps};
use plimsoll_media::image::{Filter, probe};
use plimsoll_media::{ContentKey, MediaError, Modality, Shape, Size};

use super::medium::{Medium, Source, Windowing};
use super::refused::{refused, track_refused};
use super::source::formats;
use crate::http::error::ApiResult;
use crate::state::media::config::MediaConfig;
use crate::state::model::ModelState;

/// Frames a second of an animation without durations.
const ANIMATION_RATE: f64 = 10.0;

/// Bytes of a pixel.
const RGB: u64 = 3;

/// A medium that is within the limits.
#[derive(Debug)]
pub(crate) struct Measured {
    /// The path of the medium's field in the body.
    pub param: String,
    pub key: ContentKey,
    pub shape: Shape,
    pub grid: Grid,
    /// The time of each group of frames in seconds, if the model's prompt has them; else empty.
    pub times: Vec<f64>,
    /// Seconds from one group of frames of a video to the next.
    pub seconds: Option<f64>,
    /// For a video interleaved with its audio track, the order in which the tokens of both follow each other; else empty.
    pub stretches: Vec<Stretch>,
    /// Whether it is such an audio track, for which the template has written no placeholder.
    pub of_video: bool,
    /// Frames of an audio clip's spectrogram before it is filled up with silence.
    pub clip_frames: u64,
    /// The file header of an audio clip that is transcribed window by window. All other fields are then of one window.
    pub windowed: Option<audio::Header>,
    /// Index of its first placeholder in the prompt, once the prompt is made.
    pub first: u32,
    /// The most bytes that decoding takes, apart from the pixels.
    pub decode_bytes: u64,
    /// Bytes of its pixels, or of its spectrogram.
    pub pixel_bytes: u64,
    pub(super) files: Vec<Vec<u8>>,
    /// The result of ffmpeg for a video file.
    pub(super) film: Option<Film>,
    /// Indices of the frames to decode, for an animation or a video file; none for images and lists.
    pub(super) frames: Option<Vec<u64>>,
    /// The size that it is resized to; unused for an audio clip.
    pub(super) canvas: Size,
    /// The filter of the resize.
    pub(super) filter: Filter,
    /// Size of the pieces of the canvas that the encoder gets.
    pub(super) tile: Size,
    /// The number of placeholders that a prompt has for it before they are repeated.
    pub(super) runs: u64,
    /// The division of an image in pieces that are encoded one by one.
    pub(super) cut: Option<Cut>,
    /// The intermediate sizes of the resize, if it has several steps.
    pub(super) steps: Option<Steps>,
    /// The pieces that are encoded one by one, one a placeholder.
    pub(super) pieces: Vec<Piece>,
}

/// A piece of an image that is a separate item.
#[derive(Debug)]
pub(super) struct Piece {
    pub size: Size,
    pub grid: Grid,
    pub shape: Shape,
    /// Index of its first placeholder in the prompt, once the prompt is made.
    pub first: u32,
}

impl Measured {
    /// Returns the bytes of its files.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.capacity() as u64).sum()
    }

    /// Returns the bytes of each item's pixels, or of its spectrogram.
    pub(super) fn item_bytes(&self) -> impl Iterator<Item = u64> {
        let whole = self.pieces.is_empty().then_some(self.pixel_bytes);
        whole.into_iter().chain(self.pieces.iter().map(|piece| RGB * piece.size.pixels()))
    }

    /// Returns the number of embeddings of each item.
    fn item_tokens(&self) -> impl Iterator<Item = u64> {
        let whole = self.pieces.is_empty().then_some(self.shape.tokens);
        whole.into_iter().chain(self.pieces.iter().map(|piece| piece.shape.tokens))
    }

    /// Notes the position `first` of its `nth` placeholder. Returns how often this placeholder is repeated.
    pub(super) fn begin_run(&mut self, nth: u64, first: u32) -> usize {
        if nth == 0 {
            self.first = first;
        }
        let tokens = match self.pieces.get_mut(nth as usize) {
            Some(piece) => {
                piece.first = first;
                piece.shape.tokens
            }
            None => self.shape.tokens / self.runs,
        };
        tokens as usize
    }
}

/// Reads the headers of a request's media, and refuses media over a limit. All their bytes must be in memory. Runs on a text worker.
pub(crate) fn measure_all(state: &ModelState, spec: &MediaSpec, media: Vec<Medium>) -> ApiResult<Vec<Measured>> {
    let mut measured = Vec::with_capacity(media.len());
    for medium in media {
        let (param, track) = (medium.param.clone(), medium.of_video);
        let one = match medium.sources.as_slice() {
            // ffmpeg has not read the video, which was measured before: it is an animation.
            [Source::Track] => Err(MediaError::NoAudioTrack),
            _ => measure(spec, &state.server.config.media, medium),
        };
        let refused = if track { track_refused } else { refused };
        measured.push(one.map_err(|error| {
            state.media_pipeline.counts.refused.inc();
            refused(&param, &error)
        })?);
        if track {
            interleave(spec, &mut measured);
        }
    }
    let rows = measured.iter().flat_map(|medium| medium.item_tokens().map(|tokens| tokens as usize));
    let param = measured.first().map_or("messages", |first| &first.param);
    spec.outputs.check(rows).map_err(|error| refused(param, &error))?;
    Ok(measured)
}

/// Interleaves the tokens of a video and of its audio track, the last two media, where the model's processor does so.
fn interleave(spec: &MediaSpec, measured: &mut [Measured]) {
    let rule = spec.places.and_then(|rule| rule.interleave());
    let (Some(rule), [.., video, track]) = (rule, measured) else { return };
    let groups = video.grid.frames;
    let shape = (groups, video.shape.tokens as usize / groups.max(1));
    video.stretches = rule.stretches(shape, video.seconds.unwrap_or(0.0), track.shape.tokens as usize);
    (track.of_video, track.runs) = (true, 0);
}

/// Reads the headers of a medium. All its bytes must be in memory.
fn measure(spec: &MediaSpec, limits: &MediaConfig, medium: Medium) -> Result<Measured, MediaError> {
    let (wanted, files) = (medium.kind, medium.sources.into_iter());
    let files: Vec<Vec<u8>> =
        files.filter_map(|source| if let Source::Bytes(bytes) = source { Some(bytes) } else { None }).collect();
    if let (Modality::Audio, Some(audio)) = (wanted, &spec.audio) {
        return measure_audio(spec, audio, limits, (medium.param, medium.windows), files);
    }
    let headers = files.iter().map(|file| match &medium.film {
        Some(film) => Ok(Look::film(film, file)),
        None => Look::header(file, limits),
    });
    let headers = headers.collect::<Result<Vec<_>, _>>().map_err(|error| supported(error, wanted))?;
    let first = *headers.first().ok_or_else(|| malformed(wanted, "it has no frames".into()))?;
    let (plan, tokens_max) = match (&spec.image, &spec.video) {
        (Some(image), _) if wanted == Modality::Image => {
            (measure_image(&image.rule, medium.pixels_max, first.size)?, image.tokens_max)
        }
        (_, Some(video)) if wanted == Modality::Video => {
            (film(video, &spec.spelling, medium.listed, &headers)?, video.tokens_max)
        }
        _ => return Err(malformed(wanted, "the model takes none".into())),
    };
    let Plan { fit, patch, pieces, frames, times, seconds, runs } = plan;
    // Another release of ffmpeg may decode to other pixels.
    let ffmpeg = limits.ffmpeg.as_ref().filter(|_| medium.film.is_some()).map_or("", |ffmpeg| ffmpeg.version());
    let parameters = format!("{} {ffmpeg}", spec.parameters);
    let Fit { canvas, size, images, groups, shape, filter, cut, steps } = fit;
    let behind = cut.and_then(|cut| cut.whole);
    if shape.tokens > tokens_max {
        let (what, asked, flag) = (wanted.noun(), shape.tokens, wanted.flag());
        return Err(MediaError::OverLimit { what, asked, limit: tokens_max, unit: "tokens", flag });
    }
    let decoding = |header: &Look| header.decode_bytes.max(header.beside_bytes + fit.held_bytes(header.size));
    Ok(Measured {
        key: key(&parameters, wanted, &files, canvas, frames.as_deref()),
        param: medium.param,
        shape,
        grid: grid(groups, size, patch),
        times,
        seconds,
        stretches: Vec::new(),
        of_video: false,
        clip_frames: 0,
        windowed: None,
        first: 0,
        decode_bytes: headers.iter().map(decoding).max().unwrap_or(0),
        pixel_bytes: RGB * (images * size.pixels() + behind.map_or(0, Size::pixels)),
        files,
        film: medium.film,
        frames,
        canvas,
        filter,
        tile: size,
        runs,
        cut,
        steps,
        pieces,
    })
}

/// The limits on an audio clip, from the engine's rule and the server's settings.
pub(super) fn audio_limits(audio: &AudioSpec, limits: &MediaConfig, windows: Windowing) -> AudioLimits {
    let rule = &audio.rule;
    // A limit below one window holds for all clips.
    let longer =
        windows != Windowing::Never && rule.window().is_some_and(|window| window <= rule.max_seconds * rule.rate);
    let (seconds, limited_by) = match longer {
        true => (limits.transcription_seconds, "--max-transcription-seconds"),
        false => (rule.max_seconds, rule.limited_by()),
    };
    AudioLimits { file_bytes: limits.audio_bytes, seconds, limited_by }
}

/// Measures an audio clip: its number of samples gives its number of tokens.
fn measure_audio(
    spec: &MediaSpec,
    audio: &AudioSpec,
    limits: &MediaConfig,
    (param, windows): (String, Windowing),
    files: Vec<Vec<u8>>,
) -> Result<Measured, MediaError> {
    let file = files.first().ok_or_else(|| malformed(Modality::Audio, "it is not there".into()))?;
    let limits = audio_limits(audio, limits, windows);
    let header = audio::probe(file, &limits).map_err(|error| supported(error, Modality::Audio))?;
    let given = resampled_len(header.samples, header.rate, audio.rule.rate as u32);
    let window = audio.rule.window().filter(|_| windows != Windowing::Never);
    let window = window.filter(|window| windows == Windowing::Always || given > *window);
    let samples = window.unwrap_or(audio.rule.filled(given));
    let shape = match window {
        Some(_) => audio.rule.worst(),
        None => audio.rule.shape(given)?,
    };
    let frames = audio.rule.frames(samples);
    let bytes = size_of::<f32>() as u64;
    let decode_bytes = match window {
        Some(_) => LongClip::bytes(&header, &audio.mel, frames as usize),
        None => header.decode_bytes() + samples * bytes,
    };
    Ok(Measured {
        key: ContentKey::of(Modality::Audio, &spec.parameters, file),
        param,
        shape,
        grid: Grid::audio(frames as usize),
        times: Vec::new(),
        seconds: None,
        stretches: Vec::new(),
        of_video: false,
        clip_frames: audio.rule.frames(given),
        windowed: window.map(|_| header),
        first: 0,
        decode_bytes,
        pixel_bytes: frames * audio.mel.bands() as u64 * bytes,
        files,
        film: None,
        frames: None,
        canvas: Size::new(0, 0),
        filter: Filter::default(),
        tile: Size::new(0, 0),
        runs: 1,
        cut: None,
        steps: None,
        pieces: Vec::new(),
    })
}

/// The header of a file.
#[derive(Clone, Copy)]
struct Look {
    size: Size,
    frames: u64,
    /// The duration of all frames in milliseconds; 0 where the file has none.
    duration_ms: u64,
    /// The most bytes that decoding takes.
    decode_bytes: u64,
    /// The part of these bytes that decoding holds while a frame is resized.
    beside_bytes: u64,
}

impl Look {
    fn header(file: &[u8], limits: &MediaConfig) -> Result<Self, MediaError> {
        let header = probe(file, &limits.image)?;
        let (size, frames, duration_ms) = (header.size, header.frames, header.duration_ms);
        Ok(Self { size, frames, duration_ms, decode_bytes: header.decode_bytes(), beside_bytes: 0 })
    }

    fn film(film: &Film, file: &[u8]) -> Self {
        let &Film { size, frames, duration_ms, .. } = film;
        // ffmpeg runs until the last frame has been resized, and reads a copy of the file.
        Self { size, frames, duration_ms, decode_bytes: 0, beside_bytes: RUN_BYTES + file.len() as u64 }
    }
}

/// Adds the supported formats of `kind` to the error for an unsupported file.
fn supported(error: MediaError, kind: Modality) -> MediaError {
    match error {
        MediaError::Unsupported { what, .. } => MediaError::Unsupported { what, supported: formats(kind) },
        error => error,
    }
}

/// How a medium is processed.
struct Plan {
    fit: Fit,
    patch: u64,
    pieces: Vec<Piece>,
    frames: Option<Vec<u64>>,
    times: Vec<f64>,
    seconds: Option<f64>,
    runs: u64,
}

fn grid(frames: u64, size: Size, patch: u64) -> Grid {
    let side = |pixels: u32| (u64::from(pixels) / patch) as usize;
    Grid { frames: frames as usize, height: side(size.height), width: side(size.width) }
}

fn measure_image(rule: &ImageRule, pixels_max: Option<u64>, size: Size) -> Result<Plan, MediaError> {
    let rule = match pixels_max {
        Some(asked) => rule.limited(asked)?,
        None => rule.clone(),
    };
    let (patch, fit) = (rule.patches().patch, rule.fit(size)?);
    let pieces = match fit.cut {
        Some(cut) => {
            let sizes = (0..fit.images).map(|_| fit.size).chain(cut.whole);
            let grid = |size| grid(1, size, patch);
            sizes.map(|size| Piece { size, grid: grid(size), shape: rule.piece(size), first: 0 }).collect()
        }
        None => Vec::new(),
    };
    let runs = match &rule {
        // One placeholder a row of tokens.
        ImageRule::Longest(rule) => u64::from(fit.size.height) / rule.patches.factor(),
        _ => (pieces.len() as u64).max(1),
    };
    Ok(Plan { fit, patch, pieces, frames: None, times: Vec::new(), seconds: None, runs })
}

fn film(video: &VideoSpec, spelling: &Spelling, listed: Option<f64>, headers: &[Look]) -> Result<Plan, MediaError> {
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
            let Look { frames, duration_ms, .. } = headers[0];
            let known = duration_ms > 0 && frames > 1;
            let fps = if known { frames as f64 * 1000.0 / duration_ms as f64 } else { ANIMATION_RATE };
            (sampling.indices(frames, fps)?, fps, frames)
        }
    };
    let count = indices.len() as u64;
    // The rate at which the frames were sampled.
    let sampled = fps * count as f64 / total as f64;
    let fit = video.rule.fit(count, size)?;
    let stamped = matches!(spelling, Spelling::Timed | Spelling::Clocked { .. });
    let patches = video.rule.patches();
    Ok(Plan {
        patch: patches.patch,
        pieces: Vec::new(),
        times: if stamped { sampling.timestamps(&indices, fps) } else { Vec::new() },
        frames: listed.is_none().then_some(indices),
        seconds: Some(patches.temporal as f64 / sampled),
        runs: if matches!(spelling, Spelling::Plain | Spelling::Interleaved { .. }) { 1 } else { fit.groups },
        fit,
    })
}

/// The key of a medium's content: all its bytes, and all parameters that affect its processing.
fn key(parameters: &str, kind: Modality, files: &[Vec<u8>], size: Size, frames: Option<&[u64]>) -> ContentKey {
    let parameters = format!("{parameters} {}x{} {frames:?}", size.height, size.width);
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
