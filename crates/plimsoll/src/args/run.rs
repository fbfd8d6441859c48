//! Flags of `run`.

use std::path::{Path, PathBuf};

use clap::Args;
use plimsoll_bench::KeyArgs;

use super::engine::EngineArgs;

/// Flags of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Catalogue name, hf:org/repo(:file), a .gguf file, or a checkpoint directory; a model of the server that is connected to
    /// [default: the server's first model, or smollm2].
    pub model: Option<String>,
    /// Message to answer; without one the chat is interactive, or standard input is the message. A quoted message of several
    /// words may stand without a model.
    pub prompt: Vec<String>,
    /// Server to connect to, such as http://127.0.0.1:8000 [default: the server on this machine, if it has the model; otherwise an
    /// engine of this process].
    #[arg(long)]
    pub url: Option<String>,
    /// System prompt.
    #[arg(long)]
    pub system: Option<String>,
    /// Sampling temperature; 0 takes the most likely token [default: the server's].
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Most tokens per answer [default: the rest of the context].
    #[arg(long)]
    pub max_tokens: Option<u32>,
    /// Image for the first message, repeatable.
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
    /// Text file for the first message, repeatable.
    #[arg(long, value_name = "FILE")]
    pub file: Vec<PathBuf>,
    /// Print the answer to one message as a JSON object: content, reasoning, usage, timings.
    #[arg(long)]
    pub json: bool,
    /// Print tokens per second under each answer.
    #[arg(long)]
    pub stats: bool,
    /// Neither read nor keep the history of entries.
    #[arg(long)]
    pub no_history: bool,
    /// The server's key.
    #[command(flatten)]
    pub keys: KeyArgs,
    /// The engine of this process.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// An engine flag on the command line. If there is one, the command looks for no server and starts its own engine.
    #[arg(skip)]
    pub engine_flag: Option<String>,
}

impl RunArgs {
    /// Moves a message that is given in place of the model into the prompt.
    pub fn message_in_place(mut self) -> Self {
        if let Some(message) = self.model.take_if(|first| is_message(first)) {
            self.prompt.insert(0, message);
        }
        self
    }
}

/// Whether the first argument is a message: it has several words, and is neither a file nor a path. Names of models have no
/// whitespace.
fn is_message(first: &str) -> bool {
    let is_path = first.starts_with(['/', '.', '~']) || first.starts_with("hf:") || first.ends_with(".gguf");
    first.trim().contains(char::is_whitespace) && !is_path && !Path::new(first).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_words_are_a_message_and_not_a_model() {
        for message in ["What is 12 + 30?", "say hi", "read/write\tor both?", "What is a .gguf file?"] {
            assert!(is_message(message), "{message}");
        }
        for model in
            ["smollm2", "hi", "hf:a/b:c d.gguf", "/models/my model", "./my model", "my model.gguf", " smollm2 ", ""]
        {
            assert!(!is_message(model), "{model}");
        }
    }
}
