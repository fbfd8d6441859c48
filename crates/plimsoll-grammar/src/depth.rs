//! The nesting depth of a grammar. The library follows schemas and rules by recursion, with a few kilobytes of stack
//! per level. A stack overflow ends the process and cannot be caught. So levels are counted first, and the library runs
//! on a stack that holds them.

use std::collections::BTreeSet;

use serde_json::{Deserializer, Value};

/// Most levels of one grammar: of a schema with its references, or all rules, terminals and groups of a Lark grammar.
/// Each of these may be nested in the one before.
const LEVELS_MAX: usize = 2048;

/// The stack on which grammars compile, and on which deep grammars are used. 2,000 levels overflow 4 MiB but not 8 MiB.
/// Twice [`LEVELS_MAX`] would fit: Lark rules and schemas inside them do not add up.
const STACK_BYTES: usize = 24 << 20;

/// Most stack bytes of one level.
const BYTES_PER_LEVEL: u64 = 5 << 10;

/// Grammars with at most this many levels run on any thread's stack.
const LEVELS_ON_ANY_STACK: usize = 200;

/// Nested rules per schema level.
const RULES_PER_LEVEL: usize = 4;

/// Levels of a reference that cannot be resolved here. JSON is not nested deeper.
const UNRESOLVED_LEVELS: usize = 128;

/// Upper limit of a grammar's nesting depth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Depth(usize);

impl Depth {
    /// Depth of a Lark grammar that passed [`check_lark`].
    pub(crate) fn of(text: &str) -> Self {
        let (rules, schemas) = split_schemas(text);
        let deepest = schemas.iter().map(levels).max().unwrap_or(0);
        Self(rules.min(LEVELS_MAX) + deepest.min(LEVELS_MAX))
    }

    /// Depth of a schema (JSON text). Each container becomes a few nested rules.
    pub(crate) fn of_json(text: &str) -> Self {
        let (mut open, mut most) = (0_usize, 0);
        for byte in text.bytes() {
            match byte {
                b'{' | b'[' => open += 1,
                b'}' | b']' => open = open.saturating_sub(1),
                _ => {}
            }
            most = most.max(open);
        }
        Self((most * RULES_PER_LEVEL).min(LEVELS_MAX))
    }

    /// Most stack bytes.
    pub(crate) fn bytes(self) -> u64 {
        self.0 as u64 * BYTES_PER_LEVEL
    }

    /// Runs `work` on a large enough stack. `None` if the system has no thread.
    pub(crate) fn run<T: Send>(self, work: impl FnOnce() -> T + Send) -> Option<T> {
        if self.0 <= LEVELS_ON_ANY_STACK {
            return Some(work());
        }
        run_on_deep_stack(work)?.ok()
    }
}

/// Rejects a schema that is nested too deeply.
pub(crate) fn check_schema(root: &Value) -> Result<(), String> {
    check("the schema with its references is", levels(root))
}

/// Levels of a schema with its references. Counting stops above [`LEVELS_MAX`].
fn levels(root: &Value) -> usize {
    let (mut seen, mut left) = (BTreeSet::new(), Vec::new());
    let mut levels = schema_levels(root, &mut left);
    while let Some(reference) = left.pop() {
        if !seen.insert(reference) {
            continue;
        }
        // A reference may start at the deepest level of another, so levels add up.
        let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        levels += target.map_or(UNRESOLVED_LEVELS, |target| schema_levels(target, &mut left));
        if levels > LEVELS_MAX {
            break;
        }
    }
    levels
}

/// Levels of a value, without its definitions. Collects the references that lead to these.
fn schema_levels<'a>(value: &'a Value, references: &mut Vec<&'a str>) -> usize {
    1 + match value {
        Value::Object(members) => {
            references.extend(members.get("$ref").and_then(Value::as_str));
            let inner = members.iter().filter(|(name, _)| !matches!(name.as_str(), "$defs" | "definitions"));
            inner.map(|(_, value)| schema_levels(value, references)).max().unwrap_or(0)
        }
        Value::Array(items) => items.iter().map(|item| schema_levels(item, references)).max().unwrap_or(0),
        _ => 0,
    }
}

/// Rejects a Lark grammar that is nested too deeply.
pub(crate) fn check_lark(text: &str) -> Result<(), String> {
    let (rules, schemas) = split_schemas(text);
    check("rules and groups are", rules)?;
    schemas.iter().try_for_each(check_schema)
}

/// The number of rules, terminals and groups of a Lark grammar, and the schemas in it.
fn split_schemas(text: &str) -> (usize, Vec<Value>) {
    let word = "%json";
    let (mut count, mut found, mut rest) = (0, Vec::new(), text);
    while let Some(at) = rest.find(word) {
        count += count_rules(&rest[..at]);
        rest = &rest[at + word.len()..];
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        if let Some(Ok(value)) = values.next() {
            found.push(value);
            rest = &rest[values.byte_offset()..];
        }
    }
    (count + count_rules(rest), found)
}

/// Rules, terminals and groups of Lark text without schemas.
fn count_rules(text: &str) -> usize {
    // A definition starts a line. A line that starts with `|` continues one.
    let lines = text.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with(['|', '/', '#']));
    let groups = text.bytes().filter(|byte| matches!(byte, b'(' | b'[')).count();
    lines.count() + groups
}

fn check(what: &str, levels: usize) -> Result<(), String> {
    if levels > LEVELS_MAX {
        return Err(format!(
            "it is too complex: {what} nested {levels} or more levels deep; the limit is {LEVELS_MAX}"
        ));
    }
    Ok(())
}

/// Runs `work` on a stack for the deepest grammars. `None` if the system has no thread.
pub(crate) fn run_on_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Option<std::thread::Result<T>> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        Some(thread.spawn_scoped(scope, work).ok()?.join())
    })
}

#[cfg(test)]
mod tests {
    use super::{Depth, LEVELS_MAX, check_lark, check_schema};
    use serde_json::{Map, Value, json};

    fn chain(length: usize) -> Value {
        let next = |i: usize| (i.to_string(), json!({"$ref": format!("#/$defs/{}", i + 1)}));
        let mut all: Map<String, Value> = (0..length).map(next).collect();
        all.insert(length.to_string(), json!({"type": "null"}));
        json!({"$ref": "#/$defs/0", "$defs": all})
    }

    #[test]
    fn levels_add_up_through_references() {
        assert_eq!(check_schema(&chain(600)), Ok(()));
        assert!(check_schema(&chain(3000)).unwrap_err().contains("the limit is 2048"));
        // Many references to few schemas are not deep.
        let wide: Vec<Value> = (0..5000).map(|_| json!({"$ref": "#/$defs/a"})).collect();
        assert_eq!(
            check_schema(&json!({"anyOf": wide, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}}})),
            Ok(())
        );
        assert_eq!(check_schema(&json!({"properties": {"a": {"$ref": "elsewhere"}}})), Ok(()));
    }

    #[test]
    fn lark_rules_groups_and_schemas_are_counted() {
        let rules = |n: usize| (0..n).fold("start: a0\n".to_owned(), |all, i| all + &format!("a{i}: a{}\n", i + 1));
        assert_eq!(check_lark(&rules(1000)), Ok(()));
        assert!(check_lark(&rules(LEVELS_MAX + 1)).is_err());
        assert!(check_lark(&format!("start: {}", "(".repeat(LEVELS_MAX + 1))).is_err());
        assert!(check_lark(&format!("start: a\na: %json {}\n", chain(3000))).is_err());
        // Brackets in a schema are not groups.
        let wide = json!({"properties": {"a": {"enum": (0..500).map(|i| format!("({i}[")).collect::<Vec<_>>()}}});
        let depth = Depth::of(&format!("start: a\na: %json {wide}\nb: (\"x\" | [\"y\"])\n"));
        assert!(depth.0 < 20, "{}", depth.0);
    }
}
