//! `config.json` of BERT and its relatives → the model configuration, with the defaults of transformers.

use super::json::Lookup;
use super::values::{activation, dtype};
use crate::architecture::Architecture;
use crate::bounds::LAYERS_MAX;
use crate::config::{Encoder, ModelConfig, RopeScaling};
use crate::error::{FormatError, quote};
use crate::quantization::Quantization;
use crate::variant::Variant;
use serde_json::Value;

/// The encoder of that class or `model_type`.
pub(super) fn architecture(name: &str) -> Option<Architecture> {
    match name {
        "BertModel" | "BertForSequenceClassification" | "bert" => Some(Architecture::Bert),
        "RobertaModel"
        | "RobertaForSequenceClassification"
        | "roberta"
        | "XLMRobertaModel"
        | "XLMRobertaForSequenceClassification"
        | "xlm-roberta" => Some(Architecture::Roberta),
        _ => None,
    }
}

/// The whole configuration of an encoder.
pub(super) fn build(config: &Lookup, architecture: Architecture) -> Result<ModelConfig, FormatError> {
    refuse(config)?;
    let hidden_size = config.need("hidden_size")?;
    let layers = config.need("num_hidden_layers")?;
    let heads = config.need("num_attention_heads")?;
    let head_dim = hidden_size.checked_div(heads).unwrap_or(0);
    if head_dim * heads != hidden_size {
        return Err(FormatError::Config(format!("{heads} heads do not divide a hidden size of {hidden_size}")));
    }
    if layers > LAYERS_MAX {
        return Err(FormatError::Config(format!("layers: {layers}, allowed are {LAYERS_MAX}")));
    }
    let positions = config.size("max_position_embeddings")?.unwrap_or(512);
    let first_position = match architecture {
        Architecture::Roberta => config.size("pad_token_id")?.unwrap_or(1).saturating_add(1),
        _ => 0,
    };
    let Some(max_context) = positions.checked_sub(first_position) else {
        return Err(FormatError::Config(format!("{positions} positions, of which the first is {first_position}")));
    };
    let encoder = Encoder {
        positions,
        first_position,
        token_types: config.size("type_vocab_size")?.unwrap_or(2),
        labels: labels(config)?,
        sigmoid: !score_as_is(config),
    };
    Ok(ModelConfig {
        hidden_size,
        layers,
        heads,
        kv_heads: heads,
        head_dim,
        // Nothing is rotated; the bounds of a rotated part hold for a whole head.
        rotary_dim: head_dim,
        intermediate_size: config.need("intermediate_size")?,
        experts: None,
        delta_net: None,
        encoder: Some(encoder),
        vision: None,
        audio: None,
        draft_layers: 0,
        attention_gate: false,
        vocab_size: config.need("vocab_size")?,
        norm_eps: config.f32("layer_norm_eps")?.unwrap_or(1e-12),
        rope_theta: 1.0,
        rope_local_theta: 1.0,
        rope_scaling: RopeScaling::None,
        rope_sections: None,
        rope_interleaved: false,
        max_context,
        sliding_window: None,
        layer_is_sliding: vec![false; layers],
        attention_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        qk_norm: false,
        variant: Variant::default(),
        tie_word_embeddings: true,
        hidden_act: activation(config, "gelu")?,
        query_scale: (head_dim as f64).powf(-0.5) as f32,
        embedding_scale: 1.0,
        norm_weight_offset: 0.0,
        attn_logit_softcap: None,
        final_logit_softcap: None,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        torch_dtype: dtype(config)?,
        quantization: Quantization::read(config)?,
        architecture,
    })
}

/// What no code here does.
fn refuse(config: &Lookup) -> Result<(), FormatError> {
    let unsupported = |what: String| Err(FormatError::Unsupported(what));
    match config.str("position_embedding_type")? {
        None | Some("absolute") => {}
        Some(other) => return unsupported(format!("position_embedding_type {}", quote(other))),
    }
    for key in ["is_decoder", "add_cross_attention"] {
        if config.bool(key)? == Some(true) {
            return unsupported(format!("{key} in an encoder"));
        }
    }
    Ok(())
}

/// How many scores the classifier gives; none for a model without one.
fn labels(config: &Lookup) -> Result<Option<usize>, FormatError> {
    let class = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    if !class.is_some_and(|class| class.ends_with("ForSequenceClassification")) {
        return Ok(None);
    }
    let named = config.get("id2label").and_then(Value::as_object).map(serde_json::Map::len);
    Ok(Some(config.size("num_labels")?.or(named).unwrap_or(2)))
}

/// Whether sentence-transformers, in its old spelling or its new one, says that scores are reported as they are.
fn score_as_is(config: &Lookup) -> bool {
    let new = config.get("sentence_transformers").and_then(|value| value.get("activation_fn"));
    let old = config.get("sbert_ce_default_activation_function");
    new.or(old).and_then(Value::as_str).is_some_and(|name| name.ends_with("Identity"))
}
