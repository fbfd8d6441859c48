//! The safetensors files of a checkpoint: a single one, those of an index, or all in the directory.
//!
//! Names in an index are file names, not paths: no file outside the directory is opened.

use super::json::read_bounded;
use super::safetensors::Found;
use crate::error::{FormatError, quote};
use serde::de::{Deserializer, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Largest index file.
const INDEX_BYTES_MAX: u64 = 64 << 20;
/// Most files of a checkpoint.
const SHARDS_MAX: usize = 4096;

/// One safetensors file, and the tensors that an index lists for it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Shard {
    pub(super) path: PathBuf,
    /// Names of tensors that must be in the file; empty without an index.
    promised: Vec<String>,
}

impl Shard {
    /// Refuses a file without a tensor that the index lists.
    pub(super) fn check(&self, found: &[Found]) -> Result<(), FormatError> {
        let mut names: Vec<&str> = found.iter().map(|tensor| tensor.name.as_str()).collect();
        names.sort_unstable();
        match self.promised.iter().find(|name| names.binary_search(&name.as_str()).is_err()) {
            None => Ok(()),
            Some(name) => Err(FormatError::Safetensors(format!(
                "the index places {} in {}, which does not have it",
                quote(name),
                self.path.display()
            ))),
        }
    }
}

/// Finds the files. An empty list means a directory for planning only.
pub(super) fn find(dir: &Path) -> Result<Vec<Shard>, FormatError> {
    // A single file comes first, as in transformers: an index beside it belongs to the model it was trained from.
    let single = dir.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![Shard { path: single, promised: Vec::new() }]);
    }
    let index = dir.join("model.safetensors.index.json");
    if index.is_file() {
        return from_index(dir, &read_bounded(&index, INDEX_BYTES_MAX)?);
    }
    let mut shards = Vec::new();
    for file in std::fs::read_dir(dir).map_err(FormatError::io(dir))? {
        let path = file.map_err(FormatError::io(dir))?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            shards.push(Shard { path, promised: Vec::new() });
        }
        check_count(shards.len())?;
    }
    shards.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(shards)
}

/// The files that an index names, in order of name.
fn from_index(dir: &Path, bytes: &[u8]) -> Result<Vec<Shard>, FormatError> {
    let index: Index =
        serde_json::from_slice(bytes).map_err(|error| FormatError::Safetensors(format!("index: {error}")))?;
    let mut shards = Vec::with_capacity(index.weight_map.0.len());
    for (name, promised) in index.weight_map.0 {
        let plain = name.ends_with(".safetensors") && !name.contains(['/', '\\', ':', '\0']);
        if !plain {
            return Err(FormatError::Safetensors(format!("the index names a file {}", quote(&name))));
        }
        shards.push(Shard { path: dir.join(&name), promised });
    }
    Ok(shards)
}

fn check_count(shards: usize) -> Result<(), FormatError> {
    if shards <= SHARDS_MAX {
        return Ok(());
    }
    Err(FormatError::Safetensors(format!("more than {SHARDS_MAX} files")))
}

/// The index file.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// File name → names of its tensors. The map is inverted, since the index repeats a file's name for each tensor.
struct WeightMap(BTreeMap<String, Vec<String>>);

impl<'de> serde::Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WeightMap, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensor name to file name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
        while let Some((tensor, file)) = map.next_entry::<String, String>()? {
            files.entry(file).or_default().push(tensor);
            check_count(files.len()).map_err(serde::de::Error::custom)?;
        }
        Ok(WeightMap(files))
    }
}
