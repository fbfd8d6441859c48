//! What Whisper is asked: a prompt of tokens behind the audio, and the tokens that may follow.
//!
//! Reference: transformers, `generation_whisper.py`. The prompt names language and task. Without a language the model writes these tokens
//! itself, each chosen among those that may stand there. Then it writes text, without times.

use std::sync::Arc;

use plimsoll_engine::constraint::{Constraint, Grammar, Unfit};
use plimsoll_engine::{Transcript, Whisper};

use super::tagged::{Heading, PLAIN};
use super::{Task, languages};
use crate::http::error::{ApiError, ApiResult, quote};
use crate::state::model::ModelState;

/// The token before a prompt of the client.
const PREVIOUS: &str = "<|startofprev|>";
/// The token before a transcript.
const START: &str = "<|startoftranscript|>";

/// How such a model is asked.
pub(super) struct Asked {
    /// The prompt: a placeholder, then the decoder's tokens.
    pub tokens: Vec<u32>,
    pub grammar: Arc<dyn Grammar>,
    pub heading: Heading,
    /// The language's name, where it is given or the only one.
    pub language: Option<&'static str>,
}

/// The question to the served model; none if it takes instructions.
pub(super) fn ask(
    state: &ModelState,
    task: Task,
    language: Option<&str>,
    prompt: Option<&str>,
) -> ApiResult<Option<Asked>> {
    let spec = state.served.engine.media().and_then(|spec| spec.audio.as_ref());
    let Some((placeholder, Transcript::Decoded(whisper))) = spec.map(|audio| (audio.placeholder, &audio.transcript))
    else {
        return Ok(None);
    };
    let language = language.map(|language| known(state, whisper, language)).transpose()?;
    if task == Task::Translate && !whisper.multilingual {
        let message = "the served model supports English only and does not translate: use /v1/audio/transcriptions";
        return Err(ApiError::unsupported("model", message));
    }
    let mut tokens = vec![placeholder];
    tokens.extend(previous(state, whisper, prompt)?);
    tokens.push(token(state, START)?);
    let mut masks = Vec::new();
    let vocab = state.served.engine.limits().vocab_size;
    let task = if whisper.multilingual { Some(token(state, task.token())?) } else { None };
    match (language, task) {
        (_, None) => tokens.push(token(state, PLAIN)?),
        (Some((code, _)), Some(task)) => tokens.extend([token(state, &name(code))?, task, token(state, PLAIN)?]),
        (None, Some(task)) => {
            let ids = languages::all().filter_map(|(code, _)| state.served.tokenizer.token_to_id(&name(code)));
            let ids: Vec<u32> = ids.collect();
            if ids.is_empty() {
                return Err(no_languages());
            }
            masks.push(mask(vocab, ids));
            masks.extend([task, token(state, PLAIN)?].map(|id| mask(vocab, [id])));
        }
    }
    let (heading, named) = (if masks.is_empty() { Heading::Space } else { Heading::Tokens }, masks.len());
    let start = token(state, START)?;
    let ends = state.served.engine.eos();
    // Behind the first special token there are only others, and times.
    let text = without(mask(vocab, (0..start).chain(ends.iter().copied())), &whisper.suppressed);
    masks.push(without(text.clone(), &whisper.suppressed_first));
    masks.push(text);
    let language = language.map(|(_, name)| name).or((!whisper.multilingual).then_some("English"));
    Ok(Some(Asked { tokens, grammar: Arc::new(Path { masks: masks.into(), named }), heading, language }))
}

/// Code and name of a language that the model has.
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

/// The client's prompt: the last tokens of it, as many as leave half of the decoder's positions.
fn previous(state: &ModelState, whisper: &Whisper, prompt: Option<&str>) -> ApiResult<Vec<u32>> {
    let Some(prompt) = prompt.map(str::trim).filter(|prompt| !prompt.is_empty()) else { return Ok(Vec::new()) };
    let ids = state.encode_plain("prompt", &[&format!(" {prompt}")])?;
    let most = (whisper.text_positions / 2).saturating_sub(1);
    let last = &ids[ids.len().saturating_sub(most)..];
    Ok(std::iter::once(token(state, PREVIOUS)?).chain(last.iter().copied()).collect())
}

/// How the vocabulary spells a language.
fn name(code: &str) -> String {
    format!("<|{code}|>")
}

fn token(state: &ModelState, name: &str) -> ApiResult<u32> {
    let found = state.served.tokenizer.token_to_id(name);
    found.ok_or_else(|| ApiError::unsupported("model", format!("the served model's tokenizer has no token `{name}`")))
}

/// Tokens as a bit mask.
fn mask(vocab: u32, ids: impl IntoIterator<Item = u32>) -> Box<[u32]> {
    let mut words = vec![0; vocab.div_ceil(32) as usize];
    ids.into_iter().filter(|id| *id < vocab).for_each(|id| words[id as usize / 32] |= 1 << (id % 32));
    words.into()
}

/// The mask without these tokens.
fn without(mut mask: Box<[u32]>, ids: &[u32]) -> Box<[u32]> {
    for id in ids {
        mask.get_mut(*id as usize / 32).into_iter().for_each(|word| *word &= !(1 << (id % 32)));
    }
    mask
}

/// Which tokens may come first, second, and so on; the last of these for all that follow.
#[derive(Debug)]
struct Path {
    masks: Arc<[Box<[u32]>]>,
    /// Tokens of the heading, of which the most likely ones are taken.
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
