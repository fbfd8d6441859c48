//! Latent attention (MLA) in absorbed form: all heads attend to one row a token, which is key and value at once. The projection from this
//! row to a head's keys is applied to the queries. The projection to a head's values is applied to the result of attention.
//!
//! Reference: transformers, `modeling_deepseek_v3.py` (DeepSeek-AI 2024, section 2.1), which instead projects keys and values.

use plimsoll_device::{
    Attention, Buf, Declare, DeclareError, Device, DeviceError, Input, KvLayer, LinearId, Mode, Rotary, RowPiece,
    StepInput, VectorId,
};
use plimsoll_formats::{Latent, ModelConfig};

/// transformers uses this epsilon for the norms within such a layer, independently of the configuration.
const EPS: f32 = 1e-6;

/// A projection split into rows that are rotated and the other rows: one matrix each.
#[derive(Clone, Copy)]
struct Parts {
    rotated: LinearId,
    own: LinearId,
}

/// The first of two projections of queries, its norm, and the number of its outputs.
struct Down {
    matrix: LinearId,
    norm: VectorId,
    width: usize,
}

/// Weights of one layer of latent attention.
pub struct LatentBlock {
    down: Option<Down>,
    queries: Parts,
    /// The rotated part of keys, and the latent row.
    keys: Parts,
    norm: VectorId,
    /// For each head, the projection from its part of a query to a latent row.
    absorb: Vec<LinearId>,
    /// For each head, the projection from a latent row to its value.
    values: Vec<LinearId>,
    out: LinearId,
    interleaved: bool,
    latent: Latent,
    spec: Attention,
}

impl LatentBlock {
    /// Declares `{prefix}.self_attn.*`. `cache` is the layer's index in the KV cache.
    pub fn declare(
        config: &ModelConfig,
        latent: Latent,
        prefix: &str,
        cache: usize,
        declare: &mut Declare<'_>,
    ) -> Result<Self, DeclareError> {
        let (prefix, hidden, heads) = (format!("{prefix}.self_attn"), config.hidden_size, config.heads);
        let Latent { rank, rope_dim, nope_dim, value_dim, query_rank } = latent;
        if !latent.width().is_multiple_of(16) {
            return Err(DeclareError::Unsupported(format!(
                "latent rows of {rank} elements and {rope_dim} rotated ones are not supported: the sum must be a multiple of 16"
            )));
        }
        let down = match query_rank {
            Some(width) => Some(Down {
                matrix: declare.linear(&format!("{prefix}.q_a_proj.weight"), width, hidden)?,
                norm: declare.vector(&format!("{prefix}.q_a_layernorm.weight"), width, 0.0)?,
                width,
            }),
            None => None,
        };
        let (name, k) = match query_rank {
            Some(width) => ("q_b_proj", width),
            None => ("q_proj", hidden),
        };
        let of_head = nope_dim + rope_dim;
        let mut part = |first, run| {
            let piece = [RowPiece { first, rows: heads * run, run, stride: of_head }];
            declare.linear_rows(&format!("{prefix}.{name}.weight"), &[heads * of_head, k], &piece, k)
        };
        let queries = Parts { own: part(0, nope_dim)?, rotated: part(nope_dim, rope_dim)? };
        let mut part = |first, rows| {
            let name = format!("{prefix}.kv_a_proj_with_mqa.weight");
            declare.linear_rows(&name, &[rank + rope_dim, hidden], &[RowPiece::span(first, rows)], hidden)
        };
        let keys = Parts { own: part(0, rank)?, rotated: part(rank, rope_dim)? };
        let norm = declare.vector(&format!("{prefix}.kv_a_layernorm.weight"), rank, 0.0)?;
        let [absorb, values] = of_heads(&prefix, heads, latent, declare)?;
        let out = declare.linear(&format!("{prefix}.o_proj.weight"), hidden, heads * value_dim)?;
        let (scale, interleaved) = (config.query_scale, config.rope_interleaved);
        let spec = Attention { layer: declare.cache_layer(cache), heads, scale, ..Attention::WHOLE };
        Ok(Self { down, queries, keys, norm, absorb, values, out, interleaved, latent, spec })
    }

    /// The layer's part of the KV cache.
    pub fn kv(&self) -> KvLayer {
        KvLayer { kv_heads: 1, head_dim: self.latent.width(), heads: self.spec.heads, window: None }
    }

    /// Elements of the widest row that is normed within the layer.
    pub fn norm_width(&self) -> usize {
        self.latent.rank.max(self.down.as_ref().map_or(0, |down| down.width))
    }

    /// `out (+)= attention(input)`; `angles` are the rotary angles.
    pub fn forward(
        &self,
        device: &mut dyn Device,
        input: Input,
        angles: Buf,
        out: Buf,
        mode: Mode,
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let (scope, rows, heads) = (device.mark(), input.x.rows, self.spec.heads);
        let width = self.latent.width();
        let q = device.temp(rows, heads * width)?;
        let kv = [device.temp(rows, width)?, device.temp(rows, width)?];
        self.project(device, input, q, kv, step)?;
        let attended = device.temp(rows, heads * width)?;
        let rotary = Rotary { norms: None, eps: EPS, angles, interleaved: self.interleaved };
        device.attention(&self.spec, Some(&rotary), attended, q, Some(kv), step);
        let Latent { rope_dim, rank, value_dim, .. } = self.latent;
        let made = device.temp(rows, heads * value_dim)?;
        let (row, value) = (device.temp(rows, rank)?, device.temp(rows, value_dim)?);
        for (head, id) in self.values.iter().enumerate() {
            device.take(row, attended, head * width + rope_dim);
            device.linear_rows(row.into(), &[(*id, value)], Mode::Store, step.bf16_rows)?;
            device.put(made, value, head * value_dim);
        }
        device.linear_rows(made.into(), &[(self.out, out)], mode, step.bf16_rows)?;
        device.release(scope);
        Ok(())
    }

    /// Computes queries, keys and values before the rotation. Values also have the keys' rotated part before the latent row, because the
    /// cache's keys and values have one width. The result of attention for that part is not used.
    fn project(
        &self,
        device: &mut dyn Device,
        input: Input,
        q: Buf,
        kv: [Buf; 2],
        step: &StepInput<'_>,
    ) -> Result<(), DeviceError> {
        let (scope, rows, heads) = (device.mark(), input.x.rows, self.spec.heads);
        let Latent { rank, rope_dim, nope_dim, .. } = self.latent;
        let (own, rotated) = (device.temp(rows, heads * nope_dim)?, device.temp(rows, heads * rope_dim)?);
        let (latent, common) = (device.temp(rows, rank)?, device.temp(rows, rope_dim)?);
        let queries = [(self.queries.own, own), (self.queries.rotated, rotated)];
        let keys = [(self.keys.own, latent), (self.keys.rotated, common)];
        match &self.down {
            None => {
                let all = [queries[0], queries[1], keys[0], keys[1]];
                device.linear_rows(input, &all, Mode::Store, step.bf16_rows)?;
            }
            Some(down) => {
                let low = device.temp(rows, down.width)?;
                let all = [(down.matrix, low), keys[0], keys[1]];
                device.linear_rows(input, &all, Mode::Store, step.bf16_rows)?;
                device.rms_norm(low, low, down.norm, EPS);
                device.linear_rows(low.into(), &queries, Mode::Store, step.bf16_rows)?;
            }
        }
        device.rms_norm(latent, latent, self.norm, EPS);
        for part in kv {
            device.put(part, common, 0);
            device.put(part, latent, rope_dim);
        }
        let width = self.latent.width();
        device.put(q.reshape(width), rotated.reshape(rope_dim), 0);
        let (query, absorbed) = (device.temp(rows, nope_dim)?, device.temp(rows, rank)?);
        for (head, id) in self.absorb.iter().enumerate() {
            device.take(query, own, head * nope_dim);
            device.linear_rows(query.into(), &[(*id, absorbed)], Mode::Store, step.bf16_rows)?;
            device.put(q, absorbed, head * width + rope_dim);
        }
        device.release(scope);
        Ok(())
    }
}

/// Declares the two matrices of each head. Published checkpoints have in `kv_b_proj` the rows of a head's keys, then of its values. GGUF
/// and MLX files have `k_b_proj`, transposed, and `v_b_proj`.
fn of_heads(
    prefix: &str,
    heads: usize,
    latent: Latent,
    declare: &mut Declare<'_>,
) -> Result<[Vec<LinearId>; 2], DeclareError> {
    let Latent { rank, nope_dim, value_dim, .. } = latent;
    let (keys, values) = (format!("{prefix}.k_b_proj.weight"), format!("{prefix}.v_b_proj.weight"));
    let (mut absorb, mut back) = (Vec::with_capacity(heads), Vec::with_capacity(heads));
    if declare.has(&keys) {
        for head in 0..heads {
            let rows = [RowPiece::span(head * rank, rank)];
            absorb.push(declare.linear_rows(&keys, &[heads, rank, nope_dim], &rows, nope_dim)?);
            let rows = [RowPiece::span(head * value_dim, value_dim)];
            back.push(declare.linear_rows(&values, &[heads, value_dim, rank], &rows, rank)?);
        }
        return Ok([absorb, back]);
    }
    let (both, of_head) = (format!("{prefix}.kv_b_proj.weight"), nope_dim + value_dim);
    let stored = [heads * of_head, rank];
    for head in 0..heads {
        let first = head * of_head;
        absorb.push(declare.turned_floats(&both, &stored, (first, 0, 1), (rank, nope_dim), None)?);
        let rows = [RowPiece::span(first + nope_dim, value_dim)];
        back.push(declare.linear_rows(&both, &stored, &rows, rank)?);
    }
    Ok([absorb, back])
}
