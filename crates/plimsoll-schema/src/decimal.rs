//! Numbers as their digits: exact at any size, and the patterns of all numbers beside one.

use std::cmp::Ordering;

/// Digits that a number in a schema may have, written out.
const DIGITS_MAX: usize = 400;

/// Digits before the point that a number without an upper limit may have when it is written. Every integer of 64 bits fits.
const FREE_DIGITS: usize = 19;

/// Digits behind the point.
const FREE_FRACTION: usize = 17;

/// A number: its sign, and its digits before and after the point without redundant zeros.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Decimal {
    negative: bool,
    whole: String,
    fraction: String,
}

impl Decimal {
    /// Reads a JSON number. `None` if it has too many digits for a schema.
    pub fn parse(text: &str) -> Option<Self> {
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let exponent: i64 = exponent.trim_start_matches('+').parse().ok()?;
        let negative = mantissa.starts_with('-');
        let (whole, fraction) =
            mantissa.trim_start_matches('-').split_once('.').unwrap_or((mantissa.trim_start_matches('-'), ""));
        let digits = format!("{whole}{fraction}");
        let point = whole.len() as i64 + exponent;
        if digits.bytes().all(|digit| digit == b'0') {
            return Some(Self { negative: false, whole: String::new(), fraction: String::new() });
        }
        let length = digits.len() as i64;
        if point.abs() > DIGITS_MAX as i64 || length > DIGITS_MAX as i64 {
            return None;
        }
        let zeros = |count: i64| "0".repeat(usize::try_from(count).unwrap_or(0));
        let digits = zeros(-point) + &digits + &zeros(point - length);
        let (whole, fraction) = digits.split_at(usize::try_from(point).unwrap_or(0));
        Some(Self {
            negative,
            whole: whole.trim_start_matches('0').to_owned(),
            fraction: fraction.trim_end_matches('0').to_owned(),
        })
    }

    pub fn from_u64(value: u64) -> Self {
        Self { negative: false, whole: value.to_string().trim_start_matches('0').to_owned(), fraction: String::new() }
    }

    pub fn is_integer(&self) -> bool {
        self.fraction.is_empty()
    }

    pub fn is_negative(&self) -> bool {
        self.negative
    }

    pub fn is_zero(&self) -> bool {
        self.whole.is_empty() && self.fraction.is_empty()
    }

    /// As JSON, without an exponent.
    pub fn text(&self) -> String {
        let sign = if self.negative { "-" } else { "" };
        let whole = if self.whole.is_empty() { "0" } else { &self.whole };
        if self.fraction.is_empty() { format!("{sign}{whole}") } else { format!("{sign}{whole}.{}", self.fraction) }
    }

    /// A small integer.
    pub fn to_i128(&self) -> Option<i128> {
        self.is_integer().then(|| self.text().parse().ok()).flatten()
    }

    /// Digits behind the point.
    pub fn fraction_digits(&self) -> usize {
        self.fraction.len()
    }

    /// The number times ten to this power, if that is a small integer.
    pub fn shifted(&self, places: usize) -> Option<i128> {
        Self::parse(&format!("{}e{places}", self.text()))?.to_i128()
    }

    fn magnitude_cmp(&self, other: &Self) -> Ordering {
        (self.whole.len(), &self.whole, &self.fraction).cmp(&(other.whole.len(), &other.whole, &other.fraction))
    }

    pub fn compare(&self, other: &Self) -> Ordering {
        match (self.negative, other.negative) {
            (false, false) => self.magnitude_cmp(other),
            (true, true) => other.magnitude_cmp(self),
            (true, false) => Ordering::Less,
            (false, true) => Ordering::Greater,
        }
    }
}

/// One end of a range.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct End {
    pub at: Decimal,
    /// The end itself is not in the range.
    pub open: bool,
}

/// Patterns of the numbers in a range, all or integers only, without exponents. The result is a list of alternatives;
/// all patterns of an alternative must match. Digits are limited if the range is not. Empty if no number is in the
/// range.
pub(crate) fn range(low: Option<&End>, high: Option<&End>, integer: bool) -> Vec<Vec<String>> {
    let free = |end: Option<&End>| FREE_DIGITS.max(end.map_or(0, |end| end.at.whole.len()));
    let digits = free(low).max(free(high));
    let mut all = Vec::new();
    let positive_high = high.filter(|end| !end.at.negative);
    if high.is_none() || positive_high.is_some() {
        let low = low.filter(|end| !end.at.negative);
        all.extend(magnitudes(low, positive_high, integer, digits, true));
    }
    let negative_low = low.filter(|end| end.at.negative);
    if low.is_none() || negative_low.is_some() {
        let high = high.filter(|end| end.at.negative);
        let below = magnitudes(high, negative_low, integer, digits, false);
        all.extend(below.map(|all| all.into_iter().map(|pattern| format!("-{pattern}")).collect()));
    }
    all
}

/// The magnitudes in a range. A magnitude behind a minus is not zero.
fn magnitudes(low: Option<&End>, high: Option<&End>, integer: bool, digits: usize, zero: bool) -> Option<Vec<String>> {
    let (more, fraction) = (digits - 1, FREE_FRACTION);
    let any = match (integer, zero) {
        (true, true) => format!("(0|[1-9][0-9]{{0,{more}}})"),
        (true, false) => format!("([1-9][0-9]{{0,{more}}})"),
        (false, true) => format!("((0|[1-9][0-9]{{0,{more}}})(\\.[0-9]{{1,{fraction}}})?)"),
        (false, false) => format!(
            "([1-9][0-9]{{0,{more}}}(\\.[0-9]{{1,{fraction}}})?|0\\.[0-9]{{0,{fraction}}}[1-9][0-9]{{0,{fraction}}})"
        ),
    };
    let high = match high {
        Some(end) => Some(at_most(end, integer)?),
        None => None,
    };
    Some([Some(any), low.map(|end| at_least(end, integer)), high].into_iter().flatten().collect())
}

/// Magnitudes from this one on.
fn at_least(end: &End, integer: bool) -> String {
    let at = &end.at;
    let mut parts = Vec::new();
    let fraction = if integer { "" } else { "(\\.[0-9]+)?" };
    // Longer before the point, or as long and greater there.
    let greater = greater_digits(if at.whole.is_empty() { "0" } else { &at.whole });
    parts.extend(greater.map(|greater| format!("({greater}){fraction}")));
    let longer = at.whole.len().max(1);
    parts.push(format!("[1-9][0-9]{{{longer},}}{fraction}"));
    // The same before the point.
    let whole = if at.whole.is_empty() { "0" } else { &at.whole };
    if integer {
        if at.fraction.is_empty() && !end.open {
            parts.push(whole.to_owned());
        }
    } else {
        let mut tails: Vec<String> = Vec::new();
        for (at_digit, digit) in at.fraction.bytes().enumerate() {
            if digit < b'9' {
                let same = &at.fraction[..at_digit];
                tails.push(format!("\\.{same}[{}-9][0-9]*", char::from(digit + 1)));
            }
        }
        match (at.fraction.is_empty(), end.open) {
            (true, false) => tails.push("(\\.[0-9]+)?".into()),
            (true, true) => tails.push("\\.[0-9]*[1-9][0-9]*".into()),
            (false, false) => tails.push(format!("\\.{}[0-9]*", at.fraction)),
            (false, true) => tails.push(format!("\\.{}[0-9]*[1-9][0-9]*", at.fraction)),
        }
        parts.push(format!("{whole}({})", tails.join("|")));
    }
    format!("({})", parts.join("|"))
}

/// Magnitudes up to this one. `None` if there are none.
fn at_most(end: &End, integer: bool) -> Option<String> {
    let at = &end.at;
    let whole = if at.whole.is_empty() { "0" } else { &at.whole };
    let fraction = if integer { "" } else { "(\\.[0-9]+)?" };
    let mut parts = Vec::new();
    if whole != "0" {
        // Shorter before the point, or as long and smaller there.
        parts.push(format!("0{fraction}"));
        if whole.len() > 1 {
            parts.push(format!("[1-9][0-9]{{0,{}}}{fraction}", whole.len() - 2));
        }
        parts.extend(smaller_digits(whole).map(|smaller| format!("({smaller}){fraction}")));
    }
    if integer {
        if !(end.open && at.fraction.is_empty()) {
            parts.push(whole.to_owned());
        }
    } else {
        let mut tails: Vec<String> = Vec::new();
        for (at_digit, digit) in at.fraction.bytes().enumerate() {
            let same = &at.fraction[..at_digit];
            if digit > b'0' {
                tails.push(format!("\\.{same}[0-{}][0-9]*", char::from(digit - 1)));
            }
            // Fewer digits, which are those of the end: what is missing is zeros.
            tails.push(if same.is_empty() { String::new() } else { format!("\\.{same}") });
        }
        match (at.fraction.is_empty(), end.open) {
            (true, false) => tails.push("(\\.0+)?".into()),
            (false, false) => tails.push(format!("\\.{}0*", at.fraction)),
            (_, true) => {}
        }
        if !tails.is_empty() {
            parts.push(format!("{whole}({})", tails.join("|")));
        }
    }
    (!parts.is_empty()).then(|| format!("({})", parts.join("|")))
}

/// Numbers with the same count of digits that are greater. `None` if there are none.
fn greater_digits(digits: &str) -> Option<String> {
    let one = |(at, digit): (usize, u8)| {
        let rest = digits.len() - at - 1;
        (digit < b'9').then(|| format!("{}[{}-9][0-9]{{{rest}}}", &digits[..at], char::from(digit + 1)))
    };
    let all: Vec<String> = digits.bytes().enumerate().filter_map(one).collect();
    (!all.is_empty()).then(|| all.join("|"))
}

/// Numbers of as many digits that are smaller, without leading zeros.
fn smaller_digits(digits: &str) -> Option<String> {
    let one = |(at, digit): (usize, u8)| {
        let rest = digits.len() - at - 1;
        let least = if at == 0 && digits.len() > 1 { b'1' } else { b'0' };
        let most = digit.checked_sub(1).filter(|most| *most >= least)?;
        Some(format!("{}[{}-{}][0-9]{{{rest}}}", &digits[..at], char::from(least), char::from(most)))
    };
    let all: Vec<String> = digits.bytes().enumerate().filter_map(one).collect();
    (!all.is_empty()).then(|| all.join("|"))
}

/// The pattern of all ways to write this number without an exponent.
pub(crate) fn spellings(number: &Decimal) -> String {
    let whole = if number.whole.is_empty() { "0" } else { &number.whole };
    let sign = match (number.is_zero(), number.negative) {
        (true, _) => "-?",
        (false, true) => "-",
        (false, false) => "",
    };
    match number.fraction.as_str() {
        "" => format!("{sign}{whole}(\\.0+)?"),
        fraction => format!("{sign}{whole}\\.{fraction}0*"),
    }
}

/// Unconstrained numbers, with an exponent of two digits at most.
pub(crate) fn free(integer: bool) -> String {
    match integer {
        true => format!("-?(0|[1-9][0-9]{{0,{}}})", FREE_DIGITS - 1),
        false => {
            let exponent = "([eE][+-]?[1-9][0-9]?)?";
            format!("-?(0|[1-9][0-9]{{0,{}}})(\\.[0-9]{{1,{FREE_FRACTION}}})?{exponent}", FREE_DIGITS - 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use super::{Decimal, End, free, range, spellings};

    fn matches(patterns: &[Vec<String>], text: &str) -> bool {
        let one = |pattern: &String| regex::Regex::new(&format!("^(?:{pattern})$")).unwrap().is_match(text);
        patterns.iter().any(|all| all.iter().all(one))
    }

    fn end(text: &str, open: bool) -> Option<End> {
        Some(End { at: Decimal::parse(text).unwrap(), open })
    }

    #[test]
    fn numbers_are_read_and_compared_exactly() {
        let read = |text: &str| Decimal::parse(text).map(|number| number.text());
        for (text, expected) in [
            ("1.50", "1.5"),
            ("-0", "0"),
            ("1e3", "1000"),
            ("12.5e-3", "0.0125"),
            ("9007199254740993", "9007199254740993"),
            ("-9223372036854775808", "-9223372036854775808"),
            ("0.00e5", "0"),
        ] {
            assert_eq!(read(text).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(read("1e500"), None);
        let order = ["-10", "-9.5", "-0.1", "0", "0.09", "0.1", "2", "10", "10.01"];
        for pair in order.windows(2) {
            let [a, b] = [pair[0], pair[1]].map(|text| Decimal::parse(text).unwrap());
            assert_eq!((a.compare(&b), b.compare(&a)), (Ordering::Less, Ordering::Greater), "{pair:?}");
        }
    }

    #[test]
    fn ranges_hold_what_lies_in_them_and_nothing_else() {
        let numbers: Vec<String> = (-260..=260).map(|n| Decimal::parse(&format!("{n}e-1")).unwrap().text()).collect();
        let ends = [
            None,
            end("-12.5", false),
            end("-3", true),
            end("0", false),
            end("0", true),
            end("0.7", true),
            end("9", false),
            end("10.5", false),
            end("21", true),
        ];
        for low in &ends {
            for high in &ends {
                for integer in [false, true] {
                    let patterns = range(low.as_ref(), high.as_ref(), integer);
                    for text in &numbers {
                        let number = Decimal::parse(text).unwrap();
                        let above = low.as_ref().is_none_or(|end| match number.compare(&end.at) {
                            Ordering::Less => false,
                            Ordering::Equal => !end.open,
                            Ordering::Greater => true,
                        });
                        let below = high.as_ref().is_none_or(|end| match number.compare(&end.at) {
                            Ordering::Less => true,
                            Ordering::Equal => !end.open,
                            Ordering::Greater => false,
                        });
                        let expected = above && below && (!integer || number.is_integer());
                        assert_eq!(matches(&patterns, text), expected, "{text} in {low:?} {high:?} {integer}");
                    }
                }
            }
        }
    }

    #[test]
    fn ends_of_any_size_are_exact() {
        let (low, high) = (end("-9223372036854775808", false), end("18446744073709551616", true));
        let patterns = range(low.as_ref(), high.as_ref(), true);
        for (text, inside) in [
            ("-9223372036854775808", true),
            ("-9223372036854775809", false),
            ("18446744073709551615", true),
            ("18446744073709551616", false),
        ] {
            assert_eq!(matches(&patterns, text), inside, "{text}");
        }
        let pattern = vec![vec![spellings(&Decimal::parse("1.50").unwrap())]];
        assert!(matches(&pattern, "1.5") && matches(&pattern, "1.500") && !matches(&pattern, "1.51"));
        assert!(matches(&[vec![free(false)]], "-1.5e-7") && !matches(&[vec![free(false)]], "1e433"));
    }
}
