//! The pool and the index against naive models, and in long random runs.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// A slow model of the index: whole prefixes as keys, one clock reading for each page.
#[derive(Default)]
struct Model {
    known: HashMap<(u64, Vec<u32>), PageId>,
    idle_since: HashMap<PageId, u64>,
    holders: HashMap<PageId, usize>,
    clock: u64,
}

impl Model {
    fn prefixes<'a>(&self, salt: u64, tokens: &'a [u32]) -> impl Iterator<Item = (u64, Vec<u32>)> + use<'a> {
        (1..=tokens.len() / PAGE_TOKENS).map(move |n| (salt, tokens[..n * PAGE_TOKENS].to_vec()))
    }

    fn lookup(&mut self, salt: u64, tokens: &[u32]) -> Vec<PageId> {
        let most = tokens.len().saturating_sub(1) / PAGE_TOKENS;
        let keys: Vec<_> = self.prefixes(salt, tokens).take(most).collect();
        let pages: Vec<_> = keys.iter().map_while(|key| self.known.get(key).copied()).collect();
        for page in &pages {
            *self.holders.entry(*page).or_default() += 1;
            self.idle_since.remove(page);
        }
        pages
    }

    fn release(&mut self, page: PageId) {
        self.clock += 1;
        let holders = self.holders.get_mut(&page).expect("held");
        *holders -= 1;
        if *holders == 0 && self.known.values().any(|&known| known == page) {
            self.idle_since.insert(page, self.clock);
        }
    }

    fn insert(&mut self, salt: u64, tokens: &[u32], pages: &[PageId]) {
        let keys: Vec<_> = self.prefixes(salt, tokens).collect();
        for (key, &page) in keys.into_iter().zip(pages) {
            if *self.known.entry(key).or_insert(page) != page {
                break;
            }
        }
    }

    fn donate(&mut self, salt: u64, tokens: &[u32], pages: &[PageId]) {
        let keys: Vec<_> = self.prefixes(salt, tokens).collect();
        let mut path = Vec::new();
        for (key, &page) in keys.into_iter().zip(pages) {
            // After a clear, a page can be shared by sequences of which one meets a newer copy of its prefix.
            let foreign = path.iter().zip(pages).any(|(known, own)| known != own);
            if foreign && !self.known.contains_key(&key) && self.holders[&page] > 1 {
                break;
            }
            path.push(*self.known.entry(key).or_insert(page));
        }
        for (i, &page) in pages.iter().enumerate().rev() {
            self.release(page);
            let known = path.get(i).filter(|&&known| known != page);
            if let Some(since) = known.and_then(|known| self.idle_since.get_mut(known)) {
                self.clock += 1;
                *since = self.clock;
            }
        }
    }

    fn evict(&mut self, want: usize) -> Vec<PageId> {
        let mut idle: Vec<_> = self.idle_since.iter().map(|(&page, &at)| (at, page)).collect();
        idle.sort_unstable();
        let gone: Vec<_> = idle.into_iter().take(want).map(|(_, page)| page).collect();
        for page in &gone {
            self.idle_since.remove(page);
            self.known.retain(|_, known| known != page);
        }
        gone
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// Looks a prompt up, allocates the rest (evicting if it must) and keeps running.
    Start {
        salt: u64,
        pages: Vec<u8>,
        tail: usize,
    },
    Insert(usize),
    Donate(usize),
    Abort(usize),
    Evict(usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let pages = prop::collection::vec(0_u8..3, 0..6);
    prop_oneof![
        6 => (0_u64..2, pages, 0_usize..PAGE_TOKENS).prop_map(|(salt, pages, tail)| Op::Start { salt, pages, tail }),
        3 => any::<usize>().prop_map(Op::Insert),
        3 => any::<usize>().prop_map(Op::Donate),
        2 => any::<usize>().prop_map(Op::Abort),
        2 => (0_usize..6).prop_map(Op::Evict),
        1 => Just(Op::Clear),
    ]
}

struct Running {
    salt: u64,
    tokens: Vec<u32>,
    pages: Vec<PageId>,
}

/// The real pool and index beside the model; every step compares their results.
struct Pair {
    pool: PagePool,
    index: PrefixIndex,
    model: Model,
    running: Vec<Running>,
}

impl Pair {
    fn evict(&mut self, want: usize) {
        let mut gone = Vec::new();
        assert_eq!(self.pool.idle(), self.model.idle_since.len());
        let freed = evict(&mut self.index, want, &mut self.pool, &mut gone);
        assert_eq!((freed, &gone), (gone.len(), &self.model.evict(want)));
    }

    fn start(&mut self, salt: u64, pages: &[u8], tail: usize) {
        let mut tokens: Vec<u32> = pages.iter().flat_map(|&kind| [u32::from(kind) << 20; PAGE_TOKENS]).collect();
        tokens.extend(std::iter::repeat_n(3, tail));
        let mut held = Vec::new();
        let found = self.index.lookup(PageKey::text(salt, &tokens), &mut self.pool, &mut held);
        assert_eq!(held, self.model.lookup(salt, &tokens));
        assert_eq!((found.pages, found.tokens), (held.len(), held.len() * PAGE_TOKENS));
        let need = tokens.len().div_ceil(PAGE_TOKENS) - held.len();
        if need > self.pool.available() {
            self.pool.release_all(&held);
            held.iter().rev().for_each(|&page| self.model.release(page));
            return;
        }
        self.evict(need.saturating_sub(self.pool.free()));
        for page in take(&mut self.pool, need) {
            self.model.holders.insert(page, 1);
            held.push(page);
        }
        self.running.push(Running { salt, tokens, pages: held });
    }

    fn step(&mut self, op: &Op) {
        let pick = |i: usize, running: &[Running]| (!running.is_empty()).then(|| i % running.len());
        match op {
            Op::Start { salt, pages, tail } => self.start(*salt, pages, *tail),
            Op::Insert(i) => {
                if let Some(one) = pick(*i, &self.running).map(|i| &self.running[i]) {
                    self.index.insert(PageKey::text(one.salt, &one.tokens), &one.pages, &mut self.pool);
                    self.model.insert(one.salt, &one.tokens, &one.pages);
                }
            }
            Op::Donate(i) => {
                if let Some(one) = pick(*i, &self.running).map(|i| self.running.remove(i)) {
                    self.index.donate(PageKey::text(one.salt, &one.tokens), &one.pages, &mut self.pool);
                    self.model.donate(one.salt, &one.tokens, &one.pages);
                }
            }
            Op::Abort(i) => {
                if let Some(one) = pick(*i, &self.running).map(|i| self.running.remove(i)) {
                    self.pool.release_all(&one.pages);
                    one.pages.iter().rev().for_each(|&page| self.model.release(page));
                }
            }
            Op::Evict(want) => self.evict(*want),
            Op::Clear => {
                self.index.clear(&mut self.pool);
                self.model.known.clear();
                self.model.idle_since.clear();
            }
        }
        assert_eq!((self.pool.check(), self.index.check(&self.pool)), (Ok(()), Ok(())));
        assert_eq!(self.index.stats().nodes, self.model.known.len());
        assert_eq!(self.pool.idle(), self.model.idle_since.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn the_index_behaves_like_a_map_of_prefixes(seed: u64, ops in prop::collection::vec(op(), 1..120)) {
        let pages = 24;
        let mut pair = Pair {
            pool: PagePool::new(pages).unwrap(),
            index: PrefixIndex::with_hash_seed(pages, seed).unwrap(),
            model: Model::default(),
            running: Vec::new(),
        };
        for op in &ops {
            pair.step(op);
        }
        // I4: when nothing runs, everything held is idle, and evicting it fills the pool.
        while !pair.running.is_empty() {
            pair.step(&Op::Abort(0));
        }
        prop_assert_eq!(pair.pool.available(), pages);
        pair.evict(pages);
        prop_assert_eq!(pair.pool.free(), pages);
    }
}

/// A million operations: nothing grows, and at the end every page is back.
#[test]
fn a_million_operations_leave_nothing_behind() {
    const PAGES: usize = 512;
    let (mut pool, mut index) = built(PAGES);
    let (bytes, mut dice) = (pool.bytes() + index.stats().bytes, Dice(0x5eed));
    let mut running: Vec<Running> = Vec::new();
    let mut starved = 0;
    for step in 0..1_000_000 {
        match dice.below(8) {
            0..4 => {
                let (kinds, turns) = (2 + dice.below(3), 1 + dice.below(12));
                let page = |dice: &mut Dice| [dice.below(kinds) as u32; PAGE_TOKENS];
                let tokens: Vec<u32> = (0..turns).flat_map(|_| page(&mut dice)).chain([9]).collect();
                let (salt, mut pages) = (dice.below(3) as u64, Vec::new());
                index.lookup(PageKey::text(salt, &tokens), &mut pool, &mut pages);
                let need = tokens.len().div_ceil(PAGE_TOKENS) - pages.len();
                if need > pool.available() || running.len() >= 64 {
                    starved += 1;
                    pool.release_all(&pages);
                    continue;
                }
                evict(&mut index, need.saturating_sub(pool.free()), &mut pool, &mut Vec::new());
                pages.extend(take(&mut pool, need));
                running.push(Running { salt, tokens, pages });
            }
            kind if !running.is_empty() => {
                let i = dice.below(running.len());
                if kind == 4 {
                    index.insert(PageKey::text(running[i].salt, &running[i].tokens), &running[i].pages, &mut pool);
                    continue;
                }
                let one = running.swap_remove(i);
                match kind {
                    5 | 6 => drop(index.donate(PageKey::text(one.salt, &one.tokens), &one.pages, &mut pool)),
                    _ => drop(pool.release_all(&one.pages)),
                }
            }
            _ => drop(evict(&mut index, dice.below(8), &mut pool, &mut Vec::new())),
        }
        if step % 20_000 == 0 {
            assert_eq!((pool.check(), index.check(&pool)), (Ok(()), Ok(())));
        }
    }
    assert!(starved > 0 && index.stats().evicted_pages > 100_000, "the pool was under pressure");
    assert_eq!(pool.bytes() + index.stats().bytes, bytes);
    assert_eq!(bytes, PagePool::bytes_for(PAGES) + PrefixIndex::bytes_for(PAGES));
    for one in running {
        pool.release_all(&one.pages);
    }
    assert_eq!(pool.available(), PAGES);
    index.clear(&mut pool);
    assert_eq!((pool.free(), pool.check()), (PAGES, Ok(())));
}
