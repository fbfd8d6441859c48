//! The values that the negation of each keyword allows.

use crate::decimal::End;
use crate::expand::{Expander, Result, absent, just, member, object, of_type, present, without};
use crate::form::{
    Alternative, Another, Arrays, Contains, Expr, ItemGroup, MemberGroup, Numbers, Objects, Strings, anything,
};
use crate::json::Json;
use crate::keywords::{ITEMS, leads};
use crate::refs::Place;
use crate::values::{count, list, number, numbers, type_names};

impl<'a> Expander<'a> {
    /// The values that violate a schema: those that violate one of its keywords.
    pub fn negated(&mut self, place: &Place<'a>) -> Result<Vec<Alternative>> {
        let mut forms = Vec::new();
        for (key, value) in place.json.members() {
            let inside = place.enter(value, key);
            forms.push(self.broken(place, key, value, &inside)?);
        }
        self.join(forms, &place.at)
    }

    /// The values that violate a keyword. Empty for a keyword that allows all values.
    fn broken(
        &mut self,
        place: &Place<'a>,
        key: &str,
        value: &'a Json,
        inside: &Place<'a>,
    ) -> Result<Vec<Alternative>> {
        let arrays = |arrays| just(Alternative::Array(arrays));
        Ok(match key {
            "type" => other_types(value),
            "const" => self.none_of_values(std::slice::from_ref(value), &inside.at)?,
            "enum" => self.none_of_values(list(inside)?, &inside.at)?,
            "$ref" | "$dynamicRef" | "$recursiveRef" => {
                let target = self.target(inside, key != "$ref")?;
                let not = self.not(&target);
                self.form(&not)?.to_vec()
            }
            "allOf" => self.any_broken(inside)?,
            "anyOf" => self.all_broken(inside)?,
            "oneOf" => self.none_or_several(inside)?,
            "not" => {
                let expr = self.expr(inside);
                self.form(&expr)?.to_vec()
            }
            "if" => self.broken_conditional(place, inside)?,
            "minLength" | "maxLength" | "pattern" => self.broken_strings(key, inside)?,
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => broken_numbers(place, key, inside)?,
            "multipleOf" => {
                number(inside)?;
                self.left_to_validation("not multipleOf", &inside.at);
                just(Alternative::Number(Numbers::default()))
            }
            "properties" | "patternProperties" | "additionalProperties" => self.broken_members(place, key)?,
            "required" => value.items().unwrap_or_default().iter().filter_map(Json::text).map(absent).collect(),
            "minProperties" => match count(inside)?.checked_sub(1) {
                Some(max) => just(object(Objects { max: Some(max), ..Objects::default() })),
                None => Vec::new(),
            },
            "maxProperties" => just(object(Objects { min: count(inside)?.saturating_add(1), ..Objects::default() })),
            "propertyNames" => {
                let another = Another { name: Some(self.not(inside)), ..Another::default() };
                just(object(Objects { another: vec![another], ..Objects::default() }))
            }
            "dependentRequired" | "dependentSchemas" | "dependencies" => self.broken_dependent(inside)?,
            "prefixItems" | "items" | "additionalItems" => self.broken_items(place, key)?,
            "minItems" => match count(inside)?.checked_sub(1) {
                Some(max) => arrays(Arrays { max: Some(max), ..Arrays::default() }),
                None => Vec::new(),
            },
            "maxItems" => arrays(Arrays { min: count(inside)?.saturating_add(1), ..Arrays::default() }),
            "contains" => self.broken_contains(place, inside)?,
            "uniqueItems" if *value == Json::Bool(true) => {
                self.left_to_validation("not uniqueItems", &inside.at);
                arrays(Arrays { min: 2, ..Arrays::default() })
            }
            "unevaluatedProperties" | "unevaluatedItems" => {
                self.left_to_validation(&format!("not {key}"), &inside.at);
                match key {
                    "unevaluatedItems" => arrays(Arrays { min: 1, ..Arrays::default() }),
                    _ => just(object(Objects { min: 1, ..Objects::default() })),
                }
            }
            _ => Vec::new(),
        })
    }

    /// The values that violate one schema of a list.
    fn any_broken(&mut self, at: &Place<'a>) -> Result<Vec<Alternative>> {
        let all = self.each(at)?;
        let mut forms = Vec::new();
        for one in &all {
            let not = self.complement(one);
            forms.push(self.form(&not)?.to_vec());
        }
        self.join(forms, &at.at)
    }

    /// The values that violate every schema of a list.
    fn all_broken(&mut self, at: &Place<'a>) -> Result<Vec<Alternative>> {
        let mut form = anything();
        for one in self.each(at)? {
            let not = self.complement(&one);
            let not = self.form(&not)?;
            form = self.meet(&form, &not, &at.at)?;
        }
        Ok(form)
    }

    fn broken_contains(&mut self, place: &Place<'a>, at: &Place<'a>) -> Result<Vec<Alternative>> {
        let Contains { item, min, max, .. } = self.contains(place, at)?;
        let fewer = min.checked_sub(1).map(|max| Contains { item: item.clone(), min: 0, max: Some(max), blind: true });
        let more = max.map(|max| Contains { item, min: max.saturating_add(1), max: None, blind: true });
        let one = |contains| Alternative::Array(Arrays { contains: vec![contains], ..Arrays::default() });
        Ok(fewer.into_iter().chain(more).map(one).collect())
    }

    fn none_or_several(&mut self, at: &Place<'a>) -> Result<Vec<Alternative>> {
        let all = self.each(at)?;
        let mut none = anything();
        for one in &all {
            let not = self.complement(one);
            let not = self.form(&not)?;
            none = self.meet(&none, &not, &at.at)?;
        }
        let mut forms = vec![none];
        for (i, one) in all.iter().enumerate() {
            for other in &all[i + 1..] {
                forms.push(self.form(&one.and(other))?.to_vec());
            }
        }
        self.join(forms, &at.at)
    }

    fn broken_conditional(&mut self, place: &Place<'a>, test: &Place<'a>) -> Result<Vec<Alternative>> {
        let branch = |key: &str| place.json.get(key).map(|json| place.enter(json, key));
        let not_of = |all: &mut Self, key: &str| match branch(key) {
            Some(place) => all.not(&place),
            None => Expr::nothing(),
        };
        let (yes, no) = (self.expr(test), self.not(test));
        let (then, other) = (not_of(self, "then"), not_of(self, "else"));
        let (yes, no) = (self.form(&yes)?, self.form(&no)?);
        let (then, other) = (self.form(&then)?, self.form(&other)?);
        let forms = vec![self.meet(&yes, &then, &place.at)?, self.meet(&no, &other, &place.at)?];
        self.join(forms, &place.at)
    }

    fn broken_strings(&mut self, key: &str, at: &Place<'a>) -> Result<Vec<Alternative>> {
        let strings = match key {
            "minLength" => match count(at)?.checked_sub(1) {
                Some(max) => Strings { max: Some(max), ..Strings::default() },
                None => return Ok(Vec::new()),
            },
            "maxLength" => Strings { min: count(at)?.saturating_add(1), ..Strings::default() },
            _ => Strings { not: vec![self.pattern(at.json.text().unwrap_or_default(), &at.at)?], ..Strings::default() },
        };
        Ok(just(Alternative::String(strings)))
    }

    fn broken_members(&mut self, place: &Place<'a>, key: &str) -> Result<Vec<Alternative>> {
        let group = self.members(place)?;
        let mut all = Vec::new();
        let one = |another| object(Objects { another: vec![another], ..Objects::default() });
        match key {
            "properties" => {
                for (name, value) in &group.properties {
                    let not = self.complement(value);
                    if !not.is_nothing() {
                        let groups = vec![member(name, not, true)];
                        all.push(object(Objects { groups, required: vec![name.clone()], ..Objects::default() }));
                    }
                }
            }
            "patternProperties" => {
                for (named, value) in &group.patterns {
                    let not = self.complement(value);
                    if !not.is_nothing() {
                        all.push(one(Another { pattern: Some(named.clone()), value: not, ..Another::default() }));
                    }
                }
            }
            _ => {
                let not = self.complement(&group.rest.clone().unwrap_or_default());
                if !not.is_nothing() {
                    let outside = MemberGroup { rest: None, blind: true, ..group };
                    all.push(one(Another { outside, value: not, ..Another::default() }));
                }
            }
        }
        Ok(all)
    }

    fn broken_items(&mut self, place: &Place<'a>, key: &str) -> Result<Vec<Alternative>> {
        if !leads(place, ITEMS, key) {
            return Ok(Vec::new());
        }
        let group = self.items(place)?;
        let mut all = Vec::new();
        for (at, item) in group.prefix.iter().enumerate() {
            let not = self.complement(item);
            if !not.is_nothing() {
                let mut prefix = vec![Expr::default(); at];
                prefix.push(not);
                let groups = vec![ItemGroup { prefix, rest: None, blind: true }];
                all.push(Alternative::Array(Arrays { min: at as u64 + 1, groups, ..Arrays::default() }));
            }
        }
        if let Some(rest) = &group.rest {
            let not = self.complement(rest);
            if not.is_nothing() {
                return Ok(all);
            }
            let min = group.prefix.len() as u64 + 1;
            let contains = match min {
                1 => vec![Contains { item: not, min: 1, max: None, blind: true }],
                _ => {
                    self.left_to_validation("not items", &place.at);
                    Vec::new()
                }
            };
            all.push(Alternative::Array(Arrays { min, contains, ..Arrays::default() }));
        }
        Ok(all)
    }

    fn broken_dependent(&mut self, at: &Place<'a>) -> Result<Vec<Alternative>> {
        let mut forms = Vec::new();
        for (name, value) in at.json.members() {
            let without = match value {
                Json::Array(names) => names.iter().filter_map(Json::text).map(absent).collect(),
                _ => {
                    let not = self.not(&at.enter(value, name));
                    self.form(&not)?.to_vec()
                }
            };
            forms.push(self.meet(&[present(name)], &without, &at.at)?);
        }
        self.join(forms, &at.at)
    }
}

fn other_types(value: &Json) -> Vec<Alternative> {
    let names = type_names(value);
    let mut all = anything();
    for name in &names {
        if let Some(alternative) = of_type(name).filter(|_| *name != "integer") {
            let others = without(&alternative);
            all.retain(|one| others.iter().any(|other| other.kind() == one.kind()));
        }
    }
    if names.contains(&"integer") {
        for one in &mut all {
            if let Alternative::Number(numbers) = one {
                numbers.integer = Some(false);
            }
        }
    }
    all
}

fn broken_numbers(place: &Place<'_>, key: &str, at: &Place<'_>) -> Result<Vec<Alternative>> {
    let Some(Numbers { low, high, .. }) = numbers(place, key, at)? else { return Ok(Vec::new()) };
    let other = |end: End| End { open: !end.open, ..end };
    let numbers = Numbers { low: high.map(other), high: low.map(other), ..Numbers::default() };
    Ok(just(Alternative::Number(numbers)))
}
