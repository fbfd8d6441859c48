//! The matrix unit for tests on processors that have none: its instructions trap, and the trap's handler does what they would have
//! done. So what is written for the unit is tested wherever there is AVX-512, bit for bit; of its speed nothing is learnt.
//!
//! A handler may interrupt anything, so nothing here allocates, locks or panics: what the unit would refuse stays a trap, and ends
//! the process.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;

use libc::{greg_t, siginfo_t, ucontext_t};

use super::Shapes;

const ROWS: usize = 16;
const LINE: usize = 64;
const TILES: usize = 8;

/// What a thread's unit holds.
struct Unit {
    shapes: Shapes,
    tiles: [Tile; TILES],
}

/// Sixteen lines; of those the shape does not have all are zero.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([[u8; LINE]; ROWS]);

impl Tile {
    const ZERO: Tile = Tile([[0; LINE]; ROWS]);

    /// As pairs of bfloat16 or quads of bytes.
    fn quad(&self, row: usize, n: usize) -> [u8; 4] {
        let line = &self.0[row];
        [line[4 * n], line[4 * n + 1], line[4 * n + 2], line[4 * n + 3]]
    }

    fn set(&mut self, row: usize, n: usize, quad: [u8; 4]) {
        self.0[row][4 * n..4 * n + 4].copy_from_slice(&quad);
    }
}

thread_local! {
    // Without a destructor and without a first use to make it: a handler may ask for it.
    static UNIT: UnsafeCell<Unit> = const { UnsafeCell::new(Unit { shapes: Shapes::NONE, tiles: [Tile::ZERO; TILES] }) };
}

static INSTALLED: OnceLock<()> = OnceLock::new();

/// Whether the processor's own unit is passed over: `PLIMSOLL_EMULATE_AMX` is set. It traps, too, where nobody asks the system for it.
pub(super) fn stands_in() -> bool {
    std::env::var_os("PLIMSOLL_EMULATE_AMX").is_some() && install()
}

/// From here on this process has a unit.
pub(super) fn install() -> bool {
    INSTALLED.get_or_init(|| {
        // SAFETY: the handler has the signature that the flags ask for, and touches nothing but its thread's unit, the interrupted
        // registers and the memory that the instruction names.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_trap as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            assert_eq!(libc::sigaction(libc::SIGILL, &raw const action, ptr::null_mut()), 0, "a handler for traps");
        }
    });
    true
}

/// Sets this thread's unit up, if it is emulated. A processor that has one does this much unasked, without a trap.
pub(super) fn takes(shapes: &Shapes) -> bool {
    let emulated = INSTALLED.get().is_some();
    if emulated {
        let unit = Unit { shapes: *shapes, tiles: [Tile::ZERO; TILES] };
        // SAFETY: this thread is the only one to use its unit, and does nothing else with it.
        UNIT.with(|at| unsafe { *at.get() = unit });
    }
    emulated
}

extern "C" fn on_trap(_: i32, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system hands over the interrupted context, and this thread is the only one to use its unit.
    let done = unsafe {
        let registers = &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs;
        let code = registers[libc::REG_RIP as usize] as *const u8;
        UNIT.with(|unit| run(&mut *unit.get(), code, registers)).inspect(|bytes| {
            registers[libc::REG_RIP as usize] += *bytes as greg_t;
        })
    };
    if done.is_none() {
        // SAFETY: the next trap, which is at once, ends the process.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
}

/// Does what the instruction at `code` says, and returns how long it is; of other instructions, and where the unit would refuse, none.
///
/// # Safety
/// `code` points to an instruction, and what it reads and writes is the program's business.
unsafe fn run(unit: &mut Unit, code: *const u8, registers: &[greg_t; 23]) -> Option<usize> {
    // SAFETY: the processor has read so much of it, or less, to know that it is none of its own.
    let head = unsafe { code.cast::<[u8; 5]>().read() };
    let [0xc4, extension, prefix, opcode, operand] = head else { return None };
    // The second opcode map, 128 bits wide, no W.
    if extension & 0x1f != 2 || prefix & 0x84 != 0 {
        return None;
    }
    let (tile, other) = (usize::from(operand >> 3 & 7), usize::from(operand & 7));
    let third = usize::from(!(prefix >> 3) & 0xf);
    let in_memory = operand >> 6 != 3;
    // SAFETY: as above.
    let place = || unsafe { Place::of(code.add(4), extension, registers) };
    match (opcode, prefix & 3, in_memory) {
        (0x49, 0, false) if operand == 0xc0 => {
            (unit.shapes, unit.tiles) = (Shapes::NONE, [Tile::ZERO; TILES]);
            Some(5)
        }
        (0x49, 3, false) => {
            unit.shape(tile)?;
            unit.tiles[tile] = Tile::ZERO;
            Some(5)
        }
        (0x4b, 3, true) => {
            let (place, (rows, bytes)) = (place()?, unit.shape(tile)?);
            unit.tiles[tile] = Tile::ZERO;
            for row in 0..rows {
                // SAFETY: the instruction reads these bytes.
                unsafe { ptr::copy_nonoverlapping(place.line(row), unit.tiles[tile].0[row].as_mut_ptr(), bytes) };
            }
            Some(4 + place.bytes)
        }
        (0x4b, 2, true) => {
            let (place, (rows, bytes)) = (place()?, unit.shape(tile)?);
            for row in 0..rows {
                // SAFETY: the instruction writes these bytes.
                unsafe { ptr::copy_nonoverlapping(unit.tiles[tile].0[row].as_ptr(), place.line(row), bytes) };
            }
            Some(4 + place.bytes)
        }
        (0x5c, 2, false) => unit.product([tile, other, third], bfloat16),
        (0x5e, 3, false) => unit.product([tile, other, third], |sum, a, b| bytes(sum, a, b, |b| i32::from(b as i8))),
        (0x5e, 2, false) => unit.product([tile, other, third], |sum, a, b| bytes(sum, a, b, i32::from)),
        _ => None,
    }
}

impl Unit {
    /// Rows and bytes of a row of a tile.
    fn shape(&self, tile: usize) -> Option<(usize, usize)> {
        let (rows, bytes) = (usize::from(self.shapes.rows[tile]), usize::from(self.shapes.row_bytes[tile]));
        (rows > 0 && rows <= ROWS && bytes > 0 && bytes <= LINE && bytes.is_multiple_of(4)).then_some((rows, bytes))
    }

    /// Adds to the first of three tiles what `sum` makes of a row of the second and a column of the third.
    fn product(
        &mut self,
        [to, a, b]: [usize; 3],
        sum: impl Fn([u8; 4], &[[u8; 4]], &[[u8; 4]]) -> [u8; 4],
    ) -> Option<usize> {
        if b >= TILES || to == a || to == b || a == b {
            return None;
        }
        let [(rows, bytes), (a_rows, a_bytes), (b_rows, b_bytes)] = [self.shape(to)?, self.shape(a)?, self.shape(b)?];
        if (a_rows, b_bytes, 4 * b_rows) != (rows, bytes, a_bytes) {
            return None;
        }
        let (left, right, mut sums) = (self.tiles[a], self.tiles[b], Tile::ZERO);
        for n in 0..bytes / 4 {
            let column: [_; ROWS] = std::array::from_fn(|k| right.quad(k, n));
            for row in 0..rows {
                let quads: [_; ROWS] = std::array::from_fn(|k| left.quad(row, k));
                sums.set(row, n, sum(self.tiles[to].quad(row, n), &quads[..b_rows], &column[..b_rows]));
            }
        }
        self.tiles[to] = sums;
        Some(5)
    }
}

/// Signed bytes of a row times bytes of a column.
fn bytes(sum: [u8; 4], row: &[[u8; 4]], column: &[[u8; 4]], value: impl Fn(u8) -> i32) -> [u8; 4] {
    let mut sum = i32::from_le_bytes(sum);
    for (a, b) in row.as_flattened().iter().zip(column.as_flattened()) {
        sum = sum.wrapping_add(i32::from(*a as i8) * value(*b));
    }
    sum.to_le_bytes()
}

/// Pairs of bfloat16: the first of each into one sum, the second into another, from zero. Denormal numbers are zero.
fn bfloat16(sum: [u8; 4], row: &[[u8; 4]], column: &[[u8; 4]]) -> [u8; 4] {
    let values = |pair: [u8; 4]| {
        let both = u32::from_le_bytes(pair);
        [both << 16, both & 0xffff_0000].map(|bits| flushed(f32::from_bits(bits)))
    };
    let mut sums = [0.0f32; 2];
    for (a, b) in row.iter().zip(column) {
        let (a, b) = (values(*a), values(*b));
        for i in 0..2 {
            sums[i] = flushed(a[i].mul_add(b[i], sums[i]));
        }
    }
    let both = flushed(sums[0] + sums[1]);
    flushed(flushed(f32::from_le_bytes(sum)) + both).to_le_bytes()
}

fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// Where an instruction's operand is.
struct Place {
    base: usize,
    step: usize,
    /// What its description takes: all behind the opcode.
    bytes: usize,
}

impl Place {
    /// What the bytes behind an opcode name: a register and a distance, and as a rule another register times one, two, four or eight.
    ///
    /// # Safety
    /// These bytes can be read.
    unsafe fn of(code: *const u8, extension: u8, registers: &[greg_t; 23]) -> Option<Place> {
        // SAFETY: the caller's word.
        let byte = |at: usize| unsafe { code.add(at).read() };
        let register = |number: u8, more: u8| {
            // Bits of the extension are inverted.
            let number = number & 7 | if extension & more == 0 { 8 } else { 0 };
            (number, registers[REGISTERS[usize::from(number)] as usize] as usize)
        };
        let (mode, low) = (byte(0) >> 6, byte(0) & 7);
        let (mut at, mut base, mut step) = (1, low, 0);
        if low == 4 {
            let (number, value) = register(byte(1) >> 3, 0x40);
            // The stack pointer is no index.
            step = if number == 4 { 0 } else { value << (byte(1) >> 6) };
            (at, base) = (2, byte(1) & 7);
        }
        let distance = match mode {
            // Without a register, or from the instruction on: nobody asks so.
            0 if base == 5 => return None,
            0 => 0,
            1 => isize::from(byte(at) as i8),
            _ => i32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)]) as isize,
        };
        let base = register(base, 0x20).1.wrapping_add_signed(distance);
        Some(Place { base, step, bytes: at + [0, 1, 4][usize::from(mode)] })
    }

    fn line(&self, row: usize) -> *mut u8 {
        self.base.wrapping_add(row.wrapping_mul(self.step)) as *mut u8
    }
}

/// Where a context has the registers, by their numbers in instructions.
const REGISTERS: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];
