//! Hugging Face directories: `config.json`, `generation_config.json`, safetensors in one or several files.
//!
//! `safetensors` reads heads, `shards` finds the files, `names` maps names, `mlx` joins the three tensors of a
//! quantized one, `config`, `encoder`, `hybrid`, `rope`, `vision` and `intern` resolve the configuration, `values` reads what they share, `json` holds bounded JSON access.

mod audio;
mod config;
mod encoder;
mod hybrid;
mod intern;
mod json;
mod mlx;
mod names;
mod rope;
mod safetensors;
mod shards;
mod values;
mod vision;

use crate::config::ModelConfig;
use crate::directory::Directory;
use crate::error::FormatError;
use crate::mapping::Mapping;
use std::path::Path;

/// What a Hugging Face checkpoint consists of. Without weights, `files` and `directory` are empty.
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

/// Opens a directory with a `config.json` and, unless it is there for planning only, safetensors.
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
    let entries = mlx::join(tensors, opened.config.quantization.as_ref())?;
    opened.directory = Directory::new(entries)?;
    // The file decides, whatever its configuration says: a head that is there is not the embedding's table again, which writers leave out.
    if !opened.directory.is_empty() {
        opened.config.tie_word_embeddings = opened.directory.get("lm_head.weight").is_none();
    }
    if opened.config.delta_net.is_some() && hybrid::norms_are_shifted(&opened.directory) {
        opened.config.norm_weight_offset = 0.0;
    }
    Ok(opened)
}
