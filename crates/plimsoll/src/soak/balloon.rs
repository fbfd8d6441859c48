//! The balloon: a neighbour in the server's cgroup that takes what memory is left there, holds it, and gives it back.
//!
//! A process of its own, so that the kernel has somebody else to kill if it has to kill. Never outside of a cgroup with a
//! limit: there it would press on the whole machine.

use std::fmt;
use std::fs;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::output::say;

use anyhow::{Context, Result, bail};
use plimsoll_memory::host::{HostLimits, HostNow, Root};
use serde::Serialize;

/// It grows and shrinks by this much at a time.
const PIECE_BYTES: u64 = 2 << 20;

/// Between two pieces that are given back.
const BETWEEN_PIECES: Duration = Duration::from_millis(5);

/// What it leaves of the cgroup, round by round.
const LEAVES: [u64; 3] = [48 << 20, 24 << 20, 12 << 20];

/// It stays this long.
const HOLD: Duration = Duration::from_secs(8);

/// Between two rounds, for the server to come back: a governor takes its time.
const PAUSE: Duration = Duration::from_secs(22);

/// Before the first round, for the crowd to gather.
const FIRST_PAUSE: Duration = Duration::from_secs(5);

/// What the balloon's own process is told.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The process whose cgroup it goes into.
    #[arg(long)]
    pub beside: u32,
    /// Bytes it leaves there.
    #[arg(long)]
    pub leave: u64,
    /// Seconds it stays.
    #[arg(long)]
    pub hold: u64,
}

/// One time of taking and giving back.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    /// Bytes it was to leave.
    pub leave: u64,
    /// Bytes it took, or why it ended badly.
    pub taken: Result<u64, String>,
}

impl Round {
    /// Whether it took something and lived to give it back.
    pub fn good(&self) -> bool {
        matches!(self.taken, Ok(1..))
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let leave = self.leave >> 20;
        match &self.taken {
            Ok(taken) => write!(f, "a balloon of {} MiB left {leave} MiB", taken >> 20),
            Err(error) => write!(f, "a balloon that was to leave {leave} MiB failed: {error}"),
        }
    }
}

/// Takes, holds, gives back: the balloon's own process. Prints how many bytes it took.
pub fn run(args: &Args) -> Result<()> {
    let root = Root::system().of_process(args.beside);
    let limits = HostLimits::read(&root, None)?;
    let Some((cgroup, limit)) = limits.innermost_limited_cgroup() else {
        bail!("process {} is in no cgroup with a memory limit", args.beside);
    };
    let procs = cgroup.join("cgroup.procs");
    fs::write(&procs, std::process::id().to_string()).with_context(|| format!("{}", procs.display()))?;
    // If somebody has to go, let it be the balloon.
    fs::write("/proc/self/oom_score_adj", "1000").context("oom_score_adj")?;
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    let free = || HostNow::read(&root, &limits).available;
    while free() > args.leave + PIECE_BYTES && (pieces.len() as u64) < limit / PIECE_BYTES {
        // Ones, not zeros: zeroed memory would not be touched.
        pieces.push(vec![1; PIECE_BYTES as usize]);
    }
    say!("{}", pieces.len() as u64 * PIECE_BYTES);
    thread::sleep(Duration::from_secs(args.hold));
    while pieces.pop().is_some() {
        thread::sleep(BETWEEN_PIECES);
    }
    Ok(())
}

/// Rounds that go on in the background.
pub struct Balloon {
    stop: Sender<()>,
    rounds: JoinHandle<Vec<Round>>,
}

impl Balloon {
    /// Begins with the first round after a moment.
    pub fn start(pid: u32) -> Result<Self> {
        let (stop, stopped) = channel::<()>();
        let own = std::env::current_exe().context("this program's own file")?;
        let body = move || {
            let mut rounds = Vec::new();
            let mut pause = FIRST_PAUSE;
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                let leave = LEAVES[rounds.len() % LEAVES.len()];
                let (beside, hold) = (pid.to_string(), HOLD.as_secs().to_string());
                let mut command = Command::new(&own);
                command.args(["balloon", "--beside", &beside, "--leave", &leave.to_string(), "--hold", &hold]);
                rounds.push(Round { leave, taken: blow(&mut command) });
                pause = PAUSE;
            }
            rounds
        };
        let rounds = thread::Builder::new().name("balloon".into()).spawn(body)?;
        Ok(Self { stop, rounds })
    }

    /// Waits for the last round to end.
    pub fn stop(self) -> Vec<Round> {
        drop(self.stop);
        self.rounds.join().unwrap_or_default()
    }
}

/// One round to its end.
fn blow(command: &mut Command) -> Result<u64, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim()));
    }
    String::from_utf8_lossy(&output.stdout).trim().parse().map_err(|error| format!("{error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_that_failed_says_why() {
        let good = Round { leave: 24 << 20, taken: Ok(100 << 20) };
        assert_eq!(good.to_string(), "a balloon of 100 MiB left 24 MiB");
        let bad = Round { leave: 1 << 20, taken: blow(&mut Command::new("false")) };
        assert!(good.good() && !bad.good() && bad.to_string().contains("exit status"), "{bad}");
    }
}
