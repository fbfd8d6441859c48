//! `config.json` of text encoders → the model configuration, with the defaults of transformers. Each family has a file here and a row in
//! [`FAMILIES`].
//!
//! A family's file has the names of its classes, the meaning of its keys, and its tensor names. Model code does not depend on the family:
//! `plimsoll-models` reads [`crate::Encoder`].

mod bert;
mod modernbert;
mod nomic_bert;

use super::json::Lookup;
use super::values::{activation_of, dtype};
use crate::activation::Activation;
use crate::architecture::Architecture;
use crate::config::ModelConfig;
use crate::encoder::Encoder;
use crate::encoder_sizes::Sizes;
use crate::error::FormatError;
use crate::family::{Names, unknown_architecture};
use crate::quantization::Quantization;
use serde_json::Value;

/// All families of text encoders.
const FAMILIES: &[&Family] = &[&bert::BERT, &bert::ROBERTA, &modernbert::FAMILY, &nomic_bert::FAMILY];

/// The facts of one family.
struct Family {
    architecture: Architecture,
    /// Values of `architectures` and `model_type`.
    classes: &'static [&'static str],
    /// Reads the family's keys into a configuration.
    read: fn(&Lookup) -> Result<ModelConfig, FormatError>,
    /// Tensors without a canonical name. The canonical names are the decoders' for parts that decoders also have.
    names: Names,
}

/// The encoder of this class or `model_type`.
pub(super) fn architecture(name: &str) -> Option<Architecture> {
    let family = FAMILIES.iter().find(|family| family.classes.contains(&name))?;
    Some(family.architecture.clone())
}

/// The family's tensor names; none if the architecture is not a text encoder.
pub(super) fn names(architecture: &Architecture) -> Option<Names> {
    FAMILIES.iter().find(|family| family.architecture == *architecture).map(|family| family.names)
}

/// Builds the whole configuration of a text encoder.
pub(super) fn build(config: &Lookup, architecture: &Architecture) -> Result<ModelConfig, FormatError> {
    for key in ["is_decoder", "add_cross_attention"] {
        refuse_true(config, key)?;
    }
    let family = FAMILIES.iter().find(|family| family.architecture == *architecture);
    let family = family.ok_or_else(|| unknown_architecture("architecture", &architecture.to_string()))?;
    (family.read)(config)
}

/// Returns a configuration of these sizes ([`Sizes::config`]), with the values that are stored under common keys.
pub(super) fn base(
    config: &Lookup,
    architecture: Architecture,
    sizes: &Sizes,
    encoder: Encoder,
) -> Result<ModelConfig, FormatError> {
    let built = sizes.config(architecture, encoder)?;
    Ok(ModelConfig { torch_dtype: dtype(config)?, quantization: Quantization::read(config)?, ..built })
}

/// An encoder in BERT's layout: norms after each half of a layer, without a table of positions, token types and gates.
fn plain(config: &Lookup) -> Result<Encoder, FormatError> {
    Ok(Encoder { labels: labels(config)?, sigmoid: !score_as_is(config), ..Encoder::PLAIN })
}

/// Refuses a key that changes the model's results when it is true.
fn refuse_true(config: &Lookup, key: &str) -> Result<(), FormatError> {
    match config.bool(key)? {
        Some(true) => Err(FormatError::Unsupported(format!("{key} true in an encoder; supported is false"))),
        _ => Ok(()),
    }
}

/// The number of token types: 2 by default, never 0.
fn token_types(config: &Lookup) -> Result<usize, FormatError> {
    match config.size("type_vocab_size")?.unwrap_or(2) {
        0 => Err(FormatError::Config("type_vocab_size: 0, allowed are 1 and more".to_owned())),
        count => Ok(count),
    }
}

/// The number of the classifier's scores; none for a model without a classifier.
fn labels(config: &Lookup) -> Result<Option<usize>, FormatError> {
    let class = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    if !class.is_some_and(|class| class.ends_with("ForSequenceClassification")) {
        return Ok(None);
    }
    let named = config.get("id2label").and_then(Value::as_object).map(serde_json::Map::len);
    Ok(Some(config.size("num_labels")?.or(named).unwrap_or(2)))
}

/// Whether sentence-transformers' key, in its old or its new spelling, asks for scores without an activation.
fn score_as_is(config: &Lookup) -> bool {
    let new = config.get("sentence_transformers").and_then(|value| value.get("activation_fn"));
    let old = config.get("sbert_ce_default_activation_function");
    new.or(old).and_then(Value::as_str).is_some_and(|name| name.ends_with("Identity"))
}

/// The activation under this key.
fn activation(config: &Lookup, key: &str, default: &str) -> Result<Activation, FormatError> {
    activation_of(config.str(key)?.unwrap_or(default))
}
