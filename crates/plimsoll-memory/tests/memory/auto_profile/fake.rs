//! A device of any capacity, with neighbours that follow a script and allocations that fail on demand.
//!
//! Memory is accounted by values that release it when dropped, as in a real arena. A leak is a value that is still held.

use plimsoll_memory::sizing::{
    Component, DeviceNow, Event, Failure, Generations, Measured, OutOfMemory, PoolCount, PoolPhase, ProfileConfig,
    Released, ScalesWith, Shape,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

pub const GIB: u64 = 1 << 30;
pub const MIB: u64 = 1 << 20;
/// 8 heads × 64 dimensions × 32 layers × K and V × 2 bytes.
pub const CELL: u64 = 65_536;
/// Bytes that a generation holds besides its pools.
pub const ATTENTION: u64 = 64 * MIB;

/// Memory of the simulated device: its size, the bytes of peers, the bytes of each owner, and the peak.
#[derive(Default)]
pub struct Ledger {
    pub total: u64,
    pub peers: u64,
    pub held: BTreeMap<&'static str, u64>,
    pub peak: u64,
    allocations: u64,
    /// Allocations, counted from 1, that fail once although there is room.
    pub fail_allocation: Vec<u64>,
}

impl Ledger {
    pub fn own(&self) -> u64 {
        self.held.values().sum()
    }

    fn free(&self) -> u64 {
        self.total.saturating_sub(self.peers).saturating_sub(self.own())
    }
}

/// Memory of the device, released on drop.
pub struct Block {
    ledger: Arc<Mutex<Ledger>>,
    owner: &'static str,
    bytes: u64,
}

impl Drop for Block {
    fn drop(&mut self) {
        *self.ledger.lock().unwrap().held.get_mut(self.owner).unwrap() -= self.bytes;
    }
}

/// A generation: all memory with a size that depends on capacity.
pub struct Gen {
    pub shape: Shape,
    pub blocks: Vec<Block>,
    pub emergency_reserve: Option<Block>,
    /// The generation each holder of indices was built for.
    holders: [u32; 3],
    kv_free: u64,
}

/// How the n-th self-test goes wrong.
#[derive(Clone, Copy)]
pub enum Wrong {
    /// The self-test runs out of memory by this many bytes.
    Short(u64),
    /// The self-test fails with another error, such as a shape error.
    Bug,
    /// The self-test runs out of memory and loses a KV slot.
    ShortAndLeaky,
    /// The self-test passes, but does not return a slot.
    Leaky,
}

pub struct Fake {
    pub ledger: Arc<Mutex<Ledger>>,
    pub cell: u64,
    pub slot_bytes: u64,
    /// Scratch of a self-test, beside the pools.
    pub scratch: u64,
    /// Scratch of the draft model, if one is loaded: it is tested alone, then together with the main model.
    pub draft: Option<u64>,
    /// Self-tests that fail, counted from 1.
    pub wrong: BTreeMap<u32, Wrong>,
    /// From this self-test on, all run out of memory by one byte.
    pub always_short_from: Option<u32>,
    /// The peers' bytes from a generation's build on.
    pub peers_at_build: BTreeMap<u32, u64>,
    /// Generations that leave their KV cache with the pool after teardown, where no ledger line shows it.
    pub slack_at_teardown: Vec<u32>,
    /// Owners that keep their memory after the teardown of a generation.
    pub keep_at_teardown: BTreeMap<u32, &'static str>,
    kept: Vec<Block>,
    weights: Vec<Block>,
    pub built: Vec<Shape>,
    pub self_tests: u32,
    pub teardowns: u32,
    pub trims: u32,
    /// Calls and events in order.
    pub log: Vec<String>,
    pub link: Option<Arc<Link>>,
}

impl Fake {
    pub fn new(total: u64, weights: u64, peers: u64, scratch: u64) -> Self {
        let ledger = Arc::new(Mutex::new(Ledger { total, peers, ..Ledger::default() }));
        let mut fake = Self {
            ledger,
            cell: CELL,
            slot_bytes: 0,
            scratch,
            draft: None,
            wrong: BTreeMap::new(),
            always_short_from: None,
            peers_at_build: BTreeMap::new(),
            slack_at_teardown: Vec::new(),
            keep_at_teardown: BTreeMap::new(),
            kept: Vec::new(),
            weights: Vec::new(),
            built: Vec::new(),
            self_tests: 0,
            teardowns: 0,
            trims: 0,
            log: Vec::new(),
            link: None,
        };
        fake.load("weights", weights);
        fake
    }

    /// The usual device: 80 GiB, with 18 of weights, 10 of a peer and 2 of scratch.
    pub fn usual() -> Self {
        Self::new(80 * GIB, 18 * GIB, 10 * GIB, 2 * GIB)
    }

    /// Allocates memory that is held as long as the process lives.
    pub fn load(&mut self, owner: &'static str, bytes: u64) {
        let block = self.take(owner, bytes).expect("what is loaded first fits");
        self.weights.push(block);
    }

    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap()
    }

    pub fn held(&self, owner: &str) -> u64 {
        self.ledger().held.get(owner).copied().unwrap_or(0)
    }

    fn take(&mut self, owner: &'static str, bytes: u64) -> Result<Block, OutOfMemory> {
        let mut ledger = self.ledger.lock().unwrap();
        ledger.allocations += 1;
        let (count, free) = (ledger.allocations, ledger.free());
        let refused = |shortfall| OutOfMemory { component: owner.to_owned(), requested: bytes, shortfall };
        if ledger.fail_allocation.contains(&count) {
            return Err(refused(1));
        }
        if bytes > free {
            return Err(refused(bytes - free));
        }
        *ledger.held.entry(owner).or_default() += bytes;
        ledger.peak = ledger.peak.max(ledger.own());
        Ok(Block { ledger: Arc::clone(&self.ledger), owner, bytes })
    }

    fn wrong_now(&self) -> Option<Wrong> {
        let always = self.always_short_from.is_some_and(|from| self.self_tests >= from);
        self.wrong.get(&self.self_tests).copied().or(always.then_some(Wrong::Short(1)))
    }
}

const OF_GENERATION: [&str; 4] = ["kv", "state", "attention", "reserve"];

impl Generations for Fake {
    type G = Gen;

    fn device(&mut self) -> DeviceNow {
        let ledger = self.ledger();
        DeviceNow { total: ledger.total, own_reserved: ledger.own(), available: ledger.free() }
    }

    fn build(&mut self, shape: Shape) -> Result<Gen, Failure> {
        self.log.push(format!("build {} {}", shape.tokens, shape.state_slots));
        assert!(self.built.last().is_none_or(|last| last.generation < shape.generation), "generations count up");
        if let Some(&peers) = self.peers_at_build.get(&shape.generation) {
            self.ledger().peers = peers;
        }
        self.built.push(shape);
        let kv = self.take("kv", shape.tokens * self.cell)?;
        let state = self.take("state", shape.state_slots * self.slot_bytes)?;
        let attention = self.take("attention", ATTENTION)?;
        let holders = [shape.generation; 3];
        Ok(Gen { shape, blocks: vec![attention, state, kv], emergency_reserve: None, holders, kv_free: shape.tokens })
    }

    fn place_reserve(&mut self, generation: &mut Gen, bytes: u64) -> Result<(), OutOfMemory> {
        self.log.push("reserve".to_owned());
        generation.emergency_reserve = Some(self.take("reserve", bytes)?);
        Ok(())
    }

    fn self_test(&mut self, generation: &mut Gen) -> Result<Measured, Failure> {
        self.log.push("self-test".to_owned());
        self.self_tests += 1;
        assert!(generation.holders.iter().all(|&g| g == generation.shape.generation), "an index of another generation");
        let short =
            |shortfall| Failure::from(OutOfMemory { component: "decode workspace".into(), requested: GIB, shortfall });
        match self.wrong_now() {
            Some(Wrong::Short(bytes)) => return Err(short(bytes)),
            Some(Wrong::Bug) => {
                return Err(Failure::Other("shape mismatch: [3, 4] and [4, 4]".into()));
            }
            Some(Wrong::ShortAndLeaky) => {
                generation.kv_free -= 1;
                return Err(short(1));
            }
            Some(Wrong::Leaky) => generation.kv_free -= 1,
            None => {}
        }
        let own = self.ledger().own();
        self.ledger().peak = own;
        let main = self.take("workspace", self.scratch)?;
        if let Some(bytes) = self.draft {
            drop(main);
            self.log.push("self-test draft".to_owned());
            drop(self.take("draft workspace", bytes)?);
            self.log.push("self-test both".to_owned());
            let _both = (self.take("workspace", self.scratch)?, self.take("draft workspace", bytes)?);
        }
        Ok(Measured { peak_reserved: self.ledger().peak })
    }

    fn pools(&self, generation: &Gen) -> Vec<PoolCount> {
        let total = generation.shape.tokens;
        let slots = generation.shape.state_slots;
        vec![
            PoolCount { name: "state slots".into(), free: slots, total: slots },
            PoolCount { name: "kv".into(), free: generation.kv_free, total },
        ]
    }

    fn components(&self) -> Vec<Component> {
        let scales = |name: &str| match name {
            "kv" => ScalesWith::Capacity,
            "workspace" => ScalesWith::PrefillTokens,
            "attention" => ScalesWith::DecodeBatch,
            "vision" => ScalesWith::VisualBatch,
            _ => ScalesWith::Fixed,
        };
        let line = |(name, bytes): (&&str, &u64)| Component {
            name: (*name).to_owned(),
            bytes: *bytes,
            scales_with: scales(name),
        };
        self.ledger().held.iter().map(line).collect()
    }

    fn teardown(&mut self, mut generation: Gen) -> Released {
        self.log.push("teardown".to_owned());
        self.teardowns += 1;
        let before = self.ledger().own();
        if let Some(owner) = self.keep_at_teardown.get(&generation.shape.generation) {
            let blocks = std::mem::take(&mut generation.blocks).into_iter();
            let (kept, dropped): (Vec<Block>, Vec<Block>) = blocks.partition(|b| b.owner == *owner);
            self.kept.extend(kept);
            drop(dropped);
        }
        if self.slack_at_teardown.contains(&generation.shape.generation) {
            let bytes = generation.shape.tokens * self.cell;
            drop(std::mem::take(&mut generation.blocks));
            self.load("pool slack", bytes);
        }
        drop(generation);
        Released { before, after: self.ledger().own() }
    }

    fn survivors(&self) -> Vec<Component> {
        let of_generation = |c: &Component| c.bytes > 0 && OF_GENERATION.contains(&c.name.as_str());
        self.components().into_iter().filter(of_generation).collect()
    }

    fn trim(&mut self) {
        self.log.push("trim".to_owned());
        self.trims += 1;
    }

    fn reduce_min(&mut self, value: u64) -> u64 {
        self.link.clone().map_or(value, |link| link.reduce("min", value))
    }

    fn reduce_max(&mut self, value: u64) -> u64 {
        self.link.clone().map_or(value, |link| link.reduce("max", value))
    }

    fn event(&mut self, event: &Event<'_>) {
        let line = event.to_string();
        assert!(!has_negative_number(&line), "{line}");
        self.log.push(format!("log {line}"));
    }
}

/// Whether a minus sign stands before a digit.
pub fn has_negative_number(text: &str) -> bool {
    text.as_bytes().windows(2).any(|w| w[0] == b'-' && w[1].is_ascii_digit())
}

/// A configuration for [`Fake::usual`]: 64 rows of decode, 8192 tokens of prefill, so a probe of 8256.
pub fn usual_config() -> ProfileConfig {
    ProfileConfig { running_max_req_size: 128, ..ProfileConfig::new(CELL, 32_768) }
}

/// The shapes of production attempts, by tokens.
pub fn production(fake: &Fake) -> Vec<u64> {
    fake.built.iter().filter(|s| s.phase == PoolPhase::Production).map(|s| s.tokens).collect()
}

/// Connects ranks: each rank hands in a value and waits for all others in the same collective.
pub struct Link {
    ranks: usize,
    state: Mutex<Round>,
    done: Condvar,
}

#[derive(Default)]
struct Round {
    number: u64,
    op: &'static str,
    values: Vec<u64>,
    result: u64,
}

impl Link {
    pub fn new(ranks: usize) -> Arc<Self> {
        Arc::new(Self { ranks, state: Mutex::default(), done: Condvar::new() })
    }

    fn reduce(&self, op: &'static str, value: u64) -> u64 {
        let mut state = self.state.lock().unwrap();
        if state.values.is_empty() {
            state.op = op;
        }
        assert_eq!(state.op, op, "ranks are in different collectives");
        state.values.push(value);
        if state.values.len() == self.ranks {
            let values = std::mem::take(&mut state.values).into_iter();
            state.result = if op == "min" { values.min() } else { values.max() }.unwrap();
            state.number += 1;
            self.done.notify_all();
            return state.result;
        }
        let round = state.number;
        let waiting = self.done.wait_timeout_while(state, Duration::from_secs(20), |s| s.number == round);
        let (state, timeout) = waiting.unwrap();
        assert!(!timeout.timed_out(), "a rank is left waiting in a collective");
        state.result
    }
}
