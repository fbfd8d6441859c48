//! The matrix unit (AMX) of x86-64: eight tiles of sixteen rows of 64 bytes, products of bytes into 32-bit sums and of bfloat16 into
//! floats. The compiler has no stable intrinsics for it, so the instructions are inline assembly. `linear/amx.rs` uses [`group`];
//! `linear/bf16.rs` and `attention/bf16.rs` use [`square`], [`column`] and [`strip`].
//!
//! Tiles keep their contents from one block of assembly to the next: the compiler never uses these registers by itself.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

#[cfg(all(test, target_os = "linux"))]
mod emulated;
pub(crate) mod group;

/// The unit's configuration: the shapes of its tiles.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// A configuration without tiles.
    const NONE: Shapes = Shapes { palette: 1, start: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
}

/// Configures this thread's unit for [`group`]: products of `rows` rows of `group` bytes.
pub(crate) fn configure(rows: usize, group: usize) {
    assert!(rows <= 16 && group <= 64 && group.is_multiple_of(4), "a tile of {rows} rows of {group} bytes");
    let (rows, quads, group) = (rows as u8, (group / 4) as u8, group as u16);
    let mut shapes = Shapes::NONE;
    shapes.rows[..7].copy_from_slice(&[quads, rows, rows, rows, rows, rows, rows]);
    shapes.row_bytes[..7].copy_from_slice(&[64, group, group, 64, 64, 64, 64]);
    load_shapes(&shapes);
}

/// Configures this thread's unit for [`column`] with tiles of `rows` rows: one tile, or several of sixteen rows. With sixteen also for
/// [`square`].
pub(crate) fn configure_rows(rows: usize) {
    // Tile 0 holds sums, tile 4 rows.
    configure_tiles(rows, [0, 4]);
}

/// Configures this thread's unit for [`strip`] with a tile of `rows` rows. With sixteen also for [`column`] and [`square`].
pub(crate) fn configure_strip(rows: usize) {
    // Tiles 0 to 3 hold sums, tile 6 rows.
    configure_tiles(rows, [0, 1, 2, 3, 6]);
}

/// Configures eight tiles: `few` have `rows` rows, the others sixteen.
fn configure_tiles<const N: usize>(rows: usize, few: [usize; N]) {
    assert!(rows <= 16, "a tile of {rows} rows");
    let mut shapes = Shapes::NONE;
    shapes.rows[..8].fill(16);
    few.into_iter().for_each(|tile| shapes.rows[tile] = rows as u8);
    shapes.row_bytes[..8].fill(64);
    load_shapes(&shapes);
}

fn load_shapes(shapes: &Shapes) {
    #[cfg(all(test, target_os = "linux"))]
    if emulated::configure(shapes) {
        return;
    }
    // SAFETY: `available` was true where an `Isa::Amx` is run; the operand is 64 bytes in the unit's format.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &raw const *shapes, options(nostack, readonly),
             out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
             out("tmm5") _, out("tmm6") _, out("tmm7") _);
    }
}

/// Releases the unit's state: from here on the system need not save it.
pub(crate) fn release() {
    // SAFETY: as for `configure`.
    unsafe {
        asm!("tilerelease", options(nostack, nomem),
             out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
             out("tmm5") _, out("tmm6") _, out("tmm7") _);
    }
}

/// Adds products to the sums of two times two tiles, or begins the sums. `rows` are two tiles of sixteen rows; `codes` has tiles of two
/// panels in turn. Both have `groups` groups, one tile or pair of tiles after the other. The sums are stored as tiles of row 0, panel
/// 0; row 0, panel 1; row 1, panel 0; row 1, panel 1. For each, the first elements of all pairs are multiplied into one sum and the
/// second elements into another, from zero, in order. Then the two are added, and their sum to the stored value.
///
/// # Safety
/// [`configure_rows`] or [`configure_strip`] was called for sixteen, and all pointers are valid for as much as this says.
pub(crate) unsafe fn square(rows: [*const u8; 2], codes: *const u8, groups: usize, sums: *mut f32, begin: bool) {
    debug_assert!(groups > 0, "nothing to multiply");
    // SAFETY: the caller's word.
    unsafe {
        if begin {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                 out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, options(nostack, nomem));
        } else {
            asm!("tileloadd tmm0, [{sums} + {line}*1]",
                 "tileloadd tmm1, [{sums} + {line}*1 + 1024]",
                 "tileloadd tmm2, [{sums} + {line}*1 + 2048]",
                 "tileloadd tmm3, [{sums} + {line}*1 + 3072]",
                 sums = in(reg) sums, line = in(reg) 64usize,
                 out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, options(nostack, readonly));
        }
        asm!("2:",
             "tileloadd tmm4, [{first} + {line}*1]",
             "tileloadd tmm6, [{codes} + {line}*1]",
             "tileloadd tmm7, [{codes} + {line}*1 + 1024]",
             "tileloadd tmm5, [{second} + {line}*1]",
             "tdpbf16ps tmm0, tmm4, tmm6",
             "tdpbf16ps tmm1, tmm4, tmm7",
             "tdpbf16ps tmm2, tmm5, tmm6",
             "tdpbf16ps tmm3, tmm5, tmm7",
             "add {first}, 1024",
             "add {second}, 1024",
             "add {codes}, 2048",
             "dec {groups}",
             "jnz 2b",
             "tilestored [{sums} + {line}*1], tmm0",
             "tilestored [{sums} + {line}*1 + 1024], tmm1",
             "tilestored [{sums} + {line}*1 + 2048], tmm2",
             "tilestored [{sums} + {line}*1 + 3072], tmm3",
             first = inout(reg) rows[0] => _, second = inout(reg) rows[1] => _, codes = inout(reg) codes => _,
             groups = inout(reg) groups => _, sums = in(reg) sums, line = in(reg) 64usize,
             out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
             out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nostack));
    }
}

/// Runs `$each` for the first `$count` of four tiles of sums: with a number, its tile, and another for an operand.
macro_rules! each_tile {
    ($count:expr, $each:ident) => {{
        $each!(0 "tmm0" "tmm4");
        if $count > 1 {
            $each!(1 "tmm1" "tmm5");
        }
        if $count > 2 {
            $each!(2 "tmm2" "tmm4");
        }
        if $count > 3 {
            $each!(3 "tmm3" "tmm5");
        }
    }};
}

/// Begins `N` (up to 4) tiles of sums: [`column`] and [`strip`] add to them, [`end_sums`] writes them.
///
/// # Safety
/// The unit is set up.
#[inline(always)]
pub(crate) unsafe fn begin_sums<const N: usize>() {
    macro_rules! zero {
        ($number:literal $sums:tt $operand:tt) => {
            asm!(concat!("tilezero ", $sums), out($sums) _, options(nostack, nomem))
        };
    }
    // SAFETY: the caller's word.
    unsafe { each_tile!(N, zero) }
}

/// Writes these sums: a tile every `step` floats, its rows every `row_bytes` bytes.
///
/// # Safety
/// All that is valid for writing, and [`begin_sums`] was called.
#[inline(always)]
pub(crate) unsafe fn end_sums<const N: usize>(sums: *mut f32, step: usize, row_bytes: usize) {
    macro_rules! write {
        ($number:literal $sums:tt $operand:tt) => {
            asm!(concat!("tilestored [{sums} + {row}*1], ", $sums),
                 sums = in(reg) sums.add($number * step), row = in(reg) row_bytes,
                 options(nostack, preserves_flags))
        };
    }
    // SAFETY: the caller's word.
    unsafe { each_tile!(N, write) }
}

/// Multiplies a group of `N` tiles of rows by the same group of a panel. The first tile is at `rows.0`, the others `rows.1` bytes
/// apart. Sums are formed as in [`square`].
///
/// # Safety
/// [`configure_rows`] was called, for sixteen rows if there are several tiles, or [`configure_strip`] for sixteen; then [`begin_sums`].
/// All pointers are valid for reading a tile.
#[inline(always)]
pub(crate) unsafe fn column<const N: usize>(panel: *const u8, rows: (*const u8, usize)) {
    macro_rules! product {
        ($number:literal $sums:tt $rows:tt) => {
            asm!(concat!("tileloadd ", $rows, ", [{rows} + {line}*1]"), concat!("tdpbf16ps ", $sums, ", ", $rows, ", tmm6"),
                 rows = in(reg) rows.0.add($number * rows.1), line = in(reg) 64usize,
                 out($sums) _, out($rows) _, options(nostack, readonly, preserves_flags))
        };
    }
    // SAFETY: the caller's word.
    unsafe {
        asm!("tileloadd tmm6, [{panel} + {line}*1]", panel = in(reg) panel, line = in(reg) 64usize,
             out("tmm6") _, options(nostack, readonly, preserves_flags));
        each_tile!(N, product);
    }
}

/// Multiplies one tile of rows by the first `P` of some panels, of `groups` groups each. The tiles of the row and of a panel follow
/// each other. Sums are formed as in [`square`]; those of a panel are sixteen floats of each row, rows `row_bytes` apart.
///
/// # Safety
/// [`configure_strip`] was called for these rows, and all pointers are valid for as much as this says.
pub(crate) unsafe fn strip<const P: usize>(
    row: *const u8,
    panels: [*const u8; 4],
    groups: usize,
    (sums, row_bytes): (*mut f32, usize),
) {
    debug_assert!(groups > 0 && P > 0 && P <= 4, "nothing to multiply");
    // SAFETY: the caller's word.
    unsafe {
        begin_sums::<P>();
        for group in 0..groups {
            let row = row.add(1024 * group);
            macro_rules! product {
                ($number:literal $sums:tt $panel:tt) => {
                    asm!(concat!("tileloadd ", $panel, ", [{panel} + {line}*1]"), concat!("tdpbf16ps ", $sums, ", tmm6, ", $panel),
                         panel = in(reg) panels[$number].add(1024 * group), line = in(reg) 64usize,
                         out($sums) _, out($panel) _, options(nostack, readonly, preserves_flags))
                };
            }
            asm!("tileloadd tmm6, [{row} + {line}*1]", row = in(reg) row, line = in(reg) 64usize,
                 out("tmm6") _, options(nostack, readonly, preserves_flags));
            each_tile!(P, product);
        }
        end_sums::<P>(sums, 16, row_bytes);
    }
}

/// Whether the processor and the system let this process use the unit. Requests it from the system. Unit tests have it on every Linux.
pub(crate) fn available() -> bool {
    #[cfg(all(test, target_os = "linux"))]
    {
        if emulated::forced() || !there() {
            emulated::install();
        }
        true
    }
    #[cfg(not(all(test, target_os = "linux")))]
    there()
}

fn there() -> bool {
    // Processor: bfloat16, tiles and byte products (leaf 7: edx 22, 24 and 25). System: it saves their state (XCR0 17 and 18).
    const AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const STATE: u64 = 1 << 17 | 1 << 18;
    const OSXSAVE: u32 = 1 << 27;
    let there = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & AMX == AMX;
    if !there || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    // SAFETY: the processor has just said that the register can be read.
    let saved = unsafe { xcr0() };
    saved & STATE == STATE && permitted()
}

/// # Safety
/// The system has enabled XGETBV.
#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: the caller's word.
    unsafe { _xgetbv(0) }
}

/// Requests the tiles' state from Linux, for all threads of the process: 8 KiB per thread, which it grants only on request.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let result: isize;
    // SAFETY: the call takes two numbers and changes nothing but the process's permission.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") TILE_DATA,
             lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}
