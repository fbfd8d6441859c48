//! The sidecar `plimsoll.json` of a cache directory: the pulls into it, and the verified files with their times.
//!
//! A file is not read again at start-up if its size and modification time are as recorded; otherwise it is. The marker
//! is trusted no further: it is a file like others and may be damaged. So names in it are checked, and an
//! unreadable marker counts as none. That costs a new verification and nothing else.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::path::Path;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::disk::read_bounded;
use crate::error::HubError;
use crate::names::{MARKER_FILE, check_file};

/// The largest marker that is read, in bytes.
const MARKER_BYTES_MAX: u64 = 16 << 20;
/// The layout of the sidecar; another number counts as no marker.
const MARKER_VERSION: u32 = 1;

/// Content of the sidecar.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Marker {
    version: u32,
    /// Requests of users, with their results.
    pub(crate) pulls: Vec<Pull>,
    /// Verified files by name relative to the directory.
    pub(crate) files: BTreeMap<String, FileRecord>,
}

/// One completed pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pull {
    /// The canonical spelling of the request.
    pub(crate) request: String,
    /// The answer: a file relative to the directory, or empty for the directory itself.
    pub(crate) path: String,
    /// All files it consists of.
    pub(crate) files: Vec<String>,
    /// Their source, for display.
    pub(crate) source: String,
}

/// Properties of a file when it was verified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    /// Its size.
    pub(crate) bytes: u64,
    /// Its modification time in nanoseconds since 1970; 0 if the system has none.
    pub(crate) modified_ns: u64,
    /// Its SHA-256, in lowercase hexadecimal.
    pub(crate) sha256: String,
    /// The hub's own name for the content, if the hub gives no SHA-256. A new name means that the hub's file has
    /// changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) blob: Option<String>,
}

impl Marker {
    /// Reads the marker of a directory; an absent or unusable one becomes an empty one.
    pub(crate) fn load(directory: &Path) -> Self {
        let usable = |marker: &Self| {
            marker.version == MARKER_VERSION
                && marker.files.keys().all(|name| check_file(name).is_ok())
                && marker.pulls.iter().all(|pull| {
                    (pull.path.is_empty() || pull.files.contains(&pull.path))
                        && pull.files.iter().all(|name| marker.files.contains_key(name))
                })
        };
        read_bounded(&directory.join(MARKER_FILE), MARKER_BYTES_MAX)
            .ok()
            .flatten()
            .and_then(|json| serde_json::from_slice(&json).ok())
            .filter(usable)
            .unwrap_or_else(|| Self { version: MARKER_VERSION, ..Self::default() })
    }

    /// Returns the sidecar's text.
    pub(crate) fn to_json(&self) -> Vec<u8> {
        // Strings, numbers, lists and string-keyed maps always serialize.
        serde_json::to_vec_pretty(self).unwrap_or_default()
    }

    /// Returns the completed pull of that request.
    pub(crate) fn pull(&self, request: &str) -> Option<&Pull> {
        self.pulls.iter().find(|pull| pull.request == request)
    }

    /// Records a completed pull, in place of an earlier one of the same request.
    pub(crate) fn set_pull(&mut self, pull: Pull) {
        self.pulls.retain(|other| other.request != pull.request);
        self.pulls.push(pull);
    }

    /// Removes the record of a file, and every pull that needs it.
    pub(crate) fn forget_file(&mut self, name: &str) {
        self.files.remove(name);
        self.pulls.retain(|pull| !pull.files.iter().any(|file| file == name));
    }

    /// Removes the record of every file that no pull needs; returns their names.
    pub(crate) fn forget_orphans(&mut self) -> Vec<String> {
        let Self { pulls, files, .. } = self;
        let needed = |name: &String| pulls.iter().any(|pull| pull.files.contains(name));
        let orphans: Vec<String> = files.keys().filter(|name| !needed(name)).cloned().collect();
        files.retain(|name, _| !orphans.contains(name));
        orphans
    }

    /// Whether all files of a pull are unchanged since they were verified, judged by size and time.
    pub(crate) fn is_intact(&self, directory: &Path, pull: &Pull) -> bool {
        pull.files.iter().all(|name| self.files.get(name).is_some_and(|record| record.matches(&directory.join(name))))
    }
}

impl FileRecord {
    /// Returns the record of a file that has just been verified to have this sum.
    pub(crate) fn of(path: &Path, sha256: String, blob: Option<String>) -> Result<Self, HubError> {
        let metadata = fs::metadata(path).map_err(HubError::io("inspect", path))?;
        Ok(Self { bytes: metadata.len(), modified_ns: modified_ns(&metadata), sha256, blob })
    }

    /// Whether the file has the recorded size and time.
    pub(crate) fn matches(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|metadata| {
            metadata.is_file() && metadata.len() == self.bytes && modified_ns(&metadata) == self.modified_ns
        })
    }
}

fn modified_ns(metadata: &Metadata) -> u64 {
    metadata
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .and_then(|since| u64::try_from(since.as_nanos()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(directory: &Path) -> Marker {
        let path = directory.join("m.gguf");
        fs::write(&path, b"abc").unwrap();
        let mut marker = Marker::load(directory);
        marker.files.insert("m.gguf".to_owned(), FileRecord::of(&path, "00".repeat(32), None).unwrap());
        marker.set_pull(Pull {
            request: "m".to_owned(),
            path: "m.gguf".to_owned(),
            files: vec!["m.gguf".to_owned()],
            source: "a test".to_owned(),
        });
        marker
    }

    #[test]
    fn a_changed_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let marker = sample(dir.path());
        fs::write(dir.path().join(MARKER_FILE), marker.to_json()).unwrap();
        let marker = Marker::load(dir.path());
        let pull = marker.pull("m").unwrap();
        assert!(marker.is_intact(dir.path(), pull));
        let file = fs::File::options().write(true).open(dir.path().join("m.gguf")).unwrap();
        file.set_modified(UNIX_EPOCH + std::time::Duration::from_secs(1)).unwrap();
        assert!(!marker.is_intact(dir.path(), pull));
        fs::remove_file(dir.path().join("m.gguf")).unwrap();
        assert!(!marker.is_intact(dir.path(), pull));
    }

    #[test]
    fn a_hostile_or_damaged_marker_counts_as_none() {
        let dir = tempfile::tempdir().unwrap();
        let good = String::from_utf8(sample(dir.path()).to_json()).unwrap();
        for bad in [
            "",
            "{",
            "null",
            &good.replace("m.gguf", "../m.gguf"),
            &good.replace("\"version\": 1", "\"version\": 2"),
            &good.replace("\"path\": \"m.gguf\"", "\"path\": \"/etc/passwd\""),
        ] {
            fs::write(dir.path().join(MARKER_FILE), bad).unwrap();
            assert!(Marker::load(dir.path()).pulls.is_empty(), "{bad}");
        }
        fs::write(dir.path().join(MARKER_FILE), good).unwrap();
        assert_eq!(Marker::load(dir.path()).pulls.len(), 1);
    }
}
