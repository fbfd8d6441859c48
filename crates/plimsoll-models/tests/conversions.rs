//! Checkpoints of models that see, as converters leave them: without their tower, under other names, with convolutions turned; and
//! the plan from a configuration alone.

mod common;

use std::path::{Path, PathBuf};

use common::{Part, Rig, folder};
use plimsoll_device::{Declare, DtypePolicy, WeightTable};
use plimsoll_formats::Checkpoint;
use plimsoll_models::Grid;
use serde_json::{Map, Value, json};

/// A directory that goes away with the test.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A tensor of a file.
struct Tensor {
    name: String,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// A fixture with its tensors changed, or left out.
fn converted(model: &str, what: &str, change: impl Fn(Tensor) -> Option<Tensor>) -> Folder {
    let to = Folder(std::env::temp_dir().join(format!("plimsoll-{model}-{what}-{}", std::process::id())));
    std::fs::create_dir_all(&to.0).unwrap();
    std::fs::copy(folder(model).join("config.json"), to.0.join("config.json")).unwrap();
    let file = std::fs::read(folder(model).join("model.safetensors")).unwrap();
    let head_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let head: Map<String, Value> = serde_json::from_slice(&file[8..8 + head_len]).unwrap();
    let (mut written, mut data) = (Map::new(), Vec::new());
    for (name, info) in head.into_iter().filter(|(name, _)| name != "__metadata__") {
        let numbers = |key: &str| -> Vec<usize> {
            info[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap() as usize).collect()
        };
        let span = numbers("data_offsets");
        let bytes = file[8 + head_len..][span[0]..span[1]].to_vec();
        let Some(tensor) = change(Tensor { name, shape: numbers("shape"), data: bytes }) else { continue };
        let from = data.len();
        data.extend(tensor.data);
        let info = json!({ "dtype": info["dtype"], "shape": tensor.shape, "data_offsets": [from, data.len()] });
        written.insert(tensor.name, info);
    }
    let mut head = serde_json::to_vec(&written).unwrap();
    head.resize(head.len().next_multiple_of(8), b' ');
    let file = [&(head.len() as u64).to_le_bytes()[..], &head, &data].concat();
    std::fs::write(to.0.join("model.safetensors"), file).unwrap();
    to
}

/// Channels last, as MLX has the weights of a convolution.
fn turned(tensor: Tensor) -> Tensor {
    let (out, channels, points) = (tensor.shape[0], tensor.shape[1], tensor.shape[2..].iter().product::<usize>());
    let value = |o: usize, c: usize, p: usize| &tensor.data[2 * ((o * channels + c) * points + p)..][..2];
    let all = (0..out).flat_map(|o| (0..points).flat_map(move |p| (0..channels).map(move |c| (o, c, p))));
    let data = all.flat_map(|(o, c, p)| value(o, c, p).to_vec()).collect();
    let shape = [&[out], &tensor.shape[2..], &[channels]].concat();
    Tensor { data, shape, ..tensor }
}

fn text(rig: &mut Rig) -> Vec<Vec<f32>> {
    rig.step(&[Part::new(&[5, 80, 200, 17, 99, 301], 0, None, 0)])
}

#[test]
fn a_conversion_without_the_tower_serves_text() {
    for model in ["vl-qwen3.5", "vl-qwen2.5"] {
        let path = converted(model, "text", |tensor| (!tensor.name.contains("visual.")).then_some(tensor));
        let mut rig = Rig::at(&path.0, false, DtypePolicy::F32);
        assert!(rig.model.vision().is_none(), "{model}: no tower");
        assert!(rig.shape.encoder.is_none());
        assert_eq!(text(&mut rig), text(&mut Rig::new(model, false)), "{model}");
    }
}

#[test]
fn a_tower_under_other_names_with_its_convolution_turned_is_the_same() {
    let model = "vl-qwen3";
    let path = converted(model, "mlx", |tensor| {
        let name = tensor.name.replace("model.visual.", "vision_tower.");
        let tensor = Tensor { name: name.replace("model.language_model.", "language_model.model."), ..tensor };
        Some(if tensor.name.ends_with("patch_embed.proj.weight") { turned(tensor) } else { tensor })
    });
    let (mut rig, mut own) = (Rig::at(&path.0, false, DtypePolicy::F32), Rig::new(model, false));
    let grid = Grid { frames: 1, height: 6, width: 4 };
    let patches: Vec<f32> = (0..24 * 96).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
    assert_eq!(rig.encode(&[grid], &patches), own.encode(&[grid], &patches));
    assert_eq!(text(&mut rig), text(&mut own));
}

/// The weights of a checkpoint or a configuration, as declared.
fn table(path: &Path) -> WeightTable {
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
    declare.finish()
}

#[test]
fn a_configuration_alone_plans_the_tower_too() {
    for model in ["vl-qwen3.5", "vl-qwen3", "vl-qwen3-moe", "vl-qwen2.5", "vl-qwen2"] {
        let path = Folder(std::env::temp_dir().join(format!("plimsoll-{model}-config-{}", std::process::id())));
        std::fs::create_dir_all(&path.0).unwrap();
        std::fs::copy(folder(model).join("config.json"), path.0.join("config.json")).unwrap();
        let (planned, loaded) = (table(&path.0), table(&folder(model)));
        assert_eq!(planned.linears.len(), loaded.linears.len(), "{model}");
        // A hybrid keeps a few small vectors in f32 whatever its configuration says.
        assert!(planned.bytes.abs_diff(loaded.bytes) < 256, "{model}: {} and {}", planned.bytes, loaded.bytes);
    }
}
