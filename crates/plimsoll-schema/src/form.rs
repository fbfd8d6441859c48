//! A schema as alternatives of one JSON type each, and their intersections.
//!
//! Schemas inside arrays and objects stay expressions: sets of schemas, some negated, that must all hold. They are
//! expanded on demand, so a recursive schema has a finite form.

use std::rc::Rc;

use crate::decimal::{Decimal, End};
use crate::pattern::Pattern;

/// A schema of the document, or a generated one.
pub(crate) type Node = usize;

/// The schema that allows nothing. It is the first node.
pub(crate) const NOTHING: Node = 0;

/// Schemas that must all hold, by number, and whether each is negated. Sorted. None of them: anything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Expr(Vec<(Node, bool)>);

impl Expr {
    /// One schema, or its negation.
    pub fn one(node: Node, not: bool) -> Self {
        Self(vec![(node, not)])
    }

    pub fn nothing() -> Self {
        Self::one(NOTHING, false)
    }

    /// Both hold.
    pub fn and(&self, other: &Self) -> Self {
        let mut all = [&self.0[..], &other.0].concat();
        all.sort_unstable();
        all.dedup();
        all.retain(|schema| *schema != (NOTHING, true));
        let contradicts = all.windows(2).any(|pair| pair[0].0 == pair[1].0);
        if contradicts || all.contains(&(NOTHING, false)) { Self::nothing() } else { Self(all) }
    }

    /// Nothing is left.
    pub fn is_nothing(&self) -> bool {
        self.0 == [(NOTHING, false)]
    }

    pub fn schemas(&self) -> &[(Node, bool)] {
        &self.0
    }
}

/// Values of one type.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Alternative {
    Null,
    /// True is allowed, false is.
    Bool(bool, bool),
    Number(Numbers),
    String(Strings),
    Array(Arrays),
    Object(Objects),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Numbers {
    /// Integers alone, or none of them.
    pub integer: Option<bool>,
    pub low: Option<End>,
    pub high: Option<End>,
    pub multiples: Vec<Decimal>,
    pub only: Option<Vec<Decimal>>,
    pub except: Vec<Decimal>,
}

/// A pattern with its source, which tells it from others.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub source: Rc<str>,
    pub pattern: Rc<Pattern>,
}

impl PartialEq for Named {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Strings {
    pub min: u64,
    pub max: Option<u64>,
    pub patterns: Vec<Named>,
    pub not: Vec<Named>,
    pub only: Option<Vec<String>>,
    pub except: Vec<String>,
}

impl Strings {
    /// Whether the text is allowed.
    pub fn has(&self, text: &str) -> bool {
        let length = text.chars().count() as u64;
        length >= self.min
            && self.max.is_none_or(|max| length <= max)
            && self.patterns.iter().all(|named| named.pattern.matches(text))
            && !self.not.iter().any(|named| named.pattern.matches(text))
            && self.only.as_ref().is_none_or(|only| only.iter().any(|one| one == text))
            && !self.except.iter().any(|one| one == text)
    }
}

/// One schema's constraints on an array's items.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ItemGroup {
    pub prefix: Vec<Expr>,
    /// The schema of items after the prefix. `None` if it does not evaluate them.
    pub rest: Option<Expr>,
    /// It comes from a negation, which evaluates nothing.
    pub blind: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Contains {
    pub item: Expr,
    pub min: u64,
    pub max: Option<u64>,
    /// It comes from a negation, which evaluates nothing.
    pub blind: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Arrays {
    pub min: u64,
    pub max: Option<u64>,
    pub groups: Vec<ItemGroup>,
    pub contains: Vec<Contains>,
}

/// One schema's constraints on an object's members.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MemberGroup {
    pub properties: Vec<(String, Expr)>,
    pub patterns: Vec<(Named, Expr)>,
    /// The schema of all other members. `None` if it does not evaluate them.
    pub rest: Option<Expr>,
    /// It comes from a negation, which evaluates nothing.
    pub blind: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Objects {
    pub groups: Vec<MemberGroup>,
    pub required: Vec<String>,
    pub min: u64,
    pub max: Option<u64>,
    /// Schemas of all member names.
    pub names: Vec<Expr>,
    /// Required members with any name.
    pub another: Vec<Another>,
}

/// A required member with any name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Another {
    /// This group does not name or match it.
    pub outside: MemberGroup,
    /// Its name matches.
    pub pattern: Option<Named>,
    /// Its name is this.
    pub name: Option<Expr>,
    pub value: Expr,
}

impl MemberGroup {
    /// The group's schema for the member of this name.
    pub fn value(&self, name: &str) -> Expr {
        let mut value = Expr::default();
        let mut known = false;
        for (_, expr) in self.properties.iter().filter(|(known, _)| known == name) {
            (value, known) = (value.and(expr), true);
        }
        for (_, expr) in self.patterns.iter().filter(|(named, _)| named.pattern.matches(name)) {
            (value, known) = (value.and(expr), true);
        }
        match &self.rest {
            Some(rest) if !known => value.and(rest),
            _ => value,
        }
    }
}

impl Objects {
    /// The schema of the member of this name.
    pub fn value(&self, name: &str) -> Expr {
        self.groups.iter().fold(Expr::default(), |value, group| value.and(&group.value(name)))
    }
}

impl Arrays {
    /// The schema of the item at this place.
    pub fn item(&self, at: usize) -> Expr {
        let of = |group: &ItemGroup| group.prefix.get(at).or(group.rest.as_ref()).cloned().unwrap_or_default();
        self.groups.iter().fold(Expr::default(), |value, group| value.and(&of(group)))
    }

    /// Items that have a place of their own.
    pub fn places(&self) -> usize {
        self.groups.iter().map(|group| group.prefix.len()).max().unwrap_or(0)
    }
}

/// Any value, in an alternative a type.
pub(crate) fn anything() -> Vec<Alternative> {
    vec![
        Alternative::Null,
        Alternative::Bool(true, true),
        Alternative::Number(Numbers::default()),
        Alternative::String(Strings::default()),
        Alternative::Array(Arrays::default()),
        Alternative::Object(Objects::default()),
    ]
}

impl Alternative {
    /// Marks it as part of a negation: no part of it counts as evaluated.
    pub fn evaluates_nothing(&mut self) {
        match self {
            Self::Array(arrays) => {
                arrays.groups.iter_mut().for_each(|group| group.blind = true);
                arrays.contains.iter_mut().for_each(|contains| contains.blind = true);
            }
            Self::Object(objects) => objects.groups.iter_mut().for_each(|group| group.blind = true),
            _ => {}
        }
    }

    /// The type it is of.
    pub fn kind(&self) -> std::mem::Discriminant<Self> {
        std::mem::discriminant(self)
    }

    /// The values that both allow. `None` if there are clearly none, without a look into inner schemas.
    pub fn and(&self, other: &Self) -> Option<Self> {
        Some(match (self, other) {
            (Self::Null, Self::Null) => Self::Null,
            (Self::Bool(t, f), Self::Bool(u, g)) => Self::Bool(*t && *u, *f && *g),
            (Self::Number(a), Self::Number(b)) => Self::Number(numbers(a, b)?),
            (Self::String(a), Self::String(b)) => Self::String(strings(a, b)?),
            (Self::Array(a), Self::Array(b)) => Self::Array(arrays(a, b)?),
            (Self::Object(a), Self::Object(b)) => Self::Object(objects(a, b)?),
            _ => return None,
        })
        .filter(|both| !matches!(both, Self::Bool(false, false)))
    }
}

fn both<T: PartialEq + Clone>(a: &[T], b: &[T]) -> Vec<T> {
    let mut all = a.to_vec();
    all.extend(b.iter().filter(|one| !a.contains(one)).cloned());
    all
}

/// The values in both lists. A missing list allows all values.
fn of_both<T: PartialEq + Clone>(a: &Option<Vec<T>>, b: &Option<Vec<T>>) -> Option<Vec<T>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.iter().filter(|one| b.contains(one)).cloned().collect()),
        (a, b) => a.clone().or(b.clone()),
    }
}

fn most(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    a.into_iter().chain(b).min()
}

/// The stricter of two ends.
fn tighter(a: &Option<End>, b: &Option<End>, low: bool) -> Option<End> {
    match (a, b) {
        (Some(a), Some(b)) => {
            let order = if low { b.at.compare(&a.at) } else { a.at.compare(&b.at) };
            Some(match order {
                std::cmp::Ordering::Less => a,
                std::cmp::Ordering::Greater => b,
                std::cmp::Ordering::Equal if a.open => a,
                std::cmp::Ordering::Equal => b,
            })
            .cloned()
        }
        (one, other) => one.clone().or(other.clone()),
    }
}

fn numbers(a: &Numbers, b: &Numbers) -> Option<Numbers> {
    let integer = match (a.integer, b.integer) {
        (Some(a), Some(b)) if a != b => return None,
        (a, b) => a.or(b),
    };
    let (low, high) = (tighter(&a.low, &b.low, true), tighter(&a.high, &b.high, false));
    let mut all = Numbers {
        integer,
        low,
        high,
        multiples: both(&a.multiples, &b.multiples),
        only: of_both(&a.only, &b.only),
        except: both(&a.except, &b.except),
    };
    if let Some(mut only) = all.only.take() {
        only.retain(|one| all.has(one));
        all.only = Some(only).filter(|only| !only.is_empty());
        all.only.as_ref()?;
    }
    match (&all.low, &all.high) {
        (Some(low), Some(high)) if high.at.compare(&low.at).is_lt() => None,
        (Some(low), Some(high)) if high.at == low.at && (low.open || high.open) => None,
        _ => Some(all),
    }
}

impl Numbers {
    /// Whether the number is allowed.
    pub fn has(&self, number: &Decimal) -> bool {
        use std::cmp::Ordering::{Equal, Greater, Less};
        let above = self.low.as_ref().is_none_or(|end| match number.compare(&end.at) {
            Less => false,
            Equal => !end.open,
            Greater => true,
        });
        let below = self.high.as_ref().is_none_or(|end| match number.compare(&end.at) {
            Less => true,
            Equal => !end.open,
            Greater => false,
        });
        above
            && below
            && self.integer.is_none_or(|integer| integer == number.is_integer())
            && !self.except.contains(number)
            && self.multiples.iter().all(|one| is_multiple(number, one).unwrap_or(false))
    }
}

/// Whether a number is a multiple of another. `None` if that takes too many digits.
pub(crate) fn is_multiple(number: &Decimal, of: &Decimal) -> Option<bool> {
    let places = number.fraction_digits().max(of.fraction_digits());
    let (number, of) = (number.shifted(places)?, of.shifted(places)?);
    (of != 0).then(|| number % of == 0)
}

fn strings(a: &Strings, b: &Strings) -> Option<Strings> {
    let mut all = Strings {
        min: a.min.max(b.min),
        max: most(a.max, b.max),
        patterns: both(&a.patterns, &b.patterns),
        not: both(&a.not, &b.not),
        only: of_both(&a.only, &b.only),
        except: both(&a.except, &b.except),
    };
    if let Some(mut only) = all.only.take() {
        only.retain(|one| all.has(one));
        all.only = Some(only).filter(|only| !only.is_empty());
        all.only.as_ref()?;
    }
    let contradicts = all.patterns.iter().any(|named| all.not.contains(named));
    (!contradicts && all.max.is_none_or(|max| all.min <= max)).then_some(all)
}

fn arrays(a: &Arrays, b: &Arrays) -> Option<Arrays> {
    let all = Arrays {
        min: a.min.max(b.min),
        max: most(a.max, b.max),
        groups: both(&a.groups, &b.groups),
        contains: both(&a.contains, &b.contains),
    };
    all.max.is_none_or(|max| all.min <= max).then_some(all)
}

fn objects(a: &Objects, b: &Objects) -> Option<Objects> {
    let all = Objects {
        groups: both(&a.groups, &b.groups),
        required: both(&a.required, &b.required),
        min: a.min.max(b.min),
        max: most(a.max, b.max),
        names: both(&a.names, &b.names),
        another: both(&a.another, &b.another),
    };
    all.max.is_none_or(|max| all.min.max(all.required.len() as u64) <= max).then_some(all)
}
