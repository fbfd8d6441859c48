//! `config.json` and `generation_config.json` of Whisper → the model configuration, with the defaults of transformers.
//!
//! Reference: transformers, `configuration_whisper.py`, `modeling_whisper.py`. Distil-Whisper differs only in having fewer layers.

use super::encoder::base;
use super::json::{Lookup, whole};
use super::values::{activation_of, eos_token_ids, token};
use crate::architecture::Architecture;
use crate::audio::{Audio, AudioKind, Whisper};
use crate::config::ModelConfig;
use crate::encoder::Encoder;
use crate::encoder_sizes::Sizes;
use crate::error::FormatError;
use crate::family::Names;
use crate::variant::Variant;

/// Epsilon of every norm.
const EPS: f32 = 1e-5;

/// The token that ends a text, unless the configuration names another.
const END: u32 = 50_256;

/// Tokens of the vocabulary with the fewest languages. The English-only vocabulary has one token less.
const VOCAB: usize = 51_865;

/// Most tokens that a configuration may suppress; published ones have about 90.
const SUPPRESSED_MAX: usize = 1024;

/// The canonical names: an audio encoder's for the encoder, and a text model's for the decoder.
pub(super) const NAMES: Names = &[
    ("model.encoder", "audio"),
    ("model.decoder.layer_norm", "model.norm"),
    ("model.decoder.layers.*.fc1", "model.layers.*.mlp.up_proj"),
    ("model.decoder.layers.*.fc2", "model.layers.*.mlp.down_proj"),
    ("model.decoder", "model"),
    ("proj_out", "lm_head"),
];

/// Builds the whole configuration.
pub(super) fn build(config: &Lookup, generation: &Lookup) -> Result<ModelConfig, FormatError> {
    let or = |key: &str, default: usize| config.size(key).map(|size| size.unwrap_or(default));
    if config.bool("scale_embedding")? == Some(true) {
        // transformers reads this key and ignores it, so there is no reference for such a checkpoint.
        return Err(FormatError::Unsupported("scale_embedding true; supported is false".to_owned()));
    }
    if config.bool("tie_word_embeddings")? == Some(false) {
        return Err(FormatError::Unsupported("tie_word_embeddings false in a Whisper; supported is true".to_owned()));
    }
    let activation = activation_of(config.str("activation_function")?.unwrap_or("gelu"))?;
    let whisper = Whisper {
        positions: or("max_source_positions", 1500)?,
        text_positions: or("max_target_positions", 448)?,
        suppressed: suppressed(config, generation, "suppress_tokens")?,
        suppressed_first: suppressed(config, generation, "begin_suppress_tokens")?,
        first_time_max: match generation.size("max_initial_timestamp_index")? {
            None => config.size("max_initial_timestamp_index")?,
            named => named,
        },
        // If no file has the flag, the size of the published vocabularies decides.
        multilingual: generation.bool("is_multilingual")?.unwrap_or(or("vocab_size", VOCAB)? >= VOCAB),
    };
    let hidden = or("d_model", 384)?;
    let sizes = Sizes {
        hidden,
        layers: or("decoder_layers", 4)?,
        heads: or("decoder_attention_heads", 6)?,
        intermediate: or("decoder_ffn_dim", 1536)?,
        vocab: or("vocab_size", VOCAB)?,
        max_context: whisper.positions.saturating_add(whisper.text_positions),
        eps: EPS,
        activation,
    };
    let end = token(config, "eos_token_id", END)?;
    let mut ends = eos_token_ids(config, generation)?;
    if ends.is_empty() {
        ends.push(end);
    }
    Ok(ModelConfig {
        encoder: None,
        mlp_bias: true,
        variant: Variant { ungated: true, ..Variant::default() },
        eos_token_ids: ends,
        audio: Some(Audio {
            depth: or("encoder_layers", 4)?,
            hidden_size: hidden,
            heads: or("encoder_attention_heads", 6)?,
            intermediate_size: or("encoder_ffn_dim", 1536)?,
            act: activation,
            bands: or("num_mel_bins", 80)?,
            // Whisper's vocabulary has no token for audio. The token that ends a text is in no prompt.
            placeholder: end,
            encoder: AudioKind::Whisper(whisper),
        }),
        ..base(config, Architecture::Whisper, &sizes, Encoder::BIDIRECTIONAL)?
    })
}

/// A list of tokens from the generation configuration. Older checkpoints have it in the model configuration.
fn suppressed(config: &Lookup, generation: &Lookup, key: &str) -> Result<Vec<u32>, FormatError> {
    let Some(value) = generation.get(key).or_else(|| config.get(key)) else { return Ok(Vec::new()) };
    let id = |value| whole(value).and_then(|id| u32::try_from(id).ok());
    let ids = value.as_array().filter(|list| list.len() <= SUPPRESSED_MAX);
    ids.and_then(|list| list.iter().map(id).collect())
        .ok_or_else(|| FormatError::Config(format!("{key} is not a list of at most {SUPPRESSED_MAX} token ids")))
}
