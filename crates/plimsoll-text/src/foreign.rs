//! Runs a `tokenizer.json` that our pipeline does not support in the `tokenizers` library: Unigram, WordPiece, unusual normalizers.
//!
//! The `tokenizers` library runs stage by stage, not through its `encode`. That call cannot choose per text whether control tokens are
//! matched, and computes offsets that are not needed here. The library's caches are off: they are per thread, keyed by text from clients,
//! and bounded only in entries.

use tokenizers::{AddedVocabulary, Model, OffsetReferential, OffsetType, PreTokenizer, TokenizerImpl};

use crate::error::TextError;

type Inner = TokenizerImpl<
    tokenizers::ModelWrapper,
    tokenizers::NormalizerWrapper,
    tokenizers::PreTokenizerWrapper,
    tokenizers::PostProcessorWrapper,
    tokenizers::DecoderWrapper,
>;

/// A tokenizer of the `tokenizers` library.
pub(crate) struct Foreign {
    inner: Inner,
    /// The added tokens that are matched even where control tokens are plain text.
    user_defined: AddedVocabulary,
}

impl Foreign {
    /// Heap bytes that encoding may need for each byte of text, not counting ids: strings with an alignment of 16 bytes a byte, words,
    /// symbols, a queue, tokens with their strings. `tests/heap.rs` measures 590 if every byte is a word, and 869 for U+FDFA, which NFKC
    /// replaces with 33 bytes. Rules of a normalizer could lengthen a text more; they come from the model's files.
    pub(crate) const BYTES_PER_BYTE: usize = 1024;

    /// Loads a `tokenizer.json` held in memory.
    pub(crate) fn new(json: &[u8]) -> Result<Self, TextError> {
        let bad = |error: tokenizers::Error| TextError::BadTokenizer(error.to_string());
        let loaded: tokenizers::Tokenizer = serde_json::from_slice(json).map_err(|error| bad(error.into()))?;
        let mut model = loaded.get_model().clone();
        model.resize_cache(0);
        let mut inner = loaded.into_inner();
        inner.with_model(model);
        let mut user_defined = inner.get_added_vocabulary().clone();
        user_defined.set_encode_special_tokens(true);
        Ok(Self { inner, user_defined })
    }

    /// Appends the ids of `text` to `out`.
    pub(crate) fn encode(&self, text: &str, parse_special: bool, out: &mut Vec<u32>) -> Result<(), TextError> {
        let failed = |error: tokenizers::Error| TextError::Encode(error.to_string());
        let added = if parse_special { self.inner.get_added_vocabulary() } else { &self.user_defined };
        let mut pieces = added.extract_and_normalize(self.inner.get_normalizer(), text);
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        let model = self.inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get())).map_err(failed)?;
        for (_, _, tokens) in pieces.get_splits(OffsetReferential::Original, OffsetType::None) {
            out.extend(tokens.iter().flatten().map(|token| token.id));
        }
        Ok(())
    }
}
