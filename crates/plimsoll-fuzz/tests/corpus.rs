//! The fuzzers' targets on any toolchain: every seed, every finding, and some thousand broken copies of both. One test, because targets
//! count the heap of the whole process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use plimsoll_fuzz::{TARGETS, Target, let_panics_be_contained, seeds};

/// Broken copies of each target's inputs in total, unless `PLIMSOLL_FUZZ_COPIES` sets another number.
const COPIES: usize = 400;

/// The longest time for one input, on the slowest machine.
const EACH: Duration = Duration::from_secs(30);

/// Bytes with a meaning in many formats.
const TELLING: &[u8] = b"\"{}[]()\\/0-9e,:%\0\xff";

/// A linear congruential generator.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

fn run(target: Target, name: &str, bytes: &[u8]) {
    let begun = Instant::now();
    if catch_unwind(AssertUnwindSafe(|| (target.run)(bytes))).is_err() {
        let head = String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned();
        panic!("{} fails on {name} ({} bytes): {head:?}", target.name, bytes.len());
    }
    let took = begun.elapsed();
    assert!(took < EACH, "{} takes {took:?} for {name}", target.name);
}

/// Returns a copy that differs in a few places, most of them near the beginning; sometimes it is cut off.
fn broken(whole: &[u8], dice: &mut Dice) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for _ in 0..1 + dice.roll(4) {
        if bytes.is_empty() {
            break;
        }
        let reach = if dice.roll(2) == 0 { bytes.len() } else { bytes.len().min(400) };
        let at = dice.roll(reach);
        match dice.roll(8) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..(at + 1 + dice.roll(16)).min(bytes.len()))),
            2 => {
                let from = dice.roll(bytes.len());
                let piece = bytes[from..(from + 1 + dice.roll(64)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            3 => bytes[at] = TELLING[dice.roll(TELLING.len())],
            _ => bytes[at] = dice.roll(256) as u8,
        }
    }
    bytes
}

#[test]
fn every_target_survives_its_seeds_its_findings_and_broken_copies_of_them() {
    let_panics_be_contained();
    let copies = std::env::var("PLIMSOLL_FUZZ_COPIES").map_or(COPIES, |number| number.parse().expect("a number"));
    for target in TARGETS {
        let begun = Instant::now();
        let mut inputs = seeds::seeds(target.name);
        inputs.extend(seeds::regressions(target.name));
        assert!(!inputs.is_empty());
        run(*target, "nothing", &[]);
        inputs.iter().for_each(|(name, bytes)| run(*target, name, bytes));
        let mut dice = Dice(8);
        for copy in 0..copies {
            let (name, whole) = &inputs[copy % inputs.len()];
            run(*target, &format!("a broken {name}"), &broken(whole, &mut dice));
        }
        println!("{}: {} inputs, {copies} broken copies in {:.1?}", target.name, inputs.len(), begun.elapsed());
    }
}

#[test]
fn every_target_has_a_fuzzer_and_a_place_in_the_record() {
    let fuzz = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let read = |file: &str| std::fs::read_to_string(fuzz.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let (manifest, record) = (read("Cargo.toml"), read("README.md"));
    for Target { name, .. } in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is no binary of fuzz/Cargo.toml");
        assert!(read(&format!("fuzz_targets/{name}.rs")).contains(&format!("target(\"{name}\")")), "{name}");
        assert!(record.contains(&format!("| `{name}` |")), "{name} is not in fuzz/README.md");
    }
}
