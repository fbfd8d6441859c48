//! Two texts as one sequence for cross-encoders: the tokens before, between and after them.

use serde_json::Value;

use crate::error::TextError;
use crate::post_processor::template_ids;
use crate::table::TokenTable;

/// The tokens that a post-processor puts around and between the texts of a pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pairing {
    before: Vec<u32>,
    between: Vec<u32>,
    after: Vec<u32>,
    /// Whether the tokens of the second text, and the tokens after it, are of the second type.
    typed: bool,
}

/// A pair's ids, and the start of the second type, if there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The whole sequence.
    pub ids: Vec<u32>,
    /// Index of the first token of the second type.
    pub second_at: Option<usize>,
}

impl Pairing {
    /// Reads the post-processor. None if it does not define pairs.
    pub(crate) fn new(stage: &Value, table: &TokenTable) -> Result<Option<Self>, TextError> {
        match stage["type"].as_str() {
            Some("Sequence") => {
                for part in stage["processors"].as_array().into_iter().flatten() {
                    if let Some(pairing) = Self::new(part, table)? {
                        return Ok(Some(pairing));
                    }
                }
                Ok(None)
            }
            Some("TemplateProcessing") => Self::of_template(stage, table),
            Some(kind @ ("BertProcessing" | "RobertaProcessing")) => {
                let id = |key: &str| stage[key][1].as_u64().and_then(|id| u32::try_from(id).ok());
                let (Some(cls), Some(sep)) = (id("cls"), id("sep")) else { return Ok(None) };
                let roberta = kind == "RobertaProcessing";
                let between = vec![sep; if roberta { 2 } else { 1 }];
                Ok(Some(Self { before: vec![cls], between, after: vec![sep], typed: !roberta }))
            }
            _ => Ok(None),
        }
    }

    /// Returns the pairing of two texts with a beginning, separators between them, and an end.
    pub(crate) fn around(before: Vec<u32>, between: Vec<u32>, after: Vec<u32>) -> Self {
        Self { before, between, after, typed: false }
    }

    fn of_template(stage: &Value, table: &TokenTable) -> Result<Option<Self>, TextError> {
        let mut pairing = Self::default();
        let mut seen = Vec::new();
        for item in stage["pair"].as_array().into_iter().flatten() {
            if let Some(sequence) = item.get("Sequence") {
                seen.push(sequence["id"].as_str().unwrap_or_default());
                pairing.typed = sequence["type_id"] == 1;
            } else if let Some(name) = item["SpecialToken"]["id"].as_str() {
                let part = match seen.len() {
                    0 => &mut pairing.before,
                    1 => &mut pairing.between,
                    _ => &mut pairing.after,
                };
                part.extend(template_ids(stage, name, table)?);
            }
        }
        Ok((seen == ["A", "B"]).then_some(pairing))
    }

    pub(crate) fn join(&self, first: &[u32], second: &[u32]) -> Pair {
        let ids = [&self.before, first, &self.between, second, &self.after].concat();
        let second_at = self.before.len() + first.len() + self.between.len();
        Pair { ids, second_at: self.typed.then_some(second_at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pairing(stage: &Value) -> Option<Pairing> {
        Pairing::new(stage, &TokenTable::with_capacity(0)).unwrap()
    }

    #[test]
    fn bert_and_roberta_by_class() {
        let stage = |kind: &str| json!({"type": kind, "cls": ["a", 7], "sep": ["b", 9]});
        let bert = pairing(&stage("BertProcessing")).unwrap();
        assert_eq!(bert.join(&[1, 2], &[3]), Pair { ids: vec![7, 1, 2, 9, 3, 9], second_at: Some(4) });
        let nested = json!({"type": "Sequence", "processors": [{"type": "ByteLevel"}, stage("RobertaProcessing")]});
        let roberta = pairing(&nested).unwrap();
        assert_eq!(roberta.join(&[1], &[]), Pair { ids: vec![7, 1, 9, 9, 9], second_at: None });
    }

    #[test]
    fn templates_without_a_pair_have_none() {
        let only_a = json!([{"Sequence": {"id": "A", "type_id": 0}}]);
        assert_eq!(pairing(&json!({"type": "TemplateProcessing", "single": only_a, "pair": only_a})), None);
        assert_eq!(pairing(&json!({"type": "ByteLevel"})), None);
        assert_eq!(pairing(&Value::Null), None);
    }
}
