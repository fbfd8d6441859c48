//! Questions and the server's answers: one canonical text, whether the answer came whole or streamed.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::outcome::Outcome;
use super::question::Question;
use crate::client::{Answer, Target};
use crate::prompts::Random;

/// How an answer is read.
pub struct Reading<'a> {
    /// Whether it is streamed.
    pub stream: bool,
    /// Time limit of the head and of each piece.
    pub patience: Duration,
    /// Random pauses between the pieces, up to this moment.
    pub slowly: Option<(&'a mut Random, Instant)>,
}

/// The contents of one choice.
#[derive(Default)]
struct Choice {
    text: String,
    reasoning: String,
    calls: BTreeMap<u64, (String, String)>,
    end: Option<String>,
}

/// An answer, whole or growing.
#[derive(Default)]
pub struct Said(BTreeMap<u64, Choice>);

impl Said {
    /// Adds a whole answer or an event of a stream.
    pub fn take(&mut self, answer: &Value) {
        for choice in answer["choices"].as_array().into_iter().flatten() {
            let part = ["message", "delta"].into_iter().find_map(|key| choice.get(key)).unwrap_or(choice);
            let text = |keys: &[&str]| keys.iter().find_map(|key| part[*key].as_str()).unwrap_or_default();
            let said = self.0.entry(choice["index"].as_u64().unwrap_or(0)).or_default();
            said.text += text(&["text", "content"]);
            said.reasoning += text(&["reasoning_content", "reasoning"]);
            for (at, call) in part["tool_calls"].as_array().into_iter().flatten().enumerate() {
                let (name, arguments) = said.calls.entry(call["index"].as_u64().unwrap_or(at as u64)).or_default();
                *name += call["function"]["name"].as_str().unwrap_or_default();
                *arguments += call["function"]["arguments"].as_str().unwrap_or_default();
            }
            said.end = choice["finish_reason"].as_str().map(str::to_owned).or(said.end.take());
        }
    }

    /// Returns the canonical text if every choice has ended.
    pub fn ended(&self) -> Option<String> {
        let mut all = String::new();
        for choice in self.0.values() {
            let Choice { text, reasoning, calls, end } = choice;
            write!(all, "[{}] {text}", end.as_ref()?).ok()?;
            if !reasoning.is_empty() {
                write!(all, " (thought: {reasoning})").ok()?;
            }
            for (name, arguments) in calls.values() {
                write!(all, " {name}({arguments})").ok()?;
            }
        }
        (!all.is_empty()).then_some(all)
    }
}

/// Asks and reads to the end. Returns the text, or the outcome of the visit if there is no complete answer.
///
/// # Errors
/// When no answer came or the answer broke off: the soak's own faults may be the cause. An error or an omission of the server itself is
/// an outcome.
pub async fn ask(target: &Target, question: &Question, reading: Reading<'_>) -> Result<Result<String, Outcome>> {
    let mut body = question.body.clone();
    body["stream"] = reading.stream.into();
    let answer = target.post(question.path, &body, reading.patience).await?;
    if answer.status() != 200 {
        return Ok(Err(refusal(answer).await));
    }
    if reading.stream {
        return pieces(answer, reading).await;
    }
    let answer = timeout(reading.patience, answer.json()).await??;
    let mut said = Said::default();
    said.take(&answer);
    Ok(said.ended().ok_or_else(|| Outcome::Bad(format!("no reason of the end: {answer}"))))
}

async fn pieces(mut answer: Answer, mut reading: Reading<'_>) -> Result<Result<String, Outcome>> {
    let mut said = Said::default();
    while let Some(data) = timeout(reading.patience, answer.event()).await?? {
        if data == "[DONE]" {
            return Ok(said.ended().ok_or_else(|| Outcome::Bad("a stream without a reason of its end".into())));
        }
        let Ok(event) = serde_json::from_str::<Value>(&data) else {
            return Ok(Err(Outcome::Bad(format!("an event that is not JSON: {data}"))));
        };
        if event.pointer("/error/code").is_some_and(|code| code == "unavailable") {
            return Ok(Err(Outcome::Refused));
        }
        if event.get("error").is_some() {
            return Ok(Err(Outcome::Bad(format!("in the stream: {event}"))));
        }
        said.take(&event);
        if let Some((random, until)) = &mut reading.slowly {
            if Instant::now() >= *until {
                return Ok(Err(Outcome::Good));
            }
            sleep(Duration::from_millis(random.between(20, 250))).await;
        }
    }
    Ok(Err(Outcome::Bad("the stream ended without its terminator".into())))
}

/// Judges an answer that is not a 200: announced refusals are in order, everything else is not.
pub async fn refusal(answer: Answer) -> Outcome {
    let (status, announced) = (answer.status(), answer.announces_retry());
    let text = answer.text().await.unwrap_or_default();
    if matches!(status, 429 | 503) && announced {
        return Outcome::Refused;
    }
    Outcome::Bad(format!("{status}: {}", text.chars().take(300).collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_answer_in_pieces_is_the_answer_as_a_whole() {
        let call = |index: u64, name: &str, arguments: &str| json!({"index": index, "function": {"name": name, "arguments": arguments}});
        let mut whole = Said::default();
        whole.take(&json!({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": {
            "content": "ab", "reasoning_content": "hm",
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}, {"function": {"name": "g", "arguments": "[1]"}}]
        }}]}));
        let mut pieces = Said::default();
        for delta in [
            json!({"reasoning_content": "h"}),
            json!({"reasoning_content": "m", "content": "a"}),
            json!({"content": "b", "tool_calls": [call(0, "f", "{")]}),
            json!({"tool_calls": [call(0, "", "}"), call(1, "g", "[1]")]}),
        ] {
            pieces.take(&json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]}));
        }
        assert_eq!(pieces.ended(), None, "it has not come to its end");
        pieces.take(&json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}));
        assert_eq!(pieces.ended(), whole.ended());
        assert_eq!(whole.ended().unwrap(), "[tool_calls] ab (thought: hm) f({}) g([1])");
    }

    #[test]
    fn every_choice_counts() {
        let mut said = Said::default();
        said.take(&json!({"choices": [{"index": 1, "text": "b", "finish_reason": "stop"}, {"index": 0, "text": "a"}]}));
        assert_eq!(said.ended(), None);
        said.take(&json!({"choices": [{"index": 0, "text": "c", "finish_reason": "length"}]}));
        assert_eq!(said.ended().unwrap(), "[length] ac[stop] b");
        assert_eq!(Said::default().ended(), None, "nothing is no answer");
    }
}
