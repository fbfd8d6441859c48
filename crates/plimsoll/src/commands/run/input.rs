//! The line editor: history, several lines, completion of commands, names and paths.

use std::cell::Cell;

use anyhow::Context as _;
use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::MemHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Behavior, CompletionType, Config, Context, Editor, Helper};

use super::command::{COMMANDS, goes_on};
use super::conversation::setting_names;
use super::history::{ENTRIES_MAX, History};
use super::store::Store;

/// The prompt of the line editor.
const PROMPT: &str = "> ";

/// An action of the user at the prompt.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    /// Entered this text.
    Text(String),
    /// Pressed Ctrl-C: the entry is discarded.
    Interrupt,
    /// Left: Ctrl-D, or Ctrl-C twice at an empty prompt.
    Leave,
}

/// The editor and its history.
pub struct Input {
    editor: Editor<Assistant, MemHistory>,
    history: Option<History>,
    /// Whether the last entry was Ctrl-C at an empty prompt.
    warned: bool,
}

impl Input {
    /// Opens an editor for this terminal. Entries are added to `history`, if there is one, for the next session.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub fn new(history: Option<History>, entries: Vec<String>, store: Option<Store>) -> anyhow::Result<Self> {
        let config = Config::builder()
            .max_history_size(ENTRIES_MAX)
            .and_then(|builder| builder.history_ignore_dups(true))
            .context("setting up the line editor")?
            .completion_type(CompletionType::List)
            .behavior(Behavior::Stdio)
            .build();
        let past = MemHistory::with_config(&config);
        let mut editor = Editor::with_history(config, past).context("setting up the line editor")?;
        for entry in entries {
            editor.add_history_entry(entry).context("the history of earlier sessions")?;
        }
        editor.set_helper(Some(Assistant {
            empty: Cell::new(true),
            models: Vec::new(),
            store,
            paths: FilenameCompleter::new(),
        }));
        Ok(Self { editor, history, warned: false })
    }

    /// Sets the model names for the completion.
    pub fn know_models(&mut self, models: Vec<String>) {
        if let Some(assistant) = self.editor.helper_mut() {
            assistant.models = models;
        }
    }

    /// Reads one entry.
    ///
    /// # Errors
    /// The terminal has failed.
    pub fn read(&mut self) -> anyhow::Result<Entry> {
        self.editor.helper().into_iter().for_each(|assistant| assistant.empty.set(true));
        let warned = std::mem::take(&mut self.warned);
        match self.editor.readline(PROMPT) {
            Ok(text) => {
                self.remember(&text);
                Ok(Entry::Text(text))
            }
            Err(ReadlineError::Interrupted) => {
                let empty = self.editor.helper().is_none_or(|assistant| assistant.empty.get());
                self.warned = empty;
                Ok(if empty && warned { Entry::Leave } else { Entry::Interrupt })
            }
            Err(ReadlineError::Eof) => Ok(Entry::Leave),
            Err(error) => Err(error).context("reading from the terminal"),
        }
    }

    /// Whether the next Ctrl-C leaves.
    pub fn leaves_next(&self) -> bool {
        self.warned
    }

    fn remember(&mut self, text: &str) {
        if text.trim().is_empty() {
            return;
        }
        let added = self.editor.add_history_entry(text).unwrap_or(false);
        if let Some(Err(error)) = self.history.as_mut().filter(|_| added).map(|history| history.add(text)) {
            tracing::warn!("the history is not kept: {error}");
            self.history = None;
        }
    }
}

/// Completion and validation while an entry is edited.
struct Assistant {
    /// Whether the entry was empty when it was last drawn.
    empty: Cell<bool>,
    models: Vec<String>,
    store: Option<Store>,
    paths: FilenameCompleter,
}

impl Helper for Assistant {}
impl Highlighter for Assistant {}

impl Hinter for Assistant {
    type Hint = String;

    /// There are no hints. The editor calls this at every change, and an interrupted entry's text is not reported otherwise.
    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.empty.set(line.is_empty());
        None
    }
}

impl Validator for Assistant {
    fn validate(&self, entry: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(if goes_on(entry.input()) { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for Assistant {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, context: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let head = &line[..at];
        let Some((word, rest)) = head.split_once(' ') else {
            let all = COMMANDS.iter().filter(|(usage, _)| usage.starts_with('/'));
            let words = all.map(|(usage, _)| usage.split(' ').next().unwrap_or(usage).to_owned());
            return Ok((0, if head.starts_with('/') { pairs(words, head) } else { Vec::new() }));
        };
        let names: Vec<String> = match word {
            "/image" | "/file" => return self.paths.complete(line, at, context),
            "/set" => setting_names().map(str::to_owned).collect(),
            "/model" => self.models.clone(),
            "/save" | "/load" => self.store.as_ref().map(Store::names).unwrap_or_default(),
            _ => Vec::new(),
        };
        Ok((at - rest.len(), pairs(names, rest)))
    }
}

/// Completions: the words that begin with `head`.
fn pairs(words: impl IntoIterator<Item = String>, head: &str) -> Vec<Pair> {
    let begins = words.into_iter().filter(|word| word.starts_with(head));
    begins.map(|word| Pair { display: word.clone(), replacement: word }).collect()
}

#[cfg(test)]
mod tests {
    use rustyline::history::DefaultHistory;

    use super::*;

    #[test]
    fn commands_settings_and_models_are_completed() {
        let models = vec!["smollm2".into(), "smol-vision".into()];
        let assistant = Assistant { empty: Cell::new(true), models, store: None, paths: FilenameCompleter::new() };
        let history = DefaultHistory::new();
        let complete = |line: &str| {
            let (start, found) = assistant.complete(line, line.len(), &Context::new(&history)).unwrap();
            (start, found.into_iter().map(|pair| pair.replacement).collect::<Vec<_>>())
        };
        assert_eq!(complete("/sy"), (0, vec!["/system".to_owned()]));
        assert_eq!(complete("/s").1, ["/system", "/set", "/show", "/stats", "/save"]);
        assert_eq!(complete("/set top"), (5, vec!["top_p".to_owned(), "top_k".to_owned()]));
        assert_eq!(complete("/model smol").1.len(), 2);
        assert!(complete("hello /s").1.is_empty() && complete("hello").1.is_empty());
    }
}
