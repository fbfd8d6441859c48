//! The balloon: a neighbour in the server's cgroup that takes what memory is left there, holds it, and gives it back.
//!
//! It is a process of its own, so that the kernel can kill it instead of the server. It runs only in a cgroup with a
//! limit: elsewhere it would press on the whole machine.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use plimsoll_memory::host::{HostLimits, HostNow, Root, own_program};

use crate::output::Print;

/// The balloon grows and shrinks by this many bytes at a time.
const PIECE_BYTES: u64 = 2 << 20;

/// Pause between two pieces that are given back.
const BETWEEN_PIECES: Duration = Duration::from_millis(5);

/// The signal with which the kernel's OOM killer ends a process.
const SIGKILL: i32 = 9;

/// Arguments of the balloon's process.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A process in the cgroup that the balloon joins.
    #[arg(long)]
    pub beside: u32,
    /// Bytes of memory that the balloon leaves available.
    #[arg(long)]
    pub leave: u64,
    /// Seconds for which the balloon holds its memory.
    #[arg(long)]
    pub hold: u64,
}

/// Runs the balloon's process: takes memory, holds it, gives it back. Prints how many bytes it took.
pub fn run(args: &Args, print: Print) -> Result<()> {
    let root = Root::system().of_process(args.beside);
    let limits = HostLimits::read(&root, None)?;
    let Some((cgroup, limit)) = limits.innermost_limited_cgroup() else {
        bail!("process {} is in no cgroup with a memory limit", args.beside);
    };
    let procs = cgroup.join("cgroup.procs");
    fs::write(&procs, std::process::id().to_string()).with_context(|| format!("{}", procs.display()))?;
    // If the kernel has to kill a process, it kills the balloon first.
    fs::write("/proc/self/oom_score_adj", "1000").context("oom_score_adj")?;
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    let free = || HostNow::read(&root, &limits).available;
    while free() > args.leave + PIECE_BYTES && (pieces.len() as u64) < limit / PIECE_BYTES {
        // Ones, not zeros: zeroed memory would not be touched.
        pieces.push(vec![1; PIECE_BYTES as usize]);
    }
    print(format_args!("{}", pieces.len() as u64 * PIECE_BYTES));
    thread::sleep(Duration::from_secs(args.hold));
    while pieces.pop().is_some() {
        thread::sleep(BETWEEN_PIECES);
    }
    Ok(())
}

/// The result of a balloon that the kernel killed. It asks to be killed first, so its end does not harm the server.
pub const KILLED: &str = "killed by the kernel, in the server's place";

/// Runs one balloon process to its end and describes the result.
pub fn blow(beside: u32, leave: u64, hold: Duration) -> Result<String, String> {
    let mut command = Command::new(own_program());
    let [beside, bytes, hold] = [u64::from(beside), leave, hold.as_secs()].map(|number| number.to_string());
    command.args(["balloon", "--beside", &beside, "--leave", &bytes, "--hold", &hold]);
    match taken(&mut command)? {
        None => Ok(KILLED.into()),
        Some(0) => Err(format!("found nothing to take beside the {} MiB it was to leave", leave >> 20)),
        Some(taken) => Ok(format!("took {} MiB, left {}", taken >> 20, leave >> 20)),
    }
}

/// Runs `command` and returns the bytes that the balloon took; none if it was killed.
fn taken(command: &mut Command) -> Result<Option<u64>, String> {
    use std::os::unix::process::ExitStatusExt;
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.signal() == Some(SIGKILL) {
        return Ok(None);
    }
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()));
    }
    String::from_utf8_lossy(&output.stdout).trim().parse().map(Some).map_err(|error| format!("{error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_that_failed_says_why() {
        assert!(taken(&mut Command::new("false")).unwrap_err().contains("exit status"));
        assert_eq!(taken(Command::new("echo").arg("7")), Ok(Some(7)));
        assert_eq!(taken(Command::new("sh").args(["-c", "kill -9 $$"])), Ok(None));
    }
}
