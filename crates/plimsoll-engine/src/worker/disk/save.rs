//! Saves new parts of the prefix cache to disk, after the step that computed them.

use super::Disk;
use crate::cache::{KvCache, Part};
use crate::runner::Runner;

/// States and window pages first: memory has few of them, so they are evicted soonest.
const ORDER: [Part; 3] = [Part::State, Part::Window, Part::Whole];

impl Disk {
    /// Copies parts that are not on disk into free buffers. Not while files are read that may turn out to be damaged: their replacements
    /// would count as on disk.
    pub(super) fn save<R: Runner>(&mut self, cache: &mut KvCache, runner: &mut R) {
        if self.outstanding > 0 {
            return;
        }
        for part in ORDER {
            let Some(class) = self.class_of[part as usize] else { continue };
            while let Some((id, link)) = cache.next_unsaved(part, &mut self.lost) {
                let name = self.name(&link, part);
                if !self.tier.contains(&name) && !self.tier.write(class, &name, |bytes| runner.save(part, id, bytes)) {
                    break;
                }
                cache.saved(part);
            }
        }
        if !self.pins.is_empty() {
            let all = cache.unsaved() == 0 && self.tier.writing() == 0;
            self.apply_pins(all);
        }
    }
}
