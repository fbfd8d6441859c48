//! The load line on real engines: memory stays within the plan, other leases are respected, and the engine is built as `plan` says.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::common::{ask, exact, fixtures, greedy, is_another_form};
use crate::process::own_process;
use plimsoll_engine::{
    Blueprint, Embed, EngineHandle, EngineHost, Host, LedgerReport, Options, Pooling, Request, StartError, start,
};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::host::{MemoryBudget, Root};
use plimsoll_memory::{Component, heap};
use plimsoll_text::Tokenizer;

fn checkpoint(model: &str) -> Checkpoint {
    let dir = fixtures().join("models").join(model);
    let gguf = dir.join("model.gguf");
    Checkpoint::open(if gguf.is_file() { &gguf } else { &dir }).unwrap()
}

/// Returns a directory for leases that no other test uses.
fn memory_leases(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("plimsoll-test-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    dir
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_file(&fixtures().join("models/llama/tokenizer.json")).unwrap()
}

/// Returns the heap bytes of the tokenizer, measured once, before the first engine: later engines free memory in the background.
fn tokenizer_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let before = heap::in_use();
        let kept = tokenizer();
        let bytes = heap::in_use() - before;
        drop(kept);
        bytes
    })
}

fn launch(model: &str, options: &Options, host: &Host) -> Result<EngineHandle, StartError> {
    let options = Options { tokenizer_bytes: Some(tokenizer_bytes()), ..options.clone() };
    let tokenizer = Arc::new(tokenizer());
    start(&checkpoint(model), tokenizer, &options, host, |_| {})
}

fn budget(text: &str) -> Option<MemoryBudget> {
    Some(text.parse().unwrap())
}

fn stop(engine: EngineHandle) {
    engine.stop();
    while !engine.stopped() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn i2_every_component_of_every_fixture_is_within_its_plan() {
    own_process!();
    i2_of_fixtures(|model| !is_another_form(model));
}

#[test]
#[ignore = "soak"]
fn i2_every_component_of_every_form_is_within_its_plan() {
    own_process!();
    i2_of_fixtures(is_another_form);
}

fn i2_of_fixtures(takes: impl Fn(&str) -> bool) {
    let models = std::fs::read_dir(fixtures().join("models")).unwrap();
    let models = models.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    for model in models.filter(|model| takes(model)) {
        let heads = ["qwen3-next", "qwen3.5", "qwen3.5-moe", "glm4-moe", "glm4.7-flash", "deepseek-v3"];
        let mtp = model.starts_with("mtp-") || heads.contains(&model.as_str());
        let options = Options { enable_mtp: mtp, mtp_num_draft_tokens: 2, ..exact() };
        let encoder = model.starts_with("bert") || model.starts_with("embedding");
        let options = Options { max_total_token_num: options.max_total_token_num.filter(|_| !encoder), ..options };
        // The 70 tokens of an image of Gemma 4 are computed in one step.
        let batch_max_tokens = options.batch_max_tokens.max(if model.contains("gemma4") { 96 } else { 0 });
        let options = Options { batch_max_tokens, ..options };
        let mut host = Host::read(&options).unwrap();
        host.lease_dir = Some(memory_leases("i2"));
        let engine = launch(&model, &options, &host).unwrap_or_else(|e| panic!("{model}: {e}"));
        let pooling = if engine.limits().dense { Pooling::Dense } else { Pooling::Mean };
        let embed = encoder.then(|| Embed::new(pooling));
        let max_tokens = if encoder { 0 } else { 20 };
        // `audio` tests the model that takes only audio.
        if model != "whisper" {
            ask(&engine, Request { embed, max_tokens, ..greedy(&[1, 2, 3], 20) });
        }
        for row in engine.ledger().rows() {
            // Engines of other tests have run in this process; the baseline includes their memory.
            if row.component != Component::ProcessBaseline {
                assert!(row.committed <= row.planned, "{model}: {row:?}");
            }
        }
        let exactly = [
            Component::Weights,
            Component::KvPages,
            Component::StateSlots,
            Component::StepWorkspace,
            Component::PrefixIndex,
            Component::EmergencyReserve,
        ];
        for row in exactly.map(|component| engine.ledger().row(component)) {
            assert_eq!(row.committed, row.planned, "{model}: {row:?}");
        }
        stop(engine);
    }
}

#[test]
fn i8_a_measured_start_builds_what_the_plan_says() {
    own_process!();
    for (text, dtype) in [
        ("300MiB", "llama"),
        ("320MiB", "gguf-qwen2-q4_0"),
        ("301MiB", "gemma3"),
        ("2GiB", "llama"),
        ("303MiB", "qwen3.5"),
    ] {
        let options = Options { memory_budget: budget(text), max_total_token_num: None, ..exact() };
        let mut host = Host::read(&options).unwrap();
        host.lease_dir = Some(memory_leases("i8"));
        // Other tests have enlarged this process's resident memory; the plan starts from the line alone.
        host.limit.bytes = options.memory_budget.unwrap().bytes(0);
        let measured = Options { tokenizer_bytes: Some(tokenizer_bytes()), ..options.clone() };
        let planned =
            Blueprint::new(&checkpoint(dtype), &measured).unwrap().plan(&measured, host.threads, &host.limit).unwrap();
        let engine = launch(dtype, &options, &host).unwrap_or_else(|e| panic!("{dtype} in {text}: {e}"));
        assert_eq!(engine.limits(), &planned.limits, "{dtype} in {text}");
        assert_eq!(engine.plan().total(), planned.plan.total(), "{dtype} in {text}");
        assert!(engine.plan().total() <= host.limit.bytes, "I1");
        stop(engine);
    }
}

#[test]
fn two_engines_that_do_not_fit_together_do_not_start_together() {
    own_process!();
    let machine = memory_leases("machine");
    std::fs::create_dir_all(machine.join("proc/self")).unwrap();
    let text = "MemTotal: 819200 kB\nMemAvailable: 800000 kB\nSwapTotal: 0 kB\n";
    std::fs::write(machine.join("proc/meminfo"), text).unwrap();
    std::fs::write(machine.join("proc/self/status"), "RssAnon: 1024 kB\n").unwrap();
    let options =
        Options { memory_budget: budget("500MiB"), max_total_token_num: Some(4096), threads: Some(1), ..exact() };
    let host = |options: &Options| {
        let mut host = Host::read_from(Root::at(&machine), options).unwrap();
        host.lease_dir = Some(machine.join("leases"));
        host
    };
    let options = Options { http_bytes: 330 << 20, ..options };
    let first = launch("llama", &options, &host(&options)).unwrap_or_else(|e| panic!("{e}"));
    let second = launch("llama", &options, &host(&options)).err().expect("there is no room for two");
    let StartError::Refused(refusal) = &second else { panic!("{second}") };
    assert_eq!((refusal.holders, refusal.leased), (1, first.plan().total()));
    assert!(refusal.missing > 0 && second.to_string().contains(&refusal.missing.to_string()), "{second}");
    stop(first);
    // The engine's thread releases the lease a moment after its last message.
    let again = (0..200).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        launch("llama", &options, &host(&options)).ok()
    });
    stop(again.expect("the first one's place is free again"));
}

#[test]
fn e39_failed_allocation_spends_the_emergency_reserve_and_it_is_refilled() {
    own_process!();
    let options = exact();
    let mut host = Host::read(&options).unwrap();
    host.lease_dir = Some(memory_leases("emergency reserve"));
    let engine = launch("llama", &options, &host).unwrap();
    let emergency_reserve = || engine.ledger().row(Component::EmergencyReserve).committed;
    let (whole, said) = (emergency_reserve(), ask(&engine, greedy(&[1, 2, 3], 20)).ids);
    assert!(whole > 0 && heap::armed());
    let reader = engine.submit(greedy(&[5, 6, 7], 500)).unwrap();
    assert!(Vec::<u8>::new().try_reserve_exact(isize::MAX as usize).is_err());
    assert_eq!(crate::common::collect(reader).ids.len(), 500, "who runs does not notice");
    // The release is counted, and the emergency reserve is restored.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while engine.metrics().reserve_releases.get() == 0 || emergency_reserve() < whole {
        assert!(std::time::Instant::now() < deadline, "no emergency reserve again: {}", engine.report());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(ask(&engine, greedy(&[1, 2, 3], 20)).ids, said, "and admits again");
    assert_eq!(engine.report().degradation.reserve_blocks_released, 1);
    assert_eq!(engine.ledger().allocations().1, 0, "its place was in the plan");
    stop(engine);
}

#[test]
fn counts_never_decrease_when_engines_come_and_go() {
    own_process!();
    let options = Options { memory_budget: budget("800MiB"), hosted: true, ..exact() };
    let mut host = Host::read(&options).unwrap();
    host.lease_dir = Some(memory_leases("counts"));
    let engine_host = EngineHost::open(8 << 20, &host).unwrap();
    host =
        Host { limit: EngineHost::limit_in(engine_host.plan()), engine_host: Some(Arc::clone(&engine_host)), ..host };
    let counted = |report: LedgerReport| {
        let LedgerReport { requests, tokens, steps, device_allocations, .. } = report;
        [requests.finished, tokens.generated, steps, device_allocations.before_ready]
    };
    let first = launch("llama", &options, &host).unwrap();
    let second = launch("llama", &options, &host).unwrap();
    assert_eq!(ask(&first, greedy(&[1, 2, 3], 20)).ids.len(), 20);
    assert_eq!(ask(&second, greedy(&[1, 2, 3], 10)).ids.len(), 10);
    crate::common::quiet(&first);
    crate::common::quiet(&second);
    let before = counted(engine_host.report(&[&first, &second]));
    assert_eq!(before[..2], [2, 30]);
    // A server that unloads a model no longer names it, while its engine is still here.
    assert_eq!(counted(engine_host.report(&[&second])), before);
    assert_eq!(counted(engine_host.shared_report(&[&second]))[..2], [1, 20]);
    assert!(first.move_out(Duration::from_secs(20)));
    assert_eq!(counted(engine_host.report(&[&second])), before);
    // A caller that listed the engines before this one left still names it.
    assert_eq!(counted(engine_host.report(&[&first, &second])), before);
    drop(first);
    assert!(second.move_out(Duration::from_secs(20)));
    assert_eq!(counted(engine_host.report(&[])), before);
}

#[test]
fn a_line_that_holds_nothing_is_refused_with_the_shortfall() {
    own_process!();
    let options = Options { memory_budget: budget("100MiB"), max_total_token_num: None, ..exact() };
    let mut host = Host::read(&options).unwrap();
    host.lease_dir = Some(memory_leases("nothing"));
    let error = launch("llama", &options, &host).err().expect("too small").to_string();
    assert!(error.contains("short") && error.contains("largest component"), "{error}");
}

#[test]
fn what_fits_is_what_starts() {
    use plimsoll_engine::whatif::{Load, what_if};
    own_process!();
    let options = Options { max_total_token_num: None, ..exact() };
    let mut host = Host::read(&options).unwrap();
    (host.limit.bytes, host.lease_dir) = (225 << 20, Some(memory_leases("what-if")));
    let checkpoint = checkpoint("llama");
    let ask_for = |users, context| {
        what_if(&checkpoint, &options, host.threads, &host.limit, Load { users, context, images: 0, audio_seconds: 0 })
            .unwrap()
    };
    let answer = ask_for(1, 64);
    assert!(answer.fits && answer.users_max > 1, "{answer:?}");
    assert!(ask_for(answer.users_max, 64).fits && !ask_for(answer.users_max + 1, 64).fits);
    let users = answer.users_max as usize;
    let exactly = Options {
        graph_max_batch_size: users,
        running_max_req_size: users,
        batch_max_tokens: users.max(64),
        ..options.clone()
    };
    let exactly = Options { max_req_total_len: Some(64), max_total_token_num: Some(64 * answer.users_max), ..exactly };
    let planned = Blueprint::new(&checkpoint, &exactly).unwrap().plan(&exactly, host.threads, &host.limit).unwrap();
    let needed = ask_for(answer.users_max, 64).needed_bytes;
    assert_eq!(planned.plan.total(), needed, "I8");
    // A server for exactly that load starts under that line, plans that many bytes, and serves all users at once.
    let engine = start(&checkpoint, Arc::new(tokenizer()), &exactly, &host, |_| {}).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(engine.plan().total(), needed, "I8: the started engine");
    let reported = engine.report();
    assert_eq!(reported.components.iter().map(|row| row.planned_bytes).sum::<u64>(), needed, "I8: its ledger");
    let few = answer.users_max.min(32) as u32;
    let readers: Vec<_> = (0..few)
        .map(|i| engine.submit(greedy(&[i % 300, 1 + i % 7, 2], 61)).unwrap_or_else(|e| panic!("{e}")))
        .collect();
    for reader in readers {
        assert_eq!(crate::common::collect(reader).ids.len(), 61);
    }
    assert_eq!(engine.metrics().preemptions.get(), 0, "what fits needs no preemption");
    stop(engine);
    // One user more is refused by the planner and by the start alike.
    let beyond = Options {
        graph_max_batch_size: users + 1,
        running_max_req_size: users + 1,
        batch_max_tokens: (users + 1).max(64),
        max_total_token_num: Some(64 * (answer.users_max + 1)),
        ..exactly
    };
    let refused = start(&checkpoint, Arc::new(tokenizer()), &beyond, &host, |_| {}).err().expect("one too many");
    assert!(matches!(refused, StartError::Plan(_)), "{refused}");
}

#[test]
fn a_lone_configuration_of_a_large_model_is_answered_at_once() {
    use plimsoll_engine::MemoryLimit;
    use plimsoll_engine::whatif::{Load, what_if};
    own_process!();
    let file = fixtures().join("../../tools/configs/llama-70b.json");
    let checkpoint = Checkpoint::open(&file).unwrap();
    let line = MemoryLimit::of_budget(200 << 30, "a machine that is not this one");
    let answer = what_if(
        &checkpoint,
        &Options::default(),
        64,
        &line,
        Load { users: 8, context: 8192, images: 0, audio_seconds: 0 },
    )
    .unwrap();
    // 80 layers x 8 heads x 128 x keys and values x 2 bytes = 320 KiB a token; 131.4 GiB of weights in bfloat16.
    assert!((150 << 30..153 << 30).contains(&answer.needed_bytes), "{answer:?}");
    assert!(answer.fits && (20..30).contains(&answer.users_max), "{answer:?}");
    assert_eq!(answer.knobs[0].flag, "--kv-dtype");
    // A knob that admits no more users is not listed, such as half of the bytes for requests.
    assert!(answer.knobs.iter().all(|knob| knob.users_max > answer.users_max), "{answer:?}");
}
