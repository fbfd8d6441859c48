//! BERT and its relatives (MiniLM, RoBERTa, XLM-RoBERTa): a table of positions, and norms after each half of a layer.
//!
//! Reference: transformers, `modeling_bert.py`, `modeling_roberta.py`.

use super::{Family, base, plain, token_types};
use crate::architecture::Architecture;
use crate::config::ModelConfig;
use crate::encoder::Encoder;
use crate::encoder_sizes::Sizes;
use crate::error::{FormatError, quote};
use crate::hf::json::Lookup;
use crate::hf::values::activation;

/// Longest context in tokens, if the configuration has no value.
const POSITIONS: usize = 512;

pub(super) const BERT: Family = Family {
    architecture: Architecture::Bert,
    classes: &["BertModel", "BertForSequenceClassification", "bert"],
    read: |config| read(config, Architecture::Bert, 0),
    names: &[
        ATTENTION[0],
        ATTENTION[1],
        ATTENTION[2],
        ATTENTION[3],
        NORMS[0],
        NORMS[1],
        MLP[0],
        MLP[1],
        ("pooler.dense", "classifier.dense"),
        ("classifier", "classifier.out_proj"),
    ],
};

pub(super) const ROBERTA: Family = Family {
    architecture: Architecture::Roberta,
    classes: &[
        "RobertaModel",
        "RobertaForSequenceClassification",
        "roberta",
        "XLMRobertaModel",
        "XLMRobertaForSequenceClassification",
        "xlm-roberta",
    ],
    // Positions begin after the padding token's id.
    read: |config| {
        let padding = config.size("pad_token_id")?.unwrap_or(1);
        read(config, Architecture::Roberta, padding.saturating_add(1))
    },
    names: &[ATTENTION[0], ATTENTION[1], ATTENTION[2], ATTENTION[3], NORMS[0], NORMS[1], MLP[0], MLP[1]],
};

const ATTENTION: [(&str, &str); 4] = [
    ("encoder.layer.*.attention.self.query", "model.layers.*.self_attn.q_proj"),
    ("encoder.layer.*.attention.self.key", "model.layers.*.self_attn.k_proj"),
    ("encoder.layer.*.attention.self.value", "model.layers.*.self_attn.v_proj"),
    ("encoder.layer.*.attention.output.dense", "model.layers.*.self_attn.o_proj"),
];
const NORMS: [(&str, &str); 2] = [
    ("encoder.layer.*.attention.output.LayerNorm", "model.layers.*.post_attention_layernorm"),
    ("encoder.layer.*.output.LayerNorm", "model.layers.*.post_mlp_layernorm"),
];
const MLP: [(&str, &str); 2] = [
    ("encoder.layer.*.intermediate.dense", "model.layers.*.mlp.up_proj"),
    ("encoder.layer.*.output.dense", "model.layers.*.mlp.down_proj"),
];

fn read(config: &Lookup, architecture: Architecture, first_position: usize) -> Result<ModelConfig, FormatError> {
    match config.str("position_embedding_type")? {
        None | Some("absolute") => {}
        Some(other) => {
            return Err(FormatError::Unsupported(format!(
                "position_embedding_type {}; supported is absolute",
                quote(other)
            )));
        }
    }
    let positions = config.size("max_position_embeddings")?.unwrap_or(POSITIONS);
    let Some(max_context) = positions.checked_sub(first_position) else {
        return Err(FormatError::Config(format!("{positions} positions, of which the first is {first_position}")));
    };
    let sizes = Sizes {
        hidden: config.need("hidden_size")?,
        layers: config.need("num_hidden_layers")?,
        heads: config.need("num_attention_heads")?,
        intermediate: config.need("intermediate_size")?,
        vocab: config.need("vocab_size")?,
        max_context,
        eps: config.f32("layer_norm_eps")?.unwrap_or(1e-12),
        activation: activation(config, "gelu")?,
    };
    let encoder = Encoder { positions, first_position, token_types: token_types(config)?, ..plain(config)? };
    let built = base(config, architecture, &sizes, encoder)?;
    Ok(ModelConfig { attention_bias: true, attention_output_bias: true, mlp_bias: true, ..built })
}
