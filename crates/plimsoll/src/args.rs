//! Flags, named as in lightllm and vllm-mlx. `flags.rs` adds the names of other servers.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use plimsoll_engine::Pooling;
use plimsoll_reply::{Choice, ReasoningFormat, ToolFormat};
use plimsoll_server::ServerConfig;

use crate::access_args::AccessArgs;
use crate::commands::k8s::K8sArgs;
use crate::engine_args::EngineArgs;
use crate::media_args::MediaArgs;

/// LLM and multimodal serving engine that plans every byte of memory before it starts.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version)]
pub struct Cli {
    /// Log at the level debug.
    #[arg(long, short, global = true)]
    pub verbose: bool,
    /// Format of the log on standard error.
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// A limit in bytes. Sums of a few such limits stay numbers of 64 bits.
pub(crate) fn bytes() -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(..=1 << 50)
}

/// A time in seconds, so many at least. From now on that is a time that clocks have.
pub(crate) fn seconds(least: u64) -> RangedU64ValueParser<u64> {
    RangedU64ValueParser::new().range(least..=u32::MAX.into())
}

/// An address to listen on. An IPv6 address may stand in brackets, as in URLs.
pub(crate) fn host(text: &str) -> Result<String, String> {
    if !text.contains(['[', ']']) {
        return Ok(text.to_owned());
    }
    let inside = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match inside.filter(|inside| inside.parse::<std::net::Ipv6Addr>().is_ok()) {
        Some(address) => Ok(address.to_owned()),
        None => {
            Err("brackets hold an IPv6 address and nothing else: give one as [::1], and the port with --port".into())
        }
    }
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP (OpenAI and Anthropic APIs).
    Serve(ServeArgs),
    /// Talk to a model in the terminal.
    Chat(ChatArgs),
    /// Print the memory that serving a model takes, without loading it.
    Plan(PlanArgs),
    /// Check this machine, its limits and the model files, and say what to change.
    Doctor(Box<crate::commands::doctor::Args>),
    /// Fetch a model into the cache.
    Pull {
        /// Catalogue name or hf:org/repo(:file).
        model: String,
    },
    /// List cached models and the catalogue.
    Models,
    /// Remove a model from the cache.
    Rm {
        /// Name of the model, as `models` lists it.
        model: String,
    },
    /// Measure one or more OpenAI-compatible servers, interleaved.
    Bench(plimsoll_bench::bench::Args),
    /// Stress a server with faults and hostile clients, and print a verdict.
    Soak(plimsoll_bench::soak::Args),
    /// Send a recorded trace to a server again, or simulate it without a model.
    Replay(Box<crate::commands::replay::ReplayArgs>),
    /// The neighbour that `soak --balloon` starts.
    #[command(hide = true)]
    Balloon(plimsoll_bench::soak::balloon::Args),
}

/// Seconds that running requests have after SIGTERM, unless the operator says otherwise.
pub const DRAIN_SECONDS: u64 = 30;

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Catalogue name, hf:org/repo(:file), a .gguf file, or a checkpoint directory.
    #[arg(default_value = plimsoll_hub::DEFAULT_MODEL)]
    pub model: String,
    /// Configuration file (TOML). Keys are the names of flags. A flag or a variable (PLIMSOLL_PORT, ...) wins over the file.
    #[arg(long)]
    pub config: Option<String>,
    /// Print every setting and its source as a configuration file, then exit.
    #[arg(long)]
    pub print_config: bool,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1", value_parser = host)]
    pub host: String,
    /// Port to listen on; 0 takes any free port.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Name of the model in the API, repeatable [default: the name of the model].
    #[arg(long)]
    pub served_model_name: Vec<String>,
    /// Steps between two log lines with the memory of every component; 0 turns them off.
    #[arg(long, default_value_t = 1000)]
    pub log_ledger_every: u64,
    /// Record a line per request: time, lengths, settings, result, no content. `plimsoll replay` reads it. FILE.1 to FILE.3 keep earlier records.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Record the tokens of prompts too.
    #[arg(long, requires = "record")]
    pub record_content: bool,
    /// Largest size of the record in bytes.
    #[arg(long, value_parser = bytes(), default_value_t = 1 << 30)]
    pub record_bytes: u64,
    /// How replies are parsed and texts embedded.
    #[command(flatten)]
    pub reading: ReadingArgs,
    /// TOML file with a table `[[models]]` per model: name, model, and its own flags. A model is loaded at its first request.
    #[arg(long, conflicts_with = "model")]
    pub models: Option<PathBuf>,
    /// The flags that hold for each of them, unless its table says otherwise.
    #[arg(skip)]
    pub inherited: Vec<OsString>,
    /// Seconds that running requests have to finish after SIGTERM; a second signal ends them at once.
    #[arg(long, default_value_t = DRAIN_SECONDS, value_parser = seconds(0))]
    pub drain_seconds: u64,
    /// The HTTP side.
    #[command(flatten)]
    pub http: HttpArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags about what a model writes and reads, each model's own.
#[derive(Debug, Args)]
pub struct ReadingArgs {
    /// Format of the model's tool calls: auto (read from the chat template), none, hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, deepseek_v31, glm45, functiongemma, gemma4, openai.
    #[arg(long, default_value = "auto")]
    pub tool_call_parser: Choice<ToolFormat>,
    /// Format of the model's reasoning: auto (read from the chat template), none, think (also qwen3, deepseek_r1, glm45), mistral, seed_oss, gemma4, openai.
    #[arg(long, default_value = "auto")]
    pub reasoning_parser: Choice<ReasoningFormat>,
    /// Pooling mode of embeddings: mean, last or cls [default: as in the checkpoint's sentence-transformers files; mean for encoders
    /// without them].
    #[arg(long)]
    pub pooling: Option<Pooling>,
    /// Default sampling: auto (the checkpoint's generation_config.json) or off (temperature 1, no filter).
    #[arg(long, value_enum, default_value_t = GenerationConfig::Auto)]
    pub generation_config: GenerationConfig,
}

/// Whether a checkpoint's recommendations hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GenerationConfig {
    /// They do.
    Auto,
    /// They do not.
    #[value(alias = "vllm")]
    Off,
}

/// One table of `--models`, as flags.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, args_override_self = true)]
pub struct ModelArgs {
    /// As of `serve`.
    #[arg(long)]
    pub model: String,
    /// More names.
    #[arg(long)]
    pub served_model_name: Vec<String>,
    /// Idle seconds after which the model is unloaded [default: only when another model needs its memory].
    #[arg(long, value_parser = seconds(1))]
    pub idle_seconds: Option<u64>,
    /// Memory in bytes for structured output of this model; 0 turns it off.
    #[arg(long, value_parser = bytes(), default_value_t = 48 << 20)]
    pub grammar_bytes: u64,
    /// How its replies are read and its texts embedded.
    #[command(flatten)]
    pub reading: ReadingArgs,
    /// Its engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Catalogue name, hf:org/repo(:file), a .gguf file, or a checkpoint directory.
    #[arg(default_value = plimsoll_hub::DEFAULT_MODEL)]
    pub model: String,
    /// System prompt.
    #[arg(long)]
    pub system: Option<String>,
    /// Sampling temperature; 0 takes the most likely token.
    #[arg(long, default_value_t = 0.7)]
    pub temperature: f32,
    /// Most tokens per answer.
    #[arg(long, default_value_t = 1024)]
    pub max_tokens: u32,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Catalogue name or hf:OWNER/REPOSITORY (fetched if it is not in the cache), a .gguf file, a checkpoint directory, or a config.json.
    #[arg(default_value = plimsoll_hub::DEFAULT_MODEL)]
    pub model: String,
    /// Configuration file (TOML) of `serve`.
    #[arg(long)]
    pub config: Option<String>,
    /// Check that this many users fit at once, each with --context tokens.
    #[arg(long)]
    pub users: Option<u64>,
    /// Tokens of each user, prompt and output together [default with --users: 4096 or the context length, the lower].
    #[arg(long)]
    pub context: Option<u64>,
    /// Images of the largest size in each user's prompt.
    #[arg(long)]
    pub images: Option<u64>,
    /// Seconds of audio in each user's prompt.
    #[arg(long)]
    pub audio_seconds: Option<u64>,
    /// Load the weights, run the largest steps in a small KV cache, measure them, and print the sizes a start would choose.
    #[arg(long, conflicts_with_all = ["users", "context", "images", "audio_seconds"])]
    pub probe: bool,
    /// Plan the models of this file, as for `serve --models`.
    #[arg(long, conflicts_with_all = ["model", "users", "context", "probe", "k8s"])]
    pub models: Option<PathBuf>,
    /// The flags that hold for each of them.
    #[arg(skip)]
    pub inherited: Vec<OsString>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The Kubernetes manifest.
    #[command(flatten)]
    pub k8s: K8sArgs,
    /// The HTTP side.
    #[command(flatten)]
    pub http: HttpArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Flags of the HTTP side that have a price in the plan, the same for `serve` and `plan`.
#[derive(Debug, Args)]
pub struct HttpArgs {
    /// Largest request body in bytes; a larger one gets a 413.
    #[arg(long, value_parser = bytes(), default_value_t = 8 << 20)]
    pub max_body_bytes: u64,
    /// Memory in bytes of request bodies, parsed requests and unsent answers together.
    #[arg(long, value_parser = bytes(), default_value_t = 24 << 20)]
    pub max_bytes_in_flight: u64,
    /// Most inputs of one embedding, rerank or score request, up to 2048.
    #[arg(long, default_value_t = 2048)]
    pub max_inputs: u32,
    /// How unknown request fields are handled.
    #[arg(long, value_enum, default_value_t = UnknownFields::Warn)]
    pub unknown_fields: UnknownFields,
    /// Most open connections.
    #[arg(long, default_value_t = 256)]
    pub max_connections: u32,
    /// Memory in bytes for structured output (JSON schemas, regular expressions, tool calls); 0 turns it off.
    #[arg(long, value_parser = bytes(), default_value_t = 48 << 20)]
    pub grammar_bytes: u64,
    /// Memory in bytes of stored responses (/v1/responses). The least recently used one is evicted first; 0 stores none.
    #[arg(long, value_parser = bytes(), default_value_t = 8 << 20)]
    pub response_store_bytes: u64,
    /// Its clients.
    #[command(flatten)]
    pub access: AccessArgs,
    /// Their pictures and videos.
    #[command(flatten)]
    pub media: MediaArgs,
}

/// What becomes of an unknown field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum UnknownFields {
    /// The request is a 400.
    Refuse,
    /// The request goes on, and a response header names the field.
    Warn,
    /// The request goes on.
    Ignore,
}

impl HttpArgs {
    /// The server's configuration with these limits.
    pub fn config(&self) -> anyhow::Result<ServerConfig> {
        let config = self.access.apply(ServerConfig {
            max_body_bytes: self.max_body_bytes,
            max_bytes_in_flight: self.max_bytes_in_flight,
            max_inputs: self.max_inputs,
            max_connections: self.max_connections,
            unknown_fields: match self.unknown_fields {
                UnknownFields::Refuse => plimsoll_server::UnknownFields::Refuse,
                UnknownFields::Warn => plimsoll_server::UnknownFields::Warn,
                UnknownFields::Ignore => plimsoll_server::UnknownFields::Ignore,
            },
            grammar_bytes: self.grammar_bytes,
            grammar_sandbox: Some(plimsoll_memory::host::own_program()),
            response_store_bytes: self.response_store_bytes,
            media: self.media.config()?,
            ..ServerConfig::default()
        })?;
        config.check()?;
        Ok(config)
    }
}

/// The last part of a path that exists, of `.` and `..` their directory's; none of the root. What a link leads to may be called by a sum.
pub fn last_name(path: &Path) -> Option<OsString> {
    let found = || Some(path.canonicalize().ok()?.file_name()?.to_owned());
    path.file_name().map(ToOwned::to_owned).or_else(found)
}

/// What a model is called when the user gave no name: the catalogue name, or the file's or directory's.
pub fn default_name(spec: &str) -> String {
    let path = PathBuf::from(spec);
    let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    // A directory's name may have dots: Qwen2.5-0.5B.
    let name = if path.is_file() && is_gguf { path.file_stem().map(ToOwned::to_owned) } else { last_name(&path) };
    match (path.exists(), name) {
        (true, Some(name)) => name.to_string_lossy().into_owned(),
        _ => spec.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_as_its_directory_or_its_file() {
        let folder = std::env::temp_dir().join(format!("plimsoll-names-{}", std::process::id()));
        let directory = folder.join("Qwen2.5-0.5B-Instruct");
        std::fs::create_dir_all(&directory).unwrap();
        let file = folder.join("SmolLM2-1.7B.Q4_1.gguf");
        std::fs::write(&file, b"").unwrap();
        assert_eq!(default_name(directory.to_str().unwrap()), "Qwen2.5-0.5B-Instruct");
        assert_eq!(default_name(file.to_str().unwrap()), "SmolLM2-1.7B.Q4_1");
        assert_eq!(default_name("smollm2"), "smollm2");
        // A path may end in what is no name.
        for end in ["..", "../.", "../Qwen2.5-0.5B-Instruct/.."] {
            let spec = directory.join(end);
            assert_eq!(default_name(spec.to_str().unwrap()), folder.file_name().unwrap().to_str().unwrap(), "{end}");
        }
        let here = std::env::current_dir().unwrap();
        assert_eq!(default_name("."), here.file_name().unwrap().to_str().unwrap());
        assert_eq!(default_name("/"), "/");
        std::os::unix::fs::symlink(&file, folder.join("linked.gguf")).unwrap();
        assert_eq!(default_name(folder.join("linked.gguf").to_str().unwrap()), "linked", "not what it leads to");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
