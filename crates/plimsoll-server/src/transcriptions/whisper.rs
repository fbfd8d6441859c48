//! Whisper's prompts: tokens after the audio, and the tokens that may follow.
//!
//! Reference: transformers, `generation_whisper.py`. The prompt names language and task. Without a language the model writes these tokens
//! itself, each from the set allowed at its position. Then it writes text without times. If times are requested or the clip is longer than
//! a window, it writes texts between times.

use std::sync::Arc;

use plimsoll_engine::constraint::{Constraint, Grammar, Unfit};
use plimsoll_engine::{Transcript, Whisper};

use super::masks::{mask, text_mask, without};
use super::tagged::{Heading, PLAIN};
use super::times::{Rules, Timed, Times};
use super::{Task, languages};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::state::model::ModelState;

/// The token before a prompt of the client.
const PREVIOUS: &str = "<|startofprev|>";
/// The token before a transcript.
const START: &str = "<|startoftranscript|>";

/// A prompt for Whisper and the rules of its answer.
pub(super) struct Asked {
    /// The prompt: a placeholder, then the decoder's tokens.
    pub tokens: Vec<u32>,
    pub grammar: Arc<dyn Grammar>,
    pub heading: Heading,
    /// The language's name, if it is given or the model's only one.
    pub language: Option<&'static str>,
    /// The prompts for windows with times; none if the vocabulary has no times.
    pub windows: Option<WindowPrompts>,
}

/// The prompts for the windows of a clip, with times.
pub(super) struct WindowPrompts {
    placeholder: u32,
    /// The client's prompt, and the token that begins a transcript.
    before: Vec<u32>,
    /// The token of a given language.
    language: Option<u32>,
    /// None if the model supports English only.
    task: Option<u32>,
    /// The tokens allowed at each position of an unknown language's heading; empty if the language is given or the only one.
    heading: Vec<Box<[u32]>>,
    /// The token that stands for silence.
    silence: Option<u32>,
    vocab: u32,
    rules: Arc<Timed>,
    pub times: Times,
}

/// The prompt of one window.
pub(super) struct WindowPrompt {
    /// The prompt's tokens, with one placeholder for each row of the encoder.
    pub tokens: Vec<u32>,
    pub grammar: Arc<dyn Grammar>,
    /// The number of tokens in the answer that name language and task.
    pub heading: usize,
    /// The number of heading tokens that the model writes although they are known. The client's `max_tokens` does not count them.
    pub uncounted: u32,
}

impl WindowPrompts {
    /// Returns the prompt of a window of `rows` rows; `detected` is the language of the windows before. `measures`: the first token's
    /// report has the probability of silence. The model gives it in front of the heading, which is then part of the answer.
    pub fn of(&self, rows: usize, detected: Option<u32>, measures: bool) -> WindowPrompt {
        let mut tokens = vec![self.placeholder; rows];
        tokens.extend(&self.before);
        let named = self.language.or(detected).zip(self.task).map(|(language, task)| [language, task]);
        let (masks, uncounted) = match named {
            None => (self.heading.clone(), 0),
            Some(named) if measures => (named.map(|token| mask(self.vocab, [token])).to_vec(), named.len() as u32),
            Some(named) => {
                tokens.extend(named);
                (Vec::new(), 0)
            }
        };
        let heading = masks.len();
        let rules = Rules::new(&self.rules, masks, self.silence.filter(|_| measures));
        WindowPrompt { tokens, heading, uncounted, grammar: Arc::new(rules) }
    }
}

/// Returns the name of the language that a token stands for.
pub(super) fn language_of(state: &ModelState, token: u32) -> Option<&'static str> {
    let named = state.served.tokenizer.token_name(token);
    languages::all().find(|(code, _)| name(code) == named).map(|(_, name)| name)
}

/// Returns the prompt for the served model; none if it takes instructions.
pub(super) fn ask(
    state: &ModelState,
    task: Task,
    language: Option<&str>,
    prompt: Option<&str>,
) -> ApiResult<Option<Asked>> {
    let Some((placeholder, Transcript::Decoded(whisper))) =
        state.audio().map(|audio| (audio.placeholder, &audio.transcript))
    else {
        return Ok(None);
    };
    let language = language.map(|language| known(state, whisper, language)).transpose()?;
    if task == Task::Translate && !whisper.multilingual {
        let message = "the served model supports English only and does not translate: use /v1/audio/transcriptions";
        return Err(ApiError::unsupported("model", message));
    }
    let start = token(state, START)?;
    let mut before = previous(state, whisper, prompt)?;
    before.push(start);
    let mut tokens: Vec<u32> = std::iter::once(placeholder).chain(before.iter().copied()).collect();
    let mut masks = Vec::new();
    let vocab = state.served.engine.limits().vocab_size;
    let plain = token(state, PLAIN)?;
    let task = if whisper.multilingual { Some(token(state, task.token())?) } else { None };
    let code = language.map(|(code, _)| token(state, &name(code))).filter(|_| task.is_some()).transpose()?;
    match (code, task) {
        (_, None) => tokens.push(plain),
        (Some(code), Some(task)) => tokens.extend([code, task, plain]),
        (None, Some(task)) => {
            let ids = languages::all().filter_map(|(code, _)| state.served.tokenizer.token_to_id(&name(code)));
            let ids: Vec<u32> = ids.collect();
            if ids.is_empty() {
                return Err(no_languages());
            }
            masks.push(mask(vocab, ids));
            masks.extend([task, plain].map(|id| mask(vocab, [id])));
        }
    }
    let (heading, named) = (if masks.is_empty() { Heading::Space } else { Heading::Tokens }, masks.len());
    let ends = state.served.engine.eos();
    // After the first special token come only special tokens and times.
    let text = text_mask(vocab, start, ends, &whisper.suppressed);
    // The times follow `<|notimestamps|>`: one for each position of the encoder and one for its end.
    let last = plain.saturating_add(1 + whisper.positions as u32);
    let windows = (last < vocab).then(|| {
        let latest =
            whisper.first_time_max.map_or(last, |most| last.min(plain + 1 + most.min(whisper.positions) as u32));
        let times = Times { first: plain + 1, last, initial: latest };
        // Language and task, without `<|notimestamps|>`.
        let heading = masks.get(..2).unwrap_or_default().to_vec();
        let rules = Timed::new(text.clone(), ends, vocab, times);
        // The vocabularies name this token differently, and have it in the same position.
        let silence = plain.checked_sub(1);
        WindowPrompts { placeholder, before, language: code, task, heading, silence, vocab, rules, times }
    });
    masks.push(without(text.clone(), &whisper.suppressed_first));
    masks.push(text);
    let language = language.map(|(_, name)| name).or((!whisper.multilingual).then_some("English"));
    let grammar = Arc::new(Path { masks: masks.into(), named });
    Ok(Some(Asked { tokens, grammar, heading, language, windows }))
}

/// Returns code and name of a language that the model supports.
fn known(state: &ModelState, whisper: &Whisper, language: &str) -> ApiResult<(&'static str, &'static str)> {
    let has = |(code, _): &(&str, &str)| match whisper.multilingual {
        true => state.served.tokenizer.token_to_id(&name(code)).is_some(),
        false => *code == "en",
    };
    languages::all().filter(has).find(|known| languages::is(language, *known)).ok_or_else(|| {
        let codes: Vec<&str> = languages::all().filter(has).map(|(code, _)| code).collect();
        if codes.is_empty() {
            return no_languages();
        }
        let message = format!("language is `{}`; supported are {}", quote(language), codes.join(", "));
        ApiError::unsupported("language", message)
    })
}

fn no_languages() -> ApiError {
    let message =
        "the served model's tokenizer has no token of a language, such as `<|en|>`: use another tokenizer.json";
    ApiError::unsupported("model", message)
}

/// Returns the last tokens of the client's prompt, at most half of the decoder's positions.
fn previous(state: &ModelState, whisper: &Whisper, prompt: Option<&str>) -> ApiResult<Vec<u32>> {
    let Some(prompt) = prompt.map(str::trim).filter(|prompt| !prompt.is_empty()) else { return Ok(Vec::new()) };
    let ids = state.encode_plain("prompt", &[&format!(" {prompt}")])?;
    let most = (whisper.text_positions / 2).saturating_sub(1);
    let last = &ids[ids.len().saturating_sub(most)..];
    Ok(std::iter::once(token(state, PREVIOUS)?).chain(last.iter().copied()).collect())
}

/// Returns the name of a language's token in the vocabulary.
fn name(code: &str) -> String {
    format!("<|{code}|>")
}

fn token(state: &ModelState, name: &str) -> ApiResult<u32> {
    let found = state.served.tokenizer.token_to_id(name);
    found.ok_or_else(|| ApiError::unsupported("model", format!("the served model's tokenizer has no token `{name}`")))
}

/// The tokens that may come first, second, and so on; the last mask holds for all later ones.
#[derive(Debug)]
struct Path {
    masks: Arc<[Box<[u32]>]>,
    /// The number of heading tokens; at each, the most likely allowed token is taken.
    named: usize,
}

impl Grammar for Path {
    fn begin(&self) -> Result<Box<dyn Constraint>, String> {
        Ok(Box::new(Walk { masks: Arc::clone(&self.masks), named: self.named, at: 0 }))
    }

    fn bytes_max(&self, _max_tokens: u32) -> u64 {
        self.masks.iter().map(|mask| size_of_val(&**mask) as u64).sum()
    }
}

struct Walk {
    masks: Arc<[Box<[u32]>]>,
    named: usize,
    at: usize,
}

impl Constraint for Walk {
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit> {
        Ok(Some(&self.masks[self.at]))
    }

    fn takes_most_likely(&self) -> bool {
        self.at < self.named
    }

    fn accept(&mut self, _token: u32) -> Result<(), Unfit> {
        self.at = (self.at + 1).min(self.masks.len() - 1);
        Ok(())
    }

    fn complete(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mask_holds_for_all_that_follow() {
        let path = Path { masks: [mask(70, [3]), without(mask(70, [0, 5, 69, 500]), &[5, 700])].into(), named: 1 };
        assert_eq!(path.bytes_max(9), 2 * 12);
        let mut walk = path.begin().unwrap();
        assert_eq!(walk.allowed().unwrap(), Some(&[8, 0, 0][..]));
        assert!(walk.takes_most_likely());
        for _ in 0..3 {
            walk.accept(3).unwrap();
            assert_eq!(walk.allowed().unwrap(), Some(&[1, 0, 1 << 5][..]));
            assert!(!walk.complete() && !walk.takes_most_likely());
        }
    }
}
