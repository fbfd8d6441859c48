//! Builds a tokenizer from a GGUF file's vocabulary.
//!
//! The families of files are `gpt2` (byte-level BPE with merges), `llama` (SentencePiece BPE with scores) and `gemma4` (SentencePiece
//! pieces with merges); `gguf_library` has the families of text encoders. Ids must equal those of the tools that made the files. The caller
//! reads the metadata from the file into a [`GgufVocab`].

use crate::bpe::{Alphabet, Bpe, Merges, ranked_merges};
use crate::byte_level::{self, byte_token};
use crate::error::TextError;
use crate::gguf_library;
use crate::gguf_vocab::{
    GgufVocab, TYPE_BYTE, TYPE_CONTROL, TYPE_UNKNOWN, TYPE_UNUSED, TYPE_USER_DEFINED, check, type_of,
};
use crate::normalize::{Normalizer, PrefixSpace};
use crate::pair::Pairing;
use crate::pattern_names::{self, Recipe};
use crate::pretokenize::Cutter;
use crate::specials::{Special, Specials};
use crate::table::{Kind, NONE, Opening, Row, TokenTable};
use crate::tokenizer::{Engine, Parts, Pipeline, Tokenizer};

/// Names of tokens that end a turn, if they are control tokens. Files name one end token; chat models use two or three.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<eos>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<EOT>",
    "[EOT]",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
];

impl Tokenizer {
    /// Builds the tokenizer of a GGUF file.
    ///
    /// # Errors
    ///
    /// [`TextError::Unsupported`] for an unknown family, [`TextError::UnknownPreTokenizer`] for an unknown pre-tokenizer, and
    /// [`TextError::BadTokenizer`] if the lists do not fit together.
    pub fn from_gguf(vocab: &GgufVocab) -> Result<Self, TextError> {
        check(vocab)?;
        if let Some(tokenizer) = gguf_library::of(vocab)? {
            return Ok(tokenizer);
        }
        let family = Family::of(vocab)?;
        let table = table(vocab, &family)?;
        let bpe = Bpe {
            alphabet: alphabet(vocab, &family, &table),
            merges: match family.ranks {
                Ranks::Merges => listed_merges(vocab, &table)?,
                Ranks::Scores => scored_merges(vocab, &table)?,
            },
            unknown: vocab.unknown,
            fuse_unknown: false,
            whole_words_first: family.recipe.whole_words_first,
        };
        let pipeline = Pipeline {
            specials: Specials::new(specials(vocab))?,
            normalizer: Normalizer { nfc: family.recipe.nfc, escape_spaces: family.escape_spaces },
            cutter: Cutter::new(family.recipe.patterns.iter().copied())?,
            bpe,
        };
        let add_bos = vocab.add_bos.unwrap_or(family.recipe.add_bos);
        let opening = match family.escape_spaces {
            None | Some(PrefixSpace::Never) => Opening::Plain,
            Some(_) => Opening::StripSpace,
        };
        let prefix: Vec<u32> = vocab.bos.filter(|_| add_bos).into_iter().collect();
        let suffix: Vec<u32> = vocab.eos.filter(|_| vocab.add_eos == Some(true)).into_iter().collect();
        let separator = vocab.sep.filter(|_| vocab.add_sep == Some(true));
        let separators = |separator| vec![separator; if vocab.pre == "roberta-bpe" { 2 } else { 1 }];
        Ok(Self::new(Parts {
            eos: end_tokens(vocab, &table),
            table,
            engine: Engine::Own(Box::new(pipeline)),
            opening,
            pairing: separator.map(|separator| Pairing::around(prefix.clone(), separators(separator), suffix.clone())),
            prefix,
            suffix,
            bos: vocab.bos,
        })
        .with_fim(vocab.fim))
    }
}

/// The source of the ranks of merges.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ranks {
    Merges,
    Scores,
}

/// The properties that the family's name determines.
struct Family {
    byte_level: bool,
    ranks: Ranks,
    escape_spaces: Option<PrefixSpace>,
    recipe: Recipe,
}

impl Family {
    fn of(vocab: &GgufVocab) -> Result<Self, TextError> {
        let no_patterns = Recipe { patterns: &[], whole_words_first: false, add_bos: true, nfc: false };
        let prefix = |default: bool| {
            Some(if vocab.add_space_prefix.unwrap_or(default) { PrefixSpace::Always } else { PrefixSpace::Never })
        };
        match vocab.model.as_str() {
            "gpt2" => Ok(Self {
                byte_level: true,
                ranks: Ranks::Merges,
                escape_spaces: None,
                recipe: pattern_names::recipe(&vocab.pre)?,
            }),
            "llama" => {
                Ok(Self { byte_level: false, ranks: Ranks::Scores, escape_spaces: prefix(true), recipe: no_patterns })
            }
            "gemma4" => Ok(Self {
                byte_level: false,
                ranks: Ranks::Merges,
                escape_spaces: prefix(false),
                recipe: Recipe { patterns: &[r"[^\n]+|\n+"], ..no_patterns },
            }),
            other => Err(TextError::Unsupported(format!(
                "GGUF tokenizer model {other:?}; known are: gpt2, llama, gemma4, bert, t5"
            ))),
        }
    }
}

fn table(vocab: &GgufVocab, family: &Family) -> Result<TokenTable, TextError> {
    let mut table = TokenTable::with_capacity(vocab.tokens.len());
    for (id, raw) in vocab.tokens.iter().enumerate() {
        let (kind, text) = match type_of(vocab, id) {
            TYPE_UNUSED => (Kind::Hole, Vec::new()),
            TYPE_UNKNOWN | TYPE_CONTROL => (Kind::Special, raw.clone().into_bytes()),
            TYPE_USER_DEFINED if family.byte_level => (Kind::Text, raw.clone().into_bytes()),
            _ if family.byte_level => {
                let bytes = byte_level::decode(raw);
                (Kind::Text, bytes.unwrap_or_else(|| raw.clone().into_bytes()))
            }
            kind => match byte_token(raw) {
                Some(byte) if kind == TYPE_BYTE => (Kind::Text, vec![byte]),
                _ => (Kind::Text, raw.replace('▁', " ").into_bytes()),
            },
        };
        table.push(Row { raw, text: &text, kind })?;
    }
    Ok(table)
}

/// The tokens that are matched in the text before all other steps.
fn specials(vocab: &GgufVocab) -> Vec<Special> {
    let token = |(id, content): (usize, &String)| {
        let kind = type_of(vocab, id);
        matches!(kind, TYPE_UNKNOWN | TYPE_CONTROL | TYPE_USER_DEFINED).then(|| Special {
            content: content.clone(),
            id: id as u32,
            control: kind != TYPE_USER_DEFINED,
            strip_left: false,
            strip_right: false,
        })
    };
    vocab.tokens.iter().enumerate().filter_map(token).collect()
}

fn alphabet(vocab: &GgufVocab, family: &Family, table: &TokenTable) -> Alphabet {
    let mut ids = Box::new([NONE; 256]);
    if family.byte_level {
        let mut buffer = [0; 4];
        for byte in 0..=u8::MAX {
            let name = byte_level::byte_to_char(byte).encode_utf8(&mut buffer);
            ids[usize::from(byte)] = table.id_of(name).unwrap_or(NONE);
        }
        return Alphabet::Bytes(ids);
    }
    for (id, name) in vocab.tokens.iter().enumerate() {
        if let Some(byte) = byte_token(name) {
            ids[usize::from(byte)] = id as u32;
        }
    }
    let complete = !ids.contains(&NONE);
    Alphabet::Chars { fallback: complete.then_some(ids) }
}

/// The merges in the file's order.
fn listed_merges(vocab: &GgufVocab, table: &TokenTable) -> Result<Merges, TextError> {
    let pairs = vocab.merges.iter().map(|line| {
        // A token may begin with the separator, so the search starts after the first character.
        let skip = line.chars().next().map_or(0, char::len_utf8);
        line[skip..]
            .find(' ')
            .map(|at| (&line[..skip + at], &line[skip + at + 1..]))
            .ok_or_else(|| TextError::BadTokenizer(format!("merge {line:?} has no two parts")))
    });
    ranked_merges(pairs, vocab.merges.len(), table)
}

/// The merges that follow from scores. Two pieces may join if their concatenation is a piece; a higher score merges earlier.
fn scored_merges(vocab: &GgufVocab, table: &TokenTable) -> Result<Merges, TextError> {
    if vocab.scores.is_empty() {
        return Err(TextError::BadTokenizer("a llama vocabulary without scores".to_owned()));
    }
    let ranks = ranks_of_scores(&vocab.scores);
    let mut merges = Merges::with_capacity(vocab.tokens.len());
    for (id, name) in vocab.tokens.iter().enumerate() {
        // Control tokens never result from text, bytes are not merged, and only the first of two equal names is used.
        let kind = type_of(vocab, id);
        let excluded = matches!(kind, TYPE_UNKNOWN | TYPE_CONTROL | TYPE_UNUSED | TYPE_BYTE);
        if excluded || table.id_of(name) != Some(id as u32) {
            continue;
        }
        for (cut, _) in name.char_indices().skip(1) {
            if let Some(left) = table.id_of(&name[..cut])
                && let Some(right) = table.id_of(&name[cut..])
            {
                merges.insert(left, right, ranks[id], id as u32);
            }
        }
    }
    Ok(merges)
}

/// The rank of each score. Equal scores share a rank, and the highest score has rank 0.
fn ranks_of_scores(scores: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    let score = |id: u32| scores[id as usize];
    order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
    let mut ranks = vec![0; scores.len()];
    let mut rank = 0;
    for (index, &id) in order.iter().enumerate() {
        if index > 0 && score(order[index - 1]) != score(id) {
            rank += 1;
        }
        ranks[id as usize] = rank;
    }
    ranks
}

/// The end tokens: the file's first, then further ones that the caller lists, then those with well-known names.
fn end_tokens(vocab: &GgufVocab, table: &TokenTable) -> Vec<u32> {
    // In the harmony format `<|end|>` ends one of several messages; `<|return|>` and `<|call|>` end the turn.
    let harmony = table.id_of("<|return|>").is_some();
    let known = END_NAMES
        .iter()
        .filter(|name| !(harmony && **name == "<|end|>"))
        .filter_map(|name| table.id_of(name))
        .filter(|&id| table.kind(id) == Kind::Special);
    let mut out = Vec::new();
    for id in vocab.eos.into_iter().chain(vocab.extra_eos.iter().copied()).chain(known) {
        if !out.contains(&id) {
            out.push(id);
        }
    }
    out
}
