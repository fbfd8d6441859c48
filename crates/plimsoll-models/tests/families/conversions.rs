//! Checkpoints of vision models after a conversion: without their encoder, under other names, with transposed convolutions. Also the plan
//! from a configuration alone.

use std::path::{Path, PathBuf};

use crate::common::{Part, Rig, folder};
use plimsoll_device::{Declare, DtypePolicy, WeightTable};
use plimsoll_formats::Checkpoint;
use plimsoll_models::{EncoderKind, Grid};
use serde_json::{Map, Value, json};

/// A directory that is removed when the value is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A tensor of a file.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// A fixture with its tensors changed, or left out.
fn converted(model: &str, what: &str, change: impl Fn(Tensor) -> Vec<Tensor>) -> Folder {
    let to = Folder(std::env::temp_dir().join(format!("plimsoll-{model}-{what}-{}", std::process::id())));
    std::fs::create_dir_all(&to.0).unwrap();
    std::fs::copy(folder(model).join("config.json"), to.0.join("config.json")).unwrap();
    let file = std::fs::read(folder(model).join("model.safetensors")).unwrap();
    let head_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let head: Map<String, Value> = serde_json::from_slice(&file[8..8 + head_len]).unwrap();
    let (mut written, mut data): (Map<String, Value>, Vec<u8>) = Default::default();
    for (name, info) in head.into_iter().filter(|(name, _)| name != "__metadata__") {
        let numbers = |key: &str| -> Vec<usize> {
            info[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
        };
        let span = numbers("data_offsets");
        let bytes = file[8 + head_len..][span[0]..span[1]].to_vec();
        let dtype = if info["dtype"] == "F32" { "F32" } else { "BF16" };
        for tensor in change(Tensor { name, dtype, shape: numbers("shape"), data: bytes }) {
            let from = data.len();
            data.extend(tensor.data);
            let info = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [from, data.len()] });
            written.insert(tensor.name, info);
        }
    }
    let mut head = serde_json::to_vec(&written).unwrap();
    head.resize(head.len().next_multiple_of(8), b' ');
    let file = [&(head.len() as u64).to_le_bytes()[..], &head, &data].concat();
    std::fs::write(to.0.join("model.safetensors"), file).unwrap();
    to
}

/// Moves the channels of a convolution's weights last, as MLX stores them.
fn turned(tensor: Tensor) -> Tensor {
    let (out, channels, points) = (tensor.shape[0], tensor.shape[1], tensor.shape[2..].iter().product::<usize>());
    let value = |o: usize, c: usize, p: usize| &tensor.data[2 * ((o * channels + c) * points + p)..][..2];
    let all = (0..out).flat_map(|o| (0..points).flat_map(move |p| (0..channels).map(move |c| (o, c, p))));
    let data = all.flat_map(|(o, c, p)| value(o, c, p).to_vec()).collect();
    let shape = [&[out], &tensor.shape[2..], &[channels]].concat();
    Tensor { data, shape, ..tensor }
}

/// MLX's affine quantization to 8 bits in groups of 32: codes, scales, offsets.
fn quantized(tensor: Tensor) -> Vec<Tensor> {
    let float = |bytes: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
    let values: Vec<f32> = tensor.data.chunks_exact(2).map(float).collect();
    let (mut codes, mut scales, mut biases) = (Vec::new(), Vec::<u8>::new(), Vec::<u8>::new());
    for group in values.chunks_exact(32) {
        let (low, high) = group.iter().fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(*x), high.max(*x)));
        let scale = ((high - low) / 255.0).max(1e-8);
        codes.extend(group.iter().map(|x| ((x - low) / scale).round() as u8));
        scales.extend(scale.to_le_bytes());
        biases.extend(low.to_le_bytes());
    }
    let (out, k) = (tensor.shape[0], tensor.shape[1]);
    let module = tensor.name.strip_suffix(".weight").unwrap();
    let part = |leaf: &str, dtype, cols, data| Tensor {
        name: format!("{module}.{leaf}"),
        dtype,
        shape: vec![out, cols],
        data,
    };
    vec![
        part("weight", "U32", k / 4, codes),
        part("scales", "F32", k / 32, scales),
        part("biases", "F32", k / 32, biases),
    ]
}

#[test]
fn a_quantized_encoder_is_nearly_the_same() {
    let model = "vl-qwen2.5";
    let path = converted(model, "quantized", |tensor| {
        let matrix = tensor.shape.len() == 2 && tensor.shape[1].is_multiple_of(32);
        if matrix && tensor.name.starts_with("visual.") { quantized(tensor) } else { vec![tensor] }
    });
    let config = std::fs::read_to_string(path.0.join("config.json")).unwrap();
    let mut config: Map<String, Value> = serde_json::from_str(&config).unwrap();
    let floats = ["model.embed_tokens", "lm_head"].into_iter().map(String::from);
    let layers = (0..2).flat_map(|layer| {
        let parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
        let parts = parts.into_iter().chain(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]);
        parts.map(move |part| format!("model.layers.{layer}.{part}"))
    });
    let mut quantization: Map<String, Value> = floats.chain(layers).map(|name| (name, json!(false))).collect();
    quantization.extend([("bits".to_owned(), json!(8)), ("group_size".to_owned(), json!(32))]);
    config.insert("quantization".to_owned(), Value::Object(quantization));
    std::fs::write(path.0.join("config.json"), serde_json::to_vec(&config).unwrap()).unwrap();

    let grid = Grid { frames: 1, height: 8, width: 6 };
    let patches: Vec<f32> = (0..48 * 96).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let own = Rig::new(model, false).encode(EncoderKind::Vision, &[grid], &patches);
    let mut rig = Rig::at(&path.0, false, DtypePolicy::Auto);
    let stored = rig.encode(EncoderKind::Vision, &[grid], &patches);
    let largest = own.iter().flatten().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let apart = own.iter().flatten().zip(stored.iter().flatten()).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    println!("8 bits move the output by {apart} of {largest}");
    assert!(apart > 0.0 && apart < 0.03 * largest, "{apart} of {largest}");
    assert_eq!(text(&mut rig), text(&mut Rig::with(model, false, DtypePolicy::Auto)));
}

fn text(rig: &mut Rig) -> Vec<Vec<f32>> {
    rig.step(&[Part::new(&[5, 80, 200, 17, 99, 301], 0, None, 0)])
}

#[test]
fn a_conversion_without_the_encoder_serves_text() {
    for model in ["vl-qwen3.5", "vl-qwen2.5"] {
        let path = converted(model, "text", |tensor| match tensor.name.contains("visual.") {
            true => Vec::new(),
            false => vec![tensor],
        });
        let mut rig = Rig::at(&path.0, false, DtypePolicy::F32);
        assert!(rig.model.vision().is_none(), "{model}: no encoder");
        assert!(rig.shape.encoder.is_none());
        assert_eq!(text(&mut rig), text(&mut Rig::new(model, false)), "{model}");
    }
}

#[test]
fn an_encoder_under_other_names_with_its_convolution_turned_is_the_same() {
    let model = "vl-qwen3";
    let path = converted(model, "mlx", |tensor| {
        let name = tensor.name.replace("model.visual.", "vision_tower.");
        let tensor = Tensor { name: name.replace("model.language_model.", "language_model.model."), ..tensor };
        vec![if tensor.name.ends_with("patch_embed.proj.weight") { turned(tensor) } else { tensor }]
    });
    let (mut rig, mut own) = (Rig::at(&path.0, false, DtypePolicy::F32), Rig::new(model, false));
    let grid = Grid { frames: 1, height: 6, width: 4 };
    let patches: Vec<f32> = (0..24 * 96).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    assert_eq!(rig.encode(EncoderKind::Vision, &[grid], &patches), own.encode(EncoderKind::Vision, &[grid], &patches));
    assert_eq!(text(&mut rig), text(&mut own));
}

/// Returns stacked experts of Qwen3-VL-MoE with `width` wide experts. They are published with inputs first; with `turned`, outputs come
/// first.
fn experts(tensor: Tensor, width: usize, turned: bool) -> Tensor {
    let [experts, rows, columns] = tensor.shape[..] else { return tensor };
    // The fixture's experts are 24 wide: narrower ones are cut, wider ones repeat.
    let gate_up = tensor.name.ends_with("gate_up_proj");
    let (new_rows, new_columns) = if gate_up { (rows, 2 * width) } else { (width, columns) };
    let source = |row: usize, column: usize| match gate_up {
        true => (row, column / width * 24 + column % width % 24),
        false => (row % 24, column),
    };
    let value = |expert: usize, row: usize, column: usize| {
        let (row, column) = source(row, column);
        tensor.data[2 * ((expert * rows + row) * columns + column)..][..2].to_vec()
    };
    let (outer, inner) = if turned { (new_columns, new_rows) } else { (new_rows, new_columns) };
    let mut data = Vec::new();
    for (expert, a, b) in (0..experts).flat_map(|e| (0..outer).flat_map(move |a| (0..inner).map(move |b| (e, a, b)))) {
        data.extend(if turned { value(expert, b, a) } else { value(expert, a, b) });
    }
    Tensor { data, shape: vec![experts, outer, inner], ..tensor }
}

/// transformers 5.24 and later save experts with outputs first. At a width of 16, `gate_up_proj` is square, at 32 `down_proj`.
#[test]
fn experts_with_outputs_first_are_those_with_inputs_first() {
    let model = "vl-qwen3-moe";
    let of = |what: &str, width: usize, turned: fn(&str) -> bool| {
        let path = converted(model, &format!("{what}-{width}"), |tensor| {
            let stacked = tensor.name.contains(".experts.");
            let turned = turned(&tensor.name);
            vec![if stacked { experts(tensor, width, turned) } else { tensor }]
        });
        let config = std::fs::read_to_string(path.0.join("config.json")).unwrap();
        let width = format!(r#""moe_intermediate_size": {width}"#);
        let config = config.replace(r#""moe_intermediate_size": 24"#, &width);
        std::fs::write(path.0.join("config.json"), config).unwrap();
        text(&mut Rig::at(&path.0, false, DtypePolicy::F32))
    };
    assert_eq!(of("published", 24, |_| false), text(&mut Rig::new(model, false)));
    for width in [24, 16, 32] {
        assert_eq!(of("saved", width, |_| true), of("published", width, |_| false), "{width}");
    }
    // The order of each tensor is told by its shape, if the shape is not square.
    assert_eq!(of("mixed", 24, |name| name.ends_with("down_proj")), of("published", 24, |_| false));
}

/// Returns the declared weights of a checkpoint or a configuration.
fn table(path: &Path) -> WeightTable {
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    declare.finish()
}

/// `norm_type` of InternVL's encoder concerns its layers. In transformers the norm after the last layer is `nn.LayerNorm` in any case.
#[test]
fn the_norm_behind_the_last_layer_subtracts_the_mean_whatever_those_of_the_layers_do() {
    let model = "vl-intern-rms";
    // A norm with a weight of 0 returns its bias, of which the projector makes the same row for every input.
    let rows = |what: &str, bias: fn(usize) -> u16| {
        let norm = |leaf: &str, value: &dyn Fn(usize) -> u16| {
            let data = (0..24).flat_map(|i| value(i).to_le_bytes()).collect();
            Tensor { name: format!("vision_tower.layernorm.{leaf}"), dtype: "BF16", shape: vec![24], data }
        };
        let path = converted(model, what, |tensor| match tensor.name.as_str() {
            "vision_tower.embeddings.cls_token" => vec![tensor, norm("weight", &|_| 0), norm("bias", &bias)],
            _ => vec![tensor],
        });
        let config = std::fs::read_to_string(path.0.join("config.json")).unwrap();
        let config = config.replace(r#""use_mean_pooling": true"#, r#""use_mean_pooling": false"#);
        std::fs::write(path.0.join("config.json"), config).unwrap();
        let patches: Vec<f32> = (0..16 * 48).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
        let grid = Grid { frames: 1, height: 4, width: 4 };
        Rig::at(&path.0, false, DtypePolicy::F32).encode(EncoderKind::Vision, &[grid], &patches)
    };
    // The bias is 1 in the first half, then in the second.
    let (first, second) =
        (rows("first", |i| 0x3f80 * u16::from(i < 12)), rows("second", |i| 0x3f80 * u16::from(i >= 12)));
    assert_eq!(first.len(), 4);
    assert!(first.iter().all(|row| *row == first[0]) && second.iter().all(|row| *row == second[0]));
    assert_ne!(first[0], second[0], "the bias is there");
}

#[test]
fn a_configuration_alone_plans_the_encoder_too() {
    let qwens = ["vl-qwen3.5", "vl-qwen3", "vl-qwen3-moe", "vl-qwen2.5", "vl-qwen2"];
    let others = ["vl-intern", "vl-intern-rms", "vl-gemma3", "vl-gemma4", "vl-gemma4-e2b", "vl-lfm2", "vl-lfm2-bare"];
    let more = [
        "vl-intern-chat",
        "vl-intern-chat-rms",
        "vl-smolvlm",
        "vl-idefics3",
        "vl-llama4",
        "vl-mistral3",
        "vl-mistral3-other",
    ];
    for model in qwens.into_iter().chain(others).chain(more) {
        let path = Folder(std::env::temp_dir().join(format!("plimsoll-{model}-config-{}", std::process::id())));
        std::fs::create_dir_all(&path.0).unwrap();
        std::fs::copy(folder(model).join("config.json"), path.0.join("config.json")).unwrap();
        let (planned, loaded) = (table(&path.0), table(&folder(model)));
        assert_eq!(planned.linears.len(), loaded.linears.len(), "{model}");
        // A hybrid keeps a few small vectors in f32 whatever its configuration says.
        assert!(planned.bytes.abs_diff(loaded.bytes) < 256, "{model}: {} and {}", planned.bytes, loaded.bytes);
    }
}
