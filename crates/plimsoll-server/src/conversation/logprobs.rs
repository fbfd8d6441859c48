//! Log-probabilities in the forms of three APIs: completions, chat, and vLLM's prompt report.

use plimsoll_engine::{TokenLogprobs, TokenOut};
use plimsoll_text::{Detokenizer, Tokenizer};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::conversation::submission::TokenizedPrompt;

/// JSON has no infinity; a token of probability zero is reported as this, as vLLM does.
const LEAST: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LEAST) } else { LEAST }
}

/// The spelling of tokens in reports.
#[derive(Clone, Copy)]
pub(crate) struct Spelling<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Whether tokens are spelled as `token_id:123` instead of their text.
    pub as_ids: bool,
}

fn id_key(id: u32) -> String {
    format!("token_id:{id}")
}

impl Spelling<'_> {
    /// Returns the bytes of the token's text.
    pub fn bytes(&self, id: u32) -> &[u8] {
        // A model's vocabulary may be padded beyond its tokenizer's.
        if (id as usize) < self.tokenizer.vocab_size() { self.tokenizer.token_bytes(id) } else { &[] }
    }

    /// Returns the token's text; bytes that are not whole characters become U+FFFD.
    pub fn text(&self, id: u32) -> String {
        if self.as_ids { id_key(id) } else { String::from_utf8_lossy(self.bytes(id)).into_owned() }
    }

    /// Returns the token's text in the form of completions' `logprobs`. Bytes that are not whole characters are spelled as
    /// `bytes:\xf0\x9f`, as OpenAI does, so that two such tokens differ.
    fn key(&self, id: u32) -> String {
        match std::str::from_utf8(self.bytes(id)) {
            Ok(text) if !self.as_ids => text.to_owned(),
            Err(_) if !self.as_ids => self.bytes(id).iter().fold("bytes:".to_owned(), |key, byte| match byte {
                b' '..=b'~' => key + char::from(*byte).encode_utf8(&mut [0; 4]),
                byte => key + &format!("\\x{byte:02x}"),
            }),
            _ => id_key(id),
        }
    }
}

/// Completions' `logprobs`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<Alternatives>>,
    pub text_offset: Vec<usize>,
}

/// An object from token text to log-probability, best first. Of two tokens that share a text, the less likely is
/// `token_id:123`.
#[derive(Debug)]
pub(crate) struct Alternatives(Vec<(String, f32)>);

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (text, logprob) in &self.0 {
            map.serialize_entry(text, logprob)?;
        }
        map.end()
    }
}

impl CompletionLogprobs {
    /// Adds generated tokens. `before` is the number of characters before their text.
    pub fn add(&mut self, spelling: Spelling<'_>, tokens: &[TokenOut], before: usize) {
        for token in tokens {
            let report = token.logprobs.clone().unwrap_or_default();
            self.push(spelling, token.id, &report, before + token.text_chars as usize);
        }
    }

    /// Adds an echoed prompt. Returns the number of characters of its text. A character of several tokens counts once, at the position of
    /// the first of them.
    pub fn add_prompt(&mut self, spelling: Spelling<'_>, prompt: &TokenizedPrompt, reports: &[TokenLogprobs]) -> usize {
        let (mut chars, mut text, mut detokenizer) = (0, String::new(), Detokenizer::new(false));
        for (index, (id, report)) in prompt.ids.iter().zip(reports).enumerate() {
            self.push(spelling, *id, report, chars);
            if prompt.has_text(index) {
                detokenizer.push(spelling.tokenizer, *id, &mut text);
            }
            chars += text.chars().count();
            text.clear();
        }
        detokenizer.finish(&mut text);
        chars + text.chars().count()
    }

    fn push(&mut self, spelling: Spelling<'_>, id: u32, report: &TokenLogprobs, offset: usize) {
        self.tokens.push(spelling.key(id));
        self.token_logprobs.push(report.own.map(finite));
        self.top_logprobs.push(report.own.map(|own| {
            let mut all: Vec<(String, f32)> = Vec::with_capacity(report.top.len() + 1);
            let own = (!report.top.iter().any(|(top, _)| *top == id)).then_some((id, own));
            for (id, logprob) in report.top.iter().copied().chain(own) {
                let text = spelling.key(id);
                let taken = all.iter().any(|(known, _)| *known == text);
                all.push((if taken { id_key(id) } else { text }, finite(logprob)));
            }
            Alternatives(all)
        }));
        self.text_offset.push(offset);
    }
}

/// Chat's `logprobs`.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    pub content: Vec<ChatToken>,
    /// Always null: this server has no refusals.
    refusal: Option<Vec<ChatToken>>,
}

/// One token of chat's `logprobs`.
#[derive(Debug, Serialize)]
pub(crate) struct ChatToken {
    #[serde(flatten)]
    own: ChatAlternative,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Debug, Serialize)]
struct ChatAlternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub fn new(spelling: Spelling<'_>, tokens: &[TokenOut]) -> Self {
        let one = |id: u32, logprob: f32| ChatAlternative {
            token: spelling.text(id),
            logprob: finite(logprob),
            bytes: spelling.bytes(id).to_vec(),
        };
        let token = |token: &TokenOut| {
            let report = token.logprobs.clone().unwrap_or_default();
            ChatToken {
                own: one(token.id, report.own.unwrap_or(LEAST)),
                top_logprobs: report.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect(),
            }
        };
        Self { content: tokens.iter().map(token).collect(), refusal: None }
    }
}

/// vLLM's `prompt_logprobs`: null for the first token, then an object from token id to report.
#[derive(Debug, Serialize)]
pub(crate) struct PromptReport(Vec<Option<PromptToken>>);

#[derive(Debug)]
struct PromptToken(Vec<(u32, PromptAlternative)>);

#[derive(Debug, Serialize)]
struct PromptAlternative {
    logprob: f32,
    /// The token's rank among all tokens, from 1; null if it is beyond the reported ones.
    rank: Option<usize>,
    decoded_token: String,
}

impl Serialize for PromptToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (id, alternative) in &self.0 {
            map.serialize_entry(&id.to_string(), alternative)?;
        }
        map.end()
    }
}

impl PromptReport {
    pub fn new(spelling: Spelling<'_>, ids: &[u32], reports: &[TokenLogprobs]) -> Self {
        let token = |(id, report): (&u32, &TokenLogprobs)| {
            let own = report.own?;
            let one = |id: u32, logprob: f32, rank| {
                (id, PromptAlternative { logprob: finite(logprob), rank, decoded_token: spelling.text(id) })
            };
            let top = report.top.iter().enumerate();
            let mut all: Vec<_> = top.map(|(i, (id, logprob))| one(*id, *logprob, Some(i + 1))).collect();
            if !report.top.iter().any(|(top, _)| top == id) {
                all.insert(0, one(*id, own, None));
            }
            Some(PromptToken(all))
        };
        Self(ids.iter().zip(reports).map(token).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_a_tokenizer_puts_around_a_text_moves_none_of_it() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plimsoll-text/tests/fixtures/llama2/tokenizer.json");
        let tokenizer = &Tokenizer::from_file(&file).unwrap();
        let text = "The sea is \u{e9}!";
        let offsets = |add_special: bool| {
            let ids = tokenizer.encode(text, add_special, true).unwrap();
            let around = if add_special { tokenizer.around() } else { (0, 0) };
            let reports = vec![TokenLogprobs::default(); ids.len()];
            let mut logprobs = CompletionLogprobs::default();
            let prompt = TokenizedPrompt { ids, echo: None, around };
            let chars = logprobs.add_prompt(Spelling { tokenizer, as_ids: false }, &prompt, &reports);
            assert_eq!(chars, text.chars().count(), "{add_special}");
            logprobs.text_offset
        };
        let (plain, special) = (offsets(false), offsets(true));
        assert_eq!(tokenizer.around(), (1, 0));
        assert_eq!((special[0], &special[1..]), (0, &plain[..]));
        assert_eq!(plain[0], 0);
    }
    #[test]
    fn every_alternative_has_a_key_of_its_own() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plimsoll-text/tests/fixtures/llama2/tokenizer.json");
        let tokenizer = &Tokenizer::from_file(&file).unwrap();
        let id = |token: &str| tokenizer.token_to_id(token).unwrap();
        let padded = tokenizer.vocab_size() as u32 + 1;
        let ids = [id("<0xF0>"), id("<0x9F>"), id("<0x41>"), id("A"), padded, padded + 1];
        let top = ids.iter().zip(1..).map(|(id, rank)| (*id, -(rank as f32))).collect();
        let report = TokenLogprobs { own: Some(-1.0), top };
        let mut logprobs = CompletionLogprobs::default();
        logprobs.push(Spelling { tokenizer, as_ids: false }, ids[0], &report, 0);
        let alternatives = logprobs.top_logprobs[0].as_ref().unwrap();
        let keys: Vec<&str> = alternatives.0.iter().map(|(key, _)| key.as_str()).collect();
        let [a, last] = [ids[3], padded + 1].map(|id| format!("token_id:{id}"));
        assert_eq!(keys, [r"bytes:\xf0", r"bytes:\x9f", "A", &a, "", &last]);
        assert_eq!(logprobs.tokens, [r"bytes:\xf0"]);
    }
}
