//! The indexer of sparse attention: an index query and an index key per row, by which attention selects the positions that a row attends
//! to.
//!
//! Reference: transformers, `modular_qwen4_exp.py` (`Qwen4ExpTextQSAIndexer`).

use plimsoll_device::{
    Attention, Buf, Declare, DeclareError, Device, DeviceError, LinearId, Mode, RowPiece, Selection, StepInput,
    VectorId,
};
use plimsoll_formats::{Indexer as IndexerConfig, ModelConfig};

use crate::rotary::Rotary;

/// Weights of one layer's indexer.
pub(crate) struct Indexer {
    queries: LinearId,
    keys: LinearId,
    query_norm: VectorId,
    config: IndexerConfig,
    /// The selection's parameters, without the attention that it belongs to.
    spec: Selection,
}

impl Indexer {
    /// Declares `{prefix}.self_attn.indexer.*`.
    pub fn declare(
        config: &ModelConfig,
        indexer: IndexerConfig,
        prefix: &str,
        rotary: &Rotary,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let prefix = format!("{prefix}.self_attn.indexer");
        let IndexerConfig { heads, head_dim, block, blocks } = indexer;
        let (rows, hidden) = (heads * head_dim, config.hidden_size);
        let mut part = |first, count| {
            let (name, stored) = (format!("{prefix}.index_qk_proj.weight"), [rows + head_dim, hidden]);
            declare.linear_rows(&name, &stored, &[RowPiece::span(first, count)], hidden)
        };
        let (queries, keys) = (part(0, rows)?, part(rows, head_dim)?);
        let mut norm =
            |name: &str| declare.vector(&format!("{prefix}.{name}.weight"), head_dim, config.norm_weight_offset);
        let (query_norm, norm) = (norm("q_layernorm")?, norm("k_layernorm")?);
        let spec = Selection {
            attention: Attention::WHOLE,
            heads,
            block,
            blocks,
            norm,
            eps: config.norm_eps,
            frequencies: rotary.inv_freq,
            axes: rotary.axes.clone(),
            rope_scale: rotary.scale,
        };
        Ok(Self { queries, keys, query_norm, config: indexer, spec })
    }

    /// The first position that does not attend to all positions before it.
    pub fn selects_from(&self) -> usize {
        Selection::selects_from(self.config.blocks, self.config.block)
    }

    /// Attends to the selected positions. `out` and the ready queries `q` are those of the layer's attention; `x` is the layer's input.
    pub fn attend(
        &self,
        device: &mut dyn Device,
        attention: &Attention,
        [out, q, x, angles]: [Buf; 4],
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let (scope, IndexerConfig { heads, head_dim, blocks, .. }) = (device.mark(), self.config);
        let queries = device.temp(x.rows, heads * head_dim)?;
        let keys = device.temp(x.rows, head_dim)?;
        let chosen = device.temp(x.rows, 2 * blocks)?;
        let layers = [(self.queries, queries), (self.keys, keys)];
        device.linear_rows(x.into(), &layers, Mode::Store, step.bf16_rows)?;
        let by_head = queries.reshape(head_dim);
        device.rms_norm(by_head, by_head, self.query_norm, self.spec.eps);
        device.rope(queries, angles, head_dim, false);
        let spec = Selection { attention: *attention, ..self.spec.clone() };
        device.attend_selected(&spec, out, q, [queries, keys, chosen], step);
        device.release(scope);
        Ok(())
    }
}
