//! Reads checkpoints: files in, one [`Checkpoint`] value out.
//!
//! A checkpoint is a model's configuration, a directory of its tensors, and a way to decode any row of any tensor. Tensors have the names
//! that Hugging Face's transformers use. Two kinds of files are supported. A GGUF model is one file or a split one, with a vision encoder
//! in a second one. A Hugging Face directory has `config.json` beside safetensors. These are plain, quantized by MLX, AWQ, GPTQ, AutoRound
//! or compressed-tensors, or in FP8 or NVFP4.
//!
//! Every byte of these files is hostile until checked. Counts, lengths, shapes and offsets are compared with the file's size before
//! anything is allocated. Sums and products are checked for overflow. A file with a false value ends in a [`FormatError`] which names the
//! value.
//!
//! Not in this crate: packing for kernels, tokenizers, chat templates, downloads, devices and memory budgets. The crate itself allocates
//! little (a directory of names). [`Checkpoint::release`] releases the file's pages tensor by tensor.
//!
//! ```no_run
//! use plimsoll_formats::{Checkpoint, Row, RowBuf};
//!
//! let checkpoint = Checkpoint::open("model.gguf".as_ref())?;
//! let mut row = RowBuf::new();
//! for (name, info) in checkpoint.tensors() {
//!     for index in 0..info.rows() {
//!         checkpoint.decode_rows(name, index, &mut row)?;
//!         match row.row() {
//!             Row::Float(values) => assert_eq!(values.len(), info.cols()),
//!             Row::F8 { numbers, .. } => assert_eq!(numbers.len(), info.cols()),
//!             Row::Quant { codes, .. } => assert_eq!(codes.len(), info.cols()),
//!         }
//!     }
//!     checkpoint.release(name);
//! }
//! # Ok::<(), plimsoll_formats::FormatError>(())
//! ```

mod activation;
mod architecture;
mod audio;
mod bounds;
mod checkpoint;
mod config;
mod decode;
mod directory;
mod draft_head;
mod e4m3;
mod encoder;
mod encoder_sizes;
mod encoding;
mod error;
mod family;
mod ggml_type;
mod gguf;
#[cfg(unix)]
mod guard;
mod hf;
mod layers;
mod mapping;
mod names;
mod quantization;
mod qwen4;
mod row;
mod row_form;
mod scaled;
mod stored_rows;
mod variant;
mod vision;

pub use activation::Activation;
pub use architecture::Architecture;
pub use audio::{Audio, AudioChunks, AudioKind, AudioTask, AudioWindows, Conformer, Whisper};
pub use bounds::VOCAB_MAX;
pub use checkpoint::{Checkpoint, DRAFT_PREFIX, Sources};
pub use config::{DeltaNet, Experts, LongRope, ModelConfig, RopeScaling, Routing, YarnScaling};
pub use encoder::{Classifier, Dense, DenseLayer, Encoder};
pub use encoding::{Codebook, Dtype, Encoding, QuantLayout, ScaleKind, TensorInfo};
pub use error::FormatError;
pub use family::supported_models;
pub use gguf::{GgufMeta, GgufStrings, GgufValue, JUDGE, Mmproj, MmprojState, Processor};
pub use mapping::{FileIdentity, Mapping};
pub use quantization::{F8Quant, GroupQuant, IntegerQuant, Method, Mode, Quantization, Scheme};
pub use qwen4::{HashedHead, Indexer, Ngrams, Qwen4};
pub use row::{Row, RowBuf, RowScales};
pub use stored_rows::{StoredRows, StoredTensors};
pub use variant::{
    Latent, LayerHeads, Mamba, MambaScales, Mixer, Norms, OutputGate, PerLayerInput, QkNorm, QueryGrowth, Variant,
};
pub use vision::{Gemma4, Intern, Llama4, MediaTokens, Pixtral, RopeSections, Siglip2, Vision, VisionKind};
