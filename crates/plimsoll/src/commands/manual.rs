//! `completions` and `man`: shell completions and manual pages, generated from the flags.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::Cli;
use crate::flags::arranged;
use crate::output::say_part;

/// The command line with its flags in the order of `--help`.
fn command() -> Command {
    let mut command = arranged(Cli::command());
    command.build();
    command
}

/// Prints the completion script of a shell.
pub fn completions(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "plimsoll", &mut script);
    print(script)
}

/// Writes a page for the program and for each command into a directory; without one prints the program's.
pub fn man(directory: Option<&Path>) -> anyhow::Result<()> {
    let command = command();
    let Some(directory) = directory else { return print(page(&command, "plimsoll")?) };
    fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
    let subs = command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help");
    let pages = subs.map(|sub| (format!("plimsoll-{}", sub.get_name()), sub));
    for (name, command) in [("plimsoll".to_owned(), &command)].into_iter().chain(pages) {
        let path = directory.join(format!("{name}.1"));
        let written = fs::File::create(&path).and_then(|mut file| file.write_all(&page(command, &name)?));
        written.with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn page(command: &Command, name: &str) -> std::io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let command = command.clone().display_name(name.to_owned()).version(env!("CARGO_PKG_VERSION"));
    Man::new(command).title(name).render(&mut page)?;
    Ok(page)
}

fn print(text: Vec<u8>) -> anyhow::Result<()> {
    say_part!("{}", String::from_utf8(text).context("the text is not UTF-8")?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_and_every_command_has_its_text() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::PowerShell] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "plimsoll", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["serve", "launch", "memory-budget", "max-model-len"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
        let command = command();
        let serve = command.find_subcommand("serve").unwrap();
        let page = String::from_utf8(page(serve, "plimsoll-serve").unwrap()).unwrap();
        assert!(page.contains(".TH plimsoll-serve 1") && page.contains("memory\\-budget"), "{page}");
    }
}
