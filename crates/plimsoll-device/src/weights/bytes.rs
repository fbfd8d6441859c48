//! What weights take: in their region, and in the host's heap.

use super::{ALIGN, Form, LinearDecl, VectorDecl, VectorSource, WeightTable};

impl WeightTable {
    /// Bytes that the table itself takes in the host's heap, estimated from above: a model of many experts has tens of
    /// thousands of entries.
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
        // Vectors grow by doubling, and a model keeps the ids of its experts.
        2 * (self.linears.iter().map(linear).sum::<usize>() + self.vectors.iter().map(vector).sum::<usize>())
    }

    /// Bytes of the weights whose tensors' names begin so.
    pub fn bytes_below(&self, prefix: &str) -> usize {
        let linears = self.linears.iter().filter(|linear| linear.name.starts_with(prefix));
        let vectors = self.vectors.iter().filter(|vector| match &vector.source {
            VectorSource::Tensor { name, .. } => name.starts_with(prefix),
            VectorSource::Values(_) => false,
        });
        let vectors = vectors.map(|vector| vector.len * size_of::<f32>());
        linears.map(|linear| linear.packing.bytes()).chain(vectors).map(|bytes| bytes.next_multiple_of(ALIGN)).sum()
    }
}
