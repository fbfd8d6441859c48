//! How clients behave: what each sends, how it reads, and which answer is the right one.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::attacks;
use super::golden::Golden;
use super::tally::{Outcome, Tally};
use crate::bench::client::{Answer, Target};
use crate::bench::prompts::{Random, Scale, words};

/// What all clients know.
pub struct Setting {
    /// The server.
    pub target: Target,
    /// The model to ask for.
    pub model: String,
    /// Words per token.
    pub scale: Scale,
    /// Fixed prompts and their answers.
    pub golden: Golden,
    /// Tokens of the longest prompts.
    pub prompt_tokens: usize,
    /// Tokens of the longest answers.
    pub output_tokens: usize,
    /// Tokens that prompt and answer may have together.
    pub context: usize,
    /// An answer's head, and each event after it, must come within this time, waiting in the queue included.
    pub patience: Duration,
    /// What came of it all.
    pub tally: Tally,
}

/// A way to behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Manner {
    /// Waits for a whole answer.
    Whole,
    /// Reads a stream to its end.
    Stream,
    /// The same through chat.
    Chat,
    /// Asks with a long beginning that others share.
    Shared,
    /// Asks a fixed prompt and compares.
    Fixed,
    /// Reads a stream of eight hundred tokens to its end.
    Marathon,
    /// Asks for several answers with all the log-probabilities there are, the prompt's too.
    Heavy,
    /// Leaves before the first byte: in the queue, in the prefill.
    LeavesEarly,
    /// Leaves in the middle of a stream.
    LeavesLate,
    /// Reads, but slowly.
    Slow,
    /// Asks for much and then reads nothing for longer than any server should wait.
    Stalled,
    /// Sends half a request and waits.
    HalfOpen,
    /// Sends what is no request.
    Malformed,
    /// Announces ten gigabytes.
    Oversized,
    /// Asks for a hundred thousand answers.
    Greedy,
    /// Asks for more than any context holds.
    TooLong,
    /// Asks for a million log-probabilities.
    Curious,
    /// Sends as much JSON as any server takes, in the shape that costs most to read.
    Giant,
}

/// The answers of a marathon, where the context allows.
const MARATHON_TOKENS: usize = 800;

/// Longer than any server should wait for a reader.
const STALL: Duration = Duration::from_secs(45);

impl Manner {
    /// One visit. Long waits end at `until`.
    pub async fn act(self, setting: &Setting, random: &mut Random, until: Instant) -> Outcome {
        let done = match self {
            Self::Whole => whole(setting, &setting.completion(random, false)).await,
            Self::Stream => stream(setting, &setting.completion(random, true), "/v1/completions").await,
            Self::Shared => stream(setting, &setting.shared(random), "/v1/completions").await,
            Self::Chat => stream(setting, &setting.chat(random), "/v1/chat/completions").await,
            Self::Fixed => {
                let index = random.below(setting.golden.len() as u64) as usize;
                Ok(setting.golden.compare(setting, index, random.below(2) == 0).await)
            }
            Self::Marathon => stream(setting, &setting.marathon(random), "/v1/completions").await,
            Self::Heavy => whole(setting, &setting.heavy(random)).await,
            Self::LeavesEarly => leaves_early(setting, random).await,
            Self::LeavesLate => leaves_late(setting, random).await,
            Self::Slow => slow(setting, random, until).await,
            Self::Stalled => stalled(setting, random, until).await,
            Self::HalfOpen => attacks::half_open(setting, random, until).await,
            Self::Malformed => attacks::malformed(setting, random).await,
            Self::Oversized => attacks::oversized(setting).await,
            Self::Greedy => attacks::never(setting, json!({"n": 100_000})).await,
            Self::TooLong => attacks::never(setting, json!({"max_tokens": 2_000_000_000})).await,
            Self::Curious => attacks::never(setting, json!({"logprobs": 1_000_000})).await,
            Self::Giant => attacks::giant(setting, random).await,
        };
        let outcome = done.unwrap_or_else(|error| Outcome::Bad(format!("{error:#}")));
        if outcome == Outcome::Refused {
            sleep(Duration::from_millis(random.between(200, 1500))).await;
        }
        outcome
    }
}

impl Setting {
    fn words(&self, random: &mut Random) -> String {
        let tokens = random.between(1, self.prompt_tokens as u64) as usize;
        words(random.next(), self.scale.words(tokens))
    }

    pub fn completion(&self, random: &mut Random, stream: bool) -> Value {
        let tokens = random.between(1, self.output_tokens as u64);
        // Half of the clients want the likeliest tokens, the others draw.
        let temperature = random.below(2);
        json!({
            "model": self.model, "prompt": self.words(random), "max_tokens": tokens, "temperature": temperature,
            "seed": random.below(1 << 40), "stream": stream
        })
    }

    fn shared(&self, random: &mut Random) -> Value {
        let mut body = self.completion(random, true);
        let common = words(random.below(4), self.scale.words(self.prompt_tokens * 3 / 4));
        body["prompt"] = (common + &words(random.next(), 5)).into();
        body
    }

    /// What kills servers that give each stream its whole length and never take it back.
    fn marathon(&self, random: &mut Random) -> Value {
        let mut body = self.completion(random, true);
        body["max_tokens"] = MARATHON_TOKENS.min(self.context / 2).into();
        body["ignore_eos"] = true.into();
        body
    }

    fn heavy(&self, random: &mut Random) -> Value {
        let mut body = self.completion(random, false);
        body["n"] = random.between(2, 8).into();
        body["logprobs"] = 5.into();
        if random.below(2) == 0 {
            body["prompt_logprobs"] = 5.into();
        }
        body
    }

    fn chat(&self, random: &mut Random) -> Value {
        let mut body = self.completion(random, true);
        let text = body["prompt"].take();
        if let Some(fields) = body.as_object_mut() {
            fields.remove("prompt");
        }
        body["messages"] = json!([{"role": "user", "content": text}]);
        body
    }
}

/// An answer that is no 200: announced refusals are in order, everything else is not.
pub async fn refusal(answer: Answer) -> Outcome {
    let (status, announced) = (answer.status(), answer.announces_retry());
    let text = answer.text().await.unwrap_or_default();
    if matches!(status, 429 | 503) && announced {
        return Outcome::Refused;
    }
    Outcome::Bad(format!("{status}: {}", text.chars().take(300).collect::<String>()))
}

async fn whole(setting: &Setting, body: &Value) -> Result<Outcome> {
    let answer = setting.target.post("/v1/completions", body, setting.patience).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    let answer = answer.json().await?;
    let ended = answer.pointer("/choices/0/finish_reason").is_some_and(Value::is_string);
    Ok(if ended { Outcome::Good } else { Outcome::Bad(format!("no reason of the end: {answer}")) })
}

async fn stream(setting: &Setting, body: &Value, path: &str) -> Result<Outcome> {
    let mut answer = setting.target.post(path, body, setting.patience).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    let mut ended = false;
    while let Some(data) = timeout(setting.patience, answer.event()).await?? {
        if data == "[DONE]" {
            return Ok(if ended { Outcome::Good } else { Outcome::Bad("a stream without a reason of its end".into()) });
        }
        let event: Value = serde_json::from_str(&data)?;
        if event.pointer("/error/code").is_some_and(|code| code == "unavailable") {
            return Ok(Outcome::Refused);
        }
        if event.get("error").is_some() {
            bail!("in the stream: {event}");
        }
        ended |= event.pointer("/choices/0/finish_reason").is_some_and(Value::is_string);
    }
    bail!("the stream ended without its terminator")
}

async fn leaves_early(setting: &Setting, random: &mut Random) -> Result<Outcome> {
    let streamed = random.below(2) == 0;
    let body = setting.completion(random, streamed);
    // Half of them give up while the prompt is still on its way or waits, the others at any time before the answer.
    let patience = Duration::from_millis(if random.below(2) == 0 { random.below(200) } else { random.below(5000) });
    let asked = setting.target.post("/v1/completions", &body, setting.patience);
    match timeout(patience, asked).await {
        // Gone before the answer.
        Err(_) => Ok(Outcome::Good),
        Ok(answer) => {
            let answer = answer?;
            if answer.status() == 200 { Ok(Outcome::Good) } else { Ok(refusal(answer).await) }
        }
    }
}

async fn leaves_late(setting: &Setting, random: &mut Random) -> Result<Outcome> {
    let body = setting.completion(random, true);
    let mut answer = setting.target.post("/v1/completions", &body, setting.patience).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    for _ in 0..random.between(1, 10) {
        if timeout(setting.patience, answer.event()).await??.is_none() {
            break;
        }
    }
    Ok(Outcome::Good)
}

async fn slow(setting: &Setting, random: &mut Random, until: Instant) -> Result<Outcome> {
    let body = setting.completion(random, true);
    let mut answer = setting.target.post("/v1/completions", &body, setting.patience).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    while Instant::now() < until {
        match timeout(setting.patience, answer.event()).await?? {
            Some(data) if data == "[DONE]" => return Ok(Outcome::Good),
            Some(_) => sleep(Duration::from_millis(random.between(20, 250))).await,
            None => bail!("the stream ended without its terminator"),
        }
    }
    Ok(Outcome::Good)
}

async fn stalled(setting: &Setting, random: &mut Random, until: Instant) -> Result<Outcome> {
    let mut body = setting.completion(random, true);
    body["max_tokens"] = (setting.output_tokens * 4).into();
    let answer = setting.target.post("/v1/completions", &body, setting.patience).await?;
    if answer.status() == 200 {
        sleep(STALL.min(until.saturating_duration_since(Instant::now()))).await;
        return Ok(Outcome::Good);
    }
    // Four times the longest answer may be more than fits beside this prompt.
    if answer.status() == 400 { Ok(Outcome::Good) } else { Ok(refusal(answer).await) }
}
