//! Settings from flags, environment and a file. A flag wins over the environment, the environment over the file, the file over the
//! default. All three use the names of the flags (`--drain-seconds`, `PLIMSOLL_DRAIN_SECONDS`, `drain-seconds = 30`). An unknown
//! name is an error.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use clap::builder::Resettable;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args as _, CommandFactory, FromArgMatches, Id};
use toml::{Table, Value};

use crate::args::{Cli, Command, EngineArgs, ModelArgs};
use crate::flags;

/// The source of a value, in order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    Flag,
    Environment,
    File,
    Default,
}

impl Origin {
    const fn name(self) -> &'static str {
        match self {
            Self::Flag => "flag",
            Self::Environment => "environment",
            Self::File => "file",
            Self::Default => "default",
        }
    }
}

/// Commands that also take settings from environment and file: the server, and the commands that plan and check it.
const COMMANDS: [&str; 3] = ["serve", "plan", "doctor"];

/// Settings of the server that models do not inherit, although [`ModelArgs`] has the same names.
const OF_THE_SERVER: [&str; 3] = ["model", "served_model_name", "memory_budget"];

/// Settings that clients of a server (`bench`, `soak`, `replay`) also take from the environment: keys should not be on the command
/// line.
const OF_CLIENTS: [&str; 2] = ["api_key", "api_key_file"];

const PREFIX: &str = "PLIMSOLL_";

/// Variables that are no flags.
const OTHER_VARIABLES: [&str; 1] = ["PLIMSOLL_CACHE"];

/// Settings of `plan` that its manifest states itself, leaves to the container's limit, or must not show.
const NOT_FOR_PODS: [&str; 6] = ["model", "memory_budget", "max_total_token_num", "threads", "api_key", "api_key_file"];

/// Arguments that are no settings.
const NO_SETTINGS: [&str; 4] = ["help", "version", "config", "print_config"];

/// Most bytes of a configuration file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads the command line with the settings of all sources. Also returns the text that `--print-config` prints.
pub fn read(args: Vec<OsString>, environment: &BTreeMap<String, String>) -> anyhow::Result<(Cli, String)> {
    let args = flags::dashed(args);
    let mut command = flags::arranged(Cli::command());
    command.build();
    let matches = lenient(command.clone()).try_get_matches_from(&args);
    let matches = matches.unwrap_or_else(|error| flags::explained(error, &mut command).exit());
    let Some((name, sub)) = matches.subcommand().filter(|(name, _)| COMMANDS.contains(name)) else {
        let matches = command.clone().get_matches_from(before_escape(args, keys(&command, &matches, environment)?));
        let mut cli = Cli::from_arg_matches(&matches)?;
        if let (Command::Run(run), Some((_, sub))) = (&mut cli.command, matches.subcommand()) {
            run.engine_flag = engine_flag(sub);
        }
        return Ok((cli, String::new()));
    };
    let given = gather(&command, name, sub, environment)?;
    let tokens = given.iter().flat_map(|setting| setting.tokens.clone());
    let matches = command.clone().try_get_matches_from(before_escape(args.clone(), tokens));
    let alone = || drop(command.clone().get_matches_from(&args));
    let matches = matches.map_err(|error| in_its_place(&error, &given, alone))?;
    let page = match matches.subcommand() {
        Some((name, sub)) => page(&command, name, sub, &given),
        None => String::new(),
    };
    let mut cli = Cli::from_arg_matches(&matches)?;
    if let Some((name, sub)) = matches.subcommand() {
        let has = |other: &clap::Command, id: &str| other.get_arguments().any(|arg| arg.get_id() == id);
        let of_models = ModelArgs::command();
        let a_models = |id: &str| has(&of_models, id) && !OF_THE_SERVER.contains(&id);
        match &mut cli.command {
            Command::Serve(serve) => {
                serve.inherited = as_flags(&command, name, sub, a_models)?;
                serve.model_is_named = sub.value_source("model") != Some(ValueSource::DefaultValue);
            }
            Command::Doctor(doctor) => doctor.inherited = as_flags(&command, name, sub, a_models)?,
            Command::Plan(plan) => {
                plan.inherited = as_flags(&command, name, sub, a_models)?;
                let of_serve = command.find_subcommand("serve").expect("it is a command");
                let a_pods = |id: &str| has(of_serve, id) && !NOT_FOR_PODS.contains(&id);
                plan.k8s.serve_flags = as_flags(&command, name, sub, a_pods)?;
            }
            _ => {}
        }
    }
    Ok((cli, page))
}

/// The same command without requirements and conflicts between arguments. It finds which settings are flags; other sources may still
/// set the rest.
fn lenient(mut command: clap::Command) -> clap::Command {
    for sub in command.get_subcommands_mut().filter(|sub| COMMANDS.contains(&sub.get_name())) {
        *sub = std::mem::take(sub)
            .mut_args(|arg| arg.requires(Resettable::<Id>::Reset).conflicts_with(Resettable::<Id>::Reset));
    }
    command
}

/// The name of the first engine flag on the command line, with its dashes.
fn engine_flag(matches: &ArgMatches) -> Option<String> {
    let engine = EngineArgs::augment_args(clap::Command::new("engine"));
    let mut flags = engine.get_arguments().map(|arg| arg.get_id().as_str());
    let set = flags.find(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
    set.map(|id| format!("--{}", id.replace('_', "-")))
}

/// The settings that `wanted` accepts, as flags. Settings at their default are left out.
fn as_flags(
    command: &clap::Command,
    name: &str,
    matches: &ArgMatches,
    wanted: impl Fn(&str) -> bool,
) -> anyhow::Result<Vec<OsString>> {
    let mut all = Vec::new();
    for arg in settings(command, name) {
        let id = arg.get_id().as_str();
        if !wanted(id) || matches.value_source(id) == Some(ValueSource::DefaultValue) {
            continue;
        }
        let values = match arg.get_action() {
            ArgAction::SetTrue => vec![matches.get_flag(id).to_string()],
            _ => matches.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy().into_owned()).collect(),
        };
        if !values.is_empty() {
            all.extend(tokens(arg, &values).map_err(|error| anyhow!("--{}: {error}", id.replace('_', "-")))?);
        }
    }
    Ok(all)
}

/// A setting from environment or file, as flags.
struct Given {
    id: String,
    origin: Origin,
    /// The source in messages: the variable (`PLIMSOLL_PORT`), or the file's name and the key.
    place: String,
    tokens: Vec<OsString>,
}

fn gather(
    command: &clap::Command,
    name: &str,
    matches: &ArgMatches,
    environment: &BTreeMap<String, String>,
) -> anyhow::Result<Vec<Given>> {
    let known = |id: &str| COMMANDS.iter().any(|name| settings(command, name).any(|arg| arg.get_id() == id));
    let mut variables = BTreeMap::new();
    for (variable, value) in environment {
        let Some(rest) = variable.strip_prefix(PREFIX).filter(|_| !OTHER_VARIABLES.contains(&variable.as_str())) else {
            continue;
        };
        let id = flags::own_name(&rest.to_ascii_lowercase());
        if id == "config" {
            continue;
        }
        if of_kubernetes(rest, value) {
            continue;
        }
        if !known(&id) {
            bail!("{variable} is set, but there is no setting of that name{}", suggestion(command, &id));
        }
        variables.insert(id, value);
    }
    let file = match matches.get_one::<String>("config").or_else(|| environment.get("PLIMSOLL_CONFIG")) {
        Some(path) => Some((path.clone(), read_file(Path::new(path))?.1)),
        None => None,
    };
    let mut table = BTreeMap::new();
    for (key, value) in file.iter().flat_map(|(_, table)| table) {
        let id = key.replace('-', "_");
        let path = &file.as_ref().expect("it is being read").0;
        if !known(&id) {
            bail!("{path}: there is no setting `{key}`{}", suggestion(command, &id));
        }
        if table.insert(id, value).is_some() {
            bail!("{path}: `{key}` is there twice, under two of its names");
        }
    }
    let mut all = Vec::new();
    for arg in settings(command, name) {
        let id = arg.get_id().as_str();
        if matches.value_source(id) == Some(ValueSource::CommandLine) {
            continue;
        }
        let (origin, place, values) = if let Some(value) = variables.get(id) {
            (Origin::Environment, variable(id), vec![(*value).clone()])
        } else if let (Some(value), Some((path, _))) = (table.get(id), &file) {
            let place = format!("{path}: {}", id.replace('_', "-"));
            let values = texts(value).with_context(|| place.clone())?;
            (Origin::File, place, values)
        } else {
            continue;
        };
        let tokens = tokens(arg, &values).map_err(|error| anyhow!("{place}: {error}"))?;
        all.push(Given { id: id.to_owned(), origin, place, tokens });
    }
    Ok(undisputed(command, name, matches, all))
}

/// Removes settings that conflict with a setting of a higher-priority source, such as `PLIMSOLL_MODEL` beside `--models`.
fn undisputed(command: &clap::Command, name: &str, matches: &ArgMatches, mut all: Vec<Given>) -> Vec<Given> {
    let sub = command.find_subcommand(name).expect("it has been asked for");
    let others = |arg| sub.get_arg_conflicts_with(arg).into_iter().map(|other| other.get_id().as_str());
    let pairs = |arg| others(arg).map(move |other| (arg.get_id().as_str(), other));
    let conflicts: Vec<(&str, &str)> = settings(command, name).flat_map(pairs).collect();
    let excludes = |a: &str, b: &str| conflicts.contains(&(a, b)) || conflicts.contains(&(b, a));
    let flags = settings(command, name).map(|arg| arg.get_id().as_str());
    let flags = flags.filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
    let mut stand: Vec<(String, Origin)> = flags.map(|id| (id.to_owned(), Origin::Flag)).collect();
    all.sort_by_key(|setting| setting.origin);
    all.retain(|own| {
        if stand.iter().any(|(other, origin)| *origin < own.origin && excludes(&own.id, other)) {
            return false;
        }
        // A setting that is switched off conflicts with none.
        if !own.tokens.is_empty() {
            stand.push((own.id.clone(), own.origin));
        }
        true
    });
    all
}

/// The API keys of the environment as flags, for a command that is a client.
fn keys(
    command: &clap::Command,
    matches: &ArgMatches,
    environment: &BTreeMap<String, String>,
) -> anyhow::Result<Vec<OsString>> {
    let mut all = Vec::new();
    let Some((name, sub)) = matches.subcommand() else { return Ok(all) };
    let wanted = || settings(command, name).filter(|arg| OF_CLIENTS.contains(&arg.get_id().as_str()));
    // A flag for the key, or for its file, takes precedence over the environment.
    if wanted().any(|arg| sub.value_source(arg.get_id().as_str()).is_some()) {
        return Ok(all);
    }
    for arg in wanted() {
        let variable = variable(arg.get_id().as_str());
        if let Some(value) = environment.get(&variable).filter(|value| !value.is_empty()) {
            all.extend(tokens(arg, std::slice::from_ref(value)).map_err(|error| anyhow!("{variable}: {error}"))?);
        }
    }
    Ok(all)
}

/// The name of a setting's environment variable.
fn variable(id: &str) -> String {
    format!("{PREFIX}{}", id.to_ascii_uppercase())
}

/// The arguments of a command that are settings.
fn settings<'a>(command: &'a clap::Command, name: &str) -> impl Iterator<Item = &'a Arg> {
    let sub = command.find_subcommand(name);
    let all = sub.into_iter().flat_map(clap::Command::get_arguments);
    all.filter(|arg| !NO_SETTINGS.contains(&arg.get_id().as_str()))
}

/// Whether Kubernetes set this variable. It sets such variables in every container of a namespace with a service `plimsoll…`.
fn of_kubernetes(rest: &str, value: &str) -> bool {
    // PLIMSOLL_PORT=tcp://10.0.0.1:8000 has the name of a setting, but is not one.
    let address = ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    address || rest.ends_with("SERVICE_HOST") || ["SERVICE_PORT", "PORT_"].iter().any(|part| rest.contains(part))
}

fn suggestion(command: &clap::Command, id: &str) -> String {
    if let Some(what) = flags::meaning(id) {
        return format!(": {what}");
    }
    let names = COMMANDS.iter().flat_map(|name| settings(command, name)).map(|arg| arg.get_id().as_str());
    let near = names.map(|name| (distance(name, id), name)).min();
    match near {
        Some((0..=3, name)) => format!(" (did you mean `{}`?)", name.replace('_', "-")),
        _ => "; `plimsoll serve --help` lists them".into(),
    }
}

/// The number of bytes to change, add or drop to turn one name into the other.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let change = before + usize::from(x != y);
            before = row[j + 1];
            row[j + 1] = change.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Reads a TOML file: its text and its parsed table.
pub(crate) fn read_file(path: &Path) -> anyhow::Result<(String, Table)> {
    let size = std::fs::metadata(path).with_context(|| format!("the configuration {}", path.display()))?.len();
    if size > FILE_BYTES_MAX {
        bail!("the configuration {} has {size} bytes, more than the limit of {FILE_BYTES_MAX}", path.display());
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("the configuration {}", path.display()))?;
    let table = text.parse::<Table>().map_err(|error| {
        // The error's own display repeats the line, which may contain a key.
        let line = error.span().map_or(0, |span| line_at(&text, span.start));
        anyhow!("{}: line {line}: {}", path.display(), error.message())
    })?;
    Ok((text, table))
}

/// The number of the line with this byte, from 1.
pub(crate) fn line_at(text: &str, byte: usize) -> usize {
    1 + text[..byte].matches('\n').count()
}

/// A TOML value as the texts that a flag takes.
pub(crate) fn texts(value: &Value) -> anyhow::Result<Vec<String>> {
    Ok(match value {
        Value::String(text) => vec![text.clone()],
        Value::Integer(number) => vec![number.to_string()],
        Value::Float(number) => vec![number.to_string()],
        Value::Boolean(on) => vec![on.to_string()],
        Value::Array(values) => {
            let all: Vec<_> = values.iter().map(texts).collect::<anyhow::Result<_>>()?;
            all.into_iter().flatten().collect()
        }
        Value::Table(_) | Value::Datetime(_) => bail!("a text, a number, true or false, or a list of them is wanted"),
    })
}

/// The command-line arguments that set a setting to these values.
pub(crate) fn tokens(arg: &Arg, values: &[String]) -> Result<Vec<OsString>, String> {
    let Some(long) = arg.get_long() else {
        return match values {
            [one] => Ok(vec![one.into()]),
            _ => Err("one text is wanted".into()),
        };
    };
    match (arg.get_action(), values) {
        (ArgAction::SetTrue, [value]) => match value.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(vec![format!("--{long}").into()]),
            "false" | "0" | "no" | "off" => Ok(Vec::new()),
            _ => Err(format!("`{value}` is neither true nor false")),
        },
        (ArgAction::Append, values) => Ok(values.iter().map(|value| format!("--{long}={value}").into()).collect()),
        (_, [value]) => Ok(vec![format!("--{long}={value}").into()]),
        _ => Err("one value is wanted, not a list".into()),
    }
}

/// Adds arguments at the end, or before a `--`, which ends the flags.
fn before_escape(mut args: Vec<OsString>, tokens: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let at = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    args.splice(at..at, tokens);
    args
}

/// Adds the sources of settings to an error of clap, which knows flags only. If no source is to blame, `alone` parses the command line
/// by itself, and ends the process with clap's message if it is wrong.
fn in_its_place(error: &clap::Error, given: &[Given], alone: impl FnOnce()) -> anyhow::Error {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    let named = |text: &str| -> Vec<&str> {
        let named = |setting: &&Given| text.contains(&format!("--{}", setting.id.replace('_', "-")));
        given.iter().filter(named).map(|setting| setting.place.as_str()).collect()
    };
    // The usage at the end of clap's text names all settings, so it is searched last.
    let mut places = named(text.split("\n\nUsage:").next().unwrap_or(text));
    if places.is_empty() {
        alone();
        places = named(text);
    }
    anyhow!("{text}\n\nset by {}", if places.is_empty() { "environment or file".into() } else { places.join(", ") })
}

/// The settings as a configuration file, each with its origin. Keys are not shown.
fn page(command: &clap::Command, name: &str, matches: &ArgMatches, given: &[Given]) -> String {
    let mut page = format!("# Settings of `plimsoll {name}`: flag > environment > file > default.\n");
    for arg in settings(command, name) {
        let id = arg.get_id().as_str();
        let origin = match given.iter().find(|setting| setting.id == id) {
            Some(setting) => setting.origin,
            None if matches.value_source(id) == Some(ValueSource::CommandLine) => Origin::Flag,
            None => Origin::Default,
        };
        let key = id.replace('_', "-");
        let raw = matches.get_raw(id).into_iter().flatten();
        let values: Vec<String> = raw.map(|value| value.to_string_lossy().into_owned()).collect();
        let shown = match (arg.get_action(), &values[..]) {
            _ if id == "api_key" && !values.is_empty() => format!("# {key} = ({} keys, not shown)", values.len()),
            (ArgAction::SetTrue, _) => format!("{key} = {}", matches.get_flag(id)),
            (ArgAction::Append, []) => format!("{key} = []"),
            (ArgAction::Append, values) => {
                format!("{key} = [{}]", values.iter().map(|v| text(v)).collect::<Vec<_>>().join(", "))
            }
            (_, []) => format!("# {key} is not set"),
            (_, [value, ..]) => format!("{key} = {}", literal(value)),
        };
        page += &format!("{shown:<56} # {}\n", origin.name());
    }
    page
}

fn text(value: &str) -> String {
    Value::String(value.into()).to_string()
}

/// A number as a number, everything else as a text.
fn literal(value: &str) -> String {
    let number = value.parse::<i64>().is_ok_and(|number| number.to_string() == value);
    if number || value.parse::<f64>().is_ok_and(|number| number.is_finite() && value.contains('.')) {
        return value.to_owned();
    }
    text(value)
}

#[cfg(test)]
mod tests;
