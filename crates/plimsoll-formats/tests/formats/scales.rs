//! Second scales beside GGUF weights: their effect on values, and refusals.

use crate::common::{GgufWriter, seeing, seeing_model, values};
use crate::mmproj::Pair;
use plimsoll_formats::{Encoding, Mmproj, ScaleKind};

/// The number of NVFP4 in a file, and bytes of its block of 64 elements.
const NVFP4: (u32, usize) = (40, 36);
const Q8_0: u32 = 8;

/// A tensor of NVFP4 blocks of many codes and scales, none of them NaN.
fn add_nvfp4(writer: &mut GgufWriter, name: &str, dims: &[u64]) {
    writer.tensor(name, &[0]);
    let blocks = dims.iter().product::<u64>() as usize / 64;
    let (dims, bytes) = (dims.to_vec(), blocks * NVFP4.1);
    let tensor = writer.tensors.last_mut().expect("it was added");
    (tensor.1, tensor.2) = (dims, NVFP4.0);
    writer.data.extend((0..bytes).map(|at| match at % NVFP4.1 {
        0..4 => 0x30 + (at * 7 % 24) as u8,
        _ => (at * 31 % 251) as u8,
    }));
}

/// A tensor of these numbers in F32.
fn add_floats(writer: &mut GgufWriter, name: &str, numbers: &[f32]) {
    writer.tensor(name, &[numbers.len() as u64]);
    let start = writer.data.len() - 4 * numbers.len();
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
    writer.data.splice(start.., bytes);
}

/// A matrix of 4 outputs and 128 inputs, with these scales beside it.
fn matrix(scales: &[(&str, &[f32])]) -> GgufWriter {
    let mut writer = GgufWriter::new("llama");
    add_nvfp4(&mut writer, "blk.0.ffn_up.weight", &[128, 4]);
    scales.iter().for_each(|(name, numbers)| add_floats(&mut writer, name, numbers));
    writer
}

const UP: &str = "model.layers.0.mlp.up_proj.weight";
const EXPERTS: &str = "model.layers.0.mlp.experts.up_proj.weight";

#[test]
fn second_scale_multiplies_every_value() {
    let plain = matrix(&[]).open().expect("a weight without a second scale");
    let scales = [("blk.0.ffn_up.scale", &[0.75f32][..]), ("blk.0.ffn_up.input_scale", &[0.01])];
    let scaled = matrix(&scales).open().expect("a weight with one");
    // Codes, group scales and 0.75 have so few digits that these products are exact.
    let want: Vec<f32> = values(&plain, UP).iter().map(|value| value * 0.75).collect();
    assert_eq!(values(&scaled, UP), want);
    assert!(want.iter().any(|value| *value != 0.0));
    let info = scaled.tensor(UP).expect("it is there");
    assert!(matches!(info.encoding, Encoding::Quant(layout) if layout.scales == ScaleKind::F32));
    assert_eq!((info.bytes, scaled.raw(UP)), (8 * 36 + 4, None));
    assert_eq!(scaled.tensors().count(), 1, "scales are no tensors of their own");
}

#[test]
fn each_expert_has_its_own_second_scale() {
    let experts = |scales: Option<&[f32]>| {
        let mut writer = GgufWriter::new("qwen3moe");
        for key in ["expert_count", "expert_used_count", "expert_feed_forward_length"] {
            writer.u32(&format!("qwen3moe.{key}"), 2);
        }
        add_nvfp4(&mut writer, "blk.0.ffn_up_exps.weight", &[64, 3, 2]);
        scales.into_iter().for_each(|scales| add_floats(&mut writer, "blk.0.ffn_up_exps.scale", scales));
        writer
    };
    let plain = values(&experts(None).open().expect("experts without"), EXPERTS);
    let scaled = values(&experts(Some(&[0.5, 3.0])).open().expect("experts with"), EXPERTS);
    let want: Vec<f32> = (0..plain.len()).map(|at| plain[at] * if at < 3 * 64 { 0.5 } else { 3.0 }).collect();
    assert_eq!(scaled, want);
    let one_for_all = values(&experts(Some(&[0.5])).open().expect("one for all"), EXPERTS);
    assert_eq!(one_for_all, plain.iter().map(|value| value * 0.5).collect::<Vec<_>>());
    let refusal = experts(Some(&[0.5, 3.0, 1.0])).refusal();
    assert!(refusal.contains("it has 3 second scales, and 2 fit: one, or one an expert"), "{refusal}");
}

#[test]
fn second_scale_of_1_changes_nothing() {
    let mut writer = matrix(&[("blk.0.ffn_up.scale", &[1.0])]);
    writer.tensor("blk.0.ffn_down.weight", &[64, 2]);
    add_floats(&mut writer, "blk.0.ffn_down.scale", &[1.0]);
    let checkpoint = writer.open().expect("scales of 1");
    let info = checkpoint.tensor(UP).expect("it is there");
    assert!(matches!(info.encoding, Encoding::Quant(layout) if layout.scales == ScaleKind::Ue4m3Half));
    assert_eq!(values(&checkpoint, UP), values(&matrix(&[]).open().expect("none"), UP));
}

#[test]
fn second_scales_that_cannot_be_applied_are_refused_by_name() {
    let says = |writer: &GgufWriter, parts: &[&str]| {
        let refusal = writer.refusal();
        assert!(parts.iter().all(|part| refusal.contains(part)), "{refusal}");
    };
    let scale = "blk.0.ffn_up.scale";
    for number in [f32::NAN, f32::INFINITY, 1e37] {
        says(&matrix(&[(scale, &[number])]), &[UP, "of type NVFP4: its second scale is", "weights must be finite"]);
    }
    says(&matrix(&[(scale, &[2.0, 3.0])]), &[UP, "it has 2 second scales, and 1 fit"]);
    says(&matrix(&[(scale, &[2.0; 5])]), &[UP, "it has 5 second scales, and 1 fit"]);
    says(&matrix(&[(scale, &[2.0]), (scale, &[2.0])]), &["two tensors are named", UP]);
    let alone = "tensor \"model.layers.0.self_attn.q_proj.weight\" is missing, and its scale is there";
    says(&matrix(&[("blk.0.attn_q.scale", &[2.0])]), &[alone]);
    let mut quantized = matrix(&[]);
    add_nvfp4(&mut quantized, scale, &[64]);
    says(&quantized, &[UP, "its second scale is quantized"]);
    for (kind, bytes, name) in [(0, 4 * 64, "F32"), (Q8_0, 68, "Q8_0")] {
        let mut writer = GgufWriter::new("llama");
        writer.tensor("blk.0.ffn_up.weight", &[0]);
        (writer.tensors[0].1, writer.tensors[0].2) = (vec![64, 1], kind);
        writer.data.resize(bytes, 0);
        add_floats(&mut writer, scale, &[2.0]);
        says(&writer, &[UP, &format!("of type {name}: it has a second scale, which only NVFP4 weights may have")]);
    }
    // The architecture keeps this file from loading, whatever its tensors are.
    let mut bitnet = GgufWriter::new("bitnet");
    bitnet.tensor("blk.0.ffn_up.weight", &[64, 2]);
    add_floats(&mut bitnet, scale, &[2.0]);
    let opened = bitnet.open().map(|checkpoint| checkpoint.config.architecture.to_string());
    assert_eq!(opened.ok().as_deref(), Some("bitnet"));
}

#[test]
fn second_scales_of_encoders_are_refused_by_name() {
    let mut encoder = seeing("qwen3vl_merger");
    add_floats(&mut encoder, "v.blk.0.attn_out.scale", &[2.0]);
    let refusal = Pair::new(&seeing_model("qwen3vl"), &encoder).refusal(&Mmproj::Beside);
    assert!(refusal.contains("\"v.blk.0.attn_out.weight\" of type F32: it has a second scale"), "{refusal}");
}
