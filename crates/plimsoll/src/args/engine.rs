//! Flags of the engine, and the options they make.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use plimsoll_device::{ComputeDtype, DtypePolicy, Isa, KvDtype, TablePlace, parse_kv_dtype};
use plimsoll_engine::{DeviceChoice, DiskCache, Options, PackedCache};
use plimsoll_formats::Mmproj;
use plimsoll_hub::Cache;
use plimsoll_memory::host::MemoryBudget;
use plimsoll_memory::sizing::Fraction;
use plimsoll_server::ServerConfig;

use super::values::{seconds, size, some_size};

/// Flags of the engine, the same for `serve`, `run` and `plan`.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Memory limit of this process: 4GiB, 1500M or 50% [default: the limit of the machine; the KV cache then gets room for 32 users].
    #[arg(long)]
    pub memory_budget: Option<MemoryBudget>,
    /// Share of the memory for the KV cache that is used, 0 < f <= 1.
    #[arg(long, default_value = "0.95")]
    pub mem_fraction: Fraction,
    /// Size of the KV cache in tokens, rounded up to pages of 16.
    #[arg(long)]
    pub max_total_token_num: Option<u64>,
    /// Most tokens in one step.
    #[arg(long, default_value_t = 512)]
    pub batch_max_tokens: usize,
    /// Most sequences that decode in one step.
    #[arg(long, default_value_t = 64)]
    pub graph_max_batch_size: usize,
    /// How much slower the tokens of running streams may come beside a prompt of more than --batch-max-tokens. A larger value
    /// computes the prompt sooner.
    #[arg(long, value_name = "PERCENT", default_value_t = 80)]
    pub long_prompt_slowdown: usize,
    /// Most requests that run at once [default: --graph-max-batch-size].
    #[arg(long)]
    pub running_max_req_size: Option<usize>,
    /// Most requests that wait; the next one gets a 429.
    #[arg(long, default_value_t = 512)]
    pub max_waiting: usize,
    /// Most tokens of one request, prompt and output together [default: the context length of the model].
    #[arg(long)]
    pub max_req_total_len: Option<usize>,
    /// Data type of the KV cache: f32, f16, bf16, q8 [default: f16; bf16 with --compute-dtype bf16].
    #[arg(long, value_parser = parse_kv_dtype)]
    pub kv_dtype: Option<KvDtype>,
    /// Data type of the weights: auto (as in the file), f32, bf16.
    #[arg(long, default_value = "auto")]
    pub dtype: DtypePolicy,
    /// Compute threads [default: usable cores].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set: portable, neon, avx2, avx512, amx [default: the best there is].
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Device that computes: cpu, gpu, gpu:N for the N-th GPU, from 0, or auto: a GPU on which the model fits, or else the cpu. A GPU
    /// takes a build with the feature gpu.
    #[arg(long, default_value = "cpu")]
    pub device: DeviceChoice,
    /// Let software on the host's cores stand for a GPU, for tests: it is slower than --device cpu.
    #[arg(long)]
    pub allow_software_gpu: bool,
    /// The most that may be used of a GPU's own memory, such as 10GiB or 50% of what is free [default: what is free].
    #[arg(long)]
    pub gpu_memory_budget: Option<MemoryBudget>,
    /// Arithmetic. auto: 16-bit activations; bfloat16 for prompts on AMX. f32: 16-bit activations everywhere. int8: 8-bit activations,
    /// faster and less exact. bf16: bfloat16 for prompts and output on AMX; faster with many streams, slower with one.
    #[arg(long, default_value = "auto")]
    pub compute_dtype: ComputeDtype,
    /// Where embedding tables are kept on the cpu. auto: n-gram tables in the model's files, others in memory. file: all in the files,
    /// behind a cache; other rows are read from disk. memory: all in memory.
    #[arg(long, value_name = "PLACE", default_value = "auto")]
    pub tables: TablePlace,
    /// Bytes of the row cache of tables in files [default: a quarter of the tables, at most 1GiB].
    #[arg(long, value_name = "BYTES", value_parser = some_size)]
    pub table_cache_bytes: Option<u64>,
    /// Turn prefix caching off.
    #[arg(long)]
    pub disable_prefix_cache: bool,
    /// Publish the contents of the prefix cache for routers, with the tokens of prompts (GET /v1/kv_events).
    #[arg(long)]
    pub kv_events: bool,
    /// Commit KV cache pages when they are used instead of at start.
    #[arg(long)]
    pub elastic: bool,
    /// Seconds without progress after which /health reports a stall and new requests are refused.
    #[arg(long, default_value_t = 120, value_parser = seconds(1))]
    pub stall_seconds: u64,
    /// Speculate with the model's multi-token-prediction head.
    #[arg(long)]
    pub enable_mtp: bool,
    /// Draft tokens per step, 1 to 8.
    #[arg(long, default_value_t = 1)]
    pub mtp_num_draft_tokens: usize,
    /// Accept draft tokens unverified: faster, but the output is no longer the model's.
    #[arg(long)]
    pub mtp_optimistic: bool,
    /// Speculate even when it makes decoding slower.
    #[arg(long)]
    pub disable_mtp_adaptive: bool,
    /// Speculate with a smaller model of the same vocabulary, for example of the same family.
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<String>,
    /// Draft tokens of the draft model per step, 1 to 8.
    #[arg(long, default_value_t = 3)]
    pub draft_num_tokens: usize,
    /// Draft tokens per step from repeated text in the prompt and the output, 0 to 8; works with any model.
    #[arg(long, default_value_t = 0)]
    pub prompt_lookup_num_tokens: usize,
    /// Share of the cache memory for recurrent state or sliding windows, 0 < f <= 1 [default: balanced with the KV cache].
    #[arg(long)]
    pub state_ratio: Option<Fraction>,
    /// Checkpoints of recurrent state or sliding windows per running request.
    #[arg(long, default_value_t = 1)]
    pub state_checkpoints: usize,
    /// Host memory in bytes of all requests together: token ids and unread output.
    #[arg(long, value_parser = size, default_value = "64MiB")]
    pub request_bytes: u64,
    /// The prefix cache on disk.
    #[command(flatten)]
    pub disk: DiskArgs,
    /// Packed weights on disk.
    #[command(flatten)]
    pub packed: PackedArgs,
    /// Images, video and audio.
    #[command(flatten)]
    pub media: EncoderArgs,
}

/// Flags of the prefix cache on disk.
#[derive(Debug, Args)]
pub struct DiskArgs {
    /// Keep cached prefixes in this directory, too, so that a restart finds them. They hold what is said to the model.
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Bytes of the disk that they may take.
    #[arg(long, value_name = "BYTES", value_parser = some_size, default_value = "20GiB")]
    pub cache_bytes: u64,
    /// Bytes that may be written in a day [default: any number].
    #[arg(long, value_name = "BYTES", value_parser = some_size)]
    pub cache_write_bytes_per_day: Option<u64>,
    /// Encrypt them with the key in this file: 32 bytes or 64 hexadecimal digits, readable by its owner alone.
    #[arg(long, value_name = "FILE", requires = "cache_dir")]
    pub cache_key_file: Option<PathBuf>,
}

impl DiskArgs {
    /// The prefix cache on disk; none without `--cache-dir`.
    pub fn options(&self) -> Option<DiskCache> {
        let dir = self.cache_dir.clone()?;
        let (bytes, write_bytes_per_day) = (self.cache_bytes, self.cache_write_bytes_per_day);
        Some(DiskCache { bytes, write_bytes_per_day, key_file: self.cache_key_file.clone(), ..DiskCache::at(dir) })
    }
}

/// Flags of packed weights on disk.
#[derive(Debug, Args)]
pub struct PackedArgs {
    /// Keep packed weights in this directory, so that the next start maps them; `auto`: packed/ in the model cache.
    #[arg(long, value_name = "DIR", value_parser = packed_dir)]
    pub packed_cache: Option<PathBuf>,
    /// Bytes of the disk that they may take; the least recently used go first.
    #[arg(long, value_name = "BYTES", value_parser = some_size, default_value = "50GiB")]
    pub packed_cache_bytes: u64,
}

impl PackedArgs {
    /// The packed cache; none without `--packed-cache`.
    pub fn options(&self) -> Option<PackedCache> {
        self.packed_cache.clone().map(|dir| PackedCache { dir, bytes: self.packed_cache_bytes })
    }
}

/// Reads `--packed-cache`: a directory, or `auto` for the one in the user's model cache.
fn packed_dir(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("no directory is given: name one, or use auto".into()),
        "auto" => Ok(Cache::default_location().map_err(|error| error.to_string())?.root().join("packed")),
        _ => Ok(text.into()),
    }
}

/// Flags about media that change the memory plan.
#[derive(Debug, Args)]
pub struct EncoderArgs {
    /// File with the encoders of a GGUF model [default: an mmproj file beside the model].
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
    /// Ignore an mmproj file beside the model: it takes text only.
    #[arg(long, conflicts_with = "mmproj")]
    pub no_mmproj: bool,
    /// Most images or videos in one encoder batch.
    #[arg(long, default_value_t = 1)]
    pub visual_infer_batch_size: usize,
    /// Most pixels of an image after it is resized [default: the limit of the model's processor, at most 4096 tokens].
    #[arg(long)]
    pub max_image_pixels: Option<u64>,
    /// Most frames of one video [default: the limit of the model's processor, at most 4096 tokens].
    #[arg(long)]
    pub max_video_frames: Option<u64>,
    /// Most seconds of one audio input [default: 4096 tokens].
    #[arg(long)]
    pub max_audio_seconds: Option<u64>,
    /// Most images, videos and audio inputs in one request.
    #[arg(long, default_value_t = 16)]
    pub max_media_per_request: usize,
    /// Bytes of encoder outputs [default: one batch of the largest items, and one item more].
    #[arg(long, value_parser = size)]
    pub encoder_output_bytes: Option<u64>,
    /// Host memory in bytes for media: decoding, pixels, spectrograms.
    #[arg(long, value_parser = size, default_value = "256MiB")]
    pub media_bytes: u64,
}

impl EncoderArgs {
    /// Which file has the encoders of a GGUF model.
    pub fn mmproj(&self) -> Mmproj {
        match (&self.mmproj, self.no_mmproj) {
            (Some(file), _) => Mmproj::File(file.clone()),
            (None, true) => Mmproj::Off,
            (None, false) => Mmproj::Beside,
        }
    }
}

impl EngineArgs {
    /// The engine's options with the memory and the threads of this HTTP side.
    pub fn options_beside(&self, http: &ServerConfig) -> Options {
        let (http_alternatives, other_threads) = (http.alternatives(), http.threads_max());
        Options { http_alternatives, other_threads, ..self.options(http.heap_bytes_max()) }
    }

    /// The engine's options; `http_bytes` is the memory of the HTTP side in bytes.
    pub fn options(&self, http_bytes: u64) -> Options {
        Options {
            memory_budget: self.memory_budget,
            mem_fraction: self.mem_fraction,
            max_total_token_num: self.max_total_token_num,
            batch_max_tokens: self.batch_max_tokens,
            graph_max_batch_size: self.graph_max_batch_size,
            long_prompt_slowdown: self.long_prompt_slowdown,
            running_max_req_size: self.running_max_req_size.unwrap_or(self.graph_max_batch_size),
            max_waiting: self.max_waiting,
            max_req_total_len: self.max_req_total_len,
            kv_dtype: self.kv_dtype.unwrap_or(match self.compute_dtype {
                // bf16 arithmetic rounds keys and values to bfloat16, so it can read them from the cache unchanged.
                ComputeDtype::Bf16 => KvDtype::Bf16,
                ComputeDtype::Auto | ComputeDtype::F32 | ComputeDtype::Int8 => KvDtype::F16,
            }),
            dtype: self.dtype,
            tables: self.tables,
            table_cache_bytes: self.table_cache_bytes,
            threads: self.threads,
            isa: self.isa,
            device: self.device,
            allow_software_gpu: self.allow_software_gpu,
            gpu_memory_budget: self.gpu_memory_budget,
            compute_dtype: self.compute_dtype,
            prefix_cache: !self.disable_prefix_cache,
            kv_events: self.kv_events,
            disk_cache: self.disk.options(),
            packed_cache: self.packed.options(),
            elastic: self.elastic,
            stall_limit: Duration::from_secs(self.stall_seconds),
            enable_mtp: self.enable_mtp,
            mtp_num_draft_tokens: self.mtp_num_draft_tokens,
            mtp_optimistic: self.mtp_optimistic,
            mtp_adaptive: !self.disable_mtp_adaptive,
            draft_model: self.draft_model.clone(),
            draft_num_tokens: self.draft_num_tokens,
            prompt_lookup_num_tokens: self.prompt_lookup_num_tokens,
            state_ratio: self.state_ratio,
            state_checkpoints: self.state_checkpoints,
            mmproj: self.media.mmproj(),
            visual_infer_batch_size: self.media.visual_infer_batch_size,
            max_image_pixels: self.media.max_image_pixels,
            max_video_frames: self.media.max_video_frames,
            max_audio_seconds: self.media.max_audio_seconds,
            max_media_per_request: self.media.max_media_per_request,
            encoder_output_bytes: self.media.encoder_output_bytes,
            media_bytes: self.media.media_bytes,
            request_bytes: self.request_bytes,
            http_bytes,
            other_threads: 0,
            http_alternatives: Vec::new(),
            log_ledger_every: 0,
            hosted: false,
            tokenizer_bytes: None,
        }
    }
}
