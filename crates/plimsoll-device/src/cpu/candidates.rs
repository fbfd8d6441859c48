//! The greatest elements of rows. The CPU's own sampler reads whole rows and needs no candidates; this is the reference for other devices.

use super::CpuDevice;
use crate::device::Buf;

impl CpuDevice {
    /// [`Device::candidates`](crate::Device::candidates).
    pub(super) fn find_candidates(&mut self, out: Buf, x: Buf, counts: &[u32]) {
        assert_eq!(counts.len(), x.rows, "a count for every row");
        let mut place = 0;
        for (row, count) in counts.iter().enumerate() {
            let mut last = None;
            for _ in 0..*count {
                let found = next(self.row_mut(x, row), last);
                let entry = found.map_or([0.0, -1.0], |(logit, id)| [logit, id as f32]);
                self.row_mut(out, place).copy_from_slice(&entry);
                last = found.or(last);
                place += 1;
            }
        }
        assert_eq!(place, out.rows, "a row for every candidate");
    }
}

/// Returns the greatest element behind `last`. Elements are ordered by size; equal ones by column.
fn next(logits: &[f32], last: Option<(f32, usize)>) -> Option<(f32, usize)> {
    let numbers = logits.iter().copied().enumerate().filter(|(_, logit)| *logit > f32::NEG_INFINITY);
    let behind = numbers
        .filter(|(id, logit)| last.is_none_or(|(least, last_id)| *logit < least || (*logit == least && *id > last_id)));
    behind.fold(None, |best, (id, logit)| match best {
        Some((greatest, _)) if logit <= greatest => best,
        _ => Some((logit, id)),
    })
}

#[cfg(test)]
mod tests {
    use super::next;

    #[test]
    fn order_is_by_size_then_column_and_leaves_out_what_is_no_number() {
        let logits = [1.0, f32::NAN, -0.0, 3.0, 0.0, f32::NEG_INFINITY, 3.0, f32::INFINITY];
        let mut found = Vec::new();
        let mut last = None;
        while let Some((_, id)) = next(&logits, last) {
            found.push(id);
            last = Some((logits[id], id));
        }
        assert_eq!(found, [7, 3, 6, 0, 2, 4]);
    }
}
