//! A Lark grammar in pieces.

use std::iter::Peekable;
use std::str::CharIndices;

use super::units::Terminal;

/// Lark's own terminals: `%import common.NAME`.
const COMMON: [(&str, &str); 23] = [
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9A-Fa-f]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("DECIMAL", r"[0-9]+\.[0-9]*|\.[0-9]+"),
    ("_EXP", "[eE][+-]?[0-9]+"),
    ("FLOAT", r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"),
    ("SIGNED_FLOAT", r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"),
    ("NUMBER", r"([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?"),
    ("SIGNED_NUMBER", r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?"),
    ("ESCAPED_STRING", r#""([^"\\\n]|\\.)*""#),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[A-Za-z_][A-Za-z0-9_]*"),
    ("WS_INLINE", r"[ \t]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("CR", r"\r"),
    ("LF", r"\n"),
    ("NEWLINE", r"(\r?\n)+"),
    ("SH_COMMENT", r"#[^\n]*"),
    ("CPP_COMMENT", r"//[^\n]*"),
];

/// A piece of a grammar.
#[derive(Debug, PartialEq)]
pub(super) enum Piece<'t> {
    Newline,
    /// The name of a terminal.
    Name(&'t str),
    /// A rule's name, a number or a directive.
    Word(&'t str),
    /// A sign.
    Mark(char),
    Terminal(Terminal),
}

/// Takes a grammar apart, without comments. What custom tools do not support is an error.
pub(super) fn pieces(text: &str) -> Result<Vec<Piece<'_>>, String> {
    let mut lexer = Lexer { text, rest: text.char_indices().peekable(), pieces: Vec::new() };
    lexer.all()?;
    Ok(lexer.pieces)
}

struct Lexer<'t> {
    text: &'t str,
    rest: Peekable<CharIndices<'t>>,
    pieces: Vec<Piece<'t>>,
}

impl<'t> Lexer<'t> {
    fn all(&mut self) -> Result<(), String> {
        let mut depth = 0_usize;
        while let Some((at, c)) = self.rest.peek().copied() {
            match c {
                '\n' => self.mark(Piece::Newline),
                c if c.is_ascii_whitespace() => drop(self.rest.next()),
                '#' => self.comment(),
                '/' if self.text[at..].starts_with("//") => self.comment(),
                '/' => self.pattern()?,
                '"' => self.literal()?,
                '%' => self.directive()?,
                '<' => return Err("the grammar names a special token (`<…>`); custom tools take text only".into()),
                '@' => return Err("the grammar refers to another grammar (`@…`); write its rules out".into()),
                '&' => return Err("the grammar has an intersection (`&`), which custom tools do not support".into()),
                '~' => self.repetition()?,
                '{' | '}' => {
                    // An unmatched brace would end the grammar's own scope.
                    let closed = || depth.checked_sub(1).ok_or("the grammar has a `}` too many");
                    depth = if c == '{' { depth + 1 } else { closed()? };
                    self.mark(Piece::Mark(c));
                }
                c if c.is_ascii_alphanumeric() || c == '_' => {
                    let word = self.name(at);
                    let is_terminal = word.trim_start_matches('_').starts_with(|c: char| c.is_ascii_uppercase());
                    self.pieces.push(if is_terminal { Piece::Name(word) } else { Piece::Word(word) });
                }
                c => self.mark(Piece::Mark(c)),
            }
        }
        if depth > 0 { Err("the grammar has a `{` too many".into()) } else { Ok(()) }
    }

    fn mark(&mut self, piece: Piece<'t>) {
        self.rest.next();
        self.pieces.push(piece);
    }

    fn comment(&mut self) {
        self.word(|c| c != '\n');
    }

    /// The characters that `goes_on` accepts.
    fn word(&mut self, goes_on: impl Fn(char) -> bool) -> &'t str {
        let start = self.rest.peek().map_or(self.text.len(), |(at, _)| *at);
        while self.rest.next_if(|(_, c)| goes_on(*c)).is_some() {}
        let end = self.rest.peek().map_or(self.text.len(), |(at, _)| *at);
        &self.text[start..end]
    }

    /// A name, in which hyphens stand between letters; `->` follows names.
    fn name(&mut self, start: usize) -> &'t str {
        self.word(|c| c.is_ascii_alphanumeric() || c == '_');
        while let Some((at, '-')) = self.rest.peek().copied()
            && self.text[at + 1..].starts_with(|c: char| c.is_ascii_alphanumeric())
        {
            self.rest.next();
            self.word(|c| c.is_ascii_alphanumeric() || c == '_');
        }
        let end = self.rest.peek().map_or(self.text.len(), |(at, _)| *at);
        &self.text[start..end]
    }

    fn blanks(&mut self) {
        self.word(|c| c == ' ' || c == '\t');
    }

    /// `~` before a number repeats; before anything else it is a complement.
    fn repetition(&mut self) -> Result<(), String> {
        self.mark(Piece::Mark('~'));
        self.blanks();
        match self.rest.peek() {
            Some((_, c)) if c.is_ascii_digit() => Ok(()),
            _ => Err("the grammar has a complement (`~`), which custom tools do not support".into()),
        }
    }

    /// A text up to a mark that no backslash stands before, without the marks.
    fn within(&mut self, mark: char) -> Result<&'t str, String> {
        self.rest.next();
        let start = self.rest.peek().map_or(self.text.len(), |(at, _)| *at);
        let mut is_escaped = false;
        for (at, c) in self.rest.by_ref() {
            match c {
                '\n' => break,
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                _ if c == mark => return Ok(&self.text[start..at]),
                _ => {}
            }
        }
        Err(format!("the grammar has a {mark} without its end in one line"))
    }

    fn terminal(&mut self, pattern: &str) -> Result<(), String> {
        self.pieces.push(Piece::Terminal(Terminal::read(pattern)?));
        Ok(())
    }

    /// `/pattern/flags`
    fn pattern(&mut self) -> Result<(), String> {
        let pattern = self.within('/')?;
        let flags = self.word(|c| "imslux".contains(c));
        if flags.contains('l') {
            return Err("the grammar has a pattern with the flag l, which is not supported".into());
        }
        // Rust's syntax escapes no slash.
        let pattern = pattern.replace("\\/", "/");
        self.terminal(&if flags.is_empty() { pattern } else { format!("(?{flags}){pattern}") })
    }

    /// A text, or a range of characters.
    fn literal(&mut self) -> Result<(), String> {
        let text = self.string()?;
        if self.rest.next_if(|(_, c)| *c == 'i').is_some() {
            let pattern: String = text.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
            return self.terminal(&format!("(?i){pattern}"));
        }
        let after = self.rest.peek().map_or("", |(at, _)| &self.text[*at..]);
        let end = after.trim_start_matches([' ', '\t']).strip_prefix("..");
        if end.is_some_and(|end| end.trim_start_matches([' ', '\t']).starts_with('"')) {
            self.word(|c| c != '"');
            let end = self.string()?;
            let one = |text: &str| text.chars().next().filter(|c| c.len_utf8() == text.len());
            let (Some(from), Some(to)) = (one(&text), one(&end)) else {
                return Err("the grammar has a range whose ends are not one character".into());
            };
            return self.terminal(&format!("[\\x{{{:x}}}-\\x{{{:x}}}]", u32::from(from), u32::from(to)));
        }
        self.pieces.push(Piece::Terminal(Terminal::Text(text)));
        Ok(())
    }

    fn string(&mut self) -> Result<String, String> {
        let inner = self.within('"')?;
        // Lark has one escape more than JSON.
        let json = inner.replace("\\\\", "\\u005c").replace("\\x", "\\u00");
        serde_json::from_str(&format!("\"{json}\""))
            .map_err(|error| format!("the grammar has a text that cannot be read: {error}"))
    }

    fn directive(&mut self) -> Result<(), String> {
        self.rest.next();
        match self.word(|c| c.is_ascii_alphabetic()) {
            "ignore" => {
                self.pieces.push(Piece::Word("%ignore"));
                Ok(())
            }
            "import" => self.import(),
            other => {
                let other: String = other.chars().take(20).collect();
                Err(format!("the grammar has %{other}; custom tools support %ignore and %import common.NAME"))
            }
        }
    }

    /// `common.NAME`, `common.NAME -> OTHER` and `common (NAME, NAME)`.
    fn import(&mut self) -> Result<(), String> {
        self.blanks();
        let line = self.word(|c| c != '\n' && c != '#').trim();
        let refused = || {
            let line: String = line.chars().take(60).collect();
            format!("the grammar imports `{line}`; custom tools support %import common.NAME")
        };
        let rest = line.strip_prefix("common").ok_or_else(refused)?.trim_start();
        let (names, alias) = match rest.strip_prefix('.') {
            Some(one) => {
                let (name, alias) =
                    one.split_once("->").map_or((one, None), |(name, alias)| (name, Some(alias.trim())));
                (vec![name.trim()], alias)
            }
            None => {
                let list = rest.strip_prefix('(').and_then(|list| list.strip_suffix(')')).ok_or_else(refused)?;
                (list.split(',').map(str::trim).collect(), None)
            }
        };
        for name in names {
            let (_, pattern) = COMMON.iter().find(|(known, _)| *known == name).ok_or_else(refused)?;
            self.pieces.extend([Piece::Name(alias.unwrap_or(name)), Piece::Mark(':')]);
            self.terminal(pattern)?;
            self.pieces.push(Piece::Newline);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{COMMON, pieces};

    #[test]
    fn terminals_of_lark_can_be_read() {
        for (name, _) in COMMON {
            assert_eq!(pieces(&format!("start: {name}\n%import common.{name}")).map(|all| all.len()), Ok(8), "{name}");
        }
    }
}
