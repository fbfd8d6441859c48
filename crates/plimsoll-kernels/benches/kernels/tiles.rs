//! Peak speed of the matrix unit of x86-64: products of whole tiles in registers, without loads or stores.

use std::arch::asm;

use divan::counter::ItemsCount;
use plimsoll_kernels::Isa;

/// Products of a run.
const PRODUCTS: usize = 4096;

/// The unit's configuration: eight tiles of sixteen rows of 64 bytes.
static SHAPES: [u8; 64] = {
    let mut shapes = [0; 64];
    shapes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        shapes[16 + 2 * tile] = 64;
        shapes[48 + tile] = 16;
        tile += 1;
    }
    shapes
};

/// Products of bytes, 16 × 16 × 64 each, in four chains of sums. Kernels can reach a quarter of it: a group is half a tile
/// long, and every code meets two planes.
#[divan::bench(ignore = !Isa::Amx.available(), max_time = 0.5, counters = [ItemsCount::new(PRODUCTS * 2 * 16 * 16 * 64)])]
fn products_of_bytes() {
    // SAFETY: the unit is there and this process may use it, or the bench is ignored; all is given back in the end.
    unsafe {
        asm!(
            "ldtilecfg [{shapes}]",
            "2:",
            "tdpbssd tmm0, tmm6, tmm7",
            "tdpbssd tmm1, tmm6, tmm7",
            "tdpbssd tmm2, tmm6, tmm7",
            "tdpbssd tmm3, tmm6, tmm7",
            "sub {count}, 4",
            "jnz 2b",
            "tilerelease",
            shapes = in(reg) &raw const SHAPES, count = inout(reg) PRODUCTS => _,
            options(nostack, readonly),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
            out("tmm5") _, out("tmm6") _, out("tmm7") _,
        );
    }
}
