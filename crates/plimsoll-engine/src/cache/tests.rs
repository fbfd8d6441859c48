//! The pool and the index against naive models, and in long random runs.

mod model;

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

/// Evicts up to `want` idle pages into `gone`, and returns how many.
fn evict(index: &mut PrefixIndex, want: usize, pool: &mut PagePool, gone: &mut Vec<PageId>) -> usize {
    let before = gone.len();
    while gone.len() - before < want {
        let Some((page, _)) = index.evict_one(pool, true) else { break };
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
#[cfg_attr(debug_assertions, should_panic(expected = "does not hold it"))]
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
#[cfg_attr(debug_assertions, should_panic(expected = "does not hold it"))]
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

/// Hashes have 32 bits: among this many prompts several pairs share one, and must stay distinct all the same.
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
    // Holds the first page of a, and warms nothing else.
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

/// Two sequences hold the same pages when the tree drops them. Another sequence computes the beginning again, and one of the two
/// adopts. The other does not hold the new beginning.
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
    // Once more, while it holds the tree's pages itself.
    assert_eq!(index.adopt(key(&tokens), &mut leaving, &mut pool), 2);
    assert_eq!(leaving, [anew[0], anew[1], lasting[2]]);
    pool.release_all(&leaving);
    pool.release_all(&anew);
    assert_eq!((pool.idle(), index.check(&pool)), (2, Ok(())));
    assert_eq!(evict(&mut index, 8, &mut pool, &mut Vec::new()), 2, "every idle page can be evicted");
    // As the only holder, it can add its page to the tree.
    pool.release_all(&lasting[..2]);
    let (mut again, last) = (take(&mut pool, 2), lasting[2]);
    again.push(last);
    assert_eq!(index.adopt(key(&tokens), &mut again, &mut pool), 3);
}

#[test]
fn pinned_pages_leave_last_until_their_minute_comes() {
    let (mut pool, mut index) = built(16);
    let donate = |index: &mut PrefixIndex, pool: &mut PagePool, first: u32| {
        let pages = take(pool, 3);
        index.donate(PageKey::text(0, &prompt(first, 3)), &pages, pool);
        pages
    };
    let pages: Vec<Vec<PageId>> = (1..=5).map(|first| donate(&mut index, &mut pool, first)).collect();
    let refused = index.pin(PageKey::text(0, &prompt(1, 2)), 5, 4);
    assert_eq!((refused, index.pinned()), (0, 2));
    // Two pages of the second prompt fit, and none of the third. A longer time for pinned pages is always possible.
    assert_eq!(index.pin(PageKey::text(0, &prompt(3, 3)), 5, 4), 1);
    assert_eq!(index.pin(PageKey::text(0, &prompt(4, 3)), 5, 4), 3);
    assert_eq!(index.pin(PageKey::text(0, &prompt(1, 2)), 60, 4), 0);
    assert_eq!((index.pinned(), index.stats().pinned), (4, 4));
    let mut gone = Vec::new();
    assert_eq!(evict(&mut index, 11, &mut pool, &mut gone), 11);
    let kept = [pages[0][0], pages[0][1], pages[2][0], pages[2][1]];
    assert!(kept.iter().all(|page| !gone.contains(page)), "{gone:?}");
    index.check(&pool).unwrap();
    index.advance(6);
    assert_eq!(index.pinned(), 2, "five minutes have passed");
    assert_eq!(evict(&mut index, 2, &mut pool, &mut gone), 2);
    assert_eq!(gone[11..], [pages[2][1], pages[2][0]]);
    // No unpinned page is left: pinned pages are evicted too, the end of a prefix first.
    assert_eq!(evict(&mut index, 5, &mut pool, &mut gone), 2);
    assert_eq!((gone[13..].to_vec(), index.pinned(), pool.free()), (vec![pages[0][1], pages[0][0]], 0, 16));
}
