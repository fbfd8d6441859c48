//! Emulates the matrix unit for this crate's unit tests on processors without one. Its instructions fault, and the signal handler
//! executes them. Code for the unit is thereby tested bit for bit wherever there is AVX-512; its speed is not. Loading the
//! configuration is replaced instead ([`configure`]).
//!
//! A handler may interrupt any code, so nothing here allocates, locks or panics. An instruction that the unit would refuse stays a
//! fault and ends the process.

use std::cell::UnsafeCell;
use std::env;
use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};

use libc::{greg_t, siginfo_t, ucontext_t};

use super::Shapes;

const ROWS: usize = 16;
const QUADS: usize = 16;
const TILES: usize = 8;
/// Length of an instruction with only tiles as operands.
const BYTES: usize = 5;
/// Bytes of an instruction with a memory operand, before the operand.
const HEAD_BYTES: usize = 4;

/// A pair of bfloat16, or four bytes, or a sum.
type Quad = [u8; 4];

/// Sixteen lines of 64 bytes; bytes outside the shape are zero.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Tile([[Quad; QUADS]; ROWS]);

impl Tile {
    const ZERO: Tile = Tile([[[0; 4]; QUADS]; ROWS]);
}

/// The state of a thread's unit.
struct AmxState {
    shapes: Shapes,
    tiles: [Tile; TILES],
}

thread_local! {
    // No destructor and no lazy initialisation: a signal handler may access it.
    static AMX: UnsafeCell<AmxState> = const { UnsafeCell::new(AmxState { shapes: Shapes::NONE, tiles: [Tile::ZERO; TILES] }) };
}

static INSTALLED: OnceLock<()> = OnceLock::new();

/// Whether to emulate the unit even if the processor has one. A real unit faults, too, until the process asks the
/// system for it.
pub(super) fn forced() -> bool {
    env::var_os("EMULATE_AMX").is_some()
}

/// Installs the handler: from here on this process has a unit.
pub(super) fn install() {
    INSTALLED.get_or_init(|| {
        // SAFETY: the handler has the signature that the flag asks for, and touches nothing but its thread's unit, the interrupted
        // registers and the memory that the instruction names.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigill as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &raw const action, ptr::null_mut()), 0, "a handler for SIGILL");
        }
    });
}

/// Configures this thread's unit if it is emulated: a processor with a real unit loads a configuration without a fault.
pub(super) fn configure(shapes: &Shapes) -> bool {
    let emulated = INSTALLED.get().is_some();
    if emulated {
        let amx = AmxState { shapes: *shapes, tiles: [Tile::ZERO; TILES] };
        // The compiler does not know that the assembly around this call reads and writes the unit, too.
        compiler_fence(Ordering::SeqCst);
        // SAFETY: this thread is the only one to use its unit, and does nothing else with it.
        AMX.with(|at| unsafe { *at.get() = amx });
        compiler_fence(Ordering::SeqCst);
    }
    emulated
}

extern "C" fn on_sigill(_: i32, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system hands over the interrupted context, and this thread is the only one to use its unit.
    let done = unsafe {
        let registers = &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs;
        let code = registers[libc::REG_RIP as usize] as *const u8;
        AMX.with(|amx| run(&mut *amx.get(), code, registers)).inspect(|bytes| {
            registers[libc::REG_RIP as usize] += *bytes as greg_t;
        })
    };
    if done.is_none() {
        // SAFETY: the next fault, which is at once, ends the process.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
}

/// Executes the instruction at `code` and returns its length; none for other instructions, and for those that the unit would refuse.
///
/// # Safety
/// `code` points to an instruction, and what it reads and writes is the program's business.
unsafe fn run(amx: &mut AmxState, code: *const u8, registers: &[greg_t; 23]) -> Option<usize> {
    // SAFETY: an instruction has a byte; with this one (VEX) and an operand it has at least five.
    let [_, extension, prefix, opcode, operand] = unsafe {
        if code.read() != 0xc4 {
            return None;
        }
        code.cast::<[u8; BYTES]>().read()
    };
    // Opcode map 2, 128 bits wide, no W. There are only eight tiles.
    if extension & 0x9f != 0x82 || prefix & 0x84 != 0 {
        return None;
    }
    let (tile, other) = (usize::from(operand >> 3 & 7), usize::from(operand & 7));
    // The third operand is stored inverted; without one the field is 0.
    let third = usize::from(!(prefix >> 3) & 0xf);
    let in_memory = operand >> 6 != 3;
    if !in_memory && extension & 0x20 == 0 {
        return None;
    }
    // SAFETY: what describes the place is part of the instruction.
    let place = || unsafe { Place::of(code.add(HEAD_BYTES), extension, registers) };
    match (opcode, prefix & 3, in_memory, third) {
        (0x49, 0, false, 0) if operand == 0xc0 => {
            *amx = AmxState { shapes: Shapes::NONE, tiles: [Tile::ZERO; TILES] };
            Some(BYTES)
        }
        (0x49, 3, false, 0) if other == 0 => {
            amx.shape(tile)?;
            amx.tiles[tile] = Tile::ZERO;
            Some(BYTES)
        }
        (0x4b, 3, true, 0) => {
            let (place, (rows, bytes)) = (place()?, amx.shape(tile)?);
            amx.tiles[tile] = Tile::ZERO;
            for (number, row) in amx.tiles[tile].0[..rows].iter_mut().enumerate() {
                // SAFETY: the instruction reads these bytes.
                unsafe { ptr::copy_nonoverlapping(place.line(number), row.as_mut_ptr().cast(), bytes) };
            }
            Some(HEAD_BYTES + place.bytes)
        }
        (0x4b, 2, true, 0) => {
            let (place, (rows, bytes)) = (place()?, amx.shape(tile)?);
            for (number, row) in amx.tiles[tile].0[..rows].iter().enumerate() {
                // SAFETY: the instruction writes these bytes.
                unsafe { ptr::copy_nonoverlapping(row.as_ptr().cast(), place.line(number), bytes) };
            }
            Some(HEAD_BYTES + place.bytes)
        }
        (0x5c, 2, false, _) => amx.product([tile, other, third], bfloat16),
        (0x5e, 3, false, _) => amx.product([tile, other, third], |sum, a, b| bytes(sum, a, b, |b| i32::from(b as i8))),
        (0x5e, 2, false, _) => amx.product([tile, other, third], |sum, a, b| bytes(sum, a, b, i32::from)),
        _ => None,
    }
}

impl AmxState {
    /// Returns the rows of a tile and the bytes of a row.
    fn shape(&self, tile: usize) -> Option<(usize, usize)> {
        let (rows, bytes) = (usize::from(self.shapes.rows[tile]), usize::from(self.shapes.row_bytes[tile]));
        (rows > 0 && rows <= ROWS && bytes > 0 && bytes <= 4 * QUADS && bytes.is_multiple_of(4))
            .then_some((rows, bytes))
    }

    /// Updates the first of three tiles: `sum` adds the product of a row of the second and a column of the third.
    fn product(&mut self, [to, a, b]: [usize; 3], sum: impl Fn(Quad, &[Quad], &[Quad]) -> Quad) -> Option<usize> {
        if b >= TILES || to == a || to == b || a == b {
            return None;
        }
        let [(rows, bytes), (a_rows, a_bytes), (b_rows, b_bytes)] = [self.shape(to)?, self.shape(a)?, self.shape(b)?];
        if (a_rows, b_bytes, 4 * b_rows) != (rows, bytes, a_bytes) {
            return None;
        }
        let (left, right, mut sums) = (self.tiles[a], self.tiles[b], Tile::ZERO);
        for n in 0..bytes / 4 {
            let column = right.0.map(|row| row[n]);
            for row in 0..rows {
                sums.0[row][n] = sum(self.tiles[to].0[row][n], &left.0[row][..b_rows], &column[..b_rows]);
            }
        }
        self.tiles[to] = sums;
        Some(BYTES)
    }
}

/// Adds the products of a row's signed bytes and a column's bytes.
fn bytes(sum: Quad, row: &[Quad], column: &[Quad], value: impl Fn(u8) -> i32) -> Quad {
    let mut sum = i32::from_le_bytes(sum);
    for (a, b) in row.as_flattened().iter().zip(column.as_flattened()) {
        sum = sum.wrapping_add(i32::from(*a as i8) * value(*b));
    }
    sum.to_le_bytes()
}

/// Adds the products of pairs of bfloat16: the first elements into one sum, the second ones into another, from zero. Denormal numbers
/// count as zero.
fn bfloat16(sum: Quad, row: &[Quad], column: &[Quad]) -> Quad {
    let values = |pair: Quad| {
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

/// The memory operand of an instruction: base, scaled index and displacement. Lines are `stride` bytes apart.
struct Place {
    base: usize,
    stride: usize,
    /// Length of the operand's encoding: all bytes after the opcode.
    bytes: usize,
}

impl Place {
    /// Decodes the bytes after an opcode. Tile operands always have a base and an index.
    ///
    /// # Safety
    /// These bytes can be read.
    unsafe fn of(code: *const u8, extension: u8, registers: &[greg_t; 23]) -> Option<Place> {
        // SAFETY: the caller's word.
        let byte = |at: usize| unsafe { code.add(at).read() };
        // Bits of the extension are inverted.
        let number = |low: u8, high: u8| usize::from(low & 7) + if extension & high == 0 { 8 } else { 0 };
        let register = |number: usize| registers[REGISTERS[number] as usize] as usize;
        let (mode, sib) = (byte(0) >> 6, byte(1));
        // No base register: no code here uses this form.
        if byte(0) & 7 != 4 || mode == 0 && sib & 7 == 5 {
            return None;
        }
        let index = number(sib >> 3, 0x40);
        // The stack pointer's number means no index.
        let stride = if index == 4 { 0 } else { register(index) << (sib >> 6) };
        let (displacement, bytes) = match mode {
            0 => (0, 2),
            1 => (isize::from(byte(2) as i8), 3),
            _ => (i32::from_le_bytes([2, 3, 4, 5].map(byte)) as isize, 6),
        };
        let base = register(number(sib, 0x20)).wrapping_add_signed(displacement);
        Some(Place { base, stride, bytes })
    }

    fn line(&self, row: usize) -> *mut u8 {
        self.base.wrapping_add(row.wrapping_mul(self.stride)) as *mut u8
    }
}

/// Positions of the registers in a signal context, by their numbers in instructions.
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
