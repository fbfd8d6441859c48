//! The schemas of answers about the prefix cache on disk.

use super::schema::Object;

pub(super) const OBJECTS: &[Object] = &[
    ("SavedPrefix", &[("name", "string"), ("tokens", "integer"), ("created", "integer")]),
    ("PrefixDone", &[("object", "string"), ("name", "string"), ("tokens", "integer"), ("cached_tokens", "integer")]),
    ("PrefixRemoved", &[("object", "string"), ("name", "string")]),
    (
        "DiskCache",
        &[
            ("limit_bytes", "integer"),
            ("bytes", "integer"),
            ("files", "integer"),
            ("pinned_bytes", "integer"),
            ("waiting_parts", "integer"),
            ("hit_tokens", "integer"),
            ("read_bytes", "integer"),
            ("written_bytes", "integer"),
            ("write_amplification", "number"),
            ("read_bytes_per_second", "integer"),
            ("write_bytes_per_second", "integer"),
            ("hit_media", "integer"),
            ("kinds", "DiskKinds"),
            ("misses", "DiskMisses"),
        ],
    ),
    (
        "DiskKinds",
        &[("page", "DiskKind"), ("window_page", "DiskKind"), ("state", "DiskKind"), ("encoder_output", "DiskKind")],
    ),
    ("DiskKind", &[("files", "integer"), ("bytes", "integer"), ("hits", "integer"), ("misses", "integer")]),
    (
        "DiskMisses",
        &[
            ("gone", "integer"),
            ("damaged", "integer"),
            ("failed", "integer"),
            ("slow", "integer"),
            ("late", "integer"),
            ("room", "integer"),
            ("paused", "integer"),
        ],
    ),
];
