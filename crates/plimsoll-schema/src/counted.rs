//! Arrays with counted items: the states of their grammar.

use crate::form::Expr;
use crate::plan::{Counted, Items};

/// The states of a counted array that lead to its end, by items and by counted items. The last value of both stands for
/// all higher ones.
pub(crate) struct Table {
    pub length: usize,
    pub hits: usize,
    min: u64,
    max: Option<u64>,
    min_hits: u64,
    max_hits: Option<u64>,
    pub good: Vec<Vec<bool>>,
}

impl Table {
    pub fn new(items: &Items, counted: &Counted, alive: impl Fn(&Expr) -> bool) -> Self {
        let cap = |ends: &[u64]| usize::try_from(ends.iter().max().copied().unwrap_or(0)).unwrap_or(0) + 1;
        let beyond = |max: Option<u64>| max.map_or(0, |max| max.saturating_add(1));
        // The first item has a place of its own: it has no comma before it.
        let length = cap(&[1, items.places.len() as u64, items.min, beyond(items.max)]);
        let hits = cap(&[counted.min, beyond(counted.max)]);
        let good = vec![vec![false; hits]; length];
        let (min, max) = (items.min, items.max);
        let mut table = Self { length, hits, min, max, min_hits: counted.min, max_hits: counted.max, good };
        let last = items.places.len();
        let mut more = true;
        while more {
            more = false;
            for at in (0..length).rev() {
                for hit in (0..hits).rev() {
                    if table.good[at][hit] {
                        continue;
                    }
                    let place = at.min(last);
                    let step = |expr: &Expr, one: usize| {
                        let (next, then) = table.after(at, hit, one);
                        alive(expr) && table.good[next][then]
                    };
                    if table.ends(at, hit) || step(&counted.hit[place], 1) || step(&counted.miss[place], 0) {
                        table.good[at][hit] = true;
                        more = true;
                    }
                }
            }
        }
        table
    }

    pub fn after(&self, at: usize, hits: usize, more: usize) -> (usize, usize) {
        ((at + 1).min(self.length - 1), (hits + more).min(self.hits - 1))
    }

    pub fn ends(&self, at: usize, hits: usize) -> bool {
        let (at, hits) = (at as u64, hits as u64);
        let fits = |count: u64, min: u64, max: Option<u64>| count >= min && max.is_none_or(|max| count <= max);
        fits(at, self.min, self.max) && fits(hits, self.min_hits, self.max_hits)
    }

    pub fn starts(&self) -> bool {
        self.good[0][0]
    }
}
