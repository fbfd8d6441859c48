//! AWQ, GPTQ, AutoRound and compressed-tensors: decoded values against the libraries' own (see `tools/fixturelib/packed.py`), plans without
//! weights, and refusals.

use crate::common::{LLAMA, TempDir, fixture, open_config, read_f32, safetensors, values};
use plimsoll_formats::{Checkpoint, Encoding, QuantLayout, RowBuf, ScaleKind};

const NAME: &str = "model.layers.0.mlp.up_proj.weight";

fn layout(checkpoint: &Checkpoint) -> QuantLayout {
    match checkpoint.tensor(NAME).expect("the tensor is there").encoding {
        Encoding::Quant(layout) => layout,
        float => panic!("{float:?} is not quantized"),
    }
}

#[test]
fn every_packing_equals_its_library() {
    // Folder, bits, group, the zero point of all groups if there is one, type of the scales.
    for (folder, bits, group, zero, scales) in [
        ("awq", 4, 32, None, ScaleKind::F32),
        ("gptq-2bit", 2, 32, None, ScaleKind::F32),
        ("gptq-4bit", 4, 64, None, ScaleKind::F32),
        ("gptq-4bit-sym", 4, 128, Some(8), ScaleKind::F16),
        ("gptq-8bit-v2", 8, 32, None, ScaleKind::F32),
        ("autoround-awq", 4, 16, None, ScaleKind::F32),
        ("autoround", 4, 32, None, ScaleKind::F32),
        ("ct-4bit", 4, 64, Some(8), ScaleKind::Bf16),
        ("ct-4bit-asym", 4, 32, None, ScaleKind::F32),
        ("ct-8bit-asym", 8, 128, None, ScaleKind::F32),
        ("ct-3bit", 3, 32, Some(4), ScaleKind::F32),
        ("ct-bytes", 8, 128, Some(128), ScaleKind::Bf16),
        ("ct-bytes-asym", 8, 32, None, ScaleKind::F32),
    ] {
        let path = fixture("packed").join(folder);
        let checkpoint = Checkpoint::open(&path).unwrap_or_else(|error| panic!("{folder}: {error}"));
        assert_eq!(checkpoint.tensors().count(), 1, "{folder}: the parts are no tensors of their own");
        assert_eq!(checkpoint.tensor(NAME).map(|info| info.shape.clone()), Some(vec![16, 128]), "{folder}");
        let found = layout(&checkpoint);
        let (zero, offset) = (zero.unwrap_or(0), zero.is_none());
        let want = QuantLayout { code_bits: bits, group, zero, scales, offset, codebook: None };
        assert_eq!(found, want, "{folder}");
        let expected = read_f32(&path.join("expected.f32"));
        let values = values(&checkpoint, NAME);
        let wrong = values.iter().zip(&expected).position(|(value, want)| value != want);
        assert_eq!(wrong.map(|at| (at, values[at], expected[at])), None, "{folder}");
        assert_eq!(values.len(), expected.len());
        // The encoding planned from the configuration alone is that of the tensors.
        let planned = Checkpoint::open(&path.join("config.json")).expect("it can be planned");
        assert_eq!(planned.config.planned_encoding(NAME, &[16, 128]), Encoding::Quant(found), "{folder}");
    }
}

#[test]
fn every_form_of_fp8_has_the_values_that_torch_reads() {
    for (folder, group) in
        [("fp8-block", 48), ("fp8-tensor", 128), ("fp8-modelopt", 128), ("fp8-fbgemm", 128), ("ct-fp8-channel", 128)]
    {
        let path = fixture("packed").join(folder);
        let checkpoint = Checkpoint::open(&path).unwrap_or_else(|error| panic!("{folder}: {error}"));
        assert_eq!(checkpoint.tensors().count(), 1, "{folder}: scales are no tensors of their own");
        let found = checkpoint.tensor(NAME).map(|info| (info.shape.as_slice(), info.encoding));
        assert_eq!(found, Some(([16, 128].as_slice(), Encoding::F8 { group })), "{folder}");
        let expected = read_f32(&path.join("expected.f32"));
        let values = values(&checkpoint, NAME);
        let wrong = values.iter().zip(&expected).position(|(value, want)| value.to_bits() != want.to_bits());
        assert_eq!(wrong.map(|at| (at, values[at], expected[at])), None, "{folder}");
        let planned = Checkpoint::open(&path.join("config.json")).expect("it can be planned");
        assert_eq!(planned.config.planned_encoding(NAME, &[16, 128]), Encoding::F8 { group }, "{folder}");
    }
}

#[test]
fn both_forms_of_nvfp4_have_the_values_of_their_library() {
    for folder in ["nvfp4-modelopt", "ct-nvfp4"] {
        let path = fixture("packed").join(folder);
        let checkpoint = Checkpoint::open(&path).unwrap_or_else(|error| panic!("{folder}: {error}"));
        assert_eq!(checkpoint.tensors().count(), 1, "{folder}: scales are no tensors of their own");
        assert_eq!(checkpoint.tensor(NAME).map(|info| info.shape.clone()), Some(vec![16, 128]), "{folder}");
        let found = layout(&checkpoint);
        assert_eq!((found.code_bits, found.group, found.scales), (4, 16, ScaleKind::F32), "{folder}");
        let expected = read_f32(&path.join("expected.f32"));
        let values = values(&checkpoint, NAME);
        // The code of -0 decodes to 0 here.
        let wrong = values.iter().zip(&expected).position(|(value, want)| value != want);
        assert_eq!(wrong.map(|at| (at, values[at], expected[at])), None, "{folder}");
        let planned = Checkpoint::open(&path.join("config.json")).expect("it can be planned");
        assert_eq!(planned.config.planned_encoding(NAME, &[16, 128]), Encoding::Quant(found), "{folder}");
        assert!(!matches!(planned.config.planned_encoding("lm_head.weight", &[16, 128]), Encoding::Quant(_)));
    }
}

/// An NVFP4 matrix of 2 outputs and 32 inputs as ModelOpt stores it, with a tensor of this head beside it.
fn modelopt(scale: u8, second: &str, beside: &str) -> Result<Checkpoint, String> {
    let head = format!(
        r#"{{"a.weight":{{"dtype":"U8","shape":[2,16],"data_offsets":[0,32]}},
           "a.weight_scale":{{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[32,36]}},
           {second}"data_offsets":[36,40]}}{beside}}}"#
    );
    let data = [[0x12; 32].as_slice(), &[0x38, 0x38, scale, 0x38], &2.0f32.to_le_bytes(), &[0; 4]].concat();
    let used = if beside.is_empty() { 40 } else { 44 };
    let dir = TempDir::new();
    let declared = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},"#;
    dir.write("config.json", LLAMA.replacen('{', declared, 1));
    dir.write("model.safetensors", [safetensors(&head, 0), data[..used].to_vec()].concat());
    Checkpoint::open(&dir.0).map_err(|error| error.to_string())
}

#[test]
fn nvfp4_without_what_its_codes_need_is_refused() {
    let second = r#""a.weight_scale_2":{"dtype":"F32","shape":[],"#;
    let honest = modelopt(0x38, second, "").expect("it agrees");
    assert_eq!(values(&honest, "a.weight"), [2.0, 1.0].repeat(32));
    let nan = modelopt(0xFF, second, "").expect("scales are not read yet");
    let error = nan.decode_rows("a.weight", 1, &mut RowBuf::new()).expect_err("NaN").to_string();
    assert!(error.contains("row 1 holds NaN; fetch the file again"), "{error}");
    let refusal = |second: &str, beside: &str, part: &str| {
        let words = modelopt(0x38, second, beside).map(drop).expect_err(part);
        assert!(words.contains(part), "{words}");
    };
    refusal(&second.replace("_2", "_3"), "", "\"a.weight\": its weight_scale_2 is missing");
    refusal(&second.replace("F32", "I32"), "", "\"a.weight\": its weight_scale_2 is no float");
    refusal(&second.replace("[]", "[2]").replace("F32", "F16"), "", "it has 2 second scales, and 1 fit");
    for leaf in ["pre_quant_scale", "weight_zero_point"] {
        let beside = format!(r#","a.{leaf}":{{"dtype":"F32","shape":[1],"data_offsets":[40,44]}}"#);
        refusal(second, &beside, &format!("tensor \"a.{leaf}\" beside NVFP4 codes; use a version"));
    }
}

/// As many scales as outputs need not be one scale for each output.
#[test]
fn blocks_are_told_from_outputs_by_shape() {
    let dir = TempDir::new();
    let head = r#"{"a.weight":{"dtype":"F8_E4M3","shape":[4,256],"data_offsets":[0,1024]},
        "a.weight_scale_inv":{"dtype":"F32","shape":[1,4],"data_offsets":[1024,1040]}}"#;
    let mut bytes = safetensors(head, 0);
    bytes.extend([0x38; 1024]);
    bytes.extend([1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|scale| scale.to_le_bytes()));
    let fp8 = r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]},"#;
    dir.write("config.json", LLAMA.replacen('{', fp8, 1));
    dir.write("model.safetensors", &bytes);
    let checkpoint = Checkpoint::open(&dir.0).expect("it opens");
    let row: Vec<f32> = (0..256).map(|column| (column / 64 + 1) as f32).collect();
    assert_eq!(values(&checkpoint, "a.weight"), row.repeat(4));
    // A NaN is an error, not 480.
    let end = bytes.len();
    bytes[end - 17] = 0xFF;
    dir.write("model.safetensors", bytes);
    let checkpoint = Checkpoint::open(&dir.0).expect("it opens");
    let error = checkpoint.decode_rows("a.weight", 3, &mut RowBuf::new()).expect_err("NaN").to_string();
    assert!(error.contains("row 3 holds NaN; fetch the file again"), "{error}");
}

fn planned(quantization: &str, name: &str) -> Option<(u8, usize, bool)> {
    let json =
        LLAMA.replacen('{', &format!(r#"{{"torch_dtype": "bfloat16", "quantization_config": {quantization},"#), 1);
    let config = open_config(&json).unwrap_or_else(|error| panic!("{quantization}: {error}")).config;
    match config.planned_encoding(name, &[64, 256]) {
        Encoding::Quant(layout) => Some((layout.code_bits, layout.group, layout.offset)),
        _ => None,
    }
}

#[test]
fn rules_of_a_configuration_are_planned_with() {
    let (up, down, head) = (NAME, "model.layers.1.mlp.down_proj.weight", "lm_head.weight");
    let awq = r#"{"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["down_proj"]}"#;
    assert_eq!(planned(awq, up), Some((4, 128, true)));
    assert_eq!((planned(awq, down), planned(awq, head)), (None, None));
    assert_eq!(planned(awq, "model.embed_tokens.weight"), None);
    let gptq = r#"{"quant_method": "gptq", "bits": 4, "group_size": -1, "lm_head": true,
        "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 32}, "-:.*up_proj": {}}}"#;
    assert_eq!(
        (planned(gptq, head), planned(gptq, down), planned(gptq, up)),
        (Some((4, 256, false)), Some((8, 32, false)), None)
    );
    let inside = r#"{"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["mlp.up_proj"]]}"#;
    assert_eq!((planned(inside, up), planned(inside, down)), (Some((4, 128, false)), None));
    let round = r#"{"quant_method": "auto-round", "bits": 4, "group_size": 32, "extra_config": {
        "model.layers.1.mlp.down_proj": {"bits": 8}, ".*up_proj": {"bits": 16}, "lm_head": {"bits": 4}}}"#;
    assert_eq!((planned(round, up), planned(round, down)), (None, Some((8, 32, false))));
    assert_eq!(planned(round, head), Some((4, 32, false)));
    let weights =
        |bits| format!(r#""weights": {{"num_bits": {bits}, "type": "int", "strategy": "group", "group_size": 64}}"#);
    let compressed = |ignore: &str| {
        format!(
            r#"{{"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": [{ignore}], "config_groups": {{
                "group_0": {{"targets": ["re:.*down_proj"], "format": "pack-quantized", {}}},
                "group_1": {{"targets": ["Linear"], "format": "pack-quantized", {}}}}}}}"#,
            weights(8),
            weights(4)
        )
    };
    let plain = compressed(r#""lm_head""#);
    assert_eq!((planned(&plain, up), planned(&plain, down)), (Some((4, 64, false)), Some((8, 64, false))));
    assert_eq!((planned(&plain, head), planned(&compressed(""), head)), (None, Some((4, 64, false))));
    // An expression that cannot be evaluated counts as a match: the plan is an upper limit.
    assert_eq!(planned(&compressed(r#""re:(?!x)y""#), up), None);
}

/// The refusal of a checkpoint whose configuration holds this `quantization_config`.
fn refusal(quantization: &str) -> String {
    let json = LLAMA.replacen('{', &format!(r#"{{"quantization_config": {quantization},"#), 1);
    open_config(&json).map(drop).expect_err(quantization).to_string()
}

/// A `quantization_config` of compressed-tensors with this group.
fn compressed(group: &str, rest: &str) -> String {
    format!(
        r#"{{"quant_method": "compressed-tensors", "config_groups": {{"a": {{"targets": ["Linear"], {group}}}}}{rest}}}"#
    )
}

fn refused(rows: &[(String, &str)]) {
    for (quantization, said) in rows {
        let words = refusal(quantization);
        assert!(words.contains(said), "{quantization}: {words}");
    }
}

#[test]
fn unsupported_values_are_refused_with_the_next_step() {
    refused(&[
        (
            r#"{"quant_method": "bitsandbytes"}"#.to_owned(),
            r#"quantization_config.quant_method "bitsandbytes"; use a GGUF"#,
        ),
        (r#"{"quant_method": "awq", "bits": 3}"#.to_owned(), "quantization_config.bits 3; supported are [4] bits"),
        (
            r#"{"quant_method": "awq", "version": "gemv"}"#.to_owned(),
            r#"quantization_config.version "gemv"; supported is "gemm""#,
        ),
        (
            r#"{"quant_method": "awq", "backend": "llm-awq"}"#.to_owned(),
            r#"quantization_config.backend "llm-awq"; its packing"#,
        ),
        (
            r#"{"quant_method": "awq", "group_size": 100}"#.to_owned(),
            "quantization_config.group_size 100; supported are -1 and",
        ),
        (
            r#"{"quant_method": "awq", "group_size": "all"}"#.to_owned(),
            "quantization_config.group_size is not a whole number",
        ),
        (
            r#"{"quant_method": "awq", "modules_to_not_convert": 1}"#.to_owned(),
            "modules_to_not_convert is not a list of",
        ),
        (
            r#"{"quant_method": "gptq", "bits": 3}"#.to_owned(),
            "quantization_config.bits 3; supported are [2, 4, 8] bits",
        ),
        (
            r#"{"quant_method": "gptq", "checkpoint_format": "marlin"}"#.to_owned(),
            r#"checkpoint_format "marlin"; supported are "gptq""#,
        ),
        (r#"{"quant_method": "gptq", "is_marlin_format": true}"#.to_owned(), "is_marlin_format true; save the model"),
        (r#"{"quant_method": "gptq", "pack_dtype": "int8"}"#.to_owned(), r#"pack_dtype "int8"; supported is "int32""#),
        (r#"{"quant_method": "gptq", "dynamic": {"a": 1}}"#.to_owned(), "dynamic is not an object of objects"),
        (
            r#"{"quant_method": "auto-round", "packing_format": "x"}"#.to_owned(),
            r#"packing_format "x"; supported are "auto_round:auto_gptq""#,
        ),
        (
            r#"{"quant_method": "auto-round", "data_type": "mx_fp"}"#.to_owned(),
            r#"data_type "mx_fp"; supported is "int""#,
        ),
        (r#"{"quant_method": "fp8", "fmt": "e5m2"}"#.to_owned(), r#"fmt "e5m2"; supported is "e4m3""#),
        (r#"{"quant_method": "fp8", "expert_dtype": "fp4"}"#.to_owned(), r#"expert_dtype "fp4"; supported is "fp8""#),
        (r#"{"quant_method": "fp8", "weight_block_size": [128]}"#.to_owned(), "weight_block_size is not two sizes"),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}"#.to_owned(),
            r#"quant_algo "NVFP4_AWQ"; supported are "FP8", "NVFP4""#,
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}"#.to_owned(),
            "quantization_config.group_size 32; NVFP4 has groups of 16",
        ),
    ]);
}

#[test]
fn unsupported_values_of_compressed_tensors_are_refused() {
    refused(&[
        (compressed(r#""weights": {"num_bits": 7}"#, ""), "config_groups.weights.num_bits 7; supported are 2, 3"),
        (
            compressed(r#""weights": {"strategy": "block"}"#, ""),
            r#"config_groups.weights.strategy "block"; supported are"#,
        ),
        (
            compressed(r#""weights": {"num_bits": 4}"#, r#", "format": "marlin-24""#),
            r#"format "marlin-24"; supported are"#,
        ),
        (
            compressed(r#""weights": {}"#, r#", "sparsity_config": {"format": "sparse-24-bitmask"}"#),
            "sparsity_config.format is not",
        ),
        (r#"{"quant_method": "compressed-tensors"}"#.to_owned(), "config_groups is not there"),
        (compressed(r#""weights": {"type": "float", "num_bits": 4}"#, ""), "weights.num_bits 4; floats of 8 bits are"),
        (
            compressed(r#""weights": {"type": "float", "num_bits": 4, "group_size": 16, "symmetric": false}"#, ""),
            "weights.symmetric false; NVFP4 is supported without zero points",
        ),
        (
            compressed(r#""weights": {"type": "float", "strategy": "x"}"#, ""),
            r#"weights.strategy "x"; supported are "tensor""#,
        ),
        (compressed(r#""weights": {"type": "mx"}"#, ""), r#"weights.type "mx"; supported are "int" and "float""#),
    ]);
}

/// A GPTQ matrix of 8 outputs and 64 inputs in two groups, all zeros except this `g_idx`.
fn ordered(order: impl Fn(usize) -> i32, declared: &str, rows: usize) -> Result<Checkpoint, String> {
    let head = format!(
        r#"{{"a.qweight":{{"dtype":"I32","shape":[8,8],"data_offsets":[0,256]}},
           "a.qzeros":{{"dtype":"I32","shape":[2,1],"data_offsets":[256,264]}},
           "a.scales":{{"dtype":"F16","shape":[2,{rows}],"data_offsets":[264,{}]}},
           "a.g_idx":{{"dtype":"I32","shape":[64],"data_offsets":[{},{}]}}}}"#,
        264 + 4 * rows,
        264 + 4 * rows,
        520 + 4 * rows
    );
    let mut bytes = safetensors(&head, 264 + 4 * rows);
    bytes.extend((0..64).flat_map(|at| order(at).to_le_bytes()));
    let dir = TempDir::new();
    dir.write("config.json", LLAMA.replacen('{', &format!(r#"{{{declared}"#), 1));
    dir.write("model.safetensors", bytes);
    Checkpoint::open(&dir.0).map_err(|error| error.to_string())
}

#[test]
fn tensors_must_agree_with_each_other() {
    let gptq = r#""quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},"#;
    let sequential = |at: usize| at as i32 / 32;
    let honest = ordered(sequential, gptq, 8).expect("it agrees");
    assert_eq!(honest.tensor("a.weight").map(|info| info.shape.clone()), Some(vec![8, 64]));
    assert!(ordered(|_| -1, gptq, 8).is_ok(), "not ordered");
    let says = |result: Result<Checkpoint, String>, part: &str| {
        let words = result.map(drop).expect_err(part);
        assert!(words.contains(part), "{words}");
    };
    assert_eq!(honest.column_order("a.weight"), None);
    let mixed = ordered(|at| at as i32 % 2, gptq, 8).expect("ordered by activation");
    let even_then_odd: Vec<u32> = (0..64).step_by(2).chain((1..64).step_by(2)).collect();
    assert_eq!(mixed.column_order("a.weight"), Some(&*even_then_odd));
    let uneven = |at: usize| i32::from(at > 40);
    says(ordered(uneven, gptq, 8), "its g_idx does not divide 64 columns into groups of 32");
    says(ordered(sequential, gptq, 4), "8 outputs, and scales for 4");
    says(ordered(sequential, "", 8), "a.qweight\" is packed in a way that quantization_config does not declare");
    let awq = gptq.replace("gptq", "awq");
    says(ordered(sequential, &awq, 8), "8 words a row for 8 outputs of 4 bits");
    let compressed = r#""quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"],
        "weights": {"num_bits": 4}}}},"#;
    says(ordered(sequential, compressed, 8), "is packed in a way that quantization_config does not declare");
}
