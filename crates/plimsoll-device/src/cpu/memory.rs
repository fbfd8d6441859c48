//! What belongs to one generation: keys, values, recurrent states and the step's workspace.

use std::sync::Arc;

use plimsoll_kernels::KvLayout;
use plimsoll_memory::step::StepStack;
use plimsoll_memory::{Component, Ledger, OutOfMemory, Region};

use super::{attention, delta};
use crate::kv::{KvShape, ModelShape, StateShape, encoder_layout};

/// Bytes of per-thread scratch that a step needs beside its temporaries: attention tiles, one row being normalised, a tile of state.
pub fn scratch_bytes(shape: &ModelShape, threads: usize) -> usize {
    threads * thread_scratch_floats(shape) * size_of::<f32>()
}

fn thread_scratch_floats(shape: &ModelShape) -> usize {
    let attention = attention::scratch_floats(&shape.kv.layout(), shape.heads / shape.kv.kv_heads, shape.rounded);
    let state = shape.state.as_ref().map_or(0, delta::scratch_floats);
    let encoder = shape.encoder.map_or(0, |encoder| {
        attention::scratch_floats(&encoder_layout(1, encoder.head_dim), 1, false).max(2 * encoder.widest)
    });
    attention.max(shape.hidden).max(state).max(encoder).next_multiple_of(16)
}

/// Keys, values, recurrent states and step workspace of one generation.
pub struct CpuMemory {
    pub(super) kv: Region,
    pub(super) shape: KvShape,
    pub(super) layout: KvLayout,
    /// Whether attention can be rounded.
    pub(super) rounded: bool,
    /// None for a model without recurrent state.
    pub(super) states: Option<Region>,
    pub(super) state_shape: Option<StateShape>,
    pub(super) workspace: Region,
    pub(super) stack: StepStack,
    /// Floats of each thread's scratch, at the end of the workspace.
    pub(super) scratch: usize,
    pub(super) scratch_at: usize,
}

impl CpuMemory {
    /// Maps a pool of `pages` pages, `slots` slots of state (for a model that has one) and a workspace of `workspace` bytes, scratch
    /// for `threads` threads included.
    ///
    /// `touch`: pages and slots are committed now, not on first use.
    pub fn map(
        ledger: &Arc<Ledger>,
        shape: &ModelShape,
        pages: usize,
        slots: usize,
        workspace: usize,
        threads: usize,
        touch: bool,
    ) -> Result<Self, OutOfMemory> {
        let kv = Region::map(ledger, Component::KvPages, (pages * shape.kv.page_bytes()) as u64, touch)?;
        let slots = shape.state.map(|state| (slots * state.slot_bytes()) as u64);
        let states = slots.map(|bytes| Region::map(ledger, Component::StateSlots, bytes, touch)).transpose()?;
        let workspace = Region::map(ledger, Component::StepWorkspace, workspace as u64, true)?;
        let scratch = thread_scratch_floats(shape);
        let scratch_at = workspace.len().saturating_sub(scratch_bytes(shape, threads)) / 64 * 64;
        Ok(Self {
            kv,
            shape: shape.kv,
            layout: shape.kv.layout(),
            rounded: shape.rounded,
            states,
            state_shape: shape.state,
            workspace,
            stack: StepStack::new(scratch_at),
            scratch,
            scratch_at,
        })
    }

    /// Pages of the pool.
    pub fn pages(&self) -> usize {
        self.kv.len().checked_div(self.shape.page_bytes()).unwrap_or(0)
    }

    /// Slots of recurrent state; 0 for a model without.
    pub fn slots(&self) -> usize {
        let bytes = self.states.as_ref().map_or(0, |states| states.len());
        self.state_shape.map_or(0, |shape| bytes / shape.slot_bytes())
    }

    /// The most bytes of workspace that steps have used, scratch included.
    pub fn workspace_peak(&self) -> usize {
        self.stack.high_water() + (self.workspace.len() - self.scratch_at)
    }

    /// Gives the physical memory of neighbouring pages back (elastic mode); their contents are lost.
    pub fn decommit_pages(&mut self, pages: std::ops::Range<usize>) {
        let bytes = self.shape.page_bytes();
        self.kv.decommit(pages.start * bytes..pages.end * bytes);
    }
}
