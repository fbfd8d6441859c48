//! Per-layer embeddings of n-grams: a layer adds to every residual stream the embeddings of the n-grams that end at a row's token.
//!
//! Reference: transformers, `modular_qwen4_exp.py` (`Qwen4ExpTextPLELayer`, `Qwen4ExpTextNGramEmbedding`).

use plimsoll_device::{
    Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, NgramConv, NgramState, Ngrams, StepInput,
    TableKind, VectorId,
};
use plimsoll_formats::{ModelConfig, Ngrams as NgramsConfig};

use crate::streams::Streams;

/// Weights of one layer's n-gram embeddings.
pub(crate) struct NgramBlock {
    streams: Streams,
    spec: Ngrams,
    conv: NgramConv,
    key: LinearId,
    value: LinearId,
    key_norm: VectorId,
    query_norm: VectorId,
    conv_norm: VectorId,
    width: usize,
}

/// The shape of a slot's state in all layers with n-grams.
pub(crate) fn state_shape(ngrams: &NgramsConfig, streams: &Streams) -> NgramState {
    NgramState {
        layers: ngrams.layers.len(),
        channels: streams.all(),
        history: ngrams.history(),
        tokens: ngrams.longest - 1,
    }
}

impl NgramBlock {
    /// Declares `{prefix}.ple.*`. `index` counts the layers with n-grams.
    pub fn declare(
        config: &ModelConfig,
        ngrams: &NgramsConfig,
        streams: Streams,
        (prefix, index): (&str, usize),
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let prefix = format!("{prefix}.ple");
        let name = |leaf: &str| format!("{prefix}.{leaf}.weight");
        let (all, width) = (streams.all(), ngrams.width);
        let heads = ngrams.hashed_heads(index);
        let spec = Ngrams {
            layer: index,
            table: table(ngrams, &prefix, ngrams.table_rows(&heads), declare)?,
            factors: ngrams.multipliers(index, config.vocab_size).into(),
            heads: heads.into(),
            per_order: ngrams.heads_per_order,
            end: ngrams.end,
        };
        let weight = declare.conv_taps(&name("conv1d"), all, ngrams.taps)?;
        Ok(Self {
            streams,
            spec,
            conv: NgramConv { layer: index, channels: all, weight, taps: ngrams.taps, dilation: ngrams.longest },
            key: declare.linear(&name("key_proj"), all, width)?,
            value: declare.linear(&name("value_proj"), streams.width, width)?,
            key_norm: streams.norm(config, &name("norm_key"), declare)?,
            query_norm: streams.norm(config, &name("norm_query"), declare)?,
            conv_norm: streams.norm(config, &name("norm_conv"), declare)?,
            width,
        })
    }

    /// `x += layer(x)` for all streams. The state moves from slot to slot as `step` requires.
    pub fn forward(&self, device: &mut dyn Device, x: Buf, step: &StepInput<'_>) -> Result<(), DeviceError> {
        let (scope, rows) = (device.mark(), x.rows);
        let ids = device.temp(rows, self.spec.heads.len())?;
        let embedded = device.temp(rows, self.width)?;
        device.embed_ngrams(&self.spec, embedded, ids, step);
        let (keys, values) = (device.temp(rows, x.cols)?, device.temp(rows, self.streams.width)?);
        let layers = [(self.key, keys), (self.value, values)];
        device.linear_rows(embedded.into(), &layers, Mode::Store, step.bf16_rows)?;
        self.streams.apply_norm(device, keys, keys, self.key_norm);
        let other = device.temp(rows, x.cols)?;
        self.streams.apply_norm(device, other, x, self.query_norm);
        device.gate_streams(keys, other, values);
        device.add(x, keys);
        self.streams.apply_norm(device, other, keys, self.conv_norm);
        device.ngram_conv(&self.conv, other, step);
        device.add(x, other);
        device.release(scope);
        Ok(())
    }
}

/// Declares the parts of a layer's table of `rows` rows, each with its first row: one tensor, or the checkpoint's shards. For a
/// configuration alone, the number of shards is the published one.
fn table(
    ngrams: &NgramsConfig,
    prefix: &str,
    rows: usize,
    declare: &mut Declare<'_>,
) -> Result<Box<[(usize, LinearId)]>, DeclareError> {
    let width = ngrams.width / ngrams.heads();
    let prefix = format!("{prefix}.ple_embedding.ngram_embedding");
    let whole = format!("{prefix}.weight");
    let parts = match declare.has(&whole) {
        true => vec![(whole, rows)],
        false => {
            let (each, mut parts, mut before) = (rows.div_ceil(ngrams.parts), Vec::new(), 0);
            while before < rows {
                let name = format!("{prefix}.shard_{}.weight", parts.len());
                let stored = declare.shape(&name).and_then(|shape| shape.first().copied());
                let part = stored.unwrap_or(each).min(rows - before);
                parts.push((name, part));
                before += part;
            }
            parts
        }
    };
    Ok(declare.table(&parts, width, TableKind::Ngrams)?.into())
}
