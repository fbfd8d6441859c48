//! Converts llama.cpp's grammars (GBNF) to llguidance's Lark dialect.
//!
//! Out of scope: the cost of a grammar. The result is compiled like any other.

use std::fmt::Write;

/// Most nested groups.
const NESTED_MAX: usize = 64;

/// Converts a grammar. One of its rules must be `root`.
///
/// # Errors
///
/// The first syntax error, with its line.
pub fn to_lark(text: &str) -> Result<String, String> {
    let mut reader = Reader { rest: text, line: 1 };
    let mut out = String::new();
    let mut root = false;
    reader.space(true);
    while !reader.rest.is_empty() {
        let name = reader.name()?;
        root |= name == "root";
        reader.space(false);
        if !reader.eat("::=") {
            return Err(reader.error("'::=' is missing after a rule's name"));
        }
        reader.space(true);
        // Writing to a string cannot fail.
        let _ = write!(out, "{}: ", rule(name));
        reader.alternatives(&mut out, 0)?;
        out.push('\n');
        reader.space(true);
    }
    if !root {
        return Err("the grammar has no rule 'root'".into());
    }
    Ok(out)
}

/// A rule's name in Lark: lower case with a prefix, so that it is neither a terminal nor a keyword.
fn rule(name: &str) -> String {
    if name == "root" {
        return "start".into();
    }
    let mut out = String::from("g_");
    for c in name.chars() {
        match c {
            'a'..='z' | '0'..='9' => out.push(c),
            // Each character has its own encoding, so names stay distinct.
            c => {
                let _ = write!(out, "_{:x}_", u32::from(c));
            }
        }
    }
    out
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Reader<'a> {
    fn error(&self, why: &str) -> String {
        format!("line {}: {why}", self.line)
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.rest = &self.rest[next.len_utf8()..];
        self.line += usize::from(next == '\n');
        Some(next)
    }

    fn eat(&mut self, text: &str) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// Skips blanks and comments; with `lines`, line ends too.
    fn space(&mut self, lines: bool) {
        while let Some(next) = self.peek() {
            match next {
                ' ' | '\t' => {}
                '\r' | '\n' if lines => {}
                '#' => {
                    let end = self.rest.find(['\r', '\n']).unwrap_or(self.rest.len());
                    self.rest = &self.rest[end..];
                    continue;
                }
                _ => return,
            }
            self.next();
        }
    }

    fn name(&mut self) -> Result<&'a str, String> {
        let word = |c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_');
        let end = self.rest.find(word).unwrap_or(self.rest.len());
        if end == 0 {
            return Err(self.error("a rule's name is missing"));
        }
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        Ok(name)
    }

    fn alternatives(&mut self, out: &mut String, depth: usize) -> Result<(), String> {
        if depth > NESTED_MAX {
            return Err(self.error("groups are nested too deeply: the limit is 64"));
        }
        loop {
            let before = out.len();
            while self.item(out, depth)? {
                self.space(depth > 0);
            }
            if out.len() == before {
                out.push_str("\"\" ");
            }
            if !self.eat("|") {
                return Ok(());
            }
            self.space(true);
            out.push_str("| ");
        }
    }

    /// Converts one item of a sequence. False at the end of the sequence.
    fn item(&mut self, out: &mut String, depth: usize) -> Result<bool, String> {
        let start = out.len();
        match self.peek() {
            Some('"') => {
                self.next();
                let mut text = String::new();
                while let Some(c) = self.character('"')? {
                    text.push(c);
                }
                out.push_str(&serde_json::Value::from(text).to_string());
            }
            Some('[') => {
                self.next();
                let class = self.class()?;
                let _ = write!(out, "/{class}/");
            }
            Some('.') => {
                self.next();
                out.push_str("/(.|\\n)/");
            }
            Some('(') => {
                self.next();
                self.space(true);
                out.push('(');
                self.alternatives(out, depth + 1)?;
                out.push(')');
                if !self.eat(")") {
                    return Err(self.error("')' is missing"));
                }
            }
            Some(c) if c.is_ascii_alphanumeric() => out.push_str(&rule(self.name()?)),
            Some('<' | '!') => {
                return Err(self.error("tokens in angle brackets are not supported: write their text in quotes"));
            }
            Some(')' | '|' | '\n' | '\r') | None => return Ok(false),
            Some(other) => return Err(self.error(&format!("unexpected '{other}'"))),
        }
        self.space(false);
        while let Some(repeat) = self.repetition()? {
            out.insert(start, '(');
            out.push(')');
            out.push_str(&repeat);
            self.space(false);
        }
        out.push(' ');
        Ok(true)
    }

    fn repetition(&mut self) -> Result<Option<String>, String> {
        Ok(match self.peek() {
            Some(sign @ ('*' | '+' | '?')) => {
                self.next();
                Some(sign.to_string())
            }
            Some('{') => {
                let end = self.rest.find('}').ok_or_else(|| self.error("'}' is missing"))?;
                let inside = self.rest[1..end].to_owned();
                let (least, most) = inside.split_once(',').unwrap_or((&inside, &inside));
                let (least, most) = (least.trim(), most.trim());
                let count = |text: &str| text.is_empty() || text.parse::<u32>().is_ok();
                if !count(least) || !count(most) || inside.trim().is_empty() {
                    return Err(
                        self.error(&format!("invalid repetition '{{{inside}}}': use {{m}}, {{m,}}, {{,n}} or {{m,n}}"))
                    );
                }
                self.rest = &self.rest[end + 1..];
                let least = if least.is_empty() { "0" } else { least };
                Some(format!("{{{least},{most}}}"))
            }
            _ => None,
        })
    }

    /// The next character of a literal or a class. `None` at its end.
    fn character(&mut self, end: char) -> Result<Option<char>, String> {
        let missing = |reader: &Self| reader.error(&format!("'{end}' is missing"));
        let next = self.next().ok_or_else(|| missing(self))?;
        if next == end {
            return Ok(None);
        }
        if next != '\\' {
            return Ok(Some(next));
        }
        let escape = self.next().ok_or_else(|| missing(self))?;
        let digits = match escape {
            'n' => return Ok(Some('\n')),
            't' => return Ok(Some('\t')),
            'r' => return Ok(Some('\r')),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other if other.is_ascii_punctuation() => return Ok(Some(other)),
            other => return Err(self.error(&format!("unknown escape '\\{other}'"))),
        };
        let code = self.rest.get(..digits).and_then(|code| u32::from_str_radix(code, 16).ok()).and_then(char::from_u32);
        let code =
            code.ok_or_else(|| self.error(&format!("'\\{escape}' needs {digits} hexadecimal digits of a character")))?;
        self.rest = &self.rest[digits..];
        Ok(Some(code))
    }

    /// A class, after its bracket, as a regular expression.
    fn class(&mut self) -> Result<String, String> {
        let mut out = String::from(if self.eat("^") { "[^" } else { "[" });
        let mut empty = true;
        while let Some(first) = self.character(']')? {
            empty = false;
            let _ = write!(out, "\\x{{{:x}}}", u32::from(first));
            if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                self.next();
                let last = self.character(']')?.filter(|last| *last >= first);
                let last = last.ok_or_else(|| self.error("a range of characters ends before it begins"))?;
                let _ = write!(out, "-\\x{{{:x}}}", u32::from(last));
            }
        }
        if empty {
            return Err(self.error("a class of characters is empty"));
        }
        out.push(']');
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::to_lark;

    #[test]
    fn rules_literals_classes_and_repetitions_are_rewritten() {
        let text = r#"# a list
root ::= "- \"" item+ "\n" (ws | "x"){2,3} # more
item ::= [^a-z\]\n]* other-Rule? |
  .
other-Rule ::= ("\x41" "\u00e4"
    | [0-9]{3}) ws{,2}
ws ::= "" | " "
"#;
        let expected = "start: \"- \\\"\" (g_item)+ \"\\n\" ((g_ws | \"x\" )){2,3} \n\
            g_item: (/[^\\x{61}-\\x{7a}\\x{5d}\\x{a}]/)* (g_other_2d__52_ule)? | /(.|\\n)/ \n\
            g_other_2d__52_ule: (\"A\" \"ä\" | (/[\\x{30}-\\x{39}]/){3,3} ) (g_ws){0,2} \n\
            g_ws: \"\" | \" \" \n";
        assert_eq!(to_lark(text).unwrap(), expected);
    }

    #[test]
    fn syntax_errors_name_their_line() {
        for (text, words) in [
            ("a ::= \"x\"", "no rule 'root'"),
            ("root ::= \"x\"\nb = \"y\"", "line 2: '::=' is missing"),
            ("root ::= (\"x\"", "line 1: ')' is missing"),
            ("root ::= \"x", "line 1: '\"' is missing"),
            ("root ::= [z-a]", "ends before it begins"),
            ("root ::= <think>", "angle brackets"),
            ("root ::= \"x\"{a}", "invalid repetition"),
            ("root ::= \"\\q\"", "unknown escape"),
        ] {
            let why = to_lark(text).unwrap_err();
            assert!(why.contains(words), "{text}: {why}");
        }
        assert!(to_lark(&format!("root ::= {}", "(".repeat(100))).unwrap_err().contains("the limit is 64"));
    }
}
