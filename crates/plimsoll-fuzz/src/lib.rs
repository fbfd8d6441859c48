//! What the fuzzers run: one function of bytes for every reader of foreign text, with what must hold whatever the bytes are.
//!
//! A target returns, or it has found something: it panics where the heap takes more than it may, where two ways of
//! reading the same thing differ, or where the code it calls panics and nothing contains that. `fuzz/` (cargo-fuzz, nightly) runs targets
//! under libFuzzer with coverage and sanitizers; `tests/corpus.rs` runs the same functions over what seeds and findings there are, on any
//! toolchain. The rooms: `files` (checkpoints, tokenizers, templates), `media`, `bodies`, `replies` (what models say, and what may be said),
//! `tools` (what our own commands and MCP's client read), `seeds`.
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

/// Counted in the fuzzers and in the tests, so that targets can say what reading may take.
#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// A reader of foreign bytes.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, which is also that of its fuzzer and of its folder of findings.
    pub name: &'static str,
    /// Reads them.
    pub run: fn(&[u8]),
}

/// All of them.
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

/// The target of this name.
///
/// # Panics
/// Where there is none.
pub fn target(name: &str) -> Target {
    *TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| panic!("there is no target {name}"))
}

/// Lets contained panics pass, which a fuzzer would report as a finding (I7 contains them: a decoder's panic is an
/// error of the item). Each place is reported once.
pub fn let_panics_be_contained() {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        if TOLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(place) {
            eprintln!("panicked: {panic}");
        }
    }));
}

/// Does `work`, which may take this much heap at any instant.
fn within<T>(bytes_max: usize, work: impl FnOnce() -> T) -> T {
    heap::restart_peak();
    let before = heap::in_use();
    let done = work();
    let cost = heap::peak().saturating_sub(before);
    assert!(cost <= bytes_max as u64, "{cost} bytes of heap, allowed are {bytes_max}");
    done
}

/// The parts of an input, which a zero byte separates; as many as asked for, the last with what is left.
fn parts<const N: usize>(data: &[u8]) -> [&[u8]; N] {
    let mut parts = data.splitn(N, |byte| *byte == 0);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
