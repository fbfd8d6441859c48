//! Products of one group of k: the rows' planes times up to four panels. The vector units scale them before the next group.
//!
//! Tile 0 holds codes, 1 and 2 the rows' upper and lower plane, 3 to 6 the sums. Writing sums right after their product would stall the
//! unit until the product is done (52 cycles), so other products are started first.

use std::arch::asm;

/// Codes of 0..=255, against the signed bytes of both planes.
pub(crate) const UNSIGNED: u8 = 0;
/// Codes of −128..=127, against the signed bytes of both planes.
pub(crate) const SIGNED: u8 = 1;
/// Codes and planes in bfloat16; both planes are summed up in one tile.
pub(crate) const BFLOAT: u8 = 2;
/// [`UNSIGNED`] with one plane.
pub(crate) const UNSIGNED_BYTES: u8 = 3;
/// [`SIGNED`] with one plane.
pub(crate) const SIGNED_BYTES: u8 = 4;

/// Whether the rows have one plane.
pub(crate) const fn one_plane(kind: u8) -> bool {
    kind == UNSIGNED_BYTES || kind == SIGNED_BYTES
}

/// Writes a tile of sums as tile `$index` at `$dots`.
macro_rules! write_tile {
    ($dots:expr, $index:literal, $tile:literal) => {
        // SAFETY: the calling function promises it in a `# Safety` section of its own.
        unsafe {
            asm!(
                concat!("tilestored [{dots} + {line}*1 + ", $index, "*1024], ", $tile),
                dots = in(reg) $dots, line = in(reg) 64usize, options(nostack, preserves_flags),
            )
        }
    };
}

/// Loads the planes of some rows.
///
/// # Safety
/// The unit is set up for these rows; `acts` points to the first one's upper plane, the lower one, if there is one, follows 32 bytes
/// behind, in bfloat16 64.
#[inline(always)]
pub(crate) unsafe fn load_rows<const KIND: u8>(acts: *const u8, row_bytes: usize) {
    macro_rules! load {
        ($plane:literal) => {
            // SAFETY: the caller's word.
            unsafe {
                asm!(
                    "tileloadd tmm1, [{acts} + {row}*1]",
                    concat!("tileloadd tmm2, [{acts} + {row}*1 + ", $plane, "]"),
                    acts = in(reg) acts, row = in(reg) row_bytes,
                    out("tmm1") _, out("tmm2") _,
                    options(nostack, preserves_flags, readonly),
                )
            }
        };
    }
    match KIND {
        BFLOAT => load!("64"),
        UNSIGNED | SIGNED => load!("32"),
        // SAFETY: the caller's word.
        UNSIGNED_BYTES | SIGNED_BYTES => unsafe {
            asm!("tileloadd tmm1, [{acts} + {row}*1]", acts = in(reg) acts, row = in(reg) row_bytes,
                 out("tmm1") _, options(nostack, preserves_flags, readonly));
        },
        _ => unreachable!("a kind without rows"),
    }
}

/// Multiplies the loaded rows by a group of `P` panels (1 or 2, in bfloat16 and with one plane up to 4). The panels' codes are 1 KiB
/// apart. Before a tile of sums is reused, its sums of the previous group are written to `before`, as [`store`] would write them.
///
/// # Safety
/// The unit is set up for the group, rows are loaded, and `codes` and `before` point to as much as they take.
#[inline(always)]
pub(crate) unsafe fn multiply<const KIND: u8, const P: usize>(codes: *const u8, before: Option<*mut u8>) {
    macro_rules! product {
        ($instruction:literal, $panel:literal, $high:literal, $low:literal; $($tile:tt)+) => {
            // SAFETY: the caller's word.
            unsafe {
                asm!(
                    concat!("tilezero ", $high),
                    concat!("tilezero ", $low),
                    concat!("tileloadd tmm0, [{codes} + {line}*1 + ", $panel, "*1024]"),
                    concat!($instruction, " ", $high, ", tmm1, tmm0"),
                    concat!($instruction, " ", $low, ", tmm2, tmm0"),
                    codes = in(reg) codes, line = in(reg) 64usize,
                    out("tmm0") _, $(out($tile) _,)+
                    options(nostack, preserves_flags, readonly),
                )
            }
        };
    }
    // One plane.
    macro_rules! single {
        ($instruction:literal, $panel:literal, $tile:tt) => {
            // SAFETY: the caller's word.
            unsafe {
                asm!(
                    concat!("tilezero ", $tile),
                    concat!("tileloadd tmm0, [{codes} + {line}*1 + ", $panel, "*1024]"),
                    concat!($instruction, " ", $tile, ", tmm1, tmm0"),
                    codes = in(reg) codes, line = in(reg) 64usize,
                    out("tmm0") _, out($tile) _,
                    options(nostack, preserves_flags, readonly),
                )
            }
        };
    }
    // Two planes, into one tile.
    macro_rules! joint {
        ($instruction:literal, $panel:literal, $tile:tt) => {
            product!($instruction, $panel, $tile, $tile; $tile)
        };
    }
    // A tile of sums for each panel.
    macro_rules! panels {
        ($product:ident, $instruction:literal) => {
            panels!(@ $product, $instruction, 0 "0" "tmm3", 1 "1" "tmm4", 2 "2" "tmm5", 3 "3" "tmm6")
        };
        (@ $product:ident, $instruction:literal, $($panel:literal $text:literal $tile:tt),*) => {{
            $(if $panel < P {
                if let Some(dots) = before {
                    write_tile!(dots, $text, $tile);
                }
                $product!($instruction, $text, $tile);
            })*
        }};
    }
    macro_rules! integers {
        ($instruction:literal) => {{
            if let Some(dots) = before {
                write_tile!(dots, "0", "tmm3");
                write_tile!(dots, "1", "tmm4");
            }
            product!($instruction, "0", "tmm3", "tmm4"; "tmm3" "tmm4");
            if P > 1 {
                if let Some(dots) = before {
                    write_tile!(dots, "2", "tmm5");
                    write_tile!(dots, "3", "tmm6");
                }
                product!($instruction, "1", "tmm5", "tmm6"; "tmm5" "tmm6");
            }
        }};
    }
    match KIND {
        BFLOAT => panels!(joint, "tdpbf16ps"),
        UNSIGNED_BYTES => panels!(single, "tdpbsud"),
        SIGNED_BYTES => panels!(single, "tdpbssd"),
        UNSIGNED => integers!("tdpbsud"),
        SIGNED => integers!("tdpbssd"),
        _ => unreachable!("a kind without products"),
    }
}

/// Writes the sums of `P` panels: a tile of sixteen rows of sixteen each; as integers one tile per plane.
///
/// # Safety
/// `dots` is valid for writing as many KiB, and [`multiply`] has filled the tiles.
#[inline(always)]
pub(crate) unsafe fn store<const KIND: u8, const P: usize>(dots: *mut u8) {
    let tiles = if KIND == UNSIGNED || KIND == SIGNED { 2 * P } else { P };
    write_tile!(dots, "0", "tmm3");
    if tiles > 1 {
        write_tile!(dots, "1", "tmm4");
    }
    if tiles > 2 {
        write_tile!(dots, "2", "tmm5");
        write_tile!(dots, "3", "tmm6");
    }
}
