//! A step before its submission: dispatches in order, and the one block that is uploaded for them.

use crate::kernel::{PARAMS_MAX, Second};
use crate::segments::CALL_BYTES;

/// Bytes of a kernel's parameters.
const PARAM_BYTES: usize = PARAMS_MAX * size_of::<u32>();

const _: () = assert!(size_of::<Call>() <= CALL_BYTES, "what a plan counts for a dispatch");

/// One dispatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// The number of its pipeline.
    pub pipeline: usize,
    /// Kind and index of the second group: a segment of the weights, or a layer of the cache or of the states; none for a kernel without.
    pub second: Option<(Second, usize)>,
    /// Workgroups along x and y.
    pub groups: [u32; 2],
    params: [u8; PARAM_BYTES],
    len: usize,
}

impl Call {
    /// Returns the kernel's parameters.
    pub fn params(&self) -> &[u8] {
        &self.params[..self.len]
    }
}

impl Call {
    /// Returns word `i` of the kernel's parameters.
    pub fn word(&self, i: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|byte| self.params[4 * i + byte]))
    }

    /// Replaces word `i` of the kernel's parameters.
    pub fn set_word(&mut self, i: usize, word: u32) {
        self.params[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
    }
}

/// The dispatches of a step, and its upload. Both keep their allocations from step to step.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub calls: Vec<Call>,
    /// The uploaded bytes.
    pub sent: Vec<u8>,
}

impl Record {
    /// Returns an empty record with room for `calls` dispatches and `upload` bytes.
    pub fn new(calls: usize, upload: usize) -> Self {
        Self { calls: Vec::with_capacity(calls), sent: Vec::with_capacity(upload) }
    }

    /// Clears dispatches and upload.
    pub fn clear(&mut self) {
        self.calls.clear();
        self.sent.clear();
    }

    /// Appends words to the upload; returns their offset, in words.
    pub fn send(&mut self, words: impl Iterator<Item = u32>) -> u32 {
        let at = self.sent.len() / size_of::<u32>();
        words.for_each(|word| self.sent.extend_from_slice(&word.to_le_bytes()));
        at as u32
    }

    /// Returns the words in the upload so far.
    pub fn words(&self) -> u32 {
        (self.sent.len() / size_of::<u32>()) as u32
    }

    /// Returns the upload from word `at` on.
    pub fn since(&self, at: u32) -> &[u8] {
        &self.sent[at as usize * size_of::<u32>()..]
    }

    /// Cuts the upload to `words` words.
    pub fn cut(&mut self, words: u32) {
        self.sent.truncate(words as usize * size_of::<u32>());
    }

    /// Adds a dispatch, unless it has no workgroup.
    pub fn call(&mut self, pipeline: usize, second: Option<(Second, usize)>, groups: [u32; 2], params: &[u32]) {
        if groups.contains(&0) {
            return;
        }
        let mut bytes = [0; PARAM_BYTES];
        bytes.chunks_exact_mut(4).zip(params).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        self.calls.push(Call { pipeline, second, groups, params: bytes, len: size_of_val(params) });
    }
}
