//! Declaration of a model's weights.

mod tables;

use std::sync::Arc;

use plimsoll_formats::{Checkpoint, DRAFT_PREFIX, Encoding, ModelConfig, QuantLayout, RowBuf, ScaleKind, TensorInfo};
use plimsoll_kernels::{PackKind, PackScales, Packing, QuantPacking};

use super::{
    Change, DeclareError, DtypePolicy, Form, InFile, LinearDecl, LinearId, RowPiece, TablePlace, VectorDecl, VectorId,
    VectorSource, WeightTable,
};

/// Collects a model's weights, checking each against the checkpoint.
pub struct Declare<'a> {
    checkpoint: &'a Checkpoint,
    policy: DtypePolicy,
    table: WeightTable,
    /// The prefix of the model's tensor names in the checkpoint.
    prefix: &'static str,
    /// The configuration of the model that is declared.
    config: &'a ModelConfig,
    /// Layers of other models that come before this model's in the KV cache.
    cached: usize,
    /// The place of tables.
    tables: TablePlace,
}

impl<'a> Declare<'a> {
    /// Starts an empty table over `checkpoint`.
    pub fn new(checkpoint: &'a Checkpoint, policy: DtypePolicy) -> Self {
        let config = &checkpoint.config;
        Self {
            checkpoint,
            policy,
            table: WeightTable::default(),
            prefix: "",
            config,
            cached: 0,
            tables: TablePlace::Memory,
        }
    }

    /// Returns the declaration with tables in this place.
    pub fn with_tables_in(self, tables: TablePlace) -> Self {
        Self { tables, ..self }
    }

    /// The finished table.
    pub fn finish(self) -> WeightTable {
        self.table
    }

    /// Declares that these matrices, declared one after another, belong to one expert each. A GPU finds them by number.
    ///
    /// # Panics
    /// When they are not neighbours: a bug.
    pub fn experts(&mut self, ids: &[LinearId]) {
        let Some(first) = ids.first().map(|id| id.index()) else { return };
        assert!(ids.iter().enumerate().all(|(i, id)| id.index() == first + i), "experts are declared in a row");
        self.table.experts.push(first..first + ids.len());
    }

    /// Begins the weights of the checkpoint's draft model, with its keys and values behind `cached` layers of the model's. Returns
    /// its configuration; none without a draft model.
    pub fn begin_draft(&mut self, cached: usize) -> Option<&'a ModelConfig> {
        let config = self.checkpoint.draft()?;
        (self.prefix, self.config, self.cached) = (DRAFT_PREFIX, config, cached);
        Some(config)
    }

    /// Returns the index in the whole KV cache of this model's `layer`-th layer with keys and values.
    pub fn cache_layer(&self, layer: usize) -> usize {
        self.cached + layer
    }

    /// A tensor's name in the checkpoint.
    fn full(&self, name: &str) -> String {
        [self.prefix, name].concat()
    }

    fn tensor(&self, name: &str) -> Option<&'a TensorInfo> {
        match self.prefix {
            "" => self.checkpoint.tensor(name),
            _ => self.checkpoint.tensor(&self.full(name)),
        }
    }

    /// Whether the checkpoint has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensor(name).is_some()
    }

    /// Returns the shape of a tensor in the file; none if the file lacks it.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensor(name).map(|info| info.shape.as_slice())
    }

    /// Whether the checkpoint is a configuration only; every tensor that it implies is assumed to exist.
    pub fn is_plan(&self) -> bool {
        !self.checkpoint.has_data()
    }

    /// Reads the values of a small vector that the declaration itself depends on; none if the file lacks it.
    pub fn read_vector(&self, name: &str) -> Result<Option<Vec<f32>>, DeclareError> {
        let Some(info) = self.tensor(name) else { return Ok(None) };
        let mut row = RowBuf::default();
        let mut values = vec![0.0; info.cols()];
        let decoded = self.checkpoint.decode_rows(&self.full(name), 0, &mut row).map(|()| row.dequantize(&mut values));
        decoded.map_err(|e| DeclareError::Unsupported(format!("tensor '{name}': {e}")))?;
        Ok(Some(values))
    }

    /// Reads the `len` values of a vector that the declaration itself depends on; without weights, each value is `plan`.
    pub fn read_values(&self, name: &str, len: usize, plan: f32) -> Result<Vec<f32>, DeclareError> {
        match self.read_vector(name)? {
            Some(values) if values.len() == len => Ok(values),
            Some(other) => {
                Err(DeclareError::Shape { name: name.to_owned(), found: vec![other.len()], expected: vec![len] })
            }
            None if self.is_plan() => Ok(vec![plan; len]),
            None => Err(DeclareError::Missing(name.to_owned())),
        }
    }

    /// A matrix of out × k without bias.
    pub fn linear(&mut self, name: &str, out: usize, k: usize) -> Result<LinearId, DeclareError> {
        self.matrix(name, out, k, None)
    }

    /// A matrix `prefix.weight` of out × k with the vector `prefix.bias`, one value an output.
    pub fn linear_with_bias(&mut self, prefix: &str, out: usize, k: usize) -> Result<LinearId, DeclareError> {
        let bias = self.vector(&format!("{prefix}.bias"), out, 0.0)?;
        self.matrix(&format!("{prefix}.weight"), out, k, Some(bias))
    }

    /// A matrix of width `k` made of some rows of a tensor. `stored` is the tensor's shape in the file; its leading
    /// dimensions together are the rows.
    ///
    /// # Panics
    /// When a piece reaches beyond the tensor: the model's mistake, never the file's.
    pub fn linear_rows(
        &mut self,
        name: &str,
        stored: &[usize],
        pieces: &[RowPiece],
        k: usize,
    ) -> Result<LinearId, DeclareError> {
        self.rows_of(name, stored, pieces, k, None)
    }

    /// [`Declare::linear_rows`] with a bias.
    pub fn biased_rows(
        &mut self,
        name: &str,
        stored: &[usize],
        piece: RowPiece,
        k: usize,
        bias: Option<VectorId>,
    ) -> Result<LinearId, DeclareError> {
        self.rows_of(name, stored, &[piece], k, bias)
    }

    /// Declares `rows` outputs from `first` on of a matrix `prefix.weight` of `stored` outputs, with their part of `prefix.bias`: one of
    /// several projections that are stored as one.
    pub fn part_with_bias(
        &mut self,
        prefix: &str,
        stored: usize,
        (first, rows): (usize, usize),
        k: usize,
    ) -> Result<LinearId, DeclareError> {
        let name = format!("{prefix}.bias");
        self.encoding(&name, &[stored])?;
        let bias = self.push_vector(
            VectorSource::Tensor { name: self.full(&name), first, stride: 1, change: Change::Plus(0.0) },
            rows,
        );
        self.rows_of(&format!("{prefix}.weight"), &[stored, k], &[RowPiece::span(first, rows)], k, Some(bias))
    }

    /// The matrix `prefix.weight` of a convolution with windows that do not overlap. `window` is its channels, then its
    /// extents. With `bias`, `prefix.bias` is one value an output.
    pub fn convolution(
        &mut self,
        prefix: &str,
        out: usize,
        window: &[usize],
        bias: bool,
    ) -> Result<LinearId, DeclareError> {
        let name = format!("{prefix}.weight");
        let (channels, extents) = (window[0], &window[1..]);
        let first: Vec<usize> = [&[out, channels], extents].concat();
        let last: Vec<usize> = [&[out], extents, &[channels]].concat();
        let flat = [out, window.iter().product()];
        let found = self.tensor(&name).map(|info| info.shape.as_slice());
        let (stored, channels_last) = match found {
            Some(shape) if shape == last && first != last => (last, channels),
            // A linear layer over patches; each point has all its channels.
            Some(shape) if shape == flat && first.len() != flat.len() => (flat.to_vec(), channels),
            _ => (first, 0),
        };
        let encoding = self.encoding(&name, &stored)?;
        if matches!(encoding, Encoding::F8 { .. } | Encoding::Quant(_)) {
            return Err(DeclareError::Packing { name, reason: "a quantized convolution is not supported".into() });
        }
        let bias = bias.then(|| self.vector(&format!("{prefix}.bias"), out, 0.0)).transpose()?;
        let k = window.iter().product();
        let form = Form::Folded { parts: k / stored[stored.len() - 1], channels_last };
        self.push_linear(&name, encoding, form, (out, k), bias)
    }

    /// A matrix of out × k that is stored with its inputs first: columns `column`, `column + stride`, … of rows
    /// `row..row + k` of a tensor. `stored` is the tensor's shape; its leading dimensions together are the rows.
    ///
    /// # Panics
    /// When it reaches beyond the tensor: the model's mistake, never the file's.
    pub fn turned(
        &mut self,
        name: &str,
        stored: &[usize],
        (row, column, stride): (usize, usize, usize),
        (out, k): (usize, usize),
        bias: Option<VectorId>,
    ) -> Result<LinearId, DeclareError> {
        if matches!(self.encoding(name, stored)?, Encoding::F8 { .. } | Encoding::Quant(_)) {
            let reason = "it is quantized along its outputs, which is not supported".into();
            return Err(DeclareError::Packing { name: name.into(), reason });
        }
        self.turned_floats(name, stored, (row, column, stride), (out, k), bias)
    }

    /// Declares as [`Declare::turned`] a matrix that may be quantized along its outputs: then its dequantized f32 values are kept.
    ///
    /// # Panics
    /// When it reaches beyond the tensor: the model's mistake, never the file's.
    pub fn turned_floats(
        &mut self,
        name: &str,
        stored: &[usize],
        (row, column, stride): (usize, usize, usize),
        (out, k): (usize, usize),
        bias: Option<VectorId>,
    ) -> Result<LinearId, DeclareError> {
        let encoding = self.encoding(name, stored)?;
        let (width, above) = stored.split_last().expect("a matrix has dimensions");
        let rows: usize = above.iter().product();
        assert!(row + k <= rows && column + (out - 1) * stride < *width, "'{name}' has {rows} rows of {width}");
        self.push_linear(name, encoding, Form::Turned { row, column, stride }, (out, k), bias)
    }

    fn rows_of(
        &mut self,
        name: &str,
        stored: &[usize],
        pieces: &[RowPiece],
        k: usize,
        bias: Option<VectorId>,
    ) -> Result<LinearId, DeclareError> {
        let encoding = self.encoding(name, stored)?;
        let rows: usize = stored.iter().rev().skip(1).product();
        let last = |piece: &RowPiece| piece.rows == 0 || piece.stored(piece.rows - 1) < rows;
        assert!(pieces.iter().all(last), "'{name}' has {rows} rows; {pieces:?} ask for more");
        let out = pieces.iter().map(|piece| piece.rows).sum();
        self.push_linear(name, encoding, Form::Rows(pieces.into()), (out, k), bias)
    }

    fn matrix(&mut self, name: &str, out: usize, k: usize, bias: Option<VectorId>) -> Result<LinearId, DeclareError> {
        let encoding = self.encoding(name, &[out, k])?;
        self.push_linear(name, encoding, Form::Rows(Box::default()), (out, k), bias)
    }

    fn push_linear(
        &mut self,
        name: &str,
        encoding: Encoding,
        form: Form,
        (out, k): (usize, usize),
        bias: Option<VectorId>,
    ) -> Result<LinearId, DeclareError> {
        self.push_matrix(name, encoding, form, (out, k), bias, None)
    }

    fn push_matrix(
        &mut self,
        name: &str,
        encoding: Encoding,
        form: Form,
        (out, k): (usize, usize),
        bias: Option<VectorId>,
        in_file: Option<InFile>,
    ) -> Result<LinearId, DeclareError> {
        let order = self.order(name, &form)?;
        let kind = match (&form, &encoding) {
            (Form::Turned { .. }, Encoding::Quant(_) | Encoding::F8 { .. }) => PackKind::F32,
            _ => pack_kind(&encoding, self.policy, k),
        };
        let packing = Packing::new(kind, out, k)
            .map_err(|e| DeclareError::Packing { name: name.into(), reason: e.to_string() })?;
        let offset = if in_file.is_none() { self.table.place(packing.bytes()) } else { 0 };
        let name = self.full(name);
        let same = self.table.linears.last().map(|last| &last.name).filter(|last| ***last == *name);
        let name = same.map_or_else(|| name.into(), Arc::clone);
        self.table.linears.push(LinearDecl { name, form, packing, encoding, bias, order, offset, in_file });
        Ok(LinearId(self.table.linears.len() - 1))
    }

    /// The order of a matrix's columns, where it is not the order of its input.
    fn order(&mut self, name: &str, form: &Form) -> Result<Option<VectorId>, DeclareError> {
        let Some(order) = self.checkpoint.column_order(&self.full(name)) else { return Ok(None) };
        // Experts and tables of embeddings are not read through `Device::linear`, which permutes its input.
        let plain = !name.contains(".experts.") && !name.contains("embed");
        if !plain || !matches!(form, Form::Rows(_)) {
            return Err(DeclareError::Unsupported(format!(
                "tensor '{name}': its columns are ordered by activation (desc_act), which only plain linear layers support; \
                 use a checkpoint without desc_act, or one of AWQ or GGUF"
            )));
        }
        let values: Vec<f32> = order.iter().map(|input| *input as f32).collect();
        // Matrices that share an input usually share its order, which is stored once.
        let last = self.table.linears.last().and_then(|last| last.order);
        let is_same = |id: &VectorId| match &self.table.vectors[id.0].source {
            VectorSource::Values(known) => *known == values,
            VectorSource::Tensor { .. } => false,
        };
        Ok(Some(last.filter(is_same).unwrap_or_else(|| self.values(values))))
    }

    /// A vector of the checkpoint, with `plus` added to each element.
    pub fn vector(&mut self, name: &str, len: usize, plus: f32) -> Result<VectorId, DeclareError> {
        self.changed_vector(name, len, Change::Plus(plus))
    }

    /// A vector of the checkpoint, each element changed.
    pub fn changed_vector(&mut self, name: &str, len: usize, change: Change) -> Result<VectorId, DeclareError> {
        self.encoding(name, &[len])?;
        Ok(self.push_vector(VectorSource::Tensor { name: self.full(name), first: 0, stride: 1, change }, len))
    }

    /// The taps of a causal convolution, [channels, taps]. They lie last in PyTorch's layout and before a last dimension
    /// of 1 in MLX's; GGUF has no such dimension.
    pub fn conv_taps(&mut self, name: &str, channels: usize, taps: usize) -> Result<VectorId, DeclareError> {
        self.flat_vector(name, &[&[channels, 1, taps], &[channels, taps, 1], &[channels, taps]])
    }

    /// All elements of a tensor that the file may store in any of these shapes, outermost dimension first.
    pub fn flat_vector(&mut self, name: &str, shapes: &[&[usize]]) -> Result<VectorId, DeclareError> {
        self.changed_flat_vector(name, shapes, Change::Plus(0.0))
    }

    /// [`Declare::flat_vector`], each element changed.
    pub fn changed_flat_vector(
        &mut self,
        name: &str,
        shapes: &[&[usize]],
        change: Change,
    ) -> Result<VectorId, DeclareError> {
        let found = self.tensor(name).map(|info| info.shape.as_slice());
        let shape = shapes.iter().find(|shape| Some(**shape) == found).unwrap_or(&shapes[0]);
        self.encoding(name, shape)?;
        let len = shape.iter().product();
        Ok(self.push_vector(VectorSource::Tensor { name: self.full(name), first: 0, stride: 1, change }, len))
    }

    /// Declares `len` elements of a tensor of shape `stored`, from `first` on, each `stride` from the one before: one of several vectors
    /// that are stored as one.
    pub fn part_of_vector(
        &mut self,
        name: &str,
        stored: &[usize],
        (first, stride): (usize, usize),
        len: usize,
    ) -> Result<VectorId, DeclareError> {
        self.encoding(name, stored)?;
        let change = Change::Plus(0.0);
        Ok(self.push_vector(VectorSource::Tensor { name: self.full(name), first, stride, change }, len))
    }

    /// A vector of values computed from the configuration.
    pub fn values(&mut self, values: Vec<f32>) -> VectorId {
        let len = values.len();
        self.push_vector(VectorSource::Values(values), len)
    }

    fn push_vector(&mut self, source: VectorSource, len: usize) -> VectorId {
        let offset = self.table.place(len * size_of::<f32>());
        self.table.vectors.push(VectorDecl { source, len, offset });
        VectorId(self.table.vectors.len() - 1)
    }

    fn encoding(&self, name: &str, expected: &[usize]) -> Result<Encoding, DeclareError> {
        match self.tensor(name) {
            Some(info) if info.shape == expected => Ok(info.encoding),
            Some(info) => {
                Err(DeclareError::Shape { name: name.into(), found: info.shape.clone(), expected: expected.into() })
            }
            None if !self.checkpoint.has_data() => Ok(self.config.planned_encoding(name, expected)),
            None => Err(DeclareError::Missing(name.into())),
        }
    }
}

/// Returns the packed format for a stored one: exact, unless the policy says otherwise.
fn pack_kind(encoding: &Encoding, policy: DtypePolicy, k: usize) -> PackKind {
    match (encoding, policy) {
        (_, DtypePolicy::F32) | (Encoding::F32, DtypePolicy::Auto) => PackKind::F32,
        (Encoding::F16, DtypePolicy::Auto) => PackKind::F16,
        (Encoding::BF16 | Encoding::F32 | Encoding::F16, _) => PackKind::Bf16,
        (Encoding::F8 { group }, _) => PackKind::F8 { group: *group },
        // The integer kernels work on groups of 32; a narrower matrix is kept as exact f32.
        (Encoding::Quant(_), _) if !k.is_multiple_of(32) => PackKind::F32,
        (Encoding::Quant(layout), _) => PackKind::Quant(quant_packing(layout)),
    }
}

fn quant_packing(layout: &QuantLayout) -> QuantPacking {
    let own_scales = matches!(layout.scales, ScaleKind::F16 | ScaleKind::Bf16 | ScaleKind::F32);
    // The widest group that kernels support; wider stored groups repeat their scale.
    let wide = [128u8, 64].into_iter().find(|group| own_scales && layout.group.is_multiple_of(usize::from(*group)));
    let group = wide.unwrap_or(layout.group.min(32) as u8);
    QuantPacking {
        // The kernels store 2, 3, 4, 5, 6 and 8 bits.
        bits: if layout.code_bits == 7 { 8 } else { layout.code_bits },
        group,
        scales: match layout.scales {
            ScaleKind::F16 => PackScales::F16,
            // bf16 scales do not fit f16's range.
            ScaleKind::Bf16 | ScaleKind::F32 => PackScales::F32,
            ScaleKind::Super => PackScales::Super,
            ScaleKind::SuperF32 => PackScales::SuperF32,
            ScaleKind::E8m0Half => PackScales::E8m0Half,
            ScaleKind::Ue4m3Half => PackScales::Ue4m3Half,
        },
        zero: layout.zero,
        offset: layout.offset,
        codebook: layout.codebook,
    }
}
