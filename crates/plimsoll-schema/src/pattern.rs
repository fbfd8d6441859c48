//! Patterns (ECMA-262, as JSON Schema has them) as patterns of JSON's escaped text.
//!
//! A string is written in one way only: `"`, `\` and control characters are escaped, nothing else is. So the complement of a
//! pattern of texts is the complement of the pattern of what is written.

use std::fmt::Write;

use regex::{Regex, RegexBuilder};
use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, Hir, HirKind, Look};

use crate::ecma::{short, translated};

/// One character of a string, as it is written.
pub(crate) const CHARACTER: &str = r#"([^"\\\x00-\x1f]|\\["\\bfnrt]|\\u00(0[0-7bef]|1[0-9a-f]))"#;

/// Bytes of a pattern when it is compiled to be matched here.
const COMPILED_BYTES_MAX: usize = 1 << 20;

/// Bytes of a pattern of escaped text.
const WRITTEN_BYTES_MAX: usize = 64 << 10;

/// Alternatives that anchors inside of a pattern may be split into.
const SPLITS_MAX: usize = 64;

/// A pattern.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    /// Matches a whole string as it is written, without its quotes.
    pub written: String,
    /// Searches in a text.
    regex: Regex,
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Errors
    ///
    /// The unsupported part, as text for the client.
    pub fn read(pattern: &str) -> Result<Self, String> {
        let source = translated(pattern)?;
        let hir = parsed(&source, pattern)?;
        let mut splits = 0;
        let written = whole(&hir, &mut splits).map_err(|why| format!("the pattern '{}' {why}", short(pattern)))?;
        if written.len() > WRITTEN_BYTES_MAX {
            return Err(format!(
                "the pattern '{}' takes {} bytes when it is expanded; {WRITTEN_BYTES_MAX} are allowed",
                short(pattern),
                written.len()
            ));
        }
        let built =
            RegexBuilder::new(&source).size_limit(COMPILED_BYTES_MAX).dfa_size_limit(COMPILED_BYTES_MAX).build();
        let regex = built.map_err(|_| {
            format!("the pattern '{}' takes more than {COMPILED_BYTES_MAX} bytes when it is compiled", short(pattern))
        })?;
        Ok(Self { written, regex })
    }

    /// Whether a text has a match.
    pub fn matches(&self, text: &str) -> bool {
        self.regex.is_match(text)
    }
}

/// A pattern in Rust's syntax that matches a whole text, as a pattern of what is written. Anchors at its ends change
/// nothing.
///
/// # Errors
///
/// The unsupported part, as text for the client.
pub(crate) fn complete(source: &str) -> Result<String, String> {
    let hir = parsed(source, source)?;
    let inner = match hir.kind() {
        HirKind::Concat(all) => &all[..],
        _ => std::slice::from_ref(&hir),
    };
    let is = |hir: &Hir, look: Look| *hir.kind() == HirKind::Look(look);
    let from = usize::from(inner.first().is_some_and(|hir| is(hir, Look::Start)));
    let to = inner.len() - usize::from(inner.len() > from && inner.last().is_some_and(|hir| is(hir, Look::End)));
    let mut out = String::new();
    let done = inner[from..to].iter().try_for_each(|part| write(part, &mut out));
    done.map_err(|why| format!("the pattern '{}' {why}", short(source)))?;
    if out.len() > WRITTEN_BYTES_MAX {
        let limit = format!("takes {} bytes when it is expanded; {WRITTEN_BYTES_MAX} are allowed", out.len());
        return Err(format!("the pattern '{}' {limit}", short(source)));
    }
    Ok(out)
}

/// Parses a pattern in Rust's syntax; `shown` is the client's.
pub(crate) fn parsed(source: &str, shown: &str) -> Result<Hir, String> {
    let mut parser = ParserBuilder::new().nest_limit(100).build();
    parser.parse(source).map_err(|error| {
        let why = error.to_string();
        let line = why.lines().rev().find_map(|line| line.trim().strip_prefix("error: ")).unwrap_or("").to_owned();
        format!("the pattern '{}' cannot be read: {line}", short(shown))
    })
}

/// A pattern that matches a whole string, as it is written.
fn whole(hir: &Hir, splits: &mut usize) -> Result<String, String> {
    *splits += 1;
    if *splits > SPLITS_MAX {
        return Err(format!("has anchors in more than {SPLITS_MAX} alternatives"));
    }
    match hir.kind() {
        HirKind::Capture(group) => whole(&group.sub, splits),
        HirKind::Alternation(all) => {
            let all: Vec<String> = all.iter().map(|one| whole(one, splits)).collect::<Result<_, _>>()?;
            Ok(format!("({})", all.join("|")))
        }
        HirKind::Concat(all) => sequence(all, splits),
        _ => sequence(std::slice::from_ref(hir), splits),
    }
}

fn sequence(all: &[Hir], splits: &mut usize) -> Result<String, String> {
    let anchored = |hir: &Hir| !hir.properties().look_set().is_empty();
    let is = |hir: Option<&Hir>, look: Look| hir.is_some_and(|hir| *hir.kind() == HirKind::Look(look));
    let (mut middle, mut start, mut end) = (all, false, false);
    while is(middle.first(), Look::Start) {
        (middle, start) = (&middle[1..], true);
    }
    while is(middle.last(), Look::End) {
        (middle, end) = (&middle[..middle.len() - 1], true);
    }
    // A group at an edge that has anchors itself: one sequence for each of its alternatives.
    let at = [0, middle.len().saturating_sub(1)].into_iter().find(|at| middle.get(*at).is_some_and(anchored));
    if let Some(at) = at {
        let mut inner = &middle[at];
        while let HirKind::Capture(group) = inner.kind() {
            inner = &group.sub;
        }
        let alternatives = match inner.kind() {
            HirKind::Alternation(alternatives) => alternatives.clone(),
            HirKind::Concat(_) | HirKind::Look(Look::Start | Look::End) => vec![inner.clone()],
            _ => return Err("has an anchor where none is supported".into()),
        };
        let looks = |on: bool, look: Look| on.then(|| Hir::look(look));
        let one = |alternative: &Hir| {
            let flat = match alternative.kind() {
                HirKind::Concat(parts) => parts.clone(),
                _ => vec![alternative.clone()],
            };
            let parts = looks(start, Look::Start).into_iter().chain(middle[..at].iter().cloned()).chain(flat);
            parts.chain(middle[at + 1..].iter().cloned()).chain(looks(end, Look::End)).collect::<Vec<_>>()
        };
        if alternatives.len() == 1 && matches!(inner.kind(), HirKind::Look(_)) {
            return Err("has an anchor where none is supported".into());
        }
        let all: Vec<String> = alternatives
            .iter()
            .map(|alternative| {
                *splits += 1;
                if *splits > SPLITS_MAX {
                    return Err(format!("has anchors in more than {SPLITS_MAX} alternatives"));
                }
                sequence(&one(alternative), splits)
            })
            .collect::<Result<_, String>>()?;
        return Ok(format!("({})", all.join("|")));
    }
    let mut out = String::new();
    if !start {
        let _ = write!(out, "{CHARACTER}*");
    }
    for part in middle {
        write(part, &mut out)?;
    }
    if !end {
        let _ = write!(out, "{CHARACTER}*");
    }
    Ok(out)
}

/// A part without anchors.
pub(crate) fn write(hir: &Hir, out: &mut String) -> Result<(), String> {
    if out.len() > WRITTEN_BYTES_MAX {
        return Err(format!("takes more than {WRITTEN_BYTES_MAX} bytes when it is expanded"));
    }
    match hir.kind() {
        HirKind::Empty => {}
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|_| "has bytes that are no text")?;
            text.chars().for_each(|c| character(c, out));
        }
        HirKind::Class(Class::Unicode(class)) => {
            ranges(class.ranges().iter().map(|range| (range.start(), range.end())), out);
        }
        HirKind::Class(Class::Bytes(class)) => {
            ranges(class.ranges().iter().map(|range| (char::from(range.start()), char::from(range.end()))), out);
        }
        HirKind::Look(_) => return Err("has an anchor where none is supported".into()),
        HirKind::Repetition(repetition) => {
            out.push('(');
            write(&repetition.sub, out)?;
            let _ = match (repetition.min, repetition.max) {
                (0, None) => write!(out, ")*"),
                (1, None) => write!(out, ")+"),
                (min, None) => write!(out, "){{{min},}}"),
                (min, Some(max)) => write!(out, "){{{min},{max}}}"),
            };
        }
        HirKind::Capture(group) => write(&group.sub, out)?,
        HirKind::Concat(parts) => parts.iter().try_for_each(|part| write(part, out))?,
        HirKind::Alternation(parts) => {
            for (at, part) in parts.iter().enumerate() {
                out.push(if at == 0 { '(' } else { '|' });
                write(part, out)?;
            }
            out.push(')');
        }
    }
    Ok(())
}

/// How a control character, a quote or a backslash is written.
fn escaped(c: char) -> Option<String> {
    Some(match c {
        '"' => "\\\"".into(),
        '\\' => "\\\\".into(),
        '\u{8}' => "\\b".into(),
        '\t' => "\\t".into(),
        '\n' => "\\n".into(),
        '\u{c}' => "\\f".into(),
        '\r' => "\\r".into(),
        '\0'..='\u{1f}' => format!("\\u{:04x}", u32::from(c)),
        _ => return None,
    })
}

/// One character of a text as a pattern of what is written.
fn character(c: char, out: &mut String) {
    match escaped(c) {
        Some(text) => text.chars().for_each(|c| plain(c, out)),
        None => plain(c, out),
    }
}

/// A character that stands for itself.
fn plain(c: char, out: &mut String) {
    if c.is_ascii_alphanumeric() {
        out.push(c);
    } else {
        let _ = write!(out, "\\x{{{:x}}}", u32::from(c));
    }
}

/// A class of characters.
fn ranges(all: impl Iterator<Item = (char, char)>, out: &mut String) {
    let (mut class, mut others) = (String::new(), Vec::new());
    for (start, end) in all {
        let (mut from, end) = (u32::from(start), u32::from(end));
        for special in (0..0x20).chain([0x22, 0x5c]) {
            if (from..=end).contains(&special) {
                if special > from {
                    let _ = write!(class, "\\x{{{from:x}}}-\\x{{{:x}}}", special - 1);
                }
                from = special + 1;
                others.extend(char::from_u32(special));
            }
        }
        if from <= end {
            let _ = write!(class, "\\x{{{from:x}}}-\\x{{{end:x}}}");
        }
    }
    let mut parts: Vec<String> = Vec::new();
    if !class.is_empty() {
        parts.push(format!("[{class}]"));
    }
    for other in others {
        let mut text = String::new();
        character(other, &mut text);
        parts.push(text);
    }
    // A class of nothing matches nothing.
    let _ = if parts.is_empty() { write!(out, "[a&&b]") } else { write!(out, "({})", parts.join("|")) };
}

/// A text as a pattern of what is written, without quotes.
pub(crate) fn exactly(text: &str) -> String {
    let mut out = String::new();
    text.chars().for_each(|c| character(c, &mut out));
    out
}

/// A text as it is written, with quotes.
pub(crate) fn written(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match escaped(c) {
            Some(text) => out.push_str(&text),
            None => out.push(c),
        }
    }
    out.push('"');
    out
}

/// The pattern of a format that is followed; others are annotations.
pub(crate) fn format(name: &str) -> Option<&'static str> {
    Some(match name {
        "date" => r"^[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)$",
        "time" => r"^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$",
        "date-time" => {
            r"^[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$"
        }
        "duration" => r"^P([0-9]{1,4}[WD]|([0-9]{1,4}D)?T[0-9]{1,4}[HMS])$",
        "email" => r"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,20}$",
        "hostname" => r"^([A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,20}[A-Za-z0-9])?$",
        "ipv4" => {
            r"^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])$"
        }
        "ipv6" => r"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$|^([0-9a-f]{1,4}:){1,4}(:[0-9a-f]{1,4}){1,3}$|^::1?$",
        "uuid" => r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        "uri" => r"^[a-z][a-z0-9+.-]{1,20}:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]+$",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::{CHARACTER, Pattern, exactly, written};
    use regex::Regex;

    const TEXTS: [&str; 22] = [
        "", "a", "b", "ab", "ba", "aab", "abc", "\"", "\\", "\n", "\t", "\u{1}", "\u{7f}", "ä", "1", "12", "a1", " ",
        "_", "😀", "a\"b", "A",
    ];

    #[test]
    fn escaped_pattern_matches_the_same_texts() {
        for pattern in [
            "",
            "a",
            "^a",
            "a$",
            "^a$",
            "^(a|b)+$",
            "^a|b$",
            "(^a|b$)",
            "\\d",
            "^\\w*$",
            "\\s",
            "^[^a]$",
            ".",
            "^.$",
            "[\"\\\\]",
            "^\\S+$",
            "\\n",
            "^[\\x00-\\x1f]$",
            "\\u00e4",
            "^\\p{L}$",
            "^(a|ab)(c|)$",
            "^[^\\d\\s]{2,3}$",
            "^a{2}b?$",
            "^$",
            "^\\W$",
            "[^]",
            "^(?:a|(?<x>b))$",
        ] {
            let read = Pattern::read(pattern).unwrap_or_else(|why| panic!("{pattern}: {why}"));
            let whole = Regex::new(&format!("^(?:{})$", read.written)).unwrap();
            for text in TEXTS {
                let shown = written(text);
                let inside = &shown[1..shown.len() - 1];
                assert_eq!(whole.is_match(inside), read.matches(text), "{pattern} on {text:?}: {}", read.written);
            }
        }
    }

    #[test]
    fn every_text_has_one_spelling() {
        let any = Regex::new(&format!("^{CHARACTER}*$")).unwrap();
        for text in TEXTS {
            let shown = written(text);
            assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text);
            let inside = &shown[1..shown.len() - 1];
            assert!(any.is_match(inside), "{inside}");
            assert!(Regex::new(&format!("^{}$", exactly(text))).unwrap().is_match(inside), "{inside}");
        }
        assert!(!any.is_match("\\u000a") && !any.is_match("\\u0061") && !any.is_match("\\/"));
    }

    #[test]
    fn unsupported_patterns_are_named() {
        for (pattern, words) in [
            ("(?=a)b", "cannot be read"),
            ("(a)\\1", "refers back"),
            ("\\bword", "word boundary"),
            ("a^b", "anchor"),
            ("(", "cannot be read"),
            ("\\", "ends with a backslash"),
        ] {
            let why = Pattern::read(pattern).unwrap_err();
            assert!(why.contains(words), "{pattern}: {why}");
        }
    }
}
