//! Visits of clients: the requests of each client profile, how it reads, and which answer is right.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::ask::{Reading, ask, refusal};
use super::attacks;
use super::outcome::Outcome;
use super::profile::ClientProfile;
use super::question::{Kind, Question};
use super::schemas;
use super::setting::Setting;
use crate::prompts::Random;

/// Longer than any server should wait for a reader.
const STALL: Duration = Duration::from_secs(45);

impl ClientProfile {
    /// Makes one visit. Long waits end at `until`.
    pub async fn act(self, setting: &Setting, random: &mut Random, until: Instant) -> Outcome {
        let (began, endpoint) = (Instant::now(), &setting.endpoint);
        let done = match self {
            Self::Whole => visit(setting, setting.completion(random), false).await,
            Self::Stream => visit(setting, setting.completion(random), true).await,
            Self::Shared => visit(setting, setting.shared(random), true).await,
            Self::Chat => visit(setting, setting.chat(random), true).await,
            Self::Fixed => fixed(setting, random, None).await,
            // Half of these questions are fixed ones with known answers; the others are new.
            Self::Image | Self::Tools | Self::Structured => match random.below(2) {
                0 => fixed(setting, random, self.needs()).await,
                _ => {
                    let kind = self.needs().unwrap_or(Kind::Text);
                    visit(setting, setting.ask_for(kind, random), random.below(2) == 0).await
                }
            },
            Self::Marathon => visit(setting, setting.marathon(random), true).await,
            Self::Heavy => visit(setting, setting.heavy(random), false).await,
            Self::LeavesEarly => leaves_early(setting, random).await,
            Self::LeavesLate => leaves_late(setting, random).await,
            Self::Slow => slow(setting, random, until).await,
            Self::Stalled => stalled(setting, random, until).await,
            Self::HalfOpen => attacks::half_open(endpoint, &setting.completion(random), random, until).await,
            Self::Malformed => attacks::malformed(endpoint, random).await,
            Self::Oversized => attacks::oversized(endpoint).await,
            Self::Greedy => attacks::never(endpoint, json!({"n": 100_000})).await,
            Self::TooLong => attacks::never(endpoint, json!({"max_tokens": 2_000_000_000})).await,
            Self::Curious => attacks::never(endpoint, json!({"logprobs": 1_000_000})).await,
            Self::Giant => attacks::giant(endpoint, random).await,
            Self::Schemas => schemas::act(endpoint, &setting.schemas, random).await,
        };
        let outcome = done.unwrap_or_else(|error| match setting.fault_log.hindered(began) {
            // A fault of the soak kept the client from the server: the server is not to blame.
            true => Outcome::Hindered,
            false => Outcome::Bad(format!("{error:#}")),
        });
        if matches!(outcome, Outcome::Refused | Outcome::Hindered) {
            sleep(Duration::from_millis(random.between(200, 1500))).await;
        }
        outcome
    }
}

/// Reads an answer to its end and offers it to the sample that is asked again at the end.
async fn visit(setting: &Setting, question: Question, stream: bool) -> Result<Outcome> {
    let reading = Reading { stream, patience: setting.endpoint.patience, slowly: None };
    Ok(match ask(&setting.endpoint.target, &question, reading).await? {
        Ok(said) => {
            setting.keep.offer(question, said);
            Outcome::Good
        }
        Err(outcome) => outcome,
    })
}

async fn fixed(setting: &Setting, random: &mut Random, kind: Option<Kind>) -> Result<Outcome> {
    let index = setting.golden_answers.choose(kind, random);
    setting.golden_answers.compare(&setting.endpoint, index, random.below(2) == 0, random.below(2) == 0).await
}

async fn leaves_early(setting: &Setting, random: &mut Random) -> Result<Outcome> {
    let Question { path, mut body } = setting.anything(random);
    body["stream"] = (random.below(2) == 0).into();
    // Half of them give up while the request is sent or queued, the others at any time before the answer.
    let patience = Duration::from_millis(if random.below(2) == 0 { random.below(200) } else { random.below(5000) });
    let asked = setting.endpoint.target.post(path, &body, setting.endpoint.patience);
    match timeout(patience, asked).await {
        // The client left before the answer.
        Err(_) => Ok(Outcome::Good),
        Ok(answer) => {
            let answer = answer?;
            if answer.status() == 200 { Ok(Outcome::Good) } else { Ok(refusal(answer).await) }
        }
    }
}

async fn leaves_late(setting: &Setting, random: &mut Random) -> Result<Outcome> {
    let Question { path, mut body } = setting.anything(random);
    body["stream"] = true.into();
    let mut answer = setting.endpoint.target.post(path, &body, setting.endpoint.patience).await?;
    if answer.status() != 200 {
        return Ok(refusal(answer).await);
    }
    for _ in 0..random.between(1, 10) {
        if timeout(setting.endpoint.patience, answer.event()).await??.is_none() {
            break;
        }
    }
    Ok(Outcome::Good)
}

async fn slow(setting: &Setting, random: &mut Random, until: Instant) -> Result<Outcome> {
    let question = setting.completion(random);
    let reading = Reading { stream: true, patience: setting.endpoint.patience, slowly: Some((random, until)) };
    Ok(match ask(&setting.endpoint.target, &question, reading).await? {
        Ok(said) => {
            setting.keep.offer(question, said);
            Outcome::Good
        }
        Err(outcome) => outcome,
    })
}

async fn stalled(setting: &Setting, random: &mut Random, until: Instant) -> Result<Outcome> {
    let Question { path, mut body } = setting.completion(random);
    body["max_tokens"] = (setting.output_tokens * 4).into();
    body["stream"] = true.into();
    let answer = setting.endpoint.target.post(path, &body, setting.endpoint.patience).await?;
    if answer.status() == 200 {
        sleep(STALL.min(until.saturating_duration_since(Instant::now()))).await;
        return Ok(Outcome::Good);
    }
    // Four times the longest answer may be more than fits beside this prompt.
    if answer.status() == 400 { Ok(Outcome::Good) } else { Ok(refusal(answer).await) }
}
