//! The program: commands and their flags. The crates below do the work.
//!
//! It is a library of one function, so that its parsers of foreign text can be fuzzed (`fuzzed`).

#![forbid(unsafe_code)]

mod args;
mod commands;
mod flags;
#[doc(hidden)]
pub mod fuzzed;
mod log;
mod models_file;
mod names;
mod output;
mod panics;
mod private_file;
mod progress;
mod runtime;
mod settings;

use std::collections::BTreeMap;
use std::process::ExitCode;

use plimsoll_bench::{bench, client_runtime, soak};
use plimsoll_server::sandbox::SANDBOX_ARGUMENT;

/// Runs the command that the process was started with.
pub fn main() -> ExitCode {
    plimsoll_memory::malloc::keep_little();
    plimsoll_memory::signals::outlive_file_limits();
    if std::env::args_os().nth(1).is_some_and(|argument| argument == SANDBOX_ARGUMENT) {
        return plimsoll_server::sandbox::serve();
    }
    if std::env::args_os().nth(1).is_some_and(|argument| argument == plimsoll_server::document::SANDBOX_ARGUMENT) {
        return plimsoll_server::document::serve(std::env::args().nth(2).as_deref());
    }
    panics::tell_without_content();
    let read = variables().and_then(|variables| settings::read(std::env::args_os().collect(), &variables));
    let done = read.and_then(|(cli, page)| {
        // In a chat, log lines of normal operation would only disturb.
        let level = if matches!(cli.command, args::Command::Run(_)) { "warn" } else { "info" };
        init_logs(if cli.verbose { "debug" } else { level }, cli.log_format);
        run(cli.command, &page)
    });
    match done {
        Ok(code) => code,
        Err(error) => {
            // Only the message is logged: a backtrace does not help a user.
            log::last_words(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Reads the environment. A variable that is not UTF-8 is skipped. It is an error if its name begins with PLIMSOLL_, because
/// without its key the server would be open.
fn variables() -> anyhow::Result<BTreeMap<String, String>> {
    let mut variables = BTreeMap::new();
    for (name, value) in std::env::vars_os() {
        let ours = name.to_string_lossy().starts_with("PLIMSOLL_");
        match (name.into_string(), value.into_string()) {
            (Ok(name), Ok(value)) => drop(variables.insert(name, value)),
            (Ok(name), Err(_)) if ours => anyhow::bail!("the value of the variable {name} is not UTF-8"),
            (Err(name), _) if ours => anyhow::bail!("the name of the variable {} is not UTF-8", name.display()),
            _ => {}
        }
    }
    Ok(variables)
}

/// Runs a command. `settings` is the text that `--print-config` prints.
fn run(command: args::Command, settings: &str) -> anyhow::Result<ExitCode> {
    let done = match command {
        args::Command::Plan(plan) => return commands::plan::run(plan),
        args::Command::Serve(serve) if serve.print_config => {
            output::say_part!("{settings}");
            Ok(())
        }
        args::Command::Serve(serve) => {
            plimsoll_memory::malloc::nothing_by_thread();
            commands::serve::run(serve)
        }
        args::Command::Top(top) => commands::top::run(&top),
        args::Command::Run(run) => {
            plimsoll_memory::malloc::nothing_by_thread();
            return commands::run::run(*run);
        }
        args::Command::Doctor(doctor) => match commands::doctor::run(&doctor)? {
            0 => Ok(()),
            1 => anyhow::bail!("the doctor found a problem"),
            problems => anyhow::bail!("the doctor found {problems} problems"),
        },
        args::Command::Pull { model } => commands::models::pull(&model),
        args::Command::Models(models) if models.fits => commands::fits::list(&models),
        args::Command::Models(_) => commands::models::list(),
        args::Command::Rm { model } => commands::models::remove(&model),
        args::Command::Launch(launch) => commands::launch::run(&launch),
        args::Command::Completions { shell } => commands::manual::completions(shell),
        args::Command::Man { directory } => commands::manual::man(directory.as_deref()),
        args::Command::Cache(command) => commands::cache::run(&command),
        args::Command::Bench(bench) => client_runtime()?.block_on(bench::run(&bench, output::print)),
        args::Command::Soak(soak) => match client_runtime()?.block_on(soak::run(&soak))? {
            true => Ok(()),
            false => anyhow::bail!("the soak failed"),
        },
        args::Command::Replay(replay) => commands::replay::run(&replay),
        args::Command::Balloon(balloon) => soak::balloon::run(&balloon, output::print),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// Logs go to standard error; `RUST_LOG` decides if it is set.
fn init_logs(level: &str, format: args::LogFormat) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| log::Log).with_target(false);
    let logs = logs.log_internal_errors(false);
    match format {
        args::LogFormat::Text => logs.with_ansi(terminal).init(),
        args::LogFormat::Json => {
            log::speak_json();
            logs.json().flatten_event(true).with_current_span(false).with_span_list(false).init();
        }
    }
}
