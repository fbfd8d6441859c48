//! GGUF metadata → the model configuration, with llama.cpp's conventions and defaults.
//!
//! Values that the metadata lacks (biases, tied embeddings, the size of the vocabulary) are derived from the tensors.

use super::keys::Keys;
use super::meta::GgufMeta;
use super::{encoder, hybrid};
use crate::activation::Activation;
use crate::architecture::Architecture;
use crate::bounds::LAYERS_MAX;
use crate::config::{LongRope, ModelConfig, RopeScaling, YarnScaling};
use crate::directory::Directory;
use crate::error::{FormatError, quote};
use crate::family::{self, Family};
use crate::variant::{Mixer, Variant};

/// The tensor with the rows of the answers "yes" and "no", in this order.
pub const JUDGE: &str = "cls.output.weight";

/// Builds and checks the configuration.
pub(super) fn from_meta(
    meta: &GgufMeta,
    architecture: Architecture,
    directory: &Directory,
) -> Result<ModelConfig, FormatError> {
    let unknown = match &architecture {
        Architecture::Other(name) => Some(name.clone()),
        _ => None,
    };
    let keys = Keys { meta, prefix: meta.str("general.architecture").unwrap_or_default() };
    let built = match architecture.is_encoder() {
        true => encoder::build(&keys, architecture, directory),
        false => build(&keys, architecture, directory),
    };
    let built = built.and_then(|config| config.check().map(|()| config));
    match (built, unknown) {
        // An unknown architecture may lack the keys that are read here. The error with its name is more useful.
        (Err(_), Some(name)) => Err(family::unknown_architecture("GGUF architecture", &name)),
        (built, _) => built,
    }
}

fn build(keys: &Keys, architecture: Architecture, directory: &Directory) -> Result<ModelConfig, FormatError> {
    let meta = keys.meta;
    let draft_layers = hybrid::draft_layers(meta)?;
    let layers = decoder_layers(keys, draft_layers)?;
    let hidden_size = keys.need("embedding_length")?;
    let heads = keys.need("attention.head_count")?;
    let hybrid = architecture.is_hybrid();
    let family = match &architecture {
        Architecture::Family(name) => family::named(name),
        _ => None,
    };
    let uneven = family.is_some_and(|family| family.defaults.uneven);
    let size = |key: &str| match uneven {
        true => Ok(keys.sizes(key, layers)?.and_then(|sizes| sizes.first().copied())),
        false => keys.size(key),
    };
    let partial = hybrid || family.is_some_and(|family| family.defaults.partial.is_some());
    let latent = family.is_some_and(|family| family.defaults.latent);
    let (head_dim, rotary_dim) = head_dim(keys, hidden_size, heads, [latent, partial || latent])?;
    let max_context = keys.need("context_length")?;
    let rope_theta = keys.f32("rope.freq_base").unwrap_or(10_000.0);
    let has = |name: &str| directory.get(name).is_some();
    let experts = hybrid::experts(keys, &architecture, layers)?;
    let intermediate_size = match &experts {
        Some(experts) => size("feed_forward_length")?.unwrap_or(experts.width),
        None => size("feed_forward_length")?.ok_or_else(|| keys.missing("feed_forward_length"))?,
    };
    let built = ModelConfig {
        hidden_size,
        layers,
        heads,
        kv_heads: size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        rotary_dim,
        intermediate_size,
        experts,
        encoder: None,
        vision: None,
        audio: None,
        delta_net: hybrid::delta_net(keys, &architecture, layers)?,
        draft_layers,
        attention_gate: hybrid,
        vocab_size: vocab_size(keys, directory)?,
        norm_eps: keys
            .f32("attention.layer_norm_rms_epsilon")
            .ok_or_else(|| FormatError::Config("attention.layer_norm_rms_epsilon is missing".to_owned()))?,
        rope_theta,
        rope_local_theta: keys.f32("rope.freq_base_swa").unwrap_or(rope_theta),
        rope_scaling: rope_scaling(keys, directory, max_context)?,
        rope_sections: None,
        rope_interleaved: architecture == Architecture::Llama,
        max_context,
        sliding_window: None,
        layer_is_sliding: vec![false; layers],
        attention_bias: has("model.layers.0.self_attn.q_proj.bias"),
        attention_output_bias: has("model.layers.0.self_attn.o_proj.bias"),
        mlp_bias: has("model.layers.0.mlp.up_proj.bias"),
        qk_norm: hybrid
            || family.is_some() && has("model.layers.0.self_attn.q_norm.weight")
            || matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe),
        variant: Variant { judges: judges(keys, &architecture, directory)?, ..Variant::default() },
        tie_word_embeddings: !has("lm_head.weight"),
        hidden_act: Activation::Silu,
        query_scale: query_scale(keys, head_dim),
        embedding_scale: 1.0,
        norm_weight_offset: 0.0,
        attn_logit_softcap: keys.f32("attn_logit_softcapping").filter(|&cap| cap != 0.0),
        final_logit_softcap: keys.f32("final_logit_softcapping").filter(|&cap| cap != 0.0),
        bos_token_id: token(meta, "tokenizer.ggml.bos_token_id"),
        eos_token_ids: eos_token_ids(meta),
        torch_dtype: None,
        quantization: None,
        architecture,
    };
    let mut config = of_family(keys, family, built)?;
    find_shared_keys(&mut config, directory);
    find_mamba_norm(&mut config, directory);
    encoder::find_dense(keys, &mut config, directory)?;
    Ok(config)
}

/// Whether the file has the rows of two answers and no output head. llama.cpp's converter writes Qwen3-Reranker in this form.
fn judges(keys: &Keys, architecture: &Architecture, directory: &Directory) -> Result<bool, FormatError> {
    let Some(rows) = directory.get(JUDGE).map(|entry| entry.info.rows()) else { return Ok(false) };
    let refused = |what: String| Err(FormatError::Unsupported(format!("{what}; use the model's safetensors")));
    if keys.prefix != "qwen3" {
        return refused(format!(
            "a classifier (cls.output) of {architecture}: among decoders, Qwen3-Reranker alone has one here"
        ));
    }
    let labels = keys.path("classifier.output_labels");
    let named: Option<Vec<&str>> = keys.meta.strings(&labels).map(|names| names.iter().collect());
    match (rows, named.as_deref()) {
        (2, None | Some(["yes", "no"])) => Ok(true),
        (2, Some(names)) => refused(format!("{labels} is {names:?}; supported is [\"yes\", \"no\"]")),
        (rows, _) => refused(format!("cls.output has {rows} rows; supported are 2, for \"yes\" and \"no\"")),
    }
}

/// Returns the layers of a decoder. All but EmbeddingGemma's have causal attention. The metadata counts the draft head's layers among the
/// blocks.
fn decoder_layers(keys: &Keys, draft_layers: usize) -> Result<usize, FormatError> {
    let layers = keys.need("block_count")?.saturating_sub(draft_layers);
    if layers > LAYERS_MAX {
        return Err(FormatError::Config(format!("layers: {layers}, allowed are {LAYERS_MAX}")));
    }
    if keys.bool("attention.causal") == Some(false) && !family::is_embedding(keys) {
        return Err(FormatError::Unsupported("a decoder with bidirectional attention".to_owned()));
    }
    Ok(layers)
}

/// Sets whether global layers use their keys as values. The metadata does not contain this; if they do, the value projection's tensors are
/// missing.
fn find_shared_keys(config: &mut ModelConfig, directory: &Directory) {
    let global = (0..config.layers).find(|layer| !config.slides(*layer));
    if let (Some(heads), Some(layer)) = (&mut config.variant.global_heads, global) {
        let values = format!("model.layers.{layer}.self_attn.v_proj.weight");
        heads.values_are_keys = directory.get(&values).is_none();
    }
}

/// Sets whether Mamba-2 beside attention norms its output, as in some sizes of Falcon-H1. The metadata does not contain this; if it does,
/// the norm has a tensor.
fn find_mamba_norm(config: &mut ModelConfig, directory: &Directory) {
    let layer = config.variant.mixers.iter().position(|mixer| *mixer == Mixer::Parallel);
    if let (Some(mamba), Some(layer)) = (&mut config.variant.mamba, layer) {
        mamba.norm = directory.get(&format!("model.layers.{layer}.mamba.norm.weight")).is_some();
    }
}

/// Returns the configuration with the values under the family's keys, if the architecture is one of `family`.
fn of_family(keys: &Keys, family: Option<&Family>, mut config: ModelConfig) -> Result<ModelConfig, FormatError> {
    let Some(family) = family else { return Ok(config) };
    (family.from_gguf)(keys, &mut config)?;
    if config.experts.is_none() && keys.size("expert_count")?.is_some_and(|count| count > 0) {
        return Err(FormatError::Unsupported(format!("{} with a mixture of experts", keys.path("expert_count"))));
    }
    Ok(config)
}

/// Returns the width of a head, and the elements of it that are rotated: all. `free` says which of the two widths (of a value, of the
/// rotated part) may differ.
fn head_dim(keys: &Keys, hidden_size: usize, heads: usize, free: [bool; 2]) -> Result<(usize, usize), FormatError> {
    let derived = hidden_size.checked_div(heads).unwrap_or(0);
    let head_dim = keys.size("attention.key_length")?.unwrap_or(derived);
    let rotary_dim = keys.size("rope.dimension_count")?.unwrap_or(head_dim);
    let value_dim = keys.size("attention.value_length")?.unwrap_or(head_dim);
    for (key, width, free) in
        [("attention.value_length", value_dim, free[0]), ("rope.dimension_count", rotary_dim, free[1])]
    {
        if width != head_dim && !free {
            return Err(FormatError::Unsupported(format!("{key} is {width} where the head width is {head_dim}")));
        }
    }
    Ok((head_dim, rotary_dim))
}

/// The factor on attention scores.
fn query_scale(keys: &Keys, head_dim: usize) -> f32 {
    let named = keys.f32("attention.scale").filter(|&scale| scale != 0.0);
    named.unwrap_or_else(|| (head_dim as f64).powf(-0.5) as f32)
}

/// The scaling of rotary frequencies. Llama 3's factors are a tensor, not metadata.
fn rope_scaling(keys: &Keys, directory: &Directory, max_context: usize) -> Result<RopeScaling, FormatError> {
    if directory.get("model.rope_factors_long").is_some() {
        let original = keys.size("rope.scaling.original_context_length")?.unwrap_or(max_context);
        let attention_factor = keys.f32("rope.scaling.attn_factor").unwrap_or(1.0);
        let long = max_context > original;
        return Ok(RopeScaling::Long(LongRope { factors: Box::default(), long, attention_factor }));
    }
    let kind = keys.meta.str(&keys.path("rope.scaling.type")).unwrap_or("linear");
    let factor = keys.f32("rope.scaling.factor").or(keys.f32("rope.scale_linear")).unwrap_or(1.0);
    match kind {
        "none" => Ok(RopeScaling::None),
        // llama.cpp reads an absent type as linear, and a factor of 0 as 1.
        "linear" if factor == 0.0 || factor == 1.0 => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor }),
        "yarn" => {
            let explicit = keys.f32("rope.scaling.attn_factor").or(keys.f32("rope.scaling.yarn_attn_factor"));
            Ok(RopeScaling::Yarn(YarnScaling {
                factor,
                original: keys.size("rope.scaling.original_context_length")?.unwrap_or(max_context),
                attention_factor: explicit.unwrap_or(1.0) * (1.0 + 0.1 * factor.ln()),
                beta_fast: keys.f32("rope.scaling.yarn_beta_fast").unwrap_or(32.0),
                beta_slow: keys.f32("rope.scaling.yarn_beta_slow").unwrap_or(1.0),
                truncate: true,
            }))
        }
        other => Err(FormatError::Unsupported(format!("rope scaling {}", quote(other)))),
    }
}

/// Rows of the embedding table. Without a table: the vocabulary's length.
fn vocab_size(keys: &Keys, directory: &Directory) -> Result<usize, FormatError> {
    if let Some(entry) = directory.get("model.embed_tokens.weight") {
        return Ok(entry.info.rows());
    }
    match keys.meta.strings("tokenizer.ggml.tokens") {
        Some(tokens) => Ok(tokens.len()),
        None => keys.need("vocab_size"),
    }
}

/// A token id, if the key exists and the value fits in 32 bits.
fn token(meta: &GgufMeta, key: &str) -> Option<u32> {
    u32::try_from(meta.u64(key)?).ok()
}

/// The tokens that the metadata lists as ends of an answer. The tokenizer adds the tokens that it recognises by name.
fn eos_token_ids(meta: &GgufMeta) -> Vec<u32> {
    let id = |kind| token(meta, &format!("tokenizer.ggml.{kind}_token_id"));
    let mut ids: Vec<u32> = ["eos", "eot", "eom"].into_iter().filter_map(id).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
