//! The `post_processor` stage of a `tokenizer.json`: the special tokens around a single text.

use serde_json::Value;

use crate::error::TextError;
use crate::table::TokenTable;

/// The tokens that the post-processor puts before and after a single text.
pub(crate) fn surroundings(stage: &Value, table: &TokenTable) -> Result<(Vec<u32>, Vec<u32>), TextError> {
    let (mut before, mut after) = (Vec::new(), Vec::new());
    match stage["type"].as_str() {
        Some("Sequence") => {
            for part in stage["processors"].as_array().into_iter().flatten() {
                let (outer_before, outer_after) = surroundings(part, table)?;
                before.splice(0..0, outer_before);
                after.extend(outer_after);
            }
        }
        Some("TemplateProcessing") => {
            let mut seen_text = false;
            for item in stage["single"].as_array().into_iter().flatten() {
                if item.get("Sequence").is_some() {
                    seen_text = true;
                } else if let Some(name) = item["SpecialToken"]["id"].as_str() {
                    let side = if seen_text { &mut after } else { &mut before };
                    side.extend(template_ids(stage, name, table)?);
                }
            }
        }
        Some("BertProcessing" | "RobertaProcessing") => {
            let id = |key: &str| stage[key][1].as_u64().and_then(|id| u32::try_from(id).ok());
            before.extend(id("cls"));
            after.extend(id("sep"));
        }
        _ => {}
    }
    Ok((before, after))
}

/// The ids of a special token that a template names.
pub(crate) fn template_ids(stage: &Value, name: &str, table: &TokenTable) -> Result<Vec<u32>, TextError> {
    let listed = stage["special_tokens"][name]["ids"].as_array();
    let ids: Option<Vec<u32>> = match listed {
        Some(ids) => ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect(),
        None => table.id_of(name).map(|id| vec![id]),
    };
    ids.filter(|ids| ids.iter().all(|&id| (id as usize) < table.len()))
        .ok_or_else(|| TextError::BadTokenizer(format!("the template's token {name:?} has no id")))
}
