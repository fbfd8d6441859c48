//! `launch`: starts a coding agent against a running server, with the settings that it needs. The user's own settings are not
//! changed.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::run::connect::{Link, default_url};
use super::run::store;
use crate::args::{Client, LaunchArgs};
use crate::output::{say, tell};
use crate::private_file;

/// The key that a client of a server without keys gets: most clients refuse to start without one.
const NO_KEY: &str = "plimsoll";

/// The environment variable with the key, for clients that read it from a variable of any name.
const KEY_VARIABLE: &str = "PLIMSOLL_API_KEY";

/// Tokens that a client's instructions and tools take before the user has said anything, as measured (docs/clients.md).
const CLAUDE_TOKENS: u64 = 29_000;
const CODEX_TOKENS: u64 = 5_000;
const OPENCODE_TOKENS: u64 = 8_000;

/// A client with its settings for one server.
#[derive(Debug, PartialEq, Eq)]
struct Setup {
    name: &'static str,
    program: &'static str,
    install: &'static str,
    /// Variables to set; a key is [`Word::Key`].
    set: Vec<(&'static str, Word)>,
    /// Variables to remove, because they take precedence over `set`.
    unset: &'static [&'static str],
    arguments: Vec<OsString>,
    /// The configuration file that the last argument names.
    file: Option<String>,
    /// Tokens of the client's own instructions and tools; none where they are not known.
    tokens: Option<u64>,
}

/// A value, or the server's key, which is not printed.
#[derive(Debug, PartialEq, Eq)]
enum Word {
    Plain(String),
    Key,
}

/// The server and the model in the form that clients need.
struct Place<'a> {
    /// Without `/v1`.
    root: String,
    model: &'a str,
    context: Option<u64>,
}

/// Starts the client, or prints what it needs.
pub fn run(args: &LaunchArgs) -> anyhow::Result<()> {
    let (url, key) = match &args.url {
        Some(url) => (url.clone(), args.keys.first()?),
        None => (default_url(), None),
    };
    let link = match &args.url {
        Some(url) => Link::to(url, key.as_deref(), args.model.as_deref()),
        None => Link::unnamed(args.model.as_deref()),
    };
    let link = link.context("no server to use: start one with `plimsoll serve MODEL`, or name one with --url")?;
    let root = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
    let root = if root.contains("://") { root } else { format!("http://{root}") };
    let setup = setup(args.client, &Place { root, model: &link.model.name, context: link.model.context });
    // A quarter of the context is left for the answer.
    let short = |context: &u64| setup.tokens.is_some_and(|tokens| context - context / 4 < tokens);
    if let (Some(needed), Some(context)) = (setup.tokens, link.model.context.filter(short)) {
        let name = setup.name;
        tell!(
            "note: {name} sends up to {needed} tokens of its own; {} takes {context}: use a model with a longer context",
            link.model.name
        );
    }
    match args.print {
        true => print(&setup, args, key.as_deref()),
        false => start(setup, args, key.unwrap_or_else(|| NO_KEY.into())),
    }
}

fn setup(client: Client, place: &Place<'_>) -> Setup {
    let plain = |text: &str| Word::Plain(text.to_owned());
    let (root, model) = (&place.root, place.model);
    let base = format!("{root}/v1");
    let nothing = Setup {
        name: "",
        program: "",
        install: "",
        set: Vec::new(),
        unset: &[],
        arguments: Vec::new(),
        file: None,
        tokens: None,
    };
    match client {
        Client::Claude => Setup {
            name: "Claude Code",
            program: "claude",
            install: "npm install -g @anthropic-ai/claude-code",
            set: vec![
                ("ANTHROPIC_BASE_URL", plain(root)),
                ("ANTHROPIC_AUTH_TOKEN", Word::Key),
                ("ANTHROPIC_MODEL", plain(model)),
                ("ANTHROPIC_SMALL_FAST_MODEL", plain(model)),
                ("ANTHROPIC_DEFAULT_HAIKU_MODEL", plain(model)),
            ],
            // With these variables the client uses another provider.
            unset: &["ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"],
            tokens: Some(CLAUDE_TOKENS),
            ..nothing
        },
        Client::Codex => Setup {
            name: "Codex",
            program: "codex",
            install: "npm install -g @openai/codex",
            set: vec![(KEY_VARIABLE, Word::Key)],
            arguments: codex(&base, place),
            tokens: Some(CODEX_TOKENS),
            ..nothing
        },
        Client::Opencode => Setup {
            name: "OpenCode",
            program: "opencode",
            install: "npm install -g opencode-ai",
            set: vec![
                (KEY_VARIABLE, Word::Key),
                ("OPENCODE_CONFIG_CONTENT", plain(&opencode(&base, place).to_string())),
            ],
            tokens: Some(OPENCODE_TOKENS),
            ..nothing
        },
        Client::Aider => Setup {
            name: "aider",
            program: "aider",
            install: "python3 -m pip install aider-chat",
            set: vec![("OPENAI_API_BASE", plain(&base)), ("OPENAI_API_KEY", Word::Key)],
            arguments: ["--model", &format!("openai/{model}"), "--no-show-model-warnings"].map(OsString::from).into(),
            unset: &["OPENAI_BASE_URL"],
            ..nothing
        },
        Client::Continue => Setup {
            name: "Continue",
            program: "cn",
            install: "npm install -g @continuedev/cli",
            arguments: vec!["--config".into()],
            file: Some(continues(&base, place)),
            ..nothing
        },
    }
}

/// Codex takes settings as `-c KEY=VALUE`, with values in TOML.
fn codex(base: &str, place: &Place<'_>) -> Vec<OsString> {
    let text = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let mut settings = vec![
        ("model".to_owned(), text(place.model)),
        ("model_provider".to_owned(), text("plimsoll")),
        ("model_providers.plimsoll.name".to_owned(), text("Plimsoll")),
        ("model_providers.plimsoll.base_url".to_owned(), text(base)),
        ("model_providers.plimsoll.env_key".to_owned(), text(KEY_VARIABLE)),
        ("model_providers.plimsoll.wire_api".to_owned(), text("responses")),
    ];
    settings.extend(place.context.map(|tokens| ("model_context_window".to_owned(), tokens.to_string())));
    settings.into_iter().flat_map(|(key, value)| [OsString::from("-c"), format!("{key}={value}").into()]).collect()
}

fn opencode(base: &str, place: &Place<'_>) -> Value {
    let mut model = json!({"name": place.model});
    if let Some(context) = place.context {
        // OpenCode asks for this many output tokens each time, and summarizes a conversation that leaves fewer.
        model["limit"] = json!({"context": context, "output": context / 4});
    }
    json!({
        "$schema": "https://opencode.ai/config.json",
        "model": format!("plimsoll/{}", place.model),
        "provider": {"plimsoll": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Plimsoll",
            "options": {"baseURL": base, "apiKey": format!("{{env:{KEY_VARIABLE}}}")},
            "models": {place.model: model},
        }},
    })
}

/// A configuration file in YAML. JSON strings are YAML strings.
fn continues(base: &str, place: &Place<'_>) -> String {
    let quoted = |text: &str| Value::from(text).to_string();
    let context = place
        .context
        .map_or_else(String::new, |tokens| format!("    defaultCompletionOptions:\n      contextLength: {tokens}\n"));
    format!(
        "name: Plimsoll\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: {model}\n    provider: openai\n    model: {model}\n    \
         apiBase: {base}\n    apiKey: {KEY}\n    roles: [chat, edit, apply]\n    capabilities: [tool_use]\n{context}",
        model = quoted(place.model),
        base = quoted(base),
    )
}

/// Stands for the key in a configuration file.
const KEY: &str = "YOUR_KEY";

/// The path of a client's configuration file.
fn file_of(setup: &Setup) -> anyhow::Result<PathBuf> {
    Ok(store::directory()?.join(format!("{}.yaml", setup.program)))
}

/// Prints variables, file and command, for a shell. The key is not shown.
fn print(setup: &Setup, args: &LaunchArgs, key: Option<&str>) -> anyhow::Result<()> {
    let keyed = key.is_some();
    for name in setup.unset {
        say!("unset {name}");
    }
    if let Some(line) = key.and_then(|key| key_line(key, args)) {
        say!("{line}");
    }
    for (name, word) in &setup.set {
        match word {
            // The variable is set by [`key_line`], or already in the user's shell.
            Word::Key if keyed && *name == KEY_VARIABLE => {}
            Word::Key if keyed => say!("export {name}=\"${KEY_VARIABLE}\""),
            Word::Key => say!("export {name}={NO_KEY}"),
            Word::Plain(value) => say!("export {name}={}", quoted(value)),
        }
    }
    let mut words: Vec<String> = vec![setup.program.to_owned()];
    words.extend(setup.arguments.iter().map(|word| quoted(&word.to_string_lossy())));
    if let Some(file) = &setup.file {
        let path = file_of(setup)?;
        let quoted = quoted(&path.to_string_lossy());
        // In the here-document, the shell must expand the key's variable and nothing else.
        let file = file.replace('\\', r"\\").replace('$', r"\$").replace('`', r"\`");
        let key = if keyed { format!("${KEY_VARIABLE}") } else { NO_KEY.into() };
        say!("(umask 077; cat > {quoted} <<END\n{}END\n)", file.replace(KEY, &key));
        words.push(quoted);
    }
    words.extend(args.arguments.iter().map(|word| quoted(&word.to_string_lossy())));
    say!("{}", words.join(" "));
    Ok(())
}

/// The shell line that sets the variable with the key; none if the environment already has it.
fn key_line(key: &str, args: &LaunchArgs) -> Option<String> {
    if std::env::var(KEY_VARIABLE).is_ok_and(|set| set == key) {
        return None;
    }
    Some(match args.keys.api_key_file.as_ref().filter(|_| args.keys.api_key.is_empty()) {
        // The first line that is no comment, as in the server.
        Some(file) => {
            let line = r"/^[[:space:]]*[^#[:space:]]/{s/^[[:space:]]*//;s/[[:space:]]*$//;p;q;}";
            format!("export {KEY_VARIABLE}=\"$(sed -n '{line}' {})\"", quoted(&file.to_string_lossy()))
        }
        None => format!("export {KEY_VARIABLE}={KEY} # the key that --api-key has"),
    })
}

/// A word as shells read it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Replaces this process with the client.
fn start(setup: Setup, args: &LaunchArgs, key: String) -> anyhow::Result<()> {
    let mut command = Command::new(setup.program);
    command.args(&setup.arguments);
    for name in setup.unset {
        command.env_remove(name);
    }
    for (name, word) in &setup.set {
        match word {
            Word::Key => command.env(name, &key),
            Word::Plain(value) => command.env(name, value),
        };
    }
    if let Some(file) = &setup.file {
        let path = file_of(&setup)?;
        let text = file.replace(KEY, &Value::from(key).to_string());
        private_file::write(&path, text.as_bytes()).with_context(|| format!("writing {}", path.display()))?;
        command.arg(path);
    }
    command.args(&args.arguments);
    let error = command.exec();
    if error.kind() == ErrorKind::NotFound {
        let Setup { name, program, install, .. } = setup;
        bail!("{name} is not installed ('{program}' is not on PATH): install it with `{install}`");
    }
    Err(error).with_context(|| format!("starting {}", setup.program))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Client; 5] = [Client::Claude, Client::Codex, Client::Opencode, Client::Aider, Client::Continue];

    fn of(client: Client) -> Setup {
        setup(client, &Place { root: "http://127.0.0.1:8000".into(), model: "smollm2", context: Some(8192) })
    }

    #[test]
    fn every_client_is_told_address_and_model() {
        for client in ALL {
            let text = format!("{:?}", of(client));
            assert!(text.contains("http://127.0.0.1:8000") && text.contains("smollm2"), "{text}");
            assert!(text.contains("Key") || text.contains(KEY), "{text}");
        }
        let claude = of(Client::Claude);
        assert_eq!(claude.set[0], ("ANTHROPIC_BASE_URL", Word::Plain("http://127.0.0.1:8000".into())));
        let codex = of(Client::Codex).arguments;
        assert!(codex.contains(&r#"model_providers.plimsoll.base_url="http://127.0.0.1:8000/v1""#.into()), "{codex:?}");
        assert!(codex.contains(&"model_context_window=8192".into()));
        let content: Value = match &of(Client::Opencode).set[1].1 {
            Word::Plain(text) => serde_json::from_str(text).unwrap(),
            Word::Key => panic!("no content"),
        };
        assert_eq!(content["provider"]["plimsoll"]["models"]["smollm2"]["limit"]["context"], 8192);
    }

    #[test]
    fn words_are_quoted_for_shells() {
        assert_eq!(quoted("openai/smollm2"), "openai/smollm2");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(quoted(""), "''");
    }
}
