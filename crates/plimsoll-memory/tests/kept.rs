//! Freed memory that the system's allocator keeps is measured, to the page. Otherwise a fragmented heap looks like a leak.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::sync::{Mutex, PoisonError};

use plimsoll_memory::heap::{self, CountingHeap};
use plimsoll_memory::host::{OwnProcess, Root, Touched};

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

const MIB: u64 = 1 << 20;

/// One test at a time: they measure the whole process.
static TURN: Mutex<()> = Mutex::new(());

/// Returns the heap's bytes in use, the bytes the allocator keeps, and the process's private memory.
fn look() -> [u64; 3] {
    let root = Root::system();
    heap::trim();
    let kept = heap::kept(&Touched::read(&root));
    [heap::in_use(), kept, OwnProcess::read(&root).leak_gauge()]
}

#[test]
fn what_is_reserved_and_never_touched_is_in_use_and_not_resident() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let look = || [heap::in_use(), heap::resident(&Touched::read(&Root::system()))];
    let [in_use, resident] = look();
    let mut buffer: Vec<u8> = Vec::with_capacity(64 << 20);
    buffer.resize(16 << 20, 1);
    let [in_use_now, resident_now] = look();
    assert!((in_use_now - in_use).abs_diff(64 * MIB) < MIB, "{in_use} {in_use_now}");
    // The system may use huge pages for it.
    assert!((resident_now - resident).abs_diff(16 * MIB) <= 4 * MIB, "{resident} {resident_now}");
    // The buffer may move while it grows; the measurement follows it.
    buffer.resize(80 << 20, 1);
    let [_, full] = look();
    assert!((full - resident).abs_diff(80 * MIB) <= 4 * MIB, "{resident} {full}");
    drop(buffer);
    let [in_use_then, resident_then] = look();
    assert!(in_use_then.abs_diff(in_use) < MIB && resident_then.abs_diff(resident) < MIB, "{resident} {resident_then}");
}

#[test]
fn holes_between_living_blocks_are_kept_and_counted() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // In a second thread, so that a heap beside the main one is measured too.
    std::thread::spawn(|| {
        let mut blocks: Vec<Option<Box<[u8; 1000]>>> = (0..65_536).map(|_| Some(Box::new([1; 1000]))).collect();
        // Large blocks are separate mappings, in use and never kept.
        let large = vec![1u8; 32 << 20];
        let [in_use, kept, process] = look();
        assert!(in_use > 94 * MIB && kept < 2 * MIB, "{in_use} in use, {kept} kept");
        // Reserved memory that is not touched does not hide kept memory.
        let reserved: Vec<u8> = Vec::with_capacity(64 << 20);
        // One of four survives: no page is free as a whole.
        blocks.iter_mut().enumerate().filter(|(i, _)| i % 4 != 0).for_each(|(_, block)| *block = None);
        drop(large);
        let [in_use_now, kept_now, process_now] = look();
        let (freed, holes) = (in_use + reserved.capacity() as u64 - in_use_now, kept_now - kept);
        assert!(holes > 40 * MIB, "{freed} freed, {holes} kept");
        let left = process - process_now;
        assert!(
            (freed - holes).abs_diff(left) < MIB / 2,
            "{freed} freed, {holes} kept, but {left} less in the process"
        );
    })
    .join()
    .unwrap();
}
