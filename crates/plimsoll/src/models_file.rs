//! The file of `--models`: a table for each model, with its settings under the names of flags. An error names file, line and key.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{anyhow, bail};
use clap::error::{ContextKind, ContextValue};
use clap::{ArgAction, CommandFactory, Parser};
use plimsoll_engine::{Options, PlanError, check_options};
use plimsoll_server::ServerConfig;
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Table, Value};

use crate::args::ModelArgs;
use crate::flags;
use crate::settings::{line_at, read_file, texts, tokens};

/// Reads the name and the flags of each model. A model's own flags take precedence over `inherited`, which holds for all models.
///
/// # Errors
/// The file cannot be read, or a setting is wrong. The message names the file, the line and the key.
pub fn read(path: &Path, inherited: &[OsString]) -> anyhow::Result<Vec<(String, ModelArgs)>> {
    let file = path.display();
    let (text, mut table) = read_file(path)?;
    let places = Places::of(&text);
    let listed = table.remove("models");
    if let Some(key) = table.keys().next() {
        let line = places.line(|root| span(root, key));
        bail!(
            "{file}: line {line}: `{key}` is not known: there is one table [[models]] for each model, and nothing else"
        );
    }
    let Some(Value::Array(listed)) = listed else { bail!("{file}: the table [[models]] is missing") };
    let mut models: Vec<(String, ModelArgs)> = Vec::new();
    for (index, value) in listed.iter().enumerate() {
        let at = |key: Option<&str>| format!("{file}: line {}", places.line(|root| entry(root, index, key)));
        let Value::Table(table) = value else { bail!("{}: a table [[models]] is wanted", at(None)) };
        let (name, model) = read_model(table, inherited).map_err(|(key, why)| match key {
            Some(key) => anyhow!("{}: `{key}`: {why}", at(Some(&key))),
            None => anyhow!("{}: {why}", at(None)),
        })?;
        if name.is_empty() || models.iter().any(|(other, _)| *other == name) {
            bail!("{}: `name`: every model needs a name of its own, and `{name}` is none", at(Some("name")));
        }
        models.push((name, model));
    }
    Ok(models)
}

/// Settings of the disk cache, which all models share.
const SHARED: [&str; 4] = ["cache_dir", "cache_bytes", "cache_write_bytes_per_day", "cache_key_file"];

/// The options of one of several models, without a prefix cache on disk: the models share its bounds.
pub fn options_of(model: &ModelArgs) -> Options {
    let own = ServerConfig::default().model_bytes_max(model.grammar_bytes);
    Options { hosted: true, disk_cache: None, ..model.engine.options(own) }
}

/// An error: the key that caused it, if one did, and the message.
type Wrong = (Option<String>, String);

fn read_model(table: &Table, inherited: &[OsString]) -> Result<(String, ModelArgs), Wrong> {
    let command = ModelArgs::command();
    let mut all = inherited.to_vec();
    for key in ["name", "model"] {
        match table.get(key) {
            Some(Value::String(_)) => {}
            Some(_) => return Err((Some(key.into()), "a text is wanted".into())),
            None => return Err((None, format!("`{key}` is missing in this table [[models]]"))),
        }
    }
    for (key, value) in table.iter().filter(|(key, _)| *key != "name") {
        let wrong = |why: String| (Some(key.clone()), why);
        let id = flags::own_name(&key.replace('-', "_"));
        let Some(arg) = command.get_arguments().find(|arg| arg.get_id() == id.as_str()) else {
            return Err(wrong("a model has no such setting".into()));
        };
        if SHARED.contains(&id.as_str()) {
            return Err(wrong("all models share it: give it to `serve`, not to a model".into()));
        }
        let off = arg.get_long().map(|long| OsString::from(format!("--{long}")));
        let values = texts(value).map_err(|error| wrong(error.to_string()))?;
        let given = tokens(arg, &values).map_err(wrong)?;
        // Parsed alone, so that an error belongs to this key.
        let alone = std::iter::once("--model=x".into()).chain(given.iter().cloned());
        ModelArgs::try_parse_from(alone).map_err(|error| wrong(words(&error)))?;
        // A switch that is off here may be on for all.
        if matches!(arg.get_action(), ArgAction::SetTrue) && given.is_empty() {
            all.retain(|token| Some(token) != off.as_ref());
        }
        all.extend(given);
    }
    let args = ModelArgs::try_parse_from(all).map_err(|error| (None, words(&error)))?;
    check_options(&options_of(&args)).map_err(|error| match error {
        PlanError::Option { flag, problem } => {
            let own = table.keys().find(|key| key.replace('_', "-") == flag.trim_start_matches("--"));
            match own {
                Some(key) => (Some(key.clone()), problem),
                None => (None, format!("{flag}, which holds for this model, too, {problem}")),
            }
        }
        other => (None, other.to_string()),
    })?;
    Ok((table["name"].as_str().unwrap_or_default().to_owned(), args))
}

/// The message about a wrong value, without the name of a flag.
fn words(error: &clap::Error) -> String {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(all)) => Some(all.join(", ")),
        _ => None,
    };
    let value = context(ContextKind::InvalidValue).unwrap_or_default();
    let known = context(ContextKind::ValidValue).filter(|known| !known.is_empty());
    match (std::error::Error::source(error), known) {
        (Some(why), _) => format!("`{value}`: {why}"),
        (None, Some(known)) => format!("`{value}` is none of {known}"),
        (None, None) => format!("`{value}` is not a value of it ({})", error.kind()),
    }
}

/// Positions of keys in a file.
struct Places<'t> {
    text: &'t str,
    root: Option<Spanned<DeTable<'t>>>,
}

impl<'t> Places<'t> {
    fn of(text: &'t str) -> Self {
        Self { text, root: DeTable::parse(text).ok() }
    }

    /// The line of the byte that `find` returns, or line 1 if it returns none.
    fn line(&self, find: impl FnOnce(&DeTable<'t>) -> Option<usize>) -> usize {
        line_at(self.text, self.root.as_ref().and_then(|root| find(root.get_ref())).unwrap_or(0))
    }
}

/// The byte where a key begins.
fn span(table: &DeTable<'_>, key: &str) -> Option<usize> {
    table.iter().find(|(name, _)| name.get_ref() == key).map(|(name, _)| name.span().start)
}

/// The byte where a model's table begins, or a key in it.
fn entry(root: &DeTable<'_>, index: usize, key: Option<&str>) -> Option<usize> {
    let (_, models) = root.iter().find(|(name, _)| name.get_ref() == "models")?;
    let DeValue::Array(models) = models.get_ref() else { return None };
    let model = models.get(index)?;
    match (key, model.get_ref()) {
        (Some(key), DeValue::Table(table)) => span(table, key),
        _ => Some(model.span().start),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_said_by_line_and_key_and_never_by_flag() {
        let path = std::env::temp_dir().join(format!("plimsoll-models-{}.toml", std::process::id()));
        for (text, words) in [
            ("", "the table [[models]] is missing"),
            ("\nport = 1\n[[models]]", "line 2: `port` is not known"),
            ("models = [1]", "line 1: a table [[models]] is wanted"),
            ("# a\n[[models]]\nmodel = 'x'", "line 2: `name` is missing"),
            ("[[models]]\nname = 'x'", "line 1: `model` is missing"),
            ("[[models]]\nname = 'x'\nmodel = 1", "line 3: `model`: a text is wanted"),
            ("[[models]]\nname = ''\nmodel = 'x'", "line 2: `name`: every model needs a name of its own"),
            (
                "[[models]]\nname = 'x'\nmodel = 'x'\n[[models]]\nmodel = 'y'\nname = 'x'",
                "line 6: `name`: every model needs a name of its own, and `x` is none",
            ),
            ("[[models]]\nname = 'x'\nmodel = 'x'\nport = 1", "line 4: `port`: a model has no such setting"),
            (
                "[[models]]\nname = 'x'\n\nmodel = 'x'\nmax-waiting = 'y'",
                "line 5: `max-waiting`: `y`: invalid digit found in string",
            ),
            ("[[models]]\nname = 'x'\nmodel = 'x'\nidle-seconds = 0", "line 4: `idle-seconds`: `0`: 0 is not in 1.."),
            (
                "[[models]]\nname = 'x'\nmodel = 'x'\nelastic = 'so'",
                "line 4: `elastic`: `so` is neither true nor false",
            ),
            ("[[models]]\nname = 'x'\nmodel = 'x'\nkv_dtype = 'q9'", "line 4: `kv_dtype`: `q9`"),
            (
                "[[models]]\nname = 'x'\nmodel = 'x'\nkv_events = true",
                "line 4: `kv_events`: tells what the prefix cache holds, which a server of several models does not report",
            ),
            (
                "[[models]]\nname = 'x'\nmodel = 'x'\nmax-waiting = 2000000",
                "line 4: `max-waiting`: is 2000000; at most",
            ),
            (
                "[[models]]\nname = 'x'\nmodel = 'x'\ncache-bytes = '1GiB'",
                "line 4: `cache-bytes`: all models share it: give it to `serve`, not to a model",
            ),
            ("[[models]]\nname = 'x'\nmodel = 'x'\npooling = 'sum'", "line 4: `pooling`: `sum`"),
            ("[[models]]\nname = 'x'\nmodel = 'x'\nthreads = [1, 2]", "line 4: `threads`: one value is wanted"),
            ("[[models]]\nname = 'x'\nmodel = 'x'\nthreads = { a = 1 }", "line 4: `threads`: a text, a number"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", read(&path, &[]).unwrap_err());
            assert!(error.contains(&format!("{}: {words}", path.display())), "{error}");
            assert!(!error.contains("--") && !error.contains('\n') && !error.contains("USAGE"), "{error}");
        }
        // An error in a flag of all models names the flag. A table can override the flag.
        let all = ["--kv-events".into()];
        std::fs::write(&path, "# a\n[[models]]\nname = 'x'\nmodel = 'x'").unwrap();
        let error = format!("{:#}", read(&path, &all).unwrap_err());
        assert!(error.contains("line 2: --kv-events, which holds for this model, too, tells"), "{error}");
        std::fs::write(&path, "[[models]]\nname = 'x'\nmodel = 'x'\nkv-events = false").unwrap();
        assert_eq!(read(&path, &all).unwrap().len(), 1);
        std::fs::remove_file(path).unwrap();
    }
}
