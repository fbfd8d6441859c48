//! The keys of `config.json` that only Qwen4-Exp has, and the tensors in which its checkpoints repeat some values.

use super::json::{Lookup, whole};
use super::safetensors::{Found, Kind};
use crate::architecture::Architecture;
use crate::bounds::wrong;
use crate::config::ModelConfig;
use crate::error::{FormatError, quote};
use crate::mapping::Mapping;
use crate::quantization::Method;
use crate::qwen4::{Indexer, Ngrams, Qwen4};

/// Adds the keys of Qwen4-Exp.
pub(super) fn add(json: &Lookup, mut config: ModelConfig) -> Result<ModelConfig, FormatError> {
    if config.architecture != Architecture::Qwen4Exp {
        return Ok(config);
    }
    if config.quantization.as_ref().is_some_and(|quantization| quantization.method == Method::Mlx) {
        return Err(FormatError::Unsupported(
            "Qwen4-Exp in MLX format; supported are safetensors of transformers".to_owned(),
        ));
    }
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    let qwen4 = Qwen4 {
        streams: or("hc_count", 4)?,
        mixer_rank: or("hc_lowrank", 320)?,
        sigmoid_gate: match json.str("output_gate_type")? {
            None | Some("silu") => false,
            Some("sigmoid") => true,
            Some(other) => {
                let other = quote(other);
                return Err(FormatError::Unsupported(format!(
                    "output_gate_type {other}; supported are sigmoid and silu"
                )));
            }
        },
        indexer: indexer(json)?,
        ngrams: ngrams(json, &config)?,
    };
    config.variant.qwen4 = Some(Box::new(qwen4));
    Ok(config)
}

fn indexer(json: &Lookup) -> Result<Indexer, FormatError> {
    let (budget, block) = (json.need("indexer_budget")?, json.need("indexer_compress_ratio")?);
    let key_heads = json.need("indexer_kv_heads")?;
    if key_heads != 1 {
        return Err(FormatError::Unsupported(format!("indexer_kv_heads: {key_heads}; supported is 1")));
    }
    if block == 0 || !budget.is_multiple_of(block) {
        return wrong(format!("indexer_budget ({budget}) is not a multiple of indexer_compress_ratio ({block})"));
    }
    let (heads, head_dim) = (json.need("indexer_n_heads")?, json.need("indexer_head_dim")?);
    Ok(Indexer { heads, head_dim, block, blocks: budget / block })
}

fn ngrams(json: &Lookup, config: &ModelConfig) -> Result<Option<Ngrams>, FormatError> {
    let Some(given) = json.get("ple_layer_ids") else { return Ok(None) };
    let id = |value| whole(value).and_then(|id| usize::try_from(id).ok()?.checked_sub(1));
    let layers = given.as_array().and_then(|ids| ids.iter().map(id).collect::<Option<Vec<usize>>>());
    let Some(mut layers) = layers.filter(|layers| layers.iter().all(|layer| *layer < config.layers)) else {
        return wrong(format!("ple_layer_ids is not a list of layers from 1 to {}", config.layers));
    };
    layers.sort_unstable();
    layers.dedup();
    if layers.is_empty() {
        return Ok(None);
    }
    // If several tokens end an answer, n-grams end at the first in `config.json`.
    let end = json.get("eos_token_id").map(|ids| ids.get(0).unwrap_or(ids));
    let end = end.and_then(whole).and_then(|id| u32::try_from(id).ok());
    let Some(end) = end else {
        return wrong("ple_layer_ids without eos_token_id: n-grams end at that token".to_owned());
    };
    let or = |key, default: usize| json.size(key).map(|size| size.unwrap_or(default));
    Ok(Some(Ngrams {
        layers,
        width: or("ple_embed_dim", config.hidden_size)?,
        taps: or("ple_conv_kernel_size", 4)?,
        longest: or("ngram_size", 3)?,
        heads_per_order: or("heads_per_ngram", 8)?,
        rows: or("ngram_vocab_size_base", 20_000_000)?,
        multiple: or("make_ngram_vocab_size_divisible_by", 128)?,
        seed: or("seed", 1234)? as u64,
        parts: or("split_ngram_parts", 512)?,
        end,
    }))
}

/// Compares the hash's stored numbers with the numbers that follow from the configuration.
pub(super) fn check_stored(config: &ModelConfig, tensors: &[Found], files: &[Mapping]) -> Result<(), FormatError> {
    let ngrams = config.variant.qwen4.as_ref().and_then(|qwen4| qwen4.ngrams.as_ref());
    let Some(ngrams) = ngrams else { return Ok(()) };
    for (index, layer) in ngrams.layers.iter().enumerate() {
        let place = format!("layers.{layer}.ple.ple_embedding.");
        if !tensors.iter().any(|tensor| tensor.name.contains(&place)) {
            continue;
        }
        let heads = ngrams.hashed_heads(index);
        let numbers: [(&str, Vec<u64>); 3] = [
            ("layer_multipliers", ngrams.multipliers(index, config.vocab_size)),
            ("ngram_heads_vocab_sizes", heads.iter().map(|head| head.rows).collect()),
            ("ngram_heads_offsets", heads.iter().map(|head| head.first).collect()),
        ];
        for (name, expected) in numbers {
            let end = format!("layers.{layer}.ple.ple_embedding.{name}");
            let Some(found) = tensors.iter().find(|tensor| tensor.name.ends_with(&end)) else { continue };
            let bytes = &files[found.span.file].bytes()[found.span.range.clone()];
            let stored: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number)).collect();
            if found.dtype != Kind::I64 || stored != expected {
                let differs = stored.iter().zip(&expected).find(|(stored, expected)| stored != expected);
                let [stored, expected] = differs.map_or([0, 0], |(stored, expected)| [*stored, *expected]);
                return Err(FormatError::Unsupported(format!(
                    "tensor {}: 64-bit integers that follow from config.json are expected, and {stored} is not {expected}: check seed, \
                     vocab_size, ngram_size, heads_per_ngram, ngram_vocab_size_base and ple_layer_ids there",
                    quote(&found.name)
                )));
            }
        }
    }
    Ok(())
}
