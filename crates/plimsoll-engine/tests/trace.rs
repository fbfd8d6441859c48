//! A38: a recorded trace, replayed at the limit of a real engine. Nothing fails, hangs or grows, every pool is full again, and every replay
//! gives the first one's answers. Three replays by default, a few seconds each; the criterion's hour is `PLIMSOLL_REPLAY_SECONDS=3600 cargo
//! test -p plimsoll-engine --test trace -- --nocapture`.
//!
//! The trace is recorded here (a file of one JSON object a line, as a proxy in front of a server would write it) from a fixed seed:
//! bursts, shared beginnings, long and short answers, clients that hang up, log-probabilities.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::recall::mix;
use common::{fixtures, greedy, quiet};
use plimsoll_engine::{EngineHandle, Host, Options, Request, start};
use plimsoll_memory::heap;
use plimsoll_memory::host::{OwnProcess, Root};
use plimsoll_text::Tokenizer;
use serde_json::{Value, json};

#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

const REQUESTS: u64 = 240;
/// Replays at least; more if they fit into the requested seconds.
const REPLAYS: usize = 3;
/// Bytes that a replay may leave on the heap or in the process: noise of threads and of the allocator.
const NOISE_BYTES: u64 = 1 << 20;

fn record(file: &Path) {
    let mut at_ms = 0;
    let mut lines = String::new();
    for i in 0..REQUESTS {
        let dice = |n: u64, k: u64| mix(i * 64 + k) % n;
        // Bursts of twenty, then a pause.
        at_ms += if i % 20 == 0 { 150 } else { dice(4, 0) };
        let line = json!({
            "at_ms": at_ms, "family": dice(5, 1), "shared": dice(120, 2), "own": 1 + dice(60, 3), "salt": dice(8, 4) / 7,
            "max_tokens": 1 + dice(if dice(2, 5) == 0 { 120 } else { 24 }, 6),
            "hang_up_after": if dice(6, 7) == 0 { Some(dice(10, 8)) } else { None },
            "logprobs": if dice(5, 9) == 0 { Some(dice(4, 10)) } else { None },
        });
        lines.push_str(&format!("{line}\n"));
    }
    std::fs::write(file, lines).unwrap();
}

fn request(line: &Value, number: u64) -> Request {
    let field = |name: &str| line[name].as_u64().unwrap();
    let shared = (0..field("shared")).map(|n| mix(field("family") * 7919 + n) % 256);
    let own = (0..field("own")).map(|n| mix(number * 104_729 + n) % 256);
    let prompt: Vec<u32> = shared.chain(own).map(|id| id as u32).collect();
    let mut request = greedy(&prompt, field("max_tokens") as u32);
    request.cache_salt = field("salt");
    request.logprobs = line["logprobs"].as_u64().map(|n| n as u32);
    request
}

/// A client's tokens (None: it disconnected) and how long it waited.
type Got = (Option<Vec<u32>>, Duration);

/// Runs one client: it sends its request, reads, perhaps disconnects. An error or a refusal fails the test.
fn client(engine: &EngineHandle, line: &Value, number: u64) -> Got {
    let began = Instant::now();
    let mut reader = engine.submit(request(line, number)).unwrap_or_else(|e| panic!("request {number}: {e}"));
    let mut ids = Vec::new();
    while let Some(delta) = pollster::block_on(reader.next()) {
        assert_eq!(delta.error, None, "request {number}");
        ids.extend(delta.tokens.iter().map(|token| token.id));
        if line["hang_up_after"].as_u64().is_some_and(|after| ids.len() as u64 >= after) {
            return (None, began.elapsed());
        }
    }
    assert_eq!(ids.len() as u64, line["max_tokens"].as_u64().unwrap(), "request {number}");
    (Some(ids), began.elapsed())
}

/// Replays the trace at its own pace.
fn replay(engine: &EngineHandle, trace: &[Value]) -> Vec<Got> {
    let began = Instant::now();
    let got: Mutex<Vec<Option<Got>>> = Mutex::new(vec![None; trace.len()]);
    std::thread::scope(|scope| {
        for (number, line) in trace.iter().enumerate() {
            let due = Duration::from_millis(line["at_ms"].as_u64().unwrap());
            std::thread::sleep(due.saturating_sub(began.elapsed()));
            let got = &got;
            scope.spawn(move || {
                let one = client(engine, line, number as u64);
                got.lock().unwrap()[number] = Some(one);
            });
        }
    });
    got.into_inner().unwrap().into_iter().map(|one| one.expect("every client came back")).collect()
}

fn p99(got: &[Got]) -> Duration {
    let mut times: Vec<Duration> = got.iter().map(|(_, time)| *time).collect();
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

#[test]
#[ignore = "soak"]
fn a38_a_trace_replayed_at_the_limit_changes_nothing() {
    let file: PathBuf = std::env::temp_dir().join(format!("plimsoll-trace-{}.jsonl", std::process::id()));
    record(&file);
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let trace: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(trace.len() as u64, REQUESTS);
    // The limit: a pool of little more than one request of full length, fewer slots than a burst has clients.
    let options = Options {
        batch_max_tokens: 64,
        graph_max_batch_size: 12,
        running_max_req_size: 12,
        max_total_token_num: Some(320),
        max_waiting: REQUESTS as usize,
        threads: Some(2),
        ..Options::default()
    };
    let mut host = Host::read(&options).unwrap();
    host.lease_dir = Some(std::env::temp_dir().join(format!("plimsoll-trace-{}", std::process::id())));
    let checkpoint = plimsoll_formats::Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    let tokenizer = Tokenizer::from_file(&fixtures().join("models/llama/tokenizer.json")).unwrap();
    let engine = start(&checkpoint, tokenizer.into(), &options, &host, |_| {}).unwrap();
    let allocations = engine.ledger().allocations();
    let mut first: Option<(Vec<Got>, [u64; 2], i64)> = None;
    let seconds = std::env::var("PLIMSOLL_REPLAY_SECONDS").map_or(0, |text| text.parse().expect("seconds"));
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut rounds = 0;
    while rounds < REPLAYS || Instant::now() < until {
        let round = rounds;
        rounds += 1;
        let got = replay(&engine, &trace);
        quiet(&engine);
        heap::trim();
        let (in_use, gauge) = (heap::in_use(), OwnProcess::read(&Root::system()).leak_gauge());
        let report = engine.report();
        println!("replay {round}: p99 {:?}, heap {in_use}, process {gauge}; {}", p99(&got), report.line());
        assert_eq!((report.requests.failed, report.pools.host_bytes.used, engine.held()), (0, 0, 0));
        assert_eq!(report.pools.kv_pages.used, report.pools.kv_pages.cached, "KV free = total at idle");
        assert_eq!(engine.ledger().allocations(), allocations, "nothing was allocated on the device");
        for row in engine.ledger().rows() {
            let own = row.component != plimsoll_memory::Component::ProcessBaseline;
            assert!(!own || row.peak <= row.planned, "I2: {row:?}");
        }
        // The second replay is the baseline: the first one fills caches and pools of threads.
        match &first {
            Some((baseline, [heap_then, gauge_then], unaccounted_then)) if round > 1 => {
                for (number, ((now, _), (then, _))) in got.iter().zip(baseline).enumerate() {
                    assert!(now == then || now.is_none() || then.is_none(), "request {number} says something else");
                }
                assert!(in_use <= heap_then + NOISE_BYTES, "the heap grew from {heap_then} to {in_use}");
                assert!(gauge <= gauge_then + NOISE_BYTES, "the process grew from {gauge_then} to {gauge}");
                let (now, then) = (report.unaccounted_bytes, *unaccounted_then);
                assert!(now <= then + NOISE_BYTES as i64, "unaccounted memory went from {then} to {now}");
                let (now, then) = (p99(&got), p99(baseline));
                assert!(now <= then * 4 + Duration::from_millis(500), "p99 went from {then:?} to {now:?}");
            }
            _ => first = Some((got, [in_use, gauge], report.unaccounted_bytes)),
        }
    }
    let preempted = engine.metrics().preemptions.get();
    let served = engine.metrics().finished.get() + engine.metrics().aborted.get();
    assert_eq!(served, REQUESTS * rounds as u64);
    assert!(preempted > 0, "it was not at the limit");
    assert!(preempted < 20 * served, "{preempted} preemptions for {served} requests: a livelock");
}
