//! The pool and the index against naive models, and against long random lives.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// A small generator for tests that need many choices (xorshift, never zero).
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }
}

fn built(pages: usize) -> (PagePool, PrefixIndex) {
    (PagePool::new(pages).unwrap(), PrefixIndex::new(pages).unwrap())
}

fn take(pool: &mut PagePool, n: usize) -> Vec<PageId> {
    (0..n).map(|_| pool.alloc().expect("a free page")).collect()
}

/// `pages` whole pages of tokens that differ from page to page.
fn prompt(first: u32, pages: usize) -> Vec<u32> {
    (0..pages * PAGE_TOKENS).map(|i| first * 100_000 + i as u32).collect()
}

/// Frees up to `want` idle pages, and says which and how many.
fn evict(index: &mut PrefixIndex, want: usize, pool: &mut PagePool, gone: &mut Vec<PageId>) -> usize {
    let before = gone.len();
    while gone.len() - before < want {
        let Some((page, _)) = index.evict_one(pool) else { break };
        gone.push(page);
    }
    gone.len() - before
}

#[test]
fn pages_come_back_and_counts_add_up() {
    let mut pool = PagePool::new(3).unwrap();
    let held = take(&mut pool, 3);
    assert_eq!(held, [PageId(0), PageId(1), PageId(2)]);
    assert_eq!(pool.alloc(), None);
    pool.retain(held[1]);
    assert!(!pool.release(held[1]), "one holder is left");
    assert!(pool.release(held[1]));
    assert_eq!((pool.free(), pool.used(), pool.total(), pool.idle()), (1, 2, 3, 0));
    assert_eq!(pool.alloc(), Some(held[1]));
    assert_eq!(pool.release_all(&held), 3);
    assert_eq!(pool.check(), Ok(()));
    assert_eq!((pool.free(), pool.peak()), (pool.total(), 3));
}

#[test]
fn sizes_no_table_can_have_are_errors() {
    let limit = PagePool::PAGES_MAX;
    assert_eq!(PagePool::new(limit + 1).unwrap_err(), PoolError::TooManyPages { total: limit + 1, limit });
    let error = PrefixIndex::new(limit + 1).unwrap_err();
    assert_eq!(error, IndexError::TooManyPages { pages: limit + 1, limit });
    let (mut pool, mut index) = built(0);
    assert_eq!(pool.alloc(), None);
    assert_eq!(evict(&mut index, 1, &mut pool, &mut Vec::new()), 0);
    assert_eq!(index.check(&pool), Ok(()));
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "not a holder"))]
fn double_release_is_counted() {
    let mut pool = PagePool::new(2).unwrap();
    let page = pool.alloc().unwrap();
    pool.release(page);
    assert!(!pool.release(page));
    assert_eq!((pool.free(), pool.faults()), (2, 1));
    assert_eq!(pool.check(), Err(PoolError::Faults { faults: 1 }));
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "foreign page"))]
fn foreign_page_is_counted() {
    let mut pool = PagePool::new(2).unwrap();
    pool.retain(PageId(2));
    assert_eq!(pool.faults(), 1);
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "not a holder"))]
fn the_index_claim_cannot_be_released_from_outside() {
    let (mut pool, mut index) = built(2);
    let tokens = prompt(1, 1);
    let pages = take(&mut pool, 1);
    index.donate(PageKey::text(0, &tokens), &pages, &mut pool);
    assert!(!pool.release(pages[0]));
    assert_eq!((pool.idle(), pool.faults()), (1, 1));
    assert_eq!(index.check(&pool), Ok(()));
}

#[test]
fn a_prompt_is_never_matched_whole() {
    let (mut pool, mut index) = built(8);
    let (tokens, mut found) = (prompt(1, 3), Vec::new());
    let pages = take(&mut pool, 3);
    assert_eq!(index.donate(PageKey::text(7, &tokens), &pages, &mut pool), 3);
    assert_eq!(index.peek(PageKey::text(7, &tokens)), 2 * PAGE_TOKENS);
    assert_eq!(index.peek(PageKey::text(7, &tokens[..2 * PAGE_TOKENS])), PAGE_TOKENS);
    assert_eq!(index.peek(PageKey::text(7, &tokens[..PAGE_TOKENS])), 0);
    assert_eq!(index.peek(PageKey::text(7, &[])), 0);
    let longer = [tokens.clone(), vec![1]].concat();
    let hit = index.lookup(PageKey::text(7, &longer), &mut pool, &mut found);
    assert_eq!((hit, found.as_slice()), (Match { pages: 3, tokens: 48, known: 48 }, pages.as_slice()));
    assert_eq!(pool.idle(), 0, "a match is held");
    pool.release_all(&found);
    assert_eq!(index.stats().nodes, 3);
}

#[test]
fn salts_and_large_ids_keep_prompts_apart() {
    let (mut pool, mut index) = built(8);
    let mut tokens = vec![5_u32; PAGE_TOKENS + 1];
    let pages = take(&mut pool, 1);
    index.donate(PageKey::text(1, &tokens), &pages, &mut pool);
    assert_eq!(index.peek(PageKey::text(1, &tokens)), PAGE_TOKENS);
    assert_eq!(index.peek(PageKey::text(2, &tokens)), 0, "another salt");
    for bit in [8, 16, 24, 31] {
        tokens[3] = 5 | 1 << bit;
        assert_eq!(index.peek(PageKey::text(1, &tokens)), 0, "differs in bit {bit}");
    }
}

/// Hashes have 32 bits: among this many prompts several pairs share one, and must stay apart all the same.
#[test]
fn equal_hashes_do_not_make_equal_prompts() {
    const PROMPTS: u32 = 300_000;
    for by_salt in [true, false] {
        let (mut pool, _) = built(PROMPTS as usize);
        let mut index = PrefixIndex::with_hash_seed(PROMPTS as usize, 1).unwrap();
        for i in 0..PROMPTS {
            let (salt, token) = if by_salt { (u64::from(i), 0) } else { (0, i) };
            let page = take(&mut pool, 1);
            let added = index.donate(PageKey::text(salt, &[token; PAGE_TOKENS]), &page, &mut pool);
            assert_eq!(added, 1, "prompt {i} was taken for another one");
        }
        assert_eq!(index.check(&pool), Ok(()));
    }
}

#[test]
fn the_same_page_of_tokens_after_another_prefix_is_another_node() {
    let (mut pool, mut index) = built(8);
    let page = [9_u32; PAGE_TOKENS];
    let twice = [page, page].concat();
    let pages = take(&mut pool, 2);
    assert_eq!(index.donate(PageKey::text(0, &twice), &pages, &mut pool), 2);
    let mut found = Vec::new();
    index.lookup(PageKey::text(0, &[page, page, page].concat()), &mut pool, &mut found);
    assert_eq!(found, pages);
    pool.release_all(&found);
}

#[test]
fn a_known_prefix_keeps_its_page() {
    let (mut pool, mut index) = built(8);
    let tokens = prompt(1, 3);
    let (first, second) = (take(&mut pool, 2), take(&mut pool, 3));
    assert_eq!(index.insert(PageKey::text(0, &tokens[..2 * PAGE_TOKENS]), &first, &mut pool), 2);
    assert_eq!(index.insert(PageKey::text(0, &tokens), &second, &mut pool), 0, "not while it runs on its own pages");
    assert_eq!(index.donate(PageKey::text(0, &tokens), &second, &mut pool), 1);
    let mut found = Vec::new();
    index.lookup(PageKey::text(0, &[tokens, vec![0]].concat()), &mut pool, &mut found);
    assert_eq!(found, [first[0], first[1], second[2]]);
    pool.release_all(&found);
    pool.release_all(&first);
    assert_eq!((pool.idle(), pool.used()), (3, 3), "the second sequence's copies became free");
    assert_eq!(evict(&mut index, 9, &mut pool, &mut Vec::new()), 3);
    assert_eq!(pool.free(), 8);
}

#[test]
fn a_fork_cannot_pin_what_it_does_not_hold() {
    let (mut pool, mut index) = built(8);
    let tokens = prompt(1, 3);
    let known = take(&mut pool, 1);
    index.donate(PageKey::text(0, &tokens[..PAGE_TOKENS]), &known, &mut pool);
    let own = take(&mut pool, 3);
    for &page in &own {
        pool.retain(page);
    }
    assert_eq!(
        index.donate(PageKey::text(0, &tokens), &own, &mut pool),
        0,
        "the fork goes on without page 0 of the tree"
    );
    assert_eq!(pool.idle(), 1);
    assert_eq!(index.donate(PageKey::text(0, &tokens), &own, &mut pool), 2);
    assert_eq!((pool.idle(), pool.used()), (3, 3));
    assert_eq!(evict(&mut index, 3, &mut pool, &mut Vec::new()), 3);
}

#[test]
fn eviction_takes_the_coldest_leaf_and_spares_the_held() {
    let (mut pool, mut index) = built(8);
    let (a, b) = (prompt(1, 3), prompt(2, 2));
    let (pages_a, pages_b) = (take(&mut pool, 3), take(&mut pool, 2));
    index.donate(PageKey::text(0, &a), &pages_a, &mut pool);
    index.donate(PageKey::text(0, &b), &pages_b, &mut pool);
    let mut found = Vec::new();
    // Holds the first page of a, warms nothing else.
    index.lookup(PageKey::text(0, &a[..PAGE_TOKENS + 1]), &mut pool, &mut found);
    let mut gone = Vec::new();
    assert_eq!(evict(&mut index, 3, &mut pool, &mut gone), 3);
    assert_eq!(gone, [pages_a[2], pages_a[1], pages_b[1]]);
    assert_eq!(evict(&mut index, 9, &mut pool, &mut Vec::new()), 1, "the held page stays");
    assert_eq!(index.peek(PageKey::text(0, &a)), PAGE_TOKENS);
    pool.release_all(&found);
    assert_eq!(evict(&mut index, 9, &mut pool, &mut Vec::new()), 1);
    assert_eq!((pool.free(), index.stats().nodes, index.stats().evicted_pages), (8, 0, 5));
}

#[test]
fn letting_go_in_the_wrong_order_costs_time_but_no_page() {
    let (mut pool, mut index) = built(4);
    let tokens = prompt(1, 4);
    let pages = take(&mut pool, 4);
    index.insert(PageKey::text(0, &tokens), &pages, &mut pool);
    for &page in &pages {
        pool.release(page);
    }
    assert_eq!((1..=8).map(|_| evict(&mut index, 1, &mut pool, &mut Vec::new())).sum::<usize>(), 4);
    assert_eq!((index.check(&pool), pool.check(), pool.free()), (Ok(()), Ok(()), 4));
}

#[test]
fn clear_leaves_running_sequences_their_pages() {
    let (mut pool, mut index) = built(6);
    let tokens = prompt(1, 3);
    let pages = take(&mut pool, 3);
    index.insert(PageKey::text(0, &tokens), &pages, &mut pool);
    index.clear(&mut pool);
    assert_eq!((index.stats().nodes, pool.used(), index.peek(PageKey::text(0, &tokens))), (0, 3, 0));
    assert_eq!((index.check(&pool), pool.check()), (Ok(()), Ok(())));
    assert_eq!(index.donate(PageKey::text(0, &tokens), &pages, &mut pool), 3, "and they can be cached again");
    index.clear(&mut pool);
    assert_eq!(pool.free(), 6);
}

/// What the index should do, kept the slow way: whole prefixes as keys, a clock reading a page.
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

/// The real pool and index beside the model; every step compares what both answer.
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

/// Two hold the same pages when the tree forgets them; others make its beginning anew, and one of the two lets what it has be found. The
/// other does not hold the new beginning.
#[test]
fn what_is_adopted_under_others_pages_never_keeps_these_from_being_evicted() {
    let (mut pool, mut index) = built(8);
    let (tokens, key) = (prompt(1, 3), |tokens| PageKey::text(0, tokens));
    let lasting = take(&mut pool, 3);
    let mut leaving = lasting.clone();
    leaving.iter().for_each(|page| pool.retain(*page));
    let anew = take(&mut pool, 2);
    index.insert(key(&tokens[..2 * PAGE_TOKENS]), &anew, &mut pool);
    assert_eq!(index.adopt(key(&tokens), &mut leaving, &mut pool), 2);
    // Once more, when it holds the known pages itself.
    assert_eq!(index.adopt(key(&tokens), &mut leaving, &mut pool), 2);
    assert_eq!(leaving, [anew[0], anew[1], lasting[2]]);
    pool.release_all(&leaving);
    pool.release_all(&anew);
    assert_eq!((pool.idle(), index.check(&pool)), (2, Ok(())));
    assert_eq!(evict(&mut index, 8, &mut pool, &mut Vec::new()), 2, "every idle page can be evicted");
    // Alone, what it has is found.
    pool.release_all(&lasting[..2]);
    let (mut again, last) = (take(&mut pool, 2), lasting[2]);
    again.push(last);
    assert_eq!(index.adopt(key(&tokens), &mut again, &mut pool), 3);
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
