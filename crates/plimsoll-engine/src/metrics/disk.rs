//! Metrics of the cache on disk.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The kinds of files of the cache on disk, by the last byte of their names.
pub const DISK_KINDS: [&str; plimsoll_tier::KINDS] = ["page", "window_page", "state", "encoder_output"];

/// Why a file, or a medium, was not read.
pub(crate) const CAUSES: [&str; 6] = ["gone", "damaged", "failed", "slow", "late", "paused"];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Cause {
    kind: &'static str,
    cause: &'static str,
}

/// Metrics by kind.
#[derive(Clone, Debug, Default)]
pub struct KindMetrics {
    hits: Family<Kind, Counter>,
    misses: Family<Cause, Counter>,
    files: Family<Kind, Gauge>,
    bytes: Family<Kind, Gauge>,
}

impl KindMetrics {
    /// Files that were read of a kind.
    pub fn hits(&self, kind: usize) -> Counter {
        self.hits.get_or_create(&Kind { kind: DISK_KINDS[kind] }).clone()
    }

    /// Files of a kind that could not be read. For encoder outputs also media that were not read, because reading was slower than
    /// encoding, took too long, or was paused.
    pub fn misses(&self, kind: usize, cause: &'static str) -> Counter {
        self.misses.get_or_create(&Cause { kind: DISK_KINDS[kind], cause }).clone()
    }

    /// The misses of a kind for all causes.
    pub fn all_misses(&self, kind: usize) -> u64 {
        CAUSES.into_iter().map(|cause| self.misses(kind, cause).get()).sum()
    }

    /// Files of a kind, and their bytes of the disk.
    pub fn held(&self, kind: usize) -> [Gauge; 2] {
        [&self.files, &self.bytes].map(|held| held.get_or_create(&Kind { kind: DISK_KINDS[kind] }).clone())
    }

    fn register(&self, registry: &mut Registry) {
        let help = "Files read from the cache on disk, by kind";
        registry.register("plimsoll_prefix_disk_hits", help, self.hits.clone());
        let help =
            "Files of the cache on disk that could not be read; for encoder_output also media that were not read";
        registry.register("plimsoll_prefix_disk_misses", help, self.misses.clone());
        registry.register("plimsoll_prefix_disk_kind_files", "Files of the cache on disk, by kind", self.files.clone());
        let help = "Bytes of the disk that files of the cache take, by kind";
        registry.register("plimsoll_prefix_disk_kind_bytes", help, self.bytes.clone());
    }
}

/// Counters and gauges of the cache on disk; zeros without one.
#[derive(Clone, Debug, Default)]
pub struct DiskMetrics {
    /// Prompt tokens that were read from the disk.
    pub tokens: Counter,
    /// Bytes read.
    pub read_bytes: Counter,
    /// Files that were gone.
    pub gone: Counter,
    /// Files with a wrong length, header or checksum.
    pub damaged: Counter,
    /// Files that the system could not read.
    pub failed: Counter,
    /// Prefixes that were faster to compute than to read.
    pub slow: Counter,
    /// Prefixes that were given up because the disk took too long.
    pub late: Counter,
    /// Prefixes without free pages, because running requests needed them.
    pub room: Counter,
    /// Prefixes not read because the disk took too long for another one shortly before.
    pub paused: Counter,
    /// Bytes of the disk that were written.
    pub written_bytes: Counter,
    /// Bytes of KV pages, states and encoder outputs in them.
    pub payload_bytes: Counter,
    /// Files removed to stay below the bound.
    pub collected: Counter,
    /// Parts larger than the bound.
    pub too_large: Counter,
    /// Parts not written because the day's write limit was reached.
    pub day_limit: Counter,
    /// Parts that the system could not write.
    pub unwritten: Counter,
    /// Parts that left memory before they were written.
    pub lost: Counter,
    /// Media with encoder outputs that were read from the disk.
    pub media: Counter,
    /// Metrics for each kind of file.
    pub kinds: KindMetrics,
    /// Files.
    pub files: Gauge,
    /// Bytes of the disk that they take.
    pub bytes: Gauge,
    /// Bytes a second of reads.
    pub read_rate: Gauge,
    /// Bytes a second of writes.
    pub write_rate: Gauge,
    /// Bytes of pinned files.
    pub pinned: Gauge,
    /// Parts in memory that wait for a buffer of the disk's thread.
    pub waiting: Gauge,
}

const COUNTERS: [(&str, &str); 17] = [
    ("tokens", "Prompt tokens read back from the prefix cache on disk"),
    ("read_bytes", "Bytes read from the cache on disk"),
    ("misses_gone", "Files of the cache on disk that were gone"),
    ("misses_damaged", "Files of the cache on disk with a wrong length, header or checksum"),
    ("misses_failed", "Files of the cache on disk that the system could not read"),
    ("misses_slow", "Prefixes on disk that were faster to compute than to read"),
    ("misses_late", "Prefixes that the disk took too long for"),
    ("misses_room", "Prefixes that were not read because running requests needed the pages"),
    ("misses_paused", "Prefixes that were not read because the disk took too long for another one shortly before"),
    ("written_bytes", "Bytes of the disk that were written, failed attempts included"),
    (
        "payload_bytes",
        "Bytes of keys, values, states and encoder outputs written; written_bytes over these is the write amplification",
    ),
    ("collected_files", "Files removed to stay below --cache-bytes"),
    ("unwritten_too_large", "Parts that were larger than --cache-bytes"),
    ("unwritten_day_limit", "Parts not written because of --cache-write-bytes-per-day"),
    ("unwritten_failed", "Parts that the system could not write"),
    ("unwritten_lost", "Parts that left memory before they were written"),
    ("media", "Images, videos and audio clips whose encoder outputs were read back"),
];

const GAUGES: [(&str, &str); 6] = [
    ("files", "Files of the cache on disk"),
    ("bytes", "Bytes of the disk that the cache takes"),
    ("read_bytes_per_second", "Rate of the last reads from the cache on disk"),
    ("write_bytes_per_second", "Rate of the last writes to the cache on disk"),
    ("pinned_bytes", "Bytes of the disk that pinned prefixes take"),
    ("waiting_parts", "Parts of prefixes and encoder outputs in memory that wait for a buffer of the disk's thread"),
];

impl DiskMetrics {
    /// The counters, in the order in which they are registered.
    pub(crate) fn counters(&self) -> [&Counter; 17] {
        [
            &self.tokens,
            &self.read_bytes,
            &self.gone,
            &self.damaged,
            &self.failed,
            &self.slow,
            &self.late,
            &self.room,
            &self.paused,
            &self.written_bytes,
            &self.payload_bytes,
            &self.collected,
            &self.too_large,
            &self.day_limit,
            &self.unwritten,
            &self.lost,
            &self.media,
        ]
    }

    /// The gauges, in the order in which they are registered.
    pub(crate) fn gauges(&self) -> [&Gauge; 6] {
        [&self.files, &self.bytes, &self.read_rate, &self.write_rate, &self.pinned, &self.waiting]
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        self.kinds.register(registry);
        for ((name, help), counter) in COUNTERS.into_iter().zip(self.counters()) {
            registry.register(format!("plimsoll_prefix_disk_{name}"), help, counter.clone());
        }
        for ((name, help), gauge) in GAUGES.into_iter().zip(self.gauges()) {
            registry.register(format!("plimsoll_prefix_disk_{name}"), help, gauge.clone());
        }
    }
}
