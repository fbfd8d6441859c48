//! How clients behave: what each sends, how it reads, and which answer is the right one.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};

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
    /// What came of it all.
    pub tally: Tally,
}

/// A way to behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
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
    /// Leaves before the first byte.
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
}

/// Manners with their weights.
const MIX: [(Manner, u64); 14] = [
    (Manner::Whole, 12),
    (Manner::Stream, 20),
    (Manner::Chat, 10),
    (Manner::Shared, 16),
    (Manner::Fixed, 16),
    (Manner::LeavesEarly, 6),
    (Manner::LeavesLate, 8),
    (Manner::Slow, 4),
    (Manner::Stalled, 1),
    (Manner::HalfOpen, 3),
    (Manner::Malformed, 4),
    (Manner::Oversized, 1),
    (Manner::Greedy, 2),
    (Manner::TooLong, 1),
];

/// An answer's head must come within this time, waiting in the queue included.
const HEAD_WITHIN: Duration = Duration::from_secs(300);

/// A refusal of what can never be served must come within this time.
const REFUSED_WITHIN: Duration = Duration::from_secs(10);

/// Longer than any server should wait for a reader.
const STALL: Duration = Duration::from_secs(45);

impl Manner {
    /// Chooses by weight.
    pub fn choose(random: &mut Random) -> Self {
        let mut at = random.below(MIX.iter().map(|(_, weight)| weight).sum());
        for (manner, weight) in MIX {
            if at < weight {
                return manner;
            }
            at -= weight;
        }
        Self::Whole
    }

    /// One visit. Long waits end at `until`.
    pub async fn act(self, setting: &Setting, random: &mut Random, until: Instant) -> Outcome {
        let done = match self {
            Self::Whole => whole(setting, random).await,
            Self::Stream => stream(setting, &setting.completion(random, true), "/v1/completions").await,
            Self::Shared => stream(setting, &setting.shared(random), "/v1/completions").await,
            Self::Chat => stream(setting, &setting.chat(random), "/v1/chat/completions").await,
            Self::Fixed => {
                let index = random.below(setting.golden.len() as u64) as usize;
                Ok(setting.golden.compare(setting, index, random.below(2) == 0).await)
            }
            Self::LeavesEarly => leaves_early(setting, random).await,
            Self::LeavesLate => leaves_late(setting, random).await,
            Self::Slow => slow(setting, random, until).await,
            Self::Stalled => stalled(setting, random, until).await,
            Self::HalfOpen => half_open(setting, random, until).await,
            Self::Malformed => malformed(setting, random).await,
            Self::Oversized => oversized(setting).await,
            Self::Greedy => never(setting, json!({"n": 100_000})).await,
            Self::TooLong => never(setting, json!({"max_tokens": 2_000_000_000})).await,
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

    fn completion(&self, random: &mut Random, stream: bool) -> Value {
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

async fn whole(setting: &Setting, random: &mut Random) -> Result<Outcome> {
    let body = setting.completion(random, false);
    let answer = setting.target.post("/v1/completions", &body, HEAD_WITHIN).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    let answer = answer.json().await?;
    let ended = answer.pointer("/choices/0/finish_reason").is_some_and(Value::is_string);
    Ok(if ended { Outcome::Good } else { Outcome::Bad(format!("no reason of the end: {answer}")) })
}

async fn stream(setting: &Setting, body: &Value, path: &str) -> Result<Outcome> {
    let mut answer = setting.target.post(path, body, HEAD_WITHIN).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    let mut ended = false;
    while let Some(data) = timeout(HEAD_WITHIN, answer.event()).await?? {
        if data == "[DONE]" {
            return Ok(if ended { Outcome::Good } else { Outcome::Bad("a stream without a reason of its end".into()) });
        }
        let event: Value = serde_json::from_str(&data)?;
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
    let patience = Duration::from_millis(random.below(200));
    let asked = setting.target.post("/v1/completions", &body, HEAD_WITHIN);
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
    let mut answer = setting.target.post("/v1/completions", &body, HEAD_WITHIN).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    for _ in 0..random.between(1, 10) {
        if timeout(HEAD_WITHIN, answer.event()).await??.is_none() {
            break;
        }
    }
    Ok(Outcome::Good)
}

async fn slow(setting: &Setting, random: &mut Random, until: Instant) -> Result<Outcome> {
    let body = setting.completion(random, true);
    let mut answer = setting.target.post("/v1/completions", &body, HEAD_WITHIN).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    while Instant::now() < until {
        match timeout(HEAD_WITHIN, answer.event()).await?? {
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
    let answer = setting.target.post("/v1/completions", &body, HEAD_WITHIN).await?;
    if answer.status() == 200 {
        sleep(STALL.min(until.saturating_duration_since(Instant::now()))).await;
        return Ok(Outcome::Good);
    }
    // Four times the longest answer may be more than fits beside this prompt.
    if answer.status() == 400 { Ok(Outcome::Good) } else { Ok(refusal(answer).await) }
}

async fn half_open(setting: &Setting, random: &mut Random, until: Instant) -> Result<Outcome> {
    let body = setting.completion(random, false).to_string();
    let text = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        setting.target.authority,
        body.len()
    );
    let mut stream = setting.target.connect().await?;
    let cut = random.below(text.len() as u64) as usize;
    stream.write_all(&text.as_bytes()[..cut]).await?;
    let wait = Duration::from_millis(random.between(100, 8000));
    sleep(wait.min(until.saturating_duration_since(Instant::now()))).await;
    Ok(Outcome::Good)
}

async fn malformed(setting: &Setting, random: &mut Random) -> Result<Outcome> {
    let deep = "[".repeat(50_000);
    let bodies: [&[u8]; 9] = [
        b"",
        b"{",
        b"[]",
        b"{\"prompt\":\"\xff\xfe\"}",
        b"{\"prompt\":\"\\ud800\"}",
        b"{\"prompt\":{\"a\":1}}",
        b"{\"prompt\":\"x\",\"temperature\":\"hot\"}",
        b"{\"prompt\":[-1]}",
        deep.as_bytes(),
    ];
    let body = bodies[random.below(bodies.len() as u64) as usize];
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        setting.target.authority,
        body.len()
    );
    expect(setting, &[head.as_bytes(), body].concat(), "400").await
}

async fn oversized(setting: &Setting) -> Result<Outcome> {
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: 10737418240\r\n\r\n",
        setting.target.authority
    );
    expect(setting, head.as_bytes(), "413").await
}

/// Sends raw bytes and looks at the status only.
async fn expect(setting: &Setting, bytes: &[u8], status: &str) -> Result<Outcome> {
    let mut stream = setting.target.connect().await?;
    stream.write_all(bytes).await?;
    let mut head = [0; 12];
    timeout(REFUSED_WITHIN, stream.read_exact(&mut head)).await??;
    let got = String::from_utf8_lossy(&head[9..]).into_owned();
    let announced = matches!(got.as_str(), "429" | "503");
    Ok(match got.as_str() {
        got if got == status => Outcome::Good,
        _ if announced => Outcome::Refused,
        _ => Outcome::Bad(format!("{got} instead of {status}")),
    })
}

/// Asks for what can never be; the right answer is a 400, at once.
async fn never(setting: &Setting, change: Value) -> Result<Outcome> {
    let mut body = json!({"model": setting.model, "prompt": "x", "max_tokens": 1});
    for (key, value) in change.as_object().into_iter().flatten() {
        body[key] = value.clone();
    }
    let answer = setting.target.post("/v1/completions", &body, REFUSED_WITHIN).await?;
    if answer.status() == 400 { Ok(Outcome::Good) } else { Ok(refusal(answer).await) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_manner_is_chosen_about_as_often_as_its_weight_says() {
        let mut random = Random::new(3);
        let total: u64 = MIX.iter().map(|(_, weight)| weight).sum();
        let visits = 100_000;
        let chosen: Vec<Manner> = (0..visits).map(|_| Manner::choose(&mut random)).collect();
        for (manner, weight) in MIX {
            let share = chosen.iter().filter(|m| **m == manner).count() as f64 / visits as f64;
            let expected = weight as f64 / total as f64;
            assert!((share - expected).abs() < 0.01, "{manner:?}: {share} instead of {expected}");
        }
    }
}
