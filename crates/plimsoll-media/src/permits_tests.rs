use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread;

use proptest::prelude::*;

use super::*;

/// The state of a client in the model below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Client {
    Idle,
    Waiting(u64),
    Holding(usize, u64),
    Done,
}

/// A book with four clients. Each takes a first permit, grows once or not, and returns its permits or stops waiting.
#[derive(Clone)]
struct Model {
    book: Book,
    clients: [Client; 4],
}

const LIMITS: (usize, u64) = (2, 10);
const SIZES: [(u64, u64); 4] = [(10, 1), (4, 6), (6, 4), (1, 1)];

impl Model {
    fn key(&self) -> (Vec<u64>, [Client; 4], usize, u64) {
        // Tickets are numbered from the first in line, so that equal situations are equal states.
        let rank = |ticket| self.book.waiting.iter().position(|&t| t == ticket).map_or(u64::MAX, |at| at as u64);
        let clients = self.clients.map(|client| match client {
            Client::Waiting(ticket) => Client::Waiting(rank(ticket)),
            other => other,
        });
        let waiting = (0..self.book.waiting.len() as u64).collect();
        (waiting, clients, self.book.used.count, self.book.used.bytes)
    }

    /// Returns every state that one action of one client leads to.
    fn next(&self) -> Vec<Model> {
        let mut states = Vec::new();
        for (who, &(first, more)) in SIZES.iter().enumerate() {
            let mut add = |change: &dyn Fn(&mut Model) -> bool| {
                let mut model = self.clone();
                if change(&mut model) {
                    states.push(model);
                }
            };
            match self.clients[who] {
                Client::Idle => add(&|m| {
                    m.clients[who] = Client::Waiting(m.book.queue());
                    true
                }),
                Client::Waiting(ticket) => {
                    add(&|m| {
                        let served = m.book.poll(ticket, first, LIMITS);
                        m.clients[who] = if served { Client::Holding(1, first) } else { m.clients[who] };
                        served
                    });
                    add(&|m| {
                        m.book.leave(ticket);
                        m.clients[who] = Client::Done;
                        true
                    });
                }
                Client::Holding(count, bytes) => {
                    add(&|m| {
                        let grown = count == 1 && m.book.try_grow(more, LIMITS);
                        m.clients[who] = if grown { Client::Holding(2, bytes + more) } else { m.clients[who] };
                        grown
                    });
                    add(&|m| {
                        m.book.give_back(count, bytes);
                        m.clients[who] = Client::Done;
                        true
                    });
                }
                Client::Done => {}
            }
        }
        states
    }
}

#[test]
fn a28_every_reachable_state_is_inside_the_limits_and_can_finish() {
    let start = Model { book: Book::default(), clients: [Client::Idle; 4] };
    let mut seen = HashSet::from([start.key()]);
    let mut open = vec![start];
    let mut finished = 0;
    while let Some(model) = open.pop() {
        let used = model.book.used;
        assert!(used.count <= LIMITS.0 && used.bytes <= LIMITS.1, "{used:?}");
        let held = model.clients.iter().map(|c| if let Client::Holding(n, b) = c { (*n, *b) } else { (0, 0) });
        let held = held.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert_eq!(held, (used.count, used.bytes));
        if model.clients == [Client::Done; 4] {
            assert_eq!((used.count, used.bytes, model.book.waiting.len()), (0, 0, 0));
            finished += 1;
        } else if model.clients.iter().all(|c| matches!(c, Client::Waiting(_) | Client::Done)) {
            // No client holds a permit: the first in line must be served, or it waits for ever.
            let front = model.book.waiting[0];
            let who = model.clients.iter().position(|&c| c == Client::Waiting(front)).unwrap();
            assert!(model.clone().book.poll(front, SIZES[who].0, LIMITS));
        }
        open.extend(model.next().into_iter().filter(|next| seen.insert(next.key())));
    }
    assert!(finished >= 1 && seen.len() > 100, "{} states, {finished} ends", seen.len());
}

#[test]
fn growth_does_not_pass_a_waiting_request() {
    let mut book = Book::default();
    let first = book.queue();
    assert!(book.poll(first, 6, LIMITS));
    let large = book.queue();
    assert!(!book.poll(large, 10, LIMITS), "does not fit beside the first");
    assert!(!book.try_grow(1, LIMITS), "would starve the one who waits");
    let small = book.queue();
    assert!(!book.poll(small, 1, LIMITS), "is not first in line");
    book.give_back(1, 6);
    assert!(book.poll(large, 10, LIMITS));
}

#[test]
fn t26_what_never_fits_is_refused_at_once_with_limit_and_flag() {
    let permits = Permits::new(2, 100);
    let words = permits.first(101, None).unwrap_err().to_string();
    assert_eq!(words, "an item has 101 bytes of encoder workspace; the limit is 100 (--visual-infer-batch-size)");
    assert!(permits.first(100, None).unwrap().is_some());
}

#[test]
fn a_deadline_ends_a_wait_and_leaves_no_trace() {
    let permits = Permits::new(1, 100);
    let held = permits.first(10, None).unwrap();
    assert!(permits.first(10, Some(Instant::now() + Duration::from_millis(20))).unwrap().is_none());
    drop(held);
    let mut grant = permits.first(10, None).unwrap().unwrap();
    assert!(!grant.try_grow(1), "the count is used up");
    assert_eq!(grant.held(), (1, 10));
}

#[test]
fn closing_ends_every_wait() {
    let permits = Permits::new(1, 100);
    let held = permits.first(100, None).unwrap();
    let waiters: Vec<_> = (0..4)
        .map(|_| {
            let permits = Arc::clone(&permits);
            thread::spawn(move || permits.first(1, None).unwrap_err())
        })
        .collect();
    while permits.lock().waiting.len() < 4 {
        thread::yield_now();
    }
    permits.close();
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), MediaError::Closed);
    }
    drop(held);
    let used = permits.in_use();
    assert_eq!((used.count, used.bytes), (0, 0));
}

#[test]
fn a28_threads_that_grow_panic_and_give_up_never_pass_the_limits() {
    const LIMIT: u64 = 1000;
    let permits = Permits::new(5, LIMIT);
    let (bytes, count) = (AtomicU64::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for seed in 0..8_u64 {
            let (permits, bytes, count) = (&permits, &bytes, &count);
            scope.spawn(move || {
                let mut random = seed * 2 + 1;
                for _ in 0..400 {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let size = (random >> 33) % LIMIT + 1;
                    let deadline = size.is_multiple_of(3).then(|| Instant::now() + Duration::from_micros(50));
                    let Some(mut grant) = permits.first(size, deadline).unwrap() else { continue };
                    while grant.held().0 < 4 && grant.try_grow(size / 3) {}
                    let (items, total) = grant.held();
                    assert!(bytes.fetch_add(total, SeqCst) + total <= LIMIT);
                    assert!(count.fetch_add(items, SeqCst) + items <= 5);
                    thread::yield_now();
                    bytes.fetch_sub(total, SeqCst);
                    count.fetch_sub(items, SeqCst);
                    if size.is_multiple_of(5) {
                        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                            let _grant = grant;
                            std::panic::resume_unwind(Box::new("a decoder's panic"));
                        }));
                        assert!(unwound.is_err());
                    }
                }
            });
        }
    });
    let used = permits.in_use();
    assert_eq!((used.count, used.bytes), (0, 0));
    assert!(used.bytes_peak <= LIMIT && used.count_peak <= 5);
}

proptest! {
    #[test]
    fn grants_add_up_and_come_back(sizes in prop::collection::vec(0_u64..120, 1..40), drops in prop::collection::vec(any::<prop::sample::Index>(), 40)) {
        let permits = Permits::new(4, 100);
        let mut held: Vec<Grant> = Vec::new();
        let now = Instant::now();
        for (size, at) in sizes.iter().zip(&drops) {
            match permits.first(*size, Some(now)) {
                Ok(Some(grant)) => held.push(grant),
                Ok(None) => {
                    let in_use = permits.in_use();
                    prop_assert!(in_use.count == 4 || in_use.bytes + size > 100);
                    let at = at.index(held.len());
                    held.swap_remove(at);
                }
                Err(_) => prop_assert!(*size > 100),
            }
            let sum: u64 = held.iter().map(|grant| grant.held().1).sum();
            prop_assert_eq!(permits.in_use().bytes, sum);
            prop_assert!(sum <= 100 && held.len() <= 4);
        }
        drop(held);
        prop_assert_eq!((permits.in_use().count, permits.in_use().bytes), (0, 0));
    }
}
