//! One streamed request of a round, and the time of each piece of its answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::client::Target;

/// A request that takes longer than this counts as an error.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(600);

/// Which optional fields a server takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// `ignore_eos`, so that every answer has its full length.
    pub ignore_eos: bool,
    /// `stream_options.include_usage`, for exact counts.
    pub usage: bool,
}

impl Dialect {
    /// Finds the richest dialect the server accepts.
    pub async fn find(target: &Target, model: &str) -> Result<Self> {
        let mut refusal = None;
        for (ignore_eos, usage) in [(true, true), (false, true), (true, false), (false, false)] {
            let dialect = Self { ignore_eos, usage };
            let answer = target.post("/v1/completions", &dialect.body(model, "Hi", 2), REQUEST_TIMEOUT).await?;
            match answer.good().await {
                Ok(answer) => {
                    answer.text().await?;
                    return Ok(dialect);
                }
                Err(error) => refusal = Some(error),
            }
        }
        Err(refusal.expect("there are dialects").context("no streamed completion"))
    }

    fn body(self, model: &str, prompt: &str, output_tokens: usize) -> Value {
        let mut body = json!({
            "model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "stream": true
        });
        if self.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        if self.usage {
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    }
}

/// One server and how to speak to it.
#[derive(Clone, Debug)]
pub struct Server {
    /// The address.
    pub target: Target,
    /// The model to ask for.
    pub model: String,
    /// The optional fields that it takes.
    pub dialect: Dialect,
    /// The id of its process, if its memory is watched.
    pub pid: Option<u32>,
}

/// The times of one request, in seconds since the round began, and its token counts.
#[derive(Clone, Debug, Default)]
pub struct Timing {
    /// When it was sent.
    pub sent_s: f64,
    /// When each piece of text came.
    pub pieces_s: Vec<f64>,
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// Tokens of its answer.
    pub output_tokens: u64,
}

impl Timing {
    /// Seconds to the first piece of text.
    pub fn ttft_s(&self) -> f64 {
        self.pieces_s.first().map_or(0.0, |first| first - self.sent_s)
    }

    /// Seconds between pieces of text.
    pub fn gaps_s(&self) -> impl Iterator<Item = f64> {
        self.pieces_s.windows(2).map(|pair| pair[1] - pair[0])
    }
}

/// A round's time, and how many of its streams have begun to answer.
#[derive(Clone)]
pub struct Clock {
    start: Instant,
    /// A permit for every request that has sent its first piece.
    pub running: Arc<Semaphore>,
}

impl Clock {
    /// Starts the clock.
    pub fn start() -> Self {
        Self { start: Instant::now(), running: Arc::new(Semaphore::new(0)) }
    }

    /// Seconds since the round began.
    pub fn now_s(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}

/// Sends one request and reads its answer to the end.
pub async fn one(server: &Server, prompt: &str, output_tokens: usize, clock: &Clock) -> Result<Timing> {
    let body = server.dialect.body(&server.model, prompt, output_tokens);
    let mut timing = Timing { sent_s: clock.now_s(), ..Timing::default() };
    let mut counted = None;
    let mut answer = server.target.post("/v1/completions", &body, REQUEST_TIMEOUT).await?.good().await?;
    let mut ended = false;
    while let Some(data) = answer.event().await? {
        if data == "[DONE]" {
            ended = true;
            break;
        }
        let now_s = clock.now_s();
        let event: Value = serde_json::from_str(&data)?;
        if let Some(error) = event.get("error").filter(|e| !e.is_null()) {
            bail!("in the stream: {error}");
        }
        if event.pointer("/choices/0/text").and_then(Value::as_str).is_some_and(|text| !text.is_empty()) {
            if timing.pieces_s.is_empty() {
                clock.running.add_permits(1);
            }
            timing.pieces_s.push(now_s);
        }
        let count = |path: &str| event.pointer(path).and_then(Value::as_u64);
        timing.prompt_tokens = count("/usage/prompt_tokens").unwrap_or(timing.prompt_tokens);
        counted = count("/usage/completion_tokens").or(counted);
    }
    if !ended || timing.pieces_s.is_empty() {
        bail!("the stream ended without text or terminator");
    }
    // Some servers accept `include_usage` and send no usage. Then each piece counts as a token.
    timing.output_tokens = counted.unwrap_or(timing.pieces_s.len() as u64);
    Ok(timing)
}
