//! Hugging Face directories: `config.json`, `generation_config.json`, safetensors in one or several files.
//!
//! `safetensors` reads heads, `shards` finds the files, `names` maps names, `quantized` joins the tensors of a quantized module. `config`,
//! `dense`, `encoder`, `hybrid`, `rope`, `vision`, `audio` and the files of single families resolve the configuration. `values` reads the
//! values that they share; `json` reads JSON with bounds.

mod audio;
mod config;
mod dense;
mod encoder;
mod gemma4;
mod hybrid;
mod idefics3;
mod intern;
mod intern_chat;
pub(crate) mod json;
mod llama4;
mod names;
mod pixtral;
mod quantized;
mod qwen4;
mod rope;
mod safetensors;
mod shards;
mod siglip;
mod siglip2;
pub(crate) mod values;
mod vision;
mod whisper;

use crate::architecture::Architecture;
use crate::config::ModelConfig;
use crate::directory::Directory;
use crate::draft_head;
use crate::error::FormatError;
use crate::family::{self, Names};
use crate::mapping::Mapping;
use crate::vision::VisionKind;
use safetensors::Found;
use std::path::Path;

/// The parts of an opened Hugging Face checkpoint. Without weights, `files` and `directory` are empty.
pub(crate) struct Opened {
    pub(crate) files: Vec<Mapping>,
    pub(crate) config: ModelConfig,
    pub(crate) directory: Directory,
}

/// Reads a `config.json` alone, for planning.
pub(crate) fn open_config(path: &Path) -> Result<Opened, FormatError> {
    let generation = path.with_file_name("generation_config.json");
    let config = config::read(path, &generation)?;
    Ok(Opened { files: Vec::new(), config, directory: Directory::default() })
}

/// Parses the text of a `config.json`, for planning.
pub(crate) fn parse_config(text: &str) -> Result<ModelConfig, FormatError> {
    let top = json::parse_object(text.as_bytes()).map_err(|error| FormatError::Config(error.to_string()))?;
    config::resolve(&top, &Default::default(), None)
}

/// The family's names for parts of a layer.
fn names_of(config: &ModelConfig) -> Option<Names> {
    match &config.architecture {
        Architecture::Family(name) => family::named(name).map(|family| family.hf_names),
        Architecture::Whisper => Some(whisper::NAMES),
        other => encoder::names(other),
    }
}

/// Gives the modules in the quantization's overrides their canonical names.
fn rename_overrides(config: &mut ModelConfig, names: Names) {
    let Some(quantization) = &mut config.quantization else { return };
    let renamed = std::mem::take(&mut quantization.overrides).into_iter();
    let renamed = renamed.map(|(name, quant)| (family::canonical(names, &name).unwrap_or(name), quant));
    quantization.overrides = renamed.collect();
}

/// Opens the dense layers after an encoder's pooling, if the directory has any. Without `weights` only their configuration is read.
fn open_dense(dir: &Path, opened: &mut Opened, weights: bool) -> Result<Vec<Found>, FormatError> {
    let hidden = opened.config.hidden_size;
    let Some(encoder) = opened.config.encoder.as_mut().filter(|encoder| encoder.labels.is_none()) else {
        return Ok(Vec::new());
    };
    let Some((dense, files)) = dense::read(dir, hidden)? else { return Ok(Vec::new()) };
    encoder.dense = Some(dense);
    let mut tensors = Vec::new();
    for (number, path) in files.into_iter().enumerate().filter(|_| weights) {
        let mapping = Mapping::open(&path)?;
        let found = safetensors::parse(mapping.bytes(), opened.files.len());
        mapping.unchanged()?;
        let named = |tensor: Found| Some(Found { name: dense::canonical(number, &tensor.name)?, ..tensor });
        tensors.extend(found?.into_iter().filter_map(named));
        opened.files.push(mapping);
    }
    Ok(tensors)
}

/// Opens a directory with a `config.json` and safetensors. A directory for planning has no safetensors.
pub(crate) fn open_dir(dir: &Path) -> Result<Opened, FormatError> {
    let mut opened = open_config(&dir.join("config.json"))?;
    let mut tensors = Vec::new();
    for shard in shards::find(dir)? {
        let file = opened.files.len();
        let mapping = Mapping::open(&shard.path)?;
        let found = safetensors::parse(mapping.bytes(), file);
        mapping.unchanged()?;
        let found = found?;
        opened.files.push(mapping);
        shard.check(&found)?;
        tensors.extend(found);
    }
    let dense = open_dense(dir, &mut opened, !tensors.is_empty())?;
    tensors.extend(dense);
    qwen4::check_stored(&opened.config, &tensors, &opened.files)?;
    let mut entries = quantized::join(&tensors, opened.config.quantization.as_ref(), &opened.files)?;
    if let Some(names) = names_of(&opened.config) {
        for entry in &mut entries {
            if let Some(name) = family::canonical(names, &entry.name) {
                entry.name = name;
            }
        }
        rename_overrides(&mut opened.config, names);
    }
    if opened.config.vision.as_ref().is_some_and(|vision| matches!(vision.encoder, VisionKind::Intern(_))) {
        for entry in &mut entries {
            if let Some(name) = intern_chat::renamed(&entry.name) {
                entry.name = name;
            }
        }
    }
    draft_head::rename(&mut entries, opened.config.layers as u64, opened.config.draft_layers);
    opened.directory = Directory::new(entries)?;
    // The file decides, not its configuration. A stored head is not a copy of the embedding table, since writers omit a tied head.
    if !opened.directory.is_empty() {
        opened.config.tie_word_embeddings = opened.directory.get("lm_head.weight").is_none();
    }
    if opened.config.delta_net.is_some() && hybrid::norms_are_shifted(&opened.directory) {
        opened.config.norm_weight_offset = 0.0;
    }
    Ok(opened)
}
