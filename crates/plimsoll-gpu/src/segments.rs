//! The layout of weights on a device with a largest buffer size: matrices in segments, all vectors in one buffer.
//!
//! A matrix that fits into no segment is cut between panels. A segment is as large as its content, so that nothing is lost.

use plimsoll_device::cpu::PANELS_PER_TASK;
use plimsoll_device::{Calls, LinearId, VectorId, WeightTable};
use plimsoll_kernels::PANEL;

/// Matrices begin at multiples of `ALIGN` bytes.
const ALIGN: usize = 64;

/// The most panels that one dispatch reaches.
const PANELS_MAX: usize = 65_528;

/// Bytes of weights that loading copies at once, unless eight panels take more.
const CHUNK_BYTES: usize = 4 << 20;

/// Bytes of one recorded dispatch.
pub const CALL_BYTES: usize = 128;

/// Returns the bytes of the staging buffer while weights are loaded; loading takes as many on the heap.
pub fn load_bytes(table: &WeightTable) -> usize {
    let widest = table.linears.iter().map(|linear| linear.packing.panel_bytes()).max().unwrap_or(0);
    let vectors = table.vectors.iter().map(|vector| 4 * vector.len).max().unwrap_or(0);
    CHUNK_BYTES.max(widest * PANELS_PER_TASK).max(vectors).next_multiple_of(256)
}

/// Neighbouring panels of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The segment that holds them.
    pub segment: usize,
    /// Offset of the panels in the segment, in bytes.
    pub offset: usize,
    /// Index of the first panel in the matrix.
    pub first_panel: usize,
    /// Number of panels.
    pub panels: usize,
    /// Outputs of the panels, without padding.
    pub outputs: usize,
}

impl Piece {
    /// Returns the index of its first output.
    pub fn first_output(&self) -> usize {
        self.first_panel * PANEL
    }
}

/// The places of all weights of a table.
#[derive(Clone, Debug)]
pub struct Segments {
    pieces: Vec<Vec<Piece>>,
    segments: Vec<usize>,
    vectors: Vec<usize>,
    vector_bytes: usize,
    /// Words of the lookup table of experts.
    lookup: Vec<u32>,
    /// For each set of experts its first matrix, and its offset in the lookup table, counted in matrices; ascending.
    sets: Vec<(usize, u32)>,
}

/// Words of the lookup table for each matrix of an expert.
const LOOKUP_WORDS: usize = 3;

/// Panels that must lie together do not fit into a segment.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "'{tensor}': {needed} bytes must lie in one buffer of the GPU, which has {limit} bytes at most; use weights of fewer bits, or --device cpu"
)]
pub struct TooWide {
    /// The matrix.
    pub tensor: String,
    /// Bytes of its panels that must be in one segment: all panels of an expert, or those that are packed together.
    pub needed: usize,
    /// Most bytes of a segment.
    pub limit: usize,
}

impl Segments {
    /// Divides the weights of `table` among segments of at most `limit` bytes.
    ///
    /// # Errors
    /// [`TooWide`]: a matrix has wider panels than a segment.
    pub fn new(table: &WeightTable, limit: usize) -> Result<Self, TooWide> {
        let mut segments: Vec<usize> = Vec::new();
        let mut pieces = Vec::with_capacity(table.linears.len());
        for linear in &table.linears {
            let (packing, mut own) = (&linear.packing, Vec::with_capacity(1));
            let panel_bytes = packing.panel_bytes();
            let fit = (limit / panel_bytes).min(PANELS_MAX);
            // A matrix that fits is not cut. A piece begins where a task of the packer does.
            let most = if packing.panels() <= fit { fit } else { fit / PANELS_PER_TASK * PANELS_PER_TASK };
            if most == 0 {
                let needed = panel_bytes * PANELS_PER_TASK;
                return Err(TooWide { tensor: linear.name.to_string(), needed, limit });
            }
            let mut first_panel = 0;
            while first_panel < packing.panels() {
                let panels = (packing.panels() - first_panel).min(most);
                let bytes = panels * panel_bytes;
                if segments.last().is_none_or(|end| end.next_multiple_of(ALIGN) + bytes > limit) {
                    segments.push(0);
                }
                let segment = segments.len() - 1;
                let offset = segments[segment].next_multiple_of(ALIGN);
                segments[segment] = offset + bytes;
                let outputs = (packing.out() - first_panel * PANEL).min(panels * PANEL);
                own.push(Piece { segment, offset, first_panel, panels, outputs });
                first_panel += panels;
            }
            pieces.push(own);
        }
        let mut vector_bytes = 0;
        let place = |vector: &plimsoll_device::weights::VectorDecl| {
            let offset = vector_bytes;
            vector_bytes = (offset + vector.len * size_of::<f32>()).next_multiple_of(ALIGN);
            offset
        };
        let vectors = table.vectors.iter().map(place);
        let vectors: Vec<usize> = vectors.collect();
        let (lookup, sets) = lookup(table, &pieces, &vectors, limit)?;
        Ok(Self { pieces, segments, vectors, vector_bytes: vector_bytes.max(ALIGN), lookup, sets })
    }

    /// Bytes of each segment.
    pub fn segments(&self) -> &[usize] {
        &self.segments
    }

    /// Bytes of the buffer of vectors.
    pub fn vector_bytes(&self) -> usize {
        self.vector_bytes
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.segments.iter().sum::<usize>() + self.vector_bytes + self.lookup_bytes()
    }

    /// Returns the most dispatches that a step with these calls records. A matrix is multiplied piece by piece, matrices of experts at most
    /// once for each segment.
    pub fn dispatches(&self, calls: Calls) -> usize {
        let pieces = self.pieces.iter().map(Vec::len).max().unwrap_or(1).max(1);
        calls.plain * pieces + calls.grouped * self.segments.len()
    }

    /// Bytes of the lookup table of experts, which is never empty.
    pub fn lookup_bytes(&self) -> usize {
        (self.lookup.len() * size_of::<u32>()).max(ALIGN)
    }

    /// Returns the lookup table of experts. Each matrix of a set has its segment and the number of its packing, its offset there in words,
    /// and 0 or 1 more than its bias's offset among the vectors.
    pub fn lookup(&self) -> &[u32] {
        &self.lookup
    }

    /// The number of a set's first matrix in the lookup table.
    ///
    /// # Panics
    /// When no set of experts begins with it: a bug.
    pub fn experts(&self, first: LinearId) -> u32 {
        let found = self.sets.binary_search_by_key(&first.index(), |set| set.0);
        self.sets[found.expect("a set of experts that was declared")].1
    }

    /// The first word of the lookup table for the matrix with this number.
    pub fn segment_word(&self, number: u32) -> u32 {
        self.lookup[number as usize * LOOKUP_WORDS]
    }

    /// Returns the pieces of a matrix, in order.
    pub fn pieces(&self, id: LinearId) -> &[Piece] {
        &self.pieces[id.index()]
    }

    /// Byte offset of a vector in its buffer.
    pub fn vector(&self, id: VectorId) -> usize {
        self.vectors[id.index()]
    }

    /// Returns the pieces of every matrix, by its place in the table.
    pub fn all(&self) -> &[Vec<Piece>] {
        &self.pieces
    }

    /// Returns the byte offset of every vector, by its place in the table.
    pub fn vectors(&self) -> &[usize] {
        &self.vectors
    }
}

/// The lookup table of experts, and for each set its first matrix and its offset there.
type Lookup = (Vec<u32>, Vec<(usize, u32)>);

fn lookup(table: &WeightTable, pieces: &[Vec<Piece>], vectors: &[usize], limit: usize) -> Result<Lookup, TooWide> {
    let (mut words, mut sets, mut kinds) = (Vec::new(), Vec::new(), Vec::new());
    for set in &table.experts {
        sets.push((set.start, (words.len() / LOOKUP_WORDS) as u32));
        for i in set.clone() {
            let linear = &table.linears[i];
            let [piece] = pieces[i][..] else {
                // All panels of an expert must be in one segment.
                return Err(TooWide { tensor: linear.name.to_string(), needed: linear.packing.bytes(), limit });
            };
            let kind = linear.packing.kind();
            let number = kinds.iter().position(|known| *known == kind).unwrap_or(kinds.len());
            if number == kinds.len() {
                kinds.push(kind);
            }
            let bias = linear.bias.map_or(0, |bias| vectors[bias.index()] / size_of::<f32>() + 1);
            words.extend([(piece.segment | number << 16) as u32, (piece.offset / 4) as u32, bias as u32]);
        }
    }
    sets.sort_unstable();
    Ok((words, sets))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use plimsoll_device::{Declare, DtypePolicy};
    use plimsoll_formats::Checkpoint;

    use super::*;

    fn table(model: &str) -> WeightTable {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(model);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
        plimsoll_models::build(&checkpoint.config, &mut declare, false).unwrap();
        declare.finish()
    }

    #[test]
    fn every_panel_lies_in_one_segment_and_no_two_overlap() {
        let table = table("llama");
        let widest = table.linears.iter().map(|linear| linear.packing.panel_bytes()).max().unwrap();
        for limit in [widest * PANELS_PER_TASK, 100_000, 1 << 30] {
            let segments = Segments::new(&table, limit).unwrap();
            assert!(segments.segments().iter().all(|bytes| *bytes <= limit), "{limit}");
            let mut taken: Vec<(usize, usize, usize)> = Vec::new();
            for (linear, pieces) in table.linears.iter().zip(segments.all()) {
                let mut next = 0;
                for piece in pieces {
                    assert_eq!((piece.first_panel, piece.offset % ALIGN), (next, 0));
                    assert!(piece.first_panel.is_multiple_of(PANELS_PER_TASK));
                    next += piece.panels;
                    let end = piece.offset + piece.panels * linear.packing.panel_bytes();
                    taken.push((piece.segment, piece.offset, end));
                }
                assert_eq!(next, linear.packing.panels());
                assert_eq!(pieces.iter().map(|piece| piece.outputs).sum::<usize>(), linear.packing.out());
            }
            taken.sort_unstable();
            assert!(taken.windows(2).all(|two| two[0].0 < two[1].0 || two[0].2 <= two[1].1), "{limit}");
        }
    }

    #[test]
    fn a_panel_wider_than_a_buffer_is_refused_by_name() {
        let error = Segments::new(&table("llama"), 4096).unwrap_err();
        assert!(error.to_string().contains(&error.tensor) && error.to_string().contains("4096"), "{error}");
    }

    /// The matrices of a table without experts, one by one.
    fn each(model: &str) -> impl Iterator<Item = WeightTable> {
        let mut table = table(model);
        let linears = std::mem::take(&mut table.linears);
        table.experts.clear();
        linears.into_iter().map(move |linear| {
            let mut one = table.clone();
            one.linears.push(linear);
            one
        })
    }

    #[test]
    fn a_matrix_that_fits_is_not_cut() {
        for table in each("llama").chain(each("qwen3-moe")) {
            let packing = table.linears[0].packing;
            // Of 4 or 8 panels, and of 24, which are three of the packer's tasks.
            let segments = Segments::new(&table, packing.bytes()).unwrap();
            assert_eq!(segments.all()[0].len(), 1, "{packing:?}");
            let refused = Segments::new(&table, packing.bytes() - 1).is_err();
            assert_eq!(refused, packing.panels() <= PANELS_PER_TASK, "{packing:?}");
        }
    }

    #[test]
    fn an_expert_larger_than_a_buffer_is_refused_with_its_size() {
        // Experts of eight of the packer's tasks, in a table of their own.
        let mut table = table("qwen3-moe");
        let set = table.experts[0].clone();
        table.linears = table.linears[set.clone()].to_vec();
        table.linears.iter_mut().for_each(|linear| {
            linear.packing = plimsoll_kernels::Packing::new(linear.packing.kind(), 1024, 64).unwrap();
        });
        table.experts = std::iter::once(0..set.len()).collect();
        let bytes = table.linears[0].packing.bytes();
        assert_eq!(Segments::new(&table, bytes).unwrap().segments().len(), set.len());
        let limit = bytes - 1;
        let error = Segments::new(&table, limit).unwrap_err();
        assert_eq!((error.needed, error.limit), (bytes, limit));
        assert!(error.to_string().contains(&format!("{bytes} bytes must lie in one buffer")), "{error}");
    }
}
