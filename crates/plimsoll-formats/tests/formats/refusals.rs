//! Files with one false statement each, and the message that names it.

use crate::common::{GgufWriter, LLAMA, TempDir, safetensors};
use plimsoll_formats::Checkpoint;

/// Asserts that a message contains `part`.
fn says(message: &str, part: &str) {
    assert!(message.contains(part), "{message:?} does not say {part:?}");
}

#[test]
fn gguf_heads_that_lie_are_refused_by_name() {
    let good = || {
        let mut writer = GgufWriter::new("llama");
        writer.tensor("token_embd.weight", &[64, 3]).tensor("output_norm.weight", &[64]);
        writer
    };
    good().open().expect("the unaltered file opens");
    type Lie = (&'static str, fn(&mut GgufWriter));
    let lies: [Lie; 21] = [
        ("GGUF version 1", |w| w.version = 1),
        ("big-endian", |w| w.version = 3u32.swap_bytes()),
        ("occurs twice", |w| w.keys.push(w.keys[1].clone())),
        ("general.architecture is missing", |w| drop(w.keys.remove(0))),
        ("general.alignment", |w| {
            w.u32("general.alignment", 24);
        }),
        ("general.alignment", |w| {
            w.u32("general.alignment", 1 << 20);
        }),
        ("array of arrays", |w| {
            w.set("x", 9, [9u32.to_le_bytes().to_vec(), vec![1; 12]].concat());
        }),
        ("type number 13", |w| {
            w.set("x", 13, [0; 8]);
        }),
        ("boolean has the value 2", |w| {
            w.set("x", 7, [2]);
        }),
        ("array elements are announced", |w| {
            w.set("x", 9, [[4, 0, 0, 0], [255; 4], [255; 4]].concat());
        }),
        ("bytes of text are announced", |w| {
            w.set("x", 8, u64::MAX.to_le_bytes());
        }),
        ("not UTF-8", |w| {
            w.set("x", 8, [1, 0, 0, 0, 0, 0, 0, 0, 0xFF]);
        }),
        ("5 dimensions", |w| w.tensors[0].1 = vec![1; 5]),
        ("a dimension is 0", |w| w.tensors[0].1 = vec![64, 0]),
        ("overflows", |w| w.tensors[0].1 = vec![1 << 40, 1 << 40]),
        ("not whole Q4_0 blocks of 32", |w| (w.tensors[0].1, w.tensors[0].2) = (vec![48, 1], 2)),
        ("has type Q2_0; types that load are F32, F16, Q4_0,", |w| w.tensors[0].2 = 42),
        ("offset 16 is not aligned", |w| (w.tensors[1].3, w.tensors[0].3) = (16, 512)),
        ("inside a tensor that ends at 768", |w| w.tensors[1].3 = 32),
        ("of the data, which has only 1024", |w| w.tensors[0].1 = vec![64, 64]),
        ("two tensors are named", |w| w.tensors[1].0 = "token_embd.weight".to_owned()),
    ];
    for (part, lie) in lies {
        let mut writer = good();
        lie(&mut writer);
        says(&writer.refusal(), part);
    }
}

#[test]
fn counts_beyond_the_file_are_refused_before_anything_is_read() {
    let dir = TempDir::new();
    let mut bytes = GgufWriter::new("llama").bytes();
    bytes[8..16].copy_from_slice(&(1u64 << 60).to_le_bytes());
    let error = Checkpoint::open(&dir.write("a.gguf", &bytes)).map(drop).expect_err("the count is refused");
    says(&error.to_string(), "1152921504606846976 tensors are announced");
    says(&Checkpoint::open(&dir.write("b.gguf", "GGUF")).map(drop).expect_err("too short").to_string(), "ends after 4");
}

#[test]
fn paths_that_are_no_checkpoint_are_refused() {
    let dir = TempDir::new();
    let refusal = |path: &std::path::Path| Checkpoint::open(path).map(drop).expect_err("it is refused").to_string();
    says(&refusal(&dir.0), "no config.json, and 0 GGUF files");
    says(&refusal(&dir.write("weights.bin", "hello")), "expected a GGUF file");
    says(&refusal(&dir.write("empty.gguf", "")), "expected a GGUF file");
    says(&refusal(&dir.0.join("missing")), "missing");
}

#[test]
fn an_adapter_is_no_model() {
    let dir = TempDir::new();
    dir.write("config.json", LLAMA);
    Checkpoint::open(&dir.0).expect("without the adapter it can be planned");
    dir.write("adapter_config.json", "{}");
    says(&Checkpoint::open(&dir.0).map(drop).unwrap_err().to_string(), "an adapter (LoRA), not a model; merge it");
    let mut writer = GgufWriter::new("llama");
    writer.str("general.type", "adapter").tensor("blk.0.attn_q.weight.lora_a", &[64, 4]);
    says(&writer.open().map(drop).unwrap_err().to_string(), "an adapter (LoRA), not a model; merge it");
}

/// Opens a directory with a Llama's configuration and this safetensors file.
fn open_with(bytes: &[u8]) -> Result<Checkpoint, String> {
    let dir = TempDir::new();
    dir.write("config.json", LLAMA);
    dir.write("model.safetensors", bytes);
    Checkpoint::open(&dir.0).map_err(|error| error.to_string())
}

#[test]
fn safetensors_heads_that_lie_are_refused_by_name() {
    let norm = r#""model.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    open_with(&safetensors(&format!("{{{norm}}}  "), 8)).expect("the honest file opens");
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    for (part, head, data) in [
        ("tensors cover 8", format!("{{{norm}}}"), 12),
        ("range 0..8 of 4 bytes", format!("{{{norm}}}"), 4),
        ("where 0 is next", entry("F32", "[1]", "[4,8]"), 8),
        ("for a shape of 4 bytes", entry("F32", "[1]", "[0,8]"), 8),
        ("range 0..18446744073709551615", entry("F32", "[1]", "[0,18446744073709551615]"), 8),
        ("overflows", entry("F32", "[4294967296,4294967296,4]", "[0,8]"), 8),
        ("shape [0]", entry("F32", "[0]", "[0,0]"), 0),
        ("more than 8 dimensions", entry("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4),
        ("has type \"F31\"", entry("F31", "[1]", "[0,4]"), 4),
        ("invalid value", entry("F32", "[-1]", "[0,4]"), 4),
        ("where 8 is next", format!(r#"{{{norm},"b":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#), 8),
        ("trailing characters", format!("{{{norm}}}x"), 8),
        (
            "two tensors are named \"model.norm.weight\"",
            format!(r#"{{{norm},"norm.weight":{{"dtype":"F16","shape":[1],"data_offsets":[8,10]}}}}"#),
            10,
        ),
    ] {
        says(&open_with(&safetensors(&head, data)).map(drop).expect_err(part), part);
    }
    let mut short = safetensors("{}", 0);
    short[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    says(&open_with(&short).map(drop).expect_err("the length lies"), "claims 18446744073709551615 bytes");
}

#[test]
fn weights_that_cannot_be_decoded_are_refused_and_strangers_ignored() {
    let head = |name: &str| format!(r#"{{"{name}":{{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}}}"#);
    let refusal = open_with(&safetensors(&head("model.layers.0.mlp.up_proj.weight"), 4)).map(drop);
    says(&refusal.expect_err("fp8 is not decoded"), "unsupported: the element type of tensor");
    let stranger = open_with(&safetensors(&head("position_table"), 4)).expect("a stranger is no obstacle");
    assert_eq!(stranger.tensors().count(), 0);
}

#[test]
fn an_index_cannot_name_paths_or_promise_what_is_not_there() {
    let refusal = |index: &str| {
        let dir = TempDir::new();
        dir.write("config.json", LLAMA);
        dir.write("model.safetensors.index.json", index);
        dir.write("a.safetensors", safetensors("{}", 0));
        Checkpoint::open(&dir.0).map(drop).expect_err("it is refused").to_string()
    };
    for name in ["../a.safetensors", "/etc/a.safetensors", "..\\\\a.safetensors", "a.bin"] {
        says(&refusal(&format!(r#"{{"weight_map": {{"x": "{name}"}}}}"#)), "the index names a file");
    }
    says(&refusal(r#"{"weight_map": {"x": "a.safetensors"}}"#), "which does not have it");
    says(&refusal(r#"{"weight_map": {"x": "b.safetensors"}}"#), "b.safetensors");
    says(&refusal(r#"{"weight_map": []}"#), "index:");
}

#[test]
fn packed_weights_must_agree_with_the_configuration() {
    let open = |quantization: &str, scale_groups: usize, biases: &str| {
        let config = LLAMA.replacen('{', &format!(r#"{{"quantization": {quantization},"#), 1);
        let scales = 2 * 2 * scale_groups;
        let head = format!(
            r#"{{"a.weight":{{"dtype":"U32","shape":[2,8],"data_offsets":[0,64]}},
               "a.scales":{{"dtype":"F16","shape":[2,{scale_groups}],"data_offsets":[64,{}]}},
               "{biases}":{{"dtype":"F16","shape":[2,{scale_groups}],"data_offsets":[{},{}]}}}}"#,
            64 + scales,
            64 + scales,
            64 + 2 * scales
        );
        let dir = TempDir::new();
        dir.write("config.json", config);
        dir.write("model.safetensors", safetensors(&head, 64 + 2 * scales));
        Checkpoint::open(&dir.0).map_err(|error| error.to_string())
    };
    let honest = open(r#"{"bits": 4, "group_size": 32}"#, 2, "a.biases").expect("it agrees");
    assert_eq!(honest.tensor("a.weight").map(|info| info.shape.clone()), Some(vec![2, 64]));
    assert_eq!(honest.tensor("a.weight").map(|info| info.bytes), Some(80));
    let refusal =
        |quantization: &str, groups, biases: &str| open(quantization, groups, biases).map(drop).expect_err("a lie");
    says(&refusal(r#"{"bits": 8, "group_size": 32}"#, 2, "a.biases"), "are not 8 bits in groups of 32");
    says(&refusal(r#"{"bits": 4, "group_size": 64}"#, 2, "a.biases"), "are not 4 bits in groups of 64");
    says(&refusal(r#"{"bits": 4, "group_size": 32}"#, 3, "a.biases"), "are not 4 bits in groups of 32");
    says(&refusal(r#"{"bits": 4, "group_size": 32}"#, 2, "a.offsets"), "its biases are missing");
    says(&refusal(r#"{"bits": 4, "group_size": 32, "a": false}"#, 2, "a.biases"), "says that it is not");
    says(&refusal(r#"{"bits": 7, "group_size": 32}"#, 2, "a.biases"), "quantization to 7 bits in groups of 32");
    let mode = |mode: &str, group: usize| {
        let declared = format!(r#"{{"bits": 4, "group_size": {group}, "mode": "{mode}"}}"#);
        refusal(&declared, 2, "a.biases")
    };
    says(&mode("mxfp6", 32), "quantization mode \"mxfp6\"; modes that load are affine, mxfp4, mxfp8 and nvfp4");
    says(&mode("mxfp4", 32), "its scales are not bytes");
    says(&mode("mxfp4", 16), "Mxfp4 quantization to 4 bits in groups of 16");
    says(&mode("mxfp8", 32), "Mxfp8 quantization to 4 bits in groups of 32");
    says(
        &refusal(r#"{"quant_method": "hqq", "bits": 4}"#, 2, "a.biases"),
        "quantization_config.quant_method \"hqq\"; use",
    );
}

/// A value of the file may be as long as the file; the message about it stays short.
#[test]
fn words_stay_short_whatever_they_are_about() {
    let long = "é".repeat(30_000);
    let lists = ["x"; 20_000];
    let lies: [&dyn Fn(&mut GgufWriter); 6] = [
        &|w| {
            w.strings("general.alignment", &lists);
        },
        &|w| {
            w.str("general.architecture", &long);
        },
        &|w| {
            w.str("llama.rope.scaling.type", &long);
        },
        &|w| {
            w.str("tokenizer.ggml.tokens", &long);
        },
        &|w| {
            w.strings("llama.embedding_length", &lists);
        },
        &|w| w.tensors.extend([(long.clone(), vec![1], 0, 0), (long.clone(), vec![1], 0, 0)]),
    ];
    let mut refused = 0;
    for (i, lie) in lies.iter().enumerate() {
        let mut writer = GgufWriter::new("llama");
        writer.tensor("token_embd.weight", &[64, 3]);
        lie(&mut writer);
        // The reader does not use all of these values.
        let Err(error) = writer.open() else { continue };
        refused += 1;
        let words = error.to_string();
        assert!(words.len() < 1024, "lie {i}: {} bytes: {}", words.len(), words.chars().take(100).collect::<String>());
    }
    for config in [
        LLAMA.replacen("LlamaForCausalLM", &long, 1).replacen("\"llama\"", &format!("\"{long}\""), 1),
        LLAMA.replacen(
            "\"vocab_size\": 100",
            &format!("\"vocab_size\": 100, \"rope_scaling\": {{\"rope_type\": \"{long}\"}}"),
            1,
        ),
        LLAMA.replacen("\"vocab_size\": 100", &format!("\"vocab_size\": 100, \"hidden_act\": \"{long}\""), 1),
        LLAMA.replacen("\"hidden_size\": 64", &format!("\"hidden_size\": \"{long}\""), 1),
    ] {
        let dir = TempDir::new();
        let Err(error) = Checkpoint::open(&dir.write("config.json", config)) else { continue };
        refused += 1;
        let words = error.to_string();
        assert!(words.len() < 1024, "{} bytes: {}", words.len(), words.chars().take(100).collect::<String>());
    }
    assert!(refused >= 7, "{refused} of 10");
}
