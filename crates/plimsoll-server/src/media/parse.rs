//! Parses the media in a body: parts of its messages that are not text, in their order.

use plimsoll_engine::MediaSpec;
use plimsoll_media::Modality;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::medium::{Medium, Source, Windowing};
use super::refused::TRACKS;
use super::refused::refused;
use super::source::{data_url, decoded, fetchable, local, too_large};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, Text, wrong};
use crate::media::documents::DocumentParser;
use crate::state::model::ModelState;

/// The most pixels of an image with `detail: low`.
const LOW_PIXELS: u64 = 512 * 512;

/// Frames of a list a second, unless the client says otherwise.
const FRAMES_PER_SECOND: f64 = 2.0;

/// Frames a second that a list of frames may have: positions in time are counted in 32 bits.
const FPS: std::ops::RangeInclusive<f64> = 0.01..=1000.0;

/// Names of audio formats. The server detects a file's format from its first bytes.
const AUDIO_FORMATS: [&str; 9] = ["wav", "mp3", "flac", "ogg", "aac", "m4a", "mp4", "opus", "webm"];

/// Collects the media of one request while it is parsed.
pub(crate) struct MediaParser<'a> {
    state: &'a ModelState,
    pub media: Vec<Medium>,
    /// Whether the client wants the audio tracks of videos as input, too.
    tracks: bool,
    /// The request's files that are not media.
    pub files: DocumentParser<'a>,
}

impl<'a> MediaParser<'a> {
    pub fn new(state: &'a ModelState) -> Self {
        Self { state, media: Vec::new(), tracks: false, files: DocumentParser::new(&state.server) }
    }

    /// Takes the client's options for the model's processor.
    pub fn processor(&mut self, fields: &mut Fields<'_>) -> ApiResult<()> {
        let Some(raw) = fields.raw("mm_processor_kwargs") else { return Ok(()) };
        let mut own = Fields::of("mm_processor_kwargs".into(), raw)?;
        self.tracks = own.take("use_audio_in_video")?.unwrap_or(false);
        // Each other option would change the answer.
        own.rest_unsupported("only use_audio_in_video is known; leave it out")?;
        if self.tracks && self.state.audio().is_none() {
            let name = &self.state.served.names[0];
            let message = format!("{TRACKS}: the served model `{name}` takes no audio; leave it out");
            return Err(ApiError::unsupported(TRACKS, message));
        }
        Ok(())
    }

    /// Takes a part of chat's content that is not text. Returns the parts for the template's message: one, or two for a video and its audio
    /// track that the model's processor does not interleave.
    pub fn part(&mut self, kind: &str, fields: &mut Fields<'_>) -> ApiResult<Vec<Value>> {
        let medium = self.medium(kind, fields)?;
        let interleaved = self.state.served.engine.media().and_then(|spec| spec.places?.interleave()).is_some();
        let behind = self.media.last().is_some_and(|medium| medium.of_video) && !interleaved;
        Ok(std::iter::once(medium).chain(behind.then(|| json!({"type": Modality::Audio.name()}))).collect())
    }

    fn medium(&mut self, kind: &str, fields: &mut Fields<'_>) -> ApiResult<Value> {
        let at = fields.param("type");
        match kind {
            "image_url" => {
                self.takes(&at, kind, Modality::Image)?;
                let (param, raw) = fields.needed("image_url")?;
                let (url, detail) = address(&param, raw)?;
                self.image(param, &url.0, detail.as_deref())
            }
            "video_url" => {
                self.takes(&at, kind, Modality::Video)?;
                let (param, raw) = fields.needed("video_url")?;
                let (url, detail) = address(&param, raw)?;
                if detail.is_some() {
                    return Err(ApiError::unsupported(format!("{param}.detail"), "detail has no effect on a video"));
                }
                self.video(param, &url.0)
            }
            "video" => {
                self.takes(&at, kind, Modality::Video)?;
                let fps = fields.take::<f64>("fps")?;
                let (param, raw) = fields.needed("video")?;
                self.frames(param, raw, fps)
            }
            "input_audio" | "audio_url" => {
                self.takes(&at, kind, Modality::Audio)?;
                let (param, raw) = fields.needed(kind)?;
                if kind == "input_audio" {
                    let mut inner = Fields::of(param.clone(), raw)?;
                    let (data, format) = (inner.required::<Text<'_>>("data")?, inner.required::<String>("format")?);
                    inner.finish()?;
                    return self.audio(param, &data.0, &format);
                }
                let (url, detail) = address(&param, raw)?;
                if detail.is_some() {
                    return Err(ApiError::unsupported(format!("{param}.detail"), "detail has no effect on audio"));
                }
                let source = self.source(&param, &url.0, Modality::Audio)?;
                self.add(Medium::new(param, Modality::Audio, vec![source], None))
            }
            other => {
                let known = "text, image_url, video_url, video, input_audio, audio_url and file";
                let message = format!("{at} is `{}`; known are {known}", quote(other));
                Err(ApiError::unsupported(at, message))
            }
        }
    }

    /// Refuses a kind of media that the model does not take. `word`: the client's name for it at `at`.
    pub fn takes(&self, at: &str, word: &str, kind: Modality) -> ApiResult<()> {
        let spec = self.state.served.engine.media();
        let has = |spec: &MediaSpec| match kind {
            Modality::Image => spec.image.is_some(),
            Modality::Video => spec.video.is_some(),
            Modality::Audio => spec.audio.is_some(),
        };
        if spec.is_some_and(has) {
            return Ok(());
        }
        let kinds = match kind {
            Modality::Image => "images",
            Modality::Video => "videos",
            Modality::Audio => "audio",
        };
        let name = &self.state.served.names[0];
        let message = format!("{at} is `{word}`: the served model `{name}` takes no {kinds}");
        Err(ApiError::unsupported(at, message))
    }

    /// Adds an image.
    pub fn image(&mut self, param: String, url: &str, detail: Option<&str>) -> ApiResult<Value> {
        let pixels_max = match detail {
            None | Some("auto" | "high") => None,
            Some("low") => Some(LOW_PIXELS),
            Some(other) => {
                let message = format!("detail is `{}`; known are auto, low and high", quote(other));
                return Err(ApiError::unsupported(format!("{param}.detail"), message));
            }
        };
        let source = self.source(&param, url, Modality::Image)?;
        self.add(Medium { pixels_max, ..Medium::new(param, Modality::Image, vec![source], None) })
    }

    /// Adds an image from base64. `media_type`: its declared type.
    pub fn base64(&mut self, param: String, media_type: &str, data: &str) -> ApiResult<Value> {
        let limit = self.state.server.config.media.file_limit(Modality::Image);
        let source = Source::Bytes(decoded(&param, media_type, data, Modality::Image, limit)?);
        self.add(Medium::new(param, Modality::Image, vec![source], None))
    }

    /// Adds an audio clip from base64, with its declared format. The server detects the real format from the first bytes.
    pub fn audio(&mut self, param: String, data: &str, format: &str) -> ApiResult<Value> {
        if !AUDIO_FORMATS.contains(&format) {
            let message = format!("{param}.format is `{}`; known are {}", quote(format), AUDIO_FORMATS.join(", "));
            return Err(ApiError::unsupported(format!("{param}.format"), message));
        }
        let limit = self.state.server.config.media.file_limit(Modality::Audio);
        let source = Source::Bytes(decoded(&format!("{param}.data"), "", data, Modality::Audio, limit)?);
        self.add(Medium::new(param, Modality::Audio, vec![source], None))
    }

    /// Adds an audio clip from its bytes.
    pub fn audio_file(&mut self, param: &str, bytes: &[u8], windows: Windowing) -> ApiResult<Value> {
        let limit = self.state.server.config.media.file_limit(Modality::Audio);
        if bytes.len() as u64 > limit.0 {
            return Err(refused(param, &too_large(bytes.len() as u64, limit)));
        }
        let (param, sources) = (param.to_owned(), vec![Source::Bytes(bytes.to_vec())]);
        self.add(Medium { windows, ..Medium::new(param, Modality::Audio, sources, None) })
    }

    /// Adds a video: a file, with its audio track if the client asks for it, or frames between commas, as vLLM takes them.
    fn video(&mut self, param: String, url: &str) -> ApiResult<Value> {
        let frames = without_prefix(url, "data:video/jpeg;base64,");
        let (sources, listed) = match frames {
            Some(frames) => {
                let limit = self.state.server.config.media.file_limit(Modality::Image);
                let frame = |data| decoded(&param, "image/jpeg", data, Modality::Image, limit).map(Source::Bytes);
                let sources = self.few(&param, frames.split(','))?.map(frame).collect::<ApiResult<_>>()?;
                (sources, Some(FRAMES_PER_SECOND))
            }
            None => (vec![self.source(&param, url, Modality::Video)?], None),
        };
        self.add_video(param, sources, listed)
    }

    /// Adds a video, and its audio track if the client asks for it.
    fn add_video(&mut self, param: String, sources: Vec<Source>, listed: Option<f64>) -> ApiResult<Value> {
        if !self.tracks {
            return self.add(Medium::new(param, Modality::Video, sources, listed));
        }
        let unsupported = |why: &str| Err(ApiError::unsupported(param.clone(), format!("{param}: {TRACKS}: {why}")));
        if listed.is_some() {
            return unsupported("a list of frames has no audio track; send a video file, or leave it out");
        }
        if self.state.server.config.media.ffmpeg.is_none() {
            return unsupported("ffmpeg decodes audio tracks; start the server with --ffmpeg, or leave it out");
        }
        let video = self.add(Medium::new(param.clone(), Modality::Video, sources, None))?;
        self.add(Medium::track(param))?;
        Ok(video)
    }

    /// Adds a video from a list of images.
    fn frames(&mut self, param: String, raw: &RawValue, fps: Option<f64>) -> ApiResult<Value> {
        if raw.get().starts_with('"') {
            let url: Text<'_> = serde_json::from_str(raw.get()).map_err(|e| wrong(&param, &e))?;
            return self.video(param, &url.0);
        }
        let fps = fps.unwrap_or(FRAMES_PER_SECOND);
        if !FPS.contains(&fps) {
            let (least, most) = (FPS.start(), FPS.end());
            let message = format!("{param}: {fps} frames a second; {least} to {most} are possible");
            return Err(ApiError::invalid(&param, message));
        }
        let frames: Vec<Text<'_>> = serde_json::from_str(raw.get()).map_err(|e| wrong(&param, &e))?;
        let frames = self.few(&param, frames.iter().map(|frame| &*frame.0))?;
        let sources = frames.map(|url| self.source(&param, url, Modality::Image)).collect::<ApiResult<_>>()?;
        self.add_video(param, sources, Some(fps))
    }

    /// Refuses more frames than a video may have, and an empty list.
    fn few<'t, I: Iterator<Item = &'t str> + Clone>(&self, param: &str, frames: I) -> ApiResult<I> {
        let video = self.state.served.engine.media().and_then(|spec| spec.video.as_ref());
        let limit = video.map_or(0, |video| video.rule.sampling().max_frames);
        let count = frames.clone().take(limit as usize + 1).count() as u64;
        if count == 0 || count > limit {
            let message = format!("{param} needs 1 to {limit} frames (--max-video-frames)");
            return Err(ApiError::invalid(param, message));
        }
        Ok(frames)
    }

    fn add(&mut self, medium: Medium) -> ApiResult<Value> {
        let most = self.state.served.engine.media().map_or(0, |spec| spec.items_max);
        if self.media.len() >= most {
            let track = if self.tracks { "; a video with its audio track counts as two" } else { "" };
            let message = format!("the request has more than {most} media, the limit (--max-media-per-request){track}");
            return Err(ApiError::invalid(medium.param, message));
        }
        let kind = medium.kind.name();
        self.media.push(medium);
        Ok(json!({"type": kind}))
    }

    fn source(&self, param: &str, url: &str, kind: Modality) -> ApiResult<Source> {
        let config = &self.state.server.config.media;
        let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
        let is = |name: &str| scheme.eq_ignore_ascii_case(name);
        if let Some((head, data)) = data_url(param, url)? {
            let media_type = head.split(';').next().unwrap_or_default().to_ascii_lowercase();
            return decoded(param, &media_type, data, kind, config.file_limit(kind)).map(Source::Bytes);
        }
        if is("file") {
            return local(param, url, &config.roots).map(Source::File);
        }
        fetchable(config, param, url, "data:, https://, http:// or file://")?;
        Ok(Source::Url(url.to_owned()))
    }
}

/// Returns the rest of a URL after a prefix, compared without case: the scheme, type and encoding of a data: URL have no case.
fn without_prefix<'b>(url: &'b str, prefix: &str) -> Option<&'b str> {
    let (head, rest) = url.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(rest)
}

/// Reads a URL, or an object with one and perhaps a `detail`.
fn address<'b>(param: &str, raw: &'b RawValue) -> ApiResult<(Text<'b>, Option<String>)> {
    if raw.get().starts_with('"') {
        return serde_json::from_str(raw.get()).map(|url| (url, None)).map_err(|e| wrong(param, &e));
    }
    let mut fields = Fields::of(param.into(), raw)?;
    let (url, detail) = (fields.required("url")?, fields.take("detail")?);
    fields.finish()?;
    Ok((url, detail))
}
