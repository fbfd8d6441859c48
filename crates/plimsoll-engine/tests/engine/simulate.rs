//! A trace through the scheduler and the memory of a plan: every run has the same schedule. A small pool causes pressure, and no request is
//! lost.

use plimsoll_engine::simulate::{Rates, Simulated, simulate};
use plimsoll_engine::trace::{BLOCK_TOKENS, Head, Line, Prompt, Trace};
use plimsoll_engine::{Blueprint, EnginePlan, MemoryLimit, Options};
use plimsoll_formats::Checkpoint;

use crate::common::{exact, fixtures};

const RATES: Rates = Rates { bytes: 1e9, flops: 1e9 };

fn plan(model: &str, tokens: impl Into<Option<u64>>) -> EnginePlan {
    let path = fixtures().join("models").join(model);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let options = Options { max_total_token_num: tokens.into(), max_waiting: 16, running_max_req_size: 8, ..exact() };
    let options = Options { graph_max_batch_size: 8, ..options };
    let line = MemoryLimit::of_budget(1 << 40, "a test");
    Blueprint::new(&checkpoint, &options).unwrap().plan(&options, 1, &line).unwrap()
}

/// Bursts of requests, a third of which begin alike; some clients disconnect.
fn trace(requests: u64) -> Trace {
    let line = |i: u64| {
        let (tokens, output) = (30 + (i * 37 % 90) as u32, 5 + (i * 13 % 40) as u32);
        let own = (1 << 32) + i * 1000;
        let blocks = (0..tokens.div_ceil(BLOCK_TOKENS))
            .map(|block| if i.is_multiple_of(3) && block == 0 { 7 } else { own + u64::from(block) });
        let prompt = Prompt { tokens, blocks: blocks.collect(), ..Prompt::default() };
        let mut line = Line::plain(i / 12 * 200, prompt, output);
        if i.is_multiple_of(7) {
            (line.end, line.output, line.max_tokens) = ("aborted".into(), u64::from(output / 3), Some(output));
        }
        line
    };
    Trace { head: Head::default(), lines: (0..requests).map(line).collect(), torn: None }
}

fn whole(out: &Simulated) -> u64 {
    out.finished + out.left + out.refused_full + out.refused_invalid
}

#[test]
fn the_same_trace_gives_the_same_schedule_and_everything_back() {
    for model in ["llama", "qwen3.5"] {
        let (plan, trace) = (plan(model, 4096), trace(96));
        let first = simulate(&plan, &trace, RATES).unwrap();
        assert_eq!(simulate(&plan, &trace, RATES).unwrap(), first);
        assert_eq!((whole(&first), first.lost, first.sequences), (96, 0, 96), "{first:?}");
        assert!(first.left > 5 && first.finished > 40 && first.cached_tokens > 0, "{first:?}");
        let said: u64 = trace.lines.iter().map(|line| line.output).sum();
        assert_eq!(first.refused_full > 0, first.output_tokens < said, "{first:?}");
        // Another machine's speed, another schedule.
        let faster = simulate(&plan, &trace, Rates { bytes: 1e11, flops: 1e11 }).unwrap();
        assert!(faster.digest != first.digest && faster.first_token.p99 < first.first_token.p99);
    }
}

#[test]
fn a_small_pool_shows_as_preemptions_and_waiting_never_as_a_loss() {
    let trace = trace(96);
    let (roomy, tight) = (plan("llama", 4096), plan("llama", 256));
    let [roomy, tight] = [&roomy, &tight].map(|plan| simulate(plan, &trace, RATES).unwrap());
    assert_eq!(roomy.preempted, 0);
    assert!(tight.preempted > 0 && tight.pages_peak <= tight.pages && tight.pages == 16, "{tight:?}");
    assert!(tight.computed_rows > roomy.computed_rows && tight.seconds > roomy.seconds);
    assert_eq!((tight.lost, whole(&tight)), (0, 96));
}

#[test]
fn what_can_never_fit_is_refused_and_an_encoder_is_not_simulated() {
    let mut trace = trace(3);
    trace.lines[1].prompts[0].tokens = 5000;
    let out = simulate(&plan("llama", 2048), &trace, RATES).unwrap();
    assert_eq!((out.refused_invalid, whole(&out)), (1, 3));
    let error = simulate(&plan("bert", None), &trace, RATES).unwrap_err().to_string();
    assert!(error.contains("encoder"), "{error}");
}
