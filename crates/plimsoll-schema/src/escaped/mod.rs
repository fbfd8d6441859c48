//! Grammars of a text, rewritten as grammars of that text inside a JSON string.
//!
//! Tool calls are JSON, and the free input of a custom tool is a string in it. A string is written in one way only
//! (`pattern`): a line break, a quote or a backslash takes two characters. The grammar library ends a terminal where the
//! next character cannot continue it, and never goes back by more than one. So a terminal with such characters becomes a
//! rule of smaller terminals, none of which has one inside (`units`). Other terminals stay as they are.
//!
//! The result allows the texts of the client's grammar, or slightly fewer, never more.

mod lexer;
mod units;

use std::collections::BTreeSet;
use std::fmt::Write;

use self::lexer::{Piece, pieces};

/// Bytes of a rewritten grammar.
const BYTES_MAX: usize = 1 << 20;

/// The rules of a regular expression (Rust's syntax), which matches the whole text. The first is `name`, in lower case.
///
/// # Errors
///
/// The unsupported part, as text for the client.
pub fn regex(pattern: &str, name: &str) -> Result<String, String> {
    let terminal = name.to_ascii_uppercase();
    Ok(format!("{name}: {terminal}\n{terminal}: /{}/\n", crate::pattern::complete(pattern)?))
}

/// The rules of a Lark grammar with the start rule `start`. The first rule is `name`.
///
/// # Errors
///
/// The unsupported part, as text for the client.
pub fn lark(text: &str, name: &str) -> Result<String, String> {
    let pieces = pieces(text)?;
    let mixed = mixed(&pieces);
    let ignores = pieces.contains(&Piece::Word("%ignore"));
    let mut out = format!("{name}: %lark {{\n");
    let mut ignoring = false;
    for piece in &pieces {
        match piece {
            Piece::Newline => {
                ignoring = false;
                out.push('\n');
            }
            Piece::Word(word) => {
                ignoring |= *word == "%ignore";
                let _ = write!(out, "{word} ");
            }
            Piece::Mark(mark) => out.push(*mark),
            Piece::Name(name) if mixed.contains(name) => {
                check(ignoring)?;
                let _ = write!(out, "t_{} ", name.to_ascii_lowercase());
            }
            Piece::Name(name) => {
                let _ = write!(out, "{name} ");
            }
            Piece::Terminal(terminal) if terminal.is_mixed() => {
                check(ignoring || ignores && !terminal.is_one_character())?;
                terminal.units(&mut out)?;
            }
            Piece::Terminal(terminal) => terminal.whole(&mut out)?,
        }
        if out.len() > BYTES_MAX {
            return Err(format!("the grammar takes more than {BYTES_MAX} bytes when it is expanded; simplify it"));
        }
    }
    Ok(out + "\n}\n")
}

/// `%ignore` would also apply between the terminals into which one terminal is split.
fn check(is_refused: bool) -> Result<(), String> {
    match is_refused {
        true => Err("the grammar has %ignore beside terminals with line breaks, tabs, quotes or backslashes, which \
                     custom tools do not support: write the white space into the rules"
            .into()),
        false => Ok(()),
    }
}

/// The named terminals that contain a character escaped in JSON, directly or through other terminals.
fn mixed<'t>(pieces: &[Piece<'t>]) -> BTreeSet<&'t str> {
    let mut mixed = BTreeSet::new();
    loop {
        let before = mixed.len();
        let (mut definition, mut first) = (None, true);
        for (at, piece) in pieces.iter().enumerate() {
            match piece {
                Piece::Newline => {
                    first = true;
                    continue;
                }
                // Another alternative goes on with the definition.
                Piece::Mark('|') => {}
                Piece::Name(name) if first && is_defined(&pieces[at + 1..]) => definition = Some(*name),
                _ if first => {
                    definition = definition.filter(|_| !is_defined(&pieces[at + 1..]) && !is_directive(piece))
                }
                Piece::Name(name) if mixed.contains(name) => mixed.extend(definition),
                Piece::Terminal(terminal) if terminal.is_mixed() => mixed.extend(definition),
                _ => {}
            }
            first = false;
        }
        if mixed.len() == before {
            return mixed;
        }
    }
}

/// Whether the name before `rest` is being defined: a colon follows in its line, after a priority or attributes.
fn is_defined(rest: &[Piece<'_>]) -> bool {
    let line = rest.iter().take_while(|piece| **piece != Piece::Newline);
    line.take(16).any(|piece| *piece == Piece::Mark(':'))
}

fn is_directive(piece: &Piece<'_>) -> bool {
    matches!(piece, Piece::Word(word) if word.starts_with('%'))
}

#[cfg(test)]
mod tests {
    use super::{lark, regex};

    #[test]
    fn terminals_are_written_as_in_a_json_string() {
        let rules =
            lark("start: \"a\\n\" NAME \"B\"i // why\nNAME: \"a\"..\"c\" | /x\\/[\"y]/i\n%import common.LF\n", "in")
                .unwrap();
        assert!(rules.starts_with("in: %lark {\nstart :(\"a\" \"\\\\n\") t_name /"), "{rules}");
        assert!(rules.contains("[\\x{61}-\\x{63}]") && !rules.contains("why"), "{rules}");
        assert!(rules.contains("t_lf :(\"\\\\n\")"), "{rules}");
        // A run of characters is one terminal where nothing that follows could belong to it.
        let rules = lark("start: /(.*)/ LF\nLF: /\\n/\nWORD: /[a-z]+/\nOTHER: WORD /.*x/", "in").unwrap();
        assert!(rules.contains("]+/ | ") && rules.contains("WORD :/") && rules.contains("t_other :WORD "), "{rules}");
        assert_eq!(rules.matches("]+/ | ").count(), 1, "{rules}");
        assert_eq!(regex("^a|b$", "x").unwrap_err(), "the pattern '^a|b$' has an anchor where none is supported");
        assert_eq!(regex("^(ab)+\n$", "x").unwrap(), "x: X\nX: /(ab)+\\x{5c}n/\n");
    }

    #[test]
    fn unsupported_grammars_are_named() {
        for (text, words) in [
            ("start: %json {}", "%json"),
            ("start: <think>", "special token"),
            ("start: @other", "another grammar"),
            ("start: ~A", "complement"),
            ("start: \"a", "without its end"),
            ("start: /a", "without its end"),
            ("start: a }\n%json {", "`}` too many"),
            ("%import other.X", "imports `other.X`"),
            ("%import common.NONE", "imports `common.NONE`"),
            ("start: /(?=a)b/", "cannot be read"),
            ("start: \"z\"..\"aa\"", "one character"),
            ("start: \"a\"\n%import common.WS\n%ignore WS", "%ignore beside"),
            ("start: /a.*/ \n%ignore \" \"", "%ignore beside"),
        ] {
            let why = lark(text, "in").unwrap_err();
            assert!(why.contains(words), "{text}: {why}");
        }
        let large = format!("start: {}", "/\\w/ ".repeat(5000));
        assert!(lark(&large, "in").unwrap_err().contains("bytes when it is expanded"));
        assert!(lark("start: \"a\" | B\n%ignore / +/\n%import common.INT -> B", "in").is_ok());
    }
}
