//! The memory of the prefix cache on disk. It holds buffers to and from the disk, the index of blobs, and the links of the prefix that is
//! being read. The lists of blobs to write and to pin count as well.

use plimsoll_device::{KvGroup, ModelShape, PAGE_TOKENS};
use plimsoll_media::ContentKey;
use plimsoll_memory::{Bytes, Component, PlanLine};
use plimsoll_tier::{Class, Index, Name};

use crate::api::options::Options;
use crate::cache::{Link, Part, PinEnd};
use crate::media::MediaPlan;

/// Bytes of pages in flight in one direction.
const BUFFERS_BYTES: usize = 8 << 20;
/// The most blobs that the index has room for.
const ENTRIES_MAX: usize = 1 << 18;
/// The most media with encoder outputs that wait to be written.
pub(crate) const OUTPUTS_MAX: usize = 256;
/// The smallest file.
const BLOCK_BYTES: usize = 4096;

/// Buffers and index of a prefix cache on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskPlan {
    /// Buffers for each kind of part that the model has, in the order of [`Part::ALL`].
    pub classes: Vec<Class>,
    /// For each [`Part`], the index of its class in `classes`.
    pub class_of: [Option<usize>; 3],
    /// The index in `classes` of pages of encoder outputs.
    pub output_class: Option<usize>,
    /// Blobs in the index.
    pub entries: usize,
    /// Whether prefixes are always read from disk, whatever reading costs.
    pub read_always: bool,
    /// Bytes of memory of all these.
    pub bytes: u64,
}

/// Returns a class. Each direction has as many buffers of this size as fit into [`BUFFERS_BYTES`], at least 1 and at most `most`.
fn class(bytes: usize, most: usize) -> Class {
    let count = (BUFFERS_BYTES / bytes).clamp(1, most);
    Class { bytes, writes: count, reads: count }
}

/// The most parts that wait to be pinned: all parts of the longest prompt.
pub(crate) fn pins_max(context: usize) -> usize {
    Part::ALL.len() * context.div_ceil(PAGE_TOKENS)
}

impl DiskPlan {
    /// Plans the cache. `None` without `--cache-dir`, or for a model without a cache.
    pub fn new(options: &Options, shape: &ModelShape, context: usize, media: Option<&MediaPlan>) -> Option<Self> {
        let disk = options.disk_cache.as_ref()?;
        let sizes = Part::ALL.map(|part| match part {
            Part::Whole => shape.kv.page_bytes(KvGroup::Whole),
            Part::Window => shape.kv.page_bytes(KvGroup::Window),
            Part::State => shape.state.map_or(0, |state| state.slot_bytes()),
        });
        let (mut classes, mut class_of) = (Vec::new(), [None; 3]);
        for (part, bytes) in Part::ALL.into_iter().zip(sizes).filter(|(_, bytes)| *bytes > 0) {
            class_of[part as usize] = Some(classes.len());
            classes.push(class(bytes, if part == Part::State { 4 } else { 64 }));
        }
        let output_class = media.map(|media| {
            classes.push(class(media.output_page_bytes(), 64));
            classes.len() - 1
        });
        let least = classes.iter().map(|class| class.bytes).min()?.max(BLOCK_BYTES);
        let most = usize::try_from(disk.bytes / least as u64).unwrap_or(usize::MAX);
        let entries = most.clamp(16, ENTRIES_MAX);
        let links = 2 * context.div_ceil(PAGE_TOKENS) * size_of::<Link>()
            + pins_max(context) * size_of::<(Name, PinEnd)>()
            + output_class.map_or(0, |_| OUTPUTS_MAX * size_of::<(ContentKey, usize)>());
        let buffers: usize = classes.iter().map(Class::total_bytes).sum();
        let bytes = (buffers + Index::bytes_for(entries) + links) as u64;
        Some(Self { classes, class_of, output_class, entries, read_always: disk.read_always, bytes })
    }

    /// Returns the cache's line of the plan.
    pub fn line(&self) -> PlanLine {
        let count = |(at, class): (usize, &Class)| {
            let of = if self.output_class == Some(at) { " for encoder outputs" } else { "" };
            format!("{} buffers x {}{of}", class.reads + class.writes, Bytes(class.bytes as u64))
        };
        let buffers: Vec<String> = self.classes.iter().enumerate().map(count).collect();
        let detail = format!("{}, an index of {} files", buffers.join(", "), self.entries);
        PlanLine { component: Component::DiskCache, bytes: self.bytes, detail }
    }
}
