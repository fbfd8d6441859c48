//! Prefixes and encoder outputs on disk: which are worth reading, given the measured rates of disk and model.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use plimsoll_device::Bf16Rows;
use plimsoll_media::{Claim, ContentKey, Modality, OutputPool, Vacant};
use plimsoll_models::EncoderKind;
use plimsoll_tier::{Class, Limits, Put, Store, System, Tier};

use super::{Disk, DiskParts, Outputs, PAUSE, Unread};
use crate::cache::lease::SharedCache;
use crate::cache::{KvCache, PAGE_TOKENS, PageKey, PagePool, Part, PrefixIndex, links};
use crate::media::{OUTPUT_PAGE_ROWS, SeqMedia};
use crate::plan::disk::{DiskPlan, OUTPUTS_MAX};
use crate::schedule::scheduler::{Scheduler, StepLimits};

const PAGE_BYTES: usize = 1000;
/// Values of a row of encoder outputs.
const WIDTH: usize = 2;

fn disk(dir: &std::path::Path) -> Disk {
    let limits = Limits { bytes: 1 << 20, entries: 64, write_bytes_per_day: None };
    let store = Store::open(dir, limits, Box::new(System)).unwrap();
    let tier = Tier::start(store, &plan().classes).unwrap();
    Disk::new(DiskParts { tier, root: [1; 32], print: [2; 32], plan: plan(), context: 256 })
}

fn plan() -> DiskPlan {
    let classes = [PAGE_BYTES, OUTPUT_PAGE_ROWS * WIDTH * 4].map(|bytes| Class { bytes, writes: 2, reads: 2 });
    let (classes, class_of, output_class) = (classes.to_vec(), [Some(0), None, None], Some(1));
    DiskPlan { classes, class_of, output_class, entries: 64, read_always: false, bytes: 0 }
}

fn cache() -> SharedCache {
    let pages = 16;
    let index = PrefixIndex::new(pages).unwrap();
    Rc::new(RefCell::new(KvCache::new(PagePool::new(pages).unwrap(), Some(index), None).with_tier([1; 32])))
}

#[test]
fn what_is_faster_to_compute_is_not_read() {
    let temp = tempfile::tempdir().unwrap();
    let mut disk = disk(&temp.path().join("cache"));
    let cache = cache();
    let tokens: Vec<u32> = (0..100).collect();
    let key = PageKey::text(0, &tokens);
    assert_eq!(disk.wanted_pages(key, &cache.borrow()), None, "nothing is there");
    for (at, link) in links([1; 32], key).enumerate().filter(|(at, _)| *at != 4) {
        let name = disk.name(&link, Part::Whole);
        assert_eq!(disk.tier.store().put(&name, &[at as u8; PAGE_BYTES]), Put::Written);
    }
    assert_eq!(
        disk.wanted_pages(key, &cache.borrow()),
        Some((4, 0)),
        "up to the page that is missing; no rate is known"
    );
    assert_eq!(disk.wanted_pages(PageKey::text(0, &tokens[..32]), &cache.borrow()), Some((1, 0)), "a token is left");
    // 4000 bytes at 1 MB a second take 4 ms; 64 rows are computed in 6.4 ms.
    disk.tier.counts().read_rate.store(1_000_000, Relaxed);
    disk.computed(100, 0.01);
    assert_eq!(disk.wanted_pages(key, &cache.borrow()), Some((4, 0)));
    disk.tier.counts().read_rate.store(500_000, Relaxed);
    assert_eq!(disk.wanted_pages(key, &cache.borrow()), None);
    assert_eq!(disk.unread[Unread::Slow as usize], 1);
    // Memory has two pages: half of the prefix is left to read, and half to compute.
    disk.tier.counts().read_rate.store(1_000_000, Relaxed);
    {
        let cache = &mut *cache.borrow_mut();
        let pages: Vec<_> = (0..2).map(|_| cache.take().unwrap()).collect();
        cache.index.as_mut().unwrap().donate(key.first(2 * PAGE_TOKENS), &pages, &mut cache.pool);
        assert_eq!(cache.unsaved(), 2);
    }
    assert_eq!(disk.wanted_pages(key, &cache.borrow()), Some((4, 2)));
    disk.computed(100, 0.000_1);
    (0..20).for_each(|_| disk.computed(100, 0.000_1));
    assert_eq!(disk.wanted_pages(key, &cache.borrow()), None);
}

#[test]
fn after_a_read_that_took_too_long_requests_do_not_wait_for_the_disk() {
    let temp = tempfile::tempdir().unwrap();
    let mut disk = disk(&temp.path().join("cache"));
    let cache = cache();
    let tokens: Vec<u32> = (0..100).collect();
    let key = PageKey::text(0, &tokens);
    for (at, link) in links([1; 32], key).enumerate() {
        assert_eq!(disk.tier.store().put(&disk.name(&link, Part::Whole), &[at as u8; PAGE_BYTES]), Put::Written);
    }
    let now = Instant::now();
    disk.pause(now);
    assert_eq!(disk.wanted_pages(key, &cache.borrow()), None);
    assert_eq!(disk.unread[Unread::Paused as usize], 1);
    assert!(disk.is_paused(now + PAUSE / 2));
    // The disk has not answered yet.
    disk.outstanding = 1;
    assert!(disk.is_paused(now + 2 * PAUSE));
    disk.outstanding = 0;
    assert!(!disk.is_paused(now + 2 * PAUSE));
    assert_eq!(disk.wanted_pages(key, &cache.borrow()), Some((6, 0)));
    assert_eq!(disk.unread[Unread::Paused as usize], 1);
}

/// Rows of a medium: two blocks, the second not full.
const ROWS: usize = 40;

fn content(n: u8) -> ContentKey {
    ContentKey::of(Modality::Image, "", &[n])
}

fn room(pool: &OutputPool, key: &ContentKey) -> Vacant {
    match pool.claim(&[(*key, ROWS)]).unwrap().pop() {
        Some(Claim::Vacant(room)) => room,
        other => panic!("{other:?}"),
    }
}

/// A scheduler without requests.
fn scheduler() -> Scheduler<()> {
    let limits = StepLimits {
        rows: 16,
        logit_rows: 16,
        running: 1,
        slots: 0,
        window: 0,
        drafts: 0,
        draft_head: false,
        draft_model: false,
        encoder_batch: false,
        layered: false,
        media: true,
        image_rows: 0,
        bf16: Bf16Rows::None,
        candidates: false,
    };
    Scheduler::new(limits, cache(), 1)
}

/// Records an encoded medium.
fn encoded(disk: &mut Disk, pool: &OutputPool, key: &ContentKey) {
    let mut room = room(pool, key);
    (0..ROWS).for_each(|row| room.row_mut(row).fill(row as f32));
    drop(room.fill());
    disk.keep_output(*key, ROWS);
}

/// Saves everything that is unsaved.
fn write_all(disk: &mut Disk, pool: &OutputPool) {
    while disk.outputs.unsaved() || disk.tier.writing() > 0 {
        disk.save_outputs(pool);
        std::thread::yield_now();
    }
}

#[test]
fn outputs_that_are_faster_to_encode_are_not_read() {
    let temp = tempfile::tempdir().unwrap();
    let mut disk = disk(&temp.path().join("cache"));
    let pool = OutputPool::new(WIDTH, OUTPUT_PAGE_ROWS, 8).unwrap();
    let keys = [1, 2, 3].map(content);
    keys[..2].iter().for_each(|key| encoded(&mut disk, &pool, key));
    write_all(&mut disk, &pool);
    assert_eq!((disk.lost, disk.tier.counts().kinds[3].blobs.load(Relaxed)), (0, 4));
    pool.clear();
    let media = |key: &ContentKey| SeqMedia::with_room(*key, ROWS, room(&pool, key));
    let brings = |disk: &mut Disk, media: &mut SeqMedia, order: u64| disk.brings(order, media, 0);
    assert!(!brings(&mut disk, &mut media(&keys[2]), 0), "nothing is there");
    // 512 bytes at 512 kB a second take a millisecond.
    disk.tier.counts().read_rate.store(512_000, Relaxed);
    disk.encoded(EncoderKind::Vision, 1000, 0.01);
    disk.encoded(EncoderKind::Audio, 1000, 10.0);
    let mut slow = media(&keys[0]);
    assert!(!brings(&mut disk, &mut slow, 1), "40 rows are encoded in 0.4 ms");
    assert_eq!((disk.outputs.unread, slow.on_disk(0)), ([1, 0, 0, 0], None));
    disk.outputs = Outputs::new(&plan());
    disk.encoded(EncoderKind::Vision, 1000, 1.0);
    disk.pause(Instant::now());
    assert!(!brings(&mut disk, &mut media(&keys[0]), 2), "the disk took too long");
    assert_eq!(disk.outputs.unread, [0, 0, 0, 1]);
    disk.paused = None;
    let (mut first, mut second) = (media(&keys[0]), media(&keys[1]));
    assert!(brings(&mut disk, &mut first, 3) && first.awaits(0));
    assert!(brings(&mut disk, &mut second, 4) && !second.awaits(0), "it waits until the other one was read");
    assert!(!brings(&mut disk, &mut media(&keys[2]), 5), "it is not on disk");
}

#[test]
fn a_request_that_leaves_gives_the_room_of_its_outputs_back() {
    let temp = tempfile::tempdir().unwrap();
    let mut disk = disk(&temp.path().join("cache"));
    let pool = OutputPool::new(WIDTH, OUTPUT_PAGE_ROWS, 2).unwrap();
    let key = content(1);
    encoded(&mut disk, &pool, &key);
    write_all(&mut disk, &pool);
    pool.clear();
    let mut media = SeqMedia::with_room(key, ROWS, room(&pool, &key));
    assert!(disk.brings(1, &mut media, 0));
    drop(media);
    assert_eq!(pool.stats().pages_free, 0);
    disk.end_output(&mut scheduler());
    assert_eq!((disk.outputs.reads(), pool.stats().pages_free), (false, 2));
    // A block that is read after that has no pages to go to.
    let read = disk.tier.next_read(std::time::Duration::from_secs(10)).unwrap();
    assert!(!disk.place_output(&read));
}

#[test]
fn outputs_that_left_memory_before_they_were_written_are_counted() {
    let temp = tempfile::tempdir().unwrap();
    let mut disk = disk(&temp.path().join("cache"));
    let pool = OutputPool::new(WIDTH, OUTPUT_PAGE_ROWS, 4).unwrap();
    encoded(&mut disk, &pool, &content(1));
    pool.clear();
    encoded(&mut disk, &pool, &content(2));
    write_all(&mut disk, &pool);
    assert_eq!((disk.lost, disk.tier.counts().kinds[3].blobs.load(Relaxed)), (2, 2));
    // If more media wait than the queue holds, the first are lost.
    (0..OUTPUTS_MAX + 3).for_each(|_| disk.keep_output(content(3), ROWS));
    assert_eq!(disk.lost, 2 + 3 * 2);
}
