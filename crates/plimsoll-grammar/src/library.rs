//! llguidance as Plimsoll uses it: its limits, what it is given, and its errors in plain words.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

/// States of one automaton. Each takes one to two kilobytes.
pub(crate) const STATES_MAX: usize = 8_000;

/// The tokens that are decided together: those that may stand inside a JSON string. More such slices would save a part
/// of a millisecond a mask, and no step waits for it. Each takes a trie.
const SLICE: &str = r#"[^"\\\x00-\x1F\x7F]{1,30}"#;

/// What grammars are compiled with.
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

/// The library's words, without the grammar they repeat, and without its names for what went wrong.
pub(crate) fn reason(message: &str) -> String {
    let first = message.lines().next().unwrap_or(message);
    let plain = NAMES.iter().find(|(name, _)| first.contains(name)).map(|(_, words)| *words);
    // Of a pattern that is none, the line that says why is the last one.
    let why = message.lines().rev().find_map(|line| line.trim().strip_prefix("error: ")).unwrap_or_default();
    plain.map_or_else(|| format!("{first} {why}").trim_end().chars().take(400).collect(), str::to_owned)
}

/// What llguidance calls an end, and what that means.
const NAMES: [(&str, &str); 6] = [
    (
        "NoExtension",
        "nothing can be written that fits it: it contradicts itself, or wants what this model's tokens cannot spell",
    ),
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
