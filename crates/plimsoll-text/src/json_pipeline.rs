//! The encoding stages of a `tokenizer.json`, recognised one by one.
//!
//! [`own`] returns our pipeline if it does exactly what the file describes, and none if a stage is unknown. The library then runs the file.
//! A known stage that is malformed is always an error.

use serde::Deserialize;
use serde_json::Value;

use crate::bpe::{Alphabet, Bpe, Merges, ranked_merges};
use crate::byte_level;
use crate::error::TextError;
use crate::json_description::{Added, Description};
use crate::normalize::{Normalizer, PrefixSpace};
use crate::pattern_names::GPT2;
use crate::pretokenize::Cutter;
use crate::specials::{Special, Specials};
use crate::table::{NONE, TokenTable};
use crate::tokenizer::Pipeline;

/// A BPE model of the file, without its vocabulary.
#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    merges: Vec<Pair>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// A merge in the old or the new format.
#[derive(Deserialize)]
#[serde(untagged)]
enum Pair {
    Joined(String),
    Parts(String, String),
}

impl Pair {
    fn parts(&self) -> Result<(&str, &str), TextError> {
        match self {
            Self::Parts(left, right) => Ok((left, right)),
            Self::Joined(line) => {
                line.split_once(' ').ok_or_else(|| TextError::BadTokenizer(format!("merge {line:?} has no two parts")))
            }
        }
    }
}

/// The recognised stages before BPE.
struct Stages {
    normalizer: Normalizer,
    patterns: Vec<String>,
    byte_level: bool,
}

/// Returns our pipeline for the file, if every stage is known.
pub(crate) fn own(description: &Description<'_>, table: &TokenTable) -> Result<Option<Pipeline>, TextError> {
    let Ok(model) = serde_json::from_str::<Model>(description.model.get()) else {
        return Ok(None);
    };
    let plain = |affix: &Option<String>| affix.as_deref().unwrap_or_default().is_empty();
    let bpe = model.kind.as_deref() == Some("BPE")
        && model.dropout.unwrap_or(0.0) == 0.0
        && plain(&model.continuing_subword_prefix)
        && plain(&model.end_of_word_suffix);
    if !bpe {
        return Ok(None);
    }
    let mut stages =
        Stages { normalizer: Normalizer { nfc: false, escape_spaces: None }, patterns: Vec::new(), byte_level: false };
    let known = stages.add_normalizer(&description.normalizer)
        && stages.add_pre_tokenizer(&description.pre_tokenizer)
        && description.added_tokens.iter().all(|a| stages.matches_literally(a));
    if !known {
        return Ok(None);
    }
    let cutter = match Cutter::new(stages.patterns.iter().map(String::as_str)) {
        Ok(cutter) => cutter,
        // The library may support this pattern.
        Err(TextError::Unsupported(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    let pipeline = Pipeline {
        specials: Specials::new(description.added_tokens.iter().map(special).collect())?,
        normalizer: stages.normalizer,
        cutter,
        bpe: Bpe {
            alphabet: alphabet(stages.byte_level, model.byte_fallback, table),
            merges: merges(&model.merges, table)?,
            unknown: model.unk_token.as_deref().and_then(|name| table.id_of(name)),
            fuse_unknown: model.fuse_unk,
            whole_words_first: model.ignore_merges,
        },
    };
    Ok(Some(pipeline))
}

impl Stages {
    /// Adds a normalizer. Returns `false` for an unknown one.
    fn add_normalizer(&mut self, stage: &Value) -> bool {
        let spaces = &mut self.normalizer.escape_spaces;
        match stage["type"].as_str() {
            None => stage.is_null(),
            Some("NFC") => {
                self.normalizer.nfc = true;
                spaces.is_none()
            }
            Some("Sequence") => {
                let parts = stage["normalizers"].as_array();
                parts.is_some_and(|parts| parts.iter().all(|part| self.add_normalizer(part)))
            }
            // The mark is added before spaces are replaced, so only this order is equal to our pipeline's.
            Some("Prepend") => {
                let first = spaces.replace(PrefixSpace::Always).is_none();
                first && stage["prepend"] == "▁"
            }
            Some("Replace") => {
                spaces.get_or_insert(PrefixSpace::Never);
                stage["pattern"]["String"] == " " && stage["content"] == "▁"
            }
            Some(_) => false,
        }
    }

    /// Adds a pre-tokenizer. Returns `false` for an unknown one.
    fn add_pre_tokenizer(&mut self, stage: &Value) -> bool {
        let kind = stage["type"].as_str();
        if self.byte_level && kind.is_some() {
            // A stage after the byte-level one would read that alphabet instead of text.
            return false;
        }
        match kind {
            None => stage.is_null(),
            Some("Sequence") => {
                let parts = stage["pretokenizers"].as_array();
                parts.is_some_and(|parts| parts.iter().all(|part| self.add_pre_tokenizer(part)))
            }
            Some("ByteLevel") => {
                self.byte_level = true;
                if stage["use_regex"] != false {
                    self.patterns.push(GPT2.to_owned());
                }
                stage["add_prefix_space"] == false
            }
            Some("Digits") => {
                let one = stage["individual_digits"] == true;
                let pattern = if one { r"\p{N}" } else { r"\p{N}+" };
                self.patterns.push(pattern.to_owned());
                true
            }
            Some("Split") => self.add_split(stage),
            Some("Metaspace") => self.add_metaspace(stage),
            Some(_) => false,
        }
    }

    fn add_split(&mut self, stage: &Value) -> bool {
        let pattern = &stage["pattern"];
        if pattern["String"] == " " && self.normalizer.escape_spaces.is_some() {
            // Gemma splits at spaces after all spaces are replaced, so this stage has no effect.
            return true;
        }
        let regex = match (pattern["Regex"].as_str(), pattern["String"].as_str()) {
            (Some(regex), None) => regex.to_owned(),
            (None, Some(text)) => regex::escape(text),
            _ => return false,
        };
        self.patterns.push(regex);
        stage["behavior"] == "Isolated" && stage["invert"] != true
    }

    fn add_metaspace(&mut self, stage: &Value) -> bool {
        let alone = self.patterns.is_empty() && self.normalizer.escape_spaces.is_none();
        let prefix = match stage["prepend_scheme"].as_str() {
            Some("never") => PrefixSpace::Never,
            Some("first") => PrefixSpace::FirstUnlessSpace,
            Some("always") | None if stage["add_prefix_space"] != false => PrefixSpace::AlwaysUnlessSpace,
            Some(_) => return false,
            None => PrefixSpace::Never,
        };
        self.normalizer.escape_spaces = Some(prefix);
        if stage["split"] != false {
            self.patterns.push("▁[^▁]*|[^▁]+".to_owned());
        }
        alone && stage["replacement"] == "▁"
    }

    /// Whether an added token is matched in the unchanged text, the only way that our pipeline supports.
    fn matches_literally(&self, added: &Added) -> bool {
        let changed = self.normalizer.escape_spaces.is_some();
        !(added.single_word || added.normalized && changed)
    }
}

fn special(added: &Added) -> Special {
    Special {
        content: added.content.clone(),
        id: added.id,
        control: added.special,
        strip_left: added.lstrip,
        strip_right: added.rstrip,
    }
}

fn alphabet(byte_level: bool, byte_fallback: bool, table: &TokenTable) -> Alphabet {
    let mut ids = Box::new([NONE; 256]);
    for byte in 0..=u8::MAX {
        let name = if byte_level { byte_level::byte_to_char(byte).to_string() } else { format!("<0x{byte:02X}>") };
        ids[usize::from(byte)] = table.id_of(&name).unwrap_or(NONE);
    }
    if byte_level {
        return Alphabet::Bytes(ids);
    }
    let complete = byte_fallback && !ids.contains(&NONE);
    Alphabet::Chars { fallback: complete.then_some(ids) }
}

fn merges(pairs: &[Pair], table: &TokenTable) -> Result<Merges, TextError> {
    ranked_merges(pairs.iter().map(Pair::parts), pairs.len(), table)
}
