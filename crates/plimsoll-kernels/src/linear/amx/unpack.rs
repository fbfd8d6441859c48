//! Unpacks codes and scales of a few groups of a few panels for the matrix unit and the vector units.

use super::{AHEAD, Part, Scratch};
use crate::isa::Kernel;
use crate::linear::codes;
use crate::linear::quant::Job;
use crate::packing::{BLOCK, PANEL, SUPER};
use crate::simd::{Simd, Words};

/// Writes codes and scales of a part in the layouts of the matrix unit and the vector units.
pub(super) struct Unpack<'a, const CODE: u8, const HALVES: bool, const OFFSET: bool, const P: usize> {
    pub(super) job: &'a Job<'a>,
    pub(super) part: Part,
    /// The bfloat16 value of each code; none for codes that stay bytes.
    pub(super) table: Option<&'a Words>,
    pub(super) scratch: *mut Scratch,
}

impl<const CODE: u8, const HALVES: bool, const OFFSET: bool, const P: usize> Kernel
    for Unpack<'_, CODE, HALVES, OFFSET, P>
{
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Unpack { job, part, table, scratch } = self;
        let packing = job.weights.packing;
        let block_bytes = codes::block_bytes(CODE);
        let scale_bytes = job.quant.super_bytes() * BLOCK / SUPER;
        let (per_block, quads) = if HALVES { (2, 4) } else { (1, 8) };
        // SAFETY: `Job::by_panels` only makes parts within the matrix, laid out as `packing` says, of at most `GROUPS` groups.
        unsafe {
            for p in 0..P {
                let panel = job.weights.data.as_ptr().add((part.panel + p) * packing.panel_bytes());
                let scales = panel.add(packing.k() / BLOCK * block_bytes);
                for g in 0..part.len {
                    let group = part.first + g;
                    self.prefetch(s, panel, group, scale_bytes);
                    let block = panel.add(group / per_block * block_bytes);
                    // The table already has the levels.
                    let all = match table {
                        Some(_) => codes::unpack::<S, CODE>(s, block),
                        None => codes::levels::<S, CODE>(s, block, job.quant.levels()),
                    };
                    let to = (&raw mut (*scratch).codes[g][p]).cast::<u8>();
                    for quad in 0..quads {
                        let codes = all[group % per_block * quads + quad];
                        match table {
                            Some(table) if codes::bits(CODE) > 5 => {
                                s.store_words::<true>(to.add(128 * quad), table, codes)
                            }
                            Some(table) => s.store_words::<false>(to.add(128 * quad), table, codes),
                            None => s.store_bytes(to.add(64 * quad), s.sub_bytes(codes, job.quant.zero)),
                        }
                    }
                    let (scale, offset) = codes::scales::<S, HALVES, OFFSET>(s, &job.quant, scales, group);
                    let to = (&raw mut (*scratch).scales[g][p]).cast::<f32>();
                    s.store(to, scale);
                    s.store(to.add(PANEL), offset);
                }
            }
        }
    }
}

impl<const CODE: u8, const HALVES: bool, const OFFSET: bool, const P: usize> Unpack<'_, CODE, HALVES, OFFSET, P> {
    /// Prefetches the block that a later part will unpack: further along the panel, or, near its end, at the beginning of the panel that
    /// comes next. A block has `scale_bytes` of scales.
    #[inline(always)]
    fn prefetch<S: Simd>(&self, s: S, panel: *const u8, group: usize, scale_bytes: usize) {
        let packing = self.job.weights.packing;
        let (blocks, ahead) = (packing.k() / BLOCK, (group + AHEAD) / if HALVES { 2 } else { 1 });
        let (panel, block) = if ahead < blocks {
            (panel, ahead)
        } else {
            (panel.wrapping_add(P * packing.panel_bytes()), ahead % blocks)
        };
        codes::prefetch_block::<S, CODE>(s, panel, packing.k(), block, scale_bytes);
    }
}
