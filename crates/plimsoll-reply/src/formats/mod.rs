//! The formats in which models write tool calls, behind one trait.

mod call;
mod gemma;
mod harmony;
mod llama;
mod marked;
mod mistral;
mod pythonic;
mod sections;
mod tagged;

pub(crate) use gemma::Gemma;
pub(crate) use harmony::Harmony;
pub(crate) use llama::Llama;
pub(crate) use marked::{GRANITE, HERMES, HUNYUAN, Marked, NEMOTRON, PHI4};
pub(crate) use mistral::Mistral;
pub(crate) use pythonic::{LFM2, OLMO3, Pythonic};
pub(crate) use sections::{DEEPSEEK, KIMI, Sections};
pub(crate) use tagged::{GLM, QWEN_XML, Tagged};

use crate::event::Outlet;
use crate::json::{Scanner, Step};
use crate::watch::Watch;

/// The longest name of a tool, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// A format: it takes text that is not reasoning, a character at a time, and writes content and calls.
pub(crate) trait Format: Send + std::fmt::Debug {
    /// Takes a character.
    fn step(&mut self, c: char, out: &mut Outlet);
    /// Ends the reply and emits held text.
    fn finish(&mut self, out: &mut Outlet);
    /// Whether the last text is the start of a call.
    fn in_call(&self) -> bool;
}

/// Without tools: all is content.
#[derive(Debug)]
pub(crate) struct Plain;

impl Format for Plain {
    fn step(&mut self, c: char, out: &mut Outlet) {
        out.content(c.encode_utf8(&mut [0; 4]));
    }

    fn finish(&mut self, _out: &mut Outlet) {}

    fn in_call(&self) -> bool {
        false
    }
}

/// Whether the text is a valid tool name.
fn is_name(text: &str) -> bool {
    let legal = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    !text.is_empty() && text.len() <= NAME_BYTES_MAX && text.chars().all(legal)
}

/// Takes a character of a call with invalid arguments, which pass unchanged. True if one of `closes` has ended the call.
fn broken_call_ends(watch: &mut Watch, c: char, closes: &[&str], out: &mut Outlet) -> bool {
    let mut text = String::new();
    let marker = watch.step(c, &mut text);
    out.arguments(&text);
    match marker {
        Some(marker) if closes.contains(&marker) => {
            out.skip();
            out.end();
            true
        }
        Some(marker) => {
            out.arguments(marker);
            false
        }
        None => false,
    }
}

/// Arguments that stand in the text as JSON: they go out as they come.
#[derive(Debug)]
struct JsonArguments(Scanner);

impl JsonArguments {
    /// Takes their first character, which must open an object.
    fn open(c: char, out: &mut Outlet) -> Option<Self> {
        if c != '{' {
            return None;
        }
        let mut arguments = Self(Scanner::new());
        arguments.step(c, out);
        Some(arguments)
    }

    /// Takes a character; what is not JSON is not written.
    fn step(&mut self, c: char, out: &mut Outlet) -> Step {
        let step = self.0.step(c);
        if step != Step::Bad {
            out.argument(c);
        }
        step
    }
}
