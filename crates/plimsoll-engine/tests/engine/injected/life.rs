//! One scripted life of an engine, run by hand on one thread. Its requests are queued, prefilled in chunks, find a prefix, are preempted,
//! stream, stop at a string, report log-probabilities, are penalised and aborted. Every run makes the same calls, so "the n-th allocation"
//! has a meaning.

use std::sync::atomic::Ordering::Acquire;

use plimsoll_engine::testing::{ByHand, by_hand};
use plimsoll_engine::{Delta, EngineHandle, Reader, Refusal, Request};
use plimsoll_memory::{faults, heap};

use crate::common::greedy;
use crate::common::recall::{Recall, Shape, mix, prompt, recall_bench, says};

/// Requests of a life.
pub const REQUESTS: usize = 8;
/// The request that is sent when all others have ended: the engine still serves.
const LAST: usize = REQUESTS - 1;
/// The request of the client that disconnects.
const ABORTED: usize = 1;
/// The round after which this client disconnects.
const ABORT_ROUND: usize = 14;

/// The calls that may be refused or may panic.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// Calls of the engine's rounds.
    Rounds,
    /// Calls of the engine's rounds, of submission, reading and dropping.
    Everything,
}

/// How a request came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Open,
    Done,
    Failed,
    Refused,
    Aborted,
}

/// A client's view of a request, in a few numbers: it takes no heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    pub fate: Fate,
    pub tokens: u64,
    /// Hashes of ids, text, reports and finish reason, however they were cut into deltas.
    pub hash: [u64; 3],
}

impl Heard {
    fn take(&mut self, delta: &Delta) {
        let fold = |hash: &mut u64, x: u64| *hash = mix(*hash ^ x);
        for token in &delta.tokens {
            self.tokens += 1;
            fold(&mut self.hash[0], u64::from(token.id) << 32 | u64::from(token.text_offset));
            for (id, logprob) in token.logprobs.iter().flat_map(|report| report.top.iter()) {
                fold(&mut self.hash[0], u64::from(*id) << 32 | u64::from(logprob.to_bits()));
            }
        }
        delta.text.bytes().for_each(|byte| fold(&mut self.hash[1], byte.into()));
        for report in &delta.prompt_logprobs {
            fold(&mut self.hash[2], report.own.map_or(1, |own| own.to_bits().into()));
            report.top.iter().for_each(|(id, logprob)| {
                fold(&mut self.hash[2], u64::from(*id) << 32 | u64::from(logprob.to_bits()));
            });
        }
        if let Some(finish) = delta.finish {
            fold(&mut self.hash[2], finish as u64);
            delta.stop_reason.iter().flat_map(|s| s.bytes()).for_each(|byte| fold(&mut self.hash[2], byte.into()));
            self.fate = Fate::Done;
        }
        if delta.error.is_some() {
            self.fate = Fate::Failed;
        }
    }
}

/// The script.
pub fn requests() -> Vec<Request> {
    let mut all: Vec<Request> = (0..REQUESTS as u64).map(|i| greedy(&prompt(i, 40), 30)).collect();
    (all[0].logprobs, all[0].prompt_logprobs) = (Some(3), Some(2));
    (all[1].prompt, all[1].max_tokens) = (prompt(1, 20), 70);
    // The first request's prompt and more tokens.
    all[2].prompt = [prompt(0, 40), prompt(11, 9)].concat();
    (all[3].prompt, all[3].max_tokens) = (prompt(3, 20), 80);
    all[3].sampling.frequency_penalty = 0.5;
    all[3].sampling.presence_penalty = 0.3;
    all[3].sampling.temperature = 0.7;
    all[3].sampling.seed = 7;
    all[3].logprobs = Some(0);
    // Together with the request before, more than the pool holds.
    (all[4].prompt, all[4].max_tokens) = (prompt(4, 20), 80);
    // Ends at a string in the middle of its answer; its other stop string does not occur.
    let stop = stop_string(&all[5].prompt);
    all[5].stop = vec!["never said at all".into(), stop];
    all[6].prompt = prompt(6, 70);
    (all[LAST].prompt, all[LAST].max_tokens) = (prompt(99, 20), 3);
    all
}

/// Returns the text of a printable token in the middle of the model's answer to `prompt`.
fn stop_string(prompt: &[u32]) -> String {
    let said = says(prompt, 30);
    let id = said[10..].iter().find(|id| (33..127).contains(*id));
    // The tokenizer tells which ids are printable characters.
    let tokenizer =
        plimsoll_text::Tokenizer::from_file(&crate::common::fixtures().join("models/llama/tokenizer.json")).unwrap();
    let text = |id: &u32| String::from_utf8(tokenizer.token_bytes(*id).to_vec()).ok().filter(|s| !s.is_empty());
    id.and_then(text).or_else(|| said[8..].iter().find_map(text)).expect("something readable is said")
}

/// The engine's counters after a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    pub preempted: u64,
    pub cached: u64,
    pub aborted: u64,
    pub failed: u64,
    pub panics: u64,
    pub recoveries: u64,
}

/// The result of a finished life.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    pub heard: [Heard; REQUESTS],
    pub counted: Counted,
}

impl Life {
    /// Returns the number of requests that ended with `fate`.
    pub fn fates(&self, fate: Fate) -> usize {
        self.heard.iter().filter(|heard| heard.fate == fate).count()
    }

    /// Asserts that requests without a fault get the output of a life without faults.
    pub fn assert_others_as_in(&self, calm: &Life, what: &str) {
        for (i, (heard, calm)) in self.heard.iter().zip(&calm.heard).enumerate() {
            if matches!(heard.fate, Fate::Done) {
                assert_eq!(heard, calm, "{what}: request {i} heard something else");
            }
            assert_ne!(heard.fate, Fate::Open, "{what}: request {i} hangs");
        }
    }
}

/// A pool that holds little more than two requests, four places.
fn shape() -> Shape {
    Shape { pages: 11, context: 128, running: 4, waiting: 8, rows: 32, ..Shape::default() }
}

struct Stage {
    engine: EngineHandle,
    hand: ByHand<Recall>,
    readers: [Option<Reader>; REQUESTS],
    heard: [Heard; REQUESTS],
    watched: Watched,
}

impl Stage {
    fn client<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        match self.watched {
            Watched::Everything => faults::under(|| act(self)),
            Watched::Rounds => act(self),
        }
    }

    fn submit(&mut self, i: usize, request: Request) {
        let engine = self.engine.clone();
        match self.client(|_| engine.submit(request)) {
            Ok(reader) => self.readers[i] = Some(reader),
            Err(Refusal::Unavailable { .. }) => self.heard[i].fate = Fate::Refused,
            Err(other) => panic!("{other}"),
        }
    }

    fn run_iteration(&mut self) {
        faults::under(|| self.hand.run_iteration());
        for i in 0..REQUESTS {
            let delta = self.client(|stage| stage.readers[i].as_mut().and_then(Reader::take));
            if let Some(delta) = delta {
                self.heard[i].take(&delta);
                if delta.is_last() {
                    self.client(|stage| stage.readers[i] = None);
                }
            }
        }
    }
}

/// Runs one life with the faults that are armed. Panics unless everything that requests held is released.
pub fn live(script: &[Request], watched: Watched) -> Life {
    let (bench, _) = recall_bench(shape());
    let (engine, hand) = by_hand(bench);
    let open = Heard { fate: Fate::Open, tokens: 0, hash: [0; 3] };
    let mut stage = Stage { engine, hand, readers: Default::default(), heard: [open; REQUESTS], watched };
    let before = heap::in_use();
    stage.submit(0, script[0].clone());
    (0..3).for_each(|_| stage.run_iteration());
    (1..LAST).for_each(|i| stage.submit(i, script[i].clone()));
    let mut rounds = 0;
    while stage.readers.iter().any(Option::is_some) {
        stage.run_iteration();
        rounds += 1;
        assert!(rounds < 2000, "it never ends: {:?}", stage.heard);
        if rounds == ABORT_ROUND && stage.readers[ABORTED].is_some() {
            stage.client(|stage| stage.readers[ABORTED] = None);
            stage.heard[ABORTED].fate = Fate::Aborted;
        }
        if stage.readers.iter().all(Option::is_none) && stage.heard[LAST].fate == Fate::Open {
            stage.submit(LAST, script[LAST].clone());
        }
    }
    stage.run_iteration();
    let (engine, heard) = (&stage.engine, stage.heard);
    let status = engine.status();
    assert_eq!(engine.reserved(), (0, 0), "places and host bytes are back");
    assert_eq!((status.running.load(Acquire), status.waiting.load(Acquire)), (0, 0));
    assert_eq!(status.pages_used.load(Acquire), status.pages_cached.load(Acquire), "every page is free or cached");
    assert!(heap::in_use() <= before, "{} bytes of heap are missing", heap::in_use() - before);
    let metrics = engine.metrics();
    let counted = Counted {
        preempted: metrics.preemptions.get(),
        cached: metrics.cached_tokens.get(),
        aborted: metrics.aborted.get(),
        failed: metrics.failed.get(),
        panics: metrics.panics.get(),
        recoveries: metrics.recoveries.get(),
    };
    Life { heard, counted }
}

/// Runs a life without faults and asserts that everything happened that a sweep is meant to disturb.
pub fn calm(script: &[Request], watched: Watched) -> Life {
    // The first life makes the values that are made once and kept.
    live(script, watched);
    let life = live(script, watched);
    let counted = life.counted;
    assert!(counted.preempted > 0 && counted.cached >= 32 && counted.aborted == 1, "{counted:?}");
    assert_eq!((life.fates(Fate::Done), life.fates(Fate::Aborted)), (REQUESTS - 1, 1));
    assert!(life.heard[ABORTED].tokens > 0, "aborted while it generates");
    assert!(life.heard[5].tokens < 30, "the stop string was found");
    life
}
