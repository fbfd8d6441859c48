//! Decoded values against the reference implementations, over the committed fixtures (see `fixtures/make.py`).

use crate::common::{GgufWriter, TempDir, fixture, read_f32, values};
use plimsoll_formats::{Architecture, Checkpoint, Encoding, Row, RowBuf, RowScales, ScaleKind};

#[test]
fn every_gguf_type_equals_the_python_package_bit_for_bit() {
    let checkpoint = Checkpoint::open(&fixture("types.gguf")).expect("the fixture opens");
    let mut expected = read_f32(&fixture("types.f32")).into_iter();
    for kind in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F32", "F16", "BF16"] {
        for (at, value) in values(&checkpoint, &format!("test.{kind}")).into_iter().enumerate() {
            let want = expected.next().expect("the expectation is long enough");
            assert_eq!(value.to_bits(), want.to_bits(), "{kind} element {at}: {value} is not {want}");
        }
    }
    assert_eq!(expected.next(), None, "the expectation is used up");
}

/// The types with codebooks, in the order of their fixture.
const BOOKS: [&str; 14] = [
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
    "NVFP4", "Q1_0",
];

#[test]
fn every_gguf_type_with_a_codebook_equals_the_python_package_bit_for_bit() {
    let checkpoint = Checkpoint::open(&fixture("codebooks.gguf")).expect("the fixture opens");
    let mut expected = read_f32(&fixture("codebooks.f32")).into_iter();
    for kind in BOOKS {
        let found = values(&checkpoint, &format!("test.{kind}"));
        assert_eq!(found.len(), 3 * 512);
        for (at, value) in found.into_iter().enumerate() {
            let want = expected.next().expect("the expectation is long enough");
            // With a scale of 0, IQ1_S adds an offset of 0: the value is 0, and -0 in the package.
            let zeros = kind == "IQ1_S" && value == 0.0 && want == 0.0;
            assert!(value.to_bits() == want.to_bits() || zeros, "{kind} element {at}: {value} is not {want}");
        }
    }
    assert_eq!(expected.next(), None, "the expectation is used up");
}

#[test]
fn codes_and_scales_combine_to_the_dequantized_values() {
    combine("types.gguf", &["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]);
    combine("codebooks.gguf", &BOOKS);
}

fn combine(file: &str, kinds: &[&str]) {
    let checkpoint = Checkpoint::open(&fixture(file)).expect("the fixture opens");
    let mut row = RowBuf::new();
    for kind in kinds {
        checkpoint.decode_rows(&format!("test.{kind}"), 1, &mut row).expect("row 1 is there");
        let mut want = vec![0.0; row.len()];
        row.dequantize(&mut want);
        let Row::Quant { layout, codes, scales } = row.row() else { panic!("{kind} is quantized") };
        assert!(codes.iter().all(|&code| u32::from(code) < 1 << layout.code_bits), "{kind} codes are too wide");
        for (at, (&code, want)) in codes.iter().zip(want).enumerate() {
            let g = at / layout.group;
            let half = |bits| half::f16::from_bits(bits).to_f32();
            let (scale, offset) = match scales {
                RowScales::Group { scale, offset, scale_bits, offset_bits } => {
                    let stored = match layout.scales {
                        ScaleKind::E8m0Half => (f32::from(scale_bits[g]) - 128.0).exp2(),
                        ScaleKind::Ue4m3Half => half(scale_bits[g] << 7) * 128.0,
                        _ => half(scale_bits[g]),
                    };
                    assert_eq!(stored, scale[g]);
                    assert_eq!(offset.len(), offset_bits.len());
                    (scale[g], offset.get(g).copied().unwrap_or(0.0))
                }
                RowScales::Super { d, dmin, sc, m } => {
                    let offset = dmin.get(at / 256).map_or(0.0, |&dmin| -half(dmin) * f32::from(m[g]));
                    (half(d[at / 256]) * f32::from(sc[g]), offset)
                }
                RowScales::SuperF32 { d, dmin, sc, m } => {
                    let offset = dmin.get(at / 256).map_or(0.0, |&dmin| -dmin * f32::from(m[g]));
                    (d[at / 256] * f32::from(sc[g]), offset)
                }
            };
            let value = scale * (i32::from(layout.level(code)) - i32::from(layout.zero)) as f32 + offset;
            assert_eq!(value, want, "{kind} element {at}");
        }
    }
}

#[test]
fn gguf_names_shapes_and_metadata_are_mapped() {
    let checkpoint = Checkpoint::open(&fixture("types.gguf")).expect("the fixture opens");
    let info = |name: &str| checkpoint.tensor(name).unwrap_or_else(|| panic!("{name} is there"));
    assert_eq!(info("model.embed_tokens.weight").shape, [8, 64]);
    assert_eq!(info("model.layers.0.self_attn.q_proj.weight").bytes, 64 * 2 * 34);
    assert_eq!(info("model.layers.0.post_attention_layernorm.weight").encoding, Encoding::F32);
    assert_eq!(values(&checkpoint, "model.rope_freqs"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    assert!(checkpoint.tensor("lm_head.weight").is_none());

    let config = &checkpoint.config;
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.hidden_size, config.heads, config.kv_heads, config.head_dim), (64, 4, 2, 16));
    assert_eq!((config.vocab_size, config.rope_theta, config.max_context), (8, 500_000.0, 64));
    assert!(config.rope_interleaved && config.tie_word_embeddings && !config.attention_bias);
    // "</s>" is named by the key. The tokenizer knows that "<|im_end|>" is a control token.
    assert_eq!(config.eos_token_ids, [2]);

    let meta = checkpoint.gguf().expect("GGUF has metadata");
    let tokens = meta.strings("tokenizer.ggml.tokens").expect("tokens are there");
    assert_eq!(tokens.iter().collect::<Vec<_>>(), ["<unk>", "<s>", "</s>", "<|im_end|>", "h\u{e9}", "", "z", "<eos>"]);
    assert_eq!((tokens.get(4), tokens.get(8)), (Some("h\u{e9}"), None));
    assert_eq!(meta.i32s("tokenizer.ggml.token_type").map(<[i32]>::len), Some(8));
    assert_eq!(meta.f32s("tokenizer.ggml.scores").map(|scores| scores[7]), Some(-7.0));
    assert_eq!((meta.bool("fixture.flag"), meta.u64("fixture.negative")), (Some(true), None));
    assert_eq!(meta.integers("fixture.u16"), Some(vec![1, 2, 65_535]));
}

#[test]
fn mlx_quantization_equals_mlx() {
    let checkpoint = Checkpoint::open(&fixture("mlx")).expect("the fixture opens");
    let mut expected = read_f32(&fixture("mlx/expected.f32")).into_iter();
    for (bits, group, scales) in [
        (2, 64, ScaleKind::F16),
        (3, 32, ScaleKind::Bf16),
        (4, 64, ScaleKind::Bf16),
        (5, 32, ScaleKind::F16),
        (6, 128, ScaleKind::F32),
        (8, 64, ScaleKind::Bf16),
    ] {
        let name = format!("model.layers.0.test{bits}.weight");
        let info = checkpoint.tensor(&name).expect("the tensor is there");
        assert_eq!(info.shape, [5, 256]);
        let Encoding::Quant(layout) = info.encoding else { panic!("{name} is quantized") };
        assert_eq!((layout.code_bits, layout.group, layout.scales, layout.offset), (bits, group, scales, true));
        for (at, value) in values(&checkpoint, &name).into_iter().enumerate() {
            let want = expected.next().expect("the expectation is long enough");
            // MLX may fuse the multiplication and the addition; one rounding of the product is the difference.
            let bound = 4.0 * f32::EPSILON * want.abs().max(1.0);
            assert!((value - want).abs() <= bound, "{bits} bits, element {at}: {value} is not {want}");
        }
    }
    assert_eq!(expected.next(), None, "the expectation is used up");
    assert_eq!(checkpoint.tensors().count(), 7, "scales and biases are no tensors of their own");
    assert_eq!(values(&checkpoint, "model.norm.weight"), [1.0; 64]);
    assert!(checkpoint.config.tie_word_embeddings, "there is no lm_head");
}

#[test]
fn a_split_gguf_opens_by_any_of_its_parts() {
    let dir = TempDir::new();
    let part = |writer: &mut GgufWriter, number: u16, tensor: &str, dims: &[u64]| {
        writer.set("split.no", 2, number.to_le_bytes()).set("split.count", 2, 3u16.to_le_bytes());
        writer.tensor(tensor, dims);
        dir.write(&format!("m-{:05}-of-00003.gguf", number + 1), writer.bytes())
    };
    let first = part(&mut GgufWriter::new("llama"), 0, "token_embd.weight", &[64, 3]);
    // Later parts have no keys of the model.
    let mut bare = GgufWriter { keys: Vec::new(), ..GgufWriter::new("llama") };
    let second = part(&mut bare.clone(), 1, "output_norm.weight", &[64]);
    let third = part(&mut bare, 2, "output.weight", &[64, 3]);
    for path in [&first, &second, &third] {
        let checkpoint = Checkpoint::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let names: Vec<&str> = checkpoint.tensors().map(|(name, _)| name).collect();
        assert_eq!(names, ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"], "{}", path.display());
        assert_eq!(values(&checkpoint, "lm_head.weight").len(), 192);
    }
    std::fs::remove_file(&second).unwrap();
    let error = Checkpoint::open(&third).map(drop).expect_err("a part is missing").to_string();
    assert!(error.contains("m-00002-of-00003.gguf"), "{error}");
}

#[test]
fn sharded_safetensors_are_one_checkpoint() {
    let checkpoint = Checkpoint::open(&fixture("sharded")).expect("the fixture opens");
    assert!(checkpoint.has_data() && checkpoint.gguf().is_none());
    assert_eq!(checkpoint.dir(), fixture("sharded"));
    let ramp = |start: usize| (start..start + 64).map(|value| value as f32).collect::<Vec<_>>();
    assert_eq!(values(&checkpoint, "model.norm.weight"), ramp(1));
    assert_eq!(values(&checkpoint, "lm_head.weight")[7 * 64..], ramp(2));
    assert_eq!(checkpoint.raw("model.norm.weight").map(<[u8]>::len), Some(128));
    assert_eq!(checkpoint.config.eos_token_ids, [3, 2]);
    assert!(!checkpoint.config.tie_word_embeddings);
}

#[test]
fn one_file_comes_before_the_index_beside_it() {
    let folder = TempDir::new();
    for name in ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"] {
        folder.write(name, std::fs::read(fixture("sharded").join(name)).unwrap());
    }
    // The index's other file is missing.
    assert!(Checkpoint::open(&folder.0).is_err());
    folder.write("model.safetensors", std::fs::read(fixture("sharded/model-00001-of-00002.safetensors")).unwrap());
    let checkpoint = Checkpoint::open(&folder.0).expect("one file is a checkpoint");
    assert_eq!(values(&checkpoint, "model.norm.weight")[0], 1.0);
    assert!(checkpoint.tensor("lm_head.weight").is_none());
}

#[test]
fn a_head_that_is_there_is_the_head_whatever_the_configuration_says() {
    let folder = TempDir::new();
    for file in std::fs::read_dir(fixture("sharded")).expect("the fixture is a directory") {
        let (name, path) = file.map(|file| (file.file_name(), file.path())).expect("it can be listed");
        let bytes = std::fs::read(path).expect("it can be read");
        folder.write(name.to_str().expect("names are text"), bytes);
    }
    let config = std::fs::read_to_string(fixture("sharded").join("config.json")).expect("it has a configuration");
    folder.write("config.json", config.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true"));
    let checkpoint = Checkpoint::open(&folder.0).expect("it opens");
    assert!(!checkpoint.config.tie_word_embeddings, "as transformers has it");
}

#[test]
fn a_released_tensor_reads_the_same_again() {
    let checkpoint = Checkpoint::open(&fixture("types.gguf")).expect("the fixture opens");
    let before = values(&checkpoint, "test.Q6_K");
    checkpoint.release("test.Q6_K");
    checkpoint.release("no such tensor");
    assert_eq!(values(&checkpoint, "test.Q6_K"), before);
}

/// Without the guard, reading a mapped file that was cut ends the process.
#[cfg(unix)]
#[test]
fn a_file_that_is_cut_while_it_is_read_is_an_error_and_no_more() {
    let folder = TempDir::new();
    let bytes = std::fs::read(fixture("types.gguf")).unwrap();
    let path = folder.write("cut.gguf", &bytes);
    let checkpoint = Checkpoint::open(&path).expect("it opens");
    checkpoint.unchanged().expect("nothing has happened");
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let names: Vec<_> = checkpoint.tensors().map(|(name, _)| name.to_owned()).collect();
    let zeros = |name: &String| values(&checkpoint, name).iter().all(|value| *value == 0.0);
    assert!(names.iter().any(zeros), "zeros are read behind its end");
    let error = checkpoint.unchanged().unwrap_err().to_string();
    assert!(error.contains("cut.gguf changed while it was read: 14144 bytes when it was opened, now 4096"), "{error}");
    // The file has its length again, and bytes that were never read: it still differs from the opened file.
    std::fs::write(&path, &bytes).unwrap();
    assert!(checkpoint.unchanged().is_err());
    // Another file under the same name does not matter.
    let other = Checkpoint::open(&path).expect("it opens");
    std::fs::rename(folder.write("new.gguf", "GGUF"), &path).unwrap();
    other.unchanged().expect("it is what was opened, by whatever name");
    assert_eq!(values(&other, &names[0]).len(), other.tensor(&names[0]).unwrap().shape.iter().product::<usize>());
}

#[test]
fn rows_and_names_out_of_bounds_are_errors() {
    let checkpoint = Checkpoint::open(&fixture("types.gguf")).expect("the fixture opens");
    let mut row = RowBuf::new();
    let beyond = checkpoint.decode_rows("test.Q4_0", 3, &mut row).expect_err("there are three rows");
    assert_eq!(beyond.to_string(), "tensor \"test.Q4_0\" has 3 rows, row 3 was asked for");
    let missing = checkpoint.decode_rows("test.Q9", 0, &mut row).expect_err("there is no such tensor");
    assert_eq!(missing.to_string(), "no tensor named \"test.Q9\" in this checkpoint");
}

#[test]
fn small_floats_equal_mlx_and_the_experts_of_gpt_oss() {
    let checkpoint = Checkpoint::open(&fixture("micro")).expect("the fixture opens");
    let mut expected = read_f32(&fixture("micro/expected.f32")).into_iter();
    let experts = "model.layers.0.mlp.experts.gate_up_proj";
    for (name, shape, scales) in [
        ("model.layers.0.mxfp4".to_owned(), vec![5, 256], Some((32, ScaleKind::E8m0Half))),
        ("model.layers.0.mxfp8".to_owned(), vec![5, 256], None),
        ("model.layers.0.nvfp4".to_owned(), vec![5, 256], Some((16, ScaleKind::Ue4m3Half))),
        (experts.to_owned(), vec![2, 6, 128], Some((32, ScaleKind::E8m0Half))),
    ] {
        let name = format!("{name}.weight");
        let info = checkpoint.tensor(&name).unwrap_or_else(|| panic!("{name} is there"));
        assert_eq!(info.shape, shape);
        match info.encoding {
            Encoding::Quant(layout) => assert_eq!(Some((layout.group, layout.scales)), scales),
            encoding => assert_eq!((encoding, scales), (Encoding::BF16, None)),
        }
        for (at, value) in values(&checkpoint, &name).into_iter().enumerate() {
            // Equal except for the sign of a zero.
            assert_eq!(Some(value), expected.next(), "{name}, element {at}");
        }
    }
    assert_eq!(expected.next(), None, "the expectation is used up");
    assert_eq!(values(&checkpoint, &format!("{experts}_bias")), [1.0; 12]);
    assert_eq!(checkpoint.tensors().count(), 5, "scales are no tensors of their own");
}
