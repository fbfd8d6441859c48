//! The tokens of fill-in-the-middle: a model that was trained with them generates the text between two texts.
//!
//! A prompt is `prefix` text `suffix` text `middle`, in this order for every family below. GGUF files name the ids. For other files the
//! tokens are found by their names.

use crate::table::TokenTable;

/// The ids that a GGUF file names; fields are named after their keys, `tokenizer.ggml.fim_…_token_id`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FimIds {
    /// `pre`: precedes the text before the gap.
    pub prefix: Option<u32>,
    /// `suf`: precedes the text after the gap.
    pub suffix: Option<u32>,
    /// `mid`: precedes the text in the gap.
    pub middle: Option<u32>,
    /// `pad`: fills batches of training.
    pub pad: Option<u32>,
    /// `rep`: precedes a repository's name.
    pub repository: Option<u32>,
    /// `sep`: precedes a file's name.
    pub separator: Option<u32>,
}

/// The tokens of a model that fills gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FimTokens {
    /// Precedes the text before the gap.
    pub prefix: u32,
    /// Precedes the text after the gap.
    pub suffix: u32,
    /// Precedes the text in the gap.
    pub middle: u32,
    /// The tokens before a repository's name and before a file's name; none for a model without prompts of several files.
    pub files: Option<(u32, u32)>,
    /// Tokens that end the text in the gap, besides the model's usual end tokens.
    pub ends: Vec<u32>,
}

/// The names of each family's tokens: prefix, suffix, middle, pad, repository, separator; empty if the family has none.
const SPELLINGS: [[&str; 6]; 6] = [
    // Qwen2.5-Coder, and CodeGemma, which has no repositories.
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
    // StarCoder2, Granite.
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<repo_name>", "<file_sep>"],
    // SantaCoder, and StarCoder, which has other names for files.
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>", "", ""],
    // DeepSeek-Coder: the hole is between the two texts.
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "", "", ""],
    // CodeLlama, as its tokenizer and as some files write the names.
    ["▁<PRE>", "▁<SUF>", "▁<MID>", "", "", ""],
    ["<PRE>", "<SUF>", "<MID>", "", "", ""],
];

/// The names of tokens that end the text of a gap: CodeLlama's end, and the end of a file.
const ENDS: [&str; 4] = ["▁<EOT>", "<EOT>", "<|endoftext|>", "<|file_separator|>"];

impl FimTokens {
    /// Returns the tokens that `ids` has, or else those with known names in the vocabulary. None for a model that fills no gaps.
    pub(crate) fn find(table: &TokenTable, ids: FimIds) -> Option<Self> {
        let spelled = || SPELLINGS.iter().map(|names| spelled(table, names)).find(|ids| required(ids).is_some());
        let ids = if required(&ids).is_some() { ids } else { spelled()? };
        let (prefix, suffix, middle) = required(&ids)?;
        let named = ENDS.iter().filter_map(|name| table.id_of(name));
        let mut ends: Vec<u32> = [ids.pad, ids.repository, ids.separator].into_iter().flatten().chain(named).collect();
        ends.sort_unstable();
        ends.dedup();
        Some(Self { prefix, suffix, middle, files: ids.repository.zip(ids.separator), ends })
    }
}

fn required(ids: &FimIds) -> Option<(u32, u32, u32)> {
    Some((ids.prefix?, ids.suffix?, ids.middle?))
}

fn spelled(table: &TokenTable, names: &[&str; 6]) -> FimIds {
    let [prefix, suffix, middle, pad, repository, separator] = names.map(|name| table.id_of(name));
    FimIds { prefix, suffix, middle, pad, repository, separator }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GgufVocab, Tokenizer};

    fn vocab(specials: &[&str]) -> GgufVocab {
        let tokens: Vec<String> = ["a", "b"].iter().chain(specials).map(|token| (*token).to_owned()).collect();
        let token_types = (0..tokens.len()).map(|id| if id < 2 { 1 } else { 3 }).collect();
        GgufVocab { model: "gpt2".into(), pre: "gpt-2".into(), tokens, token_types, ..GgufVocab::default() }
    }

    fn found(vocab: &GgufVocab) -> Option<FimTokens> {
        Tokenizer::from_gguf(vocab).unwrap().fim().cloned()
    }

    #[test]
    fn each_familys_spelling_is_found() {
        for names in SPELLINGS {
            let given: Vec<&str> = names.into_iter().filter(|name| !name.is_empty()).collect();
            let fim = found(&vocab(&given)).unwrap();
            assert_eq!((fim.prefix, fim.suffix, fim.middle), (2, 3, 4), "{names:?}");
            assert_eq!(fim.files, given.get(5).map(|_| (6, 7)), "{names:?}");
            assert_eq!(
                fim.ends,
                (5..2 + given.len() as u32).collect::<Vec<_>>(),
                "pad, repository and separator end a gap"
            );
        }
        assert_eq!(found(&vocab(&["<|fim_prefix|>", "<|fim_suffix|>"])), None, "one is missing");
        assert_eq!(found(&vocab(&[])), None);
    }

    #[test]
    fn the_files_keys_win_over_spellings() {
        let mut vocab =
            vocab(&["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<A>", "<B>", "<C>", "<|endoftext|>"]);
        vocab.fim = FimIds { prefix: Some(5), suffix: Some(6), middle: Some(7), ..FimIds::default() };
        let fim = found(&vocab).unwrap();
        assert_eq!((fim.prefix, fim.suffix, fim.middle, fim.files), (5, 6, 7, None));
        assert_eq!(fim.ends, [8]);
        // Keys without a middle are ignored.
        vocab.fim.middle = None;
        assert_eq!(found(&vocab).unwrap().prefix, 2);
    }
}
