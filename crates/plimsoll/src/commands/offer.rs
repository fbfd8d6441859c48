//! The model that is offered where a command names none: the largest that fits this machine and answers fast enough. It is
//! offered at a terminal only, and only if the hub answers; without both, the default model runs.

use std::io::{IsTerminal, stderr, stdin};
use std::process::{Command, Stdio};
use std::time::Duration;

use plimsoll_hub::DEFAULT_MODEL;
use plimsoll_memory::Bytes;
use serde::Deserialize;

use super::fits::parameters;
use crate::output::tell;

/// Bytes of weights that a token of an offered model may read. At 40 GB/s, which two channels of DDR4 reach, that is ten
/// tokens a second.
const READ_BYTES_MAX: u64 = 4 << 30;
/// The hub must answer within this time.
const HUB_WITHIN: Duration = Duration::from_secs(1);
/// Most bytes of the user's answer to the question that are read.
const ANSWER_BYTES_MAX: u64 = 256;

/// A row of `plimsoll models --fits --json`.
#[derive(Debug, Deserialize)]
struct Fitting {
    name: String,
    kind: String,
    licence: String,
    repository: Option<String>,
    #[serde(rename = "parameters_millions")]
    millions: u32,
    needed_bytes: u64,
    read_bytes_per_token: u64,
}

/// The document that `plimsoll models --fits --json` prints.
#[derive(Debug, Deserialize)]
struct FittingModels {
    models: Vec<Fitting>,
}

impl Fitting {
    fn writes_text(&self) -> bool {
        matches!(self.kind.as_str(), "text" | "vision")
    }

    /// The model's name, parameters, memory and licence, for messages.
    fn words(&self) -> String {
        let size = parameters(self.millions);
        format!("{} ({size} parameters, {} of memory, {})", self.name, Bytes(self.needed_bytes), self.licence)
    }
}

/// Prints a hint about the larger model that this machine can serve, if there is one.
pub fn hint() {
    if let Some(model) = offered() {
        tell!("no model was named: {DEFAULT_MODEL} it is; this machine can also serve {}:", model.words());
        tell!("plimsoll serve {}; plimsoll models --fits lists all that fit", model.name);
    }
}

/// Asks whether the offered model is to run instead of the default one, and returns the name of the model to run.
pub fn ask() -> String {
    let default = || DEFAULT_MODEL.to_owned();
    let Some(model) = offered() else { return default() };
    tell!("no model was named. {DEFAULT_MODEL} is small; this machine can also run {}.", model.words());
    tell!("Fetch {} from the hub, unless it is cached, and run it? [y/N]", model.name);
    match agrees() {
        true => model.name,
        false => default(),
    }
}

/// Reads a line from the terminal. Everything but a yes is a no.
fn agrees() -> bool {
    use std::io::{BufRead, Read};
    let mut answer = String::new();
    let read = stdin().lock().take(ANSWER_BYTES_MAX).read_line(&mut answer);
    read.is_ok() && is_yes(&answer)
}

fn is_yes(answer: &str) -> bool {
    ["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str())
}

/// The model to offer. None without a terminal, or if the hub does not answer.
fn offered() -> Option<Fitting> {
    if !stdin().is_terminal() || !stderr().is_terminal() {
        return None;
    }
    let model = best(fitting()?)?;
    let is_there = model.repository.as_ref().is_some_and(|repo| plimsoll_hub::has_repo(repo, HUB_WITHIN));
    is_there.then_some(model)
}

/// The models that fit. A child process plans them, so that their plans take no memory of this process.
fn fitting() -> Option<Vec<Fitting>> {
    let mut command = Command::new(std::env::current_exe().ok()?);
    command.args(["models", "--fits", "--json"]).stdin(Stdio::null()).stderr(Stdio::null());
    let output = command.output().ok()?;
    let read: FittingModels = serde_json::from_slice(&output.stdout).ok()?;
    Some(read.models)
}

/// The largest model that writes text and reads at most [`READ_BYTES_MAX`] per token; none if it is no larger than the default model.
fn best(models: Vec<Fitting>) -> Option<Fitting> {
    let default = models.iter().find(|model| model.name == DEFAULT_MODEL).map_or(0, |model| model.millions);
    let fast = |model: &Fitting| model.writes_text() && model.read_bytes_per_token <= READ_BYTES_MAX;
    models.into_iter().filter(fast).max_by_key(|model| model.millions).filter(|model| model.millions > default)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::ModelsArgs;

    fn model(name: &str, kind: &str, millions: u32, read_gib: u64) -> Fitting {
        Fitting {
            name: name.into(),
            kind: kind.into(),
            licence: "MIT".into(),
            repository: Some("org/repo".into()),
            millions,
            needed_bytes: 1 << 30,
            read_bytes_per_token: read_gib << 30,
        }
    }

    #[test]
    fn the_largest_model_that_is_fast_and_writes_text_is_offered() {
        let all = || {
            vec![
                model(DEFAULT_MODEL, "text", 135, 0),
                model("slow", "text", 32_000, 16),
                model("sparse", "text", 30_000, 2),
                model("seeing", "vision", 8_000, 4),
                model("encoder", "embeddings", 40_000, 1),
            ]
        };
        assert_eq!(best(all()).unwrap().name, "sparse");
        let without = |name: &str| all().into_iter().filter(|model| model.name != name).collect();
        assert_eq!(best(without("sparse")).unwrap().name, "seeing");
        assert!(best(vec![model(DEFAULT_MODEL, "text", 135, 0)]).is_none(), "the default alone is no offer");
        assert!(best(Vec::new()).is_none());
    }

    #[test]
    fn only_a_yes_agrees() {
        assert!(["y\n", "Y", " yes \r\n"].iter().all(|answer| is_yes(answer)));
        assert!(["", "\n", "n", "yeah", "hello"].iter().all(|answer| !is_yes(answer)));
    }

    #[test]
    fn rows_of_models_that_fit_are_read() {
        let args = ModelsArgs { fits: true, users: 1, context: 4096, memory_budget: None, json: true };
        let (fitting, limit, _) = super::super::fits::planned(&args).expect("it is planned");
        let document = super::super::fits::document(&fitting, &args, limit);
        let read: FittingModels = serde_json::from_value(document).expect("it has the fields of a row");
        assert!(read.models.iter().any(|model| model.name == DEFAULT_MODEL));
    }
}
