//! The targets of the fuzzers: one function of bytes for every reader of untrusted input, with conditions that hold for all bytes.
//!
//! A target that returns has found nothing. It panics if the heap takes more than allowed, if two ways of reading the same input differ, or
//! if the called code panics and nothing contains the panic. `fuzz/` (cargo-fuzz, nightly) runs targets under libFuzzer with coverage and
//! sanitizers. `tests/corpus.rs` runs the same functions over all seeds and findings, on any toolchain. The modules: `files` (checkpoints,
//! tokenizers, templates), `media`, `bodies`, `replies` (models' output, and grammars for it), `tools` (input of the project's own commands
//! and of MCP's client), `seeds`.
//!
//! **Architecture invariant:** nothing here opens a connection or runs a model, and no other crate depends on this one.

#![forbid(unsafe_code)]

mod bodies;
mod files;
mod media;
mod replies;
mod scratch;
pub mod seeds;
mod tools;

use std::collections::BTreeSet;
use std::sync::Mutex;

use plimsoll_memory::heap::{self, CountingHeap};

/// Counts heap bytes in the fuzzers and in the tests, so that targets can limit the memory of reading.
#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// A reader of untrusted bytes.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, which is also the name of its fuzzer and of its folder of findings.
    pub name: &'static str,
    /// Reads the bytes.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "gguf", run: files::gguf },
    Target { name: "mmproj", run: files::mmproj },
    Target { name: "safetensors", run: files::safetensors },
    Target { name: "safetensors_index", run: files::index },
    Target { name: "config", run: files::config },
    Target { name: "tokenizer", run: files::tokenizer },
    Target { name: "template", run: files::template },
    Target { name: "image", run: media::image },
    Target { name: "frames", run: media::frames },
    Target { name: "audio", run: media::audio },
    Target { name: "bodies", run: bodies::bodies },
    Target { name: "grammar", run: replies::grammar },
    Target { name: "reply", run: replies::reply },
    Target { name: "stops", run: replies::stops },
    Target { name: "sse", run: tools::sse },
    Target { name: "mcp", run: tools::mcp },
    Target { name: "trace", run: tools::trace },
    Target { name: "models_file", run: tools::models_file },
];

/// Returns the target of this name.
///
/// # Panics
/// If there is none.
pub fn target(name: &str) -> Target {
    *TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| panic!("there is no target {name}"))
}

/// Lets contained panics pass, which a fuzzer would report as a finding (I7 contains them: a decoder's panic is an error of the item). Each
/// place is reported once.
pub fn let_panics_be_contained() {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        if TOLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(place) {
            eprintln!("panicked: {panic}");
        }
    }));
}

/// Does `work`, and panics if it took more heap than this at any instant.
fn within<T>(bytes_max: usize, work: impl FnOnce() -> T) -> T {
    heap::restart_peak();
    let before = heap::in_use();
    let done = work();
    let cost = heap::peak().saturating_sub(before);
    assert!(cost <= bytes_max as u64, "{cost} bytes of heap, allowed are {bytes_max}");
    done
}

/// Returns the parts of an input, separated by zero bytes; the last one has all that is left.
fn parts<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut parts = data.splitn(N, |byte| *byte == 0);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
