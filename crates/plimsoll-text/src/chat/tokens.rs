//! A look at the tokens of a template before it is compiled: what would overflow the stack or fold into gigabytes is refused.
//!
//! The library's parser, code generator and destructors recurse over the tree, and a chain of ten thousand operators is a
//! tree ten thousand deep; it also computes constant expressions while compiling. Both follow from counts of tokens, with
//! limits far beyond any template that a person wrote. What happens while rendering is the business of `budget`.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;

use crate::error::TextError;

/// The most operators, brackets and accesses in one tag. Real templates have a few dozen.
const OPERATORS_MAX: usize = 400;
/// The deepest nesting of statements, each `elif` counted as one more. Real templates have a dozen.
const STATEMENTS_MAX: usize = 100;
/// The most bytes of constants that multiplications in a template may add up to when they are folded.
const FOLDED_BYTES_MAX: u64 = 4 << 20;

/// Refuses a template that would be dangerous to compile.
pub(super) fn check(source: &str, syntax: &SyntaxConfig) -> Result<(), TextError> {
    let mut look = Look::default();
    for token in tokenize(source, false, syntax.clone()) {
        let (token, _) = token.map_err(|error| TextError::BadTemplate(error.to_string()))?;
        look.take(&token).map_err(TextError::BadTemplate)?;
    }
    look.finish().map_err(TextError::BadTemplate)
}

/// What has been counted so far.
struct Look {
    /// Operators in the tag at hand.
    operators: usize,
    /// The statement at hand, until its second token.
    statement: Statement,
    /// Nesting levels that each open statement takes, and their sum.
    open: Vec<usize>,
    depth: usize,
    constants: Constants,
    /// What folding may have made so far, in bytes.
    folded: u64,
}

/// The constants of the tag at hand.
struct Constants {
    /// The product of all integers.
    product: u64,
    /// The longest string, in bytes.
    longest: u64,
    multiplications: u64,
}

impl Default for Constants {
    fn default() -> Self {
        Self { product: 1, longest: 1, multiplications: 0 }
    }
}

/// How much of a statement has been seen.
#[derive(PartialEq, Eq)]
enum Statement {
    /// Not in a statement, or beyond its keyword.
    Other,
    /// At the keyword.
    Keyword,
    /// In `set`, which opens a block unless it assigns.
    Set,
}

impl Default for Look {
    fn default() -> Self {
        Self {
            operators: 0,
            statement: Statement::Other,
            open: Vec::new(),
            depth: 0,
            constants: Constants::default(),
            folded: 0,
        }
    }
}

impl Look {
    fn take(&mut self, token: &Token<'_>) -> Result<(), String> {
        match token {
            Token::TemplateData(_) => {}
            Token::VariableStart | Token::VariableEnd => self.next_tag(),
            Token::BlockStart => {
                self.next_tag();
                self.statement = Statement::Keyword;
                return Ok(());
            }
            Token::BlockEnd => {
                self.next_tag();
                if self.statement == Statement::Set {
                    self.enter(1)?;
                }
            }
            Token::Assign if self.statement == Statement::Set => self.statement = Statement::Other,
            Token::Ident(word) => self.take_word(word)?,
            Token::Int(n) => self.constants.product = self.constants.product.saturating_mul((*n).max(1)),
            Token::Int128(_) => self.constants.product = u64::MAX,
            Token::Str(text) => self.constants.longest = self.constants.longest.max(text.len() as u64),
            Token::String(text) => self.constants.longest = self.constants.longest.max(text.len() as u64),
            Token::Float(_) | Token::Comma | Token::Assign | Token::Colon => {}
            Token::Pow => return Err("the operator ** is refused".to_owned()),
            operator => {
                self.constants.multiplications += u64::from(matches!(operator, Token::Mul));
                self.operator()?;
            }
        }
        if self.statement == Statement::Keyword || matches!(token, Token::BlockEnd) {
            self.statement = Statement::Other;
        }
        Ok(())
    }

    fn take_word(&mut self, word: &str) -> Result<(), String> {
        if self.statement != Statement::Keyword {
            let operator = matches!(word, "not" | "and" | "or" | "is" | "in" | "if" | "else");
            return if operator { self.operator() } else { Ok(()) };
        }
        match word {
            "if" | "for" | "macro" | "call" | "filter" | "with" | "autoescape" | "block" => self.enter(1),
            "elif" => {
                let outer = self.open.pop().unwrap_or(0);
                self.depth -= outer;
                self.enter(outer + 1)
            }
            "set" => {
                self.statement = Statement::Set;
                Ok(())
            }
            end if end.starts_with("end") => {
                self.depth -= self.open.pop().unwrap_or(0);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn operator(&mut self) -> Result<(), String> {
        self.operators += 1;
        if self.operators > OPERATORS_MAX {
            return Err(format!("more than {OPERATORS_MAX} operators in one tag"));
        }
        Ok(())
    }

    fn enter(&mut self, levels: usize) -> Result<(), String> {
        self.open.push(levels);
        self.depth += levels;
        if self.depth > STATEMENTS_MAX {
            return Err(format!("statements are nested more than {STATEMENTS_MAX} deep"));
        }
        Ok(())
    }

    /// Between tags: adds up what folding may make of the last one. The product of all its integers times its longest string,
    /// once per multiplication, is an upper bound.
    fn next_tag(&mut self) {
        let Constants { product, longest, multiplications } = std::mem::take(&mut self.constants);
        let folded = product.saturating_mul(longest).saturating_mul(multiplications);
        self.folded = self.folded.saturating_add(folded);
        self.operators = 0;
    }

    fn finish(&self) -> Result<(), String> {
        let folded = self.folded;
        if folded > FOLDED_BYTES_MAX {
            return Err(format!(
                "multiplications of constants may make {folded} bytes, the limit is {FOLDED_BYTES_MAX}"
            ));
        }
        Ok(())
    }
}
