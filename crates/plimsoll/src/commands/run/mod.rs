//! `run`, also called `chat`: a chat with a model in the terminal. It is a client of the HTTP API, either of a running server
//! or of a server that it starts in its own process.

mod answer;
mod attach;
mod command;
pub mod connect;
mod conversation;
mod history;
mod input;
mod screen;
mod session;
pub mod store;
mod wrap;

use std::io::{IsTerminal, Read, stdin};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use plimsoll_hub::{DEFAULT_MODEL, HubError};

use crate::args::RunArgs;
use crate::output::{say, tell};
use command::{Command, message};
use history::History;
use input::{Entry, Input};
use session::{Next, Session};
use store::Store;

/// Most bytes of a message on standard input.
const MESSAGE_BYTES_MAX: u64 = 16 << 20;

/// The exit code after Ctrl-C, which is the one that shells report.
const INTERRUPTED: u8 = 130;

/// Answers one message, or starts a chat.
pub fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let args = args.message_in_place();
    let word = args.model.clone().filter(|_| args.prompt.is_empty());
    let piped = !stdin().is_terminal();
    let prompt = args.prompt.join(" ");
    let (json, no_history) = (args.json, args.no_history);
    if json && !piped && prompt.is_empty() {
        bail!("--json prints the answer to one message: give it as PROMPT or on standard input");
    }
    let directory = store::directory();
    let session = Session::new(args, directory.as_ref().ok().map(|directory| Store::below(directory)));
    let mut session = session.map_err(|error| with_hint(error, word.as_deref()))?;
    if piped || !prompt.is_empty() {
        let message = if piped { with_input(prompt)? } else { prompt };
        return once(&mut session, &message, json);
    }
    let store = directory.as_ref().ok().map(|directory| Store::below(directory));
    let kept = (!no_history).then(|| directory.and_then(|directory| Ok(History::open(directory.join("history"))?)));
    let (history, entries) = match kept {
        None => (None, Vec::new()),
        Some(Ok((history, entries))) => (Some(history), entries),
        Some(Err(error)) => {
            tracing::warn!("the history is not kept: {error:#}");
            (None, Vec::new())
        }
    };
    chat(&mut session, Input::new(history, entries, store)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Adds a hint to the error of an unknown model without a prompt: the word may be meant as a message.
fn with_hint(error: anyhow::Error, word: Option<&str>) -> anyhow::Error {
    let is_unknown = matches!(error.downcast_ref::<HubError>(), Some(HubError::UnknownModel { .. }));
    match word.filter(|word| is_unknown && !word.contains(['/', '.', ':'])) {
        Some(word) => anyhow!(
            "{error:#}; to send '{word}' as a message, name the model first: plimsoll run {DEFAULT_MODEL} '{word}'"
        ),
        None => error,
    }
}

/// The prompt and what standard input adds to it.
fn with_input(prompt: String) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = stdin().take(MESSAGE_BYTES_MAX + 1).read_to_string(&mut text).context("reading standard input")?;
    if read as u64 > MESSAGE_BYTES_MAX {
        bail!("standard input has more than {MESSAGE_BYTES_MAX} bytes, the most that one message takes");
    }
    let text = text.trim();
    Ok(match (prompt.is_empty(), text.is_empty()) {
        (true, _) => text.to_owned(),
        (false, true) => prompt,
        (false, false) => format!("{prompt}\n\n{text}"),
    })
}

/// Answers one message. An empty one has no answer.
fn once(session: &mut Session, message: &str, json: bool) -> anyhow::Result<ExitCode> {
    if message.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let answer = if json { session.say_quietly(message)? } else { session.say(message)? };
    if json {
        say!("{}", answer.document(&session.link.model.name));
    }
    Ok(if answer.stopped { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// The chat, until the user leaves.
fn chat(session: &mut Session, mut input: Input) -> anyhow::Result<()> {
    say!("{}. /help lists the commands, Ctrl-D leaves.", session.place());
    loop {
        input.know_models(session.model_names());
        let entry = match input.read()? {
            Entry::Text(entry) => entry,
            Entry::Interrupt => {
                if input.leaves_next() {
                    say!("Ctrl-C again, or Ctrl-D, leaves");
                }
                continue;
            }
            Entry::Leave => return Ok(()),
        };
        let done = match Command::parse(&entry) {
            Some(Ok(command)) => session.command(command),
            Some(Err(error)) => Err(anyhow::Error::msg(error)),
            None => match message(&entry) {
                message if message.trim().is_empty() => Ok(Next::On),
                message => session.say(&message).map(|answer| {
                    if answer.stopped {
                        tell!("[stopped; /regen answers again]");
                    }
                    Next::On
                }),
            },
        };
        match done {
            Ok(Next::On) => {}
            Ok(Next::Leave) => return Ok(()),
            // An error does not end the chat.
            Err(error) => tell!("Error: {error:#}"),
        }
    }
}
