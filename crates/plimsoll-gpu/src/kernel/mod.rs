//! Kernels: the list of them, the parameters of each, and its text.
//!
//! Parameters are offsets in words of four bytes. Group 0 of the bindings is the step arena, the step's upload, the vectors, and the
//! table of experts; group 1 is a segment of the weights, or one layer's KV cache.

mod attention;
mod candidates;
mod elements;
mod encoder;
mod experts;
mod linear;
pub(crate) mod recurrent;
mod rows;
mod tiles;

use plimsoll_device::KvDtype;
use plimsoll_kernels::PackKind;

/// Most parameter words of a kernel: 64 bytes, of the 128 that every Vulkan device has.
pub const PARAMS_MAX: usize = 16;

/// Workgroups along x, if there are more than one dimension holds: the rest go along y.
pub const GRID_WIDTH: u32 = 32768;

/// Threads of a workgroup in which every thread computes an element, or all together a row.
pub const THREADS: u32 = 64;

/// Rows that a workgroup of a matrix product computes at once.
pub const LINEAR_ROWS: u32 = 4;

/// Rows of a tile, which one workgroup computes in products with many rows.
pub const TILE_ROWS: u32 = 32;

/// Panels of a tile.
pub const TILE_PANELS: usize = 4;

/// Least rows of a product in tiles, and least average choices per expert. With fewer rows there are too few tiles to keep a large GPU
/// busy.
pub const TILES_FROM: usize = 17;

/// Elements of keys or values that share a scale under q8.
pub const Q8_BLOCK: usize = 32;

/// A kernel's text with the sizes of workgroups and grids filled in.
fn sized(text: &str) -> String {
    text.replace("$THREADS", &THREADS.to_string()).replace("$WIDTH", &GRID_WIDTH.to_string())
}

/// The content of group 1 of a kernel's bindings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Second {
    /// Nothing.
    Nothing,
    /// A segment of the weights.
    Weights,
    /// KV cache of a layer.
    Cache,
    /// Recurrent states of a layer.
    States,
}

/// One kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Reads rows of a packed matrix, by tokens, or sums of four of them.
    Embed(PackKind),
    /// `y (+)= x·Wᵀ (+ bias)`.
    Linear(PackKind),
    /// [`Kernel::Linear`], bit for bit, for many rows.
    Tiles(PackKind),
    /// `y = x·Wᵀ (+ bias)`, with a matrix for every choice of an expert.
    Experts(PackKind),
    /// [`Kernel::Experts`], bit for bit, for blocks of many choices.
    ExpertTiles(PackKind),
    /// A causal convolution over this number of inputs.
    Conv(usize),
    /// Normalises heads of queries and keys.
    NormHeads,
    /// Computes decay and write strength of Gated DeltaNet.
    Gates,
    /// Computes time steps and decay of Mamba-2.
    TimeSteps,
    /// Updates states with this number of rows; the flag selects the rule of Mamba-2.
    Recur(usize, bool),
    /// Chooses experts.
    Route,
    /// Multiplies the weights of the chosen experts by the experts' scales.
    ScaleChoices,
    /// Orders choices by expert.
    Group,
    /// `x[r] (+)=` the sum of its choices.
    Combine,
    /// `rms_norm` of every row.
    RmsNorm,
    /// `layer_norm` of every row.
    LayerNorm,
    /// Rotates heads.
    Rope,
    /// Stores keys and values in the cache.
    Store(KvDtype),
    /// Attends, with heads of this number of elements.
    Attend(KvDtype, usize),
    /// Attends within sequences of an encoder, with heads of this number of elements.
    Within(usize),
    /// `x[r] +=` a row of a vector.
    AddRows,
    /// `gate = act(gate) * up`.
    Glu,
    /// `x = act(x)`.
    Activate,
    /// `x += y`.
    Add,
    /// Copies uploaded words to `x`.
    Fetch,
    /// `x[r] *= weight`.
    Multiply,
    /// `x[r] *= factor[r]`.
    ScaleRows,
    /// `x[r] *= by[r]`.
    ScaleBy,
    /// `x = cap * tanh(x / cap)`.
    Softcap,
    /// `x = min(max(x, low), high)`.
    Clamp,
    /// `x[r] += sigmoid(gate[r]) * y[r]`.
    AddGated,
    /// `out[r][column..] = x[r]`.
    Put,
    /// `out[r] = x[r][column..]`.
    Take,
    /// `out[i][..] = x[rows[i]]`.
    Gather,
    /// Copies uploaded rows, each to its place.
    Place,
    /// Writes the windows of a convolution as rows.
    Unfold,
    /// Attends to a few preceding rows, with a key for every distance.
    Near,
    /// Moves ascending rows to the beginning.
    KeepRows,
    /// Finds the greatest element of every block of rows.
    BlockMaxima,
    /// Finds the greatest elements of rows.
    Candidates,
}

impl Kernel {
    /// Kernels that every model may need, beside the kinds of its weights, cache and states.
    pub const COMMON: [Kernel; 20] = [
        Kernel::AddRows,
        Kernel::RmsNorm,
        Kernel::LayerNorm,
        Kernel::Rope,
        Kernel::Glu,
        Kernel::Activate,
        Kernel::Add,
        Kernel::Fetch,
        Kernel::Multiply,
        Kernel::ScaleRows,
        Kernel::ScaleBy,
        Kernel::Softcap,
        Kernel::Clamp,
        Kernel::AddGated,
        Kernel::Put,
        Kernel::Take,
        Kernel::Gather,
        Kernel::KeepRows,
        Kernel::BlockMaxima,
        Kernel::Candidates,
    ];

    /// Kernels of an image or audio encoder and of a model that takes its output, without attention.
    pub const ENCODER: [Kernel; 3] = [Kernel::Place, Kernel::Unfold, Kernel::Near];

    /// Kernels of a mixture of experts, without matrix products.
    pub const ROUTING: [Kernel; 4] = [Kernel::Route, Kernel::ScaleChoices, Kernel::Group, Kernel::Combine];

    /// Returns the names of its parameters, in order. Names that end in `_f` are floats.
    pub fn params(self) -> &'static [&'static str] {
        match self {
            Self::Embed(_) => linear::EMBED,
            Self::Linear(_) | Self::Tiles(_) => linear::LINEAR,
            Self::Conv(_) => recurrent::CONV,
            Self::NormHeads => recurrent::NORM,
            Self::Gates | Self::TimeSteps => recurrent::STEPS,
            Self::Recur(..) => recurrent::RECUR,
            Self::Experts(_) | Self::ExpertTiles(_) => linear::EXPERTS,
            Self::Route | Self::ScaleChoices => experts::ROUTE,
            Self::Group => experts::GROUP,
            Self::Combine => experts::COMBINE,
            Self::RmsNorm | Self::LayerNorm => rows::NORM,
            Self::KeepRows => rows::KEEP,
            Self::Place => encoder::PLACE,
            Self::Unfold => encoder::UNFOLD,
            Self::Near => encoder::NEAR,
            Self::BlockMaxima | Self::Candidates => candidates::CANDIDATES,
            Self::Rope => elements::ROPE,
            Self::Store(_) => attention::STORE,
            Self::Attend(..) => attention::ATTEND,
            Self::Within(_) => attention::WITHIN,
            Self::Glu | Self::Activate | Self::Add | Self::Fetch | Self::Softcap => elements::PLAIN,
            Self::Clamp => elements::CLAMP,
            Self::AddRows
            | Self::Multiply
            | Self::ScaleRows
            | Self::ScaleBy
            | Self::AddGated
            | Self::Put
            | Self::Take
            | Self::Gather => elements::BY_ROW,
        }
    }

    /// Returns the content of group 1 of its bindings.
    pub fn second(self) -> Second {
        match self {
            Self::Embed(_) | Self::Linear(_) | Self::Tiles(_) | Self::Experts(_) | Self::ExpertTiles(_) => {
                Second::Weights
            }
            Self::Store(_) | Self::Attend(..) => Second::Cache,
            Self::Conv(_) | Self::Recur(..) => Second::States,
            _ => Second::Nothing,
        }
    }

    /// Returns its WGSL text.
    pub fn source(self) -> String {
        let body = match self {
            Self::Embed(kind) => linear::embed(kind),
            Self::Linear(kind) => linear::linear(kind),
            Self::Tiles(kind) => tiles::linear(kind),
            Self::Conv(taps) => recurrent::conv(taps),
            Self::NormHeads => recurrent::normalise(),
            Self::Gates => recurrent::gates(),
            Self::TimeSteps => recurrent::time_steps(),
            Self::Recur(key_dim, added) => recurrent::update(key_dim, added),
            Self::Experts(kind) => linear::experts(kind),
            Self::ExpertTiles(kind) => tiles::experts(kind),
            Self::Route => experts::route(),
            Self::ScaleChoices => experts::scale(),
            Self::Group => experts::group(),
            Self::Combine => experts::combine(),
            Self::RmsNorm => rows::rms_norm(),
            Self::LayerNorm => rows::layer_norm(),
            Self::KeepRows => rows::keep_rows(),
            Self::BlockMaxima => candidates::block_maxima(),
            Self::Candidates => candidates::candidates(),
            Self::Rope => elements::rope(),
            Self::Store(dtype) => attention::store(dtype),
            Self::Attend(dtype, head_dim) => attention::attend(dtype, head_dim),
            Self::Within(head_dim) => attention::within(head_dim),
            Self::AddRows => elements::add_rows(),
            Self::Glu => elements::glu(),
            Self::Activate => elements::activate(),
            Self::Add => elements::add(),
            Self::Fetch => elements::fetch(),
            Self::Softcap => elements::softcap(),
            Self::Clamp => elements::clamp(),
            Self::Multiply => elements::multiply(),
            Self::ScaleRows => elements::scale_rows(),
            Self::ScaleBy => elements::scale_by(),
            Self::AddGated => elements::add_gated(),
            Self::Put => elements::put(),
            Self::Take => elements::take(),
            Self::Gather => elements::gather(),
            Self::Place => encoder::place(),
            Self::Unfold => encoder::unfold(),
            Self::Near => encoder::near(),
        };
        self.head() + &body
    }

    fn head(self) -> String {
        debug_assert!(self.params().len() <= PARAMS_MAX);
        let field = |name: &&str| match name.ends_with("_f") {
            true => format!("    {name}: f32,\n"),
            false => format!("    {name}: u32,\n"),
        };
        let fields: String = self.params().iter().map(field).collect();
        let second = match self.second() {
            Second::Nothing => "",
            Second::Weights => "@group(1) @binding(0) var<storage, read> weights: array<u32>;\n",
            Second::Cache => "@group(1) @binding(0) var<storage, read_write> cache: array<u32>;\n",
            Second::States => "@group(1) @binding(0) var<storage, read_write> states: array<f32>;\n",
        };
        let text = "struct Params {\n$FIELDS}\n\
            var<immediate> p: Params;\n\
            @group(0) @binding(0) var<storage, read_write> arena: array<f32>;\n\
            @group(0) @binding(1) var<storage, read> sent: array<u32>;\n\
            @group(0) @binding(2) var<storage, read> vectors: array<f32>;\n\
            @group(0) @binding(3) var<storage, read> lookup: array<u32>;\n\
            $SECOND";
        text.replace("$FIELDS", &fields).replace("$SECOND", second)
    }
}

/// Returns the workgroups along x and y that make at least `groups`.
pub fn grid(groups: usize) -> [u32; 2] {
    let width = groups.clamp(1, GRID_WIDTH as usize);
    [width as u32, groups.div_ceil(width).max(1) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_hold_every_group_and_no_dimension_is_too_long() {
        for groups in [0, 1, 63, 32768, 32769, 65535, 65536, 1 << 30] {
            let [x, y] = grid(groups);
            assert!(x as usize * y as usize >= groups && x <= 65535 && y <= 65535, "{groups}: {x} x {y}");
        }
    }

    #[test]
    fn every_kernel_is_told_no_more_than_fits() {
        for kernel in Kernel::COMMON
            .into_iter()
            .chain(Kernel::ROUTING)
            .chain(Kernel::ENCODER)
            .chain([Kernel::Attend(KvDtype::F16, 64), Kernel::Store(KvDtype::F16)])
        {
            assert!(kernel.params().len() <= PARAMS_MAX, "{kernel:?}");
            assert!(!kernel.source().contains('$'), "{kernel:?}: a part was not filled in");
        }
    }
}
