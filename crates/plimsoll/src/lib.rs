//! The program: commands, their flags, and nothing else. Everything they do lives in the crates below.
//!
//! It is a library of one function, so that what it reads of foreign text can be fuzzed (`fuzzed`).

#![forbid(unsafe_code)]

mod access_args;
mod args;
mod bench;
mod commands;
#[doc(hidden)]
pub mod fuzzed;
mod media_args;
mod models_file;
mod output;
mod panics;
mod progress;
mod replay;
mod settings;
mod soak;

use std::process::ExitCode;

/// Runs the command that the process was started with.
pub fn main() -> ExitCode {
    plimsoll_memory::malloc::keep_little();
    panics::tell_without_content();
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let done = settings::read(std::env::args_os().collect(), &variables.collect()).and_then(|(cli, page)| {
        init_logs(cli.verbose, cli.log_format);
        run(cli.command, &page)
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // In words only: a backtrace of a refusal helps nobody.
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `settings`: what `--print-config` prints.
fn run(command: args::Command, settings: &str) -> anyhow::Result<()> {
    match command {
        args::Command::Serve(serve) if serve.print_config => {
            output::say_part!("{settings}");
            Ok(())
        }
        args::Command::Serve(serve) => {
            plimsoll_memory::malloc::nothing_by_thread();
            commands::serve::run(serve)
        }
        args::Command::Chat(chat) => commands::chat::run(chat),
        args::Command::Plan(plan) => commands::plan::run(plan),
        args::Command::Doctor(doctor) => match commands::doctor::run(&doctor)? {
            0 => Ok(()),
            1 => anyhow::bail!("the doctor found a problem"),
            problems => anyhow::bail!("the doctor found {problems} problems"),
        },
        args::Command::Pull { model } => commands::models::pull(&model),
        args::Command::Models => commands::models::list(),
        args::Command::Rm { model } => commands::models::remove(&model),
        args::Command::Bench(bench) => client_runtime()?.block_on(bench::run(&bench)),
        args::Command::Soak(soak) => match client_runtime()?.block_on(soak::run(&soak))? {
            true => Ok(()),
            false => anyhow::bail!("the soak failed"),
        },
        args::Command::Replay(replay) => replay::run(&replay),
        args::Command::Balloon(balloon) => soak::balloon::run(&balloon),
    }
}

/// The runtime of the commands that load a server: one thread, to leave the cores to the server.
fn client_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Logs go to standard error; `RUST_LOG` decides if it is set. A line that cannot be written (a full disk) is lost: to say so would
/// be a write to the same place, which panics when it fails, in whatever thread has logged.
fn init_logs(verbose: bool, format: args::LogFormat) {
    use tracing_subscriber::EnvFilter;
    let level = if verbose { "debug" } else { "info" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    let logs = logs.log_internal_errors(false);
    match format {
        args::LogFormat::Text => logs.with_ansi(terminal).init(),
        args::LogFormat::Json => logs.json().flatten_event(true).with_current_span(false).with_span_list(false).init(),
    }
}
