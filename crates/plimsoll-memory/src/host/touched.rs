//! Touched bytes of the memory that libraries take: stacks and the heaps of the system's allocator. Stacks grow after the start and are
//! never given back. The allocator keeps some of the freed memory.

use std::fs::File;
use std::ops::Range;

use super::Root;
use crate::{heap, large};

/// The stack of a thread that set no other size (Rust's default). The memory above it can be another mapping that the kernel shows merged
/// with it.
pub(super) const STACK_BYTES: u64 = 2 << 20;
/// The guard page below a stack, without rights, where pages are small.
pub(super) const GUARD_BYTES: u64 = 4 << 10;
/// The largest guard page. A larger mapping without rights is something else.
const GUARD_BYTES_MAX: u64 = 64 << 10;
/// Size and alignment of the block that holds a glibc heap beside the main one. The block begins with memory in use; memory without rights
/// follows, into which the heap can grow.
const HEAP_BYTES: u64 = 64 << 20;
/// The smallest page size. With larger pages `pagemap` has fewer entries, and the counts here are too low.
const PAGE_BYTES: u64 = 4096;
/// Bits of an entry of `pagemap`: the page is present, or in swap.
const TOUCHED: u64 = 3 << 62;
/// Bits of an entry of `pagemap`: the page is in swap; no other process has the page. A page that was only read is the system's shared page
/// of zeros.
const SWAPPED: u64 = 1 << 62;
const OWN: u64 = 1 << 56;

/// Bytes that are resident or in swap; zero where the system does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Bytes of the threads' stacks.
    pub stacks: u64,
    /// Bytes of the allocator's heaps. Large buffers with a mapping of their own are not part of them.
    pub heaps: u64,
    /// Bytes of these large buffers, touched or not; `None` where the allocator does not tell.
    pub mapped: Option<u64>,
    /// Bytes of these buffers that are reserved and not touched yet.
    pub reserved: u64,
}

impl Touched {
    /// Reads this process's numbers.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        let maps = root.text("/proc/self/maps").unwrap_or_default();
        let Ok(pagemap) = File::open(root.join("/proc/self/pagemap")) else { return Self::default() };
        let (mut all, ranges) = (Self::default(), ranges(&maps));
        for (what, range) in &ranges {
            match what {
                What::Stack => all.stacks += touched(&pagemap, range),
                What::Heap => all.heaps += touched(&pagemap, range),
            }
        }
        let in_heap = |start| ranges.iter().any(|(what, range)| *what == What::Heap && range.contains(&start));
        for _ in 0..2 {
            (all.mapped, all.reserved) = (heap::mapped_alone(), 0);
            for buffer in large::all().filter(|buffer| !in_heap(buffer.start)) {
                let pages = buffer.start / PAGE_BYTES * PAGE_BYTES..buffer.end.next_multiple_of(PAGE_BYTES);
                all.reserved += (pages.end - pages.start).saturating_sub(touched(&pagemap, &pages));
            }
            // Again if a buffer was mapped or unmapped meanwhile.
            if heap::mapped_alone() == all.mapped {
                break;
            }
        }
        all
    }
}

/// Bytes of pages in `range` of this process's addresses that were written and are resident or in swap. `None` where the system does not
/// tell.
pub(crate) fn touched_in(range: &Range<u64>) -> Option<u64> {
    let pagemap = File::open("/proc/self/pagemap").ok()?;
    let pages = range.start / PAGE_BYTES * PAGE_BYTES..range.end.next_multiple_of(PAGE_BYTES);
    Some(pages_of(&pagemap, &pages, SWAPPED | OWN))
}

/// Address space of the stacks of present threads, and of ended threads whose stacks are kept for later ones. The first thread's stack
/// grows and is not counted.
pub(super) fn stacks_mapped(root: &Root) -> u64 {
    let maps = root.text("/proc/self/maps").unwrap_or_default();
    let first = maps.lines().filter_map(Mapping::parse).find(|mapping| mapping.name == Some("[stack]"));
    let first = first.map(|mapping| mapping.range);
    let stacks =
        ranges(&maps).into_iter().filter(|(what, range)| *what == What::Stack && Some(range) != first.as_ref());
    stacks.map(|(_, range)| range.end - range.start + GUARD_BYTES).sum()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Stack,
    Heap,
}

/// One line of `maps`.
struct Mapping<'a> {
    range: Range<u64>,
    rights: &'a str,
    name: Option<&'a str>,
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
        Some(Self { range, rights: words.next()?, name: words.nth(3) })
    }

    fn is(&self, rights: &str) -> bool {
        self.name.is_none() && self.rights == rights
    }
}

/// The address ranges of stacks and heaps. The main thread's stack and the first heap have names. Other stacks lie above a guard page, and
/// other heaps lie below the memory that they can grow into.
fn ranges(maps: &str) -> Vec<(What, Range<u64>)> {
    let mut found = Vec::new();
    let mut below: Option<Mapping<'_>> = None;
    for mapping in maps.lines().filter_map(Mapping::parse) {
        let Range { start, end } = mapping.range;
        let adjacent = below.as_ref().filter(|below| below.range.end == start);
        match mapping.name {
            Some("[stack]") => found.push((What::Stack, start..end)),
            Some("[heap]") => found.push((What::Heap, start..end)),
            None if mapping.rights == "rw-p" => {
                let guard = adjacent.filter(|below| below.is("---p"));
                if guard.is_some_and(|guard| guard.range.end - guard.range.start <= GUARD_BYTES_MAX) {
                    found.push((What::Stack, start..end.min(start + STACK_BYTES)));
                }
            }
            None if mapping.rights == "---p" && end % HEAP_BYTES == 0 => {
                let block = end - HEAP_BYTES;
                let heap = adjacent.filter(|below| below.is("rw-p") && below.range.contains(&block));
                found.extend(heap.map(|_| (What::Heap, block..start)));
            }
            _ => {}
        }
        below = Some(mapping);
    }
    found
}

fn touched(pagemap: &File, range: &Range<u64>) -> u64 {
    pages_of(pagemap, range, TOUCHED)
}

/// Bytes of pages with any of these `marks`.
#[cfg(unix)]
fn pages_of(pagemap: &File, range: &Range<u64>, marks: u64) -> u64 {
    use std::os::unix::fs::FileExt;

    let mut entries = [0; 8 * 512];
    let (mut page, end) = (range.start / PAGE_BYTES, range.end / PAGE_BYTES);
    let mut pages = 0;
    while page < end {
        let wanted = (8 * (end - page)).min(entries.len() as u64) as usize;
        let Ok(read @ 8..) = pagemap.read_at(&mut entries[..wanted], 8 * page) else { break };
        let (whole, _) = entries[..read].as_chunks();
        pages += whole.iter().filter(|entry| u64::from_ne_bytes(**entry) & marks != 0).count() as u64;
        page += whole.len() as u64;
    }
    pages * PAGE_BYTES
}

#[cfg(not(unix))]
fn pages_of(_pagemap: &File, _range: &Range<u64>, _marks: u64) -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_and_heaps_are_told_from_other_mappings() {
        let maps = "\
00400000-00500000 r-xp 00000000 fe:00 77 /bin/server
01000000-01100000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
7f0000100000-7f0004000000 ---p 00000000 00:00 0
7f0004000000-7f0004200000 rw-p 00000000 00:00 0
7f1000000000-7f1000001000 ---p 00000000 00:00 0
7f1000001000-7f1000201000 rw-p 00000000 00:00 0
7f2000000000-7f2000001000 ---p 00000000 00:00 0
7f2000001000-7f2090000000 rw-p 00000000 00:00 0
7f3000000000-7f3000300000 ---p 00000000 00:00 0
7f3000300000-7f3000400000 rw-p 00000000 00:00 0
7f3000400000-7f3004000000 ---p 00000000 00:00 0
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
garbage
";
        assert_eq!(
            ranges(maps),
            [
                (What::Heap, 0x0100_0000..0x0110_0000),
                // A mapping above the first of its block and at the block's beginning is a heap. One in the middle is
                // another region.
                (What::Heap, 0x7f00_0000_0000..0x7f00_0010_0000),
                (What::Stack, 0x7f10_0000_1000..0x7f10_0020_1000),
                (What::Stack, 0x7f20_0000_1000..0x7f20_0020_1000),
                (What::Stack, 0x7ffc_0000_0000..0x7ffc_0002_1000),
            ]
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_that_goes_deep_is_seen_while_it_lives() {
        /// Touches a megabyte of its thread's stack, then does the rest.
        #[inline(never)]
        fn deep(then: impl FnOnce()) {
            std::hint::black_box([1u8; 1 << 20]);
            then();
        }
        let root = Root::system();
        let (deep_now, is_deep) = std::sync::mpsc::channel();
        let (leave, left) = std::sync::mpsc::channel::<()>();
        let before = Touched::read(&root).stacks;
        let thread = std::thread::spawn(move || {
            deep(|| deep_now.send(()).unwrap());
            left.recv().unwrap_err();
        });
        is_deep.recv().unwrap();
        let during = Touched::read(&root).stacks;
        drop(leave);
        thread.join().unwrap();
        // Other tests run threads as well, but no other thread goes as deep.
        let more = during.saturating_sub(before);
        assert!((3 << 18..5 << 18).contains(&more), "{before} {during}");
    }
}
