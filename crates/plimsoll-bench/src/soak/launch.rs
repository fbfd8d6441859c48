//! The scenario's server: started inside the limits that the scenario sets, ended with the soak.
//!
//! A memory cgroup comes from `tools/cage.sh`, which is built into the program; a small disk is a tmpfs. Both need root. Without them
//! the server runs unlimited: standard error says it in capitals, and the verdict names it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::disk_cache::DiskCache;
use super::scenario::Server;

/// The script that makes memory cgroups.
const CAGE: &str = include_str!("../../../../tools/cage.sh");

/// Bytes added to the cgroup's limit for a balloon.
const BALLOON_BYTES: u64 = 256 << 20;

/// A server must be ready within this time after its start.
const READY_WITHIN: Duration = Duration::from_secs(600);

/// A server must end within this time after SIGTERM, its wait for running requests included.
const ENDED_WITHIN: Duration = Duration::from_secs(60);

/// A running server with everything around it.
pub struct Launched {
    child: Child,
    scratch: Scratch,
    /// The URL at which it listens.
    pub url: String,
    /// Names of the limits that could not be put around it.
    pub without: Vec<String>,
    /// Its prefix cache on disk.
    pub cache: Option<DiskCache>,
}

/// A directory of this soak, with its mount and its cgroup. All are removed when it is dropped.
struct Scratch {
    folder: PathBuf,
    mounted: bool,
    cage: Option<String>,
}

impl Scratch {
    fn new() -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("plimsoll-soak-{}", std::process::id()));
        let scratch = Self { folder, mounted: false, cage: None };
        let disk = scratch.disk();
        fs::create_dir_all(&disk).with_context(|| disk.display().to_string())?;
        Ok(scratch)
    }

    fn disk(&self) -> PathBuf {
        self.folder.join("disk")
    }

    /// Returns the start of a command line that runs in a cgroup of the plan and some percent; empty without one.
    fn cage(&mut self, own: &Path, server: &Server, balloon: bool, without: &mut Vec<String>) -> Result<Vec<String>> {
        let Some(percent) = server.cage_percent else { return Ok(Vec::new()) };
        let planned = planned(own, server)?;
        // The kernel counts files on the small disk as memory of the process that writes them.
        let disk = server.disk_mib.unwrap_or(0) << 20;
        let bytes = planned + planned * percent / 100 + disk + if balloon { BALLOON_BYTES } else { 0 };
        let made = cage_sh(&["open", "soak", &bytes.to_string()])?;
        if !made.status.success() {
            shout(&format!("no memory cgroup: {}", text(&made.stderr)));
            without.push("a memory cgroup".into());
            return Ok(Vec::new());
        }
        eprintln!("a hard limit of {bytes} bytes around a plan of {planned}");
        let cage = self.cage.insert(text(&made.stdout));
        Ok(["bash", "-c", CAGE, "cage", "run", cage].map(str::to_owned).into())
    }

    /// Mounts a small disk in memory, if the scenario has one and the mount succeeds.
    fn mount(&mut self, server: &Server, without: &mut Vec<String>) -> Result<()> {
        let Some(mib) = server.disk_mib else { return Ok(()) };
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "plimsoll-soak"]).arg(self.disk());
        let made = mount.output().context("mount")?;
        self.mounted = made.status.success();
        if !self.mounted {
            shout(&format!("no disk of its own: {}", text(&made.stderr)));
            without.push("a disk of its own".into());
        }
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Errors are ignored: the soak is over, and whatever cannot be removed stays.
        if let Some(cage) = &self.cage {
            let _ = cage_sh(&["close", cage]);
        }
        if self.mounted {
            let _ = Command::new("umount").arg(self.disk()).status();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn cage_sh(args: &[&str]) -> Result<Output> {
    let script = ["-c", CAGE, "cage"].into_iter().chain(args.iter().copied());
    Command::new("bash").args(script).output().context("bash")
}

fn shout(words: &str) {
    eprintln!("\n*** {} ***\n", words.to_uppercase());
}

impl Launched {
    /// Starts it and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready; the error has the last lines of its log.
    pub fn start(server: &Server, balloon: bool) -> Result<Self> {
        let own = std::env::current_exe().context("this program's own file")?;
        let mut scratch = Scratch::new()?;
        let mut without = Vec::new();
        let mut line = scratch.cage(&own, server, balloon, &mut without)?;
        scratch.mount(server, &mut without)?;
        if let Some(descriptors) = server.descriptors {
            // `ulimit -n` sets both limits: a server may raise the soft one.
            let limit = format!("ulimit -n {descriptors}; exec \"$@\"");
            line.extend(["sh", "-c", &limit, "limit"].map(str::to_owned));
        }
        line.push(own.display().to_string());
        line.extend(["serve", &server.model, "--port", "0"].map(str::to_owned));
        if server.disk_mib.is_some() {
            line.extend(["--record".into(), scratch.disk().join("trace.jsonl").display().to_string()]);
        }
        let cache = server.cache_mib.map(|mib| DiskCache { dir: scratch.disk().join("prefixes"), bytes: mib << 20 });
        line.extend(cache.iter().flat_map(cache_flags));
        line.extend(server.flags.iter().cloned());
        let log = File::create(scratch.disk().join("log"))?;
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let child = command.spawn().with_context(|| line[0].clone())?;
        let mut launched = Self { child, scratch, url: String::new(), without, cache };
        launched.url = launched.ready()?;
        Ok(launched)
    }

    /// Waits for the output line with the server's address, and returns the address.
    fn ready(&mut self) -> Result<String> {
        let mut stdout = BufReader::new(self.child.stdout.take().context("its output")?);
        let (says, said) = channel();
        thread::Builder::new().name("server output".into()).spawn(move || {
            let mut line = String::new();
            // Read on to the end: a closed pipe would be an error to the server.
            while stdout.read_line(&mut line).is_ok_and(|read| read > 0) {
                let _ = says.send(std::mem::take(&mut line));
            }
        })?;
        let line = said.recv_timeout(READY_WITHIN);
        let address = line.as_deref().ok().and_then(|line| Some(line.split_once(" at ")?.1.split_once("/v1")?.0));
        match address {
            Some(address) => Ok(address.to_owned()),
            None => bail!("the server did not become ready: {}", self.last_words()),
        }
    }

    fn log(&self) -> String {
        fs::read(self.scratch.disk().join("log")).map(|bytes| text(&bytes)).unwrap_or_default()
    }

    fn last_words(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// The process's id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The directory of its separate disk; none without one.
    pub fn disk(&self) -> Option<PathBuf> {
        self.scratch.mounted.then(|| self.scratch.disk())
    }

    /// Ends the server with SIGTERM. Returns how it ended, and its logged warnings and errors with their counts.
    pub fn end(mut self) -> (Result<String, String>, Vec<String>) {
        let ended = self.drain();
        (ended, complaints(&self.log()))
    }

    fn drain(&mut self) -> Result<String, String> {
        if let Ok(Some(status)) = self.child.try_wait() {
            return Err(format!("it had gone already: {status}\n{}", self.last_words()));
        }
        let since = Instant::now();
        let told = Command::new("kill").args(["-s", "TERM", &self.pid().to_string()]).status();
        told.map_err(|error| error.to_string())?;
        while since.elapsed() < ENDED_WITHIN {
            match self.child.try_wait().map_err(|error| error.to_string())? {
                Some(status) if status.success() => return Ok(format!("in {:.1} s", since.elapsed().as_secs_f64())),
                Some(status) => return Err(format!("{status}\n{}", self.last_words())),
                None => thread::sleep(Duration::from_millis(50)),
            }
        }
        Err(format!("not within {} s", ENDED_WITHIN.as_secs()))
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        // Both fail harmlessly when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The flags of a prefix cache on disk.
fn cache_flags(cache: &DiskCache) -> [String; 4] {
    let DiskCache { dir, bytes } = cache;
    ["--cache-dir".into(), dir.display().to_string(), "--cache-bytes".into(), bytes.to_string()]
}

/// Returns the bytes that `plimsoll plan` reports for this server.
fn planned(own: &Path, server: &Server) -> Result<u64> {
    let mut command = Command::new(own);
    command.args(["plan", &server.model, "--json"]).args(&server.flags);
    // A plan opens no directory.
    let cache = server.cache_mib.map(|mib| DiskCache { dir: "prefixes".into(), bytes: mib << 20 });
    command.args(cache.iter().flat_map(cache_flags));
    let output = command.output()?;
    let plan = serde_json::from_slice::<Value>(&output.stdout).ok().and_then(|plan| plan["total"].as_u64());
    plan.with_context(|| format!("plimsoll plan {}: {}", server.model, text(&output.stderr)))
}

/// Returns the warnings and errors in a log, each with its count, most frequent first.
fn complaints(log: &str) -> Vec<String> {
    let mut counts = std::collections::BTreeMap::new();
    for line in log.lines() {
        // "2026-11-21T12:00:00Z  WARN what happened figures=1"
        let Some(at) = [" WARN ", " ERROR "].iter().filter_map(|level| line.find(level)).min() else { continue };
        let words: String = line[at..].trim().split('=').next().unwrap_or_default().chars().take(120).collect();
        *counts.entry(words).or_insert(0_u64) += 1;
    }
    let mut all: Vec<(String, u64)> = counts.into_iter().collect();
    all.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    all.into_iter().take(20).map(|(words, count)| format!("{count} × {words}")).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_counted() {
        let log = "x  INFO fine\nx  WARN memory is short degradation=\"a\"\nx  WARN memory is short degradation=\"b\"\nx ERROR broken\n";
        assert_eq!(complaints(log), ["2 × WARN memory is short degradation", "1 × ERROR broken"]);
    }

    #[test]
    fn a_server_that_does_not_start_says_why() {
        // This binary is a test harness and knows no `serve`.
        let server = Server {
            model: "none".into(),
            flags: vec![],
            cage_percent: None,
            descriptors: None,
            disk_mib: None,
            cache_mib: None,
        };
        let words = Launched::start(&server, false).err().unwrap().to_string();
        assert!(words.contains("did not become ready"), "{words}");
    }
}
