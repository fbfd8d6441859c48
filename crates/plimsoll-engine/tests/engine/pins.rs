//! Pinned prefixes: they stay in memory and on disk while others are evicted, and never keep a request from running.

use plimsoll_engine::{DiskCache, Options, Pin, Request};

use crate::common::recall::mix;
use crate::common::{ask, engine, full_pools, greedy, quiet, until};

/// One model each with full attention, sliding windows, and recurrent state.
const MODELS: [&str; 3] = ["llama", "gemma3", "qwen3.5"];

fn options() -> Options {
    Options {
        batch_max_tokens: 64,
        running_max_req_size: 4,
        graph_max_batch_size: 4,
        max_total_token_num: Some(1024),
        state_checkpoints: 8,
        threads: Some(1),
        ..Options::default()
    }
}

fn tokens(seed: u64, len: u64) -> Vec<u32> {
    (0..len).map(|i| (mix(seed * 1000 + i) % 300) as u32).collect()
}

fn pinned(prompt: &[u32], tokens: usize) -> Request {
    Request { pins: [Pin { tokens, minutes: 5 }].into_iter().collect(), ..greedy(prompt, 2) }
}

/// A prompt of 100 tokens that begins with the first 80 of another.
fn begins_like(first: &[u32], seed: u64) -> Vec<u32> {
    [&first[..80], &tokens(seed, 20)].concat()
}

#[test]
fn a_pinned_prefix_stays_while_others_leave() {
    for model in MODELS {
        let warm = engine(model, &options());
        let (kept, other) = (tokens(1, 100), tokens(2, 100));
        let expected = ask(&warm, greedy(&begins_like(&kept, 3), 4));
        pollster::block_on(warm.clear_cache()).unwrap();
        ask(&warm, pinned(&kept, 85));
        ask(&warm, greedy(&other, 2));
        assert_eq!(warm.cache_report().pinned_pages, 5, "{model}: whole pages");
        for seed in 10..40 {
            ask(&warm, greedy(&tokens(seed, 200), 2));
        }
        let (found, gone) = (ask(&warm, greedy(&begins_like(&kept, 3), 4)), ask(&warm, greedy(&other, 2)));
        assert_eq!((found.cached_tokens, gone.cached_tokens), (80, 0), "{model}");
        found.is_the_same_as(&expected, model);
        quiet(&warm);
        full_pools(&warm);
    }
}

#[test]
fn pins_take_a_quarter_at_most_and_give_way_to_the_only_request() {
    for model in MODELS {
        let warm = engine(model, &options());
        for seed in 0..8 {
            ask(&warm, pinned(&tokens(seed, 100), 100));
        }
        assert_eq!(warm.cache_report().pinned_pages, 16, "{model}: of 64 pages");
        // A prompt that takes nearly the whole pool.
        let most = warm.limits().max_req_total_len.min(1000) as usize;
        let answer = ask(&warm, greedy(&tokens(50, most as u64 - 4), 4));
        assert_eq!(answer.ids.len(), 4, "{model}");
        quiet(&warm);
        full_pools(&warm);
    }
}

#[test]
fn a_pinned_prefix_is_pinned_on_disk() {
    let temp = tempfile::tempdir().unwrap();
    let disk = DiskCache { bytes: 1 << 20, read_always: true, ..DiskCache::at(temp.path().join("cache")) };
    let warm = engine("llama", &Options { disk_cache: Some(disk), ..options() });
    ask(&warm, pinned(&tokens(1, 100), 85));
    until(&warm, |engine| engine.cache_report().disk.unwrap().pinned_bytes > 0);
    let report = || warm.cache_report().disk.unwrap();
    until(&warm, |_| report().pinned_bytes * 6 == report().bytes * 5);
    pollster::block_on(warm.clear_cache()).unwrap();
    until(&warm, |_| report().bytes == 0);
    assert_eq!(report().pinned_bytes, 0);
}

/// Two saved prefixes with the same pages count once against the limit of pins. A save under a known name unpins the
/// pages that it replaces.
#[test]
fn saved_prefixes_that_share_pages_count_once() {
    let temp = tempfile::tempdir().unwrap();
    let disk = DiskCache { bytes: 1 << 20, read_always: true, ..DiskCache::at(temp.path().join("cache")) };
    let warm = engine("llama", &Options { disk_cache: Some(disk), ..options() });
    let pinned = || warm.cache_report().disk.unwrap().pinned_bytes;
    let save = |name: &str, prompt: &[u32]| {
        warm.save_prefix(name, prompt)?;
        let pins = [Pin { tokens: prompt.len(), minutes: Pin::SAVED }].into_iter().collect();
        ask(&warm, Request { pins, ..greedy(prompt, 1) });
        Ok::<(), plimsoll_engine::SavePrefixError>(())
    };
    // A saved probe shows the bytes of a page on disk, and thus how many pages can be pinned.
    save("probe", &tokens(1, 16)).unwrap();
    until(&warm, |_| pinned() > 0);
    let page = pinned();
    assert!(warm.remove_prefix("probe"));
    let most = (1 << 18) / page;
    let (long, other) = (tokens(2, most * 16), tokens(3, most * 16));
    save("agent", &long).unwrap();
    until(&warm, |_| pinned() == most * page);
    assert!(save("more", &tokens(4, 16)).is_err(), "no page more");
    save("same", &long).unwrap();
    save("agent", &long).unwrap();
    assert!(warm.remove_prefix("same"));
    assert_eq!(pinned(), most * page, "its other name keeps it");
    save("agent", &other).unwrap();
    until(&warm, |_| pinned() == most * page);
    assert!(warm.remove_prefix("agent"));
    until(&warm, |_| pinned() == 0);
}
