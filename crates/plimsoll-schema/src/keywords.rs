//! The values that each keyword allows.

use crate::SchemaError;
use crate::expand::{Expander, ONE_OF_MAX, Result, absent, instead, just, object, present, without};
use crate::form::{Alternative, Arrays, Contains, Expr, ItemGroup, MemberGroup, Objects, Strings, anything};
use crate::json::Json;
use crate::pattern::format;
use crate::refs::Place;
use crate::values::{count, list, numbers, short, types, wrong};

/// Handled first, because they leave the fewest values.
const FIRST: [&str; 3] = ["type", "const", "enum"];

/// Handled last: they depend on all others.
const LAST: [&str; 2] = ["unevaluatedProperties", "unevaluatedItems"];

/// Keywords that are handled together, at the first of them that a schema has.
const MEMBERS: [&str; 3] = ["properties", "patternProperties", "additionalProperties"];
pub(crate) const ITEMS: [&str; 3] = ["prefixItems", "items", "additionalItems"];

/// Most levels that are expanded to tell two schemas apart.
const LOOK_INTO: usize = 4;

impl<'a> Expander<'a> {
    /// The values that a schema allows.
    pub fn schema(&mut self, place: &Place<'a>) -> Result<Vec<Alternative>> {
        if !matches!(place.json, Json::Object(_)) {
            let reason = format!("{} is not a schema: a schema is an object, true or false", short(place.json));
            return Err(SchemaError::Invalid { at: place.at.to_string(), reason });
        }
        let mut form = anything();
        let keys = place.json.members().iter().map(|(key, _)| key.as_str());
        let middle: Vec<&str> = keys.filter(|key| !FIRST.contains(key) && !LAST.contains(key)).collect();
        for key in FIRST.into_iter().chain(middle) {
            let Some(value) = place.json.get(key) else { continue };
            if let Some(one) = self.keyword(place, key, value)? {
                form = self.meet(&form, &one, &place.at)?;
            }
        }
        for key in LAST {
            let Some(value) = place.json.get(key) else { continue };
            let rest = self.expr(&place.enter(value, key));
            for alternative in &mut form {
                match alternative {
                    Alternative::Object(objects) if key == "unevaluatedProperties" => not_evaluated(objects, &rest),
                    Alternative::Array(arrays) if key == "unevaluatedItems" => {
                        self.not_evaluated_items(arrays, &rest);
                    }
                    _ => {}
                }
            }
        }
        Ok(form)
    }

    fn keyword(&mut self, place: &Place<'a>, key: &str, value: &'a Json) -> Result<Option<Vec<Alternative>>> {
        let inside = place.enter(value, key);
        Ok(Some(match key {
            "type" => types(place, value)?,
            "const" => self.one_of_values(std::slice::from_ref(value), &inside.at)?,
            "enum" => self.one_of_values(list(&inside)?, &inside.at)?,
            "$ref" => {
                let target = self.target(&inside, false)?;
                self.of(&target)?
            }
            "$dynamicRef" | "$recursiveRef" => {
                let target = self.target(&inside, true)?;
                self.of(&target)?
            }
            "allOf" => {
                let mut form = anything();
                for (at, item) in list(&inside)?.iter().enumerate() {
                    let one = self.of(&inside.enter(item, &at.to_string()))?;
                    form = self.meet(&form, &one, &inside.at)?;
                }
                form
            }
            "anyOf" => {
                let all = self.each(&inside)?;
                let forms = all.iter().map(|one| self.form(one).map(|form| form.to_vec())).collect::<Result<_>>()?;
                self.join(forms, &inside.at)?
            }
            "oneOf" => self.exactly_one(&inside)?,
            "not" => {
                let not = self.not(&inside);
                self.form(&not)?.to_vec()
            }
            "if" => self.conditional(place, &inside)?,
            "minLength" | "maxLength" | "pattern" | "format" => return self.strings(place, key, &inside),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                return numbers(place, key, &inside)
                    .map(|numbers| numbers.map(|numbers| instead(Alternative::Number(numbers))));
            }
            "properties" | "patternProperties" | "additionalProperties" => {
                if !leads(place, MEMBERS, key) {
                    return Ok(None);
                }
                let groups = vec![self.members(place)?];
                instead(object(Objects { groups, ..Objects::default() }))
            }
            "required" => {
                // Of older drafts: a flag of a property.
                let Json::Array(names) = value else { return Ok(None) };
                let required = names.iter().filter_map(Json::text).map(str::to_owned).collect();
                instead(object(Objects { required, ..Objects::default() }))
            }
            "minProperties" => instead(object(Objects { min: count(&inside)?, ..Objects::default() })),
            "maxProperties" => instead(object(Objects { max: Some(count(&inside)?), ..Objects::default() })),
            "propertyNames" => {
                let names = vec![self.expr(&inside)];
                instead(object(Objects { names, ..Objects::default() }))
            }
            "dependentRequired" | "dependentSchemas" | "dependencies" => self.dependent(&inside)?,
            "prefixItems" | "items" | "additionalItems" => {
                if !leads(place, ITEMS, key) {
                    return Ok(None);
                }
                let groups = vec![self.items(place)?];
                instead(Alternative::Array(Arrays { groups, ..Arrays::default() }))
            }
            "minItems" => instead(Alternative::Array(Arrays { min: count(&inside)?, ..Arrays::default() })),
            "maxItems" => instead(Alternative::Array(Arrays { max: Some(count(&inside)?), ..Arrays::default() })),
            "contains" => {
                let contains = vec![self.contains(place, &inside)?];
                instead(Alternative::Array(Arrays { contains, ..Arrays::default() }))
            }
            "uniqueItems" => {
                if *value == Json::Bool(true) {
                    self.left_to_validation("uniqueItems", &inside.at);
                }
                return Ok(None);
            }
            _ => return Ok(None),
        }))
    }

    /// Records that the grammar allows more than a keyword.
    pub fn left_to_validation(&mut self, keyword: &str, at: &str) {
        let words = format!("{keyword} at {}", if at.is_empty() { "/" } else { at });
        if !self.lenient && !self.validated.contains(&words) {
            self.validated.push(words);
        }
    }

    /// The form of a schema.
    fn of(&mut self, place: &Place<'a>) -> Result<Vec<Alternative>> {
        let expr = self.expr(place);
        Ok(self.form(&expr)?.to_vec())
    }

    /// The schemas of a list.
    pub fn each(&mut self, list_at: &Place<'a>) -> Result<Vec<Expr>> {
        let places = list(list_at)?.iter().enumerate();
        Ok(places.map(|(at, item)| self.expr(&list_at.enter(item, &at.to_string()))).collect())
    }

    /// The target of a reference.
    pub fn target(&mut self, at: &Place<'a>, dynamic: bool) -> Result<Place<'a>> {
        let reference = at.json.text().unwrap_or_default();
        let found = match dynamic {
            true => self.references.find_dynamic(at, reference),
            false => self.references.find(at, reference),
        };
        found.ok_or_else(|| SchemaError::Unsupported {
            keyword: if dynamic { "$dynamicRef".into() } else { "$ref".into() },
            at: at.at.to_string(),
            reason: match (dynamic, self.references.find(at, reference).is_some()) {
                (true, true) => format!("'{reference}' leads to different schemas on different ways"),
                _ => format!("'{reference}' is not in this schema; documents elsewhere are not fetched"),
            },
        })
    }

    fn strings(&mut self, place: &Place<'a>, key: &str, at: &Place<'a>) -> Result<Option<Vec<Alternative>>> {
        let strings = match key {
            "minLength" => Strings { min: count(at)?, ..Strings::default() },
            "maxLength" => Strings { max: Some(count(at)?), ..Strings::default() },
            "pattern" => {
                let Some(source) = at.json.text() else { return Err(wrong(at, "a string")) };
                match self.pattern(source, &at.at) {
                    Ok(pattern) => Strings { patterns: vec![pattern], ..Strings::default() },
                    Err(_) if self.lenient => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
            // An annotation. It applies only if no other keyword restricts the text.
            _ => {
                let told = ["enum", "const", "pattern"].iter().any(|key| place.json.get(key).is_some());
                let Some(pattern) = at.json.text().and_then(format).filter(|_| !told) else { return Ok(None) };
                Strings { patterns: vec![self.pattern(pattern, &at.at)?], ..Strings::default() }
            }
        };
        Ok(Some(instead(Alternative::String(strings))))
    }

    /// A schema's constraints on members.
    pub fn members(&mut self, place: &Place<'a>) -> Result<MemberGroup> {
        let mut group = MemberGroup::default();
        if let Some(properties) = place.json.get("properties") {
            let at = place.enter(properties, "properties");
            for (name, value) in properties.members() {
                group.properties.push((name.clone(), self.expr(&at.enter(value, name))));
            }
        }
        if let Some(patterns) = place.json.get("patternProperties") {
            let at = place.enter(patterns, "patternProperties");
            for (source, value) in patterns.members() {
                let inside = at.enter(value, source);
                let named = self.pattern(source, &inside.at)?;
                group.patterns.push((named, self.expr(&inside)));
            }
        }
        if let Some(rest) = place.json.get("additionalProperties") {
            group.rest = Some(self.expr(&place.enter(rest, "additionalProperties")));
        }
        Ok(group)
    }

    /// A schema's constraints on items.
    pub fn items(&mut self, place: &Place<'a>) -> Result<ItemGroup> {
        let items = place.json.get("items").map(|items| place.enter(items, "items"));
        let prefix = place.json.get("prefixItems").map(|prefix| place.enter(prefix, "prefixItems"));
        // Of older drafts: a list of items, and what follows.
        let old = items.as_ref().filter(|items| prefix.is_none() && items.json.items().is_some());
        let rest = match old {
            Some(_) => place.json.get("additionalItems").map(|rest| place.enter(rest, "additionalItems")),
            None => items.clone(),
        };
        let prefix = match old.or(prefix.as_ref()) {
            Some(prefix) => self.each(prefix)?,
            None => Vec::new(),
        };
        Ok(ItemGroup { prefix, rest: rest.map(|rest| self.expr(&rest)), blind: false })
    }

    /// A schema's constraints on contained items.
    pub fn contains(&mut self, place: &Place<'a>, at: &Place<'a>) -> Result<Contains> {
        let bound = |key: &str| place.json.get(key).map(|value| count(&place.enter(value, key))).transpose();
        Ok(Contains {
            item: self.expr(at),
            min: bound("minContains")?.unwrap_or(1),
            max: bound("maxContains")?,
            blind: false,
        })
    }

    fn not_evaluated_items(&mut self, arrays: &mut Arrays, rest: &Expr) {
        let seen = |group: &&ItemGroup| !group.blind;
        if arrays.groups.iter().filter(seen).any(|group| group.rest.is_some()) {
            return;
        }
        let places = arrays.groups.iter().filter(seen).map(|group| group.prefix.len()).max().unwrap_or(0);
        // Items that match `contains` count as evaluated.
        let contained: Vec<Expr> =
            arrays.contains.iter().filter(|contains| !contains.blind).map(|contains| contains.item.clone()).collect();
        let rest = match contained.is_empty() {
            true => rest.clone(),
            false => self.any([vec![rest.clone()], contained].concat()),
        };
        arrays.groups.push(ItemGroup { prefix: vec![Expr::default(); places], rest: Some(rest), blind: false });
    }

    fn conditional(&mut self, place: &Place<'a>, test: &Place<'a>) -> Result<Vec<Alternative>> {
        let branch = |key: &str| place.json.get(key).map(|json| place.enter(json, key));
        let (yes, no) = (branch("then"), branch("else"));
        if yes.is_none() && no.is_none() && !place.json.members().iter().any(|(key, _)| LAST.contains(&key.as_str())) {
            return Ok(anything());
        }
        let (test, not) = (self.expr(test), self.not(test));
        let then = yes.map(|place| self.expr(&place)).unwrap_or_default();
        let other = no.map(|place| self.expr(&place)).unwrap_or_default();
        let (test, not) = (self.form(&test)?, self.form(&not)?);
        let (then, other) = (self.form(&then)?, self.form(&other)?);
        let forms = vec![self.meet(&test, &then, &place.at)?, self.meet(&not, &other, &place.at)?];
        self.join(forms, &place.at)
    }

    /// Exactly one of the schemas: each without the values it shares with others.
    fn exactly_one(&mut self, at: &Place<'a>) -> Result<Vec<Alternative>> {
        let all = self.each(at)?;
        let told = if all.len() > ONE_OF_MAX { None } else { self.told_apart(&all, at)? };
        match told {
            Some(form) => Ok(form),
            None => {
                self.left_to_validation("oneOf", &at.at);
                let forms = all.iter().map(|one| self.form(one).map(|form| form.to_vec())).collect::<Result<_>>()?;
                self.join(forms, &at.at)
            }
        }
    }

    /// Disjoint alternatives of `oneOf`. `None` if that takes too many.
    fn told_apart(&mut self, all: &[Expr], at: &Place<'a>) -> Result<Option<Vec<Alternative>>> {
        let mut forms = Vec::new();
        for (i, one) in all.iter().enumerate() {
            let mut form = self.form(one)?.to_vec();
            for (j, other) in all.iter().enumerate() {
                if i == j || self.is_dead(&one.and(other), LOOK_INTO)? {
                    continue;
                }
                let not = self.complement(other);
                let not = match self.form(&not) {
                    Err(SchemaError::TooLarge { what: "alternatives", .. }) => return Ok(None),
                    not => not?,
                };
                form = match self.meet(&form, &not, &at.at) {
                    Err(SchemaError::TooLarge { what: "alternatives", .. }) => return Ok(None),
                    form => form?,
                };
            }
            forms.push(form);
        }
        match self.join(forms, &at.at) {
            Err(SchemaError::TooLarge { what: "alternatives", .. }) => Ok(None),
            form => form.map(Some),
        }
    }

    /// Whether an expression allows no value, as far as this many levels show.
    pub fn is_dead(&mut self, expr: &Expr, levels: usize) -> Result<bool> {
        if expr.is_nothing() || levels == 0 {
            return Ok(expr.is_nothing());
        }
        for alternative in self.form(expr)?.iter() {
            self.pay(1, "")?;
            let dead = match alternative {
                Alternative::Array(arrays) => {
                    let mut dead = false;
                    for at in 0..arrays.min.min(arrays.places() as u64 + 1) {
                        dead = dead || self.is_dead(&arrays.item(at as usize), levels - 1)?;
                    }
                    dead
                }
                Alternative::Object(objects) => {
                    let mut dead = false;
                    for name in &objects.required {
                        dead = dead || self.is_dead(&objects.value(name), levels - 1)?;
                    }
                    dead
                }
                _ => false,
            };
            if !dead {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn dependent(&mut self, at: &Place<'a>) -> Result<Vec<Alternative>> {
        let mut form = anything();
        for (name, value) in at.json.members() {
            let with = match value {
                Json::Array(names) => {
                    let names = names.iter().filter_map(Json::text).filter(|other| *other != name);
                    let required = std::iter::once(name.as_str()).chain(names).map(str::to_owned).collect();
                    just(object(Objects { required, ..Objects::default() }))
                }
                _ => {
                    let one = self.of(&at.enter(value, name))?;
                    self.meet(&[present(name)], &one, &at.at)?
                }
            };
            let forms = vec![without(&object(Objects::default())), just(absent(name)), with];
            let one = self.join(forms, &at.at)?;
            form = self.meet(&form, &one, &at.at)?;
        }
        Ok(form)
    }
}

/// Whether a keyword is the first of its group in a schema.
pub(crate) fn leads(place: &Place<'_>, group: [&str; 3], key: &str) -> bool {
    group.into_iter().find(|known| place.json.get(known).is_some()) == Some(key)
}

/// Applies `rest` to the members that no other group evaluates.
fn not_evaluated(objects: &mut Objects, rest: &Expr) {
    let seen: Vec<&MemberGroup> = objects.groups.iter().filter(|group| !group.blind).collect();
    if seen.iter().any(|group| group.rest.is_some()) {
        return;
    }
    let properties = seen.iter().flat_map(|group| &group.properties).map(|(name, _)| (name.clone(), Expr::default()));
    let patterns = seen.iter().flat_map(|group| &group.patterns).map(|(named, _)| (named.clone(), Expr::default()));
    let group = MemberGroup {
        properties: properties.collect(),
        patterns: patterns.collect(),
        rest: Some(rest.clone()),
        blind: false,
    };
    objects.groups.push(group);
}
