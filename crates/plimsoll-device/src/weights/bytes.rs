//! Memory of weights: in their region, and in the host's heap.

use super::{ALIGN, Form, LinearDecl, VectorDecl, VectorSource, WeightTable};

/// Heap bytes of one tensor that stays in its file: its row reader and its places.
const FILE_PART_BYTES: usize = 512;

impl WeightTable {
    /// Returns the most bytes that the table itself takes in the host's heap. A model of many experts has tens of thousands of
    /// entries.
    pub fn host_bytes(&self) -> usize {
        let pieces = |form: &Form| match form {
            Form::Rows(pieces) => size_of_val(&**pieces),
            Form::Folded { .. } | Form::Turned { .. } => 0,
        };
        let linear = |linear: &LinearDecl| size_of::<LinearDecl>() + pieces(&linear.form) + linear.name.len();
        let values = |vector: &VectorDecl| match &vector.source {
            VectorSource::Values(values) => size_of_val(values.as_slice()),
            VectorSource::Tensor { name, .. } => name.len(),
        };
        let vector = |vector: &VectorDecl| size_of::<VectorDecl>() + values(vector);
        let in_files: usize = self.file_tables.iter().map(|table| table.parts * FILE_PART_BYTES).sum();
        // Vectors grow by doubling, and a model keeps the ids of its experts.
        in_files + 2 * (self.linears.iter().map(linear).sum::<usize>() + self.vectors.iter().map(vector).sum::<usize>())
    }

    /// Returns the bytes of the weights from tensors with this prefix in their names.
    pub fn bytes_below(&self, prefix: &str) -> usize {
        let loaded = self.linears.iter().filter(|linear| linear.in_file.is_none());
        let linears = loaded.filter(|linear| linear.name.starts_with(prefix));
        let vectors = self.vectors.iter().filter(|vector| match &vector.source {
            VectorSource::Tensor { name, .. } => name.starts_with(prefix),
            VectorSource::Values(_) => false,
        });
        let vectors = vectors.map(|vector| vector.len * size_of::<f32>());
        linears.map(|linear| linear.packing.bytes()).chain(vectors).map(|bytes| bytes.next_multiple_of(ALIGN)).sum()
    }
}
