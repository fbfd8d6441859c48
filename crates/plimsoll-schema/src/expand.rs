//! Schemas become forms: the values that each keyword, or its negation, allows.

use std::collections::HashMap;
use std::rc::Rc;

use crate::decimal::Decimal;
use crate::form::{
    Alternative, Another, Arrays, Expr, ItemGroup, MemberGroup, NOTHING, Named, Node, Numbers, Objects, Strings,
    anything,
};
use crate::json::Json;
use crate::pattern::Pattern;
use crate::refs::{Place, References};
use crate::{Options, SchemaError};

/// Alternatives of one form.
const ALTERNATIVES_MAX: usize = 600;

/// Most schemas nested without an array or object between them, references included.
const NESTED_MAX: usize = 500;

/// Most pairs of `oneOf` that are made disjoint.
pub(crate) const ONE_OF_MAX: usize = 64;

pub(crate) type Form = Rc<Vec<Alternative>>;

/// A node.
#[derive(Clone)]
enum Kind<'a> {
    /// Nothing.
    False,
    Schema(Place<'a>),
    /// This array or object and no other value.
    Const(&'a Json),
    /// Any of these.
    Any(Vec<Expr>),
}

/// Expands schemas, each once.
pub(crate) struct Expander<'a> {
    options: &'a Options,
    pub lenient: bool,
    pub references: References<'a>,
    nodes: Vec<Kind<'a>>,
    known: HashMap<usize, Node>,
    forms: HashMap<(Node, bool), Form>,
    open: Vec<(Node, bool)>,
    patterns: HashMap<Rc<str>, Named>,
    pub work: usize,
    /// Steps left to find out whether terminals match anything.
    pub fuel: u64,
    /// Keywords that the grammar does not enforce, with their places.
    pub validated: Vec<String>,
}

pub(crate) type Result<T> = std::result::Result<T, SchemaError>;

/// All types, with this alternative instead of all values of its type.
pub(crate) fn instead(alternative: Alternative) -> Vec<Alternative> {
    let kind = alternative.kind();
    let mut all: Vec<_> = anything().into_iter().filter(|other| other.kind() != kind).collect();
    all.push(alternative);
    all
}

/// All types except this alternative's.
pub(crate) fn without(alternative: &Alternative) -> Vec<Alternative> {
    anything().into_iter().filter(|other| other.kind() != alternative.kind()).collect()
}

pub(crate) fn just(alternative: Alternative) -> Vec<Alternative> {
    vec![alternative]
}

pub(crate) fn object(objects: Objects) -> Alternative {
    Alternative::Object(objects)
}

pub(crate) fn member(name: &str, value: Expr, blind: bool) -> MemberGroup {
    MemberGroup { properties: vec![(name.to_owned(), value)], blind, ..MemberGroup::default() }
}

pub(crate) fn absent(name: &str) -> Alternative {
    object(Objects { groups: vec![member(name, Expr::nothing(), true)], ..Objects::default() })
}

pub(crate) fn present(name: &str) -> Alternative {
    object(Objects { required: vec![name.to_owned()], ..Objects::default() })
}

impl<'a> Expander<'a> {
    /// An expander of one document, and the expression of its part at `at`.
    pub fn new(root: &'a Json, at: &str, lenient: bool, options: &'a Options) -> Result<(Self, Expr)> {
        let (references, whole) = References::of(root);
        let place = references.part(&whole, at)?;
        let mut all = Self {
            options,
            lenient,
            references,
            nodes: vec![Kind::False],
            known: HashMap::new(),
            forms: HashMap::new(),
            open: Vec::new(),
            patterns: HashMap::new(),
            work: 0,
            fuel: 400_000,
            validated: Vec::new(),
        };
        let expr = all.expr(&place);
        Ok((all, expr))
    }

    /// The expression of a schema.
    pub fn expr(&mut self, place: &Place<'a>) -> Expr {
        match place.json {
            Json::Bool(true) => Expr::default(),
            Json::Bool(false) => Expr::nothing(),
            json => {
                let key = std::ptr::from_ref(json) as usize;
                let node = *self.known.entry(key).or_insert_with(|| {
                    self.nodes.push(Kind::Schema(place.clone()));
                    self.nodes.len() - 1
                });
                Expr::one(node, false)
            }
        }
    }

    pub fn not(&mut self, place: &Place<'a>) -> Expr {
        match self.expr(place).schemas() {
            [] => Expr::nothing(),
            [(NOTHING, _)] => Expr::default(),
            all => Expr::one(all[0].0, true),
        }
    }

    pub fn constant(&mut self, value: &'a Json) -> Node {
        self.nodes.push(Kind::Const(value));
        self.nodes.len() - 1
    }

    /// The expression of any of these.
    pub fn any(&mut self, all: Vec<Expr>) -> Expr {
        if all.iter().any(|one| one.schemas().is_empty()) {
            return Expr::default();
        }
        self.nodes.push(Kind::Any(all));
        Expr::one(self.nodes.len() - 1, false)
    }

    /// The complement of an expression.
    pub fn complement(&mut self, expr: &Expr) -> Expr {
        match expr.schemas() {
            [] => Expr::nothing(),
            [(node, not)] => Expr::one(*node, !not).and(&Expr::default()),
            all => {
                let parts = all.iter().map(|(node, not)| Expr::one(*node, !not)).collect();
                self.any(parts)
            }
        }
    }

    pub fn pay(&mut self, units: usize, at: &str) -> Result<()> {
        self.work += units;
        if self.work > self.options.work_max {
            return Err(SchemaError::TooLarge {
                what: "steps of expanding it",
                limit: self.options.work_max as u64,
                at: at.into(),
            });
        }
        Ok(())
    }

    /// JSON pointer of an expression's first schema; empty for the whole document and for generated schemas.
    pub fn place(&self, expr: &Expr) -> &str {
        let places = expr.schemas().iter().filter_map(|(node, _)| match &self.nodes[*node] {
            Kind::Schema(place) => Some(&*place.at),
            _ => None,
        });
        places.into_iter().next().unwrap_or_default()
    }

    /// The values that an expression allows.
    pub fn form(&mut self, expr: &Expr) -> Result<Form> {
        let mut all = Rc::new(anything());
        for (node, not) in expr.schemas() {
            let one = self.node(*node, *not)?;
            all = Rc::new(self.meet(&all, &one, "")?);
        }
        Ok(all)
    }

    /// The values that both forms allow.
    pub fn meet(&mut self, a: &[Alternative], b: &[Alternative], at: &str) -> Result<Vec<Alternative>> {
        let mut all: Vec<Alternative> = Vec::new();
        for one in a {
            for other in b.iter().filter(|other| other.kind() == one.kind()) {
                self.pay(1, at)?;
                if let Some(both) = one.and(other).filter(|both| !all.contains(both)) {
                    all.push(both);
                }
            }
        }
        if all.len() > ALTERNATIVES_MAX {
            return Err(SchemaError::TooLarge { what: "alternatives", limit: ALTERNATIVES_MAX as u64, at: at.into() });
        }
        Ok(all)
    }

    pub fn join(&mut self, forms: Vec<Vec<Alternative>>, at: &str) -> Result<Vec<Alternative>> {
        let mut all: Vec<Alternative> = Vec::new();
        for one in forms.into_iter().flatten() {
            self.pay(1 + all.len() / 16, at)?;
            if !all.contains(&one) {
                all.push(one);
            }
        }
        if all.len() > ALTERNATIVES_MAX {
            return Err(SchemaError::TooLarge { what: "alternatives", limit: ALTERNATIVES_MAX as u64, at: at.into() });
        }
        Ok(all)
    }

    /// The values that a node, or its negation, allows.
    fn node(&mut self, node: Node, not: bool) -> Result<Form> {
        if let Some(form) = self.forms.get(&(node, not)) {
            return Ok(Rc::clone(form));
        }
        let at = match &self.nodes[node] {
            Kind::Schema(place) => Rc::clone(&place.at),
            _ => "".into(),
        };
        if self.open.contains(&(node, not)) {
            return Err(SchemaError::Invalid { at: at.to_string(), reason: "it refers to itself without end".into() });
        }
        if self.open.len() >= NESTED_MAX {
            let limit = NESTED_MAX as u64;
            return Err(SchemaError::TooLarge { what: "schemas within each other", limit, at: at.to_string() });
        }
        self.open.push((node, not));
        let form = match (self.nodes[node].clone(), not) {
            (Kind::False, false) => Ok(Vec::new()),
            (Kind::False, true) => Ok(anything()),
            (Kind::Const(value), false) => self.one_of_values(std::slice::from_ref(value), ""),
            (Kind::Const(value), true) => Ok(self.other_than(value)),
            (Kind::Any(all), false) => {
                let forms = all.iter().map(|one| self.form(one).map(|form| form.to_vec())).collect::<Result<_>>();
                forms.and_then(|forms| self.join(forms, &at))
            }
            (Kind::Any(all), true) => {
                let mut form = anything();
                for one in all {
                    let other = self.complement(&one);
                    let other = self.form(&other)?;
                    form = self.meet(&form, &other, &at)?;
                }
                Ok(form)
            }
            (Kind::Schema(place), false) => self.schema(&place),
            (Kind::Schema(place), true) => self.negated(&place),
        };
        self.open.pop();
        let mut form = form?;
        if not {
            form.iter_mut().for_each(Alternative::evaluates_nothing);
        }
        let form = Rc::new(form);
        self.forms.insert((node, not), Rc::clone(&form));
        Ok(form)
    }

    /// An array or an object, and no other value.
    fn exactly(&mut self, value: &'a Json) -> Alternative {
        match value {
            Json::Array(items) => {
                let prefix = items.iter().map(|item| self.value(item)).collect();
                let length = items.len() as u64;
                let group = ItemGroup { prefix, rest: Some(Expr::nothing()), blind: true };
                Alternative::Array(Arrays { min: length, max: Some(length), groups: vec![group], contains: Vec::new() })
            }
            value => {
                let properties: Vec<_> =
                    value.members().iter().map(|(name, value)| (name.clone(), self.value(value))).collect();
                let required = properties.iter().map(|(name, _)| name.clone()).collect();
                let group =
                    MemberGroup { properties, rest: Some(Expr::nothing()), blind: true, ..MemberGroup::default() };
                object(Objects { groups: vec![group], required, ..Objects::default() })
            }
        }
    }

    /// The expression of one value.
    fn value(&mut self, value: &'a Json) -> Expr {
        Expr::one(self.constant(value), false)
    }

    /// All values but one.
    fn other_than(&mut self, value: &'a Json) -> Vec<Alternative> {
        match value {
            Json::Array(items) => {
                let length = items.len() as u64;
                let mut all = without(&Alternative::Array(Arrays::default()));
                if let Some(max) = length.checked_sub(1) {
                    all.push(Alternative::Array(Arrays { max: Some(max), ..Arrays::default() }));
                }
                all.push(Alternative::Array(Arrays { min: length + 1, ..Arrays::default() }));
                for (at, item) in items.iter().enumerate() {
                    let mut prefix = vec![Expr::default(); at];
                    prefix.push(Expr::one(self.constant(item), true));
                    let group = ItemGroup { prefix, rest: None, blind: true };
                    all.push(Alternative::Array(Arrays {
                        min: at as u64 + 1,
                        groups: vec![group],
                        ..Arrays::default()
                    }));
                }
                all
            }
            Json::Object(members) => {
                let mut all = without(&object(Objects::default()));
                for (name, value) in members {
                    all.push(absent(name));
                    let other = Expr::one(self.constant(value), true);
                    let groups = vec![member(name, other, true)];
                    all.push(object(Objects { groups, required: vec![name.clone()], ..Objects::default() }));
                }
                let properties = members.iter().map(|(name, _)| (name.clone(), Expr::default())).collect();
                let known = MemberGroup { properties, blind: true, ..MemberGroup::default() };
                all.push(object(Objects {
                    another: vec![Another { outside: known, ..Another::default() }],
                    ..Objects::default()
                }));
                all
            }
            simple => match values(std::slice::from_ref(simple), true) {
                Some(all) => all,
                None => anything(),
            },
        }
    }

    /// One of these values.
    pub fn one_of_values(&mut self, all: &'a [Json], at: &str) -> Result<Vec<Alternative>> {
        let simple = values(all, false).ok_or_else(|| too_long(at))?;
        let containers = all.iter().filter(|value| matches!(value, Json::Array(_) | Json::Object(_)));
        let containers: Vec<_> = containers.map(|value| self.exactly(value)).collect();
        self.join(vec![simple, containers], at)
    }

    /// None of these values.
    pub fn none_of_values(&mut self, all: &'a [Json], at: &str) -> Result<Vec<Alternative>> {
        let mut form = values(all, true).ok_or_else(|| too_long(at))?;
        for value in all.iter().filter(|value| matches!(value, Json::Array(_) | Json::Object(_))) {
            let other = self.other_than(value);
            form = self.meet(&form, &other, at)?;
        }
        Ok(form)
    }

    pub fn pattern(&mut self, source: &str, at: &str) -> Result<Named> {
        if let Some(named) = self.patterns.get(source) {
            return Ok(named.clone());
        }
        let pattern = Pattern::read(source).map_err(|reason| SchemaError::Unsupported {
            keyword: "pattern".into(),
            at: at.into(),
            reason,
        })?;
        let named = Named { source: source.into(), pattern: Rc::new(pattern) };
        self.patterns.insert(Rc::clone(&named.source), named.clone());
        Ok(named)
    }
}

pub(crate) fn too_long(at: &str) -> SchemaError {
    SchemaError::TooLarge { what: "digits of a number", limit: 400, at: at.into() }
}

/// The scalars of a list, or with `not` all other scalars. `None` if a number has too many digits.
fn values(all: &[Json], not: bool) -> Option<Vec<Alternative>> {
    let has = |value: &Json| all.contains(value);
    let mut numbers = Vec::new();
    for value in all {
        if let Json::Number(text) = value {
            let number = Decimal::parse(text)?;
            if !numbers.contains(&number) {
                numbers.push(number);
            }
        }
    }
    let mut strings: Vec<String> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    strings.extend(all.iter().filter_map(Json::text).filter(|text| seen.insert(*text)).map(str::to_owned));
    let (null, yes, no) = (has(&Json::Null), has(&Json::Bool(true)), has(&Json::Bool(false)));
    let mut form = Vec::new();
    if null != not {
        form.push(Alternative::Null);
    }
    if yes != not || no != not {
        form.push(Alternative::Bool(yes != not, no != not));
    }
    if not {
        form.push(Alternative::Number(Numbers { except: numbers, ..Numbers::default() }));
        form.push(Alternative::String(Strings { except: strings, ..Strings::default() }));
        form.push(Alternative::Array(Arrays::default()));
        form.push(object(Objects::default()));
        return Some(form);
    }
    if !numbers.is_empty() {
        form.push(Alternative::Number(Numbers { only: Some(numbers), ..Numbers::default() }));
    }
    if !strings.is_empty() {
        form.push(Alternative::String(Strings { only: Some(strings), ..Strings::default() }));
    }
    Some(form)
}

/// A type's values.
pub(crate) fn of_type(name: &str) -> Option<Alternative> {
    Some(match name {
        "null" => Alternative::Null,
        "boolean" => Alternative::Bool(true, true),
        "number" => Alternative::Number(Numbers::default()),
        "integer" => Alternative::Number(Numbers { integer: Some(true), ..Numbers::default() }),
        "string" => Alternative::String(Strings::default()),
        "array" => Alternative::Array(Arrays::default()),
        "object" => object(Objects::default()),
        _ => return None,
    })
}
