//! An intruder: one more request with a long prompt that arrives while streams run. Measures its effect on the time between their
//! tokens.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use plimsoll_engine::simulate::percentile;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::request::{Clock, REQUEST_TIMEOUT, Server, Timing, one};

/// Tokens an intruder asks for: its prompt is what matters.
const OUTPUT_TOKENS: usize = 8;

/// An intruder that has been scheduled or sent.
pub struct Intruder {
    task: JoinHandle<Result<Timing>>,
    running: Arc<Semaphore>,
}

impl Intruder {
    /// Sends the intruder as soon as `streams` requests have begun to answer.
    pub fn send(server: Server, prompt: String, streams: usize, clock: Clock) -> Self {
        let running = Arc::clone(&clock.running);
        let task = tokio::spawn(async move {
            let all = u32::try_from(streams)?;
            clock.running.acquire_many(all).await.context("the streams ended before all of them ran")?.forget();
            one(&server, &prompt, OUTPUT_TOKENS, &clock).await
        });
        Self { task, running }
    }

    /// Waits for the intruder's times. Call it when the streams have ended: an intruder that has not been sent by then fails.
    pub async fn end(self) -> Result<Timing> {
        self.running.close();
        let stop = self.task.abort_handle();
        let ended = timeout(REQUEST_TIMEOUT, self.task).await;
        stop.abort();
        ended.context("no end in time")??
    }
}

/// Token gaps of the streams in the intruder's window: from its sending to its first token. Times in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct Window {
    /// The intruder's time to its first token.
    pub ttft_s: f64,
    /// Tokens of the intruder's prompt.
    pub prompt_tokens: u64,
    /// Median gap between pieces of the streams' text.
    pub gap_p50_s: f64,
    /// 99th percentile of these gaps.
    pub gap_p99_s: f64,
    /// The longest of these gaps.
    pub gap_max_s: f64,
    /// Median of the gaps outside the intruder's window.
    pub quiet_gap_p50_s: f64,
}

/// Sorts the gaps of `streams` into those that touch the window of `intruder` and those that do not.
pub fn window(intruder: &Timing, streams: &[Timing]) -> Result<Window> {
    let (from_s, to_s) = (intruder.sent_s, intruder.sent_s + intruder.ttft_s());
    let (mut beside, mut quiet) = (Vec::new(), Vec::new());
    for pair in streams.iter().flat_map(|stream| stream.pieces_s.windows(2)) {
        let touches = pair[1] > from_s && pair[0] < to_s;
        if touches { &mut beside } else { &mut quiet }.push(pair[1] - pair[0]);
    }
    let ended_s = streams.iter().filter_map(|stream| stream.pieces_s.last()).copied().fold(f64::MAX, f64::min);
    if ended_s < to_s {
        bail!("a stream ended {:.2} s before its first token: more output tokens are needed", to_s - ended_s);
    }
    Ok(Window {
        ttft_s: intruder.ttft_s(),
        prompt_tokens: intruder.prompt_tokens,
        gap_p50_s: percentile(&mut beside, 50),
        gap_p99_s: percentile(&mut beside, 99),
        gap_max_s: beside.iter().copied().fold(0.0, f64::max),
        quiet_gap_p50_s: percentile(&mut quiet, 50),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(sent_s: f64, pieces_s: &[f64]) -> Timing {
        Timing { sent_s, pieces_s: pieces_s.to_vec(), ..Timing::default() }
    }

    #[test]
    fn gaps_that_touch_the_window_are_told_from_the_others() {
        let stream = timing(0.0, &[1.0, 1.25, 2.25, 3.25, 3.5, 3.75]);
        let seen = window(&timing(1.5, &[3.0, 3.1]), &[stream.clone(), stream]).unwrap();
        assert_eq!((seen.ttft_s, seen.gap_p50_s, seen.gap_max_s, seen.quiet_gap_p50_s), (1.5, 1.0, 1.0, 0.25));
    }

    #[test]
    fn streams_that_end_too_early_are_an_error() {
        let stream = timing(0.0, &[1.0, 2.0]);
        let error = window(&timing(1.5, &[3.0]), &[stream]).unwrap_err();
        assert!(error.to_string().contains("1.00 s before"), "{error}");
    }
}
