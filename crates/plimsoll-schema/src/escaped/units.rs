//! One terminal inside a JSON string: as it is, or as a rule of terminals that have no escape inside.

use std::fmt::Write;

use regex_syntax::hir::{Class, Hir, HirKind, Look, Repetition};

use crate::json::quoted;
use crate::pattern::{parsed, write, written};

/// A terminal.
#[derive(Debug, PartialEq)]
pub(super) enum Terminal {
    Text(String),
    /// Without anchors at its ends, and the client's own words for errors.
    Pattern(Hir, String),
}

impl Terminal {
    /// Reads a pattern in Rust's syntax.
    pub fn read(pattern: &str) -> Result<Self, String> {
        let hir = parsed(pattern, pattern)?;
        let is = |hir: Option<&Hir>, look: Look| hir.is_some_and(|hir| *hir.kind() == HirKind::Look(look));
        let mut parts = match hir.kind() {
            HirKind::Concat(parts) => parts.clone(),
            _ => vec![hir.clone()],
        };
        if is(parts.first(), Look::Start) {
            parts.remove(0);
        }
        if is(parts.last(), Look::End) {
            parts.pop();
        }
        Ok(Self::Pattern(Hir::concat(parts), pattern.to_owned()))
    }

    /// Whether it contains a character that JSON escapes.
    pub fn is_mixed(&self) -> bool {
        match self {
            Self::Text(text) => text.chars().any(is_escaped),
            Self::Pattern(hir, _) => has_escapes(hir),
        }
    }

    /// Whether it matches single characters only.
    pub fn is_one_character(&self) -> bool {
        match self {
            Self::Text(text) => text.chars().count() == 1,
            Self::Pattern(hir, _) => matches!(hir.kind(), HirKind::Class(_)) || one(hir).is_some(),
        }
    }

    /// Writes it as one terminal.
    pub fn whole(&self, out: &mut String) -> Result<(), String> {
        match self {
            Self::Text(text) => {
                let _ = write!(out, "{} ", quoted(text));
            }
            Self::Pattern(hir, shown) => {
                let mut pattern = String::new();
                write(hir, &mut pattern).map_err(|why| format!("the pattern '{}' {why}", crate::ecma::short(shown)))?;
                // A terminal of nothing is no terminal.
                let _ = if pattern.is_empty() { write!(out, "\"\" ") } else { write!(out, "/{pattern}/ ") };
            }
        }
        Ok(())
    }

    /// Writes it as terminals without an escape inside.
    pub fn units(&self, out: &mut String) -> Result<(), String> {
        match self {
            Self::Text(text) => {
                let _ = write!(out, "({}) ", texts(text));
                Ok(())
            }
            Self::Pattern(hir, shown) => {
                let done = units(hir, None, out);
                done.map_err(|why| format!("the pattern '{}' {why}", crate::ecma::short(shown)))
            }
        }
    }
}

fn is_escaped(c: char) -> bool {
    matches!(c, '\0'..='\u{1f}' | '"' | '\\')
}

fn has_escapes(hir: &Hir) -> bool {
    match hir.kind() {
        HirKind::Literal(literal) => literal.0.iter().any(|byte| is_escaped(char::from(*byte))),
        HirKind::Class(class) => !split(class).1.is_empty(),
        HirKind::Repetition(repetition) => has_escapes(&repetition.sub),
        HirKind::Capture(group) => has_escapes(&group.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().any(has_escapes),
        HirKind::Empty | HirKind::Look(_) => false,
    }
}

/// The only character that a literal has.
fn one(hir: &Hir) -> Option<char> {
    let HirKind::Literal(literal) = hir.kind() else { return None };
    let text = std::str::from_utf8(&literal.0).ok()?;
    text.chars().next().filter(|c| c.len_utf8() == text.len())
}

/// The unescaped ranges of a class, and its escaped characters.
fn split(class: &Class) -> (Vec<(u32, u32)>, Vec<char>) {
    let all: Vec<(u32, u32)> = match class {
        Class::Unicode(class) => {
            class.ranges().iter().map(|range| (range.start().into(), range.end().into())).collect()
        }
        Class::Bytes(class) => class.ranges().iter().map(|range| (range.start().into(), range.end().into())).collect(),
    };
    let (mut plain, mut others) = (Vec::new(), Vec::new());
    for (mut from, end) in all {
        for special in
            (0..0x20).chain([0x22, 0x5c]).filter(|special| (from..=end).contains(special)).collect::<Vec<_>>()
        {
            if special > from {
                plain.push((from, special - 1));
            }
            from = special + 1;
            others.extend(char::from_u32(special));
        }
        if from <= end {
            plain.push((from, end));
        }
    }
    (plain, others)
}

/// A text as literals: runs of characters that stand for themselves, and single escapes.
fn texts(text: &str) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut run = String::new();
    for c in text.chars() {
        if !is_escaped(c) {
            run.push(c);
            continue;
        }
        if !run.is_empty() {
            parts.push(quoted(&std::mem::take(&mut run)));
        }
        parts.push(escape(c));
    }
    if !run.is_empty() {
        parts.push(quoted(&run));
    }
    parts.join(" ")
}

/// The literal of an escaped character.
fn escape(c: char) -> String {
    let inner = written(&c.to_string());
    quoted(&inner[1..inner.len() - 1])
}

/// Writes a part. `after`: what follows it in the terminal; none at its end.
fn units(hir: &Hir, after: Option<&Hir>, out: &mut String) -> Result<(), String> {
    match hir.kind() {
        HirKind::Empty => out.push_str("\"\" "),
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|_| "has bytes that are no text")?;
            let _ = write!(out, "({}) ", texts(text));
        }
        HirKind::Class(class) => {
            let _ = write!(out, "({}) ", alternatives(class, ""));
        }
        HirKind::Look(_) => return Err("has an anchor where none is supported".into()),
        HirKind::Capture(group) => units(&group.sub, after, out)?,
        HirKind::Concat(parts) => {
            out.push('(');
            for (at, part) in parts.iter().enumerate() {
                units(part, parts.get(at + 1).or(after), out)?;
            }
            out.push_str(") ");
        }
        HirKind::Alternation(parts) => {
            for (at, part) in parts.iter().enumerate() {
                out.push_str(if at == 0 { "(" } else { "| " });
                units(part, after, out)?;
            }
            out.push_str(") ");
        }
        HirKind::Repetition(repetition) => repeated(repetition, after, out)?,
    }
    Ok(())
}

fn repeated(repetition: &Repetition, after: Option<&Hir>, out: &mut String) -> Result<(), String> {
    let mut item = String::new();
    let class = match repetition.sub.kind() {
        HirKind::Class(class) => Some(class),
        HirKind::Capture(group) => match group.sub.kind() {
            HirKind::Class(class) => Some(class),
            _ => None,
        },
        _ => None,
    };
    match (class, repetition.min, repetition.max) {
        // A run is one terminal, unless the next part may match its characters: then each character is a terminal.
        (Some(class), 0 | 1, None) if !overlaps(class, after) => {
            let _ = write!(item, "({})", alternatives(class, "+"));
        }
        _ => {
            // The next part may be another repetition.
            item.push('(');
            units(&repetition.sub, Some(&repetition.sub), &mut item)?;
            item.push(')');
        }
    }
    let _ = match (repetition.min, repetition.max) {
        (0, None) => write!(out, "{item}* "),
        (1, None) => write!(out, "{item}+ "),
        (0, Some(1)) => write!(out, "{item}? "),
        (min, None) => write!(out, "({item}~{min}..{min} {item}*) "),
        (min, Some(max)) => write!(out, "{item}~{min}..{max} "),
    };
    Ok(())
}

/// A class as alternatives: its characters that stand for themselves, as often as `times` says, and each escape.
fn alternatives(class: &Class, times: &str) -> String {
    let (plain, others) = split(class);
    let mut all = Vec::new();
    if !plain.is_empty() {
        let ranges = plain.iter().fold(String::new(), |mut ranges, (from, to)| {
            let _ = write!(ranges, "\\x{{{from:x}}}-\\x{{{to:x}}}");
            ranges
        });
        all.push(format!("/[{ranges}]{times}/"));
    }
    all.extend(others.into_iter().map(escape));
    // A class of nothing matches nothing.
    if all.is_empty() { "/[a&&b]/".into() } else { all.join(" | ") }
}

/// Whether the next part may start with an unescaped character of the class.
fn overlaps(class: &Class, after: Option<&Hir>) -> bool {
    let Some(after) = after else { return false };
    let has = |from: u32, to: u32| split(class).0.iter().any(|(a, b)| *a <= to && from <= *b);
    match after.kind() {
        HirKind::Literal(literal) => {
            let first = std::str::from_utf8(&literal.0).ok().and_then(|text| text.chars().next());
            first.is_none_or(|c| has(c.into(), c.into()))
        }
        HirKind::Class(next) => split(next).0.iter().any(|(from, to)| has(*from, *to)),
        HirKind::Capture(group) => overlaps(class, Some(&group.sub)),
        HirKind::Alternation(parts) => parts.iter().any(|part| overlaps(class, Some(part))),
        HirKind::Concat(parts) => overlaps(class, parts.first()),
        // It may be empty, and what follows it counts then.
        HirKind::Repetition(repetition) => repetition.min == 0 || overlaps(class, Some(&repetition.sub)),
        HirKind::Empty | HirKind::Look(_) => true,
    }
}
