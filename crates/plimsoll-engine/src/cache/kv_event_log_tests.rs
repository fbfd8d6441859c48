//! Readers of every pace, and what a lookup would find.

use std::collections::HashMap;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Waker};

use proptest::prelude::*;

use super::*;
use crate::cache::{PageKey, PagePool, PrefixIndex};

/// The content of the tree as one reader has received it.
#[derive(Default)]
struct Told {
    cursor: KvCursor,
    /// Tokens and parents by name.
    pages: HashMap<u64, (Option<u64>, [u32; PAGE_TOKENS])>,
    resets: usize,
    last: u64,
}

impl Told {
    fn read(&mut self, kv_event_log: &KvEventLog, most: usize) -> usize {
        let mut events = Vec::new();
        kv_event_log.read(&mut self.cursor, most, &mut events);
        for event in &events {
            match *event {
                KvEvent::Reset => {
                    self.pages.clear();
                    (self.resets, self.last) = (self.resets + 1, 0);
                }
                KvEvent::Stored { seq, hash, parent, tokens } => {
                    assert!(seq > self.last, "changes are told in order");
                    assert!(parent.is_none_or(|parent| self.pages.contains_key(&parent)), "parents come first");
                    assert!(self.pages.insert(hash, (parent, tokens)).is_none(), "told once");
                    self.last = seq;
                }
                KvEvent::Removed { seq, hash } => {
                    assert!(seq > self.last, "changes are told in order");
                    self.pages.remove(&hash);
                    self.last = seq;
                }
            }
        }
        events.len()
    }

    fn read_all(&mut self, kv_event_log: &KvEventLog) {
        while self.read(kv_event_log, 7) > 0 {}
    }
}

struct World {
    pool: PagePool,
    index: PrefixIndex,
}

impl World {
    fn new(pages: usize) -> Self {
        let index = PrefixIndex::new(pages).unwrap().with_event_log(KvEventLog::new(pages).unwrap());
        Self { pool: PagePool::new(pages).unwrap(), index }
    }

    fn kv_event_log(&self) -> &KvEventLog {
        self.index.kv_event_log().unwrap()
    }

    /// Runs a sequence: looks its prompt up, computes the rest, and donates the pages.
    fn visit(&mut self, salt: u64, prompt: &[u32]) {
        let mut pages = Vec::new();
        self.index.lookup(PageKey::text(salt, prompt), &mut self.pool, &mut pages);
        while pages.len() * PAGE_TOKENS < prompt.len() {
            if self.pool.free() == 0 && self.index.evict_one(&mut self.pool, true).is_none() {
                break;
            }
            pages.push(self.pool.alloc().unwrap());
        }
        let known = prompt.len().min(pages.len() * PAGE_TOKENS);
        self.index.donate(PageKey::text(salt, &prompt[..known]), &pages, &mut self.pool);
    }

    /// Checks that a reader of all events has the pages of unsalted prompts that a lookup would find.
    fn agrees(&self, told: &Told) {
        assert_eq!(told.pages.len(), self.kv_event_log().stats().pages);
        for (hash, (parent, tokens)) in &told.pages {
            assert_eq!(*hash, name(parent.unwrap_or(0), tokens));
            let mut prompt = tokens.to_vec();
            let mut above = *parent;
            while let Some(hash) = above {
                let (parent, tokens) = told.pages[&hash];
                prompt.splice(0..0, tokens);
                above = parent;
            }
            // One token is always left to compute.
            prompt.push(0);
            assert_eq!(self.index.peek(PageKey::text(0, &prompt)), prompt.len() - 1);
        }
    }
}

fn prompt(kind: u32, pages: usize) -> Vec<u32> {
    // Prompts of one kind share their first page; prompts of different kinds share none.
    (0..pages as u32 * 16).map(|i| if i < 16 { kind % 3 } else { kind * 1000 + i }).collect()
}

#[test]
fn a_page_has_one_name_on_every_server() {
    let tokens: [u32; PAGE_TOKENS] = std::array::from_fn(|i| i as u32);
    assert_eq!(name(0, &tokens), 8_686_257_490_711_316_546);
    let mut other = tokens;
    other[15] ^= 1 << 31;
    assert_ne!(name(0, &tokens), name(0, &other));
    assert_ne!(name(1, &tokens), name(2, &tokens));
}

#[test]
fn a_new_reader_gets_what_there_is_and_then_what_changes() {
    let mut world = World::new(8);
    world.visit(0, &prompt(1, 3));
    let mut told = Told::default();
    told.read_all(world.kv_event_log());
    assert_eq!((told.pages.len(), told.resets), (3, 1));
    world.visit(0, &prompt(4, 3));
    assert_eq!(told.read(world.kv_event_log(), 100), 2, "the first page is shared");
    world.agrees(&told);
    // Eight pages, and three more: the coldest are evicted.
    world.visit(0, &prompt(2, 6));
    told.read_all(world.kv_event_log());
    assert_eq!(told.resets, 1);
    world.agrees(&told);
}

#[test]
fn salted_prompts_are_not_published() {
    let mut world = World::new(8);
    world.visit(7, &prompt(1, 4));
    assert_eq!(world.kv_event_log().stats().pages, 0);
    assert_eq!(world.index.stats().nodes, 4);
    world.visit(0, &prompt(1, 8));
    let mut told = Told::default();
    told.read_all(world.kv_event_log());
    world.agrees(&told);
}

#[test]
fn a_reader_that_missed_something_starts_over() {
    let mut world = World::new(4);
    let mut told = Told::default();
    told.read_all(world.kv_event_log());
    for kind in 0..10 {
        world.visit(0, &prompt(kind * 3, 4));
    }
    told.read_all(world.kv_event_log());
    assert_eq!(told.resets, 2, "departures were forgotten meanwhile");
    world.agrees(&told);
    world.index.clear(&mut world.pool);
    told.read_all(world.kv_event_log());
    assert_eq!((told.resets, told.pages.len()), (3, 0));
    assert_eq!(world.kv_event_log().stats().removals_max, 4);
    // A cursor of another run, and a cursor that missed a few changes.
    let mut stranger = Told { cursor: KvCursor::after(1 << 40), ..Told::default() };
    stranger.read_all(world.kv_event_log());
    assert_eq!(stranger.resets, 1);
    let mut back = Told { cursor: KvCursor::after(told.cursor.removed), ..Told::default() };
    world.visit(0, &prompt(1, 2));
    back.read_all(world.kv_event_log());
    assert_eq!((back.resets, back.pages.len()), (0, 2));
}

proptest! {
    #[test]
    fn readers_of_any_pace_know_what_the_tree_holds(
        visits in prop::collection::vec((0u32..12, 1usize..8, 0u64..2, 0usize..40, any::<bool>()), 1..120),
    ) {
        let mut world = World::new(10);
        let (mut told, mut slow) = (Told::default(), Told::default());
        for (kind, pages, salt, most, clear) in visits {
            world.visit(salt, &prompt(kind, pages));
            told.read(world.kv_event_log(), most);
            if most % 3 == 0 {
                slow.read(world.kv_event_log(), 2);
            }
            if clear && most == 0 {
                world.index.clear(&mut world.pool);
            }
            world.index.check(&world.pool).unwrap();
        }
        for reader in [&mut told, &mut slow] {
            reader.read_all(world.kv_event_log());
            world.agrees(reader);
        }
    }
}

fn is_ready(future: Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn waiting_thread_is_woken() {
    let mut world = World::new(4);
    let kv_event_log = Arc::clone(world.index.kv_event_log().unwrap());
    let mut told = Told::default();
    assert!(is_ready(pin!(kv_event_log.changed(&told.cursor))), "there is a beginning to tell");
    told.read_all(&kv_event_log);
    let cursor = told.cursor;
    let mut waiting = pin!(kv_event_log.changed(&cursor));
    assert!(!is_ready(waiting.as_mut()), "nothing has changed");
    world.visit(0, &prompt(1, 2));
    kv_event_log.wake();
    assert!(is_ready(waiting));
    assert!(is_ready(pin!(kv_event_log.changed(&cursor))), "nor does one wait who comes too late");
    assert_eq!(told.read(&kv_event_log, 9), 2);
}

/// A log of a tree of `pages` pages, one below the other.
fn filled(pages: usize) -> KvEventLog {
    let kv_event_log = KvEventLog::new(pages).unwrap();
    for page in 0..pages as u32 {
        kv_event_log.stored(PageId(page), page.checked_sub(1).map(PageId), &[page; PAGE_TOKENS]);
    }
    kv_event_log
}

#[test]
fn no_reader_has_the_engine_wait_for_a_long_look() {
    let pages = 4 * LOOKED_AT_MAX;
    let kv_event_log = filled(pages);
    let read = |cursor: &mut KvCursor| {
        let mut events = Vec::new();
        kv_event_log.read(cursor, 3, &mut events);
        events
    };
    let most = (0..=pages as u64).map(|seq| kv_event_log.lock().back_to(seq).1).max();
    assert_eq!(most, Some(LOOKED_AT_MAX));
    // Cursors of an earlier reader: within the search limit, and one row beyond it.
    let (near, far) = ((pages - LOOKED_AT_MAX + 1) as u64, (pages - LOOKED_AT_MAX) as u64);
    assert_eq!(kv_event_log.lock().back_to(near), (Some(near as u32), LOOKED_AT_MAX));
    assert!(matches!(read(&mut KvCursor::after(near))[..], [KvEvent::Stored { seq, .. }, ..] if seq == near + 1));
    let mut cursor = KvCursor::after(far);
    assert!(matches!(read(&mut cursor)[..], [KvEvent::Reset, KvEvent::Stored { seq: 1, .. }, KvEvent::Stored { .. }]));
    // The page of its last event leaves the tree.
    let told = cursor.page;
    assert!(matches!(read(&mut cursor)[..], [KvEvent::Stored { seq: 3, .. }, ..]), "nothing was looked for");
    kv_event_log.removed(PageId(cursor.page));
    assert!(told < cursor.page);
    assert!(matches!(read(&mut cursor)[..], [KvEvent::Reset, KvEvent::Stored { seq: 1, .. }, ..]));
    // After the last change the search examines one row.
    let changes = kv_event_log.stats().changes;
    assert_eq!(kv_event_log.lock().back_to(changes), (Some(NONE), 1));
    assert!(read(&mut KvCursor::after(changes)).is_empty());
}
