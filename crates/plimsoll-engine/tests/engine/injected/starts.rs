//! Start-up with the n-th mapping or the n-th heap call refused. The engine starts all the same, or returns an error and leaves nothing
//! behind.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

use plimsoll_engine::{EngineHandle, Host, Options, StartError, start};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::{Component, faults, heap};
use plimsoll_text::Tokenizer;

use super::{hide_injected_panics, whole_reserve};
use crate::common::{ask, exact, fixtures, greedy};
use crate::process::own_process;

struct Ground {
    checkpoint: Checkpoint,
    tokenizer: Arc<Tokenizer>,
    options: Options,
    host: Host,
}

fn ground(name: &str, options: Options) -> Ground {
    let checkpoint = Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&fixtures().join("models/llama/tokenizer.json")).unwrap());
    // Measured on the page: what this process took before is not the subject here.
    let options = Options { threads: Some(1), tokenizer_bytes: Some(1 << 20), ..options };
    let mut host = Host::read(&options).unwrap();
    let dir = std::env::temp_dir().join(format!("plimsoll-starts-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    host.lease_dir = Some(dir);
    Ground { checkpoint, tokenizer, options, host }
}

/// A memory limit without a size of the pool: the start probes, measures, builds again and tests itself.
fn measured() -> Options {
    Options { memory_budget: Some("320MiB".parse().unwrap()), max_total_token_num: None, ..exact() }
}

impl Ground {
    fn start(&self) -> Result<EngineHandle, StartError> {
        start(&self.checkpoint, Arc::clone(&self.tokenizer), &self.options, &self.host, |_| {})
    }

    fn leases(&self) -> usize {
        let dir: &Path = self.host.lease_dir.as_deref().unwrap();
        let names =
            std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| PathBuf::from(entry.file_name()));
        names.filter(|name| name.extension().is_some_and(|e| e == "lease")).count()
    }

    /// Sends a request to the engine and ends it; the engine must have an emergency reserve by then or get one.
    fn use_and_end(&self, engine: EngineHandle) {
        // A refusal at the very end of the start may have used the reserve. Nothing is admitted until it is restored.
        whole_reserve();
        assert_eq!(ask(&engine, greedy(&[1, 2, 3], 4)).ids.len(), 4);
        assert!(engine.ledger().allocations().1 == 0 && engine.status().pages_total.load(Acquire) > 0);
        drop(engine);
    }

    /// Nothing is left: no region, no emergency reserve, no lease, no thread of an engine.
    fn assert_bare(&self, what: &str) {
        let deadline = Instant::now() + Duration::from_secs(5);
        let left = || (faults::region_bytes(), heap::armed(), self.leases(), threads("plimsoll-engine"));
        while left() != (0, false, 0, 0) {
            let (regions, emergency_reserve, leases, threads) = left();
            assert!(
                Instant::now() < deadline,
                "{what}: {regions} bytes of regions, emergency reserve {emergency_reserve}, {leases} leases, {threads} threads are left"
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Returns the number of this process's threads with a name that begins with `name`.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let comm = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.map(comm).filter(|comm| comm.starts_with(&name[..name.len().min(15)])).count()
}

#[test]
fn every_mapping_of_a_start_may_be_refused() {
    own_process!();
    hide_injected_panics();
    let components = [
        None,
        Some(Component::Weights),
        Some(Component::KvPages),
        Some(Component::StepWorkspace),
        Some(Component::EmergencyReserve),
    ];
    let (mut swept, mut refused) = (0, 0);
    for (name, options) in [("pinned", exact()), ("measured", measured())] {
        let ground = ground(name, options);
        ground.use_and_end(ground.start().unwrap());
        ground.assert_bare("without faults");
        for component in components {
            let mut hits = 0;
            for nth in 1.. {
                let what = format!("{name}, mapping {nth} of {}", component.map_or("any", Component::name));
                faults::arm_regions(component, nth);
                let started = ground.start();
                let hit = faults::disarm_regions().hit;
                match started {
                    Ok(engine) => ground.use_and_end(engine),
                    Err(error) => {
                        assert_eq!(hit, 1, "{what}: {error}");
                        let text = error.to_string();
                        assert!(text.contains("memory") || text.contains("refused"), "{what}: {text}");
                        refused += 1;
                    }
                }
                ground.assert_bare(&what);
                hits += hit;
                if hit == 0 {
                    break;
                }
            }
            assert!(hits > 0, "{name}: {component:?} was never mapped");
            swept += hits;
        }
    }
    println!("{swept} mappings of start-ups were refused, {refused} of them ended the start");
    assert!(swept >= 20 && refused >= 5, "{swept} swept, {refused} refused");
}

/// Most starts of a sweep; with more calls every k-th call is refused.
const STARTS_MAX: u64 = 700;

/// Upper limit of the heap calls of the watching thread's first reading. It runs beside the end of start-up, sooner or later: some seventy
/// calls here.
const LOOK_CALLS: u64 = 160;

#[test]
fn every_heap_call_of_a_start_may_be_refused() {
    own_process!();
    hide_injected_panics();
    let ground = ground("heap", exact());
    ground.use_and_end(ground.start().unwrap());
    ground.assert_bare("without faults");
    let begun = Instant::now();
    let run = |nth: u64| {
        faults::arm_process(nth);
        let started = ground.start();
        let tally = faults::disarm_process();
        match started {
            Ok(engine) => ground.use_and_end(engine),
            Err(error) => panic!("heap call {nth}: {error}"),
        }
        ground.assert_bare(&format!("heap call {nth}"));
        tally
    };
    let calls = run(0).seen;
    let stride = calls.div_ceil(STARTS_MAX).max(1);
    let mut swept = 0;
    for nth in (1..=calls).step_by(stride as usize) {
        let released = heap::blocks_released();
        if run(nth).hit == 0 {
            assert!(nth + LOOK_CALLS > calls, "call {nth} of {calls} was never made");
            break;
        }
        assert!(
            heap::blocks_released() > released,
            "call {nth}: the start reserve or the emergency reserve paid for it"
        );
        swept += 1;
    }
    println!("{swept} of {calls} heap calls of a start were refused in {:?}", begun.elapsed());
    assert!(swept * stride + LOOK_CALLS + stride > calls, "{swept} of {calls}");
}
