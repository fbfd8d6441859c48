//! Families of decoders that need no model code: each has a file here and a row in [`FAMILIES`].
//!
//! A family's file has the names of its checkpoints, its class's defaults, the meaning of its keys, and the tensors with names that
//! differ from Llama's. Model code does not depend on the family: `plimsoll-models` reads [`crate::Variant`].

mod deepseek;
mod ernie;
mod experts;
mod falcon_h1;
mod gemma;
mod gemma4;
mod glm4;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod hunyuan;
mod laguna;
mod lfm2;
mod llama4;
mod ministral3;
mod muse_glimmer;
mod nemotron_h;
mod olmo;
mod phi3;
mod smollm3;

use crate::architecture::Architecture;
use crate::config::ModelConfig;
use crate::error::{FormatError, quote};
use crate::gguf::keys::Keys;
use crate::hf::json::Lookup;
pub(crate) use crate::names::{Names, renamed};
pub(crate) use gemma::is_embedding;

/// All families of decoders.
const FAMILIES: &[&Family] = &[
    &smollm3::FAMILY,
    &phi3::FAMILY,
    &ministral3::FAMILY,
    &granite::FAMILY,
    &olmo::OLMO2,
    &olmo::OLMO3,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &gemma4::FAMILY,
    &gemma4::UNIFIED,
    &gpt_oss::FAMILY,
    &hunyuan::FAMILY,
    &ernie::DENSE,
    &ernie::MOE,
    &glm4::DENSE,
    &glm4::MOE,
    &deepseek::DEEPSEEK,
    &deepseek::GLM_FLASH,
    &laguna::FAMILY,
    &muse_glimmer::FAMILY,
    &llama4::FAMILY,
    &lfm2::DENSE,
    &lfm2::MOE,
    &falcon_h1::FAMILY,
    &granite_hybrid::FAMILY,
    &nemotron_h::FAMILY,
];

/// The names of all models that run, for error messages.
pub fn supported_models() -> String {
    let families = FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>().join(", ");
    format!("{}, {families}", Architecture::OF_OWN_CODE)
}

/// The error for an unknown architecture, with the list of supported ones.
pub(crate) fn unknown_architecture(what: &str, name: &str) -> FormatError {
    FormatError::Unsupported(format!("{what} {}; supported are {}", quote(name), supported_models()))
}

/// The facts of one family.
pub(crate) struct Family {
    /// The family's name in messages.
    pub(crate) name: &'static str,
    /// Values of `architectures` and `model_type` in `config.json`.
    pub(crate) classes: &'static [&'static str],
    /// Values of `general.architecture` in GGUF files.
    pub(crate) gguf: &'static [&'static str],
    /// The values that transformers assumes for absent keys.
    pub(crate) defaults: Defaults,
    /// Reads the family's keys in `config.json`, after the common ones.
    pub(crate) from_hf: fn(&Lookup, &mut ModelConfig) -> Result<(), FormatError>,
    /// Reads the family's keys in GGUF metadata, after the common ones.
    pub(crate) from_gguf: fn(&Keys, &mut ModelConfig) -> Result<(), FormatError>,
    /// Tensors of Hugging Face checkpoints whose names are not canonical.
    pub(crate) hf_names: Names,
    /// Tensors of GGUF files with names that differ from the table in `gguf::names`.
    pub(crate) gguf_names: Names,
}

/// The values that transformers assumes for absent keys.
#[derive(Clone, Copy)]
pub(crate) struct Defaults {
    pub(crate) heads: Option<usize>,
    pub(crate) kv_heads: Option<usize>,
    pub(crate) head_dim: Option<usize>,
    pub(crate) vocab_size: Option<usize>,
    /// Width of the plain feed-forward part.
    pub(crate) intermediate: Option<usize>,
    pub(crate) max_context: usize,
    pub(crate) theta: f32,
    pub(crate) local_theta: Option<f32>,
    /// Share of a head that is rotated. None if the family rotates the whole head and refuses other shares.
    pub(crate) partial: Option<f32>,
    pub(crate) sliding_window: Option<usize>,
    pub(crate) activation: &'static str,
    pub(crate) eps: f32,
    pub(crate) tied: bool,
    /// Whether the family's reader supports KV heads and feed-forward widths that differ between layers. Otherwise these are refused.
    pub(crate) uneven: bool,
    /// Whether attention is latent: the family reads the widths of keys and values.
    pub(crate) latent: bool,
    /// Whether checkpoints may have an MTP head in the layers after the last.
    pub(crate) draft_head: bool,
}

impl Defaults {
    /// Llama's defaults.
    pub(crate) const LLAMA: Self = Self {
        heads: None,
        kv_heads: None,
        head_dim: None,
        vocab_size: None,
        intermediate: None,
        max_context: 2048,
        theta: 10_000.0,
        local_theta: None,
        partial: None,
        sliding_window: None,
        activation: "silu",
        eps: 1e-6,
        tied: false,
        uneven: false,
        latent: false,
        draft_head: false,
    };
}

/// The family with this class or model type in its checkpoints.
pub(crate) fn of_class(class: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.classes.contains(&class))
}

/// The family of this GGUF architecture.
pub(crate) fn of_gguf(architecture: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.gguf.contains(&architecture))
}

/// The family with this name.
pub(crate) fn named(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.name == name)
}

impl Architecture {
    /// Whether checkpoints may have a head for multi-token prediction (MTP).
    pub fn has_draft_head(&self) -> bool {
        match self {
            Architecture::Family(name) => named(name).is_some_and(|family| family.defaults.draft_head),
            // Qwen4-Exp's head is not supported.
            Architecture::Qwen4Exp => false,
            other => other.is_hybrid(),
        }
    }

    /// The architecture's name in GGUF files: `gemma3`, `qwen35moe`.
    pub fn gguf_name(&self) -> String {
        match self {
            Architecture::Other(name) => name.clone(),
            Architecture::Family(name) => {
                let family = named(name);
                // A family without GGUF files has the name of its `model_type`.
                let known = family.and_then(|family| family.gguf.first().or(family.classes.last()));
                known.unwrap_or(name).to_string()
            }
            Architecture::Roberta => "bert".to_owned(),
            Architecture::ModernBert => "modern-bert".to_owned(),
            Architecture::NomicBert => "nomic-bert".to_owned(),
            other => format!("{other:?}").replace('_', "").to_lowercase(),
        }
    }
}

/// The canonical name of the tensor or module `name` of a Hugging Face checkpoint.
pub(crate) fn canonical(names: Names, name: &str) -> Option<String> {
    match name.strip_prefix("model.layers.") {
        Some(rest) => {
            let (layer, part) = rest.split_once('.')?;
            renamed(names, part).map(|part| format!("model.layers.{layer}.{part}"))
        }
        None => renamed(names, name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_belongs_to_one_family() {
        let mut classes: Vec<_> = FAMILIES.iter().flat_map(|family| family.classes.iter().chain(family.gguf)).collect();
        let count = classes.len();
        classes.sort_unstable();
        classes.dedup();
        let shared: usize =
            FAMILIES.iter().map(|family| family.gguf.iter().filter(|a| family.classes.contains(a)).count()).sum();
        assert_eq!(classes.len() + shared, count, "a class belongs to one family");
    }

    #[test]
    fn parts_of_layers_are_renamed_as_wholes() {
        let names: Names = &[("feed_forward.w1", "mlp.gate_proj")];
        let of = |name| canonical(names, name);
        assert_eq!(of("model.layers.3.feed_forward.w1.weight").as_deref(), Some("model.layers.3.mlp.gate_proj.weight"));
        assert_eq!(of("model.layers.3.feed_forward.w1").as_deref(), Some("model.layers.3.mlp.gate_proj"));
        assert_eq!((of("model.layers.3.feed_forward.w12.weight"), of("model.norm.weight")), (None, None));
    }

    #[test]
    fn numbers_stay_and_names_outside_layers_are_whole() {
        let names: Names = &[("experts.*.w1", "mlp.experts.*.gate_proj"), ("model.embedding_norm", "model.norm")];
        let of = |name| canonical(names, name);
        let gate = "model.layers.3.mlp.experts.17.gate_proj.weight";
        assert_eq!(of("model.layers.3.experts.17.w1.weight").as_deref(), Some(gate));
        assert_eq!(of("model.embedding_norm.weight").as_deref(), Some("model.norm.weight"));
        let strangers =
            ["model.layers.3.experts.w1.weight", "model.layers.3.experts.x.w1", "model.embedding_norms.weight"];
        assert!(strangers.iter().all(|name| of(name).is_none()));
    }

    #[test]
    fn names_are_those_of_gguf_and_of_messages() {
        let names = [
            (Architecture::Qwen3_5Moe, "qwen35moe", "Qwen3_5Moe"),
            (Architecture::Family("Gemma 3"), "gemma3", "Gemma 3"),
            (Architecture::Family("Gemma 4"), "gemma4", "Gemma 4"),
            (Architecture::Family("GLM-4.5"), "glm4moe", "GLM-4.5"),
            (Architecture::Family("OLMo 3"), "olmo3", "OLMo 3"),
        ];
        for (architecture, gguf, message) in names {
            assert_eq!((architecture.gguf_name().as_str(), architecture.to_string().as_str()), (gguf, message));
        }
    }
}
