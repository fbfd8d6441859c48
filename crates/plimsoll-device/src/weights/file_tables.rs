//! Tables that stay in the model's files: a step reads single rows of them, and a cache of planned size keeps the latest ones.

use super::WeightTable;

/// Rows of a set of the cache: a row may be in any slot of its set.
pub(crate) const WAYS: usize = 8;
/// Most rows of a table's cache: the bits above are for the state of a row that is looked up.
const CACHED_MAX: usize = 1 << 30;
/// Bytes beside each cached row: its number, and the batch of its last use.
pub(crate) const TAG: usize = 8;
/// Most bytes of caches, unless more are configured.
const USUAL_CACHE_MAX: u64 = 1 << 30;
/// A table's cache starts on a cache line.
const ALIGN: usize = 64;

/// The place of tables from which a step reads single rows: embeddings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TablePlace {
    /// All in memory.
    #[default]
    Memory,
    /// Tables of n-grams in the model's files, where they are several times as large as the rest of the model; others in memory.
    Auto,
    /// All in the model's files, where these store rows one by one.
    File,
}

impl std::str::FromStr for TablePlace {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "memory" => Ok(Self::Memory),
            "auto" => Ok(Self::Auto),
            "file" => Ok(Self::File),
            _ => Err(format!("unknown place for tables '{name}': use auto, file or memory")),
        }
    }
}

/// The kind of a table, by its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableKind {
    /// Tokens.
    Tokens,
    /// N-grams of tokens.
    Ngrams,
}

impl TablePlace {
    /// Whether tables of this kind stay in files.
    pub(super) fn in_file(self, kind: TableKind) -> bool {
        match self {
            Self::Memory => false,
            Self::Auto => kind == TableKind::Ngrams,
            Self::File => true,
        }
    }
}

/// A table that stays in the model's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTable {
    /// Number of matrices that make up its rows: neighbours in [`WeightTable::linears`].
    pub parts: usize,
    /// Rows of all parts.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
    /// Bytes of a row, as it is stored.
    pub row_bytes: usize,
}

/// The place of a matrix that stays in the model's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFile {
    /// The table that it is part of ([`WeightTable::file_tables`]).
    pub table: usize,
    /// The table's row number of the matrix's first row.
    pub first: usize,
    /// Its number among all matrices in files.
    pub tensor: usize,
}

/// Sizes of the caches of a model's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableCacheSize {
    /// Bytes of all caches.
    pub bytes: usize,
    /// Rows that fit into all caches.
    pub rows: usize,
}

/// The cache of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheLayout {
    /// Rows that fit into the cache: a multiple of [`WAYS`].
    pub slots: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Offset of the rows. Their tags follow.
    pub at: usize,
}

impl CacheLayout {
    /// Offset of the tags.
    pub fn tags_at(&self) -> usize {
        self.at + (self.slots * self.row_bytes).next_multiple_of(ALIGN)
    }

    /// Returns the offset behind the cache.
    pub fn end(&self) -> usize {
        (self.tags_at() + self.slots * TAG).next_multiple_of(ALIGN)
    }
}

impl WeightTable {
    /// Returns the table with `asked` bytes of caches, all together, for tables that stay in files. Each table gets a share by its size.
    /// Without a number: a quarter of the tables, at most a GiB.
    pub fn with_table_cache(self, asked: Option<u64>) -> Self {
        Self { table_cache: asked, ..self }
    }

    /// Returns the number of matrices that are loaded into memory.
    pub fn loaded(&self) -> usize {
        self.linears.iter().filter(|linear| linear.in_file.is_none()).count()
    }

    /// The tables that stay in the model's files.
    pub fn file_tables(&self) -> &[FileTable] {
        &self.file_tables
    }

    /// Bytes of these tables in the files.
    pub fn file_table_bytes(&self) -> u64 {
        self.file_tables.iter().map(|table| table.rows as u64 * table.row_bytes as u64).sum()
    }

    /// Returns the bytes that each thread takes to read rows: one stored row and one decoded row. Buffers of decoded rows grow by doubling.
    pub fn row_reader_bytes(&self) -> usize {
        self.file_tables.iter().map(|table| table.row_bytes + 2 * size_of::<f32>() * table.width).max().unwrap_or(0)
    }

    /// Returns the size of the caches for `asked` bytes, as in [`WeightTable::with_table_cache`]. It is at most the size of all rows, and
    /// at least some rows of each table.
    pub fn table_cache_size(&self, asked: Option<u64>) -> TableCacheSize {
        let (mut bytes, mut rows) = (0, 0);
        for layout in self.cache_layouts(asked) {
            (bytes, rows) = (layout.end(), rows + layout.slots);
        }
        TableCacheSize { bytes, rows }
    }

    /// Bytes of the caches of this table.
    pub fn table_cache_bytes(&self) -> usize {
        self.table_cache_size(self.table_cache).bytes
    }

    /// The caches of all tables of this one, one after another.
    pub(crate) fn caches(&self) -> impl Iterator<Item = CacheLayout> {
        self.cache_layouts(self.table_cache)
    }

    fn cache_layouts(&self, asked: Option<u64>) -> impl Iterator<Item = CacheLayout> {
        let whole = self.file_table_bytes();
        let asked = asked.unwrap_or((whole / 4).min(USUAL_CACHE_MAX));
        let whole = u128::from(whole.max(1));
        let mut at = 0;
        self.file_tables.iter().map(move |table| {
            let bytes = table.rows as u128 * table.row_bytes as u128;
            let share = (u128::from(asked) * bytes / whole) as usize;
            let slots = (share / (table.row_bytes + TAG)).min(table.rows.next_multiple_of(WAYS)).min(CACHED_MAX);
            let layout = CacheLayout { slots: (slots / WAYS).max(1) * WAYS, row_bytes: table.row_bytes, at };
            at = layout.end();
            layout
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(tables: &[(usize, usize)], bytes: u64) -> WeightTable {
        let file_tables = tables
            .iter()
            .map(|&(rows, row_bytes)| FileTable { parts: 1, rows, width: row_bytes / 2, row_bytes })
            .collect();
        WeightTable { file_tables, ..WeightTable::default() }.with_table_cache(Some(bytes))
    }

    #[test]
    fn caches_share_what_is_given_by_size() {
        let table = with(&[(1000, 256), (3000, 256)], 264 * 400);
        let slots: Vec<usize> = table.caches().map(|layout| layout.slots).collect();
        assert_eq!(slots, [96, 296], "a hundred and three hundred, in whole sets");
        assert!(table.table_cache_bytes() <= 264 * 400);
        assert_eq!(table.file_table_bytes(), 4000 * 256);
        assert_eq!(table.row_reader_bytes(), 256 + 8 * 128);
        assert_eq!(table.table_cache_size(None), table.table_cache_size(Some(1000 * 256)), "a quarter");
        let large = with(&[(1 << 30, 256)], 0);
        assert_eq!(large.table_cache_size(None), large.table_cache_size(Some(1 << 30)), "a GiB");
    }

    #[test]
    fn no_cache_is_larger_than_its_table_or_empty() {
        let slots = |bytes| with(&[(1001, 64)], 0).table_cache_size(Some(bytes)).rows;
        assert_eq!((slots(0), slots(1 << 40)), (WAYS, 1008));
        assert_eq!(with(&[], 1 << 30).table_cache_bytes(), 0);
    }
}
