//! The workspace as threads share it: rows by number, each written by one task at a time.
//!
//! The borrow checker cannot follow rows that tasks divide among themselves. This is the one place where a promise replaces it:
//! every caller says in a SAFETY line why it keeps the promise.

use plimsoll_memory::Region;

use crate::device::Buf;

/// A view of the workspace region for the length of one operation.
#[derive(Clone, Copy)]
pub(super) struct Arena {
    base: *mut u8,
    /// Bytes of the part that holds matrices.
    len: usize,
    /// Floats of each thread's scratch, behind the matrices.
    scratch: usize,
}

// SAFETY: the pointer is used through `row`, `scratch` and `bytes`; their callers promise disjoint use.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    pub fn new(region: &mut Region, len: usize, scratch: usize) -> Self {
        assert!(len <= region.len(), "matrices end inside the region");
        Self { base: region.as_mut_ptr(), len, scratch }
    }

    /// Row `row` of `x`.
    ///
    /// # Safety
    /// `x` lies in the region and has this row, the region outlives the slice, and no other slice of this row is alive.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn row<'a>(&self, x: Buf, row: usize) -> &'a mut [f32] {
        debug_assert!(row < x.rows && x.offset + x.bytes() <= self.len);
        // SAFETY: inside the region, since `x` was handed out by its stack and has this row; aligned, since matrices start on cache
        // lines; any bits are an f32.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(x).add(row * x.cols), x.cols) }
    }

    /// Columns `first..first + width` of row `row` of `x`.
    ///
    /// # Safety
    /// `x` lies in the region and has this row, the region outlives the slice, and no other slice of these elements is alive.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part<'a>(&self, x: Buf, row: usize, first: usize, width: usize) -> &'a mut [f32] {
        debug_assert!(row < x.rows && x.offset + x.bytes() <= self.len);
        assert!(first + width <= x.cols, "columns {first}.. of {}", x.cols);
        // SAFETY: as in `row`.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(x).add(row * x.cols + first), width) }
    }

    /// All elements of `x`, to read.
    ///
    /// # Safety
    /// As for [`Self::row`], for every row, but other readers may be alive.
    pub unsafe fn matrix<'a>(&self, x: Buf) -> &'a [f32] {
        debug_assert!(x.offset + x.bytes() <= self.len);
        // SAFETY: as in `row`.
        unsafe { std::slice::from_raw_parts(self.pointer(x), x.rows * x.cols) }
    }

    /// Bytes `offset..offset + len` of the workspace.
    ///
    /// # Safety
    /// The region outlives the slice, and no other slice of these bytes is alive.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes<'a>(&self, offset: usize, len: usize) -> &'a mut [u8] {
        assert!(offset + len <= self.len, "inside the workspace");
        // SAFETY: inside the region.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset), len) }
    }

    /// `len` words from byte `offset` of the workspace.
    ///
    /// # Safety
    /// As for [`Self::bytes`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn words<'a>(&self, offset: usize, len: usize) -> &'a mut [u32] {
        // SAFETY: this function's contract; every bit pattern is a word, and the assertion checks alignment.
        let (before, words, after) = unsafe { self.bytes(offset, len * size_of::<u32>()).align_to_mut() };
        assert!(before.is_empty() && after.is_empty(), "words are aligned");
        words
    }

    /// The scratch of `thread`.
    ///
    /// # Safety
    /// The region outlives the slice, and `thread` is the caller's own number in the pool for which the region was sized.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn scratch<'a>(&self, thread: usize) -> &'a mut [f32] {
        // SAFETY: this function's contract; scratch lies behind the matrices, one part a thread.
        unsafe {
            let first = self.base.add(self.len).cast::<f32>().add(thread * self.scratch);
            std::slice::from_raw_parts_mut(first, self.scratch)
        }
    }

    /// Returns `len` floats from `offset` of the scratch of all threads, taken as one piece.
    ///
    /// # Safety
    /// They are within it, the region outlives the slice, and no other slice of these floats is alive.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn all_scratch<'a>(&self, offset: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: this function's contract; scratch lies behind the matrices.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(self.len).cast::<f32>().add(offset), len) }
    }

    /// Byte `offset` of the workspace.
    pub fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len, "inside the workspace");
        self.base.wrapping_add(offset)
    }

    /// The first element of `x`.
    pub fn pointer(&self, x: Buf) -> *mut f32 {
        self.at(x.offset).cast()
    }
}
