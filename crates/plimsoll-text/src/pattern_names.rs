//! The patterns that cut text for each model: a table from the values of `tokenizer.ggml.pre`.
//!
//! A GGUF file has only a name for its pattern. The names are llama.cpp's; the patterns are from the models' `tokenizer.json`. An unknown
//! name is refused: with a wrong pattern text still looks plausible, but the model is worse without any error. Patterns with look-around
//! other than the usual tail are deliberately missing (see `pretokenize`).

use crate::error::TextError;

/// GPT-2: letters, digits and the rest, each with the space before it.
pub(crate) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Llama 3, and cl100k before it: digits in groups of three, separate line breaks.
pub(crate) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen 2 and 3: as Llama 3, but with single digits.
pub(crate) const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen 3.5: as Qwen 2, with marks counted among the letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Mistral's Tekken: words are cut before a capital that follows a small letter.
pub(crate) const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// GPT-4o (o200k) and Llama 4: as Tekken, with English contractions and digits in groups of three.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The last of the three patterns of DeepSeek V3.
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// The letters of DeepSeek LLM: the cased letters of an earlier Unicode version.
const DEEPSEEK_LETTERS: &str = r"(?x)\s?[
    \x{41}-\x{5a}\x{61}-\x{7a}\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}
    \x{1c4}-\x{293}\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}
    \x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}
    \x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}
    \x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}
    \x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}
    \x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}
    \x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}
    \x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}
    \x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}
    \x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}
    \x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}
    \x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}
    \x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}
    \x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}
]+";

/// Ling (Bailing): as Qwen 2, with one line break at a time.
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

/// Seed-Coder: as Qwen 2, with punctuation that contains no line breaks.
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";

/// BLOOM: anything between spaces and the sentence marks of several scripts.
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// The recipe that a name stands for.
#[derive(Clone, Copy)]
pub(crate) struct Recipe {
    /// The patterns, in the order of their application.
    pub(crate) patterns: &'static [&'static str],
    /// Whether a word that is a token is not split by BPE.
    pub(crate) whole_words_first: bool,
    /// Whether the model expects a beginning-of-sequence token, if its file has no value.
    pub(crate) add_bos: bool,
    /// Whether the model was trained on composed characters. llama.cpp omits the composition; the models' tokenizers do not.
    pub(crate) nfc: bool,
}

impl Recipe {
    const fn of(patterns: &'static [&'static str]) -> Self {
        Self { patterns, whole_words_first: false, add_bos: false, nfc: false }
    }

    const fn composed(self) -> Self {
        Self { nfc: true, ..self }
    }

    const fn whole_words_first(self) -> Self {
        Self { whole_words_first: true, ..self }
    }

    const fn with_bos(self) -> Self {
        Self { add_bos: true, ..self }
    }
}

const LLAMA: Recipe = Recipe::of(&[LLAMA3]).whole_words_first().with_bos();

/// Names and recipes, related ones together.
const RECIPES: &[(&[&str], Recipe)] = &[
    (&["default"], Recipe::of(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"])),
    (
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "exaone4",
            "trillion",
            "granite-docling",
            "roberta-bpe",
        ],
        Recipe::of(&[GPT2]),
    ),
    (&["modern-bert"], Recipe::of(&[GPT2]).composed()),
    (&["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"], LLAMA),
    (&["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"], Recipe::of(&[LLAMA3])),
    (&["qwen2", "deepseek-r1-qwen", "megrez"], Recipe::of(&[QWEN2]).composed()),
    (&["stablelm2", "hunyuan", "grok-2", "solar-open", "kormo", "f2llmv2"], Recipe::of(&[QWEN2])),
    (&["qwen35"], Recipe::of(&[QWEN35]).composed()),
    (
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        Recipe::of(&[r"\p{N}", GPT2]),
    ),
    (&["tekken"], Recipe::of(&[TEKKEN]).whole_words_first().with_bos()),
    (&["gpt-4o", "llama4", "kanana2", "minimax-m2"], Recipe::of(&[GPT4O])),
    (
        &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        Recipe::of(&[r"\p{N}{1,3}", r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+", DEEPSEEK_V3]),
    ),
    (
        &["deepseek-llm"],
        Recipe::of(&[
            r"[\r\n]",
            DEEPSEEK_LETTERS,
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]+",
            r"\p{N}+",
        ]),
    ),
    (
        &["deepseek-coder"],
        Recipe::of(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]+", r"\p{N}"]),
    ),
    (&["falcon"], Recipe::of(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"])),
    (&["bailingmoe", "bailingmoe2", "llada-moe"], Recipe::of(&[BAILING])),
    (&["seed-coder"], Recipe::of(&[SEED_CODER])),
    (&["bloom", "poro-chat", "gpt3-finnish"], Recipe::of(&[BLOOM])),
    (&["viking"], Recipe::of(&[BLOOM, r"\p{N}"])),
];

/// The recipe of a name. Old files have no name; an empty name means `default`.
pub(crate) fn recipe(name: &str) -> Result<Recipe, TextError> {
    let name = if name.is_empty() { "default" } else { name };
    RECIPES.iter().find(|(names, _)| names.contains(&name)).map(|(_, recipe)| *recipe).ok_or_else(|| {
        TextError::UnknownPreTokenizer {
            name: name.to_owned(),
            known: RECIPES.iter().flat_map(|(names, _)| names.iter().copied()).collect::<Vec<_>>().join(", "),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pretokenize::{Cutter, plain, share};

    /// A pattern without room for its automaton would run without it, several times more slowly.
    #[test]
    fn every_pattern_has_room_for_its_automaton() {
        use regex_automata::hybrid::{dfa, regex};
        for (names, recipe) in RECIPES {
            let room = dfa::Config::new().cache_capacity(share(recipe.patterns.len()));
            for pattern in recipe.patterns {
                let (plain, _) = plain(pattern);
                assert!(regex::Builder::new().dfa(room.clone()).build(&plain).is_ok(), "{names:?}: {pattern}");
            }
        }
    }

    #[test]
    fn every_recipe_compiles_and_names_are_unique() {
        let mut seen = std::collections::HashSet::new();
        for (names, recipe) in RECIPES {
            assert!(Cutter::new(recipe.patterns.iter().copied()).is_ok(), "{names:?}");
            for name in *names {
                assert!(seen.insert(name), "{name} twice");
            }
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let Err(error) = recipe("nonsense") else { panic!("nonsense has a recipe") };
        let message = error.to_string();
        assert!(message.contains("nonsense") && message.contains("qwen2"), "{message}");
    }

    #[test]
    fn deepseek_llm_keeps_its_odd_ideas() {
        let mut out = Vec::new();
        Cutter::new(recipe("deepseek-llm").unwrap().patterns.iter().copied())
            .unwrap()
            .cut("Ab 中文x  12\n", &mut |piece| out.push(piece));
        assert_eq!(out, ["Ab", " ", "中文", "x", "  ", "12", "\n"]);
    }
}
