//! ECMA-262 patterns in the syntax of the `regex` crate.

use std::fmt::Write;

/// The beginning of a pattern, for an error.
pub(crate) fn short(pattern: &str) -> String {
    pattern.chars().take(60).collect()
}

/// In the syntax of this language: its classes are of ASCII, its dot leaves out all line ends, its brackets do not nest.
pub(crate) fn translated(pattern: &str) -> Result<String, String> {
    let mut out = String::with_capacity(pattern.len() + 16);
    let mut rest = pattern.chars().peekable();
    let mut class = false;
    while let Some(next) = rest.next() {
        match next {
            '\\' => {
                escape(&mut rest, class, &mut out).map_err(|why| format!("the pattern '{}' {why}", short(pattern)))?
            }
            '[' if !class => {
                class = true;
                let negated = rest.next_if_eq(&'^').is_some();
                match (negated, rest.next_if_eq(&']').is_some()) {
                    (true, true) => {
                        out.push_str("[\\s\\S]");
                        class = false;
                    }
                    (false, true) => {
                        out.push_str("[a&&b]");
                        class = false;
                    }
                    (true, false) => out.push_str("[^"),
                    (false, false) => out.push('['),
                }
            }
            ']' if class => {
                class = false;
                out.push(']');
            }
            '[' | '&' | '~' if class => out.extend(['\\', next]),
            '.' if !class => out.push_str("[^\\n\\r\\x{2028}\\x{2029}]"),
            next => out.push(next),
        }
    }
    Ok(out)
}

/// The spaces of ECMA-262.
const SPACES: &str =
    "\\t\\n\\x0b\\x0c\\r \\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}\\x{feff}";

fn escape(rest: &mut std::iter::Peekable<std::str::Chars<'_>>, class: bool, out: &mut String) -> Result<(), String> {
    let Some(next) = rest.next() else { return Err("ends with a backslash".into()) };
    let mut set = |inside: &str, negated: bool| {
        let _ = match (class, negated) {
            (true, false) => write!(out, "{inside}"),
            (_, true) => write!(out, "[^{inside}]"),
            (false, false) => write!(out, "[{inside}]"),
        };
    };
    match next {
        'd' | 'D' => set("0-9", next == 'D'),
        'w' | 'W' => set("A-Za-z0-9_", next == 'W'),
        's' | 'S' => set(SPACES, next == 'S'),
        'n' | 'r' | 't' | 'f' | 'v' | 'p' | 'P' | 'x' => out.extend(['\\', next]),
        'b' if class => out.push_str("\\x08"),
        'u' => {
            let code: String = match rest.next_if_eq(&'{') {
                Some(_) => rest.by_ref().take_while(|c| *c != '}').collect(),
                None => rest.by_ref().take(4).collect(),
            };
            let code = u32::from_str_radix(&code, 16).ok().and_then(char::from_u32);
            let code = code.ok_or("has an escape \\u that is not a character")?;
            let _ = write!(out, "\\x{{{:x}}}", u32::from(code));
        }
        'c' => {
            let letter = rest.next().filter(char::is_ascii_alphabetic).ok_or("has \\c without a letter")?;
            let _ = write!(out, "\\x{{{:x}}}", u32::from(letter) % 32);
        }
        '0' => out.push_str("\\x00"),
        '1'..='9' | 'k' => return Err("refers back to a group, which is not supported".into()),
        'b' | 'B' => return Err("has a word boundary, which is not supported".into()),
        other if other.is_ascii_punctuation() => out.extend(['\\', other]),
        other => out.push(other),
    }
    Ok(())
}
