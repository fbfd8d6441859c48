//! Plans, ledger and refusals on a GPU of any kind, simulated by wgpu's `noop` backend: no driver is needed, and nothing is computed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_engine::{EngineHandle, Host, Options, StartError, start};
use plimsoll_gpu::{NoopGpu, stand_in};
use plimsoll_memory::{Component, faults};
use plimsoll_text::Tokenizer;

use super::common::{alone, ask, checkpoint, exact, fixtures, greedy, quiet, seen};
use super::{allocations, on_gpu};

/// A simulated GPU, present until this is dropped.
struct Standing;

impl Drop for Standing {
    fn drop(&mut self) {
        stand_in(None);
    }
}

/// Simulates a GPU with buffers of up to `buffer` MiB. `own`: its dedicated memory and the usable part of it, in MiB.
fn gpu(buffer: u64, own: Option<(u64, u64)>) -> Standing {
    let own = own.map(|(total, may)| [total << 20, may << 20]);
    stand_in(Some(NoopGpu { buffer: buffer << 20, own }));
    Standing
}

fn options() -> Options {
    Options { allow_software_gpu: false, max_total_token_num: None, ..on_gpu(exact()) }
}

/// Starts an engine and calls `loading` while weights are loaded. No other server has leased anything.
fn launch(model: &str, options: &Options, loading: impl FnMut(u64)) -> Result<EngineHandle, StartError> {
    let leases = tempfile::tempdir().unwrap();
    launch_beside(&leases.path().join("leases"), model, options, loading)
}

/// Starts an engine beside the servers that have leased memory in `leases`.
fn launch_beside(
    leases: &Path,
    model: &str,
    options: &Options,
    loading: impl FnMut(u64),
) -> Result<EngineHandle, StartError> {
    let tokenizer = Arc::new(Tokenizer::from_file(&fixtures().join("models/llama/tokenizer.json")).unwrap());
    let opened = match &options.draft_model {
        Some(draft) => checkpoint(model).with_draft(checkpoint(draft)).unwrap(),
        None => checkpoint(model),
    };
    let host = Host { lease_dir: Some(leases.into()), ..Host::read(options).unwrap() };
    start(&opened, tokenizer, options, &host, loading)
}

/// Memory stays within the plan and both limits, for any model, any kind of drafts and any buffer size.
#[test]
fn plans_are_kept_on_gpus_of_every_kind() {
    let _alone = alone();
    let plain = ["llama", "gemma3", "qwen3.5", "qwen3-moe", "nemotron-h-moe", "bert"].map(|model| (model, options()));
    let always = || Options { mtp_adaptive: false, ..options() };
    let head = |drafts| Options { enable_mtp: true, mtp_num_draft_tokens: drafts, ..always() };
    // A draft model with more layers than the model needs larger transfers than the model.
    let beside = |draft: &str| Options { draft_model: Some(draft.into()), draft_num_tokens: 8, ..always() };
    let drafting = [
        ("qwen3.5", head(1)),
        ("qwen3-next", head(8)),
        ("glm4-moe", head(3)),
        ("deepseek-v3", head(2)),
        ("vl-qwen3.5", seen::small(head(2))),
        ("llama", beside("llama-tied")),
        ("qwen3.5", beside("llama")),
    ];
    for (buffer, own) in [(64, None), (64, Some((600, 480))), (1024, Some((4096, 700)))] {
        let _gpu = gpu(buffer, own);
        for (model, options) in plain.iter().chain(&drafting) {
            let (model, drafts) = (*model, options.drafts());
            let what = format!("{model}, {drafts} drafts, buffers of {buffer} MiB, {own:?}");
            let options = Options { memory_budget: Some("700MiB".parse().unwrap()), ..options.clone() };
            let engine = launch(model, &options, |_| {}).unwrap_or_else(|error| panic!("{what}: {error}"));
            let (plan, ledger) = (engine.plan(), engine.ledger());
            assert_eq!(plan.device.as_ref().map(|device| device.limit), own.map(|(_, may)| may << 20), "{what}");
            assert!(
                plan.total() <= plan.limit && ledger.committed_on_device() <= plan.device_total(),
                "{what}: {plan}"
            );
            let taken = allocations(&engine);
            if model != "bert" {
                let readers: Vec<_> = (0..6).map(|i| engine.submit(greedy(&[i, 1, 2, 3], 5)).unwrap()).collect();
                readers.into_iter().for_each(|reader| assert_eq!(super::collect(reader).ids.len(), 5, "{what}"));
            }
            quiet(&engine);
            assert_eq!(engine.metrics().drafted_tokens.get() > 0, drafts > 0, "{what}");
            assert_eq!(engine.metrics().failed_steps.get(), 0, "{what}");
            assert_eq!((allocations(&engine), taken.1), (taken, 0), "{what}: no device memory is taken after ready");
            for component in [Component::Weights, Component::KvPages, Component::StateSlots, Component::StepWorkspace] {
                let row = ledger.row(component);
                assert!(row.peak <= row.planned, "{what}: {row:?}");
                let holds_nothing = match component {
                    Component::KvPages => model == "bert",
                    Component::StateSlots => {
                        !["qwen3.5", "qwen3-next", "vl-qwen3.5", "nemotron-h-moe"].contains(&model)
                    }
                    _ => false,
                };
                assert_eq!(row.committed == 0, holds_nothing, "{what}: {row:?}");
            }
        }
    }
}

/// Another program takes GPU memory while weights are loaded: the start says what is missing before the driver fails.
#[test]
fn a_budget_that_shrinks_during_a_start_is_seen() {
    let _alone = alone();
    let _gpu = gpu(64, Some((600, 470)));
    let plan = launch("llama", &options(), |_| {}).unwrap_or_else(|error| panic!("{error}")).plan().clone();
    let shrunk = |may: u64| {
        let _gpu = gpu(64, Some((600, 470)));
        let loading = |_| stand_in(Some(NoopGpu { buffer: 64 << 20, own: Some([600 << 20, may]) }));
        launch("llama", &options(), loading).map(|engine| engine.limits().max_total_token_num)
    };
    shrunk(plan.device_total()).unwrap_or_else(|error| panic!("{error}"));
    let half = plan.bytes(Component::KvPages) / 2;
    let error = shrunk(plan.device_total() - half).expect_err("half of the pool is missing").to_string();
    assert!(error.contains("'kv_pages' asked for") && error.contains("--max-total-token-num"), "{error}");
}

/// A driver reports used memory, not planned memory. A second server therefore counts the first one's lease of the GPU.
#[test]
fn servers_lease_a_gpu_with_memory_of_its_own() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let leases = dir.path().join("leases");
    let begin = || launch_beside(&leases, "llama", &Options { max_total_token_num: Some(2048), ..options() }, |_| {});
    let narrow = gpu(64, Some((600, 480)));
    let first = begin().unwrap_or_else(|error| panic!("{error}"));
    let planned = first.plan().device_total();
    assert!(planned < 480 << 20 && 2 * planned > 480 << 20, "{planned}: one fits, two do not");
    let refused = begin().map(drop).expect_err("the first one has leased most of it").to_string();
    for part in ["has leased the memory", "'gpu noop'", "1 other Plimsoll", "lower --gpu-memory-budget to"] {
        assert!(refused.contains(part), "{refused}");
    }
    drop(narrow);
    {
        let _wide = gpu(64, Some((1200, 1100)));
        begin().unwrap_or_else(|error| panic!("both fit: {error}"));
    }
    drop(first);
    let _narrow = gpu(64, Some((600, 480)));
    let ends = (0..100).any(|_| {
        begin().is_ok() || {
            std::thread::sleep(Duration::from_millis(50));
            false
        }
    });
    assert!(ends, "a lease ends with its engine");
}

/// Every buffer of a start is refused once, including those of states and windows. The start fails with its name, or does without it.
#[test]
fn every_buffer_of_a_start_may_be_refused_whatever_the_model() {
    let _alone = alone();
    let _gpu = gpu(64, Some((600, 480)));
    let options = Options { max_total_token_num: Some(2048), ..options() };
    for model in ["gemma3", "qwen3.5", "qwen3-moe"] {
        let mut refused = 0;
        for nth in 1.. {
            faults::arm_regions(None, nth);
            let started = launch(model, &options, |_| {});
            let hit = faults::disarm_regions().hit;
            match started {
                Ok(engine) => assert_eq!(ask(&engine, greedy(&[1, 2, 3], 4)).ids.len(), 4, "{model}: refusal {nth}"),
                Err(error) => {
                    refused += 1;
                    let error = error.to_string();
                    assert!(error.contains("refused") || error.contains("memory"), "{model}, {nth}: {error}");
                }
            }
            if hit == 0 {
                break;
            }
        }
        assert!(refused >= 8, "{model}: {refused} refusals");
    }
}
