//! Items that are sent by their ids alone: clients whose responses are stored refer to the items in them.

use std::collections::HashMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::http::body::{PARSED_FACTOR, ReadBody};
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::{MAX_NODES, check_nodes, wrong};
use crate::state::model::ModelState;

/// Stored items, by their ids.
pub(super) type Stored = HashMap<String, Box<RawValue>>;

/// The fields that tell a reference from an item.
#[derive(Deserialize)]
struct Head {
    #[serde(rename = "type")]
    kind: Option<String>,
    id: Option<String>,
    role: Option<IgnoredAny>,
}

/// Returns whether an item is a reference: by its type, or by an id without type and role.
pub(super) fn refers(kind: Option<&str>, has_id: bool, has_role: bool) -> bool {
    kind == Some("item_reference") || kind.is_none() && has_id && !has_role
}

/// Returns the stored items that the input refers to. If several items have the same id, the one of the most recently used response counts.
/// Parsing the input later reports a missing item as an error.
pub(super) fn referred(
    state: &ModelState,
    key: Option<usize>,
    body: &mut ReadBody,
    input: &RawValue,
) -> ApiResult<Stored> {
    let mut found = Stored::new();
    if !input.get().starts_with('[') || !input.get().contains("\"id\"") {
        return Ok(found);
    }
    check_nodes("input", input.get(), MAX_NODES)?;
    let list: Vec<&RawValue> = serde_json::from_str(input.get()).map_err(|e| wrong("input", &e))?;
    let mut times: HashMap<String, u64> = HashMap::new();
    for raw in list {
        // A value that is not an item is refused later, when the input is parsed.
        let Ok(Head { kind, id: Some(id), role }) = serde_json::from_str(raw.get()) else { continue };
        if refers(kind.as_deref(), true, role.is_some()) {
            *times.entry(id).or_default() += 1;
        }
    }
    if !times.is_empty() {
        find(state, key, body, &times, &mut found)?;
    }
    // Each stored item is parsed like a part of the body as often as it is named, and charged like one.
    let bytes = found.iter().map(|(id, item)| times.get(id).unwrap_or(&1) * item.get().len() as u64).sum::<u64>();
    body.held.grow_for("input", bytes * PARSED_FACTOR)?;
    Ok(found)
}

/// Looks for items in the outputs and inputs of this key's responses.
fn find(
    state: &ModelState,
    key: Option<usize>,
    body: &mut ReadBody,
    wanted: &HashMap<String, u64>,
    found: &mut Stored,
) -> ApiResult<()> {
    let (mut at, mut used) = (None, Vec::new());
    while let Some((used_at, name, kept)) =
        state.server.responses.before(at, key).filter(|_| found.len() < wanted.len())
    {
        let before = found.len();
        for list in [kept.output()?, &kept.items] {
            each(list, |item| {
                let Ok(Head { id: Some(id), .. }) = serde_json::from_str(item.get()) else { return Ok(()) };
                if !wanted.contains_key(&id) || found.contains_key(&id) {
                    return Ok(());
                }
                body.held.grow_for("input", item.get().len() as u64)?;
                found.insert(id, item.to_owned());
                Ok(())
            })?;
        }
        if found.len() > before {
            used.push(name);
        }
        at = Some(used_at);
    }
    // A reference to a response is a use of it. The newest comes last, which keeps the order of use.
    for name in used.iter().rev() {
        state.server.responses.get(name, key);
    }
    Ok(())
}

/// Calls `take` with each item of a stored list. Nothing is copied.
fn each<'t>(mut rest: &'t str, mut take: impl FnMut(&'t RawValue) -> ApiResult<()>) -> ApiResult<()> {
    while !rest.is_empty() {
        let mut items = serde_json::Deserializer::from_str(rest).into_iter::<&RawValue>();
        let Some(Ok(item)) = items.next() else { return Err(super::broken()) };
        take(item)?;
        rest = rest[items.byte_offset()..].trim_start_matches(',');
    }
    Ok(())
}

/// Returns the error for a reference at `param` to an item that is not stored.
pub(super) fn missing(state: &ModelState, param: String, id: &str) -> ApiError {
    let id = crate::http::error::quote(id);
    let message = match state.server.responses.is_on() {
        true => format!("{param}: no item `{id}` is stored here; it may have been dropped"),
        false => format!("{param}: no item `{id}`: this server keeps no responses (--response-store-bytes 0)"),
    };
    ApiError { code: Some("item_not_found"), ..ApiError::invalid(param, message) }
}
