//! Clients with harmful requests: requests cut in half, rubbish, and sizes that no server can serve.
//!
//! Each client accepts one right answer, or a refusal that announces when to retry.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};

use super::ask::refusal;
use super::endpoint::Endpoint;
use super::outcome::Outcome;
use super::question::Question;
use crate::prompts::Random;

/// Bytes of a giant body: just under what servers usually take.
const GIANT_BYTES: usize = (8 << 20) - 1024;

/// Sends a part of a request, cut at a random byte, and waits.
pub async fn half_open(
    endpoint: &Endpoint,
    question: &Question,
    random: &mut Random,
    until: Instant,
) -> Result<Outcome> {
    let body = question.body.to_string();
    let text = endpoint.target.head(question.path, body.len() as u64) + &body;
    let mut stream = endpoint.target.connect().await?;
    let cut = random.below(text.len() as u64) as usize;
    stream.write_all(&text.as_bytes()[..cut]).await?;
    let wait = Duration::from_millis(random.between(100, 8000));
    sleep(wait.min(until.saturating_duration_since(Instant::now()))).await;
    Ok(Outcome::Good)
}

/// Invalid images: not base64, nothing after the first bytes, sides of two thousand million pixels.
const BROKEN_IMAGES: [&str; 3] = [
    "data:image/png;base64,%%%%",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQ",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUn////9/////CAIAAAAxG9QLAAAAAElFTkSuQmCC",
];

/// Sends an invalid request; the right answer is a 400.
pub async fn malformed(endpoint: &Endpoint, random: &mut Random) -> Result<Outcome> {
    let deep = "[".repeat(50_000);
    let url = BROKEN_IMAGES[random.below(BROKEN_IMAGES.len() as u64) as usize];
    let part = json!([{"type": "image_url", "image_url": {"url": url}}]);
    let image = json!({"messages": [{"role": "user", "content": part}], "max_tokens": 1}).to_string();
    let bodies: [&[u8]; 10] = [
        b"",
        b"{",
        b"[]",
        b"{\"prompt\":\"\xff\xfe\"}",
        b"{\"prompt\":\"\\ud800\"}",
        b"{\"prompt\":{\"a\":1}}",
        b"{\"prompt\":\"x\",\"temperature\":\"hot\"}",
        b"{\"prompt\":[-1]}",
        deep.as_bytes(),
        image.as_bytes(),
    ];
    let at = random.below(bodies.len() as u64) as usize;
    let body = bodies[at];
    let path = if at + 1 == bodies.len() { "/v1/chat/completions" } else { "/v1/completions" };
    let head = endpoint.target.head(path, body.len() as u64);
    expect(endpoint, &[head.as_bytes(), body].concat(), "400").await
}

/// Announces a body of ten gibibytes; the right answer is a 413 before the first byte of it.
pub async fn oversized(endpoint: &Endpoint) -> Result<Outcome> {
    let head = endpoint.target.head("/v1/completions", 10 << 30);
    expect(endpoint, head.as_bytes(), "413").await
}

/// Sends eight mebibytes of valid JSON. No context holds them, so the right answer is a 400 (or a 413).
pub async fn giant(endpoint: &Endpoint, random: &mut Random) -> Result<Outcome> {
    let body = giant_body(&endpoint.model, random);
    let head = endpoint.target.head("/v1/completions", body.len() as u64);
    let mut stream = endpoint.target.connect().await?;
    stream.write_all(head.as_bytes()).await?;
    // A server that refuses while the body is still being sent closes the connection; its answer may be lost with it.
    let sent = timeout(endpoint.patience, stream.write_all(&body)).await?;
    let mut start = [0; 12];
    match timeout(endpoint.patience, stream.read_exact(&mut start)).await? {
        Ok(_) => Ok(match &start[9..] {
            b"400" | b"413" => Outcome::Good,
            b"429" | b"503" => Outcome::Refused,
            other => Outcome::Bad(format!("{} to a giant body", String::from_utf8_lossy(other))),
        }),
        Err(_) if sent.is_err() => Ok(Outcome::Refused),
        Err(error) => Err(error.into()),
    }
}

/// Words, one endless word, token ids, or as many stop strings, biases and prompts as fit.
fn giant_body(model: &str, random: &mut Random) -> Vec<u8> {
    let fill = |piece: &str| piece.repeat(GIANT_BYTES / piece.len());
    let (prompt, more) = match random.below(6) {
        0 => (format!("\"{}\"", fill("the old man and the sea ")), String::new()),
        1 => (format!("\"{}\"", fill("a")), String::new()),
        2 => (format!("[{}1]", fill("1,")), String::new()),
        3 => ("\"x\"".into(), format!(",\"stop\":[{}\"a\"]", fill("\"a\","))),
        4 => ("\"x\"".into(), format!(",\"logit_bias\":{{{}\"1\":0}}", fill("\"1\":1,"))),
        _ => (format!("[{}\"x\"]", fill("\"x\",")), String::new()),
    };
    format!("{{\"model\":{model:?},\"max_tokens\":1,\"prompt\":{prompt}{more}}}").into_bytes()
}

/// Sends raw bytes and looks at the status only.
async fn expect(endpoint: &Endpoint, bytes: &[u8], status: &str) -> Result<Outcome> {
    let mut stream = endpoint.target.connect().await?;
    stream.write_all(bytes).await?;
    let mut head = [0; 12];
    timeout(endpoint.at_once, stream.read_exact(&mut head)).await??;
    let got = String::from_utf8_lossy(&head[9..]).into_owned();
    let announced = matches!(got.as_str(), "429" | "503");
    Ok(match got.as_str() {
        got if got == status => Outcome::Good,
        _ if announced => Outcome::Refused,
        _ => Outcome::Bad(format!("{got} instead of {status}")),
    })
}

/// Sends a request that can never be valid; the right answer is a 400 within `at_once`.
pub async fn never(endpoint: &Endpoint, change: Value) -> Result<Outcome> {
    let mut body = json!({"model": endpoint.model, "prompt": "x", "max_tokens": 1});
    for (key, value) in change.as_object().into_iter().flatten() {
        body[key] = value.clone();
    }
    let answer = endpoint.target.post("/v1/completions", &body, endpoint.at_once).await?;
    if answer.status() == 400 { Ok(Outcome::Good) } else { Ok(refusal(answer).await) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn giants_are_valid_json_just_under_the_limit() {
        let mut random = Random::new(1);
        for _ in 0..8 {
            let body = giant_body("m", &mut random);
            assert!(body.len() <= 8 << 20 && body.len() > 7 << 20, "{}", body.len());
            serde_json::from_slice::<Value>(&body).unwrap();
        }
    }
}
