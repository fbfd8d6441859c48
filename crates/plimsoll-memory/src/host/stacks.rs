//! How much of the threads' stacks has been touched: memory that grows after the start, belongs to nobody's account and is
//! never given back.

use std::fs::File;
use std::ops::Range;

use super::Root;

/// The stack of a thread that asked for no other size (Rust's own default). What lies above it may be somebody else's mapping
/// that the kernel shows as one with it.
const STACK_BYTES: u64 = 2 << 20;
/// A mapping without any rights that is larger is no guard page.
const GUARD_BYTES_MAX: u64 = 64 << 10;
/// Smallest pages; with larger ones `pagemap` has fewer entries, and what is read is less than there is.
const PAGE_BYTES: u64 = 4096;
/// An entry of `pagemap`: a page that is present, or in swap.
const TOUCHED: u64 = 3 << 62;

/// Bytes of this process's stacks that are resident or in swap; zero where the system does not tell.
#[must_use]
pub fn stacks_touched(root: &Root) -> u64 {
    let maps = root.text("/proc/self/maps").unwrap_or_default();
    let Ok(pagemap) = File::open(root.join("/proc/self/pagemap")) else { return 0 };
    stacks(&maps).map(|stack| touched(&pagemap, stack)).sum()
}

/// Where the stacks are: the main thread's has a name, the others lie above a guard page.
fn stacks(maps: &str) -> impl Iterator<Item = Range<u64>> {
    let mut guard_end = 0;
    maps.lines().filter_map(move |line| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let (rights, name) = (words.next()?, words.nth(3));
        let guarded = guard_end == start;
        guard_end = if rights == "---p" && end - start <= GUARD_BYTES_MAX { end } else { 0 };
        match name {
            Some("[stack]") => Some(start..end),
            None if guarded && rights == "rw-p" => Some(start..end.min(start + STACK_BYTES)),
            _ => None,
        }
    })
}

#[cfg(unix)]
fn touched(pagemap: &File, stack: Range<u64>) -> u64 {
    use std::os::unix::fs::FileExt;

    let mut entries = [0; 8 * 64];
    let (mut page, end) = (stack.start / PAGE_BYTES, stack.end / PAGE_BYTES);
    let mut pages = 0;
    while page < end {
        let wanted = (8 * (end - page)).min(entries.len() as u64) as usize;
        let Ok(read @ 8..) = pagemap.read_at(&mut entries[..wanted], 8 * page) else { break };
        let (whole, _) = entries[..read].as_chunks();
        pages += whole.iter().filter(|entry| u64::from_ne_bytes(**entry) & TOUCHED != 0).count() as u64;
        page += whole.len() as u64;
    }
    pages * PAGE_BYTES
}

#[cfg(not(unix))]
fn touched(_pagemap: &File, _stack: Range<u64>) -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_told_from_other_mappings() {
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
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
garbage
";
        let found: Vec<_> = stacks(maps).collect();
        assert_eq!(
            found,
            [
                0x7f10_0000_1000..0x7f10_0020_1000,
                0x7f20_0000_1000..0x7f20_0020_1000,
                0x7ffc_0000_0000..0x7ffc_0002_1000
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
        let before = stacks_touched(&root);
        let thread = std::thread::spawn(move || {
            deep(|| deep_now.send(()).unwrap());
            left.recv().unwrap_err();
        });
        is_deep.recv().unwrap();
        let during = stacks_touched(&root);
        drop(leave);
        thread.join().unwrap();
        // Tests beside this one have threads, too; none of them goes as deep.
        let more = during.saturating_sub(before);
        assert!((3 << 18..5 << 18).contains(&more), "{before} {during}");
    }
}
