//! Wraps the words of an answer at the edge of the terminal, as they arrive. Control characters are dropped: an answer must
//! not move the cursor or change the terminal.

use unicode_width::UnicodeWidthChar;

/// Columns of a tab, at most.
const TAB: usize = 8;

/// Marks the beginning and the end of a block of code, which is not wrapped.
const FENCE: &str = "```";

/// Wraps text that arrives in pieces.
#[derive(Debug, Default)]
pub struct Wrap {
    column: usize,
    /// Spaces before `word`; they are dropped where the line breaks.
    spaces: usize,
    /// The characters of the unfinished word that are not shown yet. They are shorter than a line.
    word: String,
    word_width: usize,
    /// Whether the word began before `word`. It is then longer than a line, and the terminal breaks it.
    continues: bool,
    /// The first characters of the line, to find fences.
    head: String,
    in_code: bool,
}

impl Wrap {
    /// Takes a piece and returns the text that can be shown on a terminal of `width` columns.
    pub fn push(&mut self, piece: &str, width: usize) -> String {
        let mut out = String::with_capacity(piece.len() + 8);
        for c in piece.chars() {
            self.take(c, width.max(1), &mut out);
        }
        out
    }

    /// Returns the unfinished word at the end of the text, and resets the state.
    pub fn end(&mut self, width: usize) -> String {
        let mut out = String::new();
        self.finish_word(width.max(1), &mut out);
        *self = Self::default();
        out
    }

    fn take(&mut self, c: char, width: usize, out: &mut String) {
        if c == '\n' {
            self.finish_word(width, out);
            self.in_code ^= self.head.starts_with(FENCE);
            (self.column, self.spaces) = (0, 0);
            self.head.clear();
            out.push('\n');
            return;
        }
        // Marks of direction would show text in another order than it has.
        let reorders = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() && c != '\t' || reorders {
            return;
        }
        if self.head.len() < FENCE.len() && !(self.head.is_empty() && c == ' ') {
            self.head.push(c);
        }
        if self.in_code || self.head.starts_with(FENCE) {
            self.finish_word(width, out);
            self.column += c.width().unwrap_or(TAB);
            out.push(c);
            return;
        }
        match c {
            '\t' => {
                self.finish_word(width, out);
                self.spaces += TAB - (self.column + self.spaces) % TAB;
            }
            ' ' => {
                self.finish_word(width, out);
                self.spaces += 1;
            }
            c => self.grow(c, width, out),
        }
    }

    /// Adds a character to the word.
    fn grow(&mut self, c: char, width: usize, out: &mut String) {
        let columns = c.width().unwrap_or(0);
        if columns > 1 {
            // A line may break between two wide characters.
            self.finish_word(width, out);
        } else if self.word_width + columns > width {
            // A long word gets no line break, so that a copied URL is whole.
            self.finish_word(width, out);
            self.continues = true;
        }
        self.word.push(c);
        self.word_width += columns;
        if columns > 1 {
            self.finish_word(width, out);
        }
    }

    fn finish_word(&mut self, width: usize, out: &mut String) {
        if self.word.is_empty() {
            self.continues = false;
            return;
        }
        if !self.continues && self.column > 0 && self.column + self.spaces + self.word_width > width {
            out.push('\n');
            (self.column, self.spaces) = (0, 0);
        }
        out.extend(std::iter::repeat_n(' ', self.spaces));
        out.push_str(&self.word);
        self.column += self.spaces + self.word_width;
        if self.column > width {
            self.column %= width;
        }
        (self.spaces, self.continues) = (0, false);
        self.word.clear();
        self.word_width = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(text: &str, width: usize, piece: usize) -> String {
        let mut wrap = Wrap::default();
        let chars: Vec<char> = text.chars().collect();
        let pieces = chars.chunks(piece).map(|piece| piece.iter().collect::<String>());
        let mut out: String = pieces.map(|piece| wrap.push(&piece, width)).collect();
        out += &wrap.end(width);
        out
    }

    #[test]
    fn words_break_at_the_edge_however_they_arrive() {
        let text = "The load line of a ship\nis  a mark.";
        for piece in 1..9 {
            assert_eq!(wrapped(text, 10, piece), "The load\nline of a\nship\nis  a\nmark.", "pieces of {piece}");
        }
        assert_eq!(wrapped("  an indent stays", 80, 3), "  an indent stays");
    }

    #[test]
    fn wide_characters_break_between_each_other_and_a_long_word_not_at_all() {
        assert_eq!(wrapped("船のある海", 4, 1), "船の\nある\n海");
        let url = "http://127.0.0.1:8000/v1/models/of/a/server";
        let text = format!("see {url} there");
        for piece in 1..9 {
            assert_eq!(wrapped(&text, 20, piece), format!("see\n{url} there"), "the word ends at column 3");
        }
    }

    #[test]
    fn code_is_not_wrapped() {
        let text = "so:\n```sh\na line of code that is long\n```\nand words wrap again";
        let out = wrapped(text, 10, 4);
        assert_eq!(out, "so:\n```sh\na line of code that is long\n```\nand words\nwrap again");
    }

    #[test]
    fn control_characters_of_an_answer_do_not_reach_the_terminal() {
        assert_eq!(wrapped("a\x1b[31mred\x07\u{9b}2J\rb\0", 80, 1), "a[31mred2Jb");
        let code = wrapped("```\n\x1b]0;title\x07x\n```", 80, 2);
        assert_eq!(code, "```\n]0;titlex\n```");
    }
}
