//! From a configuration alone: the memory that the largest published hybrid needs, and what is refused before anything is loaded.

mod common;

use std::path::Path;
use std::time::Instant;

use plimsoll_device::{Declare, DtypePolicy, KvDtype, PlanDevice, SeqSpan, StepInput};
use plimsoll_formats::Checkpoint;

const MIB: usize = 1 << 20;

fn config(name: &str) -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/configs").join(name);
    Checkpoint::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The shapes are those that public configurations and descriptions of Qwen3.5-122B-A10B agree on; the sections of the rotary
/// embedding and the end-of-text token, which change no size, are its smaller sisters'.
#[test]
fn a_hybrid_of_122_billion_is_planned_from_its_configuration() {
    let checkpoint = config("qwen3.5-122b-a10b.json");
    let begun = Instant::now();
    let built = |with_drafter| {
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let model = plimsoll_models::build(&checkpoint.config, &mut declare, with_drafter).unwrap();
        (model, declare.finish())
    };
    let (plain, weights) = built(false);
    let (drafting, more) = built(true);
    println!("declared twice in {:?}, {} matrices", begun.elapsed(), more.linears.len());

    let shape = plain.shape(KvDtype::F16);
    let state = shape.state.expect("a recurrent state");
    assert_eq!((shape.kv.layers, state.layers, shape.kv.kv_heads, shape.kv.head_dim), (12, 36, 2, 256));
    assert_eq!(drafting.shape(KvDtype::F16).kv.layers, 13, "the head's keys and values are one layer more");
    // 36 layers of 64 heads of 128 x 128 f32 are 144 MiB; three inputs of the convolution's 12,288 channels 5 MiB.
    assert_eq!(state.slot_bytes(), 36 * (64 * 128 * 128 * 4 + 3 * 12_288 * 4));
    assert_eq!(state.slot_bytes() / MIB, 149);

    // 122 billion weights of two bytes; the head has a layer of experts, too, but shares both ends.
    let billions = |bytes: usize| bytes as f64 / 2e9;
    assert!((121.0..123.5).contains(&billions(weights.bytes)), "{}", billions(weights.bytes));
    assert!((2.4..2.8).contains(&billions(more.bytes - weights.bytes)), "{}", billions(more.bytes - weights.bytes));

    assert!(more.host_bytes() < 24 * MIB, "the table takes {} bytes", more.host_bytes());

    // A verify step of one sequence: five rows.
    let seqs = [SeqSpan { first_row: 0, rows: 5, start: 0, pages_at: 0, pages: 1, seen_from: 0, state: Some(0) }];
    let step = StepInput {
        tokens: &[0; 5],
        positions: &[0, 1, 2, 3, 4],
        seqs: &seqs,
        pages: &[0],
        logit_rows: &[0, 1, 2, 3, 4],
        state_out: &[1, 2, 3, 4, 0],
        ..StepInput::default()
    };
    let mut device = PlanDevice::new(&more, drafting.shape(KvDtype::F16).kv);
    let output = drafting.forward(&mut device, &step).unwrap();
    drafting.drafter().unwrap().draft(&mut device, output.hidden, &[0, 1, 2, 3, 4], &step).unwrap();
    assert!(device.high_water() < 64 * MIB, "{} bytes of workspace", device.high_water());
}

#[test]
fn a_draft_head_that_is_not_there_is_refused_by_its_flag() {
    for (model, part) in [
        ("llama", "--enable-mtp needs a draft head, and Llama models have none"),
        ("qwen3-moe", "--enable-mtp needs a draft head, and Qwen3Moe models have none"),
        ("gguf-qwen3next-q8_0", "--enable-mtp needs a draft head, and the checkpoint has none"),
    ] {
        let checkpoint = common::checkpoint(model);
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        let refusal = plimsoll_models::build(&checkpoint.config, &mut declare, true).err().expect(model).to_string();
        assert!(refusal.contains(part), "{model}: {refusal}");
    }
}

#[test]
fn without_being_asked_for_no_draft_head_is_loaded() {
    let checkpoint = common::checkpoint("qwen3.5");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let model = plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    assert!(model.drafter().is_none());
    assert_eq!(model.shape(KvDtype::F32).kv.layers, 1);
    assert!(declare.finish().linears.iter().all(|linear| !linear.name.starts_with("mtp.")));
}
