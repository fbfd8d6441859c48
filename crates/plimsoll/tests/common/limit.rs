//! A memory cgroup around processes: a limit that is set from outside and that the kernel enforces. `tools/cage.sh`
//! creates it.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::product::{cache, plimsoll, repository};

/// A script of this repository.
pub fn tool(name: &str) -> PathBuf {
    repository().join("tools").join(name)
}

/// Prints a notice straight to the standard error, past the test harness, so that it cannot be overlooked.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A memory cgroup. It is removed, with all its processes, when it is dropped.
pub struct Cage(pub String);

impl Cage {
    /// Creates a cgroup with this limit. Without cgroups on this machine, prints a notice and returns none.
    pub fn open(name: &str, bytes: u64) -> Option<Self> {
        let output = Command::new(tool("cage.sh")).args(["open", name, &bytes.to_string()]).output().unwrap();
        if output.status.success() {
            return Some(Self(text(&output.stdout).trim().to_owned()));
        }
        say(&format!(
            "\n*** NOT RUN: {name}. NO MEMORY CGROUP CAN BE MADE HERE: {} ***\n",
            text(&output.stderr).trim()
        ));
        None
    }

    /// The binary, run inside the cgroup.
    pub fn plimsoll(&self, args: &[&str]) -> Command {
        let inner = plimsoll(args);
        let mut command = Command::new(tool("cage.sh"));
        command.arg("run").arg(&self.0).arg(inner.get_program()).args(inner.get_args());
        command.env("PLIMSOLL_CACHE", cache()).env_remove("RUST_LOG").env("RUST_BACKTRACE", "0").stdin(Stdio::null());
        command
    }

    /// Changes the limit.
    pub fn limit(&self, bytes: u64) {
        let done = Command::new(tool("cage.sh")).args(["limit", &self.0, &bytes.to_string()]).status().unwrap();
        assert!(done.success(), "the limit was moved to {bytes}");
    }

    /// Limit and peak in bytes, and the number of OOM kills, as `cage.sh report` prints them.
    pub fn report(&self) -> [u64; 3] {
        let output = Command::new(tool("cage.sh")).args(["report", &self.0]).output().unwrap();
        let words = text(&output.stdout);
        let number = |key: &str| {
            let at = words.split_ascii_whitespace().skip_while(|word| *word != key).nth(1);
            at.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{key}: {words}"))
        };
        [number("limit"), number("peak"), number("oom_kills")]
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        let _ = Command::new(tool("cage.sh")).args(["close", &self.0]).status();
    }
}

/// Bytes as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
