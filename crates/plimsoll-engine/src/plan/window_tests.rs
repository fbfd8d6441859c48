//! Planned bytes of keys and values of published models with sliding windows, against sums by hand.

use std::path::Path;

use plimsoll_formats::Checkpoint;
use plimsoll_memory::Component;

use super::*;

/// Gemma 3 27B: 62 layers, of which every sixth sees the whole context and the others 1,024 tokens; 16 key/value heads of 128.
fn gemma() -> Checkpoint {
    configuration("gemma-3-27b.json")
}

fn configuration(name: &str) -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/configs").join(name);
    Checkpoint::open(&path).unwrap()
}

/// Bytes of one token in one layer: keys and values of two bytes.
const LAYER_TOKEN: u64 = 2 * 16 * 128 * 2;
const LAYER_PAGE: u64 = 16 * LAYER_TOKEN;
const WHOLE: u64 = 10;
const SLIDING: u64 = 52;

fn planned(options: Options) -> EnginePlan {
    planned_of(&gemma(), options)
}

fn planned_of(checkpoint: &Checkpoint, options: Options) -> EnginePlan {
    let blueprint = Blueprint::new(checkpoint, &options).unwrap();
    blueprint.plan(&options, 8, &MemoryLimit::of_budget(1 << 42, "a test")).unwrap()
}

/// Options for this many users with 32,768 tokens each.
fn users(users: usize) -> Options {
    Options {
        running_max_req_size: users,
        graph_max_batch_size: users,
        max_req_total_len: Some(32_768),
        max_total_token_num: Some(32_768 * users as u64),
        ..Options::default()
    }
}

#[test]
fn a_user_of_32k_tokens_takes_less_than_a_quarter_of_the_whole_context_in_every_layer() {
    for count in [1, 4, 64] {
        let plan = planned(users(count));
        // A chunk of 512 rows and the 1,023 positions that its first row sees lie in 97 pages at most. A checkpoint keeps 64.
        assert_eq!((plan.pages, plan.slots), (2048 * count, (97 + 64) * count));
        let bytes = plan.plan.bytes(Component::KvPages);
        assert_eq!(bytes, count as u64 * (2048 * WHOLE * LAYER_PAGE + 161 * SLIDING * LAYER_PAGE));
        let whole_everywhere = count as u64 * 32_768 * (WHOLE + SLIDING) * LAYER_TOKEN;
        assert!(4 * bytes <= whole_everywhere, "{bytes} of {whole_everywhere}");
        assert_eq!(plan.limits.max_req_total_len, 32_768);
        assert_eq!(plan.step.running, count);
    }
}

/// Gemma 4 E2B has 35 layers. 20 of them read other layers' keys and values. Of the other 15, 3 see the whole context, with a head of 512,
/// and 12 see 512 tokens, with a head of 256.
#[test]
fn layers_that_share_keys_and_values_take_no_pages() {
    let plan = planned_of(&configuration("gemma-4-e2b.json"), users(2));
    // A chunk of 512 rows and the 511 positions before it lie in 65 pages at most. A checkpoint keeps 32.
    assert_eq!((plan.pages, plan.slots), (2 * 2048, 2 * (65 + 32)));
    let (whole, window) = (3 * 16 * 2 * 512 * 2, 12 * 16 * 2 * 256 * 2);
    assert_eq!(plan.plan.bytes(Component::KvPages), 2 * (2048 * whole + 97 * window));
    // The embedding of layers has 262,144 rows of 35 · 256 elements of two bytes.
    assert!(plan.plan.bytes(Component::Weights) > 262_144 * 35 * 256 * 2);
}

#[test]
fn window_pages_follow_the_usual_request() {
    // 16 requests of 8,192 tokens fill this pool; none of them lacks windows.
    let plan = planned(Options { max_total_token_num: Some(131_072), ..Options::default() });
    assert_eq!((plan.pages, plan.slots, plan.step.running), (8192, 16 * 161, 64));
    // Requests no longer than their windows have as many window pages as pages.
    let short = Options { max_req_total_len: Some(1024), max_total_token_num: Some(8 * 1024), ..Options::default() };
    let plan = planned(short);
    assert_eq!((plan.pages, plan.slots), (512, 512));
    // Without checkpoints, and without a prefix cache to find them.
    for options in [Options { state_checkpoints: 0, ..users(2) }, Options { prefix_cache: false, ..users(2) }] {
        assert_eq!(planned(options).slots, 2 * 97);
    }
}

/// A pool that the planner sizes holds requests of the usual length, and no byte of the limit is lost between the two pools.
#[test]
fn both_pools_share_the_room() {
    let options = Options { memory_budget: None, ..Options::default() };
    let checkpoint = gemma();
    let blueprint = Blueprint::new(&checkpoint, &options).unwrap();
    for gib in [80, 120, 200] {
        let line = MemoryLimit::of_budget(gib << 30, "a test");
        let plan = blueprint.plan(&options, 8, &line).unwrap();
        assert!(plan.plan.total() <= line.bytes);
        let requests = plan.slots / 161;
        assert_eq!((plan.slots % 161, plan.requests()), (0, requests));
        let tokens = plan.pages * 16;
        // A rest too small for another request's windows becomes pages. So does the rest when all 64 running requests have windows.
        let most = if requests == 64 { usize::MAX } else { (requests + 3) * 8192 };
        assert!((requests * 8192..most).contains(&tokens), "{tokens} tokens, {requests} requests");
    }
}
