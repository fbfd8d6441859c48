//! Reading one JSON value a character at a time: where it ends, and the first character that cannot belong to it.

/// The role of a character in the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Part of it; more must follow.
    More,
    /// Its last character.
    Last,
    /// Not part of it: the value ended before.
    Past,
    /// Invalid JSON.
    Bad,
}

/// The deepest nesting that is followed: one bit a level.
const DEPTH_MAX: u32 = 128;

/// A reader of one value.
#[derive(Clone, Debug)]
pub(crate) struct Scanner {
    state: State,
    depth: u32,
    /// One bit per open bracket, the innermost lowest: set for objects.
    objects: u128,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Value,
    /// A value, or the end of an array that has just begun.
    FirstItem,
    /// A key, or the end of an object that has just begun.
    FirstKey,
    Key,
    Colon,
    Next,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    Unicode {
        key: bool,
        left: u8,
    },
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    Word {
        rest: &'static str,
    },
}

impl Scanner {
    /// A reader before a value's first character (white space before it is part of it).
    pub fn new() -> Self {
        Self { state: State::Value, depth: 0, objects: 0 }
    }

    /// Takes a character.
    pub fn step(&mut self, c: char) -> Step {
        use State as S;
        let space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match self.state {
            S::Value | S::FirstItem | S::FirstKey | S::Key | S::Colon | S::Next if space => Step::More,
            S::FirstItem if c == ']' => self.close(),
            S::Value | S::FirstItem => self.value(c),
            S::FirstKey if c == '}' => self.close(),
            S::FirstKey | S::Key if c == '"' => self.go(S::Text { key: true }),
            S::Colon if c == ':' => self.go(S::Value),
            S::Next => match (c, self.objects & 1 == 1) {
                (',', true) => self.go(S::Key),
                (',', false) => self.go(S::Value),
                ('}', true) | (']', false) => self.close(),
                _ => Step::Bad,
            },
            S::Text { key } => match c {
                '\\' => self.go(S::Escape { key }),
                '"' if key => self.go(S::Colon),
                '"' => self.done(),
                c if c < ' ' => Step::Bad,
                _ => Step::More,
            },
            S::Escape { key } => match c {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.go(S::Text { key }),
                'u' => self.go(S::Unicode { key, left: 4 }),
                _ => Step::Bad,
            },
            S::Unicode { key, left } if c.is_ascii_hexdigit() => match left {
                1 => self.go(S::Text { key }),
                _ => self.go(S::Unicode { key, left: left - 1 }),
            },
            S::Word { rest } => match rest.strip_prefix(c) {
                Some("") => self.done(),
                Some(rest) => self.go(S::Word { rest }),
                None => Step::Bad,
            },
            S::FirstKey | S::Key | S::Colon | S::Unicode { .. } => Step::Bad,
            _ => self.number(c),
        }
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn value(&mut self, c: char) -> Step {
        match c {
            '{' => self.open(true),
            '[' => self.open(false),
            '"' => self.go(State::Text { key: false }),
            '-' => self.go(State::Minus),
            '0' => self.go(State::Zero),
            '1'..='9' => self.go(State::Digits),
            't' => self.go(State::Word { rest: "rue" }),
            'f' => self.go(State::Word { rest: "alse" }),
            'n' => self.go(State::Word { rest: "ull" }),
            _ => Step::Bad,
        }
    }

    fn open(&mut self, object: bool) -> Step {
        if self.depth == DEPTH_MAX {
            return Step::Bad;
        }
        self.depth += 1;
        self.objects = self.objects << 1 | u128::from(object);
        self.go(if object { State::FirstKey } else { State::FirstItem })
    }

    fn close(&mut self) -> Step {
        self.depth -= 1;
        self.objects >>= 1;
        self.done()
    }

    /// A value has ended.
    fn done(&mut self) -> Step {
        self.state = State::Next;
        if self.depth == 0 { Step::Last } else { Step::More }
    }

    fn number(&mut self, c: char) -> Step {
        use State as S;
        let next = match (self.state, c) {
            (S::Minus, '0') => S::Zero,
            (S::Minus, '1'..='9') | (S::Digits, '0'..='9') => S::Digits,
            (S::Zero | S::Digits, '.') => S::Point,
            (S::Point | S::Fraction, '0'..='9') => S::Fraction,
            (S::Zero | S::Digits | S::Fraction, 'e' | 'E') => S::Exponent,
            (S::Exponent, '+' | '-') => S::ExponentSign,
            (S::Exponent | S::ExponentSign | S::ExponentDigits, '0'..='9') => S::ExponentDigits,
            (S::Zero | S::Digits | S::Fraction | S::ExponentDigits, _) if self.depth == 0 => return Step::Past,
            (S::Zero | S::Digits | S::Fraction | S::ExponentDigits, _) => {
                self.state = S::Next;
                return self.step(c);
            }
            _ => return Step::Bad,
        };
        self.go(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Whether the whole text is one value, up to a character that ends a number.
    fn accepts(text: &str) -> bool {
        let mut scanner = Scanner::new();
        let mut last = false;
        for c in text.chars() {
            if last && !c.is_ascii_whitespace() {
                return false;
            }
            match scanner.step(c) {
                _ if last => {}
                Step::More => {}
                Step::Last => last = true,
                Step::Past if c.is_ascii_whitespace() => last = true,
                Step::Past | Step::Bad => return false,
            }
        }
        last || scanner.step(' ') == Step::Past
    }

    proptest! {
        #[test]
        fn agrees_with_serde(text in r#"[\[\]{}:,"\\ua1e0.\-+ tr]{0,12}|(\{"a": ?(1|-0\.5e3|"x\\n"|true|null|\[1,\{\}\])[,}]{1,2}){1,2}"#) {
            let serde = serde_json::from_str::<serde_json::Value>(&text);
            // Lone surrogates are the one thing that only decoding finds.
            prop_assume!(!text.contains("\\u"));
            prop_assert_eq!(accepts(&text), serde.is_ok(), "{}", text);
        }
    }

    #[test]
    fn depth_is_bounded() {
        assert!(accepts(&("[".repeat(100) + &"]".repeat(100))));
        let mut scanner = Scanner::new();
        assert!("[".repeat(128).chars().all(|c| scanner.step(c) == Step::More));
        assert_eq!(scanner.step('['), Step::Bad);
    }
}
