//! Plans for an imagined GPU: only the size of its buffers is given.

use std::path::Path;

use plimsoll_device::{ComputeDtype, Isa, PAGE_TOKENS};
use plimsoll_formats::Checkpoint;
use plimsoll_memory::Component;

use crate::api::options::{DeviceChoice, Options};
use crate::plan::what_if::{Load, what_if};
use crate::plan::{Blueprint, EnginePlan, GpuLimit, MemoryLimit, OwnMemory, PlanError};

fn plan(model: &str, buffer: u64, options: Options) -> Result<EnginePlan, PlanError> {
    plan_with(model, (buffer, None), 600 << 20, options)
}

fn checkpoint(model: &str) -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(model);
    Checkpoint::open(&path).unwrap()
}

/// Returns a limit with this much GPU memory, in buffers of at most this many bytes, and this much of the machine's memory.
fn line((buffer, own): (u64, Option<u64>), machine: u64) -> MemoryLimit {
    let own = own.map(|bytes| OwnMemory { bytes, source: "the GPU's driver".into() });
    let gpu = GpuLimit { name: "a GPU".into(), buffer, software: false, own, working_set: None };
    MemoryLimit { gpu: Some(Ok(gpu)), ..MemoryLimit::of_budget(machine, "a test") }
}

fn plan_with(model: &str, gpu: (u64, Option<u64>), machine: u64, options: Options) -> Result<EnginePlan, PlanError> {
    let options = Options { device: DeviceChoice::Gpu(None), ..options };
    Blueprint::new(&checkpoint(model), &options)?.plan(&options, 2, &line(gpu, machine))
}

#[test]
fn plan_has_the_weights_the_step_and_the_driver_of_a_gpu() {
    let options = Options { max_total_token_num: Some(2048), batch_max_tokens: 64, ..Options::default() };
    let planned = plan("llama", 128 << 20, options).unwrap();
    let gpu = planned.gpu.as_ref().unwrap();
    assert_eq!(planned.plan.bytes(Component::Weights), gpu.weights);
    assert_eq!(planned.plan.bytes(Component::StepWorkspace), gpu.workspace() as u64);
    assert!(planned.plan.bytes(Component::ProcessBaseline) > gpu.driver());
    let words = planned.plan.to_string();
    assert!(words.contains("on the GPU") && words.contains("for the driver of a GPU"), "{words}");
}

#[test]
fn memory_of_a_gpu_and_of_the_machine_are_two_lines() {
    let options = || Options { batch_max_tokens: 64, ..Options::default() };
    let planned = plan_with("llama", (128 << 20, Some(480 << 20)), 600 << 20, options()).unwrap();
    let plan = &planned.plan;
    let on_device = [Component::Weights, Component::KvPages, Component::StepWorkspace, Component::DeviceReserve];
    let sum: u64 = on_device.iter().map(|component| plan.bytes(*component)).sum();
    assert_eq!(plan.device_total(), sum);
    assert!(sum <= 480 << 20 && plan.total() <= 600 << 20, "{plan}");
    assert_eq!(plan.total() + sum, plan.lines.iter().map(|line| line.bytes).sum::<u64>());
    assert_eq!(plan.bytes(Component::Transfers), planned.gpu.as_ref().unwrap().transfers() as u64);
    assert!(plan.to_string().contains("GPU memory limit") && plan.to_string().contains("the GPU's driver"), "{plan}");
    // The pool fills the GPU, whatever the machine has.
    let least = match plan_with("llama", (128 << 20, Some(385 << 20)), 600 << 20, options()) {
        Err(PlanError::DoesNotFit(shortfall)) => shortfall.needed,
        other => panic!("{:?}", other.map(|planned| planned.plan)),
    };
    let pages = |own, machine| plan_with("llama", (128 << 20, Some(own)), machine, options()).unwrap().pages;
    let [small, larger] = [4 << 20, 16 << 20].map(|more| pages(least + more, 600 << 20));
    assert!(small < larger && larger < planned.pages, "{small} {larger} {}", planned.pages);
    assert_eq!(pages(least + (4 << 20), 900 << 20), small);
}

/// A GPU that shares the machine's memory, of which its driver recommends a part, uses no more of it.
#[test]
fn a_recommended_working_set_is_a_limit_of_the_gpus_part() {
    let options = Options { device: DeviceChoice::Gpu(None), batch_max_tokens: 64, ..Options::default() };
    let planned = |working_set: u64| {
        let mut line = line((128 << 20, None), 600 << 20);
        if let Some(Ok(gpu)) = &mut line.gpu {
            gpu.working_set = Some(working_set);
        }
        Blueprint::new(&checkpoint("llama"), &options).unwrap().plan(&options, 2, &line)
    };
    let on_gpu = |planned: &EnginePlan| {
        planned.plan.lines.iter().filter(|line| line.component.on_device()).map(|line| line.bytes).sum::<u64>()
    };
    let [small, large, most] = [24 << 20, 48 << 20, 1 << 40].map(|bytes| planned(bytes).unwrap());
    assert!(on_gpu(&small) <= 24 << 20 && on_gpu(&large) <= 48 << 20, "{}\n{}", small.plan, large.plan);
    assert!(small.pages < large.pages && large.pages < most.pages, "{} {} {}", small.pages, large.pages, most.pages);
    assert!(small.plan.limit_source.contains("24.0 MiB that a GPU recommends"), "{}", small.plan.limit_source);
    assert_eq!((most.plan.limit, &*most.plan.limit_source), (600 << 20, "a test"), "the machine has less");
    let error = planned(1 << 20).err().expect("too little").to_string();
    assert!(error.contains("that the GPU may use (on a Mac: sudo sysctl iogpu.wired_limit_mb="), "{error}");
    // The limit that the error names is enough, and a megabyte less is not.
    let enough = error.split("iogpu.wired_limit_mb=").nth(1).and_then(|rest| rest.split(')').next()).unwrap();
    let enough: u64 = enough.parse().unwrap();
    assert!(planned(enough << 20).is_ok() && planned((enough - 1) << 20).is_err(), "{error}");
}

#[test]
fn what_is_short_is_said_of_the_memory_where_it_is_short() {
    let options = || Options { batch_max_tokens: 64, ..Options::default() };
    let short = |own, machine| match plan_with("llama", (128 << 20, Some(own)), machine, options()) {
        Err(PlanError::DoesNotFit(shortfall)) => shortfall,
        other => panic!("{:?}", other.map(|planned| planned.plan)),
    };
    let on_gpu = short(390 << 20, 600 << 20);
    assert!(on_gpu.limit == 390 << 20 && on_gpu.to_string().contains("a GPU with"), "{on_gpu}");
    let enough = on_gpu.needed;
    plan_with("llama", (128 << 20, Some(enough)), 600 << 20, options()).unwrap();
    let on_host = short(480 << 20, 200 << 20);
    assert!(on_host.limit == 200 << 20 && on_host.to_string().contains("--memory-budget"), "{on_host}");
}

/// `--users` and `--context` ask both memories, and what fits is what is planned.
#[test]
fn users_are_planned_on_a_gpu_with_memory_of_its_own() {
    let options = Options { device: DeviceChoice::Gpu(None), batch_max_tokens: 64, ..Options::default() };
    for model in ["llama", "qwen3.5", "gemma3"] {
        let checkpoint = checkpoint(model);
        let ask = |gpu: (u64, u64), machine, users| {
            let load = Load { users, context: 256, images: 0, audio_seconds: 0 };
            what_if(&checkpoint, &options, 2, &line((gpu.0, Some(gpu.1)), machine), load).unwrap()
        };
        let (roomy, small) = (ask((128 << 20, 480 << 20), 600 << 20, 2), ask((128 << 20, 450 << 20), 600 << 20, 2));
        let there = roomy.device.expect("the GPU's own memory");
        assert!(roomy.fits && there.limit_bytes == 480 << 20 && roomy.limit_bytes == 600 << 20, "{roomy:?}");
        assert_eq!(
            small.device.unwrap().needed_bytes,
            there.needed_bytes,
            "{model}: what it needs does not depend on it"
        );
        assert!(small.users_max < roomy.users_max && small.users_max > 0, "{model}: {small:?} {roomy:?}");
        for answer in [&roomy, &small] {
            let limit = answer.device.unwrap().limit_bytes;
            let [most, more] = [0, 1].map(|more| ask((128 << 20, limit), 600 << 20, answer.users_max + more));
            assert!(most.fits && !more.fits, "{model}: {most:?} {more:?}");
        }
        // The machine's memory can be short, and so can the largest buffer.
        let on_host = ask((128 << 20, 480 << 20), roomy.needed_bytes - 1, 2);
        assert!(!on_host.fits && on_host.needed_bytes == roomy.needed_bytes, "{model}: {on_host:?}");
        let in_buffers = ask((4 << 20, 480 << 20), 600 << 20, 2);
        assert!(in_buffers.users_max < roomy.users_max, "{model}: {in_buffers:?}");
    }
}

#[test]
fn flags_for_what_does_not_compute_are_said() {
    let options = Options { isa: Some(Isa::Portable), batch_max_tokens: 64, ..Options::default() };
    let planned = plan("llama", 128 << 20, options).unwrap();
    assert!(
        planned.idle_flags.contains(&"--isa changes nothing: --device is a GPU".into()),
        "{:?}",
        planned.idle_flags
    );
}

#[test]
fn no_layer_of_the_pool_is_larger_than_a_buffer() {
    let layer = |planned: &EnginePlan| planned.kv.layers().iter().map(|layer| layer.bytes()).max().unwrap();
    let planned = plan("llama", 4 << 20, Options { batch_max_tokens: 64, ..Options::default() }).unwrap();
    assert!(planned.pages * layer(&planned) <= 4 << 20, "{} pages", planned.pages);
    let tokens = (planned.pages * PAGE_TOKENS) as u64;
    let asked = Options { max_total_token_num: Some(64 * tokens), batch_max_tokens: 64, ..Options::default() };
    assert!(matches!(plan("llama", 4 << 20, asked), Err(PlanError::DoesNotFit(_))));
}

#[test]
fn what_encoders_take_is_part_of_the_plan() {
    let options = || {
        let rows =
            Options { batch_max_tokens: 32, graph_max_batch_size: 8, running_max_req_size: 8, ..Options::default() };
        let media = Options { max_image_pixels: Some(8192), max_video_frames: Some(8), ..rows };
        Options { max_audio_seconds: Some(5), media_bytes: 4 << 20, ..media }
    };
    for model in
        ["vl-qwen2", "vl-qwen2.5", "vl-qwen3", "vl-qwen3.5", "vl-gemma3", "vl-gemma4-audio", "vl-intern", "asr", "omni"]
    {
        let planned = plan(model, 128 << 20, options()).unwrap_or_else(|error| panic!("{model}: {error}"));
        let (gpu, media) = (planned.gpu.as_ref().unwrap(), planned.media.as_ref().unwrap());
        let needs = [media.workspace, 4 * media.transfers.upload, 4 * media.transfers.output];
        let has = [gpu.arena, gpu.upload, gpu.readback];
        assert!(needs.iter().zip(has).all(|(need, has)| *need > 0 && *need <= has), "{model}: {needs:?} of {has:?}");
        assert!(gpu.calls >= media.transfers.calls.plain && media.transfers.calls.plain > 0, "{model}");
        // Half the batch sends half as much.
        let two = Options { visual_infer_batch_size: 2, ..options() };
        let more = plan(model, 128 << 20, two).unwrap().media.unwrap().transfers;
        assert_eq!((more.upload, more.output), (2 * media.transfers.upload, 2 * media.transfers.output), "{model}");
    }
    let planned = plan("vl-qwen2.5", 128 << 20, options()).unwrap();
    let error = plan("vl-qwen2.5", planned.media.unwrap().workspace as u64 - 1, options()).err().unwrap().to_string();
    assert!(error.contains("--max-image-pixels is too large for a GPU: an encoder's temporaries take"), "{error}");
}

/// A pass that drafts may ask for more than the model's own, and the plan has room for it.
#[test]
fn draft_passes_are_part_of_the_plan() {
    let few = || Options { graph_max_batch_size: 8, running_max_req_size: 8, ..Options::default() };
    let options = || Options { batch_max_tokens: 64, ..few() };
    let planned = |checkpoint: &Checkpoint, options: Options| {
        let options = Options { device: DeviceChoice::Gpu(None), ..options };
        let line = line((128 << 20, None), 600 << 20);
        let planned = Blueprint::new(checkpoint, &options).unwrap().plan(&options, 2, &line);
        planned.unwrap_or_else(|error| panic!("{error}"))
    };
    let with_draft = |draft: &str| checkpoint("llama").with_draft(checkpoint(draft)).unwrap();
    let beside = || Options { draft_model: Some("a model".into()), ..options() };
    let gpu = |planned: &EnginePlan| planned.gpu.clone().unwrap();
    let alone = gpu(&planned(&checkpoint("llama"), options()));
    // Offsets for three layers; the model has two.
    let deeper = gpu(&planned(&with_draft("llama-tied"), beside()));
    assert!(deeper.calls > alone.calls && deeper.weights > alone.weights, "{deeper:?} {alone:?}");
    for model in ["qwen3.5", "qwen3-next", "glm4-moe", "glm4.7-flash", "deepseek-v3"] {
        let plain = planned(&checkpoint(model), options());
        let head = Options { enable_mtp: true, mtp_num_draft_tokens: 3, ..options() };
        let drafting = planned(&checkpoint(model), head);
        assert_eq!(drafting.kv.layers().len(), plain.kv.layers().len() + 1, "{model}");
        let [drafting, plain] = [gpu(&drafting), gpu(&plain)];
        assert!(drafting.weights > plain.weights && drafting.arena > plain.arena, "{model}: {drafting:?} {plain:?}");
        assert!(drafting.readback > plain.readback && drafting.outputs > plain.outputs, "{model}");
    }
}

#[test]
fn what_a_gpu_does_not_serve_is_refused_by_name() {
    let usual = Options::default;
    for (model, options, words) in [
        ("gptq-llama-actorder", usual(), "columns ordered by activation"),
        ("llama", Options { elastic: true, ..usual() }, "--elastic"),
        ("llama", Options { hosted: true, ..usual() }, "one model alone"),
        ("llama", Options { compute_dtype: ComputeDtype::Int8, ..usual() }, "--compute-dtype"),
        ("llama", Options { batch_max_tokens: 1 << 16, ..usual() }, "--batch-max-tokens is too large for a GPU"),
    ] {
        let error = plan(model, 16 << 20, options).err().unwrap_or_else(|| panic!("{model}: {words}")).to_string();
        assert!(error.contains(words), "{model}: {error}");
    }
    for model in
        ["llama", "qwen2", "gemma3", "qwen3-moe", "gpt-oss", "qwen3.5", "lfm2", "granite4-h", "nemotron-h", "bert"]
    {
        plan(model, 128 << 20, usual()).unwrap_or_else(|error| panic!("{model}: {error}"));
    }
}
