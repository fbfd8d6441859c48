//! One round of load against one server: a number of requests, some of them at once, each streamed and timed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use plimsoll_engine::simulate::percentile;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::intruder::{self, Intruder, Window};
use super::request::{Clock, REQUEST_TIMEOUT, Server, Timing, one};
use crate::process::Sample;

/// Time between samples of the process.
const SAMPLE_EVERY: Duration = Duration::from_millis(50);

/// The requests of a round.
#[derive(Clone, Debug)]
pub struct Load {
    /// One prompt per request.
    pub prompts: Arc<Vec<String>>,
    /// Number of requests at once.
    pub concurrency: usize,
    /// Tokens to generate per request.
    pub output_tokens: usize,
    /// The intruder's prompt; it is sent when all streams run.
    pub intruder: Option<String>,
}

/// The results of a round.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Round {
    /// Generated tokens per second of the whole round.
    pub output_tokens_per_s: f64,
    /// Prompt tokens per second of the whole round.
    pub prompt_tokens_per_s: f64,
    /// Median time to the first piece of text.
    pub ttft_p50_s: f64,
    /// 99th percentile of the time to the first piece of text.
    pub ttft_p99_s: f64,
    /// Median time between pieces of text.
    pub gap_p50_s: f64,
    /// 99th percentile of the time between pieces of text.
    pub gap_p99_s: f64,
    /// Seconds from the first request to the last answer.
    pub wall_s: f64,
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Tokens of the prompts of all answered requests.
    pub prompt_tokens: u64,
    /// Tokens of all answers.
    pub output_tokens: u64,
    /// Peak resident bytes of the process during the round; none when it was not watched.
    pub peak_resident: Option<u64>,
    /// The intruder's effect on the streams; none if no intruder was sent.
    pub intruder: Option<Window>,
    /// The intruder's error, if it failed.
    pub intruder_error: Option<String>,
    /// The text of the first error.
    pub first_error: Option<String>,
}

/// Runs one round.
pub async fn round(server: &Server, load: &Load) -> Round {
    let peak = Peak::watch(server.pid);
    let next = Arc::new(AtomicUsize::new(0));
    let clock = Clock::start();
    let mut workers = JoinSet::new();
    let streams = load.concurrency.min(load.prompts.len());
    for _ in 0..streams {
        workers.spawn(worker(server.clone(), load.clone(), Arc::clone(&next), clock.clone()));
    }
    let intruder = load.intruder.clone().map(|prompt| Intruder::send(server.clone(), prompt, streams, clock.clone()));
    let mut timings = Vec::new();
    let mut errors = Vec::new();
    while let Some(done) = workers.join_next().await {
        let (mut good, mut bad) = done.unwrap_or_else(|e| (Vec::new(), vec![e.to_string()]));
        timings.append(&mut good);
        errors.append(&mut bad);
    }
    let wall_s = clock.now_s();
    let window = match intruder {
        Some(intruder) => intruder.end().await.and_then(|timing| intruder::window(&timing, &timings)).map(Some),
        None => Ok(None),
    };
    // The intruder is not one of the requests, so its error is reported separately.
    let (intruder, intruder_error) = match window {
        Ok(window) => (window, None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    Round { intruder, intruder_error, ..summary(&timings, errors, wall_s, peak.bytes()) }
}

async fn worker(server: Server, load: Load, next: Arc<AtomicUsize>, clock: Clock) -> (Vec<Timing>, Vec<String>) {
    let (mut timings, mut errors) = (Vec::new(), Vec::new());
    while let Some(prompt) = load.prompts.get(next.fetch_add(1, Ordering::Relaxed)) {
        match timeout(REQUEST_TIMEOUT, one(&server, prompt, load.output_tokens, &clock)).await {
            Ok(Ok(timing)) => timings.push(timing),
            Ok(Err(error)) => errors.push(format!("{error:#}")),
            Err(_) => errors.push(format!("no end after {REQUEST_TIMEOUT:?}")),
        }
    }
    (timings, errors)
}

fn summary(timings: &[Timing], errors: Vec<String>, wall_s: f64, peak_resident: Option<u64>) -> Round {
    let sum = |of: fn(&Timing) -> u64| timings.iter().map(of).sum::<u64>();
    let (prompt_tokens, output_tokens) = (sum(|t| t.prompt_tokens), sum(|t| t.output_tokens));
    let mut ttft: Vec<f64> = timings.iter().map(Timing::ttft_s).collect();
    let mut gaps: Vec<f64> = timings.iter().flat_map(Timing::gaps_s).collect();
    Round {
        output_tokens_per_s: output_tokens as f64 / wall_s,
        prompt_tokens_per_s: prompt_tokens as f64 / wall_s,
        ttft_p50_s: percentile(&mut ttft, 50),
        ttft_p99_s: percentile(&mut ttft, 99),
        gap_p50_s: percentile(&mut gaps, 50),
        gap_p99_s: percentile(&mut gaps, 99),
        wall_s,
        answered: timings.len() as u64,
        errors: errors.len() as u64,
        prompt_tokens,
        output_tokens,
        peak_resident,
        intruder: None,
        intruder_error: None,
        first_error: errors.into_iter().next(),
    }
}

/// Watches a process's resident memory until it is dropped.
struct Peak {
    bytes: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Peak {
    fn watch(pid: Option<u32>) -> Self {
        let peak = Self { bytes: Arc::default(), over: Arc::default() };
        if let Some(pid) = pid {
            let (bytes, over) = (Arc::clone(&peak.bytes), Arc::clone(&peak.over));
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let Some(sample) = Sample::of(pid) else { break };
                    bytes.fetch_max(sample.resident, Ordering::Relaxed);
                    sleep(SAMPLE_EVERY).await;
                }
            });
        }
        peak
    }

    /// Returns the largest sample; none without a sample.
    fn bytes(&self) -> Option<u64> {
        Some(self.bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use serde_json::Value;

    use super::*;
    use crate::bench::request::Dialect;
    use crate::client::{Target, client_runtime};

    /// Returns a stream of three pieces, followed by `more` before its end.
    fn stream(more: &str) -> String {
        let piece = "data: {\"choices\":[{\"text\":\"x\"}]}\n\n";
        format!("{piece}{piece}{piece}{more}data: [DONE]\n\n")
    }

    /// Runs a round of prompts, one at a time, against a server that takes every field. The server answers a prompt with the stream of
    /// the same name, and any other prompt with an error.
    fn round_of(prompts: &[&str], intruder: Option<&str>, streams: &[(&str, String)]) -> Round {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = Target::parse(&format!("http://{}", listener.local_addr().unwrap()), None).unwrap();
        let streams: Vec<_> = streams.iter().map(|(prompt, body)| ((*prompt).to_owned(), body.clone())).collect();
        // The thread waits for connections until the test's process ends.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.unwrap());
                let (mut length, mut line) = (0, String::new());
                while stream.read_line(&mut line).unwrap() > 2 {
                    length =
                        line.strip_prefix("content-length: ").map_or(length, |value| value.trim().parse().unwrap());
                    line.clear();
                }
                let mut body = vec![0; length];
                stream.read_exact(&mut body).unwrap();
                let prompt = serde_json::from_slice::<Value>(&body).unwrap()["prompt"].as_str().unwrap().to_owned();
                let found = streams.iter().find(|(name, _)| *name == prompt);
                let (status, text) = found.map_or(("500 No", ""), |(_, text)| ("200 OK", text));
                write!(stream.get_mut(), "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{text}", text.len()).unwrap();
            }
        });
        let dialect = Dialect { ignore_eos: true, usage: true };
        let server = Server { target, model: "m".into(), dialect, pid: None };
        let prompts = Arc::new(prompts.iter().map(|prompt| (*prompt).to_owned()).collect());
        let load = Load { prompts, concurrency: 1, output_tokens: 9, intruder: intruder.map(str::to_owned) };
        client_runtime().unwrap().block_on(round(&server, &load))
    }

    #[test]
    fn where_no_usage_comes_pieces_are_counted() {
        let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":7}}\n\n";
        let streams = [("silent", stream("")), ("exact", stream(usage))];
        assert_eq!(round_of(&["exact"], None, &streams).output_tokens, 7);
        let round = round_of(&["silent", "exact", "silent"], None, &streams);
        assert_eq!((round.errors, round.prompt_tokens, round.output_tokens), (0, 4, 3 + 7 + 3));
        assert!(round.output_tokens_per_s > 0.0);
    }

    #[test]
    fn an_intruder_that_fails_is_none_of_the_requests() {
        let streams = [("good", stream(""))];
        let round = round_of(&["good", "bad"], Some("bad"), &streams);
        assert_eq!((round.answered, round.errors), (1, 1), "{round:?}");
        assert!(round.intruder.is_none() && round.intruder_error.is_some());
        let round = round_of(&["bad", "bad"], Some("bad"), &streams);
        assert_eq!((round.answered, round.errors), (0, 2), "{round:?}");
        assert!(round.first_error.unwrap().contains("500") && round.intruder_error.is_some());
    }

    #[test]
    fn a_round_counts_what_was_answered_and_keeps_the_first_error() {
        let timing = Timing { sent_s: 0.25, pieces_s: vec![0.75, 1.0, 1.5], prompt_tokens: 10, output_tokens: 3 };
        let round = summary(&[timing.clone(), timing], vec!["first".into(), "second".into()], 2.0, Some(7));
        assert_eq!((round.output_tokens_per_s, round.prompt_tokens_per_s), (3.0, 10.0));
        assert_eq!((round.answered, round.errors, round.first_error.as_deref()), (2, 2, Some("first")));
        assert_eq!(round.peak_resident, Some(7));
        assert_eq!((round.ttft_p50_s, round.gap_p50_s, round.gap_p99_s), (0.5, 0.25, 0.5));
    }
}
