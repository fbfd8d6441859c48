//! Gets the bytes of a medium from base64 in the body, or from a file under a root.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::read::DecoderReader;
use plimsoll_media::{MediaError, Modality};

use super::refused::refused;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::state::media::config::{MediaConfig, MediaFetch};

/// Standard base64, with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The supported video formats, for error messages.
const VIDEOS: &str = "animated GIF and WebP, a list of frames (`video`), and data:video/jpeg;base64 with frames between commas; \
     with --ffmpeg also MP4, QuickTime, WebM, Matroska, AVI and MPEG-TS";
/// The supported audio formats, for error messages.
const SOUNDS: &str = "WAV, FLAC, MP3 and Ogg Vorbis; with --ffmpeg also AAC, M4A, Ogg Opus and WebM";

/// Refuses a URL that this server does not fetch. `known`: the URL schemes that this field takes, for the error.
pub(crate) fn fetchable(config: &MediaConfig, param: &str, url: &str, known: &str) -> ApiResult<()> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
        return Err(ApiError::invalid(param, format!("{param} must begin with {known}")));
    }
    if config.fetch == MediaFetch::Off {
        let message = format!("{param}: this server fetches nothing (--media-fetch off); send a data: URL");
        return Err(ApiError::unsupported(param, message));
    }
    Ok(())
}

/// Decodes base64 in one piece, if the result is within the limit and its declared type is supported.
pub(super) fn decoded(
    param: &str,
    media_type: &str,
    data: &str,
    kind: Modality,
    limit: (u64, &'static str),
) -> ApiResult<Vec<u8>> {
    check_type(param, media_type, kind)?;
    from_base64(param, data, limit)
}

/// Returns the media type with its parameters and the base64 of a data: URL; none for any other URL.
pub(crate) fn data_url<'u>(param: &str, url: &'u str) -> ApiResult<Option<(&'u str, &'u str)>> {
    let Some((_, rest)) = url.split_at_checked(5).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("data:")) else {
        return Ok(None);
    };
    let (head, data) = rest.split_once(',').unwrap_or_default();
    match head.rsplit_once(';') {
        Some((head, encoding)) if encoding.eq_ignore_ascii_case("base64") => Ok(Some((head, data))),
        _ => Err(ApiError::invalid(param, format!("{param}: a data: URL is data:TYPE;base64,DATA"))),
    }
}

/// Decodes base64 in one piece, if the result is within the limit.
pub(crate) fn from_base64(param: &str, data: &str, limit: (u64, &'static str)) -> ApiResult<Vec<u8>> {
    // Mail and the program `base64` break lines.
    let solid = data.bytes().filter(|byte| !byte.is_ascii_whitespace()).count();
    let most = base64::decoded_len_estimate(solid);
    let surely = solid as u64 / 4 * 3;
    // The estimate is up to two bytes too large.
    if surely.saturating_sub(2) > limit.0 {
        return Err(refused(param, &too_large(surely.saturating_sub(2), limit)));
    }
    let mut bytes = Vec::with_capacity(most);
    let decoded = match solid == data.len() {
        true => BASE64.decode_vec(data, &mut bytes).map_err(|error| error.to_string()),
        false => {
            let solid = Solid(data.as_bytes());
            DecoderReader::new(solid, &BASE64).read_to_end(&mut bytes).map(drop).map_err(|error| error.to_string())
        }
    };
    match decoded {
        Ok(()) => Ok(bytes),
        Err(error) => Err(ApiError::invalid(param, format!("{param}: this is not base64: {error}"))),
    }
}

/// A text's bytes without blanks and line breaks.
struct Solid<'t>(&'t [u8]);

impl Read for Solid<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let mut taken = 0;
        while let (Some(place), Some((byte, rest))) = (into.get_mut(taken), self.0.split_first()) {
            self.0 = rest;
            if !byte.is_ascii_whitespace() {
                *place = *byte;
                taken += 1;
            }
        }
        Ok(taken)
    }
}

pub(super) fn too_large(asked: u64, (limit, flag): (u64, &'static str)) -> MediaError {
    MediaError::OverLimit { what: "a file", asked, limit, unit: "bytes", flag }
}

/// Declared types that are accepted for images, videos and audio clips.
const IMAGE_TYPES: [&str; 7] =
    ["", "image/png", "image/jpeg", "image/jpg", "image/gif", "image/webp", "application/octet-stream"];
const VIDEO_TYPES: [&str; 6] =
    ["video/mp4", "video/quicktime", "video/webm", "video/x-matroska", "video/x-msvideo", "video/mp2t"];
const AUDIO_TYPES: [&str; 18] = [
    "",
    "audio/wav",
    "audio/x-wav",
    "audio/wave",
    "audio/vnd.wave",
    "audio/mpeg",
    "audio/mp3",
    "audio/flac",
    "audio/x-flac",
    "audio/ogg",
    "application/ogg",
    "audio/aac",
    "audio/mp4",
    "audio/x-m4a",
    "audio/m4a",
    "audio/opus",
    "audio/webm",
    "application/octet-stream",
];

/// Refuses a declared type that is not supported. The first bytes give the real type later.
fn check_type(param: &str, media_type: &str, kind: Modality) -> ApiResult<()> {
    let known: &[&str] = match kind {
        Modality::Image | Modality::Video => &IMAGE_TYPES,
        Modality::Audio => &AUDIO_TYPES,
    };
    let film = kind == Modality::Video && VIDEO_TYPES.contains(&media_type.to_ascii_lowercase().as_str());
    if film || known.iter().any(|known| media_type.eq_ignore_ascii_case(known)) {
        return Ok(());
    }
    let message = format!("{param}: `{}` is not read here; supported are {}", quote(media_type), formats(kind));
    Err(ApiError::unsupported(param, message))
}

/// Returns the path in a `file://` URL, if the server has roots. [`open`] checks whether the file lies under one of them.
pub(super) fn local(param: &str, url: &str, roots: &[PathBuf]) -> ApiResult<PathBuf> {
    if roots.is_empty() {
        let message = format!("{param}: this server reads no files for its clients (--media-root)");
        return Err(ApiError::unsupported(param, message));
    }
    let bad = |why: &str| ApiError::invalid(param, format!("{param}: {why}"));
    let path = url.get(7..).filter(|_| url[4..].starts_with("://"));
    let path = path.map(|rest| rest.strip_prefix("localhost").unwrap_or(rest));
    let path = path.filter(|path| path.starts_with('/')).ok_or_else(|| bad("a file URL is file:///PATH"))?;
    let path = unescaped(path).ok_or_else(|| bad("its escapes are not text"))?;
    Ok(PathBuf::from(path))
}

/// Decodes the percent signs of a URL's path.
fn unescaped(path: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&byte, more)) = rest.split_first() {
        rest = more;
        if byte == b'%' {
            let (digits, more) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = more;
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok().filter(|path| !path.contains('\0'))
}

/// Opens a file under one of the roots. A client cannot tell a file outside of them from a missing one.
pub(super) fn open(path: &Path, roots: &[PathBuf]) -> Option<(File, u64)> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // Opening a pipe without a writer must not block.
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    }
    // The path is checked before, so that no file outside is even opened, and again after: the opened file must be the one at the path.
    let inside = |path: &Path| {
        let real = fs::canonicalize(path).ok()?;
        let within = |root: &PathBuf| fs::canonicalize(root).is_ok_and(|root| real.starts_with(root));
        roots.iter().any(within).then_some(real)
    };
    let file = options.open(inside(path)?).ok()?;
    let (opened, found) = (file.metadata().ok()?, fs::metadata(inside(path)?).ok()?);
    let same = opened.is_file() && same_file(&opened, &found);
    same.then_some((file, opened.len()))
}

#[cfg(unix)]
fn same_file(one: &fs::Metadata, other: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

#[cfg(not(unix))]
fn same_file(one: &fs::Metadata, other: &fs::Metadata) -> bool {
    one.len() == other.len() && one.modified().ok() == other.modified().ok()
}

/// Returns the supported formats of a kind, for messages.
pub(super) fn formats(kind: Modality) -> &'static str {
    match kind {
        Modality::Video => VIDEOS,
        Modality::Audio => SOUNDS,
        Modality::Image => "PNG, JPEG, GIF and WebP",
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
