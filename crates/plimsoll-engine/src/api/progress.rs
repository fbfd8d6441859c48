//! The progress of each request and what it holds: a few atomics beside its outbox. The engine thread writes them
//! after a step, and any thread can read them. What must not be in here: decisions, and anything a step would have to
//! wait for.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU32};
use std::time::{Duration, Instant};

/// Where a request is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// It waits for a place, its first or, after a preemption, another.
    Waiting,
    /// Its prompt is at a medium that is not encoded yet.
    Encode,
    /// Its prompt is being computed, or what it had before a preemption.
    Prefill,
    /// It generates.
    Decode,
    /// The engine is done with it; there may be unread output.
    Ended,
}

impl Phase {
    /// Its name, as programs read it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Encode => "encode",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Ended => "ended",
        }
    }
}

/// The numbers of one request.
#[derive(Debug)]
pub(crate) struct Progress {
    arrived: Instant,
    prompt_tokens: u32,
    phase: AtomicU8,
    computed: AtomicU32,
    cached: AtomicU32,
    generated: AtomicU32,
    pages: AtomicU32,
    slots: AtomicU32,
    /// Milliseconds from its arrival to its first token and to its last.
    first_ms: AtomicU32,
    last_ms: AtomicU32,
}

impl Progress {
    pub fn new(prompt_tokens: usize) -> Self {
        Self {
            arrived: Instant::now(),
            prompt_tokens: prompt_tokens as u32,
            phase: AtomicU8::new(Phase::Waiting as u8),
            computed: AtomicU32::new(0),
            cached: AtomicU32::new(0),
            generated: AtomicU32::new(0),
            pages: AtomicU32::new(0),
            slots: AtomicU32::new(0),
            first_ms: AtomicU32::new(0),
            last_ms: AtomicU32::new(0),
        }
    }

    /// After a step: where it stands, the positions it has computed, the pages and state slots it holds.
    pub fn stands(&self, phase: Phase, computed: usize, pages: usize, slots: usize) {
        self.phase.store(phase as u8, Relaxed);
        let numbers = [(&self.computed, computed), (&self.pages, pages), (&self.slots, slots)];
        numbers.into_iter().for_each(|(place, number)| place.store(number as u32, Relaxed));
    }

    /// So many tokens more were delivered; of the prompt, `cached` came from the cache.
    pub fn delivered(&self, tokens: usize, cached: u32) {
        self.cached.store(cached, Relaxed);
        if tokens > 0 {
            let now = self.arrived.elapsed().as_millis() as u32;
            if self.generated.fetch_add(tokens as u32, Relaxed) == 0 {
                self.first_ms.store(now, Relaxed);
            }
            self.last_ms.store(now, Relaxed);
        }
    }

    /// The engine has let go of it.
    pub fn ended(&self) {
        self.stands(Phase::Ended, self.computed.load(Relaxed) as usize, 0, 0);
    }

    fn phase(&self) -> Phase {
        let phase = self.phase.load(Relaxed);
        let all = [Phase::Waiting, Phase::Encode, Phase::Prefill, Phase::Decode];
        all.into_iter().find(|known| *known as u8 == phase).unwrap_or(Phase::Ended)
    }

    /// Reads everything now; `host_bytes` is the heap that the request holds.
    pub fn snapshot(&self, host_bytes: u64) -> Snapshot {
        let read = |number: &AtomicU32| number.load(Relaxed);
        let generated_tokens = read(&self.generated);
        let ms = read(&self.last_ms).saturating_sub(read(&self.first_ms));
        let speed = f64::from(generated_tokens.saturating_sub(1)) * 1000.0 / f64::from(ms.max(1));
        Snapshot {
            phase: self.phase(),
            prompt_tokens: self.prompt_tokens,
            computed_tokens: read(&self.computed),
            cached_tokens: read(&self.cached),
            generated_tokens,
            kv_pages: read(&self.pages),
            state_slots: read(&self.slots),
            host_bytes,
            age: self.arrived.elapsed(),
            tokens_per_second: (generated_tokens > 1 && ms > 0).then_some(speed),
        }
    }
}

/// What a request has come to at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// Where it is.
    pub phase: Phase,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Positions computed or found in the cache, of prompt and output.
    pub computed_tokens: u32,
    /// Tokens of the prompt that came from the prefix cache.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// Pages of keys and values it holds, those that it shares included.
    pub kv_pages: u32,
    /// State slots it holds.
    pub state_slots: u32,
    /// Heap bytes it holds.
    pub host_bytes: u64,
    /// Since it arrived.
    pub age: Duration,
    /// Between its first token and its last; none before the second.
    pub tokens_per_second: Option<f64>,
}
