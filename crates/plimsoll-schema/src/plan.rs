//! Forms become plans: the grammar of each alternative, with expressions for its parts.

use derivre::{RegexAst, RegexBuilder};

use crate::decimal::{self, Decimal, End};
use crate::expand::{Expander, Result};
use crate::form::{Alternative, Another, Arrays, Expr, Named, Numbers, Objects, Strings};
use crate::pattern::{CHARACTER, exactly, written};
use crate::{Options, SchemaError};

/// Numbers of a range that are written out.
const LISTED_MAX: i128 = 2_000;

/// The largest `multipleOf` that a grammar follows digit by digit.
const MULTIPLE_MAX: i128 = 10_000;

/// Most patterns that distinguish members without a declared name.
const PATTERNS_MAX: usize = 5;

/// Most steps of testing whether a terminal matches any text.
const FUEL_MAX: u64 = 10_000;

/// States of an array or object with counted parts.
const STATES_MAX: u64 = 1_500;

/// How a value is written.
#[derive(Clone, Debug)]
pub(crate) enum Plan {
    /// A terminal: what it is in the grammar.
    Terminal(String),
    /// A schema for llguidance's own compiler.
    Json(String),
    Items(Items),
    Members(Members),
}

/// An array.
#[derive(Clone, Debug)]
pub(crate) struct Items {
    pub min: u64,
    pub max: Option<u64>,
    /// Items with a place of their own, and those behind them.
    pub places: Vec<Expr>,
    pub rest: Expr,
    /// How many items must be something else.
    pub counted: Option<Counted>,
}

#[derive(Clone, Debug)]
pub(crate) struct Counted {
    /// For each place, and the rest: an item that counts, and one that does not.
    pub hit: Vec<Expr>,
    pub miss: Vec<Expr>,
    pub min: u64,
    pub max: Option<u64>,
}

/// An object.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    pub named: Vec<Member>,
    /// Members without a declared name: terminals of their keys.
    pub others: Vec<(String, Expr)>,
    /// One of these members is required.
    pub another: Option<Vec<(String, Expr)>>,
    pub min: u64,
    pub max: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub key: String,
    pub value: Expr,
    pub required: bool,
}

/// A pattern as a terminal.
fn terminal(pattern: &str) -> String {
    format!("/{pattern}/")
}

fn quoted(pattern: &str) -> String {
    format!("/\"({pattern})\"/")
}

/// Patterns that must all match and others that must not, as one terminal.
fn all_of(all: &[String], none: &[String]) -> String {
    let none = none.iter().map(|one| format!("~{one}"));
    all.iter().cloned().chain(none).collect::<Vec<_>>().join(" & ")
}

impl Expander<'_> {
    /// Whether no text matches all of some patterns and none of others (`/…/`). False if the test takes too long.
    fn is_empty(&mut self, all: &[String], none: &[String]) -> bool {
        if all.len() + none.len() < 2 || self.fuel < FUEL_MAX {
            return false;
        }
        self.fuel -= FUEL_MAX;
        let pattern = |text: &String| RegexAst::Regex(text.trim_matches('/').to_owned());
        let none = none.iter().map(|text| RegexAst::Not(Box::new(pattern(text))));
        let ast = RegexAst::And(all.iter().map(pattern).chain(none).collect());
        let mut builder = RegexBuilder::new();
        let regex = builder.mk(&ast).and_then(|regex| builder.into_regex_limited(regex, FUEL_MAX));
        regex.is_ok_and(|mut regex| regex.always_empty())
    }

    /// The plans of an alternative; empty if it allows no value.
    pub fn plan(&mut self, alternative: &Alternative, options: &Options) -> Result<Vec<Plan>> {
        let literal = |text: &str| Plan::Terminal(format!("\"{text}\""));
        Ok(match alternative {
            Alternative::Null => vec![literal("null")],
            Alternative::Bool(yes, no) => {
                [(*yes, "true"), (*no, "false")].iter().filter(|(on, _)| *on).map(|(_, text)| literal(text)).collect()
            }
            Alternative::Number(numbers) => self.numbers_plan(numbers)?,
            Alternative::String(strings) => {
                self.strings_terminal(strings, &[]).map(Plan::Terminal).into_iter().collect()
            }
            Alternative::Array(arrays) => vec![Plan::Items(self.items_plan(arrays)?)],
            Alternative::Object(objects) => match self.members_plan(objects, options)? {
                Some(members) => vec![Plan::Members(members)],
                None => Vec::new(),
            },
        })
    }

    fn numbers_plan(&mut self, numbers: &Numbers) -> Result<Vec<Plan>> {
        let Numbers { integer, low, high, multiples, only, except } = numbers;
        if let Some(only) = only {
            let all: Vec<String> = only.iter().map(|number| format!("\"{}\"", number.text())).collect();
            return Ok(vec![Plan::Terminal(all.join(" | "))]);
        }
        let bound = low.is_some() || high.is_some();
        if multiples.is_empty() && except.is_empty() && !bound && *integer != Some(false) {
            return Ok(vec![Plan::Terminal(terminal(&decimal::free(*integer == Some(true))))]);
        }
        let mut none: Vec<String> = except.iter().map(|number| terminal(&decimal::spellings(number))).collect();
        if *integer == Some(false) {
            none.push(terminal("-?[0-9]+(\\.0+)?"));
        }
        let mut extra = Vec::new();
        let mut whole = *integer == Some(true);
        if !multiples.is_empty() {
            match self.multiples_plan(numbers)? {
                Multiples::Listed(list) => return Ok(list),
                Multiples::Pattern(pattern, integers) => {
                    extra.push(terminal(&pattern));
                    whole |= integers;
                }
            }
        }
        let alternatives = decimal::range(low.as_ref(), high.as_ref(), whole);
        let mut all = Vec::new();
        for one in alternatives {
            let one: Vec<String> = one.iter().map(|pattern| terminal(pattern)).chain(extra.iter().cloned()).collect();
            if !self.is_empty(&one, &none) {
                all.push(all_of(&one, &none));
            }
        }
        Ok(if all.is_empty() { Vec::new() } else { vec![Plan::Terminal(all.join(" | "))] })
    }

    fn multiples_plan(&mut self, numbers: &Numbers) -> Result<Multiples> {
        let asked: Vec<String> = numbers.multiples.iter().map(Decimal::text).collect();
        let too_large = || SchemaError::Unsupported {
            keyword: "multipleOf".into(),
            at: String::new(),
            reason: format!(
                "{} cannot be followed digit by digit; up to {MULTIPLE_MAX} can, or any with at most {LISTED_MAX} multiples \
                 between minimum and maximum",
                asked.join(" and ")
            ),
        };
        let places = numbers.multiples.iter().map(Decimal::fraction_digits).max().unwrap_or(0);
        let mut step: i128 = 1;
        for multiple in &numbers.multiples {
            let units = multiple.shifted(places).ok_or_else(too_large)?;
            step = lcm(step, units).filter(|step| *step < i128::MAX / 1_000_000).ok_or_else(too_large)?;
        }
        // Integers among the multiples of a fraction.
        let unit = 10_i128.checked_pow(places as u32).ok_or_else(too_large)?;
        let (step, places) = match numbers.integer {
            Some(true) => (lcm(step, unit).ok_or_else(too_large)? / unit, 0),
            _ => (step, places),
        };
        if let Some(list) = listed(numbers, step, places) {
            return Ok(Multiples::Listed(list));
        }
        // A power of ten: so many zeros at the end, or so many digits behind the point.
        let zeros = step.to_string().len() - 1;
        if step == 10_i128.pow(zeros as u32) {
            let pattern = match (places, zeros) {
                (0, zeros) => format!("0|-?[1-9][0-9]*0{{{zeros}}}"),
                (places, 0) => format!("-?[0-9]+(\\.[0-9]{{1,{places}}})?"),
                _ => return Err(too_large()),
            };
            return Ok(Multiples::Pattern(pattern, places == 0));
        }
        if step > MULTIPLE_MAX || !numbers.except.is_empty() || numbers.integer == Some(false) {
            return Err(too_large());
        }
        // Within what llguidance's own compiler counts exactly.
        let limit = End { at: Decimal::from_u64(1_000_000_000_000_000), open: false };
        let inside = |end: &Option<End>| {
            end.as_ref().is_none_or(|end| end.at.to_i128().is_some_and(|at| at.abs() <= 1_000_000_000_000_000))
        };
        if !inside(&numbers.low) || !inside(&numbers.high) {
            return Err(too_large());
        }
        let mut schema = String::from(if places == 0 { "{\"type\":\"integer\"" } else { "{\"type\":\"number\"" });
        let step = Decimal::parse(&format!("{step}e-{places}")).ok_or_else(too_large)?;
        schema += &format!(",\"multipleOf\":{}", step.text());
        let ends = [(&numbers.low, "inimum", "-"), (&numbers.high, "aximum", "")];
        for ((end, word, sign), letter) in ends.into_iter().zip(["m", "m"]) {
            match end {
                Some(End { at, open: false }) => schema += &format!(",\"{letter}{word}\":{}", at.text()),
                Some(End { at, open: true }) => {
                    schema += &format!(",\"exclusive{}{word}\":{}", letter.to_uppercase(), at.text());
                }
                None => schema += &format!(",\"{letter}{word}\":{sign}{}", limit.at.text()),
            }
        }
        Ok(Multiples::Listed(vec![Plan::Json(schema + "}")]))
    }

    fn items_plan(&mut self, arrays: &Arrays) -> Result<Items> {
        let count = arrays.places();
        let places: Vec<Expr> = (0..count).map(|at| arrays.item(at)).collect();
        let rest = arrays.item(count);
        let mut items = Items { min: arrays.min, max: arrays.max, places, rest, counted: None };
        let needed: Vec<_> =
            arrays.contains.iter().filter(|contains| contains.min > 0 || contains.max.is_some()).collect();
        let Some(first) = needed.first() else { return Ok(items) };
        let ends = [items.places.len() as u64, items.min, items.max.map_or(0, |max| max.saturating_add(1))];
        let length = ends.into_iter().max().unwrap_or(0).saturating_add(1);
        let hits = first.min.max(first.max.map_or(0, |max| max.saturating_add(1))).saturating_add(1);
        if needed.len() > 1 || length.saturating_mul(hits) > STATES_MAX {
            self.left_to_validation("contains", "");
        }
        if length.saturating_mul(hits) <= STATES_MAX {
            let not = self.complement(&first.item);
            let all: Vec<Expr> = items.places.iter().chain([&items.rest]).cloned().collect();
            items.counted = Some(Counted {
                hit: all.iter().map(|item| item.and(&first.item)).collect(),
                miss: all.iter().map(|item| item.and(&not)).collect(),
                min: first.min,
                max: first.max,
            });
        }
        Ok(items)
    }

    fn members_plan(&mut self, objects: &Objects, options: &Options) -> Result<Option<Members>> {
        let mut names: Vec<&String> = Vec::new();
        let mut known = std::collections::HashSet::new();
        let declared = objects.groups.iter().flat_map(|group| &group.properties).map(|(name, _)| name);
        names.extend(declared.chain(&objects.required).filter(|name| known.insert(*name)));
        let outside = objects.another.iter().flat_map(|another| &another.outside.properties).map(|(name, _)| name);
        names.extend(outside.filter(|name| known.insert(*name)));
        self.pay(names.len(), "")?;
        let wanted = self.names_of(&objects.names)?;
        let fits = |name: &str| wanted.as_ref().is_none_or(|all| all.iter().any(|strings| strings.has(name)));
        let mut named = Vec::new();
        for name in &names {
            let value = if fits(name) { objects.value(name) } else { Expr::nothing() };
            let required = objects.required.contains(name);
            if value.is_nothing() && required {
                return Ok(None);
            }
            if !value.is_nothing() {
                named.push(Member { key: (*name).clone(), value, required });
            }
        }
        let none: Vec<String> = names.iter().map(|name| exactly(name)).collect();
        let others = self.others(objects, wanted.as_deref(), &none, None)?;
        let another = match &objects.another[..] {
            [] => None,
            [one, more @ ..] => {
                if !more.is_empty() {
                    self.left_to_validation("several members that must be there", "");
                }
                Some(self.others(objects, wanted.as_deref(), &none, Some(one))?)
            }
        };
        let mut members = Members { named, others, another, min: objects.min, max: objects.max };
        let counts = objects.min.max(objects.max.map_or(0, |max| max.saturating_add(1)));
        let states = (members.named.len() as u64 + 1).saturating_mul(counts.saturating_add(2));
        let needless = members.named.iter().filter(|member| member.required).count() as u64 >= objects.min;
        if (states > options.rules_max as u64 / 2 || members.another.is_some()) && !(needless && objects.max.is_none())
        {
            self.left_to_validation("minProperties and maxProperties", "");
            (members.min, members.max) = (0, None);
        }
        Ok(Some(members))
    }

    /// Constraints on member names, as alternatives. `None` if any name is allowed.
    fn names_of(&mut self, names: &[Expr]) -> Result<Option<Vec<Strings>>> {
        if names.is_empty() {
            return Ok(None);
        }
        let all = names.iter().fold(Expr::default(), |all, one| all.and(one));
        let form = self.form(&all)?;
        let strings = form.iter().filter_map(|alternative| match alternative {
            Alternative::String(strings) => Some(strings.clone()),
            _ => None,
        });
        Ok(Some(strings.collect()))
    }

    /// Members without a declared name, grouped by the patterns that their names match.
    fn others(
        &mut self,
        objects: &Objects,
        wanted: Option<&[Strings]>,
        none: &[String],
        another: Option<&Another>,
    ) -> Result<Vec<(String, Expr)>> {
        let mut patterns: Vec<&Named> = Vec::new();
        let outside = another.map(|another| &another.outside);
        let groups = objects.groups.iter().chain(outside);
        for (named, _) in groups.flat_map(|group| &group.patterns) {
            if !patterns.contains(&named) {
                patterns.push(named);
            }
        }
        let special = another.and_then(|another| another.pattern.as_ref());
        if let Some(named) = special.filter(|named| !patterns.contains(named)) {
            patterns.push(named);
        }
        if patterns.len() > PATTERNS_MAX {
            let limit = PATTERNS_MAX as u64;
            return Err(SchemaError::TooLarge { what: "patterns of one object's members", limit, at: String::new() });
        }
        let own = match another.and_then(|another| another.name.clone()) {
            Some(name) => self.names_of(&[name])?,
            None => None,
        };
        let free = [Strings::default()];
        let mut all = Vec::new();
        for chosen in 0..1_u32 << patterns.len() {
            let matched = |named: &Named| {
                patterns.iter().position(|known| *known == named).is_some_and(|at| chosen >> at & 1 == 1)
            };
            let barred = outside.is_some_and(|group| group.patterns.iter().any(|(named, _)| matched(named)));
            if barred || special.is_some_and(|named| !matched(named)) {
                continue;
            }
            let mut value = another.map(|another| another.value.clone()).unwrap_or_default();
            for group in &objects.groups {
                let mut known = false;
                for (_, expr) in group.patterns.iter().filter(|(named, _)| matched(named)) {
                    (value, known) = (value.and(expr), true);
                }
                if let Some(rest) = group.rest.as_ref().filter(|_| !known) {
                    value = value.and(rest);
                }
            }
            if value.is_nothing() {
                continue;
            }
            for strings in wanted.unwrap_or(&free) {
                for more in own.as_deref().unwrap_or(&free) {
                    self.pay(1, "")?;
                    let both = Alternative::String(strings.clone()).and(&Alternative::String(more.clone()));
                    let Some(Alternative::String(mut both)) = both else { continue };
                    for (at, named) in patterns.iter().enumerate() {
                        let list = if chosen >> at & 1 == 1 { &mut both.patterns } else { &mut both.not };
                        list.push((*named).clone());
                    }
                    if let Some(terminal) = self.strings_terminal(&both, none) {
                        all.push((terminal, value.clone()));
                    }
                }
            }
        }
        Ok(all)
    }

    /// A terminal of strings with quotes, except strings that match `none`. `None` if no string is left.
    fn strings_terminal(&mut self, strings: &Strings, none: &[String]) -> Option<String> {
        let Strings { min, max, patterns, not, only, except } = strings;
        if let Some(only) = only {
            let taken = |text: &&String| !none.contains(&exactly(text));
            let all: Vec<String> = only.iter().filter(taken).map(|text| crate::json::quoted(&written(text))).collect();
            return (!all.is_empty()).then(|| all.join(" | "));
        }
        let mut all: Vec<String> = patterns.iter().map(|named| quoted(&named.pattern.written)).collect();
        let length = match (min, max) {
            (0, None) => None,
            (min, None) => Some(format!("{CHARACTER}{{{min},}}")),
            (min, Some(max)) => Some(format!("{CHARACTER}{{{min},{max}}}")),
        };
        all.extend(length.map(|length| quoted(&length)));
        if all.is_empty() {
            all.push(quoted(&format!("{CHARACTER}*")));
        }
        let mut out: Vec<String> = not.iter().map(|named| quoted(&named.pattern.written)).collect();
        let left: Vec<String> = except.iter().map(|text| exactly(text)).chain(none.iter().cloned()).collect();
        if !left.is_empty() {
            out.push(quoted(&left.join("|")));
        }
        (!self.is_empty(&all, &out)).then(|| all_of(&all, &out))
    }
}

enum Multiples {
    /// Written out, or left to llguidance.
    Listed(Vec<Plan>),
    /// A pattern besides the range, and whether it matches integers alone.
    Pattern(String, bool),
}

/// The multiples in a range, if they are few.
fn listed(numbers: &Numbers, step: i128, places: usize) -> Option<Vec<Plan>> {
    let units = |end: &End| end.at.shifted(places);
    let (low, high) = (numbers.low.as_ref()?, numbers.high.as_ref()?);
    // Ends with more digits than the multiples have are left to the comparison below.
    let rough = |end: &End| units(end).or_else(|| Decimal::parse(end.at.text().split('.').next()?)?.shifted(places));
    let first = rough(low)?.div_euclid(step) - 1;
    let last = rough(high)?.div_euclid(step) + 1;
    if last - first > LISTED_MAX {
        return None;
    }
    let of = |n: i128| Decimal::parse(&format!("{}e-{places}", n * step));
    let all: Vec<String> = (first..=last)
        .filter_map(of)
        .filter(|number| numbers.has(number))
        .map(|number| format!("\"{}\"", number.text()))
        .collect();
    Some(if all.is_empty() { Vec::new() } else { vec![Plan::Terminal(all.join(" | "))] })
}

fn lcm(a: i128, b: i128) -> Option<i128> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    if x == 0 { None } else { (a / x).checked_mul(b) }
}
