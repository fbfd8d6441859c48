//! Random crowds on the real engine thread over the remembering runner: arrivals, aborts, shared prefixes, pools that hold
//! little more than one request. Every answer is known beforehand, so every wrong page, position or report shows.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Acquire;
use std::time::Duration;

use plimsoll_engine::cache::{KvCursor, KvEvent, WindowPool};
use plimsoll_engine::{EngineHandle, Reader, Request};

use crate::common::recall::{Shape, mix, recall_engine, says};
use crate::common::{collect, greedy, quiet};

/// Duration of a step, long enough that requests run side by side whatever else the machine does.
const STEP: Duration = Duration::from_micros(200);

/// A stream of pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 += 1;
        mix(self.0) % n
    }
}

/// A prompt that shares a beginning of random length with many others.
fn prompt(dice: &mut Dice, longest: u64) -> Vec<u32> {
    let family = dice.below(3);
    let len = 1 + dice.below(longest);
    let own = dice.below(len + 1);
    let tail = dice.below(1000);
    let token = |i| mix(if i < len - own { family * 7919 + i } else { tail * 104_729 + i }) % 256;
    (0..len).map(|i| token(i) as u32).collect()
}

fn request(dice: &mut Dice, shape: &Shape) -> Request {
    let limit = shape.context.min(shape.pages * 16) as u64;
    let prompt = prompt(dice, limit * 3 / 4);
    let room = limit - prompt.len() as u64;
    let mut request = greedy(&prompt, 1 + dice.below(room.min(48)) as u32);
    request.cache_salt = dice.below(4) / 3;
    if dice.below(4) == 0 {
        request.logprobs = Some(dice.below(3) as u32);
    }
    if dice.below(5) == 0 {
        request.prompt_logprobs = Some(dice.below(3) as u32);
    }
    request
}

fn check(request: &Request, reader: Reader) {
    let answer = collect(reader);
    assert_eq!(answer.error, None);
    assert_eq!(answer.ids, says(&request.prompt, request.max_tokens as usize), "prompt of {}", request.prompt.len());
    assert_eq!(
        answer.logprobs.iter().filter(|l| l.is_some()).count(),
        request.logprobs.map_or(0, |_| answer.ids.len())
    );
    let reports = request.prompt_logprobs.map_or(0, |_| request.prompt.len());
    assert_eq!(answer.prompt_logprobs.len(), reports, "one report per prompt token");
    assert!(answer.prompt_logprobs.iter().skip(1).all(|report| report.own.is_some()));
    assert!(answer.cached_tokens as usize <= request.prompt.len().saturating_sub(1));
}

fn pause(dice: &mut Dice) {
    if dice.below(4) == 0 {
        std::thread::sleep(Duration::from_micros(dice.below(300)));
    }
}

/// `count` requests, a third of them aborted at random moments, the others checked.
fn crowd(engine: &EngineHandle, shape: &Shape, seed: u64, count: usize) {
    let mut dice = Dice(seed << 32);
    let mut open: Vec<(Request, Reader)> = Vec::new();
    for _ in 0..count {
        let request = request(&mut dice, shape);
        let reader = engine.submit(request.clone()).unwrap_or_else(|e| panic!("{e}"));
        if dice.below(8) > 0 {
            open.push((request, reader));
        }
        pause(&mut dice);
        if dice.below(4) == 0 && !open.is_empty() {
            let gone = dice.below(open.len() as u64) as usize;
            open.swap_remove(gone);
        }
    }
    for (request, reader) in open {
        check(&request, reader);
    }
    quiet(engine);
}

fn run(shape: Shape) -> EngineHandle {
    let (engine, _) = recall_engine(shape);
    for seed in 0..4 {
        crowd(&engine, &shape, seed, 60);
    }
    engine
}

#[test]
fn a_roomy_pool() {
    run(Shape::default());
}

/// A model with a sliding window of `window` positions and `more` window pages than one request needs.
fn windowed(window: usize, more: usize, shape: Shape) -> Shape {
    let pages = shape.context.min(shape.pages * 16) / 16;
    Shape { window, state_slots: WindowPool::per_sequence(window, shape.rows).min(pages) + more, ..shape }
}

#[test]
fn windows_smaller_and_larger_than_a_chunk() {
    for (window, rows) in [(1, 32), (16, 32), (17, 8), (40, 7), (100, 32), (300, 32)] {
        let engine = run(windowed(window, 30, Shape { rows: rows.max(8), ..Shape::default() }));
        let status = engine.status();
        assert!(status.windows_used.load(Acquire) > 0, "{window}: window pages stay in the cache");
        assert!(engine.cache_report().hit_tokens > 0, "{window}: prefixes are found");
    }
}

#[test]
#[ignore = "soak"]
fn window_pages_for_one_request() {
    for window in [5, 24, 48] {
        let shape = Shape { pages: 60, context: 160, rows: 24, step_time: STEP, ..Shape::default() };
        let engine = run(windowed(window, 1, shape));
        assert!(engine.metrics().evicted_windows.get() > 0, "{window}: cached window pages give way");
        let engine = run(windowed(window, 1, Shape { prefix_cache: false, ..shape }));
        assert_eq!(engine.status().windows_used.load(Acquire), 0, "{window}: nothing stays");
    }
}

#[test]
fn windows_with_drafts_that_miss() {
    for (window, more) in [(9, 0), (33, 20)] {
        let shape = Shape { drafts: 3, right: 128, pages: 40, context: 128, ..Shape::default() };
        let engine = run(windowed(window, more, shape));
        let [drafted, accepted] =
            [&engine.metrics().drafted_tokens, &engine.metrics().accepted_tokens].map(|n| n.get());
        assert!(accepted > 0 && accepted < drafted, "{accepted} of {drafted} drafts were right");
    }
}

/// Every turn of a conversation starts where the last one ended, with window pages for two requests only.
#[test]
fn a_conversation_with_windows_is_computed_once() {
    let shape = Shape { pages: 200, context: 1600, rows: 32, ..Shape::default() };
    let shape = Shape { window: 40, state_slots: 2 * WindowPool::per_sequence(40, 32), ..shape };
    let (engine, _) = recall_engine(shape);
    let mut history: Vec<u32> = (0..50).map(|i| (mix(i) % 256) as u32).collect();
    for turn in 0..30u64 {
        let answer = collect(engine.submit(greedy(&history, 13)).unwrap());
        assert_eq!(answer.ids, says(&history, 13), "turn {turn}");
        // All of the last answer is computed except its last token.
        let known = if turn == 0 { 0 } else { (history.len() - 21) / 16 * 16 };
        assert_eq!(answer.cached_tokens as usize, known, "turn {turn}");
        history.extend(answer.ids);
        history.extend((0..20).map(|i| (mix(turn * 100 + i) % 256) as u32));
        // Other requests run in between and evict old pages.
        let stranger: Vec<u32> = (0..300).map(|i| (mix(turn * 777 + i) % 256) as u32).collect();
        assert_eq!(collect(engine.submit(greedy(&stranger, 3)).unwrap()).ids, says(&stranger, 3));
    }
    quiet(&engine);
}

#[test]
fn a_pool_just_above_one_request() {
    let engine = run(Shape { pages: 9, context: 128, step_time: STEP, ..Shape::default() });
    assert!(engine.metrics().preemptions.get() > 0, "the pool is too large to test preemption");
}

#[test]
fn a_pool_of_exactly_one_request_without_sharing() {
    let engine = run(Shape { pages: 8, context: 128, step_time: STEP, prefix_cache: false, ..Shape::default() });
    assert!(engine.metrics().preemptions.get() > 0, "the pool is too large to test preemption");
}

#[test]
fn one_logit_row_and_one_request_at_a_time() {
    run(Shape { logit_rows: 1, running: 1, rows: 16, pages: 12, ..Shape::default() });
}

#[test]
fn as_many_decodes_as_rows() {
    run(Shape { logit_rows: 8, running: 8, rows: 8, pages: 24, ..Shape::default() });
}

#[test]
fn a_preempted_request_needs_few_logits() {
    let (engine, seen) =
        recall_engine(Shape { pages: 13, step_time: STEP, context: 128, prefix_cache: false, ..Shape::default() });
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| (0..32).map(|j| (mix(i * 100 + j) % 256) as u32).collect()).collect();
    let readers: Vec<_> = prompts.iter().map(|p| engine.submit(greedy(p, 60)).unwrap()).collect();
    for (prompt, reader) in prompts.iter().zip(readers) {
        assert_eq!(collect(reader).ids, says(prompt, 60));
    }
    let (preemptions, rows) =
        (engine.metrics().preemptions.get(), seen.logit_rows.load(std::sync::atomic::Ordering::Relaxed));
    assert!(preemptions > 0, "nothing was preempted");
    assert!(rows <= 3 * 60 + preemptions, "{rows} rows of logits for 180 tokens and {preemptions} preemptions");
}

/// State of a router that reads the KV events.
#[derive(Default)]
struct Told {
    cursor: KvCursor,
    /// Parent and tokens of each page, by the page's hash.
    pages: HashMap<u64, (Option<u64>, [u32; 16])>,
}

impl Told {
    /// Reads at most `most` changes; returns whether there were any.
    fn read(&mut self, engine: &EngineHandle, most: usize) -> bool {
        let mut events = Vec::new();
        engine.kv_event_log().unwrap().read(&mut self.cursor, most, &mut events);
        for event in &events {
            match *event {
                KvEvent::Reset => self.pages.clear(),
                KvEvent::Stored { hash, parent, tokens, .. } => drop(self.pages.insert(hash, (parent, tokens))),
                KvEvent::Removed { hash, .. } => drop(self.pages.remove(&hash)),
            }
        }
        !events.is_empty()
    }

    /// Returns the prompts that end with a page without a known next page, in some order.
    fn prompts(&self) -> Vec<Vec<u32>> {
        let parents: Vec<u64> = self.pages.values().filter_map(|page| page.0).collect();
        let leaves = self.pages.keys().filter(|hash| !parents.contains(hash));
        leaves.map(|leaf| self.prompt(*leaf)).collect()
    }

    fn prompt(&self, hash: u64) -> Vec<u32> {
        let (parent, tokens) = self.pages[&hash];
        [parent.map_or_else(Vec::new, |parent| self.prompt(parent)), tokens.to_vec()].concat()
    }
}

#[test]
fn what_routers_are_told_is_there() {
    for shape in [Shape { pages: 40, ..Shape::default() }, Shape { pages: 40, ..Shape::hybrid(0, 0, 12) }] {
        let (engine, _) = recall_engine(shape);
        let (mut told, mut dice) = (Told::default(), Dice(9 << 32));
        for seed in 0..6 {
            crowd(&engine, &shape, seed, 40);
            told.read(&engine, dice.below(30) as usize);
        }
        let mut found = 0;
        for round in 0..12 {
            while told.read(&engine, 7) {}
            let prompts = told.prompts();
            // Room for one more token.
            let Some(known) = prompts.get(round % prompts.len().max(1)).filter(|known| known.len() < 250) else {
                continue;
            };
            let answer = collect(engine.submit(greedy(&[&known[..], &[3]].concat(), 1)).unwrap());
            assert_eq!(answer.cached_tokens as usize, known.len(), "told and not there");
            found += 1;
            quiet(&engine);
        }
        assert!(found > 4, "{found}");
    }
}
