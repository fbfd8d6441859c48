//! How a model names tables of which steps read single rows.

use plimsoll_kernels::{PANEL, Packing};

use super::{Declare, pack_kind};
use crate::weights::{DeclareError, FileTable, Form, InFile, LinearId, TableKind};

impl Declare<'_> {
    /// A table with a row of width `k` for each token, of which steps read single rows.
    pub fn token_table(&mut self, name: &str, rows: usize, k: usize) -> Result<LinearId, DeclareError> {
        Ok(self.table(&[(name.to_owned(), rows)], k, TableKind::Tokens)?[0])
    }

    /// A table of rows of width `k`, of which steps read single rows. `parts` has the matrices that make it up, each with its rows. All of it
    /// stays in the model's files if tables of its kind do, and if each of its rows can be read by itself.
    pub fn table(
        &mut self,
        parts: &[(String, usize)],
        k: usize,
        kind: TableKind,
    ) -> Result<Vec<LinearId>, DeclareError> {
        let first = self.table.linears.len();
        let ids = parts.iter().map(|(name, rows)| self.encoding(name, &[*rows, k]).map(|_| (name, *rows)));
        let parts = ids.collect::<Result<Vec<_>, _>>()?;
        let row_bytes: Option<Vec<usize>> = parts.iter().map(|(name, rows)| self.row_bytes(name, *rows, k)).collect();
        let row_bytes = row_bytes.filter(|bytes| bytes.iter().all(|other| *other == bytes[0]));
        let stays = row_bytes.filter(|_| self.tables.in_file(kind)).and_then(|bytes| bytes.first().copied());
        let Some(row_bytes) = stays else {
            return parts.iter().map(|(name, rows)| self.linear(name, *rows, k)).collect();
        };
        let (table, mut before) = (self.table.file_tables.len(), 0);
        for (name, rows) in &parts {
            let (encoding, form) = (self.encoding(name, &[*rows, k])?, Form::Rows(Box::default()));
            let in_file = Some(InFile { table, first: before });
            self.push_matrix(name, encoding, form, (*rows, k), None, in_file)?;
            before += rows;
        }
        let parts = first..self.table.linears.len();
        self.table.file_tables.push(FileTable { parts: parts.clone(), rows: before, row_bytes });
        Ok(parts.map(LinearId).collect())
    }

    /// Bytes of a row of a tensor that can be read row by row.
    fn row_bytes(&self, name: &str, rows: usize, k: usize) -> Option<usize> {
        match self.tensor(name) {
            Some(info) => {
                self.checkpoint.has_plain_rows(&self.full(name)).then(|| (info.bytes / rows.max(1) as u64) as usize)
            }
            // A configuration alone: as many as memory would take.
            None => Packing::new(pack_kind(&self.encoding(name, &[rows, k]).ok()?, self.policy, k), rows, k)
                .ok()
                .map(|packing| packing.bytes() / rows.next_multiple_of(PANEL)),
        }
    }
}
