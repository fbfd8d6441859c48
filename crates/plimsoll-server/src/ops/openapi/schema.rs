//! The notation of schemas: a name with its fields, each with its kind.

use serde_json::{Map, Value, json};

/// A schema's name, and the name and kind of each field.
pub(super) type Object = (&'static str, &'static [(&'static str, &'static str)]);

/// Returns the schema of a closed object. A field's kind ends with `?` if it may be null and begins with `~` if the field may be absent.
pub(super) fn closed(fields: &[(&str, &str)]) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for (name, kind) in fields {
        let (kind, present) = kind.strip_prefix('~').map_or((*kind, true), |kind| (kind, false));
        let (kind, null) = kind.strip_suffix('?').map_or((kind, false), |kind| (kind, true));
        properties.insert((*name).into(), schema(kind, null));
        if present {
            required.push(*name);
        }
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// Returns the schema of a kind: `string`, `integer`, …; `[kind]` for a list; a name with a capital letter for a named schema.
pub(super) fn schema(kind: &str, null: bool) -> Value {
    if let Some(item) = kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
        let kinds = if null { json!(["array", "null"]) } else { json!("array") };
        return json!({"type": kinds, "items": schema(item, false)});
    }
    if kind.starts_with(char::is_uppercase) {
        let reference = reference(kind);
        return if null { json!({"anyOf": [reference, {"type": "null"}]}) } else { reference };
    }
    if null { json!({"type": [kind, "null"]}) } else { json!({"type": kind}) }
}

/// A reference to a named schema.
pub(super) fn reference(schema: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{schema}")})
}
