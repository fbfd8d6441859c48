//! Flags. Their names are those users know from lightllm and vllm-mlx; underscores are accepted for dashes.

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

/// An LLM serving engine with a load line: it plans every byte before it says "ready" and never crosses the line.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version)]
pub struct Cli {
    /// Log more.
    #[arg(long, short, global = true)]
    pub verbose: bool,
    /// How log lines on standard error are written.
    #[arg(long, alias = "log_format", global = true, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// What to do.
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
    /// Serve a model over HTTP (OpenAI API).
    Serve(ServeArgs),
    /// Talk to a model in the terminal.
    Chat(ChatArgs),
    /// Print what serving a model would take, byte by byte, without loading it.
    Plan(PlanArgs),
    /// Check machine, limits, processor, model files, and say what to change.
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
        /// Its name, as `models` lists it.
        model: String,
    },
    /// Measure one or more OpenAI-compatible servers, in turn.
    Bench(crate::bench::Args),
    /// Load a server with everything that breaks servers, and judge it.
    Soak(crate::soak::Args),
    /// Give a recorded trace to a server again, or to the scheduler and the memory of a plan.
    Replay(Box<crate::replay::Args>),
    /// The neighbour that `soak --balloon` starts.
    #[command(hide = true)]
    Balloon(crate::soak::balloon::Args),
}

/// Seconds that running requests have after SIGTERM, unless the operator says otherwise.
pub const DRAIN_SECONDS: u64 = 30;

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Catalogue name, hf:org/repo(:file), a .gguf file, or a checkpoint directory.
    #[arg(default_value = plimsoll_hub::DEFAULT_MODEL)]
    pub model: String,
    /// Settings in TOML, named as flags are; a flag or an environment variable (PLIMSOLL_PORT, ...) wins over the file.
    #[arg(long)]
    pub config: Option<String>,
    /// Print every setting and where it comes from, as a configuration file, and end.
    #[arg(long, alias = "print_config")]
    pub print_config: bool,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1", value_parser = host)]
    pub host: String,
    /// Port to listen on; 0 lets the system choose.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Name under which the model is served (repeatable); defaults to the model's own.
    #[arg(long, alias = "served_model_name")]
    pub served_model_name: Vec<String>,
    /// Log the ledger (planned and committed bytes of every component) about every so many steps; 0: never.
    #[arg(long, alias = "log_ledger_every", default_value_t = 1000)]
    pub log_ledger_every: u64,
    /// Write a line for every request to this file: when it came, lengths, settings, how it ended; no content. `plimsoll replay` reads it. Three earlier ones are kept, as FILE.1 and so on.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Record the tokens of prompts, too.
    #[arg(long, alias = "record_content", requires = "record")]
    pub record_content: bool,
    /// Bytes after which nothing more is recorded.
    #[arg(long, alias = "record_bytes", value_parser = bytes(), default_value_t = 1 << 30)]
    pub record_bytes: u64,
    /// How the model's replies are read and its texts embedded.
    #[command(flatten)]
    pub reading: ReadingArgs,
    /// Models to serve by name, each loaded when it is first asked for: a TOML file with a table `[[models]]` for each (name, model, and
    /// its own flags).
    #[arg(long, conflicts_with = "model")]
    pub models: Option<PathBuf>,
    /// The flags that hold for each of them, unless its table says otherwise.
    #[arg(skip)]
    pub inherited: Vec<OsString>,
    /// Seconds that running requests have to finish after SIGTERM; a second one does not wait for them.
    #[arg(long, alias = "drain_seconds", default_value_t = DRAIN_SECONDS, value_parser = seconds(0))]
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
    /// How the model writes tool calls: auto (as its chat template shows), none, hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, deepseek_v31, glm45, functiongemma, gemma4, openai.
    #[arg(long, alias = "tool_call_parser", default_value = "auto")]
    pub tool_call_parser: Choice<ToolFormat>,
    /// How the model writes its thoughts: auto (as its chat template shows), none, think (also qwen3, deepseek_r1, glm45), mistral, seed_oss, gemma4, openai.
    #[arg(long, alias = "reasoning_parser", default_value = "auto")]
    pub reasoning_parser: Choice<ReasoningFormat>,
    /// What texts become at /v1/embeddings: mean, last or cls [default: as the checkpoint's sentence-transformers files say, or else the
    /// mean for encoders].
    #[arg(long)]
    pub pooling: Option<Pooling>,
    /// Sampling of requests that name none: auto (as the checkpoint's generation_config.json recommends) or off (temperature 1, no
    /// token left out).
    #[arg(long, alias = "generation_config", value_enum, default_value_t = GenerationConfig::Auto)]
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
    #[arg(long, alias = "served_model_name")]
    pub served_model_name: Vec<String>,
    /// Seconds without use after which the model is unloaded [default: only when another model needs its memory].
    #[arg(long, alias = "idle_seconds", value_parser = seconds(1))]
    pub idle_seconds: Option<u64>,
    /// Bytes that constrained output of this model may take; 0 switches it off.
    #[arg(long, alias = "grammar_bytes", value_parser = bytes(), default_value_t = 48 << 20)]
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
    /// 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.7)]
    pub temperature: f32,
    /// Tokens per answer at most.
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
    /// Settings in TOML, the file that `serve` takes.
    #[arg(long)]
    pub config: Option<String>,
    /// Ask whether this many users at once, each with --context tokens, fit.
    #[arg(long)]
    pub users: Option<u64>,
    /// Tokens of each user's prompt and output together [default with --users: 4096, or the model's context if that is less].
    #[arg(long)]
    pub context: Option<u64>,
    /// Pictures of the largest size in each user's prompt, for the same question.
    #[arg(long)]
    pub images: Option<u64>,
    /// Seconds of one sound in each user's prompt, for the same question.
    #[arg(long, alias = "audio_seconds")]
    pub audio_seconds: Option<u64>,
    /// Load the weights, run the largest steps in a small pool, measure, and say what a start would choose beside what runs
    /// (--max-total-token-num, or else the plan). Serves nothing and leaves nothing behind.
    #[arg(long, conflicts_with_all = ["users", "context", "images", "audio_seconds"])]
    pub probe: bool,
    /// Plan the models of this file, as `serve --models` does.
    #[arg(long, conflicts_with_all = ["model", "users", "context", "probe", "k8s"])]
    pub models: Option<PathBuf>,
    /// The flags that hold for each of them.
    #[arg(skip)]
    pub inherited: Vec<OsString>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Where it is to run.
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
    /// Largest request body in bytes.
    #[arg(long, value_parser = bytes(), default_value_t = 8 << 20)]
    pub max_body_bytes: u64,
    /// Bytes that request bodies, what is made of them and unsent answers may hold together.
    #[arg(long, alias = "max_bytes_in_flight", value_parser = bytes(), default_value_t = 24 << 20)]
    pub max_bytes_in_flight: u64,
    /// Inputs of one embedding, rerank or score request, at most 2048.
    #[arg(long, alias = "max_inputs", default_value_t = 2048)]
    pub max_inputs: u32,
    /// What becomes of request fields that this server does not know.
    #[arg(long, alias = "unknown_fields", value_enum, default_value_t = UnknownFields::Warn)]
    pub unknown_fields: UnknownFields,
    /// Open connections at most.
    #[arg(long, default_value_t = 256)]
    pub max_connections: u32,
    /// Bytes that constrained output (JSON schemas, regular expressions, forced tool calls) may take; 0 switches it off.
    #[arg(long, alias = "grammar_bytes", value_parser = bytes(), default_value_t = 48 << 20)]
    pub grammar_bytes: u64,
    /// Bytes that stored responses (/v1/responses) may take; the one not used for longest goes first, 0 stores none.
    #[arg(long, alias = "response_store_bytes", value_parser = bytes(), default_value_t = 8 << 20)]
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
