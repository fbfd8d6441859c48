//! Random damage to small files: never a panic, never a read outside the map. The result is an error, or a checkpoint
//! with rows that all decode.

use crate::common::{TempDir, exercise, fixture, seeing, seeing_model};
use proptest::prelude::*;
use std::path::Path;

/// One kind of damage.
#[derive(Debug, Clone)]
enum Damage {
    /// Sets the byte at a position (in thousandths of the file) to a value.
    Byte(usize, u8),
    /// Overwrites eight bytes with a number that tends to hurt.
    Number(usize, u64),
    /// Cuts the file.
    Truncate(usize),
}

/// Damage that mostly hits the head, where it matters.
fn damage() -> impl Strategy<Value = Damage> {
    let at = prop_oneof![4 => 0usize..200_000, 1 => 0usize..1_000_000];
    let number = prop_oneof![
        Just(0),
        Just(u64::MAX),
        Just(u64::MAX / 2 + 1),
        Just(1 << 32),
        Just(1 << 60),
        0u64..4096,
        any::<u64>()
    ];
    prop_oneof![
        5 => (at.clone(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        3 => (at.clone(), number).prop_map(|(at, number)| Damage::Number(at, number)),
        1 => (0usize..1_000_000).prop_map(Damage::Truncate),
    ]
}

/// Applies damage; positions are in millionths of the length.
fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    let place = |at: usize, len: usize| (at as u64 * len as u64 / 1_000_000) as usize;
    match *damage {
        Damage::Byte(at, value) => {
            let at = place(at, bytes.len());
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        Damage::Number(at, number) => {
            let at = place(at, bytes.len());
            if let Some(slice) = bytes.get_mut(at..at + 8) {
                slice.copy_from_slice(&number.to_le_bytes());
            }
        }
        Damage::Truncate(at) => {
            let at = place(at, bytes.len());
            bytes.truncate(at);
        }
    }
}

/// Copies a directory's files, damaging the one of this name.
fn damaged_copy(from: &Path, victim: &str, damages: &[Damage]) -> TempDir {
    let dir = TempDir::new();
    for file in std::fs::read_dir(from).expect("the fixture is there") {
        let path = file.expect("the fixture can be listed").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("fixture names are ASCII");
        let mut bytes = std::fs::read(&path).expect("the fixture can be read");
        if name == victim {
            damages.iter().for_each(|damage| apply(&mut bytes, damage));
        }
        dir.write(name, bytes);
    }
    dir
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_gguf_file_never_panics(codebooks: bool, damages in prop::collection::vec(damage(), 1..6)) {
        let file = if codebooks { "codebooks.gguf" } else { "types.gguf" };
        let mut bytes = std::fs::read(fixture(file)).expect("the fixture is there");
        damages.iter().for_each(|damage| apply(&mut bytes, damage));
        let dir = TempDir::new();
        drop(exercise(&dir.write("model.gguf", bytes)));
    }

    #[test]
    fn a_damaged_vision_encoder_never_panics(windows: bool, damages in prop::collection::vec(damage(), 1..6)) {
        let (arch, projector) = if windows { ("qwen2vl", "qwen2.5vl_merger") } else { ("qwen3vl", "qwen3vl_merger") };
        let mut encoder = seeing(projector);
        encoder.u32("clip.vision.n_wa_pattern", 2);
        let mut bytes = encoder.bytes();
        damages.iter().for_each(|damage| apply(&mut bytes, damage));
        let dir = TempDir::new();
        dir.write("mmproj.gguf", bytes);
        drop(exercise(&dir.write("model.gguf", seeing_model(arch).bytes())));
    }

    #[test]
    fn damaged_packed_weights_never_panic(small_floats: bool, damages in prop::collection::vec(damage(), 1..6)) {
        let folder = if small_floats { "micro" } else { "mlx" };
        drop(exercise(&damaged_copy(&fixture(folder), "model.safetensors", &damages).0));
    }

    #[test]
    fn a_damaged_config_never_panics(damages in prop::collection::vec(damage(), 1..6)) {
        drop(exercise(&damaged_copy(&fixture("mlx"), "config.json", &damages).0));
    }

    #[test]
    fn a_damaged_index_never_panics(damages in prop::collection::vec(damage(), 1..4)) {
        drop(exercise(&damaged_copy(&fixture("sharded"), "model.safetensors.index.json", &damages).0));
    }
}
