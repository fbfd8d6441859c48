//! The bytes of a medium: out of the body, from a file under a root, from another server.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::read::DecoderReader;
use plimsoll_hub::{FETCH_BYTES, FETCH_PIECE_BYTES, FetchError, host_of};
use plimsoll_media::{MediaError, Modality};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::fetch_queue::{FETCHES, FETCHES_OF_A_HOST};
use super::parse::{Medium, Source, formats};
use super::refused;
use crate::budget::Held;
use crate::error::{ApiError, ApiResult, cut, quote};
use crate::model_state::ModelState;
use crate::server_state::{Phase, reached};
use crate::spawn_thread::spawn_thread;

/// Standard base64, with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Pieces of a file that wait to be held: a fetch goes no faster than that.
const PIECES: usize = 4;

/// Bytes of a fetch besides the file: the connection's own, and pieces on their way to the request. These are the
/// queued pieces, one that the fetching thread is sending, and one that the request is copying.
const FETCHING_BYTES: u64 = FETCH_BYTES + (PIECES as u64 + 2) * FETCH_PIECE_BYTES;

/// A file waits so many times the time for one until it is its turn.
const TURN_WITHIN: u32 = 2;

/// All files of a request must be here within so many times the time for one, waiting for a turn included.
const FETCHES_WITHIN: u32 = 3;

/// Decodes base64 in one piece, if the result may be that large and its type is one that can be read.
pub(super) fn decoded(
    param: &str,
    media_type: &str,
    data: &str,
    kind: Modality,
    limit: (u64, &'static str),
) -> ApiResult<Vec<u8>> {
    check_type(param, media_type, kind)?;
    // Mail and `base64` break lines.
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

fn too_large(asked: u64, (limit, flag): (u64, &'static str)) -> MediaError {
    MediaError::OverLimit { what: "a file", asked, limit, unit: "bytes", flag }
}

/// What may be said of pictures, and of sounds.
const IMAGE_TYPES: [&str; 7] =
    ["", "image/png", "image/jpeg", "image/jpg", "image/gif", "image/webp", "application/octet-stream"];
const AUDIO_TYPES: [&str; 12] = [
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
    "application/octet-stream",
];

/// Refuses what is said to be something that is not read here. What it really is, its first bytes say.
fn check_type(param: &str, media_type: &str, kind: Modality) -> ApiResult<()> {
    let known: &[&str] = match kind {
        Modality::Image | Modality::Video => &IMAGE_TYPES,
        Modality::Audio => &AUDIO_TYPES,
    };
    if known.iter().any(|known| media_type.eq_ignore_ascii_case(known)) {
        return Ok(());
    }
    let message = format!("{param}: `{}` is not read here; supported are {}", quote(media_type), formats(kind));
    Err(ApiError::unsupported(param, message))
}

/// The file that a `file://` URL names, if it may lie under one of the roots. Whether it does is seen when it is opened.
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

/// A URL's path without its percent signs.
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

/// Opens a file under one of the roots. What lies elsewhere and what does not exist look the same to a client.
fn open(path: &Path, roots: &[PathBuf]) -> Option<(File, u64)> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // A pipe without a writer must not hold us up.
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    }
    // Looked at before, so that nothing outside is even opened, and again after: what was opened must be what lies there.
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

/// Gets the bytes that are elsewhere, all of a request's within a time of their own; `held` grows with them. What is dropped in between
/// lets go of everything.
pub(crate) async fn fetch(state: &Arc<ModelState>, media: &mut [Medium], held: &mut Held) -> ApiResult<()> {
    let Some(param) = media.iter().find(|medium| medium.is_elsewhere()).map(|medium| medium.param.clone()) else {
        return Ok(());
    };
    let within = FETCHES_WITHIN * state.server.config.media.fetch_timeout;
    let mut phase = state.server.phase.subscribe();
    tokio::select! {
        biased;
        done = timeout(within, fetch_all(state, media, held)) => done.unwrap_or_else(|_| Err(too_slow(&param, within))),
        () = reached(&mut phase, Phase::Cut) => Err(cut()),
    }
}

fn too_slow(param: &str, within: Duration) -> ApiError {
    let message = format!(
        "{param}: the request's files were not all here within {} s ({FETCHES_WITHIN} times --media-fetch-timeout); send them in the body, or fewer",
        within.as_secs_f32()
    );
    ApiError {
        param: Some(param.into()),
        code: Some("fetch_timeout"),
        ..ApiError::new(StatusCode::BAD_REQUEST, message)
    }
}

async fn fetch_all(state: &Arc<ModelState>, media: &mut [Medium], held: &mut Held) -> ApiResult<()> {
    for medium in media {
        for source in &mut medium.sources {
            let bytes = match source {
                Source::Bytes(_) => continue,
                Source::Url(url) => remote(state, (&medium.param, medium.kind), url.clone(), held).await?,
                Source::File(path) => read(state, (&medium.param, medium.kind), path.clone(), held).await?,
            };
            *source = Source::Bytes(bytes);
        }
    }
    Ok(())
}

async fn read(
    state: &Arc<ModelState>,
    (param, kind): (&str, Modality),
    path: PathBuf,
    held: &mut Held,
) -> ApiResult<Vec<u8>> {
    let unreadable =
        || ApiError::invalid(param, format!("{param}: there is no such file under this server's media roots"));
    let limit = state.server.config.media.file_limit(kind);
    let roots = state.server.config.media.roots.clone();
    let opened = state.server.on_text_worker(move || Ok(open(&path, &roots))).await?;
    let (file, bytes) = opened.ok_or_else(unreadable)?;
    if bytes > limit.0 {
        return Err(refused(param, &too_large(bytes, limit)));
    }
    state.server.bytes.ever_holds(param, held.bytes() + bytes)?;
    // The worker holds this share until it has read the file, even if the request has ended by then.
    let share = state.server.bytes.hold(bytes)?;
    let whole = state.server.on_text_worker(move || {
        let mut content = Vec::with_capacity(bytes as usize);
        Ok(file.take(bytes).read_to_end(&mut content).map(|_| (content, share)))
    });
    let (content, share) = whole.await?.map_err(|_| unreadable())?;
    held.join(share);
    Ok(content)
}

/// A file from another server, piece by piece: every piece is held before it is kept.
async fn remote(
    state: &Arc<ModelState>,
    (param, kind): (&str, Modality),
    url: String,
    held: &mut Held,
) -> ApiResult<Vec<u8>> {
    let (Some(fetcher), Some(spec)) = (state.media_pipeline.fetcher.clone(), state.served.engine.media()) else {
        return Err(ApiError::internal("nothing can be fetched here"));
    };
    let host = host_of(&url);
    let turn =
        timeout(TURN_WITHIN * state.server.config.media.fetch_timeout, state.media_pipeline.fetch_queue.take(&host))
            .await;
    let turn = turn.map_err(|_| {
        let message = format!(
            "{param}: this server fetches as many files at once as it may ({FETCHES}, of one host {FETCHES_OF_A_HOST}); try again later, or send it in the body"
        );
        ApiError { param: Some(param.into()), ..ApiError::unavailable(message, 5) }
    })?;
    let own = spec.staging.reserve(FETCHING_BYTES).map_err(|error| refused(param, &error))?;
    let limit = state.server.config.media.file_limit(kind);
    let (sender, mut pieces) = mpsc::channel::<Vec<u8>>(PIECES);
    let fetching = spawn_thread("plimsoll-fetch", move || {
        // Held until the connection is closed, even if the request has ended by then.
        let _own = (own, turn);
        fetcher.fetch(&url, limit.0, |piece| sender.blocking_send(piece.to_vec()).is_ok())
    });
    let fetching = fetching.map_err(|error| {
        let message = format!("{param}: the system has no thread left to fetch a file ({error}); try again later");
        ApiError { param: Some(param.into()), ..ApiError::unavailable(message, 5) }
    })?;
    let mut bytes: Vec<u8> = Vec::new();
    while let Some(piece) = pieces.recv().await {
        let room = bytes.capacity() - bytes.len();
        if room < piece.len() {
            let more = piece.len().max(bytes.len() / 8);
            state.server.bytes.ever_holds(param, held.bytes() + (more - room) as u64)?;
            held.grow((more - room) as u64)?;
            bytes.reserve_exact(more);
        }
        bytes.extend_from_slice(&piece);
    }
    match fetching.await {
        Ok(Ok(())) => {
            state.media_pipeline.counts.fetched.inc();
            state.media_pipeline.counts.fetched_bytes.inc_by(bytes.len() as u64);
            Ok(bytes)
        }
        Ok(Err(error)) => Err(not_fetched(param, &error, limit)),
        Err(_) => Err(state.server.panicked("fetching a file")),
    }
}

fn not_fetched(param: &str, error: &FetchError, limit: (u64, &'static str)) -> ApiError {
    match error {
        FetchError::TooLarge { bytes, .. } => refused(param, &too_large(*bytes, limit)),
        FetchError::TooSlow { .. } => {
            let message = format!("{param}: {error} to fetch it (--media-fetch-timeout)");
            ApiError {
                param: Some(param.into()),
                code: Some("fetch_timeout"),
                ..ApiError::new(StatusCode::BAD_REQUEST, message)
            }
        }
        error => ApiError { code: Some("fetch_failed"), ..ApiError::invalid(param, format!("{param}: {error}")) },
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
