//! Rows that are read from their file one by one.

use std::path::{Path, PathBuf};

use plimsoll_formats::{Checkpoint, FormatError, RowBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models")
}

/// Returns the bits of a decoded row.
fn bits(row: &RowBuf) -> Vec<u32> {
    let mut values = vec![0.0; row.len()];
    row.dequantize(&mut values);
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn rows_that_stay_in_the_file_are_those_of_the_checkpoint() {
    let mut forms = std::collections::BTreeSet::new();
    let (mut mapped, mut stored) = (RowBuf::new(), RowBuf::new());
    for model in std::fs::read_dir(fixtures()).expect("there are fixtures") {
        let model = model.expect("a fixture").path();
        let Ok(checkpoint) = Checkpoint::open(&model) else { continue };
        let names: Vec<String> = checkpoint.tensors().map(|(name, _)| name.to_owned()).collect();
        let plain = names.iter().map(String::as_str).filter(|name| checkpoint.has_plain_rows(name));
        let plain: Vec<&str> = plain.collect();
        let tensors = checkpoint.stored_rows(plain.iter().copied()).expect("the files are there");
        for (name, rows) in plain.iter().zip(tensors.tensors()) {
            let info = checkpoint.tensor(name).expect("it is there");
            assert_eq!(rows.rows(), info.rows());
            forms.insert(format!("{:?}", std::mem::discriminant(&info.encoding)));
            let mut bytes = vec![0; rows.row_bytes()];
            for row in [0, info.rows() / 2, info.rows() - 1] {
                rows.read(row, &mut bytes).expect("the row is in the file");
                rows.decode(&bytes, &mut stored);
                checkpoint.decode_rows(name, row, &mut mapped).expect("the row decodes");
                assert_eq!(bits(&stored), bits(&mapped), "row {row} of {name} in {}", model.display());
            }
        }
        tensors.unchanged().expect("no program wrote to it");
    }
    assert!(forms.len() >= 4, "floats of several types, and codes: {forms:?}");
}

#[test]
fn a_tensor_whose_rows_need_more_than_their_bytes_is_refused_by_name() {
    let checkpoint = Checkpoint::open(&fixtures().join("fp8-llama")).expect("it opens");
    let name = "model.layers.0.self_attn.q_proj.weight";
    assert!(!checkpoint.has_plain_rows(name));
    let Err(FormatError::Unsupported(words)) = checkpoint.stored_rows([name].into_iter()) else { panic!("accepted") };
    assert!(words.contains(name), "{words}");
    assert!(matches!(checkpoint.stored_rows(["nothing"].into_iter()), Err(FormatError::NoSuchTensor(_))));
}

#[test]
fn a_file_that_changes_is_noticed_and_one_that_is_removed_is_still_read() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("llama").join(name), folder.path().join(name)).expect("a copy");
    }
    let weights = folder.path().join("model.safetensors");
    let open = || {
        let checkpoint = Checkpoint::open(folder.path()).expect("it opens");
        checkpoint.stored_rows(["model.embed_tokens.weight"].into_iter()).expect("it is there")
    };
    let tensors = open();
    let mut bytes = vec![0; tensors.tensors()[0].row_bytes()];
    let aside = folder.path().join("aside");
    std::fs::rename(&weights, &aside).expect("moved");
    tensors.tensors()[0].read(3, &mut bytes).expect("the file is still open");
    tensors.unchanged().expect("only its name changed");
    std::fs::rename(&aside, &weights).expect("moved back");

    let file = std::fs::File::options().write(true).open(&weights).expect("it opens");
    let length = file.metadata().expect("its status").len();
    file.set_len(length - 1).expect("cut");
    assert!(matches!(tensors.unchanged(), Err(FormatError::Changed { .. })));
    file.set_len(16).expect("cut");
    let error = tensors.tensors()[0].read(3, &mut bytes).expect_err("the row is gone");
    assert!(error.to_string().contains("model.safetensors"), "{error}");
}
