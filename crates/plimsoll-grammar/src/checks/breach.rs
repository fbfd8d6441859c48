//! Breaches of a schema: whether more text can mend one, and the words for the client.

use serde_json::Value;

use crate::sandbox::Breach;

/// JSON pointers of the containers that are still open in a document whose `depth` innermost ones were closed for a look.
pub(super) fn open_values(text: &str, depth: usize) -> Vec<String> {
    let Ok(document) = serde_json::from_str::<Value>(text) else { return Vec::new() };
    let (mut value, mut pointer, mut open) = (&document, String::new(), Vec::new());
    for _ in 0..depth {
        open.push(pointer.clone());
        let next = match value {
            Value::Array(items) => items.last().map(|item| (item, (items.len() - 1).to_string())),
            Value::Object(members) => {
                members.iter().next_back().map(|(key, value)| (value, key.replace('~', "~0").replace('/', "~1")))
            }
            _ => None,
        };
        let Some((inner, name)) = next else { break };
        value = inner;
        pointer = format!("{pointer}/{name}");
    }
    open
}

/// Keywords that only look at what is there: more of it does not mend what they refuse.
const FINAL: [&str; 6] =
    ["uniqueItems", "maxItems", "maxProperties", "propertyNames", "additionalProperties", "additionalItems"];

/// Keywords whose parts must all hold, each for itself.
const TOGETHER: [&str; 10] = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
    "allOf",
    "$ref",
    "$defs",
    "definitions",
    "additionalItems",
];

/// Whether nothing that follows can mend a breach, where `open` values may still grow.
pub(super) fn beyond_repair(breach: &Breach, open: &[String]) -> bool {
    let parts: Vec<&str> = breach.schema.split('/').skip(1).collect();
    let above = parts.split_last().map_or(&[][..], |(_, above)| above);
    let grows = open.contains(&breach.instance);
    all_together(above) && (!grows || FINAL.contains(&breach.keyword.as_str()))
}

/// Whether all keywords of a path are among [`TOGETHER`]. Some are followed by a name or a number.
fn all_together(path: &[&str]) -> bool {
    let mut parts = path.iter();
    while let Some(keyword) = parts.next() {
        if !TOGETHER.contains(keyword) {
            return false;
        }
        if matches!(*keyword, "properties" | "patternProperties" | "prefixItems" | "allOf" | "$defs" | "definitions") {
            parts.next();
        }
    }
    true
}

/// A breach, in words for the client.
pub(crate) fn broken(breach: &Breach) -> String {
    let at = if breach.instance.is_empty() { "the whole answer" } else { &breach.instance };
    format!(
        "the answer breaks its schema at {at}: {} ({}); a simpler schema, or a larger model, may help",
        breach.keyword, breach.schema
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breach(keyword: &str, instance: &str, schema: &str) -> Breach {
        Breach { keyword: keyword.into(), instance: instance.into(), schema: schema.into() }
    }

    #[test]
    fn breaches_that_more_text_may_mend_are_not_held_against_a_prefix() {
        let open = open_values(r#"{"a":[{"b":1},{"c":[2]}]}"#, 4);
        assert_eq!(open, ["", "/a", "/a/1", "/a/1/c"]);
        assert!(!beyond_repair(&breach("required", "", "/required"), &open));
        assert!(!beyond_repair(&breach("minItems", "/a", "/properties/a/minItems"), &open));
        assert!(beyond_repair(&breach("uniqueItems", "/a", "/properties/a/uniqueItems"), &open));
        // The first item is closed: whatever it breaks stays broken.
        assert!(beyond_repair(&breach("required", "/a/0", "/properties/a/items/$ref/required"), &open));
        // Whether this part must hold at all is open.
        assert!(!beyond_repair(&breach("required", "/a/0", "/then/properties/a/items/required"), &open));
    }
}
