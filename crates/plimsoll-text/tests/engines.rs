//! This crate's BPE beside the `tokenizers` library, on the same files: ids, speed, memory, time to load.
//!
//! The decision based on it: `docs/decisions/0037-bpe-is-our-own.md`.

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::path;
use plimsoll_memory::heap::{self, CountingHeap};
use plimsoll_text::Tokenizer;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// The `tokenizers` library, with or without its cache of word ids.
struct Library(tokenizers::Tokenizer);

impl Library {
    fn load(file: &Path, cached: bool) -> Self {
        let mut loaded = tokenizers::Tokenizer::from_file(file).unwrap();
        loaded.with_padding(None).with_truncation(None).unwrap();
        if cached {
            return Self(loaded);
        }
        let mut model = loaded.get_model().clone();
        model.resize_cache(0);
        let mut inner = loaded.into_inner();
        inner.with_model(model);
        Self(inner.into())
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        self.0.encode_fast(text, false).unwrap().get_ids().to_vec()
    }
}

/// Returns texts of several kinds, each with its name.
fn texts() -> Vec<(&'static str, String)> {
    let folder = |folder: &str, extension: &str| -> String {
        let all = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        let mut files: Vec<PathBuf> = all.map(|file| file.unwrap().path()).collect();
        files.retain(|file| file.extension().is_some_and(|found| found == extension));
        files.sort();
        files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect()
    };
    let cases: common::Expected = common::read("byte_level/cases.json");
    let scripts: String = cases.cases.iter().map(|case| case.text.as_str()).collect();
    let mut state = 1_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    let random: Vec<u8> = (0..200_000).map(|_| byte()).collect();
    vec![
        ("code", folder("src", "rs")),
        ("prose", folder("../../docs", "md")),
        ("scripts", scripts.repeat(4)),
        ("random bytes", String::from_utf8_lossy(&random).into_owned()),
        ("one word", "abcab".repeat(40_000)),
    ]
}

/// Returns the shortest time of three runs, after one that fills caches, and the heap's peak in a further run.
fn measure(text: &str, encode: &dyn Fn(&str) -> Vec<u32>) -> (Duration, u64) {
    let time = || {
        let begun = Instant::now();
        encode(text);
        begun.elapsed()
    };
    time();
    let best = (0..3).map(|_| time()).min().unwrap();
    heap::restart_peak();
    let before = heap::in_use();
    drop(encode(text));
    (best, heap::peak() - before)
}

/// Returns the loaded value and a text with its load time, its heap and the heap's peak while loading.
fn load<T>(load: impl Fn() -> T) -> (T, String) {
    heap::restart_peak();
    let (before, begun) = (heap::in_use(), Instant::now());
    let loaded = load();
    let (took, mib) = (begun.elapsed(), |bytes: u64| bytes as f64 / f64::from(1 << 20));
    let report = format!(
        "{took:.0?}, holds {:.1} MiB, peak {:.1} MiB",
        mib(heap::in_use() - before),
        mib(heap::peak() - before)
    );
    (loaded, report)
}

#[test]
#[ignore = "manual: measures; PLIMSOLL_TOKENIZERS lists further tokenizer.json files, separated by colons"]
fn manual_own_bpe_beside_the_library() {
    let mut files: Vec<PathBuf> =
        ["byte_level", "gpt2", "llama2", "gemma"].map(|folder| path(folder).join("tokenizer.json")).to_vec();
    let more = std::env::var("PLIMSOLL_TOKENIZERS").unwrap_or_default();
    files.extend(more.split(':').filter(|file| !file.is_empty()).map(PathBuf::from));
    let texts = texts();
    for file in &files {
        let (own, ours) = load(|| Tokenizer::from_file(file).unwrap());
        let (plain, uncached) = load(|| Library::load(file, false));
        let (library, theirs) = load(|| Library::load(file, true));
        println!("\n{} {own:?}", file.display());
        println!("  load: own {ours}; library {theirs}; library without cache {uncached}");
        for (name, text) in &texts {
            let ids = own.encode(text, false, true).unwrap();
            let same = ids == library.encode(text) && ids == plain.encode(text);
            print!("  {name}: {} ids of {} bytes, {}", ids.len(), text.len(), if same { "equal" } else { "DIFFERENT" });
            let own = |text: &str| own.encode(text, false, true).unwrap();
            for (who, (time, peak)) in [
                ("own", measure(text, &own)),
                ("library", measure(text, &|text| library.encode(text))),
                ("without cache", measure(text, &|text| plain.encode(text))),
            ] {
                let speed = ids.len() as f64 / time.as_secs_f64() / 1e6;
                print!("; {who} {speed:.2} M/s, {:.1} bytes a byte", peak as f64 / text.len() as f64);
            }
            println!();
        }
    }
}
