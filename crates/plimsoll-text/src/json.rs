//! Builds a tokenizer from a `tokenizer.json`.
//!
//! The file describes a pipeline of named stages. If our pipeline supports every stage, the file runs there: with automata instead of
//! backtracking, and in memory that is bounded by the text. All other files run in `foreign`. Decoding is read here for both, since it must
//! be a table. The files beside it (`tokenizer_config.json` and others) are read in `neighbours`.

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

/// The largest `tokenizer.json` that is read, in bytes. The largest known files have 35 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// The largest id in a file, independently of its number of tokens. It is checked before a table of that length is allocated.
const ID_MAX: u64 = 1 << 24;
/// The factor on the number of tokens that, with [`HOLES_MAX`] added, gives the largest id. Models leave holes in the ids, but a short file
/// must not make a long table.
const IDS_PER_TOKEN: u64 = 8;
const HOLES_MAX: u64 = 1 << 16;

/// The vocabulary of a model of any type.
#[derive(Deserialize)]
struct AnyModel {
    vocab: AnyVocab,
}

enum AnyVocab {
    Ids(HashMap<String, u32>),
    Scores(Vec<(String, f64)>),
}

/// Implemented by hand: serde's `untagged` buffers the vocabulary first, and cannot buffer scores without losing digits.
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
    /// Loads a `tokenizer.json`. For the beginning and end tokens it also reads the files beside it, if they exist:
    /// `tokenizer_config.json`, `special_tokens_map.json`, `config.json` and `generation_config.json`.
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

    /// Loads a `tokenizer.json` from memory.
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

/// Builds the table of the model's tokens and the added ones.
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
