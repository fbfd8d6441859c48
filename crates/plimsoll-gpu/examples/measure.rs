//! Measures a GPU, alone and with a model: `measure [MODEL] [--allow-software]`. Prints a table in Markdown.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plimsoll_device::{Declare, Device, DtypePolicy, KvDtype, LinearId, Mode, SeqSpan, StepInput, Target, ThreadPool};
use plimsoll_formats::Checkpoint;
use plimsoll_gpu::{Adapter, AdapterChoice, Context, GpuDevice, GpuMemory, GpuWeights, Sizes};
use plimsoll_kernels::PackKind;
use plimsoll_memory::{Component, Ledger};
use plimsoll_models::Model;
use serde_json::json;

/// Each operation is measured for about this many seconds.
const SECONDS: f64 = 0.5;
/// Rows of steps and products.
const ROWS: [usize; 4] = [1, 4, 16, 64];
/// Columns of the matrix that is copied.
const COPIED_COLUMNS: usize = 2048;
/// Bytes of the arena at most: more than caches hold.
const ARENA_MAX: u64 = 1 << 30;

/// Widths of a model of 8 billion weights in 4 bits, as Llama 3 has them.
const HIDDEN: usize = 4096;
const KV_WIDTH: usize = 1024;
const INNER: usize = 14336;
const VOCAB: usize = 128_256;
const GROUP: usize = 64;

/// Writes a checkpoint of that shape with `layers` layers, all of whose weights are 0: the file has holes and takes no disk.
fn synthetic(dir: &Path, layers: usize) -> std::io::Result<()> {
    let mut tensors: Vec<(String, &str, Vec<usize>)> = Vec::new();
    let mut quantized = |name: String, out: usize, k: usize| {
        tensors.push((format!("{name}.weight"), "U32", vec![out, k / 8]));
        tensors.push((format!("{name}.scales"), "BF16", vec![out, k / GROUP]));
        tensors.push((format!("{name}.biases"), "BF16", vec![out, k / GROUP]));
    };
    quantized("model.embed_tokens".into(), VOCAB, HIDDEN);
    quantized("lm_head".into(), VOCAB, HIDDEN);
    for layer in 0..layers {
        for (name, out, k) in [
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", KV_WIDTH, HIDDEN),
            ("self_attn.v_proj", KV_WIDTH, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ] {
            quantized(format!("model.layers.{layer}.{name}"), out, k);
        }
    }
    let norms = (0..layers).flat_map(|layer| {
        ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("model.layers.{layer}.{norm}"))
    });
    for name in norms.chain(["model.norm".into()]) {
        tensors.push((format!("{name}.weight"), "BF16", vec![HIDDEN]));
    }
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, dtype, shape) in tensors {
        let bytes = shape.iter().product::<usize>() * if dtype == "U32" { 4 } else { 2 };
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]}));
        at += bytes;
    }
    let header = serde_json::to_vec(&header)?;
    std::fs::create_dir_all(dir)?;
    let mut file = std::fs::File::create(dir.join("model.safetensors"))?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    file.set_len((8 + header.len() + at) as u64)?;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": false,
        "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001,
        "quantization": {"bits": 4, "group_size": GROUP},
    });
    std::fs::write(dir.join("config.json"), config.to_string())
}

/// Seconds that one run of `what` takes, which does so many of something.
fn seconds(each: usize, mut what: impl FnMut()) -> f64 {
    what();
    let (start, mut runs) = (Instant::now(), 0);
    while start.elapsed().as_secs_f64() < SECONDS {
        what();
        runs += 1;
    }
    start.elapsed().as_secs_f64() / (runs * each) as f64
}

fn dispatches(device: &mut GpuDevice, arena: usize) {
    device.begin_step();
    let (x, y) = (device.temp(1, 64).expect("room"), device.temp(1, 64).expect("room"));
    let cost = seconds(500, || {
        (0..500).for_each(|_| device.add(x, y));
        device.finish(&[]).expect("a step");
    });
    println!("| dispatch | 500 a step | {:.2} µs |", cost * 1e6);
    device.begin_step();
    let rows = arena / 4 / size_of::<f32>() / COPIED_COLUMNS;
    let mut matrix = || device.temp(rows, COPIED_COLUMNS).expect("room");
    let (x, y) = (matrix(), matrix());
    let cost = seconds(4, || {
        (0..4).for_each(|_| device.take(y, x, 0));
        device.finish(&[]).expect("a step");
    });
    let each = x.bytes() >> 20;
    println!("| copy of {each} MiB | reads and writes | {:.1} GB/s |", 2.0 * x.bytes() as f64 / cost / 1e9);
}

fn products(device: &mut GpuDevice, of: &[(LinearId, PackKind, usize, usize, usize)], most_rows: usize) {
    for (id, kind, out, k, bytes) in of {
        for rows in ROWS.into_iter().chain([512]).filter(|rows| *rows <= most_rows) {
            device.begin_step();
            let (x, y) = (device.temp(rows, *k).expect("room"), device.temp(rows, *out).expect("room"));
            let cost = seconds(4, || {
                (0..4).for_each(|_| device.linear(x, &[(*id, y)], Mode::Store).expect("a product"));
                device.finish(&[]).expect("a step");
            });
            let (read, work) = (*bytes as f64 / cost / 1e9, 2.0 * (rows * out * k) as f64 / cost / 1e12);
            let each = cost * 1e3;
            println!(
                "| product {out} x {k}, {kind:?} | {rows} rows | {each:.2} ms, {read:.1} GB/s, {work:.3} TFLOP/s |"
            );
        }
    }
}

fn steps(device: &mut GpuDevice, model: &dyn Model, most_rows: usize) {
    for rows in ROWS.into_iter().filter(|rows| *rows <= most_rows) {
        let span = |row: usize| SeqSpan {
            first_row: row,
            rows: 1,
            start: 63,
            pages_at: 4 * row,
            pages: 4,
            seen_from: 0,
            state: None,
        };
        let seqs: Vec<SeqSpan> = (0..rows).map(span).collect();
        let (tokens, positions, wanted) = (vec![1; rows], vec![63; rows], (0..rows as u32).collect::<Vec<_>>());
        let pages: Vec<u32> = (0..4 * rows as u32).collect();
        let step = StepInput {
            tokens: &tokens,
            positions: &positions,
            seqs: &seqs,
            pages: &pages,
            window_pages: &pages,
            logit_rows: &wanted,
            only_logits: true,
            ..StepInput::default()
        };
        let cost = seconds(1, || {
            device.begin_step();
            let output = model.forward(device, &step).expect("a step");
            device.finish(&[output.logits]).expect("a step");
        });
        println!("| step at position 63 | {rows} rows | {:.1} ms, {:.1} tokens/s |", cost * 1e3, rows as f64 / cost);
    }
}

/// Prints the driver's description of the adapter.
fn features(adapter: &Adapter) {
    println!("{}\n\n| what | how | result |\n| --- | --- | --- |", adapter.name());
    println!("| buffer at most | | {} MiB |", adapter.limits().buffer >> 20);
    println!("| features | | {} |", adapter.features().join(", "));
    let memory = match (adapter.shares_memory(), adapter.memory()) {
        (true, None) => "shares the machine's".into(),
        (shares, memory) => {
            let words = memory.map_or("not said".into(), |memory| match memory.budget {
                Some([budget, used]) => {
                    let [total, budget, used] = [memory.total, budget, used].map(|bytes| bytes >> 20);
                    format!("{total} MiB, of which this process may use {budget} MiB and holds {used} MiB")
                }
                None => format!("{} MiB; the driver does not say what is free", memory.total >> 20),
            });
            if shares { format!("shares the machine's: {words}") } else { words }
        }
    };
    println!("| memory | | {memory} |");
}

/// Loads a model and measures its products and steps; `first` says what the device itself does, too.
fn measure(adapter: &Adapter, path: &Path, first: bool, most_rows: usize) {
    let checkpoint = Checkpoint::open(path).expect("a model");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).expect("a model");
    let table = declare.finish().on(Target::Gpu);
    let ledger = Arc::new(Ledger::new());
    Component::ALL.iter().for_each(|component| ledger.plan(*component, 1 << 40));
    let mut context = Context::open(adapter).expect("an open device");
    let mut pool = ThreadPool::new(std::thread::available_parallelism().map_or(1, usize::from)).expect("threads");
    let start = Instant::now();
    let weights =
        GpuWeights::load_unless(&mut context, table.clone(), &checkpoint, &ledger, &mut pool, |_| {}, || false);
    let weights = weights.expect("weights");
    let loaded = table.bytes as f64 / start.elapsed().as_secs_f64() / 1e6;
    println!("| loading | {} MiB | {loaded:.0} MB/s |", table.bytes >> 20);
    let shape = model.shape(KvDtype::F16);
    let arena = (adapter.limits().buffer - (8 << 20)).min(ARENA_MAX) as usize;
    let (upload, readback) = (4 << 20, 64 << 20);
    let sizes = Sizes { pages: [256; 2], slots: 64, arena, upload, readback, calls: 1 << 15, outputs: 64 };
    let start = Instant::now();
    let memory = GpuMemory::new(&mut context, &ledger, &shape, sizes).expect("memory");
    println!("| buffers and kernels | | {:.0} ms |", start.elapsed().as_secs_f64() * 1e3);
    let mut device = GpuDevice::new(context, weights, memory);
    // The largest matrix of every packing.
    let mut largest: Vec<(LinearId, PackKind, usize, usize, usize)> = Vec::new();
    for (id, linear) in table.ids().zip(&table.linears) {
        let packing = linear.packing;
        let own = (id, packing.kind(), packing.out(), packing.k(), packing.bytes());
        match largest.iter_mut().find(|other| other.1 == own.1) {
            Some(other) if other.4 < own.4 => *other = own,
            Some(_) => {}
            None => largest.push(own),
        }
    }
    if first {
        dispatches(&mut device, arena);
    }
    products(&mut device, &largest, most_rows);
    let before = device.context().allocated();
    steps(&mut device, &*model, most_rows);
    println!("| memory taken by steps | | {} |", if device.context().allocated() == before { "none" } else { "some" });
}

fn main() {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let allow_software = args.iter().any(|arg| arg == "--allow-software");
    args.retain(|arg| arg != "--allow-software");
    let adapter =
        Adapter::find(AdapterChoice { index: None, allow_software }).unwrap_or_else(|error| panic!("{error}"));
    features(&adapter);
    let software = adapter.is_software();
    let most_rows = if software { 64 } else { 512 };
    if let Some(model) = args.first() {
        measure(&adapter, Path::new(model), true, most_rows);
    }
    let layers = if software { 1 } else { 32 };
    if software {
        println!("| 8B in 4 bits | | 1 of 32 layers, 1 row: software is too slow for more |");
    } else {
        println!("| 8B in 4 bits | | 32 layers |");
    }
    let dir = std::env::temp_dir().join(format!("plimsoll-synthetic-{}", std::process::id()));
    let made = synthetic(&dir, layers);
    if let Err(error) = &made {
        println!("| 8B in 4 bits | | skipped: {error} |");
    } else {
        measure(&adapter, &dir, args.is_empty(), if software { 1 } else { 64 });
    }
    std::fs::remove_dir_all(&dir).ok();
}
