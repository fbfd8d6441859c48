//! GGUF files, versions 2 and 3, little endian: one file or the parts of a split one.
//!
//! `cursor` reads bounded primitives and `header` the directory. `meta` stores the metadata, `names` is a table, `scales` joins second
//! scales with their weights. `config`, `encoder` and `hybrid` turn metadata into a [`ModelConfig`](crate::ModelConfig). `mmproj` adds the
//! encoders of a second file. Blocks are decoded in `decode`.

mod config;
mod cursor;
mod encoder;
mod header;
mod hybrid;
pub(crate) mod keys;
mod meta;
mod mmproj;
mod names;
mod scales;

pub use config::JUDGE;
pub use meta::{GgufMeta, GgufStrings, GgufValue};
pub use mmproj::{Mmproj, MmprojState, Processor};
pub(crate) use mmproj::{attach, is_mmproj};

use crate::architecture::Architecture;
use crate::config::ModelConfig;
use crate::directory::Directory;
use crate::error::FormatError;
use crate::family;
use crate::mapping::Mapping;
use std::path::{Path, PathBuf};

/// The first four bytes of every GGUF file.
pub(crate) const MAGIC: &[u8; 4] = b"GGUF";

/// Most files that a split checkpoint may consist of.
const PARTS_MAX: u64 = 1000;

/// The parts of an opened GGUF checkpoint.
pub(crate) struct Opened {
    pub(crate) files: Vec<Mapping>,
    pub(crate) config: ModelConfig,
    pub(crate) directory: Directory,
    pub(crate) meta: GgufMeta,
}

/// Opens the GGUF file at `path`. If it is any part of a split checkpoint, opens all other parts too.
pub(crate) fn open(path: &Path) -> Result<Opened, FormatError> {
    let path = &first_part(path);
    let mut files = Vec::new();
    let first = add_file(&mut files, path, None)?;
    if first.meta.str("general.architecture").is_some_and(mmproj::is_encoder) {
        let what = "the encoders of a model, not a model; serve the model's own file, and this one with --mmproj";
        return Err(FormatError::NotACheckpoint { path: path.clone(), reason: what.to_owned() });
    }
    let architecture = first.architecture;
    let mut entries = first.entries;
    for sister in sisters(path, &first.meta)? {
        entries.append(&mut add_file(&mut files, &sister, Some(&architecture))?.entries);
    }
    // A model of an unknown family is never served, and the refusal names its architecture.
    if !matches!(architecture, Architecture::Other(_)) {
        scales::join(&mut entries, &files)?;
    }
    hybrid::name_draft_head(&first.meta, &mut entries)?;
    let directory = Directory::new(entries)?;
    let config = config::from_meta(&first.meta, architecture, &directory)?;
    Ok(Opened { files, config, directory, meta: first.meta })
}

/// Maps and parses one more file. The parsed values are copies, so the pages of the head, which include the vocabulary, are released.
fn add_file(
    files: &mut Vec<Mapping>,
    path: &Path,
    inherited: Option<&Architecture>,
) -> Result<header::Header, FormatError> {
    let mapping = Mapping::open(path)?;
    let header = header::parse(mapping.bytes(), files.len(), inherited);
    mapping.unchanged()?;
    let header = header?;
    mapping.release(0..header.head_bytes);
    files.push(mapping);
    Ok(header)
}

/// The other files of a split checkpoint, of which `path` must be the first (`...-00001-of-00003.gguf`).
fn sisters(path: &Path, meta: &GgufMeta) -> Result<Vec<PathBuf>, FormatError> {
    let parts = meta.u64("split.count").unwrap_or(1);
    if parts <= 1 {
        return Ok(Vec::new());
    }
    if parts > PARTS_MAX {
        return Err(FormatError::Gguf(format!("split.count is {parts}, allowed are {PARTS_MAX}")));
    }
    if meta.u64("split.no") != Some(0) {
        return Err(FormatError::Gguf(format!("{} is not the first part of a split checkpoint", path.display())));
    }
    let suffix = format!("-00001-of-{parts:05}.gguf");
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let stem = name.strip_suffix(&suffix).ok_or_else(|| {
        FormatError::Gguf(format!("split.count is {parts}, but the name {name:?} does not end in {suffix:?}"))
    })?;
    Ok((2..=parts).map(|part| path.with_file_name(format!("{stem}-{part:05}-of-{parts:05}.gguf"))).collect())
}

/// The path of the first part of the split checkpoint that `...-00002-of-00003.gguf` belongs to. Any other path is returned unchanged.
fn first_part(path: &Path) -> PathBuf {
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let parts = name.strip_suffix(".gguf").and_then(|name| name.rsplit_once("-of-"));
    let first = parts.and_then(|(rest, count)| {
        let (stem, number) = rest.rsplit_once('-')?;
        (digits(number) && digits(count)).then(|| path.with_file_name(format!("{stem}-00001-of-{count}.gguf")))
    });
    first.unwrap_or_else(|| path.to_path_buf())
}

/// The architecture with this name in `general.architecture`.
fn architecture_of(name: &str) -> Architecture {
    match name {
        "llama" => Architecture::Llama,
        "qwen2" | "qwen2vl" => Architecture::Qwen2,
        "qwen3" | "qwen3vl" => Architecture::Qwen3,
        "qwen3moe" | "qwen3vlmoe" => Architecture::Qwen3Moe,
        "qwen3next" => Architecture::Qwen3Next,
        "qwen35" => Architecture::Qwen3_5,
        "qwen35moe" => Architecture::Qwen3_5Moe,
        "bert" => Architecture::Bert,
        "nomic-bert" | "nomic-bert-moe" => Architecture::NomicBert,
        "modern-bert" => Architecture::ModernBert,
        other => family::of_gguf(other)
            .map_or_else(|| Architecture::Other(other.to_owned()), |family| Architecture::Family(family.name)),
    }
}
