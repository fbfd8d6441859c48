//! Opening a file allocates memory in proportion to the file, whatever the file contains.
//!
//! One test only: it counts the allocations of the whole process.

mod common;

use common::{GgufWriter, LLAMA, TempDir, fixture, safetensors, seeing, seeing_model};
use plimsoll_formats::Checkpoint;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts live bytes and their peak.
struct Counting;

// SAFETY: every call is passed on to the system allocator unchanged; only counters are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the pointer came from `System` with this layout, as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the peak of bytes above those in use before, and whether the file was accepted.
fn peak_of_opening(path: &Path) -> (usize, bool) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let accepted = Checkpoint::open(path).is_ok();
    (PEAK.load(Relaxed).saturating_sub(before), accepted)
}

/// Checks one file: opening `path` may allocate in proportion to `file_bytes`. Returns whether it was accepted.
fn check(what: &str, path: &Path, file_bytes: usize) -> bool {
    let (peak, accepted) = peak_of_opening(path);
    let bound = 8 * file_bytes + (64 << 10);
    assert!(peak <= bound, "{what}: {peak} bytes at the peak for a file of {file_bytes}, allowed are {bound}");
    accepted
}

#[test]
fn memory_stays_in_proportion_to_the_file() {
    let dir = TempDir::new();

    // Announced sizes at every position of the head.
    let honest = std::fs::read(fixture("types.gguf")).expect("the fixture is there");
    for at in (0..2500).step_by(7) {
        for number in [u64::MAX, 1 << 40, 1 << 24] {
            let mut bytes = honest.clone();
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            check("a lying number", &dir.write("model.gguf", &bytes), bytes.len());
        }
    }

    // The same in a vision encoder beside the model.
    let sees = TempDir::new();
    let (model, encoder) = (seeing_model("qwen3vl").bytes(), seeing("qwen3vl_merger").bytes());
    let path = sees.write("model.gguf", &model);
    for at in (0..1200).step_by(7) {
        for number in [u64::MAX, 1 << 40, 1 << 24] {
            let mut bytes = encoder.clone();
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            sees.write("mmproj.gguf", &bytes);
            check("a lying number in an encoder", &path, model.len() + encoder.len());
        }
    }

    // Files that consist only of the smallest possible items.
    let mut keys = GgufWriter::new("llama");
    for key in 0..20_000 {
        keys.keys.push((format!("{key:x}"), 7, vec![1]));
    }
    let bytes = keys.bytes();
    assert!(check("tiny keys", &dir.write("model.gguf", &bytes), bytes.len()));

    let mut tensors = GgufWriter::new("llama");
    tensors.u32("general.alignment", 8);
    for tensor in 0..20_000u64 {
        tensors.tensors.push((format!("{tensor:x}"), vec![1], 0, tensor * 8));
    }
    tensors.data = vec![0; 20_000 * 8];
    let bytes = tensors.bytes();
    assert!(check("tiny tensors", &dir.write("model.gguf", &bytes), bytes.len()));

    let mut strings = GgufWriter::new("llama");
    strings.strings("tokenizer.ggml.tokens", &vec![""; 100_000]);
    let bytes = strings.bytes();
    assert!(check("empty strings", &dir.write("model.gguf", &bytes), bytes.len()));

    let hf = TempDir::new();
    hf.write("config.json", LLAMA);
    let entries: Vec<String> = (0..20_000)
        .map(|n| format!(r#""{n:x}":{{"dtype":"F16","shape":[1],"data_offsets":[{},{}]}}"#, n * 2, n * 2 + 2))
        .collect();
    let bytes = safetensors(&format!("{{{}}}", entries.join(",")), 40_000);
    hf.write("model.safetensors", &bytes);
    assert!(check("tiny safetensors", &hf.0, bytes.len()));

    let shape = "1,".repeat(100_000);
    let head = format!(r#"{{"a":{{"dtype":"F16","shape":[{shape}1],"data_offsets":[0,2]}}}}"#);
    let bytes = safetensors(&head, 2);
    hf.write("model.safetensors", &bytes);
    assert!(!check("a shape of 100,001 dimensions", &hf.0, bytes.len()));
}
