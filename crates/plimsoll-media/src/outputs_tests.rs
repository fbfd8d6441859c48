use std::thread;

use proptest::prelude::*;

use super::*;
use crate::Modality;

const WIDTH: usize = 3;
const PAGE_ROWS: usize = 4;

fn key(name: u64) -> ContentKey {
    ContentKey::of(Modality::Image, "test", &name.to_le_bytes())
}

fn vacant(claim: Claim) -> Vacant {
    let Claim::Vacant(vacant) = claim else { panic!("{claim:?} is not vacant") };
    vacant
}

fn filled(pool: &OutputPool, name: u64, rows: usize) -> Pinned {
    let mut place = vacant(pool.claim(&[(key(name), rows)]).unwrap().pop().unwrap());
    for row in 0..rows {
        place.row_mut(row).fill((name * 100 + row as u64) as f32);
    }
    place.fill()
}

fn holds(pinned: &Pinned, name: u64) {
    for row in 0..pinned.rows() {
        assert_eq!(pinned.row(row), [(name * 100 + row as u64) as f32; WIDTH]);
    }
}

#[test]
fn what_was_filled_is_found_and_the_oldest_unused_goes_first() {
    let pool = OutputPool::new(WIDTH, PAGE_ROWS, 4).unwrap();
    let bytes = pool.stats().bytes;
    assert_eq!(bytes, OutputPool::bytes_for(WIDTH, PAGE_ROWS, 5, 2));
    drop(filled(&pool, 1, 5));
    drop(filled(&pool, 2, 8));
    let Claim::Ready(one) = pool.claim(&[(key(1), 5)]).unwrap().pop().unwrap() else { panic!("1 is cached") };
    holds(&one, 1);
    drop(one);
    // `look` is no use of the entry.
    let (two, none) = (pool.look(&key(2)).unwrap(), pool.look(&key(9)));
    holds(&two, 2);
    assert_eq!((pool.stats().pages_idle, none.is_none()), (2, true));
    drop(two);
    drop(filled(&pool, 3, 1));
    assert!(matches!(pool.claim(&[(key(1), 5)]).unwrap()[0], Claim::Ready(_)), "used after 2, so 2 had to go");
    let stats = pool.stats();
    assert_eq!((stats.entries, stats.pages_free, stats.hits, stats.evictions, stats.bytes), (2, 1, 2, 1, bytes));
    pool.clear();
    assert_eq!((pool.stats().entries, pool.stats().pages_free), (0, 4));
}

#[test]
fn a_retired_pool_keeps_no_page_and_takes_nothing() {
    let pool = OutputPool::new(WIDTH, PAGE_ROWS, 4).unwrap();
    drop(filled(&pool, 1, 5));
    pool.retire();
    assert_eq!((pool.stats().entries, pool.stats().pages_free), (0, 0));
    assert!(matches!(pool.claim(&[(key(1), 5)]), Err(MediaError::OutputsBusy { .. })));
}

#[test]
fn t26_one_item_larger_than_the_pool_is_refused_at_once() {
    let pool = OutputPool::new(WIDTH, PAGE_ROWS, 4).unwrap();
    let error = pool.claim(&[(key(1), 17)]).unwrap_err();
    let words = "a request's media has 20 tokens of encoder output; the limit is 16 (--encoder-output-bytes)";
    assert_eq!(error.to_string(), words);
    assert!(error.is_the_clients());
    assert!(pool.claim(&[(key(1), 16)]).is_ok());
}

#[test]
fn t25_requests_with_two_items_in_a_pool_for_one_and_a_half_all_finish() {
    // All or nothing: a request gets room for all of its items at once, so one request can always finish.
    let pool = OutputPool::new(WIDTH, PAGE_ROWS, 3).unwrap();
    thread::scope(|scope| {
        for client in 0..6_u64 {
            let pool = &pool;
            scope.spawn(move || {
                let items = [(key(client * 2), 8), (key(client * 2 + 1), 4)];
                let claims = loop {
                    match pool.claim(&items) {
                        Ok(claims) => break claims,
                        Err(MediaError::OutputsBusy { total: 3, .. }) => thread::yield_now(),
                        Err(other) => panic!("{other}"),
                    }
                };
                for claim in claims {
                    thread::yield_now();
                    drop(vacant(claim).fill());
                }
            });
        }
    });
    assert_eq!(pool.stats().pages_free + pool.lock().cached.values().map(|c| c.entry.pages.len()).sum::<usize>(), 3);
}

#[test]
fn a_pool_that_the_system_refuses_names_its_flag() {
    let words = OutputPool::new(1 << 20, 1 << 22, 4).unwrap_err().to_string();
    assert_eq!(words, "the system refused 70368744177664 bytes for encoder outputs; reduce --encoder-output-bytes");
}

#[test]
fn a_replaced_entry_is_not_counted_as_its_successor() {
    let pool = OutputPool::new(WIDTH, PAGE_ROWS, 4).unwrap();
    let twice: Vec<Vacant> = (0..2).map(|_| vacant(pool.claim(&[(key(1), 4)]).unwrap().pop().unwrap())).collect();
    let [first, second] = twice.try_into().unwrap();
    let older = first.fill();
    let Claim::Ready(again) = pool.claim(&[(key(1), 4)]).unwrap().pop().unwrap() else { panic!("it is there") };
    drop(second.fill());
    assert_eq!(pool.stats().pages_idle, 1, "the newer one");
    drop(older);
    assert_eq!(pool.stats().pages_idle, 1, "another still holds the older one");
    drop(again);
    assert_eq!((pool.stats().pages_idle, pool.stats().pages_free), (1, 3));
}

#[test]
fn a_failed_claim_drops_nothing() {
    let pool = OutputPool::new(WIDTH, PAGE_ROWS, 4).unwrap();
    drop(filled(&pool, 1, 4));
    let pinned = filled(&pool, 2, 8);
    let error = pool.claim(&[(key(3), 12)]).unwrap_err();
    assert_eq!(error, MediaError::OutputsBusy { asked: 3, free: 2, total: 4 });
    assert!(!error.is_the_clients());
    assert_eq!(pool.stats().entries, 2);
    holds(&pinned, 2);
}

#[test]
fn dropped_unfilled_place_is_free_and_never_found() {
    let pool = OutputPool::new(WIDTH, PAGE_ROWS, 2).unwrap();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _place = pool.claim(&[(key(1), 8)]).unwrap();
        std::panic::resume_unwind(Box::new("an encoder's panic"));
    }));
    assert!(unwound.is_err());
    assert_eq!((pool.stats().pages_free, pool.stats().entries), (2, 0));
}

#[test]
fn two_requests_that_encode_the_same_content_share_it_or_keep_their_own() {
    let pool = OutputPool::new(WIDTH, PAGE_ROWS, 4).unwrap();
    let mut first = vacant(pool.claim(&[(key(1), 4)]).unwrap().pop().unwrap());
    let second = vacant(pool.claim(&[(key(1), 4)]).unwrap().pop().unwrap());
    let second = second.filled_meanwhile().unwrap_err();
    first.row_mut(3).fill(0.5);
    let first = first.fill();
    let shared = second.filled_meanwhile().unwrap();
    assert_eq!(pool.stats().pages_free, 3);
    assert_eq!(first.row(0).as_ptr(), shared.row(0).as_ptr());
    // A second fill under the key replaces the first, but its users keep it.
    let own = vacant(pool.claim(&[(key(9), 4)]).unwrap().pop().unwrap());
    drop((first, own));
    assert_eq!(shared.row(3), [0.5; WIDTH]);
    pool.clear();
    assert_eq!(pool.stats().pages_free, 3);
    drop(shared);
    assert_eq!(pool.stats().pages_free, 4);
}

proptest! {
    #[test]
    fn pages_are_conserved_and_content_is_never_mixed_up(actions in prop::collection::vec((0_u64..12, 0_usize..20, any::<bool>(), 0_u8..8), 1..120)) {
        let pool = OutputPool::new(WIDTH, PAGE_ROWS, 10).unwrap();
        let mut held: Vec<(u64, Pinned)> = Vec::new();
        for (name, rows, keep, action) in actions {
            let rows = rows.min(1 + name as usize);
            match (action, pool.claim(&[(key(name), rows)])) {
                (0, claims) => drop(claims),
                (1, claims) => { drop(claims); pool.clear(); }
                (2, claims) => { drop(claims); held.clear(); }
                (_, Err(error)) => prop_assert!(matches!(error, MediaError::OutputsBusy { .. }), "{}", error),
                (_, Ok(mut claims)) => {
                    let pinned = match claims.pop().unwrap() {
                        Claim::Ready(pinned) => pinned,
                        Claim::Vacant(mut place) => {
                            for row in 0..rows {
                                place.row_mut(row).fill((name * 100 + row as u64) as f32);
                            }
                            place.fill()
                        }
                    };
                    holds(&pinned, name);
                    if keep {
                        held.push((name, pinned));
                    }
                }
            }
            for (name, pinned) in &held {
                holds(pinned, *name);
            }
            let idle = |pool: &OutputPool| -> usize {
                let state = pool.lock();
                state.cached.values().filter(|cached| cached.is_idle()).map(|cached| cached.entry.pages.len()).sum()
            };
            prop_assert_eq!(pool.stats().pages_idle, idle(&pool), "counted as they come and go");
        }
        drop(held);
        pool.clear();
        prop_assert_eq!(pool.stats().pages_free, 10);
    }
}
