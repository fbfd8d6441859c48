//! A GGUF file's vocabulary, and the check that its lists fit together.

use crate::error::TextError;
use crate::fim::FimIds;

/// The tokenizer part of a GGUF file's metadata; fields are named after their keys under `tokenizer.ggml`.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab {
    /// The family: `gpt2`, `llama`, `gemma4`, `bert` or `t5`.
    pub model: String,
    /// The name of the pre-tokenizer; empty if the file has none.
    pub pre: String,
    /// The tokens by id.
    pub tokens: Vec<String>,
    /// The score of each token. `llama` and `t5` need scores; other families may omit them.
    pub scores: Vec<f32>,
    /// The type of each token: 1 text, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Empty means all text.
    pub token_types: Vec<i32>,
    /// The merges in the order of their ranks, each as two tokens with a space between.
    pub merges: Vec<String>,
    /// The beginning-of-sequence token.
    pub bos: Option<u32>,
    /// The end-of-sequence token.
    pub eos: Option<u32>,
    /// Further tokens that end a generation.
    pub extra_eos: Vec<u32>,
    /// The token before a text of an encoder, if it is not `bos`.
    pub cls: Option<u32>,
    /// The token after a text of an encoder, and between two texts.
    pub sep: Option<u32>,
    /// The token for text that cannot be encoded.
    pub unknown: Option<u32>,
    /// Whether a text begins with `bos`. If the file has no value, the family decides.
    pub add_bos: Option<bool>,
    /// Whether a text ends with `eos`. False if the file has no value.
    pub add_eos: Option<bool>,
    /// Whether a text is encoded as if a space preceded it. If the file has no value, the family decides.
    pub add_space_prefix: Option<bool>,
    /// Whether a text ends with `sep`, and two texts have it between them. False if the file has no value.
    pub add_sep: Option<bool>,
    /// Whether several spaces count as one; only `t5` has it.
    pub remove_extra_whitespaces: Option<bool>,
    /// The table of replaced characters in SentencePiece's format; only `t5` has it.
    pub charsmap: Vec<u8>,
    /// The tokens of fill-in-the-middle. If the file has none, they are found by their names.
    pub fim: FimIds,
}

/// Most tokens, more than any model has. Hostile files are refused before memory is allocated.
const TOKENS_MAX: usize = 1 << 24;

pub(crate) const TYPE_UNKNOWN: i32 = 2;
pub(crate) const TYPE_CONTROL: i32 = 3;
pub(crate) const TYPE_USER_DEFINED: i32 = 4;
pub(crate) const TYPE_UNUSED: i32 = 5;
pub(crate) const TYPE_BYTE: i32 = 6;

/// Checks that the lists fit together, and that every id that the family uses is a token.
pub(crate) fn check(vocab: &GgufVocab) -> Result<(), TextError> {
    let count = vocab.tokens.len();
    let bad = |message: String| Err(TextError::BadTokenizer(message));
    if count == 0 || count > TOKENS_MAX {
        return bad(format!("{count} tokens; between 1 and {TOKENS_MAX} can be loaded"));
    }
    if !vocab.token_types.is_empty() && vocab.token_types.len() != count {
        return bad(format!("{} token types for {count} tokens", vocab.token_types.len()));
    }
    if !vocab.scores.is_empty() && vocab.scores.len() != count {
        return bad(format!("{} scores for {count} tokens", vocab.scores.len()));
    }
    let FimIds { prefix, suffix, middle, pad, repository, separator } = vocab.fim;
    let is_encoder = matches!(vocab.model.as_str(), "bert" | "t5");
    let cls = vocab.cls.filter(|_| is_encoder);
    let sep = vocab.sep.filter(|_| is_encoder || vocab.add_sep == Some(true));
    let named = [vocab.bos, vocab.eos, cls, sep, vocab.unknown, prefix, suffix, middle, pad, repository, separator];
    let ids = named.into_iter().flatten().chain(vocab.extra_eos.iter().copied());
    for id in ids {
        if id as usize >= count {
            return bad(format!("special token {id} is not among the {count} tokens"));
        }
    }
    Ok(())
}

/// The type of a token.
pub(crate) fn type_of(vocab: &GgufVocab, id: usize) -> i32 {
    vocab.token_types.get(id).copied().unwrap_or(1)
}
