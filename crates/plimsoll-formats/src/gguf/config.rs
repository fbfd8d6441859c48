//! GGUF metadata → the model configuration, with llama.cpp's conventions and defaults.
//!
//! What metadata does not say (biases, tied embeddings, the size of the vocabulary) is read off the tensors.

use super::hybrid;
use super::keys::Keys;
use super::meta::{GgufMeta, GgufValue};
use crate::activation::Activation;
use crate::architecture::Architecture;
use crate::config::{ModelConfig, RopeScaling, YarnScaling};
use crate::directory::Directory;
use crate::error::{FormatError, quote};

/// Layers of Gemma 3 27B, the one size with a query scale that does not follow from its head width.
const GEMMA3_27B_LAYERS: usize = 62;
/// Most layers that are looked at before the configuration as a whole is checked.
const LAYERS_MAX: usize = 1000;

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
    let built = build(meta, architecture, directory).and_then(|config| config.check().map(|()| config));
    match (built, unknown) {
        // An architecture that is not known may well lack the keys asked for: its name is the better message.
        (Err(_), Some(name)) => Err(FormatError::unknown_architecture("GGUF architecture", &name)),
        (built, _) => built,
    }
}

fn build(meta: &GgufMeta, architecture: Architecture, directory: &Directory) -> Result<ModelConfig, FormatError> {
    let keys = Keys { meta, prefix: meta.str("general.architecture").unwrap_or_default() };
    let gemma = architecture == Architecture::Gemma3;
    let draft_layers = hybrid::draft_layers(meta)?;
    // The layers of a draft head are counted among the blocks.
    let layers = keys.need("block_count")?.saturating_sub(draft_layers);
    if layers > LAYERS_MAX {
        return Err(FormatError::Config(format!("layers: {layers}, allowed are {LAYERS_MAX}")));
    }
    if meta.bool(&keys.path("attention.causal")) == Some(false) {
        return Err(FormatError::Unsupported("a decoder with bidirectional attention".to_owned()));
    }
    let hidden_size = keys.need("embedding_length")?;
    let heads = keys.need("attention.head_count")?;
    let hybrid = architecture.is_hybrid();
    let (head_dim, rotary_dim) = head_dim(&keys, hidden_size, heads, hybrid)?;
    let max_context = keys.need("context_length")?;
    let rope_theta = keys.f32("rope.freq_base").unwrap_or(10_000.0);
    let local_default = if gemma { 10_000.0 } else { rope_theta };
    let (sliding_window, layer_is_sliding) = sliding(&keys, gemma, layers)?;
    let has = |name: &str| directory.get(name).is_some();
    let experts = hybrid::experts(&keys, &architecture, layers)?;
    let intermediate_size = match &experts {
        Some(experts) => keys.size("feed_forward_length")?.unwrap_or(experts.width),
        None => keys.need("feed_forward_length")?,
    };
    Ok(ModelConfig {
        hidden_size,
        layers,
        heads,
        kv_heads: keys.size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        rotary_dim,
        intermediate_size,
        experts,
        encoder: None,
        vision: None,
        audio: None,
        delta_net: hybrid::delta_net(&keys, &architecture, layers)?,
        draft_layers,
        attention_gate: hybrid,
        vocab_size: vocab_size(&keys, directory)?,
        norm_eps: keys
            .f32("attention.layer_norm_rms_epsilon")
            .ok_or_else(|| FormatError::Config("attention.layer_norm_rms_epsilon is missing".to_owned()))?,
        rope_theta,
        rope_local_theta: keys.f32("rope.freq_base_swa").unwrap_or(local_default),
        rope_scaling: rope_scaling(&keys, max_context)?,
        rope_sections: None,
        rope_interleaved: architecture == Architecture::Llama,
        max_context,
        sliding_window,
        layer_is_sliding,
        attention_bias: has("model.layers.0.self_attn.q_proj.bias"),
        attention_output_bias: has("model.layers.0.self_attn.o_proj.bias"),
        mlp_bias: has("model.layers.0.mlp.up_proj.bias"),
        qk_norm: hybrid || matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Gemma3),
        tie_word_embeddings: !has("lm_head.weight"),
        hidden_act: if gemma { Activation::GeluTanh } else { Activation::Silu },
        query_scale: query_scale(&keys, gemma && layers == GEMMA3_27B_LAYERS, hidden_size, heads, head_dim),
        embedding_scale: if gemma { (hidden_size as f32).sqrt() } else { 1.0 },
        norm_weight_offset: 0.0,
        attn_logit_softcap: keys.f32("attn_logit_softcapping").filter(|&cap| cap != 0.0),
        final_logit_softcap: keys.f32("final_logit_softcapping").filter(|&cap| cap != 0.0),
        bos_token_id: token(meta, "tokenizer.ggml.bos_token_id"),
        eos_token_ids: eos_token_ids(meta),
        torch_dtype: None,
        quantization: None,
        architecture,
    })
}

/// The width of a head, which keys and values share, and how much of it is rotated: all, but in hybrids.
fn head_dim(keys: &Keys, hidden_size: usize, heads: usize, hybrid: bool) -> Result<(usize, usize), FormatError> {
    let derived = hidden_size.checked_div(heads).unwrap_or(0);
    let head_dim = keys.size("attention.key_length")?.unwrap_or(derived);
    let rotary_dim = keys.size("rope.dimension_count")?.unwrap_or(head_dim);
    let value_dim = keys.size("attention.value_length")?.unwrap_or(head_dim);
    for (key, width, free) in
        [("attention.value_length", value_dim, false), ("rope.dimension_count", rotary_dim, hybrid)]
    {
        if width != head_dim && !free {
            return Err(FormatError::Unsupported(format!("{key} is {width} where the head width is {head_dim}")));
        }
    }
    Ok((head_dim, rotary_dim))
}

/// What attention scores are multiplied with.
fn query_scale(keys: &Keys, by_hidden_size: bool, hidden_size: usize, heads: usize, head_dim: usize) -> f32 {
    if let Some(scale) = keys.f32("attention.scale").filter(|&scale| scale != 0.0) {
        return scale;
    }
    let scalar = if by_hidden_size { hidden_size as f64 / heads as f64 } else { head_dim as f64 };
    scalar.powf(-0.5) as f32
}

/// The window, and which layers use it. Only Gemma 3 has sliding layers among the architectures that run.
fn sliding(keys: &Keys, gemma: bool, layers: usize) -> Result<(Option<usize>, Vec<bool>), FormatError> {
    let window = keys.size("attention.sliding_window")?.filter(|&window| gemma && window > 0);
    if window.is_none() {
        return Ok((None, vec![false; layers]));
    }
    let key = "attention.sliding_window_pattern";
    let pattern = match keys.meta.get(&keys.path(key)) {
        Some(GgufValue::Bools(pattern)) => {
            return match pattern.len() == layers {
                true => Ok((window, pattern.to_vec())),
                false => Err(FormatError::Config(format!("{key} has {} entries for {layers} layers", pattern.len()))),
            };
        }
        _ => keys.size(key)?.unwrap_or(6),
    };
    if pattern == 0 {
        return Err(FormatError::Config(format!("{key} is 0")));
    }
    Ok((window, (1..=layers).map(|layer| layer % pattern != 0).collect()))
}

/// The stretching of rotary frequencies. Llama 3's factors come as a tensor and are not metadata.
fn rope_scaling(keys: &Keys, max_context: usize) -> Result<RopeScaling, FormatError> {
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

/// Rows of the embedding table; the vocabulary's length where there is no table.
fn vocab_size(keys: &Keys, directory: &Directory) -> Result<usize, FormatError> {
    if let Some(entry) = directory.get("model.embed_tokens.weight") {
        return Ok(entry.info.rows());
    }
    match keys.meta.strings("tokenizer.ggml.tokens") {
        Some(tokens) => Ok(tokens.len()),
        None => keys.need("vocab_size"),
    }
}

/// A token id, when the key is there and small enough.
fn token(meta: &GgufMeta, key: &str) -> Option<u32> {
    u32::try_from(meta.u64(key)?).ok()
}

/// The tokens that the metadata calls ends of an answer. The tokenizer adds those that it recognises by name.
fn eos_token_ids(meta: &GgufMeta) -> Vec<u32> {
    let id = |kind| token(meta, &format!("tokenizer.ggml.{kind}_token_id"));
    let mut ids: Vec<u32> = ["eos", "eot", "eom"].into_iter().filter_map(id).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}
