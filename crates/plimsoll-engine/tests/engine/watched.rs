//! Requests and the prefix cache seen from outside: phases, pages, speed. A cleared cache releases its pages.

use std::pin::pin;
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use plimsoll_engine::{EngineHandle, Options, Reader, RequestPhase, Watch};
use plimsoll_memory::Component;

use crate::common::recall::{Shape, prompt, recall_engine, says};
use crate::common::{self, ask, engine, exact, full_pools, greedy, quiet, until};

#[test]
fn a_request_is_seen_on_its_whole_way() {
    let (engine, _) = recall_engine(Shape { running: 1, step_time: Duration::from_millis(20), ..Shape::default() });
    let first = engine.submit(greedy(&prompt(1, 200), 50)).unwrap();
    let second = engine.submit(greedy(&prompt(2, 20), 10)).unwrap();
    let (first_watch, second_watch) = (first.watch(), second.watch());
    // 200 tokens take 7 steps of 32 rows.
    until(&engine, |_| first_watch.snapshot().phase == RequestPhase::Prefill);
    let look = first_watch.snapshot();
    assert!(look.kv_pages > 0 && look.computed_tokens < 200 && look.generated_tokens == 0, "{look:?}");
    assert_eq!(second_watch.snapshot().phase, RequestPhase::Waiting, "there is one place");
    assert_eq!(second_watch.snapshot().kv_pages, 0);
    until(&engine, |_| first_watch.snapshot().generated_tokens > 10);
    let look = first_watch.snapshot();
    assert_eq!((look.phase, look.prompt_tokens), (RequestPhase::Decode, 200));
    assert!(look.kv_pages as u64 <= engine.status().pages_used.load(Acquire));
    assert!(look.kv_pages >= 210 / 16 && look.host_bytes > 0, "{look:?}");
    let speed = look.tokens_per_second.unwrap();
    assert!((1.0..60.0).contains(&speed), "a token takes 20 milliseconds or more, not {speed}/s");
    // The watch ends the request while its reader is still there.
    first_watch.abort();
    until(&engine, |_| first_watch.snapshot().phase == RequestPhase::Ended);
    assert_eq!(first_watch.snapshot().kv_pages, 0);
    until(&engine, |_| second_watch.snapshot().phase == RequestPhase::Ended);
    assert_eq!(second_watch.snapshot().generated_tokens, 10);
    assert_eq!((engine.metrics().aborted.get(), engine.metrics().finished.get()), (1, 1));
    drop((first, second, first_watch, second_watch));
    quiet(&engine);
}

/// A waker that reads the state of all requests on the thread that wakes the reader.
struct Look {
    reader: Thread,
    all: Arc<[Watch]>,
    seen: Mutex<Vec<Vec<u32>>>,
}

impl Wake for Look {
    fn wake(self: Arc<Self>) {
        let counts = self.all.iter().map(|watch| watch.snapshot().generated_tokens).collect();
        self.seen.lock().unwrap().push(counts);
        self.reader.unpark();
    }
}

/// Reads to the end. Returns the generated tokens of every request, each time the reader was woken.
fn read(mut reader: Reader, all: Arc<[Watch]>) -> Vec<Vec<u32>> {
    let look = Arc::new(Look { reader: thread::current(), all, seen: Mutex::default() });
    let waker = Waker::from(Arc::clone(&look));
    loop {
        let mut next = pin!(reader.next());
        let delta = loop {
            match next.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(delta) => break delta,
                Poll::Pending => thread::park(),
            }
        };
        if delta.is_none() {
            return std::mem::take(&mut look.seen.lock().unwrap());
        }
    }
}

/// A thread that sends the first token of a step would otherwise take a core from the delivery of the next tokens.
#[test]
fn readers_are_woken_when_all_of_a_step_is_there() {
    const TOKENS: u32 = 200;
    let (engine, _) = recall_engine(Shape { step_time: Duration::from_millis(1), ..Shape::default() });
    let readers: Vec<_> = (0..4).map(|i| engine.submit(greedy(&prompt(i, 5), TOKENS)).unwrap()).collect();
    let all: Arc<[Watch]> = readers.iter().map(Reader::watch).collect();
    let start = |reader| {
        let all = Arc::clone(&all);
        thread::spawn(move || read(reader, all))
    };
    let threads: Vec<_> = readers.into_iter().map(start).collect();
    let seen = threads.into_iter().flat_map(|thread| thread.join().unwrap());
    // Between the last stream's first token and the first stream's last token, the streams keep their distances.
    let between = seen.filter(|counts| counts.iter().all(|count| (1..TOKENS).contains(count)));
    let leads: Vec<Vec<u32>> =
        between.map(|counts| counts.iter().map(|count| TOKENS + count - counts[0]).collect()).collect();
    assert!(leads.len() > 20, "{leads:?}");
    assert!(leads.iter().all(|lead| *lead == leads[0]), "{leads:?}");
    drop(all);
    quiet(&engine);
}

#[test]
fn prefix_without_lookup_counts_as_neither_hit_nor_miss() {
    let engine = engine("llama", &Options { prefix_cache: false, ..exact() });
    ask(&engine, greedy(&[3, 4, 5, 6], 4));
    let cache = engine.cache_report();
    assert_eq!((cache.enabled, cache.hit_tokens, cache.miss_tokens), (false, 0, 0));
}

/// A real model, so that bytes are those of plan and ledger.
#[test]
fn a_cleared_cache_has_given_back_its_pages() {
    for model in ["llama", "qwen3-next"] {
        let engine = engine(model, &exact());
        let before = engine.cache_report();
        assert!(before.enabled && before.pages == 0, "{before:?}");
        let planned = engine.ledger().row(Component::KvPages).planned;
        assert_eq!(before.page_bytes * engine.status().pages_total.load(Acquire), planned);
        let long: Vec<u32> = (0..100).map(|i| 3 + i % 50).collect();
        let first = ask(&engine, greedy(&long, 8));
        let again = ask(&engine, greedy(&long, 8));
        quiet(&engine);
        assert!(again.cached_tokens >= 64, "{}", again.cached_tokens);
        let full = engine.cache_report();
        assert!(full.pages > 0 && full.entries == full.pages && full.bytes == full.pages * full.page_bytes, "{full:?}");
        let found = u64::from(again.cached_tokens);
        assert_eq!((full.hit_tokens, full.miss_tokens), (found, 200 - found), "{full:?}");
        assert_eq!(engine.status().pages_used.load(Acquire), full.pages);
        let (told, after) = pollster::block_on(engine.clear_cache()).unwrap();
        assert_eq!((told.pages, after.pages, after.entries, after.state_checkpoints), (full.pages, 0, 0, 0));
        assert_eq!(engine.status().pages_used.load(Acquire), 0, "every page is free");
        assert_eq!(engine.status().slots_used.load(Acquire), 0, "every slot is free");
        let cold = ask(&engine, greedy(&long, 8));
        assert_eq!((cold.cached_tokens, &cold.ids), (0, &first.ids), "it is computed anew, to the same end");
        quiet(&engine);
        full_pools(&engine);
    }
}

#[test]
fn clearing_under_running_requests_costs_them_nothing() {
    let (engine, _) = recall_engine(Shape { step_time: Duration::from_millis(1), ..Shape::default() });
    let readers: Vec<_> = (0..4).map(|i| engine.submit(greedy(&prompt(i, 100), 60)).unwrap()).collect();
    for _ in 0..20 {
        let (_, after) = pollster::block_on(engine.clear_cache()).unwrap();
        assert_eq!(after.pages, 0, "nothing is held by the tree alone");
    }
    for (i, reader) in (0..).zip(readers) {
        assert_eq!(common::collect(reader).ids, says(&prompt(i, 100), 60));
    }
    quiet(&engine);
    pollster::block_on(engine.clear_cache()).unwrap();
    assert_eq!(engine.status().pages_used.load(Acquire), 0);
    engine.stop();
    until(&engine, EngineHandle::stopped);
    assert!(pollster::block_on(engine.clear_cache()).is_none(), "nobody is there to do it");
}
