//! Flags of the engine, and the options they make.

use std::time::Duration;

use clap::Args;
use plimsoll_device::{ComputeDtype, DtypePolicy, Isa, KvDtype, parse_kv_dtype};
use plimsoll_engine::Options;
use plimsoll_memory::broken;
use plimsoll_memory::host::MemoryBudget;
use plimsoll_memory::sizing::Fraction;
use plimsoll_server::ServerConfig;

use crate::args::{bytes, seconds};

/// Flags that shape the engine, the same for `serve`, `chat` and `plan`.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// The line: most memory this process may use, e.g. 4GiB, 1500M, 50%. Absent: the machine's limits, of which the pool takes what 32 users need.
    #[arg(long)]
    pub memory_budget: Option<MemoryBudget>,
    /// Share of the room for keys and values that is used, 0 < f <= 1.
    #[arg(long, default_value = "0.95")]
    pub mem_fraction: Fraction,
    /// Tokens of the key/value pool, in whole pages of 16.
    #[arg(long)]
    pub max_total_token_num: Option<u64>,
    /// Token rows of one step.
    #[arg(long, default_value_t = 512)]
    pub batch_max_tokens: usize,
    /// Largest decode batch.
    #[arg(long, default_value_t = 64)]
    pub graph_max_batch_size: usize,
    /// By how many percent a token of a running stream may take longer beside a prompt of more than --batch-max-tokens: more lets the
    /// prompt through sooner.
    #[arg(long, value_name = "PERCENT", default_value_t = 80)]
    pub long_prompt_slowdown: usize,
    /// Requests that run at once [default: as --graph-max-batch-size].
    #[arg(long)]
    pub running_max_req_size: Option<usize>,
    /// Requests that wait at most; the next one is told 429.
    #[arg(long, default_value_t = 512)]
    pub max_waiting: usize,
    /// Prompt plus output of one request [default: the model's context].
    #[arg(long)]
    pub max_req_total_len: Option<usize>,
    /// Storage of keys and values: f32, f16, bf16, q8 [default: f16; bf16 with --compute-dtype bf16].
    #[arg(long, value_parser = parse_kv_dtype)]
    pub kv_dtype: Option<KvDtype>,
    /// Storage of weights: auto (as in the file), f32, bf16.
    #[arg(long, default_value = "auto")]
    pub dtype: DtypePolicy,
    /// Compute threads [default: usable cores].
    #[arg(long)]
    pub threads: Option<usize>,
    /// Instruction set: portable, neon, avx2, avx512, amx [default: the best there is].
    #[arg(long)]
    pub isa: Option<Isa>,
    /// Arithmetic: auto (activations of 16 bits for packed weights; on AMX prompts in bfloat16), f32 (16 bits everywhere), int8 (as auto, but of
    /// 8 bits: faster, less exact; with AVX-512 BF16 prompts' attention in bfloat16), bf16 (on AMX, answers too: many at once are faster, one slower).
    #[arg(long, default_value = "auto")]
    pub compute_dtype: ComputeDtype,
    /// Do not share the pages of equal prefixes.
    #[arg(long)]
    pub disable_prefix_cache: bool,
    /// Tell routers what the prefix cache holds, tokens of prompts included (GET /v1/kv_events).
    #[arg(long)]
    pub kv_events: bool,
    /// Commit pages on demand instead of at start.
    #[arg(long)]
    pub elastic: bool,
    /// Seconds the engine may make no progress before /health says so and new requests are refused.
    #[arg(long, default_value_t = 120, value_parser = seconds(1))]
    pub stall_seconds: u64,
    /// Let the model's multi-token-prediction head draft tokens, which the model then checks several at a time.
    #[arg(long)]
    pub enable_mtp: bool,
    /// Tokens drafted at once, 1 to 8.
    #[arg(long, default_value_t = 1)]
    pub mtp_num_draft_tokens: usize,
    /// Take drafts unchecked: one state slot a request, faster, and not the model's own words.
    #[arg(long)]
    pub mtp_optimistic: bool,
    /// Draft on even where it costs more than it wins.
    #[arg(long)]
    pub disable_mtp_adaptive: bool,
    /// Draft so many tokens at once from what the text itself said before, for models without such a head; 0 to 8.
    #[arg(long, default_value_t = 0)]
    pub prompt_lookup_num_tokens: usize,
    /// Share of the room for pools that recurrent state gets, 0 < f <= 1 [default: balanced with keys and values].
    #[arg(long)]
    pub state_ratio: Option<Fraction>,
    /// Slots for checkpoints of recurrent state, for each running request.
    #[arg(long, default_value_t = 1)]
    pub state_checkpoints: usize,
    /// Host bytes that requests may hold together (ids, unread output).
    #[arg(long, value_parser = bytes(), default_value_t = 64 << 20)]
    pub request_bytes: u64,
    /// Pictures and videos, for models that take them.
    #[command(flatten)]
    pub media: EncoderArgs,
}

/// What of pictures and videos has a price in the plan.
#[derive(Debug, Args)]
pub struct EncoderArgs {
    /// Pictures and videos that go through the encoder together, at most.
    #[arg(long, default_value_t = 1)]
    pub visual_infer_batch_size: usize,
    /// Pixels that a picture is resized to, or its tiles without the thumbnail have, at most [default: what the model's processor says,
    /// but no more than 4096 tokens].
    #[arg(long)]
    pub max_image_pixels: Option<u64>,
    /// Frames of one video, at most [default: what the model's processor says, but no more than 4096 tokens].
    #[arg(long)]
    pub max_video_frames: Option<u64>,
    /// Seconds of one sound, at most [default: no more than 4096 tokens].
    #[arg(long)]
    pub max_audio_seconds: Option<u64>,
    /// Pictures, videos and sounds in one request, at most.
    #[arg(long, default_value_t = 16)]
    pub max_media_per_request: usize,
    /// Bytes for what the encoder has made [default: room for a batch of the largest items, and one more].
    #[arg(long, value_parser = bytes())]
    pub encoder_output_bytes: Option<u64>,
    /// Host bytes for media: decoding, and pixels and spectrograms until their requests end.
    #[arg(long, value_parser = bytes(), default_value_t = 256 << 20)]
    pub media_bytes: u64,
}

impl EngineArgs {
    /// The engine's options beside an HTTP side like this.
    pub fn options_beside(&self, http: &ServerConfig) -> Options {
        let (http_alternatives, other_threads) = (http.alternatives(), http.threads_max());
        Options { http_alternatives, other_threads, ..self.options(http.heap_bytes_max()) }
    }

    /// The engine's options; `http_bytes` is what the HTTP side may take.
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
                // What rounds keys and values reads them as they are.
                ComputeDtype::Bf16 => KvDtype::Bf16,
                ComputeDtype::Auto | ComputeDtype::F32 | ComputeDtype::Int8 => KvDtype::F16,
            }),
            dtype: self.dtype,
            threads: self.threads,
            isa: self.isa,
            compute_dtype: self.compute_dtype,
            prefix_cache: !self.disable_prefix_cache || broken("V-22"),
            kv_events: self.kv_events,
            elastic: self.elastic,
            stall_limit: Duration::from_secs(self.stall_seconds),
            enable_mtp: self.enable_mtp,
            mtp_num_draft_tokens: self.mtp_num_draft_tokens,
            mtp_optimistic: self.mtp_optimistic,
            mtp_adaptive: !self.disable_mtp_adaptive,
            prompt_lookup_num_tokens: self.prompt_lookup_num_tokens,
            state_ratio: self.state_ratio,
            state_checkpoints: self.state_checkpoints,
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
