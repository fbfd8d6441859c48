//! Plans become rules: finds the expressions that have a finite text, and writes their grammar.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use crate::counted::Table;
use crate::expand::{Expander, Result};
use crate::form::Expr;
use crate::pattern::written;
use crate::plan::{Counted, Items, Members, Plan};
use crate::{Options, SchemaError};

/// An expression's number.
type State = usize;

/// Collects what is reachable from one expression.
pub(crate) struct Emitter<'o> {
    options: &'o Options,
    prefix: &'o str,
    states: HashMap<Expr, State>,
    exprs: Vec<Expr>,
    plans: Vec<Vec<Plan>>,
    alive: Vec<bool>,
    rules: String,
    count: usize,
    terminals: BTreeMap<String, String>,
}

impl<'o> Emitter<'o> {
    pub fn new(prefix: &'o str, options: &'o Options) -> Self {
        Self {
            options,
            prefix,
            states: HashMap::new(),
            exprs: Vec::new(),
            plans: Vec::new(),
            alive: Vec::new(),
            rules: String::new(),
            count: 0,
            terminals: BTreeMap::new(),
        }
    }

    /// The rules of an expression, the first of which has the name `prefix`.
    pub fn rules(mut self, expander: &mut Expander<'_>, root: &Expr) -> Result<String> {
        let root = self.state(root);
        let mut next = 0;
        while next < self.exprs.len() {
            let expr = self.exprs[next].clone();
            let plans = self.plans_of(expander, &expr).map_err(|error| error.within(expander.place(&expr)))?;
            expander.pay(plans.len(), "")?;
            for plan in &plans {
                self.reach(plan);
            }
            self.plans.push(plans);
            next += 1;
            if next > self.options.rules_max {
                let limit = self.options.rules_max as u64;
                return Err(SchemaError::TooLarge { what: "different parts", limit, at: String::new() });
            }
        }
        self.find_alive(expander)?;
        if !self.alive[root] {
            return Err(SchemaError::Unsatisfiable { at: String::new() });
        }
        let body = self.name(root);
        self.rule(self.prefix, &body)?;
        for state in (0..self.exprs.len()).filter(|state| self.alive[*state]).collect::<Vec<_>>() {
            let (name, body) = (self.name(state), self.body(state)?);
            self.rule(&name, &body)?;
        }
        let upper = self.upper();
        let _ = writeln!(self.rules, "{upper}_COMMA: /{}/", self.options.item_separator);
        let _ = writeln!(self.rules, "{upper}_COLON: /{}/", self.options.key_separator);
        for (text, name) in std::mem::take(&mut self.terminals) {
            let _ = writeln!(self.rules, "{name}: {text}");
        }
        self.fits()?;
        Ok(self.rules)
    }

    fn plans_of(&self, expander: &mut Expander<'_>, expr: &Expr) -> Result<Vec<Plan>> {
        let form = expander.form(expr)?;
        let mut plans = Vec::new();
        for alternative in form.iter() {
            plans.extend(expander.plan(alternative, self.options)?);
        }
        Ok(plans)
    }

    fn state(&mut self, expr: &Expr) -> State {
        if let Some(state) = self.states.get(expr) {
            return *state;
        }
        self.exprs.push(expr.clone());
        self.states.insert(expr.clone(), self.exprs.len() - 1);
        self.exprs.len() - 1
    }

    /// Numbers the expressions in a plan.
    fn reach(&mut self, plan: &Plan) {
        let all: Vec<&Expr> = match plan {
            Plan::Terminal(_) | Plan::Json(_) => Vec::new(),
            Plan::Items(items) => {
                let counted = items.counted.iter().flat_map(|counted| counted.hit.iter().chain(&counted.miss));
                items.places.iter().chain([&items.rest]).chain(counted).collect()
            }
            Plan::Members(members) => {
                let named = members.named.iter().map(|member| &member.value);
                let others = members.others.iter().chain(members.another.iter().flatten()).map(|(_, value)| value);
                named.chain(others).collect()
            }
        };
        for expr in all.into_iter().filter(|expr| !expr.is_nothing()) {
            self.state(expr);
        }
    }

    fn is_alive(&self, expr: &Expr) -> bool {
        self.states.get(expr).is_some_and(|state| self.alive[*state])
    }

    /// Finds the expressions that have a finite text: the least fixed point.
    fn find_alive(&mut self, expander: &mut Expander<'_>) -> Result<()> {
        self.alive = vec![false; self.exprs.len()];
        loop {
            let mut more = false;
            // Inner expressions usually have higher numbers, so the reverse order needs fewer passes.
            for state in (0..self.exprs.len()).rev() {
                expander.pay(1, "")?;
                if !self.alive[state] && self.plans[state].iter().any(|plan| self.can_end(plan)) {
                    self.alive[state] = true;
                    more = true;
                }
            }
            if !more {
                return Ok(());
            }
        }
    }

    fn can_end(&self, plan: &Plan) -> bool {
        match plan {
            Plan::Terminal(_) | Plan::Json(_) => true,
            Plan::Items(items) => match &items.counted {
                None => {
                    let needed = usize::try_from(items.min).unwrap_or(usize::MAX);
                    let places = items.places.iter().take(needed).all(|item| self.is_alive(item));
                    places && (needed <= items.places.len() || self.is_alive(&items.rest))
                }
                Some(counted) => self.table(items, counted).starts(),
            },
            Plan::Members(members) => {
                let required = members.named.iter().filter(|member| member.required);
                let another =
                    members.another.as_ref().is_none_or(|all| all.iter().any(|(_, value)| self.is_alive(value)));
                let others = members.others.iter().any(|(_, value)| self.is_alive(value));
                let named = members.named.iter().filter(|member| self.is_alive(&member.value)).count() as u64;
                required.into_iter().all(|member| self.is_alive(&member.value))
                    && another
                    && (others || named >= members.min)
            }
        }
    }

    fn name(&self, state: State) -> String {
        format!("{}_{state}", self.prefix)
    }

    fn upper(&self) -> String {
        self.prefix.to_ascii_uppercase()
    }

    fn rule(&mut self, name: &str, body: &str) -> Result<()> {
        let _ = writeln!(self.rules, "{name}: {body}");
        self.count += 1;
        self.fits()
    }

    fn fits(&self) -> Result<()> {
        let too = |what, limit: usize| Err(SchemaError::TooLarge { what, limit: limit as u64, at: String::new() });
        if self.count > self.options.rules_max {
            return too("rules", self.options.rules_max);
        }
        if self.rules.len() > self.options.bytes_max {
            return too("bytes of its grammar", self.options.bytes_max);
        }
        Ok(())
    }

    /// The name of a terminal.
    fn terminal(&mut self, text: &str) -> String {
        if let Some(name) = self.terminals.get(text) {
            return name.clone();
        }
        let name = format!("{}_T{}", self.upper(), self.terminals.len());
        self.terminals.insert(text.to_owned(), name.clone());
        name
    }

    /// The alternatives of an expression.
    fn body(&mut self, state: State) -> Result<String> {
        let plans: Vec<Plan> = self.plans[state].iter().filter(|plan| self.can_end(plan)).cloned().collect();
        let mut all = Vec::with_capacity(plans.len());
        for (at, plan) in plans.iter().enumerate() {
            let name = format!("{}_{state}_{at}", self.prefix);
            all.push(match plan {
                Plan::Terminal(text) => self.terminal(text),
                Plan::Json(schema) => format!("%json {schema}"),
                Plan::Items(items) => self.items(&name, items)?,
                Plan::Members(members) => self.members(&name, members)?,
            });
        }
        Ok(all.join(" | "))
    }

    /// A reference to an expression.
    fn call(&self, expr: &Expr) -> String {
        self.states.get(expr).map_or_else(String::new, |state| self.name(*state))
    }

    fn comma(&self) -> String {
        format!("{}_COMMA", self.upper())
    }

    fn items(&mut self, name: &str, items: &Items) -> Result<String> {
        if let Some(counted) = &items.counted {
            return self.counted_items(name, items, counted);
        }
        let comma = self.comma();
        let dead = items.places.iter().position(|item| !self.is_alive(item));
        let count = dead.unwrap_or(items.places.len()) as u64;
        let rest_dead = dead.is_some() || !self.is_alive(&items.rest);
        let max = match rest_dead {
            true => Some(items.max.unwrap_or(count).min(count)),
            false => items.max,
        };
        let places = max.map_or(count, |max| max.min(count));
        // From the last place to the first: each may be the end if enough came before.
        let mut tail = String::new();
        if max.is_none_or(|max| max > places) {
            let rest = self.call(&items.rest);
            let least = items.min.saturating_sub(places);
            let most = max.map(|max| max - places);
            tail = match (places, least, most) {
                // The first has no comma before it.
                (0, least, most) => {
                    let more = repeat(&format!("{comma} {rest}"), least.saturating_sub(1), most.map(|most| most - 1));
                    let all = format!("{rest} {more}");
                    if least == 0 { format!("({all})?") } else { all }
                }
                (_, least, most) => repeat(&format!("{comma} {rest}"), least, most),
            };
        }
        for at in (0..places).rev() {
            let item = self.call(&items.places[at as usize]);
            let all = if at == 0 { format!("{item} {tail}") } else { format!("{comma} {item} {tail}") };
            // One rule per place: the library limits nested groups.
            let rule = format!("{name}_p{at}");
            self.rule(&rule, &all)?;
            tail = if at >= items.min { format!("({rule})?") } else { rule };
        }
        Ok(format!("\"[\" {tail} \"]\""))
    }

    fn table(&self, items: &Items, counted: &Counted) -> Table {
        Table::new(items, counted, |expr| self.is_alive(expr))
    }

    fn counted_items(&mut self, name: &str, items: &Items, counted: &Counted) -> Result<String> {
        let table = self.table(items, counted);
        let comma = self.comma();
        let last = items.places.len();
        for at in 0..table.length {
            for hits in 0..table.hits {
                if !table.good[at][hits] {
                    continue;
                }
                let mut all = Vec::new();
                let place = at.min(last);
                for (expr, more) in [(&counted.hit[place], 1), (&counted.miss[place], 0)] {
                    let (next, then) = table.after(at, hits, more);
                    if self.is_alive(expr) && table.good[next][then] {
                        let comma = if at == 0 { "" } else { &comma };
                        all.push(format!("{comma} {} {name}_s{next}_{then}", self.call(expr)));
                    }
                }
                if table.ends(at, hits) {
                    all.push("\"\"".into());
                }
                self.rule(&format!("{name}_s{at}_{hits}"), &all.join(" | "))?;
            }
        }
        Ok(format!("\"[\" {name}_s0_0 \"]\""))
    }

    fn members(&mut self, name: &str, members: &Members) -> Result<String> {
        let upper = self.upper();
        let pair = |key: String, value: String| format!("{key} {upper}_COLON {value}");
        let live: Vec<_> = members.named.iter().filter(|member| self.is_alive(&member.value)).cloned().collect();
        let list = |all: &mut Self, list: &[(String, Expr)]| -> Vec<String> {
            let live: Vec<_> = list.iter().filter(|(_, value)| all.is_alive(value)).cloned().collect();
            live.into_iter().map(|(key, value)| pair(all.terminal(&key), all.call(&value))).collect()
        };
        let (others, another) = (list(self, &members.others), members.another.as_ref().map(|all| list(self, all)));
        let mut other = None;
        if !others.is_empty() {
            let rule = format!("{name}_other");
            self.rule(&rule, &others.join(" | "))?;
            other = Some(rule);
        }
        let special = match another {
            Some(all) => {
                let rule = format!("{name}_another");
                self.rule(&rule, &all.join(" | "))?;
                Some(rule)
            }
            None => None,
        };
        // Counts of members above this one behave alike.
        let cap = [1, members.min, members.max.map_or(0, |max| max.saturating_add(1))].into_iter().max().unwrap_or(1);
        let comma = self.comma();
        // The rest of the object after each count of members. `None` if it cannot end.
        let mut after: Vec<Option<String>> = Vec::new();
        for count in 0..=cap {
            after.push(rest(members, count, other.as_deref(), special.as_deref(), &comma));
        }
        for (at, member) in live.iter().enumerate().rev() {
            let (key, value) = (crate::json::quoted(&written(&member.key)), self.call(&member.value));
            let mut before = Vec::new();
            for count in 0..=cap {
                let comma = if count == 0 { "" } else { &comma };
                let next = &after[usize::try_from((count + 1).min(cap)).unwrap_or(0)];
                let with = next.as_ref().map(|next| format!("{comma} {} {next}", pair(key.clone(), value.clone())));
                let without = after[count as usize].clone().filter(|_| !member.required);
                // Skips states that no object reaches.
                let reachable = count <= at as u64;
                let all: Vec<String> = match reachable {
                    true => with
                        .into_iter()
                        .chain(without)
                        .map(|one| if one.trim().is_empty() { "\"\"".into() } else { one })
                        .collect(),
                    false => Vec::new(),
                };
                before.push(match all.is_empty() {
                    true => None,
                    false => {
                        let rule = format!("{name}_m{at}_{count}");
                        self.rule(&rule, &all.join(" | "))?;
                        Some(rule)
                    }
                });
            }
            after = before;
        }
        let start = after.into_iter().next().flatten();
        // This expression can end. Without a rule its only text is empty.
        Ok(format!("\"{{\" {} \"}}\"", start.unwrap_or_default()))
    }
}

/// Members without a declared name after `count` others. `None` if the object cannot end.
fn rest(members: &Members, count: u64, other: Option<&str>, special: Option<&str>, comma: &str) -> Option<String> {
    let least = members.min.saturating_sub(count);
    let most = match members.max {
        Some(max) => Some(max.checked_sub(count)?),
        None => None,
    };
    if let Some(special) = special {
        // Numbers are not counted here.
        let before =
            other.map(|other| if count == 0 { format!("({other} {comma})*") } else { format!("({comma} {other})*") });
        let first = match (&before, count) {
            (Some(before), 0) => format!("{before} {special}"),
            (Some(before), _) => format!("{before} {comma} {special}"),
            (None, 0) => special.to_owned(),
            (None, _) => format!("{comma} {special}"),
        };
        let after = other.map(|other| format!("({comma} {other})*")).unwrap_or_default();
        return Some(format!("{first} {after}"));
    }
    let Some(other) = other.filter(|_| most != Some(0)) else { return (least == 0).then(String::new) };
    let one = format!("{comma} {other}");
    Some(match count {
        0 => {
            let more = repeat(&one, least.saturating_sub(1), most.map(|most| most - 1));
            let all = format!("{other} {more}");
            if least == 0 { format!("({all})?") } else { all }
        }
        _ => repeat(&one, least, most),
    })
}

/// An expression repeated `least` to `most` times.
fn repeat(what: &str, least: u64, most: Option<u64>) -> String {
    match (least, most) {
        (_, Some(0)) => String::new(),
        (0, None) => format!("({what})*"),
        (1, None) => format!("({what})+"),
        (least, None) => format!("({what}){{{least},}}"),
        (least, Some(most)) => format!("({what}){{{least},{most}}}"),
    }
}
