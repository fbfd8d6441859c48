//! `POST /infill`, llama.cpp's: generates the text between `input_prefix` and `input_suffix`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use plimsoll_engine::{Delta, FinishReason};
use serde::Serialize;

use crate::conversation::active::ActiveRequest;
use crate::conversation::clock::Clock;
use crate::conversation::infill::{Gap, extra, tokens};
use crate::conversation::params::Common;
use crate::conversation::stream::{self, StreamWriter};
use crate::conversation::submission::Submission;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::json::json;
use crate::http::sse::Events;
use crate::state::model::ModelState;

/// The handler.
pub(crate) async fn handle(State(state): State<Arc<ModelState>>, request: Request) -> ApiResult<Response> {
    let clock = Clock::new(Caller::current().arrived());
    let parsed = state.on_body(request, |body, state| {
        let mut submission = parse(&body.bytes, state)?;
        submission.held_prompt = Some(body.keep(submission.bytes())?);
        Ok(submission)
    });
    let submission = parsed.await?;
    let mut active = submission.start(&state, state.server.ids.request("infill"), "infill").await?;
    let mut reply = Reply { clock, text: String::new(), end: None };
    if active.submission.common.stream {
        return Ok(stream::response(active, reply));
    }
    active.each(|_, _, delta| reply.take(delta)).await?;
    let held = active.take_held();
    Ok(json(&reply.last(&active, &reply.text), held))
}

/// Parses and tokenizes. Runs on a text worker.
pub(crate) fn parse(body: &[u8], state: &ModelState) -> ApiResult<Submission> {
    let mut fields = Fields::of_body(body)?;
    let mut common = Common::take(&mut fields, state)?;
    let reports = common.prompt_logprobs.is_some() || common.return_token_ids;
    for (name, asked) in [("n", common.n != 1), ("prompt_logprobs or return_token_ids", reports)] {
        if asked {
            let message =
                format!("{name} is not supported at /infill: a gap is filled once, and its text alone is told");
            return Err(ApiError::unsupported(name, message));
        }
    }
    let prefix = fields.required::<String>("input_prefix")?;
    let suffix = fields.required::<String>("input_suffix")?;
    let begun = fields.take::<String>("prompt")?.unwrap_or_default();
    let extra = extra(&mut fields)?;
    fields.finish()?;
    let fim = tokens(state, "input_prefix")?;
    common.stop_token_ids.extend(&fim.ends);
    let gap = Gap { suffix: &suffix, suffix_param: "input_suffix", extra: &extra, begun: &begun };
    let prefix = state.encode_plain("input_prefix", &[&prefix])?;
    let ids = gap.frame(state)?.ids(state, &prefix)?;
    let mut submission = Submission::of_text(common, ids, state)?;
    submission.length_param = "n_predict";
    Ok(submission)
}

/// An answer in progress.
struct Reply {
    clock: Clock,
    text: String,
    /// The finish reason, and the stop string that ended it.
    end: Option<(FinishReason, Option<String>)>,
}

/// A piece of the answer, or all of it.
#[derive(Serialize)]
struct Answer<'a> {
    index: u32,
    content: &'a str,
    stop: bool,
    model: &'a str,
    tokens_predicted: u64,
    tokens_evaluated: u64,
    #[serde(flatten)]
    last: Option<Last<'a>>,
}

/// The fields of the last piece.
#[derive(Serialize)]
struct Last<'a> {
    stop_type: &'static str,
    stopping_word: &'a str,
    truncated: bool,
    tokens_cached: u64,
    timings: Timings,
}

/// llama.cpp's `timings`.
#[derive(Serialize)]
struct Timings {
    cache_n: u64,
    prompt_n: u64,
    prompt_ms: f64,
    prompt_per_second: f64,
    predicted_n: u64,
    predicted_ms: f64,
    predicted_per_second: f64,
}

impl Reply {
    fn take(&mut self, delta: Delta) {
        self.clock.tokens(delta.tokens.len());
        self.text.push_str(&delta.text);
        if let Some(reason) = delta.finish {
            self.end = Some((reason, delta.stop_reason));
        }
    }

    fn piece<'a>(&self, request: &'a ActiveRequest, content: &'a str) -> Answer<'a> {
        let usage = request.usage();
        Answer {
            index: 0,
            content,
            stop: false,
            model: &request.submission.common.model,
            tokens_predicted: usage.completion_tokens,
            tokens_evaluated: usage.prompt_tokens,
            last: None,
        }
    }

    fn last<'a>(&'a self, request: &'a ActiveRequest, content: &'a str) -> Answer<'a> {
        let usage = request.usage();
        let (stop_type, stopping_word) = match &self.end {
            None => ("none", ""),
            Some((FinishReason::Length, _)) => ("limit", ""),
            Some((FinishReason::Stop, Some(word))) => ("word", word.as_str()),
            Some((FinishReason::Stop, None)) => ("eos", ""),
        };
        let cached = usage.prompt_tokens_details.cached_tokens;
        let (prompt, output) = self.clock.seconds();
        let (prompt_n, predicted_n) = (usage.prompt_tokens.saturating_sub(cached), usage.completion_tokens);
        let rate = |count: u64, seconds: f64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let timings = Timings {
            cache_n: cached,
            prompt_n,
            prompt_ms: 1e3 * prompt,
            prompt_per_second: rate(prompt_n, prompt),
            predicted_n,
            predicted_ms: 1e3 * output,
            predicted_per_second: rate(predicted_n, output),
        };
        let last = Last { stop_type, stopping_word, truncated: false, tokens_cached: cached, timings };
        Answer { stop: true, last: Some(last), ..self.piece(request, content) }
    }
}

impl StreamWriter for Reply {
    fn open(&mut self, _request: &ActiveRequest, _out: &mut Events) {}

    fn delta(&mut self, request: &ActiveRequest, _choice: usize, delta: Delta, out: &mut Events) {
        self.take(delta);
        if !self.text.is_empty() {
            out.push(&self.piece(request, &self.text));
            self.text.clear();
        }
    }

    fn close(&mut self, request: &ActiveRequest, out: &mut Events) {
        out.push(&self.last(request, ""));
    }

    /// The last piece is recognized by its `stop`.
    fn end(&self, _out: &mut Events) {}
}
