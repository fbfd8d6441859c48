//! A chat: its conversation, its server, and its commands.

use std::path::Path;

use anyhow::bail;
use plimsoll_bench::client_runtime;
use plimsoll_memory::Bytes;
use serde_json::Value;
use tokio::runtime::Runtime;

use super::answer::{Answer, Stats, stream};
use super::attach;
use super::command::{COMMANDS, Command};
use super::connect::Link;
use super::conversation::{Conversation, setting_names};
use super::screen::Screen;
use super::store::Store;
use crate::args::RunArgs;
use crate::output::{say, tell};

/// A chat with one model.
pub struct Session {
    /// The connection to the server.
    pub link: Link,
    args: RunArgs,
    runtime: Runtime,
    conversation: Conversation,
    /// Attachments of the next message.
    parts: Vec<Value>,
    /// A message without an answer, which `/regen` sends again.
    unanswered: Option<Value>,
    stats: bool,
    last: Option<Stats>,
    store: Option<Store>,
}

/// Whether the chat continues after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It continues.
    On,
    /// The user leaves.
    Leave,
}

impl Session {
    /// Starts a chat with these flags.
    ///
    /// # Errors
    /// A flag's value or file cannot be used, or there is no server.
    pub fn new(args: RunArgs, store: Option<Store>) -> anyhow::Result<Self> {
        let mut conversation = Conversation { system: args.system.clone(), ..Conversation::default() };
        if let Some(temperature) = args.temperature {
            conversation.set("temperature", Some(&temperature.to_string()))?;
        }
        if let Some(tokens) = args.max_tokens {
            conversation.set("max_tokens", Some(&tokens.to_string()))?;
        }
        let files = args.file.iter().map(|file| attach::text(file));
        let parts =
            files.chain(args.image.iter().map(|image| attach::image(image))).collect::<anyhow::Result<Vec<_>>>()?;
        let link = Link::open(&args)?;
        let (runtime, stats) = (client_runtime()?, args.stats);
        let session = Self { link, args, runtime, conversation, parts, unanswered: None, stats, last: None, store };
        if !session.args.image.is_empty() {
            session.takes_images()?;
        }
        session
            .parts
            .iter()
            .zip(session.args.file.iter().chain(&session.args.image))
            .try_for_each(|(part, path)| session.fits(part, path))?;
        Ok(session)
    }

    /// Sends a message and shows the answer.
    ///
    /// # Errors
    /// The server refuses the message, or the answer fails. The message is then removed, and `/regen` sends it again.
    pub fn say(&mut self, text: &str) -> anyhow::Result<Answer> {
        let parts = std::mem::take(&mut self.parts);
        self.conversation.ask(text, parts);
        self.answer()
    }

    /// As [`Self::say`], without showing anything: for `--json`.
    ///
    /// # Errors
    /// The server refuses it, or the answer fails.
    pub fn say_quietly(&mut self, text: &str) -> anyhow::Result<Answer> {
        let parts = std::mem::take(&mut self.parts);
        self.conversation.ask(text, parts);
        let request = self.conversation.request(&self.link.model.name, self.link.body_bytes_max)?;
        self.runtime.block_on(stream(&self.link.target, &request, |_| {}))
    }

    /// Answers the last message.
    fn answer(&mut self) -> anyhow::Result<Answer> {
        let mut screen = Screen::new();
        let asked = self.conversation.request(&self.link.model.name, self.link.body_bytes_max);
        let show = |piece: super::answer::Piece<'_>| screen.show(piece);
        let answer = asked.and_then(|request| self.runtime.block_on(stream(&self.link.target, &request, show)));
        screen.end();
        drop(screen);
        match &answer {
            Ok(answer) if !answer.content.is_empty() || !answer.stopped => {
                self.unanswered = None;
                self.conversation.answered(&answer.content);
                self.last = Some(answer.stats);
                if self.stats {
                    tell!("{}", answer.stats.line());
                }
            }
            // Templates need an answer between two messages, so an unanswered one is removed.
            _ => self.unanswered = self.conversation.messages.pop(),
        }
        answer
    }

    /// Runs a command.
    ///
    /// # Errors
    /// The command fails; the chat continues.
    pub fn command(&mut self, command: Command) -> anyhow::Result<Next> {
        match command {
            Command::Bye => return Ok(Next::Leave),
            Command::Help => help(),
            Command::Clear => {
                self.conversation.messages.clear();
                self.parts.clear();
                self.unanswered = None;
            }
            Command::System(text) => self.conversation.system = text,
            Command::Set(None) => self.settings(),
            Command::Set(Some((name, value))) => self.conversation.set(&name, value.as_deref())?,
            Command::Show => self.show(),
            Command::Stats => self.toggle_stats(),
            Command::Image(path) => {
                self.takes_images()?;
                self.attach(attach::image(&path)?, &path)?;
            }
            Command::File(path) => self.attach(attach::text(&path)?, &path)?,
            Command::Save(name) => say!("kept in {}", self.store()?.save(&name, &self.conversation)?.display()),
            Command::Load(None) => self.store()?.names().iter().for_each(|name| say!("{name}")),
            Command::Load(Some(name)) => {
                self.conversation = self.store()?.load(&name)?;
                self.unanswered = None;
                say!("{} messages", self.conversation.messages.len());
            }
            Command::Regen => return self.again(),
            Command::Model(None) => {
                let current = &self.link.model.name;
                let mark = |name: &str| if name == current { " (in use)" } else { "" };
                self.link.models.iter().for_each(|model| say!("{}{}", model.name, mark(&model.name)));
            }
            Command::Model(Some(name)) => {
                self.link.change(&name, &self.args.engine)?;
                say!("{}", self.place());
            }
        }
        Ok(Next::On)
    }

    fn again(&mut self) -> anyhow::Result<Next> {
        match self.unanswered.take() {
            Some(message) => self.conversation.messages.push(message),
            None if self.conversation.take_back() => {}
            None => bail!("there is no message to answer again: type one"),
        }
        self.answer().map(|_| Next::On)
    }

    fn attach(&mut self, part: Value, path: &Path) -> anyhow::Result<()> {
        self.fits(&part, path)?;
        self.parts.push(part);
        say!("{} goes with the next message", path.display());
        Ok(())
    }

    /// Returns an error for a file that is larger than a request to this server may be.
    fn fits(&self, part: &Value, path: &Path) -> anyhow::Result<()> {
        let (bytes, most) = (part.to_string().len() as u64, self.link.body_bytes_max);
        if bytes > most {
            let path = path.display();
            bail!("{path} takes {} in a request, at most {} are sent: make it smaller", Bytes(bytes), Bytes(most));
        }
        Ok(())
    }

    fn takes_images(&self) -> anyhow::Result<()> {
        let inputs = self.link.model.inputs.as_deref();
        match inputs.is_none_or(|inputs| inputs.iter().any(|input| input == "image")) {
            true => Ok(()),
            false => {
                bail!("{} takes no images: choose a vision model (docs/models-and-formats.md)", self.link.model.name)
            }
        }
    }

    fn toggle_stats(&mut self) {
        self.stats = !self.stats;
        match (self.stats, &self.last) {
            (true, Some(last)) => say!("{}", last.line()),
            (true, None) => say!("each answer is followed by its tokens per second"),
            (false, _) => say!("no tokens per second any more"),
        }
    }

    fn store(&self) -> anyhow::Result<&Store> {
        match &self.store {
            Some(store) => Ok(store),
            None => bail!("there is no directory for conversations: set HOME or XDG_DATA_HOME"),
        }
    }

    fn settings(&self) {
        for name in setting_names() {
            let value = self.conversation.settings.get(name).map_or_else(|| "default".into(), ToString::to_string);
            say!("{name:<24} {value}");
        }
    }

    fn show(&self) {
        say!("{}", self.place());
        if let Some(system) = &self.conversation.system {
            say!("system prompt: {system}");
        }
        for (name, value) in &self.conversation.settings {
            say!("{name}: {value}");
        }
        let tokens = self.last.and_then(|last| Some(last.prompt_tokens? + last.output_tokens?));
        let tokens = tokens.map_or_else(String::new, |tokens| format!(", {tokens} tokens at the last answer"));
        say!("{} messages{tokens}", self.conversation.messages.len());
    }

    /// The model and where it runs.
    pub fn place(&self) -> String {
        let at = self.link.url.as_ref().map_or_else(|| "in this process".into(), |url| format!("at {url}"));
        let context =
            self.link.model.context.map_or_else(String::new, |tokens| format!(", {tokens} tokens of context"));
        format!("{} {at}{context}", self.link.model.name)
    }

    /// Names for the completion of `/model`.
    pub fn model_names(&self) -> Vec<String> {
        self.link.models.iter().map(|model| model.name.clone()).collect()
    }
}

fn help() {
    let width = COMMANDS.iter().map(|(usage, _)| usage.len()).max().unwrap_or(0);
    for (usage, what) in COMMANDS {
        say!("{usage:<width$}  {what}");
    }
}
