//! Prompts of a wanted number of tokens, the same on every machine and in every run.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::client::Target;

/// Common words; with a leading space nearly all are one token in the field's vocabularies.
const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
    "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side",
    "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law",
    "car",
];

/// A small random number generator (SplitMix64), so that runs can be repeated.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts a sequence that depends only on `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`; a limit of 0 counts as 1.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }
}

/// Returns `count` words that depend only on `seed`.
pub fn words(seed: u64, count: usize) -> String {
    let mut random = Random::new(seed);
    let mut text = String::with_capacity(count * 7);
    for _ in 0..count {
        text.push(' ');
        text.push_str(WORDS[random.below(WORDS.len() as u64) as usize]);
    }
    text
}

/// The relation of words to tokens on a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Tokens of an empty text: special tokens.
    fixed: f64,
    /// Tokens per word.
    per_word: f64,
}

impl Scale {
    /// Measures two prompts by the usage that the server reports.
    pub async fn measure(target: &Target, model: &str) -> Result<Self> {
        let (few, many) = (20, 220);
        let at_few = prompt_tokens(target, model, &words(1, few)).await?;
        let at_many = prompt_tokens(target, model, &words(1, many)).await?;
        let per_word = (at_many - at_few) / (many - few) as f64;
        Ok(Self { fixed: at_few - per_word * few as f64, per_word: per_word.max(0.1) })
    }

    /// Returns the number of words for about `tokens` tokens, special tokens included.
    pub fn words(&self, tokens: usize) -> usize {
        (((tokens as f64 - self.fixed) / self.per_word).round() as usize).max(1)
    }
}

async fn prompt_tokens(target: &Target, model: &str, prompt: &str) -> Result<f64> {
    let body = json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0});
    let answer = target.post("/v1/completions", &body, Duration::from_secs(120)).await?.good().await?.json().await?;
    let tokens = answer.pointer("/usage/prompt_tokens").and_then(Value::as_f64);
    tokens.with_context(|| format!("{} reports no usage: {answer}", target.authority))
}

/// The parameters of a run's prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Recipe {
    /// The relation of words to tokens.
    pub scale: Scale,
    /// Tokens that all prompts begin with.
    pub shared: usize,
    /// Other seeds give other words throughout, the shared beginning included.
    pub seed: u64,
}

impl Recipe {
    /// The prompt of request `index` in `round`: a shared beginning, then words of its own.
    pub fn prompt(&self, tokens: usize, round: usize, index: usize) -> String {
        let all = self.scale.words(tokens);
        let common = if self.shared == 0 { 0 } else { self.scale.words(self.shared).min(all) };
        let seed = Random::new(self.seed).next();
        // The first own word differs between requests, so that no more than the beginning is shared.
        let own = ((round as u64) << 32) | index as u64;
        words(seed ^ 42, common) + &words(seed ^ own ^ 0x5eed_0000_0000, all - common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_only_what_they_should() {
        let recipe = Recipe { scale: Scale { fixed: 1.0, per_word: 1.0 }, shared: 41, seed: 0 };
        let (a, b) = (recipe.prompt(101, 0, 0), recipe.prompt(101, 0, 1));
        assert_eq!(a.split_whitespace().count(), 100);
        assert!((40..50).contains(&common(&a, &b)), "{}", common(&a, &b));
        assert_eq!(a, recipe.prompt(101, 0, 0));
        assert_ne!(recipe.prompt(50, 0, 3), recipe.prompt(50, 1, 3));
    }

    #[test]
    fn another_seed_shares_nothing() {
        let recipe = |seed| Recipe { scale: Scale { fixed: 1.0, per_word: 1.0 }, shared: 41, seed };
        for seed in 1..20 {
            let shared = common(&recipe(0).prompt(101, 0, 0), &recipe(seed).prompt(101, 0, 0));
            assert!(shared < 5, "seed {seed}: {shared}");
        }
    }

    /// How many words two texts have in common at their beginning.
    fn common(a: &str, b: &str) -> usize {
        a.split_whitespace().zip(b.split_whitespace()).take_while(|(x, y)| x == y).count()
    }
}
