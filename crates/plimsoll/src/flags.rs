//! Names and groups of flags: the names that other servers use, and the order in which `--help` shows them.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};

/// Additional names of settings: those of other servers.
const OTHER_NAMES: [(&str, &[&str]); 11] = [
    ("max_req_total_len", &["max-model-len", "ctx-size", "context-length"]),
    ("running_max_req_size", &["max-num-seqs", "parallel", "max-running-requests"]),
    ("batch_max_tokens", &["max-num-batched-tokens", "chunked-prefill-size"]),
    ("max_total_token_num", &["max-total-tokens"]),
    ("mem_fraction", &["gpu-memory-utilization", "mem-fraction-static"]),
    ("kv_dtype", &["kv-cache-dtype"]),
    ("disable_prefix_cache", &["no-enable-prefix-caching", "disable-radix-cache"]),
    ("served_model_name", &["alias"]),
    ("request_timeout", &["timeout"]),
    ("draft_model", &["model-draft", "speculative-draft-model-path"]),
    ("draft_num_tokens", &["draft-max"]),
];

/// Short names, of one letter and of two.
const SHORT_NAME: (&str, char) = ("max_req_total_len", 'c');
const SHORT_NAME_OF_TWO: (&str, &str) = ("-np", "--parallel");

/// Flags of other servers that have no counterpart of the same meaning, and what to do instead.
const MEANINGS: [(&[&str], &str); 24] = [
    (&["model", "model-path", "hf-repo", "hf-file"], "name the model first: plimsoll serve MODEL"),
    (
        &["n-gpu-layers", "gpu-layers", "ngl", "main-gpu", "split-mode"],
        "a model runs on one device as a whole: --device cpu, gpu, gpu:N or auto",
    ),
    (
        &["n-ctx", "num-ctx", "max-context", "max-context-length", "max-seq-len", "max-prompt-len", "max-length"],
        "use --max-req-total-len (--ctx-size): the tokens of one request, prompt and output",
    ),
    (&["batch-size", "ubatch-size"], "use --batch-max-tokens: the tokens of one step"),
    (
        &["max-batch-size", "max-concurrency", "max-concurrent-requests", "slots"],
        "use --running-max-req-size: the requests that run at once",
    ),
    (&["cache-type-k", "cache-type-v", "kv-type"], "use --kv-dtype, which holds for keys and values"),
    (
        &["kv-cache-size", "num-gpu-blocks-override", "max-total-num-tokens"],
        "use --max-total-token-num, in tokens, or --memory-budget for the whole process",
    ),
    (&["ram", "max-ram", "memory", "max-memory", "memory-limit"], "use --memory-budget"),
    (
        &["seed", "temp", "temperature", "top-p", "top-k", "min-p", "repeat-penalty"],
        "each request sets it; --generation-config chooses the defaults",
    ),
    (&["lora", "enable-lora", "lora-modules"], "adapters are not supported: merge the adapter into the checkpoint"),
    (
        &["rope-scaling", "rope-scale", "rope-freq-base", "yarn-orig-ctx"],
        "the rope scaling of the checkpoint is used; leave it out",
    ),
    (&["tensor-parallel-size", "tp", "pipeline-parallel-size"], "one process uses all cores; leave it out"),
    (&["enable-prefix-caching"], "prefix caching is on; --disable-prefix-cache turns it off"),
    (&["quantization", "load-format"], "the format is read from the checkpoint; leave it out"),
    (&["trust-remote-code"], "no code of a checkpoint is run; leave it out"),
    (&["chat-template", "jinja"], "the chat template of the checkpoint is used; leave it out"),
    (
        &["n-predict", "predict", "max-tokens"],
        "a request gives max_tokens; --max-req-total-len limits prompt and output",
    ),
    (
        &["speculative-config", "num-speculative-tokens"],
        "use --enable-mtp, --draft-model MODEL or --prompt-lookup-num-tokens N",
    ),
    (&["swap-space", "cpu-offload-gb", "cache-ram"], "--memory-budget limits the memory of the process"),
    (&["flash-attn", "mlock", "no-mmap", "enforce-eager", "cont-batching"], "it needs no flag; leave it out"),
    (&["log-level", "uvicorn-log-level", "log-verbosity"], "use --verbose, or the variable RUST_LOG"),
    (&["cors-allow-origins", "allow-origins"], "use --allowed-origins"),
    (&["enable-auto-tool-choice", "reasoning-format"], "tool calls and reasoning need no flag; leave it out"),
    (
        &["ssl-certfile", "ssl-keyfile", "ssl-cert-file", "ssl-key-file"],
        "put a TLS proxy in front; see docs/security.md",
    ),
];

/// Letters by which a suggested name may differ from the one that was typed.
const SPELLING_DISTANCE: usize = 2;

/// The flags that `serve --help` shows first. The groups follow by topic. Every flag of `serve` is in one group.
const COMMON: &[&str] = &[
    "host",
    "port",
    "memory_budget",
    "max_req_total_len",
    "running_max_req_size",
    "max_total_token_num",
    "served_model_name",
    "compute_dtype",
    "enable_mtp",
    "api_key_file",
    "models",
    "config",
];
const SECURITY: &str = "Security";
const LOGGING: &str = "Logging";
const GROUPS: [(&str, &[&str]); 9] = [
    ("Model", &["tool_call_parser", "reasoning_parser", "generation_config", "pooling", "grammar_bytes", "dtype"]),
    (
        "Memory",
        &[
            "mem_fraction",
            "kv_dtype",
            "elastic",
            "tables",
            "table_cache_bytes",
            "disable_prefix_cache",
            "state_ratio",
            "state_checkpoints",
            "cache_dir",
            "cache_bytes",
            "cache_write_bytes_per_day",
            "cache_key_file",
            "packed_cache",
            "packed_cache_bytes",
            "request_bytes",
        ],
    ),
    (
        "Scheduling",
        &[
            "batch_max_tokens",
            "graph_max_batch_size",
            "max_waiting",
            "long_prompt_slowdown",
            "stall_seconds",
            "kv_events",
        ],
    ),
    (
        "Speculation",
        &[
            "draft_model",
            "draft_num_tokens",
            "prompt_lookup_num_tokens",
            "mtp_num_draft_tokens",
            "mtp_optimistic",
            "disable_mtp_adaptive",
        ],
    ),
    (
        "Media",
        &[
            "mmproj",
            "no_mmproj",
            "max_media_per_request",
            "max_image_pixels",
            "max_video_frames",
            "max_audio_seconds",
            "media_bytes",
            "visual_infer_batch_size",
            "encoder_output_bytes",
            "media_fetch",
            "allowed_media_domains",
            "media_fetch_timeout",
            "media_root",
            "ffmpeg",
            "max_image_bytes",
            "max_audio_bytes",
            "max_transcription_seconds",
            "max_decode_pixels",
            "max_animation_frames",
            "max_animation_pixels",
        ],
    ),
    (
        "HTTP",
        &[
            "max_body_bytes",
            "max_bytes_in_flight",
            "max_inputs",
            "max_connections",
            "unknown_fields",
            "response_store_bytes",
            "document_bytes",
            "mcp_server",
            "mcp_timeout",
            "request_timeout",
            "inactivity_timeout",
            "heartbeat",
            "drain_seconds",
        ],
    ),
    (SECURITY, &["api_key", "allowed_origins", "allowed_hosts", "rate_limit_requests", "rate_limit_tokens"]),
    (LOGGING, &["log_ledger_every", "record", "record_content", "record_bytes", "otlp_endpoint"]),
    ("Advanced", &["device", "allow_software_gpu", "gpu_memory_budget", "threads", "isa", "print_config"]),
];

/// Flags of the network, of time and of other servers. `plan`, `doctor` and `replay` take them, since they take the flags of
/// `serve`, and do not show them: they change no byte of the plan.
const CHANGE_NO_PLAN: [&str; 15] = [
    "allowed_media_domains",
    "cache_write_bytes_per_day",
    "drain_seconds",
    "heartbeat",
    "inactivity_timeout",
    "kv_events",
    "long_prompt_slowdown",
    "mcp_server",
    "mcp_timeout",
    "media_fetch",
    "media_fetch_timeout",
    "media_root",
    "request_timeout",
    "stall_seconds",
    "unknown_fields",
];

/// Flags that `run` accepts and does not show: it starts the same engine, but for one user.
const HIDDEN_IN_RUN: [&str; 6] =
    ["graph_max_batch_size", "max_waiting", "kv_events", "running_max_req_size", "stall_seconds", "request_bytes"];

/// The commands with all names of their flags, and the flags in groups.
pub fn arranged(command: Command) -> Command {
    let command = command.mut_args(|arg| arg.help_heading(LOGGING));
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| command.mut_subcommand(&name, |sub| arranged_alone(sub, &name)))
}

fn arranged_alone(mut command: Command, name: &str) -> Command {
    if !["serve", "plan", "run", "doctor", "replay"].contains(&name) {
        return command;
    }
    let groups = std::iter::once((None, COMMON)).chain(GROUPS.iter().map(|(heading, ids)| (Some(*heading), *ids)));
    let mut order = 0;
    for (heading, ids) in groups {
        for id in ids {
            if !command.get_arguments().any(|arg| arg.get_id() == id) {
                continue;
            }
            order += 1;
            let hidden = match name {
                "plan" | "replay" => {
                    [Some(SECURITY), Some(LOGGING)].contains(&heading)
                        || *id == "api_key_file"
                        || CHANGE_NO_PLAN.contains(id)
                }
                "doctor" => CHANGE_NO_PLAN.contains(id),
                "run" => HIDDEN_IN_RUN.contains(id),
                _ => false,
            };
            // A changed argument moves to the end, so the flags are shown in the order of the groups.
            command = command.mut_arg(id, |arg| {
                let arg = named(arg).display_order(order).hide(hidden);
                heading.into_iter().fold(arg, Arg::help_heading)
            });
        }
    }
    command
}

/// The argument with its additional names.
fn named(arg: Arg) -> Arg {
    let id = arg.get_id().to_string();
    let names = OTHER_NAMES.iter().filter(|(own, _)| *own == id).flat_map(|(_, names)| *names);
    let arg = names.fold(arg, |arg, name| arg.visible_alias(name));
    if id == SHORT_NAME.0 { arg.short(SHORT_NAME.1) } else { arg }
}

/// The setting's own name, for any of its names in a file or in the environment.
pub fn own_name(id: &str) -> String {
    let dashed = id.replace('_', "-");
    let own = OTHER_NAMES.iter().find(|(_, names)| names.contains(&dashed.as_str()));
    own.map_or_else(|| id.to_owned(), |(own, _)| (*own).to_owned())
}

/// Arguments with `--a_b` as `--a-b`, up to a `--`.
pub fn dashed(args: Vec<OsString>) -> Vec<OsString> {
    let mut flags = true;
    let each = args.into_iter().map(|arg| {
        flags &= arg != "--";
        match arg.to_str() {
            Some(text) if flags && text == SHORT_NAME_OF_TWO.0 => SHORT_NAME_OF_TWO.1.into(),
            Some(text) if flags && text.starts_with("--") => {
                let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
                format!("{}{value}", name.replace('_', "-")).into()
            }
            _ => arg,
        }
    });
    each.collect()
}

/// The advice for a flag of another server.
pub fn meaning(name: &str) -> Option<&'static str> {
    let name = name.trim_start_matches('-').replace('_', "-");
    MEANINGS.iter().find(|(names, _)| names.contains(&name.as_str())).map(|(_, what)| *what)
}

/// Adds the advice of [`meaning`] to an error about a flag of another server. A similar spelling is suggested only for a
/// flag that is one or two letters away: other similar names mean something else.
pub fn explained(error: clap::Error, command: &mut Command) -> clap::Error {
    let unknown = (error.kind() == ErrorKind::UnknownArgument).then(|| error.get(ContextKind::InvalidArg)).flatten();
    let Some(ContextValue::String(flag)) = unknown else { return error };
    let name = flag.split('=').next().unwrap_or(flag).to_owned();
    if let Some(what) = meaning(&name) {
        return command.error(ErrorKind::UnknownArgument, format!("unknown option '{name}': {what}"));
    }
    match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(suggestion))
            if strsim::damerau_levenshtein(suggestion, &name) > SPELLING_DISTANCE =>
        {
            command.error(ErrorKind::UnknownArgument, format!("unexpected argument '{name}' found; --help lists all"))
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn every_flag_of_serve_is_in_one_group() {
        let command = arranged(Cli::command());
        let serve = command.find_subcommand("serve").unwrap();
        let flags: Vec<&str> = serve.get_opts().map(|arg| arg.get_id().as_str()).collect();
        let listed: Vec<&str> = GROUPS.iter().flat_map(|(_, ids)| *ids).chain(COMMON).copied().collect();
        let unique: BTreeSet<&str> = listed.iter().copied().collect();
        assert_eq!(unique.len(), listed.len(), "a flag is in two groups");
        assert_eq!(unique, flags.into_iter().collect());
        let names: Vec<&str> = OTHER_NAMES.iter().map(|(own, _)| *own).collect();
        assert!(names.iter().all(|name| unique.contains(name)), "{names:?}");
    }

    #[test]
    fn names_of_other_servers_are_taken() {
        let args = ["plimsoll", "serve", "demo", "--max_model_len=100", "--gpu-memory-utilization", "0.5", "-np", "3"];
        let args = dashed(args.iter().map(OsString::from).collect());
        let matches = arranged(Cli::command()).try_get_matches_from(args).unwrap();
        let (_, serve) = matches.subcommand().unwrap();
        assert_eq!(serve.get_one::<usize>("max_req_total_len"), Some(&100));
        assert_eq!(serve.get_one::<usize>("running_max_req_size"), Some(&3));
        assert_eq!(own_name("max_num_seqs"), "running_max_req_size");
        assert_eq!(dashed(vec!["--".into(), "--a_b".into()]), ["--", "--a_b"]);
    }

    #[test]
    fn a_flag_of_another_server_gets_the_nearest_meaning() {
        let mut command = arranged(Cli::command());
        let error = command.clone().try_get_matches_from(["plimsoll", "serve", "--n-gpu-layers", "99"]).unwrap_err();
        let said = explained(error, &mut command).to_string();
        assert!(said.contains("unknown option '--n-gpu-layers': a model runs on one device"), "{said}");
        let known = |name: &str| OTHER_NAMES.iter().any(|(_, names)| names.contains(&name));
        assert!(!MEANINGS.iter().flat_map(|(names, _)| *names).any(|name| known(name)), "a name has two meanings");
    }

    #[test]
    fn a_spelling_is_suggested_only_if_it_is_near() {
        let mut command = arranged(Cli::command());
        let mut said = |flag: &str| {
            let error = command.clone().try_get_matches_from(["plimsoll", "serve", flag, "1"]).unwrap_err();
            explained(error, &mut command).to_string()
        };
        assert!(said("--prot").contains("'--port'"));
        assert!(said("--max-connection").contains("'--max-connections'"));
        // clap's own measure suggests --max-connections here.
        let far = said("--max-concepts");
        assert!(far.contains("unexpected argument '--max-concepts'") && !far.contains("tip:"), "{far}");
    }

    #[test]
    fn flags_without_influence_are_accepted_and_not_shown() {
        let mut command = arranged(Cli::command());
        for (name, shown) in [("serve", true), ("plan", false), ("doctor", false), ("replay", false)] {
            let help = command.find_subcommand_mut(name).unwrap().render_long_help().to_string();
            assert_eq!(help.contains("--inactivity-timeout"), shown, "{name}");
            assert!(help.contains("--memory-budget"), "{name}");
        }
        assert!(command.try_get_matches_from(["plimsoll", "plan", "demo", "--stall-seconds", "9"]).is_ok());
    }
}
