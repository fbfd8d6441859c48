//! Gets the bytes of a medium that are not in the body: from a file under a root, or from another server.

use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use plimsoll_hub::{FETCH_BYTES, FETCH_PIECE_BYTES, FetchError, host_of};
use plimsoll_media::Modality;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::external;
use super::medium::{Medium, Source};
use super::refused::refused;
use super::source::{open, too_large};
use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, cut};
use crate::state::media::fetch_queue::{FETCHES, FETCHES_OF_A_HOST};
use crate::state::model::ModelState;
use crate::state::server::{ServerPhase, reached};
use crate::state::threads::spawn_thread;

/// The most pieces of a file that wait until the budget holds them; a fetch pauses beyond that.
const PIECES: usize = 4;

/// Bytes of a fetch besides the file: the connection's own, and pieces on their way to the request. These are the
/// queued pieces, one that the fetching thread is sending, and one that the request is copying.
const FETCHING_BYTES: u64 = FETCH_BYTES + (PIECES as u64 + 2) * FETCH_PIECE_BYTES;

/// A fetch waits at most this many times the fetch timeout for its permit.
const TURN_WITHIN: u32 = 2;

/// All files of a request must arrive within this many times the fetch timeout, waiting for permits included.
const FETCHES_WITHIN: u32 = 3;

/// Fetches remote files and reads local ones, all of a request within one time limit, and has ffmpeg read videos. `held` grows with their
/// bytes. Dropping the future releases all of them.
pub(crate) async fn fetch(state: &Arc<ModelState>, media: &mut [Medium], held: &mut Held) -> ApiResult<()> {
    let Some(param) = media.iter().find(|medium| medium.needs_fetch()).map(|medium| medium.param.clone()) else {
        return external::read(state, media, held).await;
    };
    let within = FETCHES_WITHIN * state.server.config.media.fetch_timeout;
    let mut phase = state.server.phase.subscribe();
    tokio::select! {
        biased;
        done = timeout(within, fetch_all(state, media, held)) => done.unwrap_or_else(|_| Err(too_slow(&param, within))),
        () = reached(&mut phase, ServerPhase::Cut) => Err(cut()),
    }?;
    external::read(state, media, held).await
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
                Source::Bytes(_) | Source::Track => continue,
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

/// Fetches a file from another server, piece by piece: each piece is charged to the budget before it is stored.
async fn remote(
    state: &Arc<ModelState>,
    (param, kind): (&str, Modality),
    url: String,
    held: &mut Held,
) -> ApiResult<Vec<u8>> {
    let spec = state.served.engine.media().ok_or_else(|| ApiError::internal("nothing can be fetched here"))?;
    let own = || spec.staging.reserve(FETCHING_BYTES).map_err(|error| refused(param, &error));
    let limit = state.server.config.media.file_limit(kind);
    fetched(state, param, (url, limit), own, held).await
}

/// Fetches a document of at most `limit` bytes, by the rules of media. `held` grows with it. `since`: the time at which the request's
/// fetches began.
pub(crate) async fn fetch_file(
    state: &Arc<ModelState>,
    param: &str,
    (url, limit): (String, (u64, &'static str)),
    since: Instant,
    held: &mut Held,
) -> ApiResult<Vec<u8>> {
    let within = FETCHES_WITHIN * state.server.config.media.fetch_timeout;
    let mut phase = state.server.phase.subscribe();
    // A model without media has no memory planned for fetches: they count as requests in flight.
    let own = || state.server.bytes.hold(FETCHING_BYTES);
    tokio::select! {
        biased;
        done = timeout(within.saturating_sub(since.elapsed()), fetched(state, param, (url, limit), own, held)) => {
            done.unwrap_or_else(|_| Err(too_slow(param, within)))
        }
        () = reached(&mut phase, ServerPhase::Cut) => Err(cut()),
    }
}

/// Fetches a file. `own` reserves the memory of the fetch itself when it may start.
async fn fetched<T: Send + 'static>(
    state: &Arc<ModelState>,
    param: &str,
    (url, limit): (String, (u64, &'static str)),
    own: impl FnOnce() -> ApiResult<T>,
    held: &mut Held,
) -> ApiResult<Vec<u8>> {
    let fetcher = state.media_pipeline.fetcher.clone();
    let fetcher = fetcher.ok_or_else(|| ApiError::internal("nothing can be fetched here"))?;
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
    let own = own()?;
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
