//! Fixed prompts whose greedy answers are recorded while the server has nothing else to do.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::manners::{Setting, refusal};
use super::tally::Outcome;
use crate::bench::client::Target;
use crate::bench::prompts::{Scale, words};

/// Tokens of each recorded answer.
const TOKENS: u32 = 24;

const WITHIN: Duration = Duration::from_secs(300);

/// The prompts with their answers.
#[derive(Clone, Debug)]
pub struct Golden {
    pairs: Vec<(String, String)>,
}

impl Golden {
    /// Records `count` answers, each asked twice: the second time the prompt may come from the prefix cache.
    pub async fn record(target: &Target, model: &str, scale: Scale, count: usize, longest: usize) -> Result<Self> {
        let mut pairs = Vec::with_capacity(count);
        for i in 0..count {
            // Lengths from very short to the longest, none a multiple of a page.
            let tokens = (3 + i * longest / count).max(3);
            let prompt = words(0x60_1d + i as u64, scale.words(tokens));
            let first = ask(target, model, &prompt).await?;
            let second = ask(target, model, &prompt).await?;
            if first != second {
                bail!("prompt {i} got two answers while the server was idle: {first:?} and {second:?}");
            }
            pairs.push((prompt, first));
        }
        Ok(Self { pairs })
    }

    /// How many prompts there are.
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Asks one prompt again, streamed or not, and compares.
    pub async fn compare(&self, setting: &Setting, index: usize, stream: bool) -> Outcome {
        let (prompt, expected) = &self.pairs[index];
        let answer = match again(setting, prompt, stream).await {
            Ok(answer) => answer,
            Err(outcome) => return outcome,
        };
        if answer == *expected {
            return Outcome::Good;
        }
        let same = answer.chars().zip(expected.chars()).take_while(|(a, b)| a == b).count();
        Outcome::Changed(format!("prompt {index} differs after {same} characters: {answer:?} instead of {expected:?}"))
    }

    /// Asks all prompts again, one after the other.
    pub async fn compare_all(&self, setting: &Setting) -> Vec<String> {
        let mut findings = Vec::new();
        for index in 0..self.len() {
            match self.compare(setting, index, index % 2 == 1).await {
                Outcome::Good => {}
                other => findings.push(format!("{other:?}")),
            }
        }
        findings
    }
}

fn body(model: &str, prompt: &str, stream: bool) -> Value {
    json!({"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": stream})
}

async fn ask(target: &Target, model: &str, prompt: &str) -> Result<String> {
    let answer = target.post("/v1/completions", &body(model, prompt, false), WITHIN).await?;
    if answer.status() != 200 {
        bail!("{}: {}", answer.status(), answer.text().await?);
    }
    let answer = answer.json().await?;
    Ok(answer.pointer("/choices/0/text").and_then(Value::as_str).unwrap_or_default().to_owned())
}

async fn again(setting: &Setting, prompt: &str, stream: bool) -> Result<String, Outcome> {
    let bad = |error: anyhow::Error| Outcome::Bad(format!("{error:#}"));
    let body = body(&setting.model, prompt, stream);
    let mut answer = setting.target.post("/v1/completions", &body, setting.patience).await.map_err(bad)?;
    if answer.status() != 200 {
        return Err(refusal(answer).await);
    }
    if !stream {
        let answer = answer.json().await.map_err(bad)?;
        return Ok(answer.pointer("/choices/0/text").and_then(Value::as_str).unwrap_or_default().to_owned());
    }
    let mut text = String::new();
    while let Some(data) = answer.event().await.map_err(bad)? {
        if data == "[DONE]" {
            return Ok(text);
        }
        let event: Value = serde_json::from_str(&data).map_err(|error| bad(error.into()))?;
        if event.get("error").is_some() {
            return Err(Outcome::Bad(format!("in the stream: {event}")));
        }
        text += event.pointer("/choices/0/text").and_then(Value::as_str).unwrap_or_default();
    }
    Err(Outcome::Bad("the stream ended without its terminator".into()))
}
