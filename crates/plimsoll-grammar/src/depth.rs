//! How deep a grammar goes. The library walks schemas and rules by recursion, a few kilobytes of stack a level, and a stack that ends takes
//! the process along: no panic could be caught. So levels are counted before it begins, and it runs on a stack that holds so many.

use std::collections::BTreeSet;

use serde_json::{Deserializer, Value};

/// Levels of one grammar: of a schema with all it refers to; or rules, terminals and groups of a Lark grammar, which may all lie within
/// each other.
const LEVELS_MAX: usize = 2048;

/// The stack that grammars are compiled on, and followed if they are deep. 2,000 levels end one of 4 MiB, and do not end one of 8. Rules and
/// the schemas in them do not lie within each other there, but twice [`LEVELS_MAX`] would fit.
const STACK_BYTES: usize = 24 << 20;

/// What a level takes of the stack at most.
const BYTES_PER_LEVEL: u64 = 5 << 10;

/// So many levels are followed on the stack that every thread has.
const SHALLOW: usize = 200;

/// Rules that one level of a schema becomes, within each other.
const RULES_PER_LEVEL: usize = 4;

/// What a reference that leads nowhere here may lead to: JSON is no deeper.
const UNKNOWN: usize = 128;

/// How deep a grammar is when it is compiled, counted generously.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Depth(usize);

impl Depth {
    /// Of a Lark grammar that has been let in.
    pub(crate) fn of(text: &str) -> Self {
        let (rules, schemas) = taken_apart(text);
        let deepest = schemas.iter().map(levels).max().unwrap_or(0);
        Self(rules.min(LEVELS_MAX) + deepest.min(LEVELS_MAX))
    }

    /// Of a schema, as JSON text: containers in it, each of which becomes a few rules within each other.
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

    /// What the stack may take.
    pub(crate) fn bytes(self) -> u64 {
        self.0 as u64 * BYTES_PER_LEVEL
    }

    /// Does `work` on a stack that is long enough; none where there is no memory for a thread.
    pub(crate) fn follow<T: Send>(self, work: impl FnOnce() -> T + Send) -> Option<T> {
        if self.0 <= SHALLOW {
            return Some(work());
        }
        on_a_deep_stack(work)?.ok()
    }
}

/// Refuses a schema that goes too deep.
pub(crate) fn schema(root: &Value) -> Result<(), String> {
    check("the schema and what it refers to are", levels(root))
}

/// The levels of a schema and of all it refers to, as far as they are counted.
fn levels(root: &Value) -> usize {
    let (mut seen, mut left) = (BTreeSet::new(), Vec::new());
    let mut levels = below(root, &mut left);
    while let Some(reference) = left.pop() {
        if !seen.insert(reference) {
            continue;
        }
        // Each may be where another one ends.
        let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        levels += target.map_or(UNKNOWN, |target| below(target, &mut left));
        if levels > LEVELS_MAX {
            break;
        }
    }
    levels
}

/// The levels of a schema, and the references in it. What it only defines is met through references.
fn below<'a>(value: &'a Value, references: &mut Vec<&'a str>) -> usize {
    1 + match value {
        Value::Object(members) => {
            references.extend(members.get("$ref").and_then(Value::as_str));
            let inner = members.iter().filter(|(name, _)| !matches!(name.as_str(), "$defs" | "definitions"));
            inner.map(|(_, value)| below(value, references)).max().unwrap_or(0)
        }
        Value::Array(items) => items.iter().map(|item| below(item, references)).max().unwrap_or(0),
        _ => 0,
    }
}

/// Refuses a Lark grammar that goes too deep.
pub(crate) fn lark(text: &str) -> Result<(), String> {
    let (rules, schemas) = taken_apart(text);
    check("rules and groups are", rules)?;
    schemas.iter().try_for_each(schema)
}

/// How many rules, terminals and groups a Lark grammar has, and the schemas in it.
fn taken_apart(text: &str) -> (usize, Vec<Value>) {
    let word = "%json";
    let (mut count, mut found, mut rest) = (0, Vec::new(), text);
    while let Some(at) = rest.find(word) {
        count += rules(&rest[..at]);
        rest = &rest[at + word.len()..];
        let mut values = Deserializer::from_str(rest).into_iter::<Value>();
        if let Some(Ok(value)) = values.next() {
            found.push(value);
            rest = &rest[values.byte_offset()..];
        }
    }
    (count + rules(rest), found)
}

/// Those of a piece without schemas.
fn rules(text: &str) -> usize {
    // A definition begins a line; what goes on with another alternative is none.
    let lines = text.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with(['|', '/', '#']));
    let groups = text.bytes().filter(|byte| matches!(byte, b'(' | b'[')).count();
    lines.count() + groups
}

fn check(what: &str, levels: usize) -> Result<(), String> {
    if levels > LEVELS_MAX {
        return Err(format!("it is too complex: {what} {levels} or more levels deep; {LEVELS_MAX} are allowed"));
    }
    Ok(())
}

/// Does `work` on a stack for grammars of so many levels; none where there is no memory for a thread.
pub(crate) fn on_a_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Option<std::thread::Result<T>> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        Some(thread.spawn_scoped(scope, work).ok()?.join())
    })
}

#[cfg(test)]
mod tests {
    use super::{Depth, LEVELS_MAX, lark, schema};
    use serde_json::{Map, Value, json};

    fn chain(length: usize) -> Value {
        let next = |i: usize| (i.to_string(), json!({"$ref": format!("#/$defs/{}", i + 1)}));
        let mut all: Map<String, Value> = (0..length).map(next).collect();
        all.insert(length.to_string(), json!({"type": "null"}));
        json!({"$ref": "#/$defs/0", "$defs": all})
    }

    #[test]
    fn levels_add_up_through_references() {
        assert_eq!(schema(&chain(600)), Ok(()));
        assert!(schema(&chain(3000)).unwrap_err().contains("2048 are allowed"));
        // Many that refer to few are wide, not deep.
        let wide: Vec<Value> = (0..5000).map(|_| json!({"$ref": "#/$defs/a"})).collect();
        assert_eq!(
            schema(&json!({"anyOf": wide, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}}})),
            Ok(())
        );
        assert_eq!(schema(&json!({"properties": {"a": {"$ref": "elsewhere"}}})), Ok(()));
    }

    #[test]
    fn rules_groups_and_schemas_in_them_are_counted() {
        let rules = |n: usize| (0..n).fold("start: a0\n".to_owned(), |all, i| all + &format!("a{i}: a{}\n", i + 1));
        assert_eq!(lark(&rules(1000)), Ok(()));
        assert!(lark(&rules(LEVELS_MAX + 1)).is_err());
        assert!(lark(&format!("start: {}", "(".repeat(LEVELS_MAX + 1))).is_err());
        assert!(lark(&format!("start: a\na: %json {}\n", chain(3000))).is_err());
        // Wide is not deep: brackets of a schema are no groups.
        let wide = json!({"properties": {"a": {"enum": (0..500).map(|i| format!("({i}[")).collect::<Vec<_>>()}}});
        let depth = Depth::of(&format!("start: a\na: %json {wide}\nb: (\"x\" | [\"y\"])\n"));
        assert!(depth.0 < 20, "{}", depth.0);
    }
}
