//! Products ready to run, and what they are products of.

use std::fmt;
use std::ops::Range;
use std::sync::LazyLock;

use divan::black_box;
use plimsoll_kernels::*;

use crate::{Aligned, isa};

/// Columns of every matrix, a multiple of 32.
static COLUMNS: LazyLock<usize> = LazyLock::new(|| match std::env::var("K") {
    Ok(columns) => match columns.parse() {
        Ok(columns) if (BLOCK..=1 << 16).contains(&columns) && columns.is_multiple_of(BLOCK) => columns,
        _ => panic!("K: {columns} columns, where a multiple of {BLOCK} up to 65536 is asked for"),
    },
    Err(_) => 4096,
});

pub fn k() -> usize {
    *COLUMNS
}

const fn quant(bits: u8, group: u8, scales: PackScales, zero: u8, offset: bool) -> PackKind {
    PackKind::Quant(QuantPacking { bits, group, scales, zero, offset, codebook: None })
}

pub const Q4_0: PackKind = quant(4, 32, PackScales::F16, 8, false);

/// Levels of 4-bit codes; benches measure no values.
const fn book(scales: PackScales, step: u8) -> PackKind {
    let mut codebook = [0; 16];
    let mut code = 0;
    while code < 16 {
        codebook[code] = code as u8 * step;
        code += 1;
    }
    let zero = codebook[8];
    PackKind::Quant(QuantPacking { bits: 4, group: 32, scales, zero, offset: false, codebook: Some(codebook) })
}

const KINDS: [(&str, PackKind); 12] = [
    ("q4_0", Q4_0),
    ("iq4_nl", book(PackScales::F16, 16)),
    ("iq4_xs", book(PackScales::Super, 16)),
    ("mxfp4", book(PackScales::E8m0Half, 1)),
    ("q4_1", quant(4, 32, PackScales::F16, 0, true)),
    ("q4_k", quant(4, 32, PackScales::Super, 0, true)),
    ("q5_k", quant(5, 32, PackScales::Super, 0, true)),
    ("q6_k", quant(6, 16, PackScales::Super, 32, false)),
    ("q8_0", quant(8, 32, PackScales::F16, 128, false)),
    ("f16", PackKind::F16),
    ("bf16", PackKind::Bf16),
    ("f32", PackKind::F32),
];

/// Weights of a kind, and how many rows they meet; none: they are only read.
#[derive(Clone, Copy)]
pub struct Case {
    name: &'static str,
    pub kind: PackKind,
    pub rows: usize,
}

// The table sorts by these names.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rows {
            0 => write!(f, "{}, read", self.name),
            rows => write!(f, "{}, rows {rows}", self.name),
        }
    }
}

/// All kinds with each of these numbers of rows.
pub fn cases(rows: &[usize]) -> Vec<Case> {
    KINDS.iter().flat_map(|&(name, kind)| rows.iter().map(move |&rows| Case { name, kind, rows })).collect()
}

/// Of those kinds alone that meet quantized rows.
pub fn quantized_cases(rows: &[usize]) -> Vec<Case> {
    cases(rows).into_iter().filter(|case| matches!(case.kind, PackKind::Quant(_))).collect()
}

/// Rows, quantized if the weights ask for it, and room for their results.
pub struct Product<'a> {
    packing: &'a Packing,
    rows: usize,
    x: Vec<f32>,
    acts: Prepared,
    y: Vec<f32>,
}

/// Rows as the weights want them.
enum Prepared {
    Floats,
    Quantized(ActLayout, Aligned<u8>),
    Bf16Rows(Bf16Layout, Aligned<u8>),
}

impl<'a> Product<'a> {
    pub fn new(packing: &'a Packing, rows: usize) -> Product<'a> {
        let tiled = isa() == Isa::Amx && packing.takes_tiles();
        Product::of(packing, rows, if tiled { ActForm::Tiled } else { ActForm::Words })
    }

    /// Of rows of 8 bits.
    pub fn eight_bits(packing: &'a Packing, rows: usize) -> Product<'a> {
        Product::of(packing, rows, ActForm::Bytes)
    }

    fn of(packing: &'a Packing, rows: usize, form: ActForm) -> Product<'a> {
        let k = packing.k();
        let x: Vec<f32> = (0..rows * k).map(|i| ((i * 7919) as f32 * 1e-3).sin()).collect();
        let mut acts = Prepared::Floats;
        if packing.takes_acts() {
            let layout = ActLayout { rows, k, form };
            let mut buffer = Aligned::new(layout.bytes(), |_| 0);
            for (x, row) in x.chunks(k).zip(buffer.chunks_exact_mut(layout.row_bytes())) {
                quantize_acts(isa(), layout, x, row);
            }
            acts = Prepared::Quantized(layout, buffer);
        }
        Product { packing, rows, x, acts, y: vec![0.0; rows * packing.out()] }
    }

    /// Of a prompt's rows.
    pub fn bf16(packing: &'a Packing, rows: usize) -> Product<'a> {
        let mut product = Product::new(packing, rows);
        let layout = Bf16Layout { rows, k: packing.k() };
        let mut buffer = Aligned::new(layout.bytes(), |_| 0);
        for (row, x) in product.x.chunks_exact(layout.k).enumerate() {
            // SAFETY: the buffer is whole and borrowed mutably.
            unsafe { round_row(isa(), layout, x, buffer.as_mut_ptr(), row) };
        }
        product.acts = Prepared::Bf16Rows(layout, buffer);
        product
    }

    /// Multiplies by `panels` of the matrix in `data`.
    pub fn run(&mut self, data: &[u8], panels: Range<usize>) {
        let packing = self.packing;
        let weights = Weights { packing, data, bias: None };
        let target = Target { ptr: self.y.as_mut_ptr(), ld: packing.out(), mode: Mode::Store };
        let run = |input| {
            // SAFETY: `y` has all rows and outputs, and is borrowed mutably.
            unsafe { linear(isa(), &weights, input, panels, 0..self.rows, target) }
        };
        match &self.acts {
            Prepared::Floats => run(Input::F32 { data: &self.x, ld: packing.k() }),
            Prepared::Quantized(layout, buffer) => run(Input::Acts(&Acts::new(*layout, buffer))),
            Prepared::Bf16Rows(layout, buffer) => run(Input::Bf16(&Bf16Acts::new(*layout, buffer))),
        }
        black_box(&self.y);
    }
}
