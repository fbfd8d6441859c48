//! Second scales of GGUF weights, which llama.cpp's converter writes beside NVFP4 tensors: `X.scale` beside `X.weight`.
//!
//! A scale is one number for a matrix, or one for each expert. llama.cpp multiplies the matrix's output by it; here it becomes part of the
//! weight.
//! Reference: llama.cpp, `conversion/base.py` and `src/llama-graph.cpp`.

use std::collections::BTreeMap;

use super::names::{INPUT_SCALE, SCALE};
use crate::directory::{Entry, Storage};
use crate::error::{FormatError, quote};
use crate::mapping::Mapping;
use crate::scaled::{self, Factors};

/// Joins second scales with their weights. Refuses a scale without a weight: without it the model's answers are nonsense.
pub(super) fn join(entries: &mut Vec<Entry>, files: &[Mapping]) -> Result<(), FormatError> {
    // Engines that quantize activations to NVFP4 need these. Here activations have at least 8 bits, and their scales are computed.
    entries.retain(|entry| !entry.name.ends_with(INPUT_SCALE));
    let mut scales: BTreeMap<String, Entry> = BTreeMap::new();
    for scale in entries.extract_if(.., |entry| entry.name.ends_with(SCALE)) {
        let weight = scale.name.strip_suffix(SCALE).unwrap_or(&scale.name).to_owned();
        if let Some(other) = scales.insert(weight, scale) {
            return Err(FormatError::DuplicateTensor(quote(&other.name)));
        }
    }
    if scales.is_empty() {
        return Ok(());
    }
    for entry in std::mem::take(entries) {
        entries.push(match scales.remove(&entry.name) {
            Some(scale) => with_scale(entry, &scale, files)?,
            None => entry,
        });
    }
    match scales.pop_first() {
        Some((weight, _)) => {
            let what = format!("tensor {} is missing, and its scale is there; fetch the file again", quote(&weight));
            Err(FormatError::Gguf(what))
        }
        None => Ok(()),
    }
}

/// Returns the weight with its second scale.
fn with_scale(weight: Entry, scale: &Entry, files: &[Mapping]) -> Result<Entry, FormatError> {
    let name = weight.name.clone();
    let kind = match &weight.storage {
        Storage::Blocks(_, kind) => kind.name().to_owned(),
        _ => format!("{:?}", weight.info.encoding),
    };
    let wrong = |what: String| FormatError::Unsupported(format!("tensor {} of type {kind}: {what}", quote(&name)));
    let Some(span) = scale.storage.spans().next() else {
        return Err(wrong("its second scale has no bytes; fetch the file again".to_owned()));
    };
    let bytes = &files[span.file].bytes()[span.range.clone()];
    scaled::apply(weight, &Factors { encoding: scale.info.encoding, bytes, divides: false }).map_err(wrong)
}
