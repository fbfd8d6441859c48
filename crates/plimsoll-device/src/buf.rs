//! Handles of matrices in the step arena.

/// A matrix of f32 in the step arena, row-major. It is a handle: only the device that returned it can read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    /// Byte offset in the step arena.
    pub(crate) offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Buf {
    /// Returns the matrix at this byte of a device's step arena. Devices call it to hand out buffers.
    pub fn at(offset: usize, rows: usize, cols: usize) -> Self {
        Self { offset, rows, cols }
    }

    /// Byte offset in the step arena.
    pub fn offset(self) -> usize {
        self.offset
    }

    /// The same elements as rows of another width, for example one row per head.
    pub fn reshape(self, cols: usize) -> Buf {
        let elements = self.rows * self.cols;
        assert_eq!(elements % cols, 0, "{elements} elements in rows of {cols}");
        Buf { rows: elements / cols, cols, ..self }
    }

    /// Returns the first rows of the matrix.
    pub fn first(self, rows: usize) -> Buf {
        assert!(rows <= self.rows, "{rows} of {} rows", self.rows);
        Buf { rows, ..self }
    }

    /// Returns `rows` rows of the matrix, from `first` on.
    pub fn span(self, first: usize, rows: usize) -> Buf {
        assert!(first + rows <= self.rows, "{rows} rows from {first} of {}", self.rows);
        Buf { offset: self.offset + first * self.cols * size_of::<f32>(), rows, ..self }
    }

    /// Bytes of the matrix.
    pub fn bytes(self) -> usize {
        self.rows * self.cols * size_of::<f32>()
    }
}
