//! Helpers of the tests: temporary directories, fixtures, and a small writer of GGUF and safetensors bytes that can
//! also write wrong ones.

#![allow(dead_code)] // Each test binary uses a part of these.

use plimsoll_formats::{Checkpoint, FormatError, ModelConfig, RowBuf};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A directory that is removed when the value goes out of scope.
pub struct TempDir(pub PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("plimsoll-formats-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary directory can be made");
        TempDir(path)
    }

    /// Writes a file and returns its path.
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).expect("a temporary file can be written");
        path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// The path of a fixture.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Reads a file of little-endian f32.
pub fn read_f32(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).expect("the fixture is there");
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// All values of a tensor, row after row.
pub fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let info = checkpoint.tensor(name).unwrap_or_else(|| panic!("{name} is there"));
    let mut row = RowBuf::new();
    let mut values = Vec::new();
    for index in 0..info.rows() {
        checkpoint.decode_rows(name, index, &mut row).expect("a row within bounds decodes");
        assert_eq!(row.len(), info.cols());
        let start = values.len();
        values.resize(start + row.len(), f32::NAN);
        row.dequantize(&mut values[start..]);
    }
    values
}

/// Opens a checkpoint and decodes all its tensors.
pub fn exercise(path: &Path) -> Result<(), FormatError> {
    let checkpoint = Checkpoint::open(path)?;
    let names: Vec<String> = checkpoint.tensors().map(|(name, _)| name.to_owned()).collect();
    for name in names {
        values(&checkpoint, &name);
        checkpoint.release(&name);
    }
    Ok(())
}

/// Writes GGUF version 3 with any values, also wrong ones.
#[derive(Clone)]
pub struct GgufWriter {
    pub version: u32,
    pub keys: Vec<(String, u32, Vec<u8>)>,
    /// Name, dimensions (fastest first), type, offset.
    pub tensors: Vec<(String, Vec<u64>, u32, u64)>,
    pub data: Vec<u8>,
}

impl GgufWriter {
    /// A complete configuration of one layer under the prefix `arch`, without tensors.
    pub fn new(arch: &str) -> GgufWriter {
        let mut writer = GgufWriter { version: 3, keys: Vec::new(), tensors: Vec::new(), data: Vec::new() };
        writer.str("general.architecture", arch);
        for (key, value) in [
            ("context_length", 128),
            ("embedding_length", 64),
            ("block_count", 12),
            ("feed_forward_length", 96),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
        ] {
            writer.u32(&format!("{arch}.{key}"), value);
        }
        writer.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-6);
        writer.strings("tokenizer.ggml.tokens", &["a", "b", "c"]);
        writer
    }

    pub fn set(&mut self, key: &str, kind: u32, value: impl Into<Vec<u8>>) -> &mut Self {
        self.keys.retain(|(name, ..)| name != key);
        self.keys.push((key.to_owned(), kind, value.into()));
        self
    }

    pub fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.set(key, 4, value.to_le_bytes())
    }

    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.set(key, 6, value.to_le_bytes())
    }

    pub fn str(&mut self, key: &str, value: &str) -> &mut Self {
        self.set(key, 8, text(value))
    }

    pub fn strings(&mut self, key: &str, values: &[&str]) -> &mut Self {
        let mut bytes = 8u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| bytes.extend(text(value)));
        self.set(key, 9, bytes)
    }

    pub fn u32s(&mut self, key: &str, values: &[u32]) -> &mut Self {
        let mut bytes = 4u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        self.set(key, 9, bytes)
    }

    pub fn bools(&mut self, key: &str, values: &[bool]) -> &mut Self {
        let mut bytes = 7u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(values.iter().map(|&value| u8::from(value)));
        self.set(key, 9, bytes)
    }

    /// Adds an array of four-byte numbers of this type.
    pub fn array(&mut self, key: &str, kind: u32, values: &[[u8; 4]]) -> &mut Self {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| bytes.extend(value));
        self.set(key, 9, bytes)
    }

    /// Adds an F32 tensor of zeros at the next aligned offset.
    pub fn tensor(&mut self, name: &str, dims: &[u64]) -> &mut Self {
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self.tensors.push((name.to_owned(), dims.to_vec(), 0, self.data.len() as u64));
        let bytes = dims.iter().product::<u64>() as usize * 4;
        self.data.resize(self.data.len() + bytes, 0);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.keys {
            bytes.extend(text(key));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(value);
        }
        for (name, dims, kind, offset) in &self.tensors {
            bytes.extend(text(name));
            bytes.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(&self.data);
        bytes
    }

    /// Writes the file into a fresh directory and opens it.
    pub fn open(&self) -> Result<Checkpoint, FormatError> {
        let dir = TempDir::new();
        Checkpoint::open(&dir.write("model.gguf", self.bytes()))
    }

    /// Returns the message with which opening fails.
    pub fn refusal(&self) -> String {
        match self.open() {
            Ok(_) => panic!("the file was accepted"),
            Err(error) => error.to_string(),
        }
    }
}

/// Returns a model of this architecture that takes a vision encoder: vectors of 64 numbers, heads of 16.
pub fn seeing_model(arch: &str) -> GgufWriter {
    let mut model = GgufWriter::new(arch);
    model.strings("tokenizer.ggml.tokens", &["a", "<|image_pad|>", "<|video_pad|>"]);
    model.array(&format!("{arch}.rope.dimension_sections"), 5, &[4u32, 2, 2, 0].map(u32::to_le_bytes));
    if arch != "qwen2vl" {
        model.u32(&format!("{arch}.n_deepstack_layers"), 1);
    }
    model
}

/// Returns an encoder of two layers for such a model, with this type of projector; all its weights are 0.
pub fn seeing(projector: &str) -> GgufWriter {
    let mut encoder = GgufWriter { version: 3, keys: Vec::new(), tensors: Vec::new(), data: Vec::new() };
    encoder.str("general.architecture", "clip").str("clip.projector_type", projector);
    encoder.set("clip.has_vision_encoder", 7, [1]);
    for (key, value) in [
        ("block_count", 2),
        ("embedding_length", 8),
        ("feed_forward_length", 16),
        ("attention.head_count", 2),
        ("patch_size", 4),
        ("image_size", 12),
        ("image_min_pixels", 64),
        ("image_max_pixels", 4096),
    ] {
        encoder.u32(&format!("clip.vision.{key}"), value);
    }
    encoder.f32("clip.vision.attention.layer_norm_epsilon", 1e-6);
    for key in ["image_mean", "image_std"] {
        encoder.array(&format!("clip.vision.{key}"), 6, &[0.5f32.to_le_bytes(); 3]);
    }
    let (hidden, wide, merged) = (8, 16, 32);
    let later = projector == "qwen3vl_merger";
    encoder.tensor("v.patch_embd.weight", &[4, 4, 3, hidden]).tensor("v.patch_embd.weight.1", &[4, 4, 3, hidden]);
    for layer in 0..2 {
        for (part, shape) in [("ffn_up", [hidden, wide]), ("ffn_down", [wide, hidden]), ("attn_out", [hidden, hidden])]
        {
            encoder.tensor(&format!("v.blk.{layer}.{part}.weight"), &shape);
            encoder.tensor(&format!("v.blk.{layer}.{part}.bias"), &shape[1..]);
        }
        for part in ["ln1", "ln2"] {
            encoder.tensor(&format!("v.blk.{layer}.{part}.weight"), &[hidden]);
        }
        for part in if later { &["attn_qkv"][..] } else { &["attn_q", "attn_k", "attn_v"] } {
            let rows = if later { 3 * hidden } else { hidden };
            encoder.tensor(&format!("v.blk.{layer}.{part}.weight"), &[hidden, rows]);
            encoder.tensor(&format!("v.blk.{layer}.{part}.bias"), &[rows]);
        }
    }
    encoder
        .tensor("v.post_ln.weight", &[hidden])
        .tensor("mm.0.weight", &[merged, merged])
        .tensor("mm.2.weight", &[merged, 64]);
    if later {
        encoder.set("clip.use_gelu", 7, [1]).bools("clip.vision.is_deepstack_layers", &[false, true]);
        encoder.tensor("v.post_ln.bias", &[hidden]).tensor("v.patch_embd.bias", &[hidden]);
        encoder.tensor("v.position_embd.weight", &[hidden, 9]);
        encoder.tensor("v.deepstack.1.norm.weight", &[merged]).tensor("v.deepstack.1.fc1.weight", &[merged, merged]);
        encoder.tensor("v.deepstack.1.fc2.weight", &[merged, 64]);
    }
    encoder
}

/// A length-prefixed text.
fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend(value.as_bytes());
    bytes
}

/// Returns a safetensors file with this head and `data` bytes of data.
pub fn safetensors(head: &str, data: usize) -> Vec<u8> {
    let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
    bytes.extend(head.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// The smallest `config.json` of a Llama.
pub const LLAMA: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}"#;

/// Opens a `config.json` with this text and no other files.
pub fn open_config(json: &str) -> Result<Checkpoint, FormatError> {
    let dir = TempDir::new();
    Checkpoint::open(&dir.write("config.json", json))
}

/// Returns the configuration of [`LLAMA`] as another class, with members replaced or added.
pub fn patched(class: &str, extra: &str) -> Result<ModelConfig, String> {
    let parse = |json: &str| serde_json::from_str::<serde_json::Map<_, _>>(json).expect("the test's JSON is right");
    let mut object = parse(&LLAMA.replace("LlamaForCausalLM", class));
    object.extend(parse(r#"{"num_key_value_heads": 2}"#));
    object.extend(parse(&format!("{{{extra}}}")));
    let json = serde_json::Value::Object(object).to_string();
    open_config(&json).map(|checkpoint| checkpoint.config).map_err(|error| error.to_string())
}

/// Returns the same configuration; a refusal fails the test.
pub fn of_class(class: &str, extra: &str) -> ModelConfig {
    patched(class, extra).unwrap_or_else(|error| panic!("{class}: {error}"))
}

/// Asserts that each of these keys, written after the class's keys, is refused with this text. The last of equal keys counts.
#[track_caller]
pub fn refuses(class: &str, keys: &str, cases: &[(&str, &str)]) {
    for (extra, refusal) in cases {
        let refused = patched(class, &format!("{keys}, {extra}")).map(drop);
        assert_eq!(refused, Err((*refusal).to_owned()), "{extra}");
    }
}
