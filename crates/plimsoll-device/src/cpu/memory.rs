//! Memory of one pool build: KV cache, recurrent states and the step's workspace.

use std::sync::Arc;

use plimsoll_memory::step::StepStack;
use plimsoll_memory::{Component, Ledger, OutOfMemory, Region};

use super::{attention, states};
use crate::kv::{KvGroup, KvShape, ModelShape, StateShape, encoder_layout};

/// Bytes of per-thread scratch beside a step's temporaries: attention tiles, one row being normalised, a tile of state.
pub fn scratch_bytes(shape: &ModelShape, threads: usize) -> usize {
    threads * thread_scratch_floats(shape) * size_of::<f32>()
}

fn thread_scratch_floats(shape: &ModelShape) -> usize {
    let layers = shape.kv.layers().iter();
    let attention = layers.map(|layer| attention::scratch_floats(&layer.layout, layer.queries, shape.bf16)).max();
    let state = shape.state.as_ref().map_or(0, states::scratch_floats);
    let encoder = shape.encoder.map_or(0, |encoder| {
        let layout = encoder_layout(1, encoder.head_dim());
        attention::scratch_floats(&layout, encoder.queries, false).max(2 * encoder.widest)
    });
    let indexes = shape.kv.layers().iter().filter_map(|layer| layer.index);
    // The sum of a block, one key, cosines and sines: three times the width at most.
    let index = indexes.map(|index| 3 * index.width).max();
    attention.max(index).unwrap_or(0).max(shape.hidden).max(state).max(encoder).next_multiple_of(16)
}

/// KV cache, recurrent states and step workspace of one pool build.
pub struct CpuMemory {
    /// Pages of the whole context, then those of the window group.
    pub(super) kv: Region,
    pub(super) shape: KvShape,
    pages: [usize; 2],
    /// Whether attention can be rounded.
    pub(super) bf16: bool,
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
    /// Maps a pool of `pages` pages and a workspace of `workspace` bytes, scratch for `threads` threads included. `slots` are slots of
    /// state for a model with recurrent state, and pages of the window group for a model with such a group.
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
        let pages = [pages, if shape.kv.window().is_some() { slots } else { 0 }];
        let kv = Region::map(ledger, Component::KvPages, shape.kv.bytes(pages[0], pages[1]) as u64, touch)?;
        let slots = shape.state.map(|state| (slots * state.slot_bytes()) as u64);
        let states = slots.map(|bytes| Region::map(ledger, Component::StateSlots, bytes, touch)).transpose()?;
        let workspace = Region::map(ledger, Component::StepWorkspace, workspace as u64, true)?;
        let scratch = thread_scratch_floats(shape);
        let scratch_at = workspace.len().saturating_sub(scratch_bytes(shape, threads)) / 64 * 64;
        Ok(Self {
            kv,
            shape: shape.kv.clone(),
            pages,
            bf16: shape.bf16,
            states,
            state_shape: shape.state,
            workspace,
            stack: StepStack::new(scratch_at),
            scratch,
            scratch_at,
        })
    }

    /// Pages of a group's pool.
    pub fn pages(&self, group: KvGroup) -> usize {
        self.pages[group as usize]
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

    /// The bytes of a group's pages.
    pub(super) fn bytes_of(&self, group: KvGroup) -> std::ops::Range<usize> {
        let whole = self.shape.bytes(self.pages[0], 0);
        match group {
            KvGroup::Whole => 0..whole,
            KvGroup::Window => whole..self.shape.bytes(self.pages[0], self.pages[1]),
        }
    }

    /// Bytes of one page of a group.
    pub fn page_bytes(&self, group: KvGroup) -> usize {
        self.shape.page_bytes(group)
    }

    /// Bytes of one state slot; 0 for a model without recurrent state.
    pub fn slot_bytes(&self) -> usize {
        self.state_shape.map_or(0, |shape| shape.slot_bytes())
    }

    /// Returns the range of a page in the region of the KV cache.
    fn page_at(&self, group: KvGroup, page: usize) -> std::ops::Range<usize> {
        assert!(page < self.pages(group), "page {page} of {}", self.pages(group));
        let bytes = self.shape.page_bytes(group);
        let first = self.bytes_of(group).start + page * bytes;
        first..first + bytes
    }

    /// The bytes of a page, to copy them.
    pub fn page(&self, group: KvGroup, page: usize) -> &[u8] {
        &self.kv.bytes()[self.page_at(group, page)]
    }

    /// Returns the bytes of a page, to write a copy into them.
    pub fn page_mut(&mut self, group: KvGroup, page: usize) -> &mut [u8] {
        let at = self.page_at(group, page);
        &mut self.kv.bytes_mut()[at]
    }

    /// The bytes of a state slot, to copy them; empty for a model without recurrent state.
    pub fn slot(&self, slot: usize) -> &[u8] {
        let bytes = self.slot_bytes();
        self.states.as_ref().map_or(&[], |states| &states.bytes()[slot * bytes..][..bytes])
    }

    /// Returns the bytes of a state slot, to write a copy into them; empty for a model without recurrent state.
    pub fn slot_mut(&mut self, slot: usize) -> &mut [u8] {
        let bytes = self.slot_bytes();
        self.states.as_mut().map_or(&mut [], |states| &mut states.bytes_mut()[slot * bytes..][..bytes])
    }

    /// Returns the physical memory of neighbouring pages of a group to the system (elastic mode); their contents are lost.
    pub fn decommit_pages(&mut self, group: KvGroup, pages: std::ops::Range<usize>) {
        let (first, bytes) = (self.bytes_of(group).start, self.shape.page_bytes(group));
        self.kv.decommit(first + pages.start * bytes..first + pages.end * bytes);
    }
}
