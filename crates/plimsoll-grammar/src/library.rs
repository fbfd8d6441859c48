//! llguidance: its limits, its input, and its errors in plain words.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

/// Most states of one automaton. A state takes one to two kilobytes.
pub(crate) const STATES_MAX: usize = 8_000;

/// Tokens that may stand inside a JSON string are decided together. More slices would save a fraction of a millisecond
/// per mask, and each takes a trie.
const SLICE: &str = r#"[^"\\\x00-\x1F\x7F]{1,30}"#;

/// The factory of parsers.
pub(crate) fn factory(words: &[Vec<u8>], ends: &[u32]) -> anyhow::Result<ParserFactory> {
    let end = ends.first().copied().unwrap_or(0);
    let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), words);
    let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(ends) };
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = [SLICE.to_owned()];
    let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// The library's error in plain words, without the grammar that it repeats.
pub(crate) fn plain_message(message: &str) -> String {
    let first = message.lines().next().unwrap_or(message);
    let plain = ERROR_TEXTS.iter().find(|(name, _)| first.contains(name)).map(|(_, words)| *words);
    // For an invalid pattern the last line has the reason.
    let why = message.lines().rev().find_map(|line| line.trim().strip_prefix("error: ")).unwrap_or_default();
    plain.map_or_else(|| format!("{first} {why}").trim_end().chars().take(400).collect(), str::to_owned)
}

/// llguidance's stop reasons, and their messages.
const ERROR_TEXTS: [(&str, &str); 6] = [
    ("NoExtension", "no text matches it: it contradicts itself, or needs text that this model's tokens cannot write"),
    ("LexerTooComplex", "it is too complex: its patterns have too many states"),
    ("ParserTooComplex", "it is too complex: the same text can be read in too many ways"),
    ("Too many items", "it is too complex: the same text can be read in too many ways"),
    ("InternalError", "it could not be compiled"),
    ("fuel", "it is too complex to be compiled within this server's limits"),
];

/// Limits on compiling and on each step.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: STATES_MAX,
        max_grammar_size: 100_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
