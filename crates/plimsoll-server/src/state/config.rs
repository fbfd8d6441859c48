//! What the server is given: the model it serves and the limits it keeps. No behaviour lives here.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use plimsoll_engine::{EngineHandle, HttpAlternative, MediaSpec, Pooling, Transcript};
use plimsoll_grammar::sandbox::SANDBOXES_BYTES_MAX;
use plimsoll_memory::Bytes;
use plimsoll_reply::{Choice, ReasoningFormat, ToolFormat};
use plimsoll_text::{ChatTemplate, Tokenizer};
use serde::Serialize;

use crate::http::access::{ApiKeys, Origins};
use crate::http::body::{ARRIVING_BYTES, BodyLimits, PARSED_FACTOR};
use crate::http::error::ServeError;
use crate::http::rates::RateLimits;
use crate::http::unknown::UnknownFields;
use crate::mcp::{self, MCP_THREADS, McpConfig};
use crate::media::config::{DECODERS, MediaConfig};
use crate::otlp::{self, OTLP_THREADS, OtlpConfig};
use crate::state::background::BACKGROUND_MAX;
use crate::state::record::{RECORDER_BYTES, RecordConfig};

/// One served model: its engine and what turns text into its token ids.
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
    /// What it is.
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

/// What a model is, for pages that describe it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// The checkpoint's format: `gguf` or `safetensors`.
    pub format: &'static str,
    /// The architecture's name, such as `qwen2`.
    pub family: String,
    /// The quantization's name, such as `Q4_K` or `BF16`: that of most parameters.
    pub quantization: String,
    /// Parameters of all tensors.
    pub parameters: u64,
    /// Bytes of all tensors in the checkpoint.
    pub bytes: u64,
}

/// Whether a model with these names is meant by `name`. Ollama's clients add the tag `latest`.
pub(crate) fn is_named(names: &[String], name: &str) -> bool {
    let plain = name.strip_suffix(":latest").unwrap_or(name);
    names.iter().any(|known| known == name || known == plain)
}

/// How a model's embeddings and scores are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pooled {
    /// What a text's hidden states become; none: the model makes no embeddings here.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are scaled to length 1.
    pub normalize: bool,
    /// Whether a classifier's score goes through the logistic function.
    pub sigmoid: bool,
}

/// How a model's replies are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Formats {
    /// Of tool calls; none leaves them in the text.
    pub tools: Option<ToolFormat>,
    /// Of reasoning; none leaves them in the text.
    pub reasoning: Option<ReasoningFormat>,
    /// Of reasoning beside tools, which may have a template of their own.
    pub reasoning_with_tools: Option<ReasoningFormat>,
}

impl Formats {
    /// The operator's choice comes first, then the format that the chat template shows. The default format of tool
    /// calls is Hermes's.
    pub fn new(template: Option<&ChatTemplate>, tools: Choice<ToolFormat>, reasoning: Choice<ReasoningFormat>) -> Self {
        let source = |with_tools| template.map_or("", |template| template.when(with_tools).source());
        let reasoning = |with_tools| reasoning.or_shown(|| ReasoningFormat::of_template(source(with_tools)));
        Self {
            tools: tools.or_shown(|| ToolFormat::of_template(source(true)).or(Some(ToolFormat::Hermes))),
            reasoning: reasoning(false),
            reasoning_with_tools: reasoning(true),
        }
    }

    /// That of reasoning, in conversations with tools or without.
    pub fn reasoning(&self, with_tools: bool) -> Option<ReasoningFormat> {
        if with_tools { self.reasoning_with_tools } else { self.reasoning }
    }
}

/// What a sampling field is worth when a request does not name it.
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
    /// Whether the model writes text; an encoder does not.
    pub fn generates(&self) -> bool {
        !self.engine.limits().encoder
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

/// Where to listen and what the HTTP side may take. Every limit is a number a client can be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 lets the system choose.
    pub port: u16,
    /// The keys that open every route but `/health`, `/ready` and the page at `/`; none leaves the server open.
    pub api_keys: ApiKeys,
    /// What each key, or on an open server each address, may take in a minute.
    pub rates: RateLimits,
    /// CORS: in a browser, scripts from these origins may read answers.
    pub origins: Origins,
    /// Names besides `localhost` and loopback addresses under which a server without keys may be asked on such an
    /// address; `*` for any.
    pub allowed_hosts: Vec<String>,
    /// Bytes of one request body.
    pub max_body_bytes: u64,
    /// Bytes that all bodies, the prompts in them and all unsent answers may hold together.
    pub max_bytes_in_flight: u64,
    /// What becomes of a field that this server does not know.
    pub unknown_fields: UnknownFields,
    /// Open connections; the next one is told 503 and closed.
    pub max_connections: u32,
    /// Sequences one HTTP request may ask for: prompts times `n`.
    pub max_choices: u32,
    /// Inputs of one embedding, rerank or score request, at most 2048.
    pub max_inputs: u32,
    /// Threads that tokenize and render templates at once.
    pub text_workers: u32,
    /// Heap bytes that tokenizing may take over all workers; a prompt that may need more is refused. Text without word
    /// boundaries needs some hundred bytes for each byte of text. The server cannot tell in advance, so it assumes the
    /// worst.
    pub max_tokenizing_bytes: u64,
    /// Bytes that constrained output may take: the vocabulary's trie, compiled grammars and their automata. 0 switches
    /// it off.
    pub grammar_bytes: u64,
    /// The program that is started as the sandbox of grammars ([`plimsoll_grammar::sandbox`]): this one, for a server.
    /// None only where there is no such program, in tests of this crate.
    pub grammar_sandbox: Option<PathBuf>,
    /// Heap bytes for the text of one PDF, in a process of its own; 0 reads none.
    pub document_bytes: u64,
    /// The program whose child side reads PDFs; none reads none.
    pub document_sandbox: Option<PathBuf>,
    /// Bytes that stored responses may take (`/v1/responses`); 0 stores none.
    pub response_store_bytes: u64,
    /// Where every request is written down, without its content.
    pub record: Option<RecordConfig>,
    /// Where traces go (OpenTelemetry).
    pub otlp: Option<OtlpConfig>,
    /// Images and videos, where the served model takes any. What they take is in the engine's plan.
    pub media: MediaConfig,
    /// MCP servers that responses may use.
    pub mcp: McpConfig,
    /// A request head must arrive within this time; an idle connection is closed after it.
    pub header_timeout: Duration,
    /// A request body must keep arriving: no gap longer than this.
    pub body_gap_timeout: Duration,
    /// A request body must be complete within this time.
    pub body_timeout: Duration,
    /// A client must read what is sent to it, and its system must acknowledge it, within this time. Probes find a
    /// vanished client within this time too, to a fourth of it. So a connection outlives its client by about twice this
    /// time at most.
    pub write_timeout: Duration,
    /// A request is ended when the engine has been silent on it for this long.
    pub silence_timeout: Duration,
    /// A request is ended after this long, whatever it does; none for no limit.
    pub request_timeout: Option<Duration>,
    /// A stream without news carries a comment this often, so that dead connections show.
    pub keep_alive: Duration,
    /// After a shutdown signal, running requests have this long to finish.
    pub drain_deadline: Duration,
    /// A load goes on for this long after the last waiting request has ended: clients that retry as they are told find it
    /// under way.
    pub abandoned_load: Duration,
    /// A server that ends waits so long for a load to come to its next checkpoint.
    pub last_load: Duration,
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
            abandoned_load: Duration::from_secs(6),
            last_load: Duration::from_secs(10),
        }
    }
}

/// Most prompts in one body, before the server's own limit is applied: a list of empty lists must not cost memory.
pub(crate) const MAX_PROMPTS: usize = 2048;

/// Threads that the HTTP side runs on.
pub const HTTP_WORKERS: usize = 2;

/// Bytes hyper may buffer for one direction of one connection.
pub(crate) const CONNECTION_BUFFER_BYTES: usize = 64 << 10;

/// Connections beyond the limit that may look at a full server, one request each: probes, metrics.
pub(crate) const PROBES_MAX: usize = 4;
/// Bytes hyper may buffer for one direction of these: the least that it takes.
pub(crate) const PROBE_BUFFER_BYTES: usize = 8 << 10;

/// Heap bytes of one connection besides its two buffers: 22.1 KiB measured with both full (`tests/host_heap.rs`).
const CONNECTION_FIXED_BYTES: u64 = 23 << 10;

/// Bytes of one request head.
pub(crate) const HEAD_BYTES: usize = 32 << 10;

/// Kernel bytes for one direction of one connection (the kernel doubles what is asked for).
pub(crate) const SOCKET_BUFFER_BYTES: usize = 128 << 10;

/// Bytes of one event of a stream: a piece of output ([`plimsoll_engine::backlog::DELTA_BYTES`]) as JSON, in a list
/// that grew by doubling.
const EVENT_BYTES: u64 = 2 * plimsoll_engine::backlog::DELTA_BYTES as u64;

/// Threads that read a document: one that waits for its process, two for the pipes.
const DOCUMENT_THREADS: usize = 3;

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
        // Room for a body grows by an eighth.
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

    /// The most heap bytes that open connections take: buffers, task, parsed head, stream state.
    pub fn connection_bytes_max(&self) -> u64 {
        let bytes = |count: u64, buffer: usize| count * (2 * buffer as u64 + CONNECTION_FIXED_BYTES);
        bytes(self.max_connections.into(), CONNECTION_BUFFER_BYTES) + bytes(PROBES_MAX as u64, PROBE_BUFFER_BYTES)
    }

    /// The most heap bytes that events of streams take which connections have no room for yet, one each.
    pub fn event_bytes_max(&self) -> u64 {
        u64::from(self.max_connections) * EVENT_BYTES
    }

    /// Bytes for bodies that are being parsed, all together: as much as the largest one takes.
    pub(crate) fn parsing_bytes_max(&self) -> u64 {
        PARSED_FACTOR * self.max_body_bytes
    }

    /// The part of [`Self::heap_bytes_max`] that each model has: its grammars, the processes that test and validate
    /// them, and the text workers' buffers.
    pub fn model_bytes_max(&self, grammar_bytes: u64) -> u64 {
        let sandboxes = if grammar_bytes == 0 { 0 } else { SANDBOXES_BYTES_MAX };
        grammar_bytes + sandboxes + u64::from(self.text_workers) * plimsoll_text::CUTTING_BYTES_MAX as u64
    }

    /// The most heap bytes the HTTP side takes, for the plan: the sum over all holders.
    pub fn heap_bytes_max(&self) -> u64 {
        let connections = self.connection_bytes_max() + self.event_bytes_max();
        // Bodies, prompts and whole answers: one budget, enforced byte by byte. What is parsed at the moment: another.
        let in_flight = self.max_bytes_in_flight + self.parsing_bytes_max();
        // Values a template makes on its way to a prompt, and the prompt.
        let templates = u64::from(self.text_workers) * 2 * plimsoll_text::PROMPT_BYTES_MAX as u64;
        let running = u64::from(self.max_connections) * crate::state::running::ENTRY_BYTES;
        // A response in the background has what a connection has, without the connection's buffers.
        let own = crate::state::running::ENTRY_BYTES + CONNECTION_FIXED_BYTES + EVENT_BYTES;
        let background = if self.response_store_bytes == 0 { 0 } else { u64::from(BACKGROUND_MAX) * own };
        let documents =
            if self.document_bytes == 0 { 0 } else { plimsoll_document::Reader::process_bytes(self.document_bytes) };
        connections
            + in_flight
            + templates
            + self.max_tokenizing_bytes
            + self.model_bytes_max(self.grammar_bytes)
            + self.response_store_bytes
            + running
            + background
            + documents
            + if self.mcp.servers.is_empty() { 0 } else { mcp::heap_bytes_max() }
            + self.record.as_ref().map_or(0, |_| RECORDER_BYTES)
            + self.otlp.as_ref().map_or(0, |_| otlp::heap_bytes_max(self.max_connections + BACKGROUND_MAX))
            + self.rates.heap_bytes_max(self.api_keys.len())
    }

    /// Threads of the HTTP side: the runtime's, one that fetches a file or loads a model, two for grammars, those for
    /// documents, the recorder's, the exporter's and one that looks up names of MCP servers. More files are fetched, and more
    /// names looked up, at once only if the system has threads to spare.
    pub fn threads_max(&self) -> usize {
        let documents = if self.document_bytes == 0 { 0 } else { DOCUMENT_THREADS };
        let otlp = self.otlp.as_ref().map_or(0, |_| OTLP_THREADS);
        let mcp = if self.mcp.servers.is_empty() { 0 } else { MCP_THREADS };
        HTTP_WORKERS + self.blocking_threads() + 1 + 2 + documents + usize::from(self.record.is_some()) + otlp + mcp
    }

    /// Threads of the runtime that tokenize, decode media and unload a model. The runtime starts all of them at once:
    /// if the system refused a thread later, a request would hang. The runtime never starts more. Without this limit it
    /// would start another thread whenever a finished one is still busy for a moment.
    pub fn blocking_threads(&self) -> usize {
        self.text_workers as usize + 2 * DECODERS + 1
    }

    /// What half of each limit would make of [`Self::heap_bytes_max`], for advice when a plan does not fit.
    pub fn alternatives(&self) -> Vec<HttpAlternative> {
        let with = |flag, value: String, change: &dyn Fn(&mut Self)| {
            let mut config = self.clone();
            change(&mut config);
            let http_bytes = config.heap_bytes_max();
            config.check().is_ok().then_some(HttpAlternative { flag, value, http_bytes })
        };
        let (connections, body) = (self.max_connections / 2, self.max_body_bytes / 2);
        let (in_flight, grammars) = (self.max_bytes_in_flight / 2, self.grammar_bytes / 2);
        let all = [
            with("--max-connections", connections.to_string(), &|config| config.max_connections = connections),
            with("--max-body-bytes", Bytes(body).flag(), &|config| config.max_body_bytes = body),
            with("--max-bytes-in-flight", Bytes(in_flight).flag(), &|config| config.max_bytes_in_flight = in_flight),
            with("--grammar-bytes", Bytes(grammars).flag(), &|config| config.grammar_bytes = grammars),
        ];
        all.into_iter().flatten().collect()
    }
}
