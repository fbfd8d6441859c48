//! `config.json` and `generation_config.json` → the model configuration, with the defaults of transformers.
//!
//! The text model of a multimodal checkpoint is described in `text_config`, which omits values that equal the defaults of its class. The
//! table of defaults supplies them.

use super::audio;
use super::encoder;
use super::hybrid;
use super::idefics3;
use super::intern;
use super::intern_chat::Translated;
use super::json::{Lookup, read_object};
use super::pixtral;
use super::qwen4;
use super::rope;
use super::siglip2;
use super::values::{activation, dtype, eos_token_ids, layer_types, tokens};
use super::vision;
use super::whisper;
use crate::activation::Activation;
use crate::architecture::Architecture;
use crate::bounds::LAYERS_MAX;
use crate::config::{Experts, ModelConfig};
use crate::error::FormatError;
use crate::family::{self, Defaults};
use crate::quantization::Quantization;
use crate::variant::Variant;
use serde_json::{Map, Value};
use std::path::Path;

/// Reads and checks the configuration. The generation configuration may be missing.
pub(super) fn read(config: &Path, generation: &Path) -> Result<ModelConfig, FormatError> {
    let generation = if generation.is_file() { read_object(generation)? } else { Default::default() };
    resolve(&read_object(config)?, &generation, config.parent())
}

/// Builds and checks the configuration from parsed objects. `dir` is the checkpoint's directory, if there is one.
pub(super) fn resolve(
    top: &Map<String, Value>,
    generation: &Map<String, Value>,
    dir: Option<&Path>,
) -> Result<ModelConfig, FormatError> {
    let translated = Translated::new(top, dir)?;
    let top = translated.as_ref().map_or(top, |translated| &translated.top);
    let outer = Lookup { inner: top, outer: None };
    // A model that also generates speech has its language model and encoders in `thinker_config`.
    let outer = match outer.object("thinker_config")? {
        Some(thinker) => Lookup { inner: thinker.inner, outer: Some(top) },
        None => outer,
    };
    let lookup = match outer.object("text_config")? {
        Some(text) => Lookup { inner: text.inner, outer: Some(outer.inner) },
        None => outer,
    };
    let family = Family::of(&outer, &lookup)?;
    let unknown = match &family.architecture {
        Architecture::Other(name) => Some(name.clone()),
        _ => None,
    };
    let generation = Lookup { inner: generation, outer: None };
    if family.architecture.is_encoder() {
        let config = encoder::build(&lookup, &family.architecture)?;
        return config.check().map(|()| config);
    }
    if family.architecture == Architecture::Whisper {
        let config = whisper::build(&lookup, &generation)?;
        return config.check().map(|()| config);
    }
    let name = family.name.clone();
    let built = build(&lookup, &generation, family).and_then(|mut config| {
        vision::add(&mut config, &outer, &lookup, &name)?;
        audio::add(&mut config, &outer, &name)?;
        if let Some(translated) = &translated {
            translated.add(&mut config);
        }
        config.check().map(|()| config)
    });
    match (built, unknown) {
        // An unknown architecture may lack the keys that are read here. The error with its name is more useful.
        (Err(_), Some(name)) => Err(family::unknown_architecture("architecture", &name)),
        (built, _) => built,
    }
}

/// The names of a family whose routers have no key for renormalising. The routers of its language models have one.
const QWEN3_VL_MOE: [&str; 3] = ["Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text"];

/// The facts that the defaults of a class depend on.
struct Family {
    /// The class, or `model_type` if no class is named.
    name: String,
    architecture: Architecture,
    mistral: bool,
    /// Whether a router renormalises its experts' weights, unless the configuration has another value. None: it always does.
    renormalise: Option<bool>,
}

impl Family {
    /// Reads the family from `architectures`, or from `model_type` if that is absent.
    fn of(top: &Lookup, text: &Lookup) -> Result<Family, FormatError> {
        let named = top.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        let name = match named {
            Some(name) => name,
            None => match text.str("model_type")? {
                Some(name) => name,
                None => {
                    return Err(FormatError::Config("neither architectures nor model_type is there".to_owned()));
                }
            },
        };
        // These classes put an encoder before any language model. The text's `model_type` names that model.
        let wraps = idefics3::is(name) || intern::is(name) || siglip2::is(name) || pixtral::is(name);
        let model = if wraps { text.str("model_type")?.unwrap_or(name) } else { name };
        let mistral = matches!(model, "MistralForCausalLM" | "MistralModel" | "mistral");
        let architecture = match model {
            _ if mistral => Architecture::Llama,
            "LlamaForCausalLM" | "LlamaModel" | "llama" => Architecture::Llama,
            "Qwen2ForCausalLM"
            | "Qwen2Model"
            | "qwen2"
            | "Qwen2VLForConditionalGeneration"
            | "qwen2_vl"
            | "qwen2_vl_text"
            | "Qwen2_5_VLForConditionalGeneration"
            | "qwen2_5_vl"
            | "qwen2_5_vl_text" => Architecture::Qwen2,
            "Qwen3ForCausalLM"
            | "Qwen3Model"
            | "qwen3"
            | "Qwen3VLForConditionalGeneration"
            | "qwen3_vl"
            | "qwen3_vl_text" => Architecture::Qwen3,
            name if audio::is_omni2_5(name) => Architecture::Qwen2,
            name if audio::is_asr(name) => Architecture::Qwen3,
            name if QWEN3_VL_MOE.contains(&name) => Architecture::Qwen3Moe,
            name if audio::is(name) => Architecture::Qwen3Moe,
            "Qwen3MoeForCausalLM" | "Qwen3MoeModel" | "qwen3_moe" => Architecture::Qwen3Moe,
            "Qwen3NextForCausalLM" | "Qwen3NextModel" | "qwen3_next" => Architecture::Qwen3Next,
            "Qwen3_5ForConditionalGeneration"
            | "Qwen3_5ForCausalLM"
            | "Qwen3_5TextModel"
            | "qwen3_5"
            | "qwen3_5_text" => Architecture::Qwen3_5,
            "Qwen3_5MoeForConditionalGeneration"
            | "Qwen3_5MoeForCausalLM"
            | "Qwen3_5MoeTextModel"
            | "qwen3_5_moe"
            | "qwen3_5_moe_text" => Architecture::Qwen3_5Moe,
            "Qwen4ExpForConditionalGeneration"
            | "Qwen4ExpForCausalLM"
            | "Qwen4ExpTextModel"
            | "qwen4_exp"
            | "qwen4_exp_text" => Architecture::Qwen4Exp,
            "WhisperForConditionalGeneration" | "whisper" => Architecture::Whisper,
            other => match family::of_class(other) {
                Some(family) => Architecture::Family(family.name),
                None => encoder::architecture(other).unwrap_or_else(|| Architecture::Other(other.to_owned())),
            },
        };
        let renormalise = match architecture {
            Architecture::Qwen3Moe if QWEN3_VL_MOE.contains(&model) => None,
            Architecture::Qwen3Moe => Some(audio::is(model)),
            Architecture::Qwen3_5Moe => None,
            _ => Some(true),
        };
        Ok(Family { name: name.to_owned(), architecture, mistral, renormalise })
    }

    fn defaults(&self) -> Defaults {
        let base = Defaults::LLAMA;
        match self.architecture {
            Architecture::Llama if self.mistral => {
                Defaults { kv_heads: Some(8), max_context: 131_072, sliding_window: Some(4096), ..base }
            }
            Architecture::Family(name) => family::named(name).map_or(base, |family| family.defaults),
            Architecture::Llama
            | Architecture::Bert
            | Architecture::Roberta
            | Architecture::ModernBert
            | Architecture::NomicBert
            | Architecture::Whisper
            | Architecture::Other(_) => base,
            Architecture::Qwen2 if audio::is_omni2_5(&self.name) => {
                Defaults { theta: 1e6, max_context: 32_768, sliding_window: Some(32_768), ..base }
            }
            Architecture::Qwen2 | Architecture::Qwen3Moe => {
                Defaults { max_context: 32_768, sliding_window: Some(4096), ..base }
            }
            Architecture::Qwen3 => {
                Defaults { max_context: 32_768, head_dim: Some(128), sliding_window: Some(4096), ..base }
            }
            Architecture::Qwen3Next | Architecture::Qwen3_5 | Architecture::Qwen3_5Moe | Architecture::Qwen4Exp => {
                Defaults { max_context: 32_768, head_dim: Some(256), ..base }
            }
        }
    }
}

fn build(config: &Lookup, generation: &Lookup, family: Family) -> Result<ModelConfig, FormatError> {
    let defaults = family.defaults();
    let layers = decoder_layers(config, &family)?;
    let hidden_size = config.need("hidden_size")?;
    let heads = or_need(config, "num_attention_heads", defaults.heads)?;
    let head_dim = config.size("head_dim")?.or(defaults.head_dim);
    let head_dim = head_dim.unwrap_or(hidden_size.checked_div(heads).unwrap_or(0));
    let max_context = config.size("max_position_embeddings")?.unwrap_or(defaults.max_context);
    let rope = rope::read(config, (defaults.theta, defaults.local_theta), (max_context, head_dim))?;
    let (sliding_window, layer_is_sliding) = sliding(config, &family, defaults.sliding_window, layers)?;
    let projection_bias = config.bool("attention_bias")?.unwrap_or(false) && !family.mistral;
    let qwen2 = family.architecture == Architecture::Qwen2;
    let dtype = dtype(config)?;
    let hybrid = family.architecture.is_hybrid();
    let hidden_act = activation(config, defaults.activation)?;
    if hybrid && hidden_act != Activation::Silu {
        return Err(FormatError::Unsupported("recurrent layers with another activation than silu".to_owned()));
    }
    let experts = hybrid::experts(config, &family.architecture, family.renormalise, layers)?;
    let intermediate_size = intermediate_size(config, experts.as_ref(), defaults.intermediate)?;
    let cap = |key| config.f32(key).map(|cap| cap.filter(|&cap| cap != 0.0));
    let partial = if hybrid { Some(hybrid::partial_rotary(&family.architecture)) } else { defaults.partial };
    let built = ModelConfig {
        hidden_size,
        layers,
        heads,
        kv_heads: config.size("num_key_value_heads")?.or(defaults.kv_heads).unwrap_or(heads),
        head_dim,
        rotary_dim: hybrid::rotary_dim(rope.partial, head_dim, partial)?,
        intermediate_size,
        experts,
        delta_net: hybrid::delta_net(config, &family.architecture, layers)?,
        encoder: None,
        vision: None,
        audio: None,
        draft_layers: hybrid::draft_layers(config, &family.architecture)?,
        attention_gate: hybrid,
        vocab_size: or_need(config, "vocab_size", defaults.vocab_size)?,
        norm_eps: config.f32("rms_norm_eps")?.unwrap_or(defaults.eps),
        rope_theta: rope.theta,
        rope_local_theta: rope.local_theta,
        rope_scaling: rope.scaling,
        rope_sections: None,
        rope_interleaved: false,
        max_context,
        sliding_window,
        layer_is_sliding,
        attention_bias: qwen2 || projection_bias,
        attention_output_bias: !qwen2 && projection_bias,
        mlp_bias: config.bool("mlp_bias")?.unwrap_or(false),
        qk_norm: hybrid || matches!(family.architecture, Architecture::Qwen3 | Architecture::Qwen3Moe),
        variant: Variant::default(),
        tie_word_embeddings: config.bool("tie_word_embeddings")?.unwrap_or(defaults.tied),
        hidden_act,
        query_scale: (head_dim as f64).powf(-0.5) as f32,
        embedding_scale: 1.0,
        norm_weight_offset: if hybrid { 1.0 } else { 0.0 },
        attn_logit_softcap: cap("attn_logit_softcapping")?,
        final_logit_softcap: cap("final_logit_softcapping")?,
        bos_token_id: tokens(config, "bos_token_id")?.or(tokens(generation, "bos_token_id")?).map(|ids| ids[0]),
        eos_token_ids: eos_token_ids(config, generation)?,
        torch_dtype: dtype,
        quantization: Quantization::read(config)?,
        architecture: family.architecture,
    };
    qwen4::add(config, of_family(config, built)?)
}

/// Returns the configuration with the values under the family's keys, if the architecture is one of `family`.
fn of_family(json: &Lookup, mut config: ModelConfig) -> Result<ModelConfig, FormatError> {
    if let Architecture::Family(name) = &config.architecture
        && let Some(family) = family::named(name)
    {
        (family.from_hf)(json, &mut config)?;
    }
    Ok(config)
}

/// Names of Gemma 3's text model without an encoder. In EmbeddingGemma it is a text encoder.
const GEMMA3_TEXT: [&str; 2] = ["Gemma3TextModel", "gemma3_text"];

/// The number of layers. The model is a decoder with causal attention, or an encoder made from such a decoder.
fn decoder_layers(config: &Lookup, family: &Family) -> Result<usize, FormatError> {
    let listed = config.get("layers_block_type").and_then(|kinds| kinds.as_array()).map(Vec::len);
    let layers = or_need(config, "num_hidden_layers", listed)?;
    if layers > LAYERS_MAX {
        return Err(FormatError::Config(format!("layers: {layers}, allowed are {LAYERS_MAX}")));
    }
    // Gemma 4's value names the tokens that attend to later ones. With "vision" the text stays causal.
    let bidirectional = match config.get("use_bidirectional_attention").and_then(Value::as_str) {
        Some("vision") => false,
        Some(_) => true,
        None => config.bool("use_bidirectional_attention")?.unwrap_or(false),
    };
    let encodes = GEMMA3_TEXT.contains(&family.name.as_str());
    if bidirectional && !encodes || config.bool("is_causal")? == Some(false) {
        return Err(FormatError::Unsupported("a decoder with bidirectional attention".to_owned()));
    }
    Ok(layers)
}

/// The width between the projections of a plain feed-forward part.
fn intermediate_size(config: &Lookup, experts: Option<&Experts>, default: Option<usize>) -> Result<usize, FormatError> {
    // If every layer has experts, the width of a plain part is often left out and never used.
    or_need(config, "intermediate_size", experts.map(|experts| experts.width).or(default))
}

/// A size that is required unless its class has a default.
fn or_need(config: &Lookup, key: &str, default: Option<usize>) -> Result<usize, FormatError> {
    match default {
        Some(default) => Ok(config.size(key)?.unwrap_or(default)),
        None => config.need(key),
    }
}

/// Returns the window in tokens, and per layer whether it uses the window.
fn sliding(
    config: &Lookup,
    family: &Family,
    default: Option<usize>,
    layers: usize,
) -> Result<(Option<usize>, Vec<bool>), FormatError> {
    let qwen = matches!(family.architecture, Architecture::Qwen2 | Architecture::Qwen3);
    let qwen_moe = family.architecture == Architecture::Qwen3Moe;
    let asked = config.bool("use_sliding_window")?.unwrap_or(false);
    let enabled = family.mistral || (qwen || qwen_moe) && asked;
    // An explicit null switches the window off; an absent key means the default.
    let null = config.inner.get("sliding_window").is_some_and(Value::is_null);
    let window = config.size("sliding_window")?.or(default.filter(|_| !null));
    let Some(window) = window.filter(|_| enabled) else {
        return Ok((None, vec![false; layers]));
    };
    let kinds = config.get("layer_types").filter(|_| !family.mistral && !qwen_moe);
    let is_sliding = match kinds {
        Some(kinds) => layer_types(kinds, layers)?,
        None if qwen => {
            let first = config.size("max_window_layers")?.unwrap_or(28);
            (0..layers).map(|layer| layer >= first).collect()
        }
        None => vec![true; layers],
    };
    Ok((Some(window).filter(|_| is_sliding.contains(&true)), is_sliding))
}
