//! The progress of each request and what it holds: a few atomics beside its outbox. The engine thread writes them after
//! a step, and any thread can read them. Not here: decisions, and anything a step would have to wait for.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

/// The shortest time from which a speed is computed.
const SHORTEST: Duration = Duration::from_millis(1);

/// The phase of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestPhase {
    /// Waiting for a place, the first or, after a preemption, another.
    Waiting,
    /// The prompt has come to a medium that is not encoded yet.
    Encode,
    /// The prompt, or after a preemption also earlier output, is being computed.
    Prefill,
    /// Generating.
    Decode,
    /// The engine has ended the request; unread output may remain.
    Ended,
}

impl RequestPhase {
    /// The name for programs.
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
    windows: AtomicU32,
    slots: AtomicU32,
    /// Microseconds from arrival to the first step, the first token and the last token. 0: not yet.
    scheduled_us: AtomicU64,
    first_us: AtomicU64,
    last_us: AtomicU64,
}

impl Progress {
    pub fn new(prompt_tokens: usize) -> Self {
        Self {
            arrived: Instant::now(),
            prompt_tokens: prompt_tokens as u32,
            phase: AtomicU8::new(RequestPhase::Waiting as u8),
            computed: AtomicU32::new(0),
            cached: AtomicU32::new(0),
            generated: AtomicU32::new(0),
            pages: AtomicU32::new(0),
            windows: AtomicU32::new(0),
            slots: AtomicU32::new(0),
            scheduled_us: AtomicU64::new(0),
            first_us: AtomicU64::new(0),
            last_us: AtomicU64::new(0),
        }
    }

    /// Stores, after a step, the phase, the computed positions, and the pages, window pages and state slots that the
    /// request holds.
    pub fn store(&self, phase: RequestPhase, computed: usize, [pages, windows, slots]: [usize; 3]) {
        self.phase.store(phase as u8, Relaxed);
        let held = [(&self.pages, pages), (&self.windows, windows), (&self.slots, slots)];
        let numbers = held.into_iter().chain([(&self.computed, computed)]);
        numbers.into_iter().for_each(|(place, number)| place.store(number as u32, Relaxed));
    }

    /// Counts `tokens` more delivered tokens. `cached` is the number of prompt tokens that came from the cache.
    pub fn delivered(&self, tokens: usize, cached: u32) {
        self.cached.store(cached, Relaxed);
        if tokens > 0 {
            let now = self.elapsed_us();
            if self.generated.fetch_add(tokens as u32, Relaxed) == 0 {
                self.first_us.store(now, Relaxed);
            }
            self.last_us.store(now, Relaxed);
        }
    }

    /// Records the time of the first step.
    pub fn scheduled(&self) {
        self.scheduled_us.store(self.elapsed_us(), Relaxed);
    }

    /// The time of arrival.
    pub fn arrived(&self) -> Instant {
        self.arrived
    }

    /// Microseconds since arrival; at least 1, since 0 means "not yet".
    fn elapsed_us(&self) -> u64 {
        (self.arrived.elapsed().as_micros() as u64).max(1)
    }

    /// Marks the request as ended; it holds no pages or slots.
    pub fn ended(&self) {
        self.store(RequestPhase::Ended, self.computed.load(Relaxed) as usize, [0; 3]);
    }

    fn phase(&self) -> RequestPhase {
        let phase = self.phase.load(Relaxed);
        let all = [RequestPhase::Waiting, RequestPhase::Encode, RequestPhase::Prefill, RequestPhase::Decode];
        all.into_iter().find(|known| *known as u8 == phase).unwrap_or(RequestPhase::Ended)
    }

    /// Reads all numbers; `host_bytes` is the heap that the request holds.
    pub fn snapshot(&self, host_bytes: u64) -> Snapshot {
        let read = |number: &AtomicU32| number.load(Relaxed);
        let generated_tokens = read(&self.generated);
        let us = |time: &AtomicU64| Some(time.load(Relaxed)).filter(|us| *us > 0).map(Duration::from_micros);
        let (first, last) = (us(&self.first_us), us(&self.last_us));
        let decoding = last.unwrap_or_default().saturating_sub(first.unwrap_or_default());
        let speed = f64::from(generated_tokens.saturating_sub(1)) / decoding.as_secs_f64();
        Snapshot {
            phase: self.phase(),
            prompt_tokens: self.prompt_tokens,
            computed_tokens: read(&self.computed),
            cached_tokens: read(&self.cached),
            generated_tokens,
            kv_pages: read(&self.pages),
            window_pages: read(&self.windows),
            state_slots: read(&self.slots),
            host_bytes,
            age: self.arrived.elapsed(),
            tokens_per_second: (generated_tokens > 1 && decoding >= SHORTEST).then_some(speed),
            arrived: self.arrived,
            scheduled: us(&self.scheduled_us),
            first_token: first,
            last_token: last,
        }
    }
}

/// The progress of a request at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// The phase.
    pub phase: RequestPhase,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Positions computed or found in the cache, of prompt and output.
    pub computed_tokens: u32,
    /// Tokens of the prompt that came from the prefix cache.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// Pages of the KV cache that it holds, shared pages included.
    pub kv_pages: u32,
    /// Window pages that it holds, shared pages included.
    pub window_pages: u32,
    /// State slots that it holds.
    pub state_slots: u32,
    /// Heap bytes that it holds.
    pub host_bytes: u64,
    /// Time since arrival.
    pub age: Duration,
    /// Speed between the first token and the last; none before the second.
    pub tokens_per_second: Option<f64>,
    /// The time of submission to the engine.
    pub arrived: Instant,
    /// Time from submission to the first step.
    pub scheduled: Option<Duration>,
    /// Time from submission to the first token.
    pub first_token: Option<Duration>,
    /// Time from submission to the last token.
    pub last_token: Option<Duration>,
}
