//! Replays a trace on a server: every request at its time, as a stream of token ids. A client leaves when the recorded one did.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use plimsoll_engine::simulate::Times;
use plimsoll_engine::trace::{Line, Trace};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::client::Target;

/// A request that has not ended after this time has failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(900);
/// A request that is sent later than this after its time counts as late.
const LATE: Duration = Duration::from_millis(100);

/// The parameters of a replay.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Factor on the recorded speed; 0: all requests as fast as `max_in_flight` allows.
    pub speed: f64,
    /// At most this many requests at once.
    pub max_in_flight: usize,
    /// Made-up token ids are below this number.
    pub vocab: u32,
}

/// The model to ask for: the one that the operator named, else the recorded one, else the server's first.
#[derive(Clone, Debug)]
pub struct Models {
    /// The model that the operator named.
    pub named: Option<String>,
    /// The server's first model.
    pub first: String,
}

impl Models {
    fn of<'a>(&'a self, line: &'a Line) -> &'a str {
        self.named.as_deref().or(line.model.as_deref()).unwrap_or(&self.first)
    }
}

/// The result of a replay. Times in seconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Replayed {
    /// Requests answered to their end.
    pub answered: u64,
    /// Requests whose client left, as recorded.
    pub left: u64,
    /// Requests refused with 429 or 503 and a `Retry-After` header.
    pub refused_for_now: u64,
    /// Requests refused with another 4xx, except 401.
    pub refused: u64,
    /// All other requests: 401, 5xx, broken streams, timeouts.
    pub failed: u64,
    /// Requests of a kind that is not replayed: no prompt of text.
    pub skipped: u64,
    /// Requests sent more than 100 ms after their time, because too many were in flight.
    pub late: u64,
    /// The longest delay of a late request.
    pub late_by_max: f64,
    /// Time from the first request to the end of the last.
    pub seconds: f64,
    /// Tokens of the prompts that were answered.
    pub prompt_tokens: u64,
    /// Tokens of the answers.
    pub output_tokens: u64,
    /// Times to the first token.
    pub first_token: Times,
    /// Recorded times to the first token; zero where the trace has none.
    pub recorded_first_token: Times,
    /// The text of the first failure.
    pub first_error: Option<String>,
}

enum End {
    Answered { first: Option<f64>, tokens: u64, prompt: u64 },
    Left { first: Option<f64>, tokens: u64 },
    RefusedForNow,
    Refused,
}

/// Sends every request and waits for all of them.
pub async fn replay(target: &Target, models: &Models, trace: Arc<Trace>, pace: Pace) -> Replayed {
    let places = Arc::new(Semaphore::new(pace.max_in_flight));
    let (began, mut out, mut running) = (Instant::now(), Replayed::default(), JoinSet::new());
    let mut firsts = Vec::new();
    for (number, line) in trace.lines.iter().enumerate() {
        if line.prompts.iter().all(|prompt| prompt.tokens == 0)
            || line.api == "embeddings"
            || line.output == 0 && !line.left()
        {
            out.skipped += 1;
            continue;
        }
        let due = match pace.speed > 0.0 {
            true => after(line.at_ms, pace),
            false => Duration::ZERO,
        };
        sleep(due.saturating_sub(began.elapsed())).await;
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
        let late = began.elapsed().saturating_sub(due);
        if late > LATE && pace.speed > 0.0 {
            out.late += 1;
            out.late_by_max = out.late_by_max.max(late.as_secs_f64());
        }
        let (target, model, trace) = (target.clone(), models.of(line).to_owned(), Arc::clone(&trace));
        running.spawn(async move {
            let line = &trace.lines[number];
            let end = timeout(REQUEST_TIMEOUT, one(&target, &body(&trace, line, &model, pace.vocab), line, pace)).await;
            drop(place);
            end.unwrap_or_else(|_| Err(anyhow::anyhow!("no end after {REQUEST_TIMEOUT:?}")))
        });
        while let Some(done) = running.try_join_next() {
            count(&mut out, &mut firsts, done.unwrap_or_else(|error| Err(error.into())));
        }
    }
    while let Some(done) = running.join_next().await {
        count(&mut out, &mut firsts, done.unwrap_or_else(|error| Err(error.into())));
    }
    out.seconds = began.elapsed().as_secs_f64();
    out.first_token = Times::of(firsts);
    let recorded = trace.lines.iter().filter_map(|line| line.first_ms).map(|ms| ms as f64 / 1000.0);
    out.recorded_first_token = Times::of(recorded.collect());
    out
}

/// Converts recorded milliseconds to the speed of the replay. A time that no `Duration` can hold becomes the longest one.
fn after(ms: u64, pace: Pace) -> Duration {
    Duration::try_from_secs_f64(ms as f64 / 1000.0 / pace.speed).unwrap_or(Duration::MAX)
}

fn count(out: &mut Replayed, firsts: &mut Vec<f64>, end: Result<End>) {
    let (first, tokens) = match end {
        Ok(End::Answered { first, tokens, prompt }) => {
            out.answered += 1;
            out.prompt_tokens += prompt;
            (first, tokens)
        }
        Ok(End::Left { first, tokens }) => {
            out.left += 1;
            (first, tokens)
        }
        Ok(End::RefusedForNow) => return out.refused_for_now += 1,
        Ok(End::Refused) => return out.refused += 1,
        Err(error) => {
            out.failed += 1;
            out.first_error.get_or_insert_with(|| format!("{error:#}"));
            return;
        }
    };
    firsts.extend(first);
    out.output_tokens += tokens;
}

/// The body of a request. The answer gets the recorded length; if the recorded client left early, the limit is higher.
fn body(trace: &Trace, line: &Line, model: &str, vocab: u32) -> Value {
    let prompts: Vec<Vec<u32>> = line.prompts.iter().map(|prompt| trace.ids(prompt, vocab)).collect();
    let said = line.output_each().max(1);
    let max_tokens = if line.left() { u64::from(line.max_tokens.unwrap_or(0)).max(said + 1) } else { said };
    let mut body = json!({
        "model": model, "prompt": prompts, "n": line.n, "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        "max_tokens": max_tokens, "ignore_eos": true, "temperature": line.temperature, "top_p": line.top_p,
    });
    // Optional fields: other servers use the same names but need not support them.
    if line.top_k > 0 {
        body["top_k"] = line.top_k.into();
    }
    if let Some(logprobs) = line.logprobs {
        body["logprobs"] = logprobs.into();
    }
    if let Some(logprobs) = line.prompt_logprobs {
        body["prompt_logprobs"] = logprobs.into();
    }
    if line.salt != 0 {
        body["cache_salt"] = line.salt.to_string().into();
    }
    body
}

async fn one(target: &Target, body: &Value, line: &Line, pace: Pace) -> Result<End> {
    let (start, leaves) = (Instant::now(), line.left());
    let patience = if leaves && line.output == 0 && pace.speed > 0.0 { after(line.ms, pace) } else { REQUEST_TIMEOUT };
    match timeout(patience, stream(target, body, line, start)).await {
        Ok(end) => end,
        Err(_) if leaves => Ok(End::Left { first: None, tokens: 0 }),
        Err(_) => bail!("no end after {patience:?}"),
    }
}

async fn stream(target: &Target, body: &Value, line: &Line, start: Instant) -> Result<End> {
    let answer = target.post("/v1/completions", body, REQUEST_TIMEOUT).await?;
    match answer.status() {
        429 | 503 if answer.announces_retry() => return Ok(End::RefusedForNow),
        // A 401 is an error instead: without the key all requests would be refused.
        400 | 402..500 => return Ok(End::Refused),
        _ => {}
    }
    let mut answer = answer.good().await?;
    let (mut first, mut pieces, mut usage) = (None, 0, None);
    while let Some(data) = answer.event().await? {
        if data == "[DONE]" {
            let (prompt, tokens) = usage.unwrap_or((line.prompts.iter().map(|p| u64::from(p.tokens)).sum(), pieces));
            return Ok(End::Answered { first, tokens, prompt });
        }
        let event: Value = serde_json::from_str(&data)?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            bail!("in the stream: {error}");
        }
        let count = |name: &str| event.pointer(name).and_then(Value::as_u64);
        usage = count("/usage/prompt_tokens").zip(count("/usage/completion_tokens")).or(usage);
        if event.pointer("/choices/0").is_some() {
            first.get_or_insert_with(|| start.elapsed().as_secs_f64());
            pieces += 1;
            // A piece may be several tokens.
            let tokens = usage.map_or(pieces, |(_, tokens)| tokens.max(pieces));
            if line.left() && tokens >= line.output {
                return Ok(End::Left { first, tokens });
            }
        }
    }
    bail!("the stream ended without its terminator")
}
