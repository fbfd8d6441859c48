//! The operator's options of one engine. Fields have the names of the flags; absent means "decide from the model and the machine".

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_device::{ComputeDtype, DtypePolicy, Isa, KvDtype, TablePlace, Target};
use plimsoll_formats::Mmproj;
use plimsoll_memory::host::MemoryBudget;
use plimsoll_memory::sizing::Fraction;

/// The default of [`Options::stall_limit`].
pub const STALL_LIMIT: Duration = Duration::from_secs(120);

/// [`Options::http_bytes`] with another value of one HTTP flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpAlternative {
    /// The flag.
    pub flag: &'static str,
    /// The value.
    pub value: String,
    /// [`Options::http_bytes`] with this value.
    pub http_bytes: u64,
}

/// The device that computes an engine's steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The host's cores.
    #[default]
    Cpu,
    /// A GPU, by its number where one is given.
    Gpu(Option<usize>),
    /// A GPU that supports the model and has enough memory, or else the host's cores. [`crate::choose_device`] decides before planning.
    Auto,
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu(None)),
            "auto" => Ok(Self::Auto),
            _ => match name.strip_prefix("gpu:").and_then(|index| index.parse().ok()) {
                Some(index) => Ok(Self::Gpu(Some(index))),
                None => Err(format!("unknown device '{name}': use cpu, auto, gpu, or gpu:N for the N-th one, from 0")),
            },
        }
    }
}

/// A prefix cache on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCache {
    /// Its directory.
    pub dir: PathBuf,
    /// The most bytes of the disk that it takes.
    pub bytes: u64,
    /// The most bytes that are written in a day; none: no limit.
    pub write_bytes_per_day: Option<u64>,
    /// The file with the encryption key; none: not encrypted.
    pub key_file: Option<PathBuf>,
    /// Read every part from disk, even if computing it is faster. For tests: their models compute a page in almost no time.
    #[doc(hidden)]
    pub read_always: bool,
}

impl DiskCache {
    /// Bytes of the disk by default.
    pub const BYTES: u64 = 20 << 30;

    /// A cache of the default size in this directory.
    pub fn at(dir: PathBuf) -> Self {
        Self { dir, bytes: Self::BYTES, write_bytes_per_day: None, key_file: None, read_always: false }
    }
}

/// A directory that keeps packed weights, so that the next start maps them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedCache {
    /// The directory.
    pub dir: PathBuf,
    /// The most bytes of the disk that it takes.
    pub bytes: u64,
}

impl PackedCache {
    /// Bytes of the disk by default: room for two models of 35 billion 4-bit weights.
    pub const BYTES: u64 = 50 << 30;

    /// A cache of the default size in this directory.
    pub fn at(dir: PathBuf) -> Self {
        Self { dir, bytes: Self::BYTES }
    }
}

/// Options of one engine.
#[derive(Clone, Debug)]
pub struct Options {
    /// The memory limit, if lower than the machine's.
    pub memory_budget: Option<MemoryBudget>,
    /// Share of the memory left for the KV cache that is used.
    pub mem_fraction: Fraction,
    /// Tokens of the page pool, exactly; absent: sized from the memory that is left.
    pub max_total_token_num: Option<u64>,
    /// Token rows of one step.
    pub batch_max_tokens: usize,
    /// Largest decode batch, which is the number of logit rows of one step.
    pub graph_max_batch_size: usize,
    /// Percent by which a long prompt may slow down the tokens of running streams, 1 to 10000. One layer of sixteen
    /// rows is always computed.
    pub long_prompt_slowdown: usize,
    /// Requests that run at once.
    pub running_max_req_size: usize,
    /// The most requests that wait.
    pub max_waiting: usize,
    /// The most prompt and output tokens of one request; absent: the model's context, or the pool's capacity.
    pub max_req_total_len: Option<usize>,
    /// Storage of the KV cache.
    pub kv_dtype: KvDtype,
    /// Storage of weights.
    pub dtype: DtypePolicy,
    /// Where tables of embeddings are kept on a CPU. On a GPU all are loaded.
    pub tables: TablePlace,
    /// Bytes of the row cache of tables in files; absent: a quarter of the tables, at most a GiB.
    pub table_cache_bytes: Option<u64>,
    /// Compute threads; absent: the usable cores.
    pub threads: Option<usize>,
    /// Instruction set; absent: the best this machine has.
    pub isa: Option<Isa>,
    /// The device that computes the steps.
    pub device: DeviceChoice,
    /// Accept a software GPU, which runs on the host's cores.
    pub allow_software_gpu: bool,
    /// The limit on a GPU's own memory; absent: what its driver reports as free.
    pub gpu_memory_budget: Option<MemoryBudget>,
    /// Arithmetic of linear layers and attention.
    pub compute_dtype: ComputeDtype,
    /// Share the pages of equal prefixes.
    pub prefix_cache: bool,
    /// Record the content of the prefix cache, for routers.
    pub kv_events: bool,
    /// Keep prefixes on disk too.
    pub disk_cache: Option<DiskCache>,
    /// The directory of packed weights; absent: none, and every start packs.
    pub packed_cache: Option<PackedCache>,
    /// Commit pages on demand instead of at start.
    pub elastic: bool,
    /// The longest time without progress before the engine reports a stall and refuses new requests.
    pub stall_limit: Duration,
    /// Load the checkpoint's multi-token-prediction head and draft with it.
    pub enable_mtp: bool,
    /// Tokens that it drafts at once, 1 to [`Options::DRAFTS_MAX`].
    pub mtp_num_draft_tokens: usize,
    /// Accept drafts without checking them. This is faster and takes one state slot a sequence, but changes the output.
    pub mtp_optimistic: bool,
    /// Pause drafting where it costs more time than it saves.
    pub mtp_adaptive: bool,
    /// The draft model's name or path: a smaller model of the same vocabulary. Its files are opened with the checkpoint
    /// ([`crate::LoadedModel::with_draft`]).
    pub draft_model: Option<String>,
    /// Tokens that the draft model drafts in a step.
    pub draft_num_tokens: usize,
    /// Tokens that prompt lookup drafts at once, without a head; 0 to [`Options::DRAFTS_MAX`].
    pub prompt_lookup_num_tokens: usize,
    /// Share of the pools' memory for recurrent state; absent: balanced with the page pool.
    pub state_ratio: Option<Fraction>,
    /// Slots for checkpoints of recurrent state, for each running request.
    pub state_checkpoints: usize,
    /// The file with a GGUF model's vision encoder.
    pub mmproj: Mmproj,
    /// The most media that the encoder takes in one batch; at least 1.
    pub visual_infer_batch_size: usize,
    /// The most pixels that an image is resized to; absent: the limit of the model's processor, and at most 4096 tokens.
    pub max_image_pixels: Option<u64>,
    /// The most frames of one video; absent: the limit of the model's processor, and at most 4096 tokens.
    pub max_video_frames: Option<u64>,
    /// The most seconds of one audio clip; absent: at most 4096 tokens.
    pub max_audio_seconds: Option<u64>,
    /// The most media of one request.
    pub max_media_per_request: usize,
    /// Bytes for encoder outputs; absent: for a batch of the largest items, and one more.
    pub encoder_output_bytes: Option<u64>,
    /// Host bytes for media: decoding, and pixels until their requests end.
    pub media_bytes: u64,
    /// The most host bytes of all requests together.
    pub request_bytes: u64,
    /// The most host bytes of the HTTP side: bodies, connections, buffers.
    pub http_bytes: u64,
    /// The most threads of the process beside the engine's: the HTTP side's, and other engines'. Where address space is limited their
    /// stacks count.
    pub other_threads: usize,
    /// Flags of the HTTP side that reduce [`Self::http_bytes`], for advice.
    pub http_alternatives: Vec<HttpAlternative>,
    /// Steps between two reports of the memory ledger in the log; 0: never.
    pub log_ledger_every: u64,
    /// The engine is hosted by a [`crate::EngineHost`], which plans the memory that all engines of the process share. The engine plans only
    /// the memory that it frees when it ends.
    pub hosted: bool,
    /// Heap bytes of tokenizer and chat template, where they were measured ([`crate::LoadedModel`] does); absent: a formula over the
    /// vocabulary.
    pub tokenizer_bytes: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            memory_budget: None,
            mem_fraction: Fraction::DEFAULT,
            max_total_token_num: None,
            batch_max_tokens: 512,
            graph_max_batch_size: 64,
            long_prompt_slowdown: 80,
            running_max_req_size: 64,
            max_waiting: 512,
            max_req_total_len: None,
            kv_dtype: KvDtype::F16,
            dtype: DtypePolicy::Auto,
            tables: TablePlace::Auto,
            table_cache_bytes: None,
            threads: None,
            isa: None,
            device: DeviceChoice::Cpu,
            allow_software_gpu: false,
            gpu_memory_budget: None,
            compute_dtype: ComputeDtype::Auto,
            prefix_cache: true,
            kv_events: false,
            disk_cache: None,
            packed_cache: None,
            elastic: false,
            stall_limit: STALL_LIMIT,
            enable_mtp: false,
            mtp_num_draft_tokens: 1,
            mtp_optimistic: false,
            mtp_adaptive: true,
            draft_model: None,
            draft_num_tokens: 3,
            prompt_lookup_num_tokens: 0,
            state_ratio: None,
            state_checkpoints: 1,
            mmproj: Mmproj::Beside,
            visual_infer_batch_size: 1,
            max_image_pixels: None,
            max_video_frames: None,
            max_audio_seconds: None,
            max_media_per_request: 16,
            encoder_output_bytes: None,
            media_bytes: 256 << 20,
            request_bytes: 64 << 20,
            http_bytes: 128 << 20,
            other_threads: 0,
            http_alternatives: Vec::new(),
            log_ledger_every: 0,
            hosted: false,
            tokenizer_bytes: None,
        }
    }
}

impl Options {
    /// The most drafts at once.
    pub const DRAFTS_MAX: usize = 8;

    /// The instruction set that is used.
    pub fn isa(&self) -> Isa {
        self.isa.unwrap_or_else(Isa::detect)
    }

    /// The target of the steps' kernels.
    pub fn target(&self) -> Target {
        match self.device {
            DeviceChoice::Cpu | DeviceChoice::Auto => Target::Cpu(self.isa()),
            DeviceChoice::Gpu(_) => Target::Gpu,
        }
    }

    /// Where tables of embeddings are kept.
    pub fn tables(&self) -> TablePlace {
        match self.target() {
            Target::Cpu(_) => self.tables,
            Target::Gpu => TablePlace::Memory,
        }
    }

    /// Drafts that a sequence may have at once; 0 without speculation.
    pub fn drafts(&self) -> usize {
        match (self.enable_mtp, &self.draft_model) {
            (true, _) => self.mtp_num_draft_tokens,
            (false, Some(_)) => self.draft_num_tokens,
            (false, None) => self.prompt_lookup_num_tokens,
        }
    }

    /// Whether drafts come from a draft head or a draft model, which is run after every step.
    pub fn draft_head(&self) -> bool {
        self.enable_mtp || self.draft_model.is_some()
    }

    /// Whether drafts are accepted without a check.
    pub fn optimistic(&self) -> bool {
        self.enable_mtp && self.mtp_optimistic
    }

    /// State slots that a running sequence owns, if the model has recurrent state: one, and one for each draft that is
    /// checked.
    pub fn slots_per_sequence(&self) -> usize {
        1 + if self.optimistic() { 0 } else { self.drafts() }
    }

    /// State slots planned for each running request: its own, and those for checkpoints.
    pub fn slots_per_request(&self) -> usize {
        self.slots_per_sequence() + if self.prefix_cache { self.state_checkpoints } else { 0 }
    }
}
