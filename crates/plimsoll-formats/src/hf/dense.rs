//! The dense layers of sentence-transformers after an encoder's pooling: `modules.json`, and the folders that it names.
//!
//! The other modules of `modules.json` are read where a model is opened for serving.

use std::path::{Component, Path, PathBuf};

use super::json::{Lookup, read_array, read_object};
use crate::bounds::{HIDDEN_MAX, within};
use crate::encoder::{Dense, DenseLayer};
use crate::error::{FormatError, quote};
use serde_json::Value;

/// The file with the weights of a dense layer.
const WEIGHTS: &str = "model.safetensors";

/// Returns the dense layers and the files with their weights. None without `modules.json`, or if it names no such layers.
pub(super) fn read(dir: &Path, hidden: usize) -> Result<Option<(Dense, Vec<PathBuf>)>, FormatError> {
    let file = dir.join("modules.json");
    if !file.is_file() {
        return Ok(None);
    }
    let modules = read_array(&file)?;
    let of = |kind: &str| {
        let kind = format!(".{kind}");
        modules.iter().filter(move |module| module["type"].as_str().is_some_and(|name| name.ends_with(&kind)))
    };
    if of("Dense").next().is_none() {
        return Ok(None);
    }
    let mean = match of("Pooling").next() {
        Some(pooling) => !reads_first(dir, pooling)?,
        None => return Err(FormatError::Config("modules.json has dense layers and no pooling".to_owned())),
    };
    let (mut dense, mut files, mut width) = (Dense { mean, layers: [None; 2] }, Vec::new(), hidden);
    for (number, module) in of("Dense").enumerate() {
        let folder = folder(dir, module)?;
        let layer = layer(&folder, width)?;
        let Some(place) = dense.layers.get_mut(number) else {
            return Err(FormatError::Unsupported(format!(
                "more than {} dense layers; supported are up to {0}",
                dense.layers.len()
            )));
        };
        (*place, width) = (Some(layer), layer.width);
        files.push(folder.join(WEIGHTS));
    }
    Ok(Some((dense, files)))
}

/// Reads one layer with an input of `width` elements.
fn layer(folder: &Path, width: usize) -> Result<DenseLayer, FormatError> {
    let object = read_object(&folder.join("config.json"))?;
    let config = Lookup { inner: &object, outer: None };
    let (input, output) = (config.need("in_features")?, config.need("out_features")?);
    if input != width {
        return Err(FormatError::Config(format!(
            "in_features of a dense layer is {input}; what it reads has {width} elements"
        )));
    }
    within("out_features", output, HIDDEN_MAX)?;
    // The published code writes the name of a torch class.
    let activation = config.str("activation_function")?.unwrap_or("Tanh");
    let tanh = match activation.rsplit('.').next() {
        Some("Identity") => false,
        Some("Tanh") => true,
        _ => {
            return Err(FormatError::Unsupported(format!(
                "activation_function {} of a dense layer; supported are Identity and Tanh",
                quote(activation)
            )));
        }
    };
    Ok(DenseLayer { width: output, bias: config.bool("bias")?.unwrap_or(true), tanh })
}

/// Whether the pooling takes the first position. Otherwise it takes the mean of all positions.
fn reads_first(dir: &Path, pooling: &Value) -> Result<bool, FormatError> {
    let object = read_object(&folder(dir, pooling)?.join("config.json"))?;
    let config = Lookup { inner: &object, outer: None };
    let named = config.get("pooling_mode").and_then(Value::as_str);
    Ok(config.bool("pooling_mode_cls_token")? == Some(true) || matches!(named, Some("cls" | "cls_token")))
}

/// Returns the folder of a module, inside the checkpoint's folder.
fn folder(dir: &Path, module: &Value) -> Result<PathBuf, FormatError> {
    let path = module["path"].as_str().unwrap_or_default();
    match !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_))) {
        true => Ok(dir.join(path)),
        false => Err(FormatError::Config(format!(
            "modules.json: path {} leaves the model's folder; use a folder inside it",
            quote(path)
        ))),
    }
}

/// The canonical name of a tensor of dense layer `number`.
pub(super) fn canonical(number: usize, name: &str) -> Option<String> {
    let part = name.strip_prefix("linear.")?;
    matches!(part, "weight" | "bias").then(|| format!("dense.{number}.{part}"))
}
