//! Pages of a mapped file that count as memory of a component.
//!
//! The system counts such pages as available: it can drop them and read them again. A component that needs them in every step must not
//! share them with other plans. The ledger therefore commits them, and [`OwnProcess`](crate::host::OwnProcess) counts them as memory of
//! this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{Component, Ledger, OutOfMemory};

/// Bytes of all held pages in this process.
static HELD: AtomicU64 = AtomicU64::new(0);

/// Bytes of a mapped file that are committed for a component as long as this value lives.
#[derive(Debug)]
pub struct HeldFile {
    component: Component,
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl HeldFile {
    /// Commits `bytes` for `component`.
    ///
    /// # Errors
    /// [`OutOfMemory::Sealed`] after the ledger was sealed ("ready").
    pub fn commit(ledger: &Arc<Ledger>, component: Component, bytes: u64) -> Result<Self, OutOfMemory> {
        if !ledger.count_allocation() {
            return Err(OutOfMemory::Sealed { component: component.name(), bytes });
        }
        ledger.commit(component, bytes);
        ledger.add_held_file(bytes);
        HELD.fetch_add(bytes, Relaxed);
        Ok(Self { component, ledger: Arc::clone(ledger), bytes })
    }

    /// Bytes of all held pages in this process.
    pub(crate) fn in_process() -> u64 {
        HELD.load(Relaxed)
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        HELD.fetch_sub(self.bytes, Relaxed);
        self.ledger.remove_held_file(self.bytes);
        self.ledger.release(self.component, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{OwnProcess, Root};

    #[test]
    fn pages_of_a_file_count_as_memory_of_the_process_while_they_are_held() {
        const BYTES: u64 = 1 << 20;
        let ledger = Arc::new(Ledger::new());
        ledger.plan(Component::Weights, BYTES);
        let held = HeldFile::commit(&ledger, Component::Weights, BYTES).unwrap();
        let own = OwnProcess::read(&Root::system());
        assert_eq!((own.held_file, ledger.held_files(), ledger.mapped_total()), (BYTES, BYTES, BYTES));
        assert_eq!(own.leak_gauge() - own.rss_anon - own.vm_swap, BYTES);
        assert_eq!(own.resident_owned() - own.rss_anon - own.rss_shmem, BYTES);
        drop(held);
        assert_eq!((OwnProcess::read(&Root::system()).held_file, ledger.committed_total()), (0, 0));
        ledger.seal();
        assert!(matches!(HeldFile::commit(&ledger, Component::Weights, 1), Err(OutOfMemory::Sealed { .. })));
    }
}
