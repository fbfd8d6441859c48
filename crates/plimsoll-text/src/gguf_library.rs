//! GGUF vocabularies of text encoders, which the `tokenizers` library runs: `bert` (WordPiece) and `t5` (Unigram, in XLM-RoBERTa's form).
//!
//! They are converted to an equivalent `tokenizer.json`. Reference: llama.cpp's converter. In `bert` vocabularies it marks beginnings of
//! words with `▁`, where the original marks continuations with `##`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::error::TextError;
use crate::gguf_vocab::{GgufVocab, TYPE_CONTROL, TYPE_UNKNOWN, TYPE_UNUSED, TYPE_USER_DEFINED, type_of};
use crate::neighbours::Neighbours;
use crate::tokenizer::Tokenizer;

/// Longest word in characters. A longer word becomes one unknown token.
const WORD_CHARS_MAX: usize = 100;

/// Returns the tokenizer, if the vocabulary is of one of these families.
///
/// # Errors
///
/// [`TextError::BadTokenizer`] if a token that every text needs is missing, or if the lists do not fit together.
pub(crate) fn of(vocab: &GgufVocab) -> Result<Option<Tokenizer>, TextError> {
    let description = match vocab.model.as_str() {
        "bert" => word_piece(vocab)?,
        "t5" => unigram(vocab)?,
        _ => return Ok(None),
    };
    Tokenizer::from_json(description.to_string().as_bytes(), &Neighbours::default()).map(Some)
}

/// Least number of capitals in a cased alphabet: half of them.
const CAPITALS_MIN: usize = 13;

/// Returns BERT's description: words are split at punctuation, and pieces inside a word begin with `##`.
fn word_piece(vocab: &GgufVocab) -> Result<Value, TextError> {
    let name = |id: usize| match type_of(vocab, id) {
        TYPE_UNKNOWN | TYPE_CONTROL | TYPE_USER_DEFINED => vocab.tokens[id].clone(),
        _ => of_piece(&vocab.tokens[id]),
    };
    let mut pieces = Map::new();
    for id in (0..vocab.tokens.len()).filter(|id| type_of(vocab, *id) != TYPE_UNUSED) {
        let name = name(id);
        // The first of two equal names is used.
        pieces.entry(name).or_insert_with(|| id.into());
    }
    // A cased vocabulary has most capitals, at the beginning of a word or inside.
    let has = |piece: &str| pieces.contains_key(piece);
    let capitals = ('A'..='Z').filter(|capital| has(&capital.to_string()) || has(&format!("##{capital}")));
    let cased = capitals.count() >= CAPITALS_MIN;
    let unknown = named(vocab, [vocab.unknown, None], "[UNK]")?;
    let cls = named(vocab, [vocab.cls, vocab.bos], "[CLS]")?;
    let sep = named(vocab, [vocab.sep, vocab.eos], "[SEP]")?;
    Ok(json!({
        "added_tokens": added(vocab),
        // The file does not contain whether text is lowercased. Single pieces with capitals, such as `<S>`, are also in lowercase
        // vocabularies.
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
            "lowercase": !cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "cls": cls, "sep": sep},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {
            "type": "WordPiece", "unk_token": unknown[0], "continuing_subword_prefix": "##",
            "max_input_chars_per_word": WORD_CHARS_MAX, "vocab": pieces,
        },
    }))
}

/// Returns XLM-RoBERTa's description: the most likely pieces of SentencePiece.
fn unigram(vocab: &GgufVocab) -> Result<Value, TextError> {
    if vocab.scores.is_empty() {
        return Err(TextError::BadTokenizer("a t5 vocabulary without scores".to_owned()));
    }
    let pieces = vocab.tokens.iter().zip(&vocab.scores).map(|(token, score)| json!([token, f64::from(*score)]));
    let pieces: Vec<Value> = pieces.collect();
    let unknown = named(vocab, [vocab.unknown, None], "<unk>")?;
    let cls = named(vocab, [vocab.cls, vocab.bos], "<s>")?;
    let sep = named(vocab, [vocab.sep, vocab.eos], "</s>")?;
    let scheme = if vocab.add_space_prefix == Some(false) { "never" } else { "always" };
    let spaces = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let words = match vocab.remove_extra_whitespaces {
        Some(false) => spaces.clone(),
        _ => json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces.clone()]}),
    };
    let normalizer = match vocab.charsmap.as_slice() {
        [] => Value::Null,
        charsmap => json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(charsmap)}),
    };
    Ok(json!({
        "added_tokens": added(vocab),
        "normalizer": normalizer,
        "pre_tokenizer": words,
        "post_processor": {
            "type": "RobertaProcessing", "cls": cls, "sep": sep, "trim_offsets": true, "add_prefix_space": false,
        },
        "decoder": spaces,
        "model": {"type": "Unigram", "unk_id": unknown[1], "byte_fallback": false, "vocab": pieces},
    }))
}

/// Returns a piece in WordPiece's spelling. The mark alone is a piece for words with that character, since no word is empty. Bracketed
/// names are never pieces of words; old files contain them unchanged.
fn of_piece(token: &str) -> String {
    match token.strip_prefix('▁') {
        Some(beginning) if !beginning.is_empty() => beginning.to_owned(),
        _ if is_bracketed(token) => token.to_owned(),
        _ => format!("##{token}"),
    }
}

/// Whether a name has brackets, as in `[CLS]`.
fn is_bracketed(name: &str) -> bool {
    name.len() > 2 && name.starts_with('[') && name.ends_with(']')
}

/// The tokens that are matched in the text before all other steps.
fn added(vocab: &GgufVocab) -> Vec<Value> {
    let token = |(id, content): (usize, &String)| {
        let kind = type_of(vocab, id);
        matches!(kind, TYPE_UNKNOWN | TYPE_CONTROL | TYPE_USER_DEFINED).then(|| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": kind != TYPE_USER_DEFINED,
            })
        })
    };
    vocab.tokens.iter().enumerate().filter_map(token).collect()
}

/// Returns a token's name and its id: the first id of `ids`, or else the id of the token called `name`.
fn named(vocab: &GgufVocab, ids: [Option<u32>; 2], name: &str) -> Result<[Value; 2], TextError> {
    let id = ids.into_iter().flatten().next().map(|id| id as usize);
    let id = id.or_else(|| vocab.tokens.iter().position(|token| token == name));
    let id = id.ok_or_else(|| TextError::BadTokenizer(format!("a {} vocabulary without {name}", vocab.model)))?;
    Ok([vocab.tokens[id].clone().into(), id.into()])
}
