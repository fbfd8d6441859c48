//! Resolves references: JSON pointers, anchors and embedded resources of one document.

use std::collections::HashMap;
use std::rc::Rc;

use crate::SchemaError;
use crate::json::Json;

/// Keywords that have a schema, a list of schemas, or schemas by name as value.
const ONE: [&str; 13] = [
    "not",
    "if",
    "then",
    "else",
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
    "extends",
];
const LIST: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// The base that a document without an `$id` has.
const OWN: &str = "plimsoll:/schema";

/// A schema in the document.
#[derive(Clone)]
pub(crate) struct Place<'a> {
    pub json: &'a Json,
    /// JSON pointer in the document.
    pub at: Rc<str>,
    /// The base of its relative references.
    pub base: Rc<str>,
}

/// The names that schemas of a document have.
pub(crate) struct References<'a> {
    resources: HashMap<String, Place<'a>>,
    anchors: HashMap<(String, String), Place<'a>>,
    dynamic: HashMap<String, Vec<Place<'a>>>,
}

impl<'a> References<'a> {
    /// Finds all names, and the place of the whole document.
    pub fn of(root: &'a Json) -> (Self, Place<'a>) {
        let mut all = Self { resources: HashMap::new(), anchors: HashMap::new(), dynamic: HashMap::new() };
        let base: Rc<str> = OWN.into();
        let top = Place { json: root, at: "".into(), base };
        all.resources.insert(OWN.to_owned(), top.clone());
        let mut left = vec![top.clone()];
        let mut whole = None;
        while let Some(mut place) = left.pop() {
            if let Some(id) = place.json.get("$id").or(place.json.get("id")).and_then(Json::text) {
                let resolved = resolve(&place.base, id);
                let (base, fragment) = split(&resolved);
                if fragment.is_empty() {
                    place.base = base.into();
                    all.resources.insert(base.to_owned(), place.clone());
                } else {
                    // Of older drafts: an anchor.
                    all.anchors.insert((base.to_owned(), fragment.to_owned()), place.clone());
                }
            }
            for key in ["$anchor", "$dynamicAnchor"] {
                if let Some(anchor) = place.json.get(key).and_then(Json::text) {
                    all.anchors.insert((place.base.to_string(), anchor.to_owned()), place.clone());
                    if key == "$dynamicAnchor" {
                        all.dynamic.entry(anchor.to_owned()).or_default().push(place.clone());
                    }
                }
            }
            left.extend(children(&place));
            whole.get_or_insert(place);
        }
        (all, whole.unwrap_or(top))
    }

    /// The target of a reference at this place.
    pub fn find(&self, from: &Place<'a>, reference: &str) -> Option<Place<'a>> {
        let resolved = resolve(&from.base, reference);
        let (base, fragment) = split(&resolved);
        let fragment = unescaped(fragment);
        if fragment.is_empty() {
            return self.resources.get(base).cloned();
        }
        if let Some(pointer) = fragment.strip_prefix('/') {
            return follow(self.resources.get(base)?, pointer);
        }
        self.anchors.get(&(base.to_owned(), fragment)).cloned()
    }

    /// The part of the whole document at a JSON pointer.
    pub fn part(&self, whole: &Place<'a>, at: &str) -> Result<Place<'a>, SchemaError> {
        let found = match at.strip_prefix('/') {
            None => Some(whole.clone()),
            Some(pointer) => follow(whole, pointer),
        };
        found.ok_or_else(|| SchemaError::Invalid { at: at.to_owned(), reason: "nothing stands here".into() })
    }

    /// The target of a dynamic reference, unless it depends on the path that leads here.
    pub fn find_dynamic(&self, from: &Place<'a>, reference: &str) -> Option<Place<'a>> {
        let found = self.find(from, reference)?;
        let name = reference.split_once('#').map_or("", |(_, fragment)| fragment);
        let same = found.json.get("$dynamicAnchor").and_then(Json::text) == Some(name);
        let one = self.dynamic.get(name).is_none_or(|all| all.len() == 1);
        (!same || one).then_some(found)
    }
}

/// The schemas directly in a schema.
pub(crate) fn children<'a>(place: &Place<'a>) -> Vec<Place<'a>> {
    let mut all = Vec::new();
    let inner = |json: &'a Json, at: String| Place { json, at: at.into(), base: Rc::clone(&place.base) };
    for (key, value) in place.json.members() {
        let at = format!("{}/{}", place.at, escaped(key));
        let key = key.as_str();
        if ONE.contains(&key) && matches!(value, Json::Object(_)) {
            all.push(inner(value, at));
        } else if let Some(items) = value.items().filter(|_| LIST.contains(&key)) {
            all.extend(items.iter().enumerate().map(|(i, item)| inner(item, format!("{at}/{i}"))));
        } else if NAMED.contains(&key) {
            all.extend(value.members().iter().map(|(name, item)| inner(item, format!("{at}/{}", escaped(name)))));
        }
    }
    all
}

impl<'a> Place<'a> {
    /// A schema in this one.
    pub fn enter(&self, json: &'a Json, key: &str) -> Self {
        let base = match json.get("$id").and_then(Json::text) {
            Some(id) => split(&resolve(&self.base, id)).0.into(),
            None => Rc::clone(&self.base),
        };
        Self { json, at: format!("{}/{}", self.at, escaped(key)).into(), base }
    }
}

/// Follows a JSON pointer without its first slash. The base changes where it passes an `$id`.
fn follow<'a>(from: &Place<'a>, pointer: &str) -> Option<Place<'a>> {
    let mut place = from.clone();
    for part in pointer.split('/') {
        let name = part.replace("~1", "/").replace("~0", "~");
        place.json = match place.json {
            Json::Array(items) => items.get(name.parse::<usize>().ok()?)?,
            json => json.get(&name)?,
        };
        place.at = format!("{}/{}", place.at, escaped(&name)).into();
        if let Some(id) = place.json.get("$id").and_then(Json::text) {
            place.base = split(&resolve(&place.base, id)).0.into();
        }
    }
    Some(place)
}

/// A name as a part of a JSON pointer.
pub(crate) fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn split(uri: &str) -> (&str, &str) {
    uri.split_once('#').unwrap_or((uri, ""))
}

/// A fragment without `%XX`.
fn unescaped(fragment: &str) -> String {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let code = (*first == b'%').then(|| tail.get(..2)).flatten();
        let code = code.and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A reference resolved against a base (RFC 3986, without what no schema needs: user names, queries of the base).
fn resolve(base: &str, reference: &str) -> String {
    let scheme = |uri: &str| {
        let end = uri.find(':')?;
        let name = &uri[..end];
        let good = name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        good.then_some(end)
    };
    if scheme(reference).is_some() {
        return reference.to_owned();
    }
    let (base, _) = split(base);
    if reference.is_empty() || reference.starts_with('#') {
        return format!("{base}{reference}");
    }
    let start = scheme(base).map_or(0, |end| end + 1);
    if reference.starts_with("//") {
        return format!("{}{reference}", &base[..start]);
    }
    let path = match base[start..].strip_prefix("//") {
        Some(rest) => rest.find('/').map_or(base.len(), |slash| start + 2 + slash),
        None => start,
    };
    let (target, fragment) = reference.split_once('#').map_or((reference, None), |(a, b)| (a, Some(b)));
    let joined = match target.strip_prefix('/') {
        Some(rest) => format!("/{rest}"),
        None => format!("{}/{target}", base[path..].rsplit_once('/').map_or("", |(directory, _)| directory)),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in joined.split('/').skip(1) {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let fragment = fragment.map(|fragment| format!("#{fragment}")).unwrap_or_default();
    format!("{}/{}{fragment}", &base[..path], parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::{References, resolve};
    use crate::json::Json;

    #[test]
    fn references_are_resolved_as_uris_are() {
        for (base, reference, expected) in [
            ("http://a/b/c", "d", "http://a/b/d"),
            ("http://a/b/c", "/d#x", "http://a/d#x"),
            ("http://a/b/c#z", "#x", "http://a/b/c#x"),
            ("http://a/b/c", "../d", "http://a/d"),
            ("http://a", "d", "http://a/d"),
            ("http://a/b", "urn:x:y", "urn:x:y"),
            ("http://a/b", "//c/d", "http://c/d"),
        ] {
            assert_eq!(resolve(base, reference), expected, "{base} {reference}");
        }
    }

    #[test]
    fn pointers_anchors_and_resources_are_found() {
        let text = r##"{"$id": "http://x/root", "$defs": {"a/b": {"const": 1}, "t~x": {"const": 2}, "p%q": {"const": 3},
            "n": {"$anchor": "here", "const": 4}, "r": {"$id": "other", "$defs": {"i": {"const": 5}}, "const": 6}}}"##;
        let json = Json::parse(text).unwrap();
        let (all, root) = References::of(&json);
        let find =
            |reference: &str| all.find(&root, reference).and_then(|place| place.json.get("const").map(Json::to_string));
        for (reference, expected) in [
            ("#/$defs/a~1b", "1"),
            ("#/$defs/t~0x", "2"),
            ("#/$defs/p%25q", "3"),
            ("#here", "4"),
            ("http://x/root#here", "4"),
            ("other#/$defs/i", "5"),
            ("http://x/other", "6"),
        ] {
            assert_eq!(find(reference).as_deref(), Some(expected), "{reference}");
        }
        assert!(find("#/nowhere").is_none() && find("elsewhere").is_none());
    }
}
