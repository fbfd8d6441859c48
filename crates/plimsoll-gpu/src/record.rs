//! What a step will do, before it is sent to the device: dispatches in order, and the one block that is uploaded for them.

use crate::kernel::{PARAMS_MAX, Second};
use crate::segments::CALL_BYTES;

/// Bytes of what a kernel is told.
const PARAM_BYTES: usize = PARAMS_MAX * size_of::<u32>();

const _: () = assert!(size_of::<Call>() <= CALL_BYTES, "what a plan counts for a dispatch");

/// One dispatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    /// The number of its pipeline.
    pub pipeline: usize,
    /// The number of the second group: a segment of the weights, or a layer of the cache or of the states; none where the kernel has none.
    pub second: Option<(Second, usize)>,
    /// Workgroups along x and y.
    pub groups: [u32; 2],
    params: [u8; PARAM_BYTES],
    len: usize,
}

impl Call {
    /// What the kernel is told.
    pub fn params(&self) -> &[u8] {
        &self.params[..self.len]
    }
}

impl Call {
    /// Word `i` of what the kernel is told.
    pub fn word(&self, i: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|byte| self.params[4 * i + byte]))
    }

    /// Another number for it.
    pub fn set_word(&mut self, i: usize, word: u32) {
        self.params[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
    }
}

/// The dispatches of a step, and what is sent with them. Both keep their room from step to step.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub calls: Vec<Call>,
    /// Bytes that are sent.
    pub sent: Vec<u8>,
}

impl Record {
    /// Room for `calls` dispatches and `upload` bytes.
    pub fn new(calls: usize, upload: usize) -> Self {
        Self { calls: Vec::with_capacity(calls), sent: Vec::with_capacity(upload) }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.calls.clear();
        self.sent.clear();
    }

    /// Adds words to what is sent; returns where they begin, in words.
    pub fn send(&mut self, words: impl Iterator<Item = u32>) -> u32 {
        let at = self.sent.len() / size_of::<u32>();
        words.for_each(|word| self.sent.extend_from_slice(&word.to_le_bytes()));
        at as u32
    }

    /// Words that are sent so far.
    pub fn words(&self) -> u32 {
        (self.sent.len() / size_of::<u32>()) as u32
    }

    /// What was sent from word `at` on.
    pub fn since(&self, at: u32) -> &[u8] {
        &self.sent[at as usize * size_of::<u32>()..]
    }

    /// Sends no more than so many words.
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
