//! One answer: a streamed request, its pieces as they arrive, and its speed.

use std::time::{Duration, Instant};

use anyhow::bail;
use plimsoll_bench::client::{Answer as Response, Target};
use serde_json::{Value, json};

/// The server's response begins within this time, which includes waiting for other requests.
const HEAD_WITHIN: Duration = Duration::from_secs(600);

/// Most bytes of an answer, reasoning included.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// A piece of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// A piece of the reasoning.
    Reasoning(&'a str),
    /// A piece of the answer.
    Content(&'a str),
}

/// An answer, whole or stopped.
#[derive(Debug, Default)]
pub struct Answer {
    /// The text.
    pub content: String,
    /// The reasoning before the answer.
    pub reasoning: String,
    /// Why it ended, in the API's words.
    pub finish_reason: Option<String>,
    /// The user stopped it.
    pub stopped: bool,
    /// Its tokens and times.
    pub stats: Stats,
}

/// Tokens and times of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt; absent if the server reports none.
    pub prompt_tokens: Option<u64>,
    /// Tokens of the answer.
    pub output_tokens: Option<u64>,
    /// Seconds from the request to the first piece.
    pub first_s: Option<f64>,
    /// Seconds from the request to the last piece.
    pub total_s: f64,
}

impl Stats {
    /// Tokens a second after the first.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let (tokens, first) = (self.output_tokens?, self.first_s?);
        let rest = self.total_s - first;
        (tokens > 1 && rest > 0.0).then(|| (tokens - 1) as f64 / rest)
    }

    /// The line that `/stats` shows.
    pub fn line(&self) -> String {
        let number = |number: Option<u64>| number.map_or_else(|| "?".into(), |number| number.to_string());
        let mut parts = vec![format!("{} tokens in {:.2} s", number(self.output_tokens), self.total_s)];
        parts.extend(self.tokens_per_second().map(|speed| format!("{speed:.1} tokens/s")));
        parts.extend(self.first_s.map(|first| format!("first after {first:.2} s")));
        parts.push(format!("prompt of {} tokens", number(self.prompt_tokens)));
        format!("[{}]", parts.join(", "))
    }
}

impl Answer {
    /// The document that `--json` prints.
    pub fn document(&self, model: &str) -> Value {
        let Stats { prompt_tokens, output_tokens, first_s, total_s } = self.stats;
        json!({
            "model": model,
            "content": self.content,
            "reasoning": (!self.reasoning.is_empty()).then_some(&self.reasoning),
            "finish_reason": self.finish_reason,
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens},
            "timings": {
                "first_token_s": first_s,
                "total_s": total_s,
                "tokens_per_second": self.stats.tokens_per_second(),
            },
        })
    }

    /// Adds an event's data to the answer. Returns the event's piece of text, if it has one.
    fn take<'a>(&mut self, event: &'a Value) -> anyhow::Result<Option<Piece<'a>>> {
        if let Some(error) = event.get("error") {
            let message = error.get("message").and_then(Value::as_str);
            let message = message.map_or_else(|| error.to_string(), str::to_owned);
            bail!("the answer failed: {}", message.replace(char::is_control, " "));
        }
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            self.stats.prompt_tokens = usage["prompt_tokens"].as_u64();
            self.stats.output_tokens = usage["completion_tokens"].as_u64();
        }
        let Some(choice) = event.pointer("/choices/0") else { return Ok(None) };
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        let text = |name: &str| choice["delta"][name].as_str().filter(|text| !text.is_empty());
        let piece = match (text("content"), text("reasoning_content").or(text("reasoning"))) {
            (Some(text), _) => Piece::Content(text),
            (None, Some(text)) => Piece::Reasoning(text),
            (None, None) => return Ok(None),
        };
        match piece {
            Piece::Content(text) => self.content.push_str(text),
            Piece::Reasoning(text) => self.reasoning.push_str(text),
        }
        if self.content.len() + self.reasoning.len() > ANSWER_BYTES_MAX {
            bail!("the answer has more than {ANSWER_BYTES_MAX} bytes: `/set max_tokens N` makes answers shorter");
        }
        Ok(Some(piece))
    }
}

/// Sends the request and returns the answer once it is complete. Calls `show` for every piece. Ctrl-C stops the answer.
///
/// # Errors
/// The server refuses the request, or the answer fails.
pub async fn stream(target: &Target, request: &Value, mut show: impl FnMut(Piece<'_>)) -> anyhow::Result<Answer> {
    let began = Instant::now();
    let mut answer = Answer::default();
    let interrupted = tokio::signal::ctrl_c();
    tokio::pin!(interrupted);
    let asked = async { target.post("/v1/chat/completions", request, HEAD_WITHIN).await?.good().await };
    let mut response = tokio::select! {
        response = asked => response?,
        _ = &mut interrupted => return Ok(Answer { stopped: true, ..answer }),
    };
    loop {
        let event = tokio::select! {
            event = next(&mut response) => event?,
            _ = &mut interrupted => {
                answer.stopped = true;
                break;
            }
        };
        let Some(event) = event else { break };
        if let Some(piece) = answer.take(&event)? {
            answer.stats.first_s.get_or_insert_with(|| began.elapsed().as_secs_f64());
            show(piece);
        }
        // The usage event comes after the end of the answer, and its time does not count.
        if answer.finish_reason.is_none() || answer.stats.total_s == 0.0 {
            answer.stats.total_s = began.elapsed().as_secs_f64();
        }
    }
    answer.stats.total_s = answer.stats.total_s.max(answer.stats.first_s.unwrap_or_default());
    if answer.finish_reason.is_none() && !answer.stopped {
        bail!("the answer broke off: the server closed the connection");
    }
    Ok(answer)
}

/// The next event; none after the last.
async fn next(response: &mut Response) -> anyhow::Result<Option<Value>> {
    let Some(data) = response.event().await? else { return Ok(None) };
    match data.as_str() {
        "[DONE]" => Ok(None),
        data => Ok(Some(serde_json::from_str(data)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_become_text_usage_and_the_reason_of_the_end() {
        let mut answer = Answer::default();
        let delta = |delta: Value| json!({"choices": [{"delta": delta, "finish_reason": null}], "usage": null});
        let events = [
            delta(json!({"role": "assistant", "content": ""})),
            delta(json!({"reasoning_content": "hm", "reasoning": "hm"})),
            delta(json!({"content": "Pa"})),
            delta(json!({"content": "ris"})),
            json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}),
        ];
        let pieces: Vec<_> = events.iter().filter_map(|event| answer.take(event).unwrap()).collect();
        assert_eq!(pieces, [Piece::Reasoning("hm"), Piece::Content("Pa"), Piece::Content("ris")]);
        answer.stats = Stats { first_s: Some(0.5), total_s: 1.5, ..answer.stats };
        assert_eq!((answer.content.as_str(), answer.finish_reason.as_deref()), ("Paris", Some("stop")));
        let line = answer.stats.line();
        assert_eq!(line, "[3 tokens in 1.50 s, 2.0 tokens/s, first after 0.50 s, prompt of 9 tokens]");
        let document = answer.document("m");
        assert_eq!((&document["usage"]["completion_tokens"], &document["reasoning"]), (&json!(3), &json!("hm")));
    }

    #[test]
    fn error_in_a_stream_is_an_error() {
        let event = json!({"error": {"message": "memory ran short", "code": 500}});
        let error = Answer::default().take(&event).unwrap_err().to_string();
        assert_eq!(error, "the answer failed: memory ran short");
    }
}
