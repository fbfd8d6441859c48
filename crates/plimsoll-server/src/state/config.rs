//! The server's configuration: the model it serves and its limits. The types here only hold values.

mod bounds;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_engine::{EngineHandle, MediaSpec, Pooling, Rank, Transcript};
use plimsoll_reply::{Choice, ReasoningFormat, ToolFormat};
use plimsoll_text::{ChatTemplate, Tokenizer};
use serde::Serialize;

use crate::http::access::{ApiKeys, Origins};
use crate::http::body::{ARRIVING_BYTES, BodyLimits};
use crate::http::error::ServeError;
use crate::http::rates::RateLimits;
use crate::http::unknown::UnknownFields;
use crate::mcp::McpConfig;
use crate::otlp::OtlpConfig;
use crate::state::media::config::MediaConfig;
use crate::state::record::RecordConfig;

/// One served model: its engine, its tokenizer and chat template, and its defaults.
#[derive(Clone)]
pub struct Served {
    /// The running engine.
    pub engine: EngineHandle,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to text; without one `/v1/chat/completions` answers 400.
    pub template: Option<Arc<ChatTemplate>>,
    /// How the model writes tool calls and reasoning.
    pub formats: Formats,
    /// Names the model answers to; the first is canonical. `default` is always accepted.
    pub names: Vec<String>,
    /// The model's format, family and size.
    pub about: About,
    /// When the model was loaded, in seconds since 1970.
    pub created_s: u64,
    /// Generated tokens if the client names no number. None: 16 for completions and the rest of the context for chat,
    /// as OpenAI and vLLM do.
    pub default_max_tokens: Option<u32>,
    /// How embeddings and scores are made.
    pub pooled: Pooled,
    /// Sampling when the client names none.
    pub sampling: SamplingDefaults,
}

/// A description of the model, for pages that show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// The checkpoint's format: `gguf` or `safetensors`.
    pub format: &'static str,
    /// The architecture's name, such as `qwen2`.
    pub family: String,
    /// The name of the quantization that most parameters have, such as `Q4_K` or `BF16`.
    pub quantization: String,
    /// Parameters of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors in the checkpoint.
    pub bytes: u64,
}

/// Returns whether `name` is one of these names of a model. Ollama's clients add the tag `latest`.
pub(crate) fn is_named(names: &[String], name: &str) -> bool {
    let plain = name.strip_suffix(":latest").unwrap_or(name);
    names.iter().any(|known| known == name || known == plain)
}

/// How a model's embeddings and scores are made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pooled {
    /// The pooling that turns a text's hidden states into an embedding; none if the model makes no embeddings.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are scaled to length 1.
    pub normalize: bool,
    /// Whether a classifier's score goes through the logistic function.
    pub sigmoid: bool,
    /// How a decoder scores texts by its next token; none if the model has no such scoring.
    pub rank: Option<Rank>,
    /// Whether the model only scores texts: the checkpoint has no output head.
    pub judges: bool,
}

/// How a model's replies are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Formats {
    /// The format of tool calls; none leaves them in the text.
    pub tools: Option<ToolFormat>,
    /// The format of reasoning; none leaves it in the text.
    pub reasoning: Option<ReasoningFormat>,
    /// The format of reasoning in conversations with tools, for which a model may have a separate template.
    pub reasoning_with_tools: Option<ReasoningFormat>,
}

impl Formats {
    /// Returns the formats that the operator chose, else those that the chat template shows. The default format of tool calls is Hermes's.
    pub fn new(template: Option<&ChatTemplate>, tools: Choice<ToolFormat>, reasoning: Choice<ReasoningFormat>) -> Self {
        let source = |with_tools| template.map_or("", |template| template.when(with_tools).source());
        let reasoning = |with_tools| reasoning.or_shown(|| ReasoningFormat::of_template(source(with_tools)));
        Self {
            tools: tools.or_shown(|| ToolFormat::of_template(source(true)).or(Some(ToolFormat::Hermes))),
            reasoning: reasoning(false),
            reasoning_with_tools: reasoning(true),
        }
    }

    /// Returns the format of reasoning, in conversations with tools or without.
    pub fn reasoning(&self, with_tools: bool) -> Option<ReasoningFormat> {
        if with_tools { self.reasoning_with_tools } else { self.reasoning }
    }
}

/// Sampling values for fields that a request does not set.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SamplingDefaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// Probability mass kept, in (0, 1].
    pub top_p: f32,
    /// Tokens kept; 0 keeps all.
    pub top_k: i64,
    /// Least probability kept, relative to the likeliest token.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// Where the values come from.
    pub source: SamplingSource,
}

/// Where [`SamplingDefaults`] come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SamplingSource {
    /// The model's `generation_config.json`.
    Model,
    /// The server, for a model that recommends no sampling.
    Server,
    /// No source: every value is neutral (`--generation-config off`).
    Off,
}

impl Served {
    /// Whether the model writes text; an encoder and a decoder without an output head do not.
    pub fn generates(&self) -> bool {
        !self.engine.limits().encoder && !self.pooled.judges
    }

    /// Whether the model takes an audio clip and nothing else.
    pub fn transcribes_only(&self) -> bool {
        let transcript = self.engine.media().and_then(MediaSpec::transcript);
        matches!(transcript, Some(Transcript::Decoded(_)))
    }
}

impl SamplingDefaults {
    /// For a model that recommends no sampling. At temperature 1 without a filter, small models drift into nonsense.
    pub const GENERAL: Self = Self {
        temperature: 0.7,
        top_p: 0.95,
        top_k: 0,
        min_p: 0.05,
        repetition_penalty: 1.0,
        source: SamplingSource::Server,
    };
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        let source = SamplingSource::Off;
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0, source }
    }
}

/// The address to listen on, and the limits of the HTTP side. Every limit is a number that an error can name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 lets the system choose.
    pub port: u16,
    /// The keys that open every route but `/health`, `/ready` and the page at `/`; none leaves the server open.
    pub api_keys: ApiKeys,
    /// The limits per minute of each API key, or on a server without keys of each client address.
    pub rates: RateLimits,
    /// CORS: in a browser, scripts from these origins may read answers.
    pub origins: Origins,
    /// Host names besides `localhost` and loopback addresses that requests to a server without keys may use on such an address; `*` allows
    /// any.
    pub allowed_hosts: Vec<String>,
    /// Bytes of one request body.
    pub max_body_bytes: u64,
    /// Bytes that all bodies, the prompts in them and all unsent answers may hold together.
    pub max_bytes_in_flight: u64,
    /// How requests with unknown fields are treated.
    pub unknown_fields: UnknownFields,
    /// Open connections; each further connection gets 503 and is closed.
    pub max_connections: u32,
    /// The most sequences of one HTTP request: prompts times `n`.
    pub max_choices: u32,
    /// Inputs of one embedding, rerank or score request, at most 2048.
    pub max_inputs: u32,
    /// Threads that tokenize and render templates at once.
    pub text_workers: u32,
    /// Heap bytes that tokenizing may take over all workers; a prompt that may need more is refused. Text without word boundaries needs
    /// some hundred bytes for each byte of text. The server cannot tell in advance, so it assumes this worst case.
    pub max_tokenizing_bytes: u64,
    /// Bytes that structured output may take: the vocabulary's trie, compiled grammars and their automata. 0 switches structured output
    /// off.
    pub grammar_bytes: u64,
    /// The program that is started as the sandbox of grammars ([`plimsoll_grammar::sandbox`]); a server starts its own program. None only
    /// in tests of this crate, which have no such program.
    pub grammar_sandbox: Option<PathBuf>,
    /// Heap bytes of the separate process that reads the text of one PDF; 0 switches PDFs off.
    pub document_bytes: u64,
    /// The program whose child side reads PDFs; none switches PDFs off.
    pub document_sandbox: Option<PathBuf>,
    /// Bytes that stored responses may take (`/v1/responses`); 0 stores none.
    pub response_store_bytes: u64,
    /// The trace file, with a line for every request; the lines have no content unless the operator asks for it.
    pub record: Option<RecordConfig>,
    /// The export of traces (OpenTelemetry).
    pub otlp: Option<OtlpConfig>,
    /// Limits on images, videos and audio, for a model that takes any. The engine's plan has the bytes that they take.
    pub media: MediaConfig,
    /// MCP servers that responses may use.
    pub mcp: McpConfig,
    /// A request head must arrive within this time; an idle connection is closed after it.
    pub header_timeout: Duration,
    /// A request body must keep arriving: no gap longer than this.
    pub body_gap_timeout: Duration,
    /// A request body must be complete within this time.
    pub body_timeout: Duration,
    /// A client must read sent data, and its system must acknowledge it, within this time. Probes detect a vanished client within this time
    /// too, to a fourth of it. A connection thus outlives its client by about twice this time at most.
    pub write_timeout: Duration,
    /// A request ends when the engine has sent nothing for it for this long.
    pub silence_timeout: Duration,
    /// A request ends after this long in any state; none for no limit.
    pub request_timeout: Option<Duration>,
    /// A stream without output gets a comment at this interval, to detect dead connections.
    pub keep_alive: Duration,
    /// After a shutdown signal, running requests have this long to finish.
    pub drain_deadline: Duration,
    /// A load continues for this long after its last waiting request has ended. Clients that retry, some after the `retry-after` of a busy
    /// server (5 s), then find the load under way.
    pub load_linger: Duration,
    /// A server that shuts down waits this long for a load to reach its next checkpoint.
    pub load_checkpoint_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            api_keys: ApiKeys::default(),
            rates: RateLimits::default(),
            origins: Origins::default(),
            allowed_hosts: Vec::new(),
            max_body_bytes: 4 << 20,
            max_bytes_in_flight: 24 << 20,
            unknown_fields: UnknownFields::default(),
            max_connections: 256,
            max_choices: 128,
            max_inputs: MAX_PROMPTS as u32,
            text_workers: 2,
            max_tokenizing_bytes: 64 << 20,
            grammar_bytes: 48 << 20,
            grammar_sandbox: None,
            document_bytes: 0,
            document_sandbox: None,
            response_store_bytes: 8 << 20,
            record: None,
            otlp: None,
            media: MediaConfig::default(),
            mcp: McpConfig::default(),
            header_timeout: Duration::from_secs(15),
            body_gap_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(120),
            write_timeout: Duration::from_secs(12),
            silence_timeout: Duration::from_secs(600),
            request_timeout: None,
            keep_alive: Duration::from_secs(10),
            drain_deadline: Duration::from_secs(30),
            load_linger: Duration::from_secs(6),
            load_checkpoint_timeout: Duration::from_secs(10),
        }
    }
}

/// The most prompts in one body, before the server's own limit is applied: a list of empty lists must not cost memory.
pub(crate) const MAX_PROMPTS: usize = 2048;

/// Threads that the HTTP side runs on.
pub const HTTP_WORKERS: usize = 2;

/// Bytes hyper may buffer for one direction of one connection.
pub(crate) const CONNECTION_BUFFER_BYTES: usize = 64 << 10;

/// Extra connections on a full server, one request each, for probes and metrics.
pub(crate) const PROBES_MAX: usize = 4;
/// Bytes hyper may buffer for one direction of such a connection: hyper's minimum.
pub(crate) const PROBE_BUFFER_BYTES: usize = 8 << 10;

/// Bytes of one request head.
pub(crate) const HEAD_BYTES: usize = 32 << 10;

/// Kernel bytes for one direction of one connection (the kernel doubles the requested size).
pub(crate) const SOCKET_BUFFER_BYTES: usize = 128 << 10;

impl ServerConfig {
    /// Refuses limits that contradict each other, and limits too small for any request.
    ///
    /// # Errors
    /// [`ServeError::Config`], which names the flag.
    pub fn check(&self) -> Result<(), ServeError> {
        for (flag, value, least) in [
            ("--max-connections", u64::from(self.max_connections), 1),
            ("--max-body-bytes", self.max_body_bytes, 1 << 10),
            ("--record-bytes", self.record.as_ref().map_or(u64::MAX, |record| record.max_bytes), 1 << 9),
        ] {
            if value < least {
                return Err(ServeError::Config(format!("{flag} is {value}; at least {least} is wanted")));
            }
        }
        // The buffer for a body grows by an eighth at a time.
        let least = self.max_body_bytes.saturating_add(self.max_body_bytes / 8).saturating_add(ARRIVING_BYTES);
        if self.max_bytes_in_flight < least {
            return Err(ServeError::Config(format!(
                "--max-bytes-in-flight is {}, but a body of --max-body-bytes ({}) needs {least}",
                self.max_bytes_in_flight, self.max_body_bytes
            )));
        }
        if !(1..=MAX_PROMPTS as u32).contains(&self.max_inputs) {
            let n = self.max_inputs;
            return Err(ServeError::Config(format!("--max-inputs is {n}; 1 to {MAX_PROMPTS} are allowed")));
        }
        if self.silence_timeout < Duration::from_secs(1) {
            return Err(ServeError::Config("silence_timeout must be at least 1 s".into()));
        }
        self.mcp.check().map_err(ServeError::Config)
    }

    /// The limits on a request's body.
    pub(crate) fn body_limits(&self) -> BodyLimits {
        BodyLimits { max_bytes: self.max_body_bytes, within: self.body_timeout, gap: self.body_gap_timeout }
    }

    /// Host and port as URLs write them: an IPv6 address in brackets.
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}
