//! Declaration of tables from which steps read single rows.

use plimsoll_formats::Encoding;
use plimsoll_kernels::{PANEL, Packing};

use super::{Declare, pack_kind};
use crate::weights::{DeclareError, DtypePolicy, FileTable, Form, InFile, LinearId, TableKind};

impl Declare<'_> {
    /// Declares a table with a row of width `k` for each token, from which steps read single rows.
    pub fn token_table(&mut self, name: &str, rows: usize, k: usize) -> Result<LinearId, DeclareError> {
        Ok(self.table(&[(name.to_owned(), rows)], k, TableKind::Tokens)?[0].1)
    }

    /// Declares a table of rows of width `k`, from which steps read single rows. `parts` has the matrices that make it up, each with its
    /// rows. The whole table stays in the model's files if tables of its kind do, if each of its rows can be read by itself, and if the
    /// policy changes none of its values. Returns each part with the number of its first row.
    pub fn table(
        &mut self,
        parts: &[(String, usize)],
        k: usize,
        kind: TableKind,
    ) -> Result<Vec<(usize, LinearId)>, DeclareError> {
        let stays = if self.tables.in_file(kind) { self.row_bytes_of_all(parts, k)? } else { None };
        let table = self.table.file_tables.len();
        let before: usize = self.table.file_tables.iter().map(|table| table.parts).sum();
        let (mut declared, mut first) = (Vec::with_capacity(parts.len()), 0);
        for (name, rows) in parts {
            let encoding = self.encoding(name, &[*rows, k])?;
            let in_file = stays.map(|_| InFile { table, first, tensor: before + declared.len() });
            let id = self.push_matrix(name, encoding, Form::Rows(Box::default()), (*rows, k), None, in_file)?;
            declared.push((first, id));
            first += rows;
        }
        if let Some(row_bytes) = stays {
            self.table.file_tables.push(FileTable { parts: parts.len(), rows: first, width: k, row_bytes });
        }
        Ok(declared)
    }

    /// Returns the bytes of a stored row, if all parts have rows of one size that can stay in files.
    fn row_bytes_of_all(&self, parts: &[(String, usize)], k: usize) -> Result<Option<usize>, DeclareError> {
        let mut all = None;
        for (name, rows) in parts {
            let encoding = self.encoding(name, &[*rows, k])?;
            let rounds = self.policy == DtypePolicy::Bf16 && matches!(encoding, Encoding::F32 | Encoding::F16);
            let own = self.row_bytes(name, *rows, k).filter(|_| !rounds);
            if own.is_none() || all.is_some_and(|all| Some(all) != own) {
                return Ok(None);
            }
            all = own;
        }
        Ok(all)
    }

    /// Bytes of a row of a tensor that can be read row by row.
    fn row_bytes(&self, name: &str, rows: usize, k: usize) -> Option<usize> {
        match self.tensor(name) {
            Some(info) => {
                self.checkpoint.has_plain_rows(&self.full(name)).then(|| (info.bytes / rows.max(1) as u64) as usize)
            }
            // A configuration alone: as many bytes as in memory.
            None => Packing::new(pack_kind(&self.encoding(name, &[rows, k]).ok()?, self.policy, k), rows, k)
                .ok()
                .map(|packing| packing.bytes() / rows.next_multiple_of(PANEL)),
        }
    }
}
