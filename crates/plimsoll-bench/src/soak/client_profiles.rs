//! How clients behave: what each sends, how it reads, and which answer is the right one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::ask::{Question, Reading, ask, refusal};
use super::attacks;
use super::faults::FaultLog;
use super::golden_answers::{GoldenAnswers, Kind};
use super::keep::Keep;
use super::schemas::{self, Case};
use super::tally::{Outcome, Tally};
use crate::client::Target;
use crate::prompts::{Random, Scale, words};

/// What all clients know.
pub struct Setting {
    /// The server.
    pub target: Target,
    /// The model to ask for.
    pub model: String,
    /// Words per token.
    pub scale: Scale,
    /// Fixed questions and their answers.
    pub golden_answers: GoldenAnswers,
    /// Tokens of the longest prompts.
    pub prompt_tokens: usize,
    /// Tokens of the longest answers.
    pub output_tokens: usize,
    /// Tokens that prompt and answer may have together.
    pub context: usize,
    /// An answer's head, and each event after it, must come within this time, waiting in the queue included.
    pub patience: Duration,
    /// What takes no work must be answered within this time.
    pub at_once: Duration,
    /// What happens around the server.
    pub fault_log: Arc<FaultLog>,
    /// Answers to be asked for again.
    pub keep: Keep,
    /// Schemas and requests from files.
    pub schemas: Vec<Case>,
    /// What came of it all.
    pub tally: Tally,
}

/// A way to behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ClientProfile {
    /// Waits for a whole answer.
    Whole,
    /// Reads a stream to its end.
    Stream,
    /// The same through chat.
    Chat,
    /// Asks with a long beginning that others share.
    Shared,
    /// Asks a fixed question of any kind and compares.
    Fixed,
    /// Asks about a picture.
    Picture,
    /// Must be answered with a tool's call.
    Tools,
    /// Asks for an answer in a given form.
    Form,
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
    /// Sends a schema, odd or hostile, and validates the answer.
    Schemas,
}

/// The answers of a marathon, where the context allows.
const MARATHON_TOKENS: usize = 800;

/// Longer than any server should wait for a reader.
const STALL: Duration = Duration::from_secs(45);

impl ClientProfile {
    /// The kind of requests that the server must know for this client profile to make sense.
    pub const fn needs(self) -> Option<Kind> {
        match self {
            Self::Chat => Some(Kind::Chat),
            Self::Picture => Some(Kind::Picture),
            Self::Tools => Some(Kind::Tools),
            Self::Form | Self::Schemas => Some(Kind::Form),
            _ => None,
        }
    }

    /// One visit. Long waits end at `until`.
    pub async fn act(self, setting: &Setting, random: &mut Random, until: Instant) -> Outcome {
        let began = Instant::now();
        let done = match self {
            Self::Whole => visit(setting, setting.completion(random), false).await,
            Self::Stream => visit(setting, setting.completion(random), true).await,
            Self::Shared => visit(setting, setting.shared(random), true).await,
            Self::Chat => visit(setting, setting.chat(random), true).await,
            Self::Fixed => fixed(setting, random, None).await,
            // Half of these questions are fixed ones with known answers; the others are new.
            Self::Picture | Self::Tools | Self::Form => match random.below(2) {
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
            Self::HalfOpen => attacks::half_open(setting, random, until).await,
            Self::Malformed => attacks::malformed(setting, random).await,
            Self::Oversized => attacks::oversized(setting).await,
            Self::Greedy => attacks::never(setting, json!({"n": 100_000})).await,
            Self::TooLong => attacks::never(setting, json!({"max_tokens": 2_000_000_000})).await,
            Self::Curious => attacks::never(setting, json!({"logprobs": 1_000_000})).await,
            Self::Giant => attacks::giant(setting, random).await,
            Self::Schemas => schemas::act(setting, random).await,
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

impl Setting {
    fn words(&self, random: &mut Random) -> String {
        let tokens = random.between(1, self.prompt_tokens as u64) as usize;
        words(random.next(), self.scale.words(tokens))
    }

    /// A text to be continued. Half of the clients want the likeliest tokens, the others draw; half of them do without drafts.
    pub fn completion(&self, random: &mut Random) -> Question {
        let tokens = random.between(1, self.output_tokens as u64);
        let temperature = random.below(2);
        let mut body = json!({
            "model": self.model, "prompt": self.words(random), "max_tokens": tokens, "temperature": temperature,
            "seed": random.below(1 << 40), "ignore_eos": random.below(2) == 0
        });
        if self.golden_answers.drafts && random.below(2) == 0 {
            body["mtp"] = false.into();
        }
        Question { path: "/v1/completions", body }
    }

    fn shared(&self, random: &mut Random) -> Question {
        let mut question = self.completion(random);
        let common = words(random.below(4), self.scale.words(self.prompt_tokens * 3 / 4));
        question.body["prompt"] = (common + &words(random.next(), 5)).into();
        question
    }

    /// What kills servers that give each stream its whole length and never take it back.
    fn marathon(&self, random: &mut Random) -> Question {
        let mut question = self.completion(random);
        question.body["max_tokens"] = MARATHON_TOKENS.min(self.context / 2).into();
        question.body["ignore_eos"] = true.into();
        question
    }

    fn heavy(&self, random: &mut Random) -> Question {
        let mut question = self.completion(random);
        question.body["n"] = random.between(2, 8).into();
        question.body["logprobs"] = 5.into();
        if random.below(2) == 0 {
            question.body["prompt_logprobs"] = 5.into();
        }
        question
    }

    fn chat(&self, random: &mut Random) -> Question {
        let Question { mut body, .. } = self.completion(random);
        let text = body["prompt"].take();
        if let Some(fields) = body.as_object_mut() {
            fields.remove("prompt");
        }
        body["messages"] = json!([{"role": "user", "content": text}]);
        Question { path: "/v1/chat/completions", body }
    }

    /// A new question of this kind.
    fn ask_for(&self, kind: Kind, random: &mut Random) -> Question {
        let text = self.words(random);
        let mut question = kind.question(&self.model, random, text);
        if self.golden_answers.drafts && random.below(2) == 0 {
            question.body["mtp"] = false.into();
        }
        question
    }

    /// Any question, for clients that leave: some leave during image encoding or while a grammar is compiled.
    fn anything(&self, random: &mut Random) -> Question {
        let special = [Kind::Picture, Kind::Tools, Kind::Form][random.below(3) as usize];
        match random.below(2) == 0 && self.golden_answers.knows(special) {
            true => self.ask_for(special, random),
            false => self.completion(random),
        }
    }
}

/// Reads an answer to its end. It may be asked for again when all is over.
async fn visit(setting: &Setting, question: Question, stream: bool) -> Result<Outcome> {
    let reading = Reading { stream, patience: setting.patience, slowly: None };
    Ok(match ask(&setting.target, &question, reading).await? {
        Ok(said) => {
            setting.keep.offer(question, said);
            Outcome::Good
        }
        Err(outcome) => outcome,
    })
}

async fn fixed(setting: &Setting, random: &mut Random, kind: Option<Kind>) -> Result<Outcome> {
    let index = setting.golden_answers.choose(kind, random);
    setting.golden_answers.compare(setting, index, random.below(2) == 0, random.below(2) == 0).await
}

async fn leaves_early(setting: &Setting, random: &mut Random) -> Result<Outcome> {
    let Question { path, mut body } = setting.anything(random);
    body["stream"] = (random.below(2) == 0).into();
    // Half of them give up while the prompt is still on its way or waits, the others at any time before the answer.
    let patience = Duration::from_millis(if random.below(2) == 0 { random.below(200) } else { random.below(5000) });
    let asked = setting.target.post(path, &body, setting.patience);
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
    let Question { path, mut body } = setting.anything(random);
    body["stream"] = true.into();
    let mut answer = setting.target.post(path, &body, setting.patience).await?;
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
    let question = setting.completion(random);
    let reading = Reading { stream: true, patience: setting.patience, slowly: Some((random, until)) };
    Ok(match ask(&setting.target, &question, reading).await? {
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
    let answer = setting.target.post(path, &body, setting.patience).await?;
    if answer.status() == 200 {
        sleep(STALL.min(until.saturating_duration_since(Instant::now()))).await;
        return Ok(Outcome::Good);
    }
    // Four times the longest answer may be more than fits beside this prompt.
    if answer.status() == 400 { Ok(Outcome::Good) } else { Ok(refusal(answer).await) }
}
