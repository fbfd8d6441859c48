//! What the operator asked for. Names are those of the flags; absent means "decide from the model and the machine".

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_device::{ComputeDtype, DtypePolicy, Isa, KvDtype, TablePlace, Target};
use plimsoll_formats::Mmproj;
use plimsoll_memory::host::MemoryBudget;
use plimsoll_memory::sizing::Fraction;

/// How long an engine may make no progress unless told otherwise.
pub const STALL_LIMIT: Duration = Duration::from_secs(120);

/// What the HTTP side would take with another value of one of its flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpAlternative {
    /// The flag.
    pub flag: &'static str,
    /// The value.
    pub value: String,
    /// [`Options::http_bytes`] with it.
    pub http_bytes: u64,
}

/// What carries out the steps of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The host's cores.
    #[default]
    Cpu,
    /// A GPU, by its number where one is given.
    Gpu(Option<usize>),
    /// A GPU that supports the model and has room for it, or else the host's cores. [`crate::settle_device`] decides before planning.
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
    /// Bytes of the disk that it may take.
    pub bytes: u64,
    /// Bytes that may be written in a day; none: any number.
    pub write_bytes_per_day: Option<u64>,
    /// The file with the key that it is encrypted with; none: it is not.
    pub key_file: Option<PathBuf>,
    /// Read even what takes longer to read than to compute: for tests, with models that compute a page in no time.
    #[doc(hidden)]
    pub read_always: bool,
}

impl DiskCache {
    /// Bytes of the disk unless told otherwise.
    pub const BYTES: u64 = 20 << 30;

    /// A cache of the usual size in this directory.
    pub fn at(dir: PathBuf) -> Self {
        Self { dir, bytes: Self::BYTES, write_bytes_per_day: None, key_file: None, read_always: false }
    }
}

/// A directory that keeps packed weights, so that the next start maps them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedCache {
    /// The directory.
    pub dir: PathBuf,
    /// Bytes of the disk that it may take.
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
    /// The line, if lower than what the machine allows.
    pub memory_budget: Option<MemoryBudget>,
    /// Share of the room for keys and values that is used.
    pub mem_fraction: Fraction,
    /// Tokens of the page pool, exactly; absent: sized from the room.
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
    /// Requests that wait at most.
    pub max_waiting: usize,
    /// Prompt plus output of one request; absent: the model's context, or what the pool can hold.
    pub max_req_total_len: Option<usize>,
    /// Storage of keys and values.
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
    /// What carries out the steps.
    pub device: DeviceChoice,
    /// Software on the host's cores may stand for a GPU.
    pub allow_software_gpu: bool,
    /// The limit on a GPU's own memory; absent: what its driver reports as free.
    pub gpu_memory_budget: Option<MemoryBudget>,
    /// Arithmetic of linear layers and attention.
    pub compute_dtype: ComputeDtype,
    /// Share the pages of equal prefixes.
    pub prefix_cache: bool,
    /// Keep notes of what the prefix cache holds, for routers.
    pub kv_events: bool,
    /// Keep prefixes on disk, too.
    pub disk_cache: Option<DiskCache>,
    /// Where packed weights are kept; absent: nowhere, and every start packs.
    pub packed_cache: Option<PackedCache>,
    /// Commit pages on demand instead of at start.
    pub elastic: bool,
    /// How long the engine may make no progress before it is said and new requests are refused.
    pub stall_limit: Duration,
    /// Load the checkpoint's multi-token-prediction head and let it draft.
    pub enable_mtp: bool,
    /// Tokens it drafts at once, 1 to [`Options::DRAFTS_MAX`].
    pub mtp_num_draft_tokens: usize,
    /// Take drafts as they are instead of checking them: faster, one state slot a sequence, other output.
    pub mtp_optimistic: bool,
    /// Pause drafting where it costs more than it wins.
    pub mtp_adaptive: bool,
    /// The draft model's name or path: a smaller model of the same vocabulary. Its files are opened with the checkpoint
    /// ([`crate::LoadedModel::with_draft`]).
    pub draft_model: Option<String>,
    /// Tokens that the draft model drafts in a step.
    pub draft_num_tokens: usize,
    /// Tokens drafted at once from what the text itself said before, without a head; 0 to [`Options::DRAFTS_MAX`].
    pub prompt_lookup_num_tokens: usize,
    /// Share of the pools' room that recurrent state gets; absent: balanced with the page pool.
    pub state_ratio: Option<Fraction>,
    /// Slots for checkpoints of recurrent state, for each running request.
    pub state_checkpoints: usize,
    /// The file with a GGUF model's vision encoder.
    pub mmproj: Mmproj,
    /// Media that go through the encoder together, at most; at least 1.
    pub visual_infer_batch_size: usize,
    /// Pixels that an image is resized to, at most; absent: what the model's processor says, and no more than 4096
    /// tokens.
    pub max_image_pixels: Option<u64>,
    /// Frames of one video, at most; absent: what the model's processor says, and no more than 4096 tokens.
    pub max_video_frames: Option<u64>,
    /// Seconds of one audio clip, at most; absent: no more than 4096 tokens.
    pub max_audio_seconds: Option<u64>,
    /// Media of one request, at most.
    pub max_media_per_request: usize,
    /// Bytes for what the encoder has made; absent: for a batch of the largest items, and one more.
    pub encoder_output_bytes: Option<u64>,
    /// Host bytes for media: decoding, and pixels until their requests end.
    pub media_bytes: u64,
    /// Host bytes that requests may hold together.
    pub request_bytes: u64,
    /// Host bytes the HTTP side may hold: bodies, connections, buffers.
    pub http_bytes: u64,
    /// Threads that the process has at most beside the engine's: the HTTP side's, and other engines'. Where address
    /// space is limited their stacks count.
    pub other_threads: usize,
    /// Flags of the HTTP side that would make that less, for advice.
    pub http_alternatives: Vec<HttpAlternative>,
    /// A line in the log about every so many steps says where every byte is; 0: never.
    pub log_ledger_every: u64,
    /// The engine lives in a [`crate::EngineHost`], which holds what all engines of the process share: it plans only
    /// what goes with it.
    pub hosted: bool,
    /// Heap bytes that tokenizer and chat template take, where they have been measured ([`crate::LoadedModel`] does);
    /// absent: planned by a formula over the vocabulary.
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

    /// What carries out the steps.
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

    /// Whether drafts are taken as they are.
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
