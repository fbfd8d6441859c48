//! Runs many inputs through the engine: enough at once to fill its steps, the next when one is answered.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{Cause, Reader, Refusal, Request, Snapshot, SubmitKind};
use tokio::time::{Instant, sleep, sleep_until};

use super::Input;
use crate::conversation::active::{end_of, failure, late};
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult, cancelled, cut};
use crate::state::model::ModelState;
use crate::state::request_log::RequestLog;
use crate::state::server::{ServerPhase, reached};

/// Inputs in the engine for each request that may run: one runs and one waits for the next step.
const AHEAD: usize = 2;

/// How often a request without an input in the engine tries to submit the next one, while the queue is full.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Returns the results of all inputs, in order. `param` names the inputs in errors.
pub(super) async fn run(
    state: &Arc<ModelState>,
    id: &str,
    api: &'static str,
    param: &'static str,
    inputs: &[Input],
) -> ApiResult<Vec<Vec<f32>>> {
    let tokens = inputs.iter().map(|input| input.ids.len() as u64).sum();
    let caller = Caller::current();
    if let Some(buckets) = &caller.rate_buckets {
        buckets.charge(tokens);
    }
    let guard = state.server.running.add(id, false, Vec::new(), state.of_running())?;
    let ids = inputs.iter().map(|input| input.ids.as_slice());
    let entry =
        state.server.recorder.as_ref().and_then(|recorder| recorder.prompts(state.label.as_deref(), api, ids, &[]));
    let mut log = RequestLog::new(state, id, api, inputs.len(), tokens, caller).recorded(entry);
    let result = tokio::select! {
        biased;
        () = guard.cancelled() => Err(cancelled()),
        result = all(state, param, inputs, &mut log) => result,
    };
    log.ends(match &result {
        Ok(_) => "finished",
        Err(ApiError { status: StatusCode::BAD_REQUEST | StatusCode::TOO_MANY_REQUESTS, .. }) => "refused",
        Err(error) => end_of(error, *state.server.phase.borrow()),
    });
    result
}

async fn all(
    state: &Arc<ModelState>,
    param: &'static str,
    inputs: &[Input],
    log: &mut RequestLog,
) -> ApiResult<Vec<Vec<f32>>> {
    let window = AHEAD * state.served.engine.limits().running_max_req_size as usize;
    let mut results: Vec<Vec<f32>> = Vec::new();
    results.resize_with(inputs.len(), Vec::new);
    let mut running = FuturesUnordered::new();
    let mut phase = state.server.phase.subscribe();
    let deadline = state.server.config.request_timeout.map(|timeout| Instant::now() + timeout);
    let (mut next, mut last_news) = (0, Instant::now());
    loop {
        let mut crowded = false;
        while next < inputs.len() && running.len() < window {
            let (engine, request) = (&state.served.engine, request(&inputs[next]));
            let further = SubmitKind::Input { others_run: !running.is_empty() };
            let kind = if next == 0 { SubmitKind::New } else { further };
            match engine.submit_as(kind, request) {
                Ok(reader) => running.push(answer(next, reader)),
                // The queue is full. A finished input of this request frees a place, unless another request takes it.
                Err(Refusal::Full { .. }) if next > 0 => {
                    crowded = running.is_empty();
                    break;
                }
                Err(refusal) => return Err(named(refusal, param, next, inputs.len())),
            }
            next += 1;
        }
        if running.is_empty() && !crowded {
            return Ok(results);
        }
        let silence = last_news + state.server.config.silence_timeout;
        let until = deadline.map_or(silence, |deadline| deadline.min(silence));
        tokio::select! {
            biased;
            Some((index, result, progress)) = running.next() => {
                log.choice_ended(index, None, Some(progress));
                results[index] = result.map_err(|(message, cause)| failure(&phase, message, cause))?;
            }
            () = sleep(LOOK_AGAIN), if crowded => continue,
            () = reached(&mut phase, ServerPhase::Cut) => return Err(cut()),
            () = sleep_until(until) => return Err(late(&state.server.config, until == silence)),
        }
        last_news = Instant::now();
    }
}

fn request(input: &Input) -> Request {
    Request {
        received: None,
        prompt: input.ids.clone(),
        sampling: SamplingParams::greedy(),
        max_tokens: 0,
        min_tokens: 0,
        stop: Vec::new(),
        keep_stop: false,
        stop_token_ids: Vec::new(),
        ignore_eos: true,
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        kept_special_ids: Vec::new(),
        grammar: None,
        speculate: false,
        cache_salt: 0,
        embed: Some(input.embed),
        media: Vec::new(),
        pins: Default::default(),
    }
}

/// Returns the index of an input with its numbers, or with the engine's message and the cause of the error.
async fn answer(index: usize, mut reader: Reader) -> (usize, Result<Vec<f32>, (String, Cause)>, Snapshot) {
    let watch = reader.watch();
    let result = values(&mut reader).await;
    (index, result, watch.snapshot())
}

async fn values(reader: &mut Reader) -> Result<Vec<f32>, (String, Cause)> {
    while let Some(delta) = reader.next().await {
        if let Some(message) = delta.error {
            return Err((message, delta.cause));
        }
        if let Some(values) = delta.pooled {
            return Ok(values);
        }
    }
    Err(("the engine ended without an answer".into(), Cause::Engine))
}

/// Returns the error of a refusal, with the client's name and index for the input instead of the engine's `prompt`.
fn named(refusal: Refusal, param: &str, index: usize, count: usize) -> ApiError {
    let mut error = ApiError::from(refusal);
    if error.param.as_deref() == Some("prompt") {
        error.param = Some(param.into());
        if count > 1 {
            error.message = format!("{param}[{index}]: {}", error.message);
        }
    }
    error
}
