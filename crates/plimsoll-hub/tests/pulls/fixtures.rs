//! Shared parts of the tests: settings without the network, sample content, a recorder of progress, a fake pip.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use plimsoll_hub::{Cache, Entry, Progress, Settings, Source};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use zip::write::{SimpleFileOptions, ZipWriter};

/// Settings for an endpoint of the tests: without the machine's environment, and with short waits.
pub fn settings(endpoint: String) -> Settings {
    Settings {
        endpoint,
        token: None,
        root_certificates: None,
        pip: Vec::new(),
        connect_timeout: Duration::from_secs(2),
        read_timeout: Duration::from_secs(5),
        retry_pause: Duration::from_millis(1),
        pip_stall_timeout: Duration::from_secs(20),
    }
}

/// An endpoint with no server.
pub fn nowhere() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

pub fn cache() -> (TempDir, Cache) {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::at(&dir.path().join("cache")).unwrap();
    (dir, cache)
}

/// Pseudo-random bytes that do not repeat within any test's file.
pub fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// All files below a directory, relative, sorted; lock files are left out.
pub fn files_below(directory: &Path) -> Vec<String> {
    fn walk(directory: &Path, root: &Path, out: &mut Vec<String>) {
        let Ok(entries) = fs::read_dir(directory) else {
            return;
        };
        for path in entries.map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                walk(&path, root, out);
            } else if path.extension().is_none_or(|extension| extension != "lock") {
                let relative = path.strip_prefix(root).unwrap();
                out.push(relative.to_str().unwrap().to_owned());
            }
        }
    }
    let mut out = Vec::new();
    walk(directory, directory, &mut out);
    out.sort();
    out
}

/// Records notes, stages and bytes.
#[derive(Default)]
pub struct Recorder {
    pub notes: Vec<String>,
    pub stages: Vec<String>,
    /// Bytes of the current or last stage, with the total it announced.
    pub bytes: u64,
    pub total: Option<u64>,
    pub open: bool,
    /// The pull is cancelled after this many bytes.
    pub enough: Option<u64>,
}

impl Progress for Recorder {
    fn start(&mut self, what: &str, total: Option<u64>) {
        self.stages.push(what.to_owned());
        self.bytes = 0;
        self.total = total;
        self.open = true;
    }

    fn advance(&mut self, bytes: u64) {
        assert!(self.open, "bytes outside of a stage");
        self.bytes += bytes;
        assert!(self.total.is_none_or(|total| self.bytes <= total), "more than the whole");
    }

    fn done(&mut self) {
        self.open = false;
    }

    fn note(&mut self, line: &str) {
        self.notes.push(line.to_owned());
    }

    fn wanted(&self) -> bool {
        self.enough.is_none_or(|enough| self.bytes < enough)
    }
}

/// A catalogue entry for a content. Entries live as long as the program, so tests leak theirs.
pub fn entry(content: &[u8], sources: Vec<Source>) -> &'static Entry {
    Box::leak(Box::new(Entry {
        name: "sample",
        title: "A sample",
        licence: "none",
        file: "sample.gguf",
        bytes: content.len() as u64,
        sha256: Box::leak(sha256(content).into_boxed_str()),
        beside: &[],
        sources: Box::leak(sources.into_boxed_slice()),
    }))
}

/// A directory with a shell script that behaves like pip: it copies prepared files instead of downloading.
pub struct FakePip {
    pub directory: TempDir,
}

impl FakePip {
    /// `action` is shell code that runs for `download`, with `$dest` and `$requirement` set and the prepared files in `$here`.
    pub fn new(action: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let script = format!(
            "here='{}'\nif [ \"$1\" = --version ]; then exit 0; fi\n\
             for word; do dest=$requirement; requirement=$word; done\n\
             echo \"$@\" >> \"$here/calls\"\n{action}\n",
            directory.path().display()
        );
        fs::write(directory.path().join("pip.sh"), script).unwrap();
        Self { directory }
    }

    /// Creates a fake pip that copies the wheel prepared under the requirement's name, and fails if there is none.
    pub fn copying() -> Self {
        Self::new(
            "cp \"$here/$requirement.whl\" \"$dest/$requirement-py3-none-any.whl\" \
             || { echo \"ERROR: No matching distribution found for $requirement\" >&2; exit 1; }",
        )
    }

    pub fn command(&self) -> Vec<Vec<OsString>> {
        let script = self.directory.path().join("pip.sh");
        vec![vec!["no-such-program-at-all".into()], vec!["sh".into(), script.into()]]
    }

    /// Prepares a wheel with one member beside its metadata; returns the wheel's size.
    pub fn add_wheel(&self, requirement: &str, member: &str, content: &[u8]) -> u64 {
        self.add_wheel_of(requirement, &[(member, content)])
    }

    /// [`Self::add_wheel`] with several members.
    pub fn add_wheel_of(&self, requirement: &str, members: &[(&str, &[u8])]) -> u64 {
        let path = self.wheel_path(requirement);
        let mut wheel = ZipWriter::new(fs::File::create(&path).unwrap());
        let deflated = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
        wheel.start_file("sample.dist-info/WHEEL", deflated).unwrap();
        wheel.write_all(b"Wheel-Version: 1.0\n").unwrap();
        for (member, content) in members {
            wheel.start_file(*member, deflated).unwrap();
            wheel.write_all(content).unwrap();
        }
        wheel.finish().unwrap();
        fs::metadata(path).unwrap().len()
    }

    pub fn wheel_path(&self, requirement: &str) -> PathBuf {
        self.directory.path().join(format!("{requirement}.whl"))
    }

    /// The command lines so far.
    pub fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.directory.path().join("calls")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }
}
