//! A `tokenizer.json` becomes a tokenizer.
//!
//! The file describes a pipeline of named stages. Where every stage is one that our own pipeline has, it runs there: in memory
//! that is bounded by the text and with automata instead of backtracking. Everything else goes to `foreign`. How
//! tokens turn back into text is decided here for both, since that must be a table. The files beside it
//! (`tokenizer_config.json` and others) are read in `neighbours`.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

use crate::charsmap;
use crate::error::TextError;
use crate::foreign::Foreign;
use crate::json_decoder::Decoding;
use crate::json_description::{Added, Description};
use crate::json_pipeline;
use crate::neighbours::{self, Neighbours};
use crate::pair::Pairing;
use crate::post_processor::surroundings;
use crate::table::{Kind, Row, TokenTable};
use crate::tokenizer::{Engine, Parts, Tokenizer};

/// The largest `tokenizer.json` that is read, in bytes; the largest known ones have 35 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// The largest id that a file may name, whatever it lists: a check before a table of that length is made.
const ID_MAX: u64 = 1 << 24;
/// The largest for each token that it lists, and how many more there may be: models leave holes, and a short file must not stand for a
/// long table.
const IDS_PER_TOKEN: u64 = 8;
const HOLES_MAX: u64 = 1 << 16;

/// The vocabulary alone, whatever the model.
#[derive(Deserialize)]
struct AnyModel {
    vocab: AnyVocab,
}

enum AnyVocab {
    Ids(HashMap<String, u32>),
    Scores(Vec<(String, f64)>),
}

/// By hand: serde's `untagged` buffers the vocabulary first, and cannot buffer scores that keep their digits.
impl<'de> Deserialize<'de> for AnyVocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabVisitor)
    }
}

struct VocabVisitor;

impl<'de> Visitor<'de> for VocabVisitor {
    type Value = AnyVocab;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a vocabulary: an object of ids or a list of tokens and scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<AnyVocab, A::Error> {
        Deserialize::deserialize(MapAccessDeserializer::new(map)).map(AnyVocab::Ids)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<AnyVocab, A::Error> {
        Deserialize::deserialize(SeqAccessDeserializer::new(seq)).map(AnyVocab::Scores)
    }
}

impl Tokenizer {
    /// Loads a `tokenizer.json`, and beside it, where they exist, `tokenizer_config.json`, `special_tokens_map.json`, `config.json`
    /// and `generation_config.json` for the beginning and end tokens.
    ///
    /// # Errors
    ///
    /// [`TextError::Io`] and [`TextError::FileTooLarge`] for the files, [`TextError::BadTokenizer`] and
    /// [`TextError::Unsupported`] for their content.
    pub fn from_file(tokenizer_json: &Path) -> Result<Self, TextError> {
        let bytes = neighbours::read(tokenizer_json, FILE_BYTES_MAX)?;
        let folder = tokenizer_json.parent().unwrap_or(Path::new("."));
        Self::from_json(&bytes, &Neighbours::read(folder)?)
    }

    /// Loads a `tokenizer.json` held in memory.
    pub(crate) fn from_json(json: &[u8], neighbours: &Neighbours) -> Result<Self, TextError> {
        let bad = |error: serde_json::Error| TextError::BadTokenizer(error.to_string());
        let description: Description = serde_json::from_slice(json).map_err(bad)?;
        let model: AnyModel = serde_json::from_str(description.model.get()).map_err(bad)?;
        let decoding = Decoding::new(&description.decoder)?;
        let table = table(model.vocab, &description.added_tokens, &decoding)?;
        let engine = match json_pipeline::own(&description, &table)? {
            Some(pipeline) => Engine::Own(Box::new(pipeline)),
            None => {
                charsmap::check_all(&description.normalizer)?;
                let load = || Foreign::new(json);
                Engine::Foreign(Box::new(crate::error::shielded(TextError::BadTokenizer, load)?))
            }
        };
        let bos = neighbours.bos(&table);
        let eos = neighbours.eos(&table);
        let (prefix, suffix) = surroundings(&description.post_processor, &table)?;
        let pairing = Pairing::new(&description.post_processor, &table)?;
        let main_eos = neighbours.main_eos(&table);
        Ok(Self::new(Parts {
            prefix: neighbours.override_bos(prefix, bos),
            suffix: neighbours.override_eos(suffix, main_eos),
            pairing,
            opening: decoding.opening,
            table,
            engine,
            bos,
            eos,
        }))
    }
}

/// The table of the model's tokens and the added ones.
fn table(vocab: AnyVocab, added: &[Added], decoding: &Decoding) -> Result<TokenTable, TextError> {
    let ids: Vec<(String, u32)> = match vocab {
        AnyVocab::Ids(ids) => ids.into_iter().collect(),
        AnyVocab::Scores(scores) => {
            let ids = 0..scores.len() as u32;
            scores.into_iter().map(|(name, _)| name).zip(ids).collect()
        }
    };
    let all = ids.iter().map(|&(_, id)| id).chain(added.iter().map(|a| a.id));
    let last = all.max().ok_or_else(|| TextError::BadTokenizer("no tokens".to_owned()))?;
    let listed = (ids.len() + added.len()) as u64;
    let most = (listed * IDS_PER_TOKEN + HOLES_MAX).min(ID_MAX);
    if u64::from(last) > most {
        let message = format!("token id {last}; of {listed} tokens the largest that can be loaded is {most}");
        return Err(TextError::BadTokenizer(message));
    }
    let mut rows: Vec<Option<(&str, Option<bool>)>> = vec![None; last as usize + 1];
    for (name, id) in &ids {
        rows[*id as usize] = Some((name, None));
    }
    for token in added {
        rows[token.id as usize] = Some((&token.content, Some(token.special)));
    }
    let mut table = TokenTable::with_capacity(rows.len());
    for row in rows {
        let (raw, text, kind) = match row {
            None => ("", Vec::new(), Kind::Hole),
            Some((raw, None)) => (raw, decoding.text(raw)?, Kind::Text),
            Some((raw, Some(special))) => {
                let kind = if special { Kind::Special } else { Kind::Text };
                (raw, decoding.added_text(raw)?, kind)
            }
        };
        table.push(Row { raw, text: &text, kind })?;
    }
    Ok(table)
}
