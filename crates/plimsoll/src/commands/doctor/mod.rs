//! `doctor`: looks at machine, limits, processor and model files before a server does, and says what to change.
//!
//! It asks the parts that serve: limits as start-up reads them, the planner's plan, the server's own socket, the hub's sums. It
//! fetches, changes and starts nothing. It must not have a second way of finding anything out.

mod machine;
mod model;

use plimsoll_engine::Host;
use plimsoll_hub::DEFAULT_MODEL;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::commands::checks::unrecordable;
use crate::models_file;
use crate::output::say;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    /// As it should be.
    Ok,
    /// It works, but a change could improve it.
    Note,
    /// The server will not start, or not keep what it promises.
    Problem,
}

impl Level {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Problem => "problem",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    level: Level,
    /// The name of the check.
    check: &'static str,
    /// The state that the check found, in words.
    found: String,
    /// The next step for the user; none if the level is [`Level::Ok`].
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// Everything that was looked at, in order.
#[derive(Debug, Default)]
struct Report {
    findings: Vec<Finding>,
    json: bool,
}

impl Report {
    fn ok(&mut self, check: &'static str, found: impl Into<String>) {
        self.add(Level::Ok, check, found.into(), None);
    }

    fn note(&mut self, check: &'static str, found: impl Into<String>, next: impl Into<String>) {
        self.add(Level::Note, check, found.into(), Some(next.into()));
    }

    fn problem(&mut self, check: &'static str, found: impl Into<String>, next: impl Into<String>) {
        self.add(Level::Problem, check, found.into(), Some(next.into()));
    }

    /// Adds a finding. Text is printed at once, because some checks take a while; JSON is printed at the end.
    fn add(&mut self, level: Level, check: &'static str, found: String, next: Option<String>) {
        if !self.json {
            say!("{:<8} {check:<13} {found}", level.name());
            if let Some(next) = &next {
                say!("{:<22} -> {next}", "");
            }
        }
        self.findings.push(Finding { level, check, found, next });
    }

    fn problems(&self) -> usize {
        self.findings.iter().filter(|finding| finding.level == Level::Problem).count()
    }
}

/// Runs all checks and returns the number of problems.
pub fn run(args: &DoctorArgs) -> anyhow::Result<usize> {
    let mut report = Report { json: args.json, ..Report::default() };
    examine(args, &mut report)?;
    let problems = report.problems();
    if args.json {
        let document = serde_json::json!({ "checks": report.findings, "problems": problems });
        say!("{}", serde_json::to_string_pretty(&document)?);
    }
    Ok(problems)
}

fn examine(args: &DoctorArgs, report: &mut Report) -> anyhow::Result<()> {
    let http = match args.http.config() {
        Ok(config) => config,
        Err(error) => {
            report.problem("settings", format!("{error:#}"), "correct that flag, variable or line of the file");
            return Ok(());
        }
    };
    machine::clock(report);
    machine::files(args, report);
    machine::threads(&http, report);
    machine::port(args, &http, report)?;
    machine::disk_cache(args, report);
    machine::packed_cache(args, report);
    if let Some(file) = &args.record
        && let Some(why) = unrecordable(file)
    {
        report.problem("record", format!("--record {}: {why}", file.display()), "another file");
    }
    let several = args.models.as_ref().map(|file| models_file::read(file, &args.inherited)).transpose();
    let several = several.unwrap_or_else(|error| {
        report.problem("models", format!("{error:#}"), "correct that line of the file");
        Some(Vec::new())
    });
    let names = match &several {
        Some(models) => models.iter().map(|(_, model)| model.model.as_str()).collect(),
        None => vec![args.model.as_deref().unwrap_or(DEFAULT_MODEL)],
    };
    let paths = model::files(&names, args, report);
    match Host::read(&args.engine.options_beside(&http)) {
        Ok(host) => {
            machine::processor(args, &host, report);
            machine::memory(&host, report);
            let others = machine::others(report);
            match several {
                Some(models) => model::plans(models, &paths, args, &http, &others, report)?,
                None => {
                    if let [Some(path)] = &paths[..] {
                        model::plan(path, args, &host, &others, report);
                    }
                }
            }
        }
        Err(error) => report.problem("memory", error.to_string(), "--memory-budget with a number of bytes"),
    }
    Ok(())
}
