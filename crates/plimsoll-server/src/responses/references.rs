//! Items that are sent by their ids alone: clients that let responses be stored refer to what those have in them.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::app::App;
use crate::config::PARSED_FACTOR;
use crate::error::{ApiError, ApiResult, quote};
use crate::fields::{Fields, MAX_NODES, check_nodes, wrong};
use crate::limits::ReadBody;

/// What ids of items are found by.
#[derive(Deserialize)]
struct Named {
    id: Option<String>,
}

/// An item, or the id of one that is stored.
enum Sent<'a> {
    Whole(&'a RawValue),
    Stored(String),
}

/// The input with stored items where it names them by their ids; none where it names none. Of items with the same id the one of the
/// response that was used last is meant.
pub(super) fn resolved(
    app: &App,
    key: Option<usize>,
    body: &mut ReadBody,
    input: &RawValue,
) -> ApiResult<Option<Box<RawValue>>> {
    if !input.get().starts_with('[') {
        return Ok(None);
    }
    check_nodes("input", input.get(), MAX_NODES)?;
    let list: Vec<&RawValue> = serde_json::from_str(input.get()).map_err(|e| wrong("input", &e))?;
    let list = list.into_iter().enumerate().map(|(i, raw)| sent(i, raw)).collect::<ApiResult<Vec<_>>>()?;
    let ids = list.iter().filter_map(|sent| if let Sent::Stored(id) = sent { Some((id.as_str(), None)) } else { None });
    let mut found: HashMap<&str, Option<String>> = ids.collect();
    if found.is_empty() {
        return Ok(None);
    }
    find(app, key, body, &mut found)?;
    let mut text = String::from("[");
    for (i, sent) in list.iter().enumerate() {
        let item = match sent {
            Sent::Whole(raw) => raw.get(),
            Sent::Stored(id) => found.get(id.as_str()).and_then(Option::as_deref).ok_or_else(|| {
                let message =
                    format!("input[{i}].id: no item `{}` is stored here; it may have been dropped", quote(id));
                ApiError { code: Some("item_not_found"), ..ApiError::invalid(format!("input[{i}].id"), message) }
            })?,
        };
        hold(app, body, item.len())?;
        if i > 0 {
            text.push(',');
        }
        text.push_str(item);
    }
    text.push(']');
    RawValue::from_string(text).map(Some).map_err(|e| wrong("input", &e))
}

/// A reference says so by its type, or by having nothing but an id.
fn sent(i: usize, raw: &RawValue) -> ApiResult<Sent<'_>> {
    let path = format!("input[{i}]");
    let mut fields = Fields::of(path.clone(), raw)?;
    let kind = fields.take::<String>("type")?;
    let refers = kind.as_deref() == Some("item_reference") || kind.is_none() && fields.has("id") && !fields.has("role");
    if !refers {
        return Ok(Sent::Whole(raw));
    }
    let id = fields.required::<String>("id")?;
    fields.finish()?;
    Ok(Sent::Stored(id))
}

/// Looks for items in what the responses of this key have put out, and in what they were asked.
fn find(
    app: &App,
    key: Option<usize>,
    body: &mut ReadBody,
    wanted: &mut HashMap<&str, Option<String>>,
) -> ApiResult<()> {
    let mut missing = wanted.len();
    for kept in app.responses.all(key) {
        // As where these are listed.
        let _held = app.bytes.hold(3 * (kept.response.len() + kept.items.len()) as u64)?;
        let asked = format!("[{}]", kept.items);
        for list in [kept.output()?, asked.as_str()] {
            let items: Vec<&RawValue> =
                serde_json::from_str(list).map_err(|_| ApiError::internal("a stored response cannot be read"))?;
            for item in items {
                let Ok(Named { id: Some(id) }) = serde_json::from_str(item.get()) else { continue };
                let Some(place) = wanted.get_mut(id.as_str()).filter(|place| place.is_none()) else { continue };
                hold(app, body, item.get().len())?;
                *place = Some(item.get().to_owned());
                missing -= 1;
                if missing == 0 {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// Stored bytes are parsed like a part of the body, and held like one.
fn hold(app: &App, body: &mut ReadBody, bytes: usize) -> ApiResult<()> {
    let bytes = bytes as u64 * PARSED_FACTOR;
    app.bytes.ever_holds("input", bytes)?;
    body.held.grow(bytes)
}
