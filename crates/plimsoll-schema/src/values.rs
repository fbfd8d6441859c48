//! Values in a schema: names of types, lists, counts and numbers, each checked.

use crate::SchemaError;
use crate::decimal::{Decimal, End};
use crate::expand::{Result, of_type, too_long};
use crate::form::{Alternative, Numbers};
use crate::json::Json;
use crate::refs::Place;

/// The names of the types in a schema.
pub(crate) fn type_names(value: &Json) -> Vec<&str> {
    match value {
        Json::Array(names) => names.iter().filter_map(Json::text).collect(),
        value => value.text().into_iter().collect(),
    }
}

pub(crate) fn types(place: &Place<'_>, value: &Json) -> Result<Vec<Alternative>> {
    let names = type_names(value);
    if let Some(unknown) = names.iter().find(|name| of_type(name).is_none()) {
        let reason =
            format!("type '{unknown}' is unknown: use null, boolean, integer, number, string, array or object");
        return Err(SchemaError::Invalid { at: format!("{}/type", place.at), reason });
    }
    let integers = names.contains(&"number");
    Ok(names.into_iter().filter(|name| *name != "integer" || !integers).filter_map(of_type).collect())
}

/// A list in a schema.
pub(crate) fn list<'a>(at: &Place<'a>) -> Result<&'a [Json]> {
    at.json.items().ok_or_else(|| wrong(at, "a list"))
}

pub(crate) fn wrong(at: &Place<'_>, what: &str) -> SchemaError {
    SchemaError::Invalid {
        at: at.at.to_string(),
        reason: format!("{} is given where {what} is needed", short(at.json)),
    }
}

pub(crate) fn short(json: &Json) -> String {
    json.to_string().chars().take(40).collect()
}

/// A count in a schema. `2.0` is one.
pub(crate) fn count(at: &Place<'_>) -> Result<u64> {
    let Json::Number(text) = at.json else { return Err(wrong(at, "a count")) };
    let number = Decimal::parse(text).and_then(|number| number.to_i128());
    match number {
        Some(number @ 0..) => Ok(u64::try_from(number).unwrap_or(u64::MAX)),
        _ => Err(wrong(at, "a count")),
    }
}

/// A number in a schema.
pub(crate) fn number(at: &Place<'_>) -> Result<Decimal> {
    let Json::Number(text) = at.json else { return Err(wrong(at, "a number")) };
    Decimal::parse(text).ok_or_else(|| too_long(&at.at))
}

/// A keyword's constraint on numbers. `None` if it has none.
pub(crate) fn numbers(place: &Place<'_>, key: &str, at: &Place<'_>) -> Result<Option<Numbers>> {
    // Of draft 4: a flag beside the limit.
    let open = |flag: &str| place.json.get(flag) == Some(&Json::Bool(true));
    if matches!(at.json, Json::Bool(_)) {
        return Ok(None);
    }
    let end = |open| number(at).map(|at| Some(End { at, open }));
    let numbers = Numbers::default();
    Ok(Some(match key {
        "minimum" => Numbers { low: end(open("exclusiveMinimum"))?, ..numbers },
        "maximum" => Numbers { high: end(open("exclusiveMaximum"))?, ..numbers },
        "exclusiveMinimum" => Numbers { low: end(true)?, ..numbers },
        "exclusiveMaximum" => Numbers { high: end(true)?, ..numbers },
        _ => {
            let multiple = number(at)?;
            if multiple.is_zero() || multiple.is_negative() {
                return Err(wrong(at, "a number above zero"));
            }
            Numbers { multiples: vec![multiple], ..numbers }
        }
    }))
}
