//! Schema violations: whether more text can fix one, and the message for the client.

use serde_json::Value;

use crate::sandbox::Violation;

/// JSON pointers of the containers that were open before `depth` closers were added.
pub(super) fn open_containers(text: &str, depth: usize) -> Vec<String> {
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

/// Keywords that more items or members cannot fix.
const FINAL_KEYWORDS: [&str; 6] =
    ["uniqueItems", "maxItems", "maxProperties", "propertyNames", "additionalProperties", "additionalItems"];

/// Keywords that require all their subschemas to hold.
const CONJUNCTIVE: [&str; 10] = [
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

/// Whether no continuation can fix a violation. `open` containers may still grow.
pub(super) fn is_final(violation: &Violation, open: &[String]) -> bool {
    let parts: Vec<&str> = violation.schema.split('/').skip(1).collect();
    let above = parts.split_last().map_or(&[][..], |(_, above)| above);
    let grows = open.contains(&violation.instance);
    are_all_conjunctive(above) && (!grows || FINAL_KEYWORDS.contains(&violation.keyword.as_str()))
}

/// Whether all keywords of a path are in [`CONJUNCTIVE`]. A name or an index follows some of them.
fn are_all_conjunctive(path: &[&str]) -> bool {
    let mut parts = path.iter();
    while let Some(keyword) = parts.next() {
        if !CONJUNCTIVE.contains(keyword) {
            return false;
        }
        if matches!(*keyword, "properties" | "patternProperties" | "prefixItems" | "allOf" | "$defs" | "definitions") {
            parts.next();
        }
    }
    true
}

/// The error message for a violation.
pub(crate) fn violation_message(violation: &Violation) -> String {
    let at = if violation.instance.is_empty() { "the whole answer" } else { &violation.instance };
    format!(
        "the answer violates its schema at {at}: {} ({}); use a simpler schema or a larger model",
        violation.keyword, violation.schema
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn violation(keyword: &str, instance: &str, schema: &str) -> Violation {
        Violation { keyword: keyword.into(), instance: instance.into(), schema: schema.into() }
    }

    #[test]
    fn violations_that_more_text_may_fix_do_not_reject_a_prefix() {
        let open = open_containers(r#"{"a":[{"b":1},{"c":[2]}]}"#, 4);
        assert_eq!(open, ["", "/a", "/a/1", "/a/1/c"]);
        assert!(!is_final(&violation("required", "", "/required"), &open));
        assert!(!is_final(&violation("minItems", "/a", "/properties/a/minItems"), &open));
        assert!(is_final(&violation("uniqueItems", "/a", "/properties/a/uniqueItems"), &open));
        // The first item is closed, so its violation is final.
        assert!(is_final(&violation("required", "/a/0", "/properties/a/items/$ref/required"), &open));
        // `then` may not apply.
        assert!(!is_final(&violation("required", "/a/0", "/then/properties/a/items/required"), &open));
    }
}
