//! Faults around a server, each on its own thread.
//!
//! Every fault ends with the soak and leaves nothing behind: a stopped server runs again, neighbours are killed, connections are
//! closed, the filler is removed. While the soak itself keeps clients from the server, [`FaultLog::hindered`] returns true, and the
//! server is not blamed.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, mpsc::Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;

use super::balloon;
use super::scenario::{Kind, Trouble};

/// A fault still counts for this long after its end: clients that it held up notice late.
const AFTERMATH: Duration = Duration::from_secs(5);

/// A connection of a flood must open within this time, or counts as not taken by the server.
const CONNECT_WITHIN: Duration = Duration::from_millis(200);

/// The filler grows by this many bytes at a time.
const FILL_BYTES: usize = 64 << 10;

/// A fault, with its times.
#[derive(Clone, Debug, Serialize)]
pub struct Fault {
    /// The kind.
    pub kind: Kind,
    /// Its start in seconds since the log began.
    pub from_s: f64,
    /// Its end in the same seconds; none while it lasts.
    pub to_s: Option<f64>,
    /// A description of its effect, or why it failed.
    pub seen: Result<String, String>,
}

/// The faults so far, with their times.
pub struct FaultLog {
    began: Instant,
    faults: Mutex<Vec<Fault>>,
}

impl FaultLog {
    /// Starts an empty log.
    pub fn new() -> Self {
        Self { began: Instant::now(), faults: Mutex::default() }
    }

    fn faults(&self) -> MutexGuard<'_, Vec<Fault>> {
        // A list is complete after every push, even if a thread panicked.
        self.faults.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the seconds since the log began.
    pub fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Whether the soak kept clients from the server at some time after `since`.
    pub fn hindered(&self, since: Instant) -> bool {
        let since_s = since.saturating_duration_since(self.began).as_secs_f64();
        let in_the_way = |record: &Fault| matches!(record.kind, Kind::Stop | Kind::Flood) && lasts(record, since_s);
        self.faults().iter().any(in_the_way)
    }

    /// Whether a fault is active or has just ended.
    pub fn troubled(&self) -> bool {
        let now_s = self.now_s();
        self.faults().iter().any(|record| lasts(record, now_s))
    }

    /// Returns all faults so far.
    pub fn all(&self) -> Vec<Fault> {
        self.faults().clone()
    }

    fn record(&self, kind: Kind, happens: impl FnOnce() -> Result<String, String>) {
        let (at, from_s) = {
            let mut faults = self.faults();
            let from_s = self.now_s();
            faults.push(Fault { kind, from_s, to_s: None, seen: Err("it did not end".into()) });
            (faults.len() - 1, from_s)
        };
        let seen = happens();
        let to_s = Some(self.now_s());
        self.faults()[at] = Fault { kind, from_s, to_s, seen };
    }
}

/// Whether a fault or its aftermath was still there at that time.
fn lasts(record: &Fault, at_s: f64) -> bool {
    record.to_s.is_none_or(|to_s| to_s + AFTERMATH.as_secs_f64() > at_s)
}

/// The target of the faults.
#[derive(Clone, Debug)]
pub struct Victim {
    /// The server's process, if it is known.
    pub pid: Option<u32>,
    /// `host:port`.
    pub authority: String,
    /// The server's separate disk, if it has one.
    pub disk: Option<PathBuf>,
}

/// Injects all kinds of faults until it is dropped.
pub struct FaultInjector {
    stop: Vec<Sender<()>>,
    kinds: Vec<JoinHandle<()>>,
}

impl FaultInjector {
    /// Starts a thread per fault.
    ///
    /// # Errors
    /// When a fault needs the server's process and it is not known.
    pub fn start(troubles: Vec<Trouble>, victim: &Victim, fault_log: &Arc<FaultLog>) -> Result<Self> {
        let mut faults = Self { stop: Vec::new(), kinds: Vec::new() };
        for trouble in troubles {
            if matches!(trouble.kind, Kind::Balloon | Kind::Stop) && victim.pid.is_none() {
                bail!("{}: the server's process is not known: give --pid", trouble.kind);
            }
            let (stop, stopped) = channel();
            let (victim, fault_log) = (victim.clone(), Arc::clone(fault_log));
            let body = move || again_and_again(&trouble, &victim, &fault_log, &stopped);
            faults.kinds.push(thread::Builder::new().name("weather".into()).spawn(body)?);
            faults.stop.push(stop);
        }
        Ok(faults)
    }
}

impl Drop for FaultInjector {
    /// Ends all faults and waits for their threads. This process may exit next, and nothing may stay stopped or full.
    fn drop(&mut self) {
        self.stop.clear();
        for kind in self.kinds.drain(..) {
            // A panicked thread leaves its fault without an end in the log.
            let _ = kind.join();
        }
    }
}

/// Waits for `time`; false if the fault must end before.
fn wait(stopped: &Receiver<()>, time: Duration) -> bool {
    stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout)
}

fn again_and_again(trouble: &Trouble, victim: &Victim, fault_log: &FaultLog, stopped: &Receiver<()>) {
    let (mut pause, mut round) = (trouble.first, 0);
    while wait(stopped, pause) {
        fault_log.record(trouble.kind, || match trouble.kind {
            Kind::Balloon => {
                let leave = trouble.leave_mib[round % trouble.leave_mib.len()] << 20;
                balloon::blow(victim.pid.unwrap_or_default(), leave, trouble.hold)
            }
            kind => {
                let count = trouble.count.unwrap_or(1);
                happen(kind, count, victim, stopped, trouble.hold).map_err(|error| format!("{error:#}"))
            }
        });
        (pause, round) = (trouble.pause, round + 1);
    }
}

fn happen(kind: Kind, count: usize, victim: &Victim, stopped: &Receiver<()>, hold: Duration) -> Result<String> {
    match kind {
        Kind::Busy => {
            let neighbours = Neighbours::start(count)?;
            wait(stopped, hold);
            drop(neighbours);
            Ok(format!("{count} processes"))
        }
        Kind::Stop => {
            let stopped_now = Stopped::new(victim.pid.context("no process")?)?;
            wait(stopped, hold);
            drop(stopped_now);
            Ok(format!("{} s", hold.as_secs()))
        }
        Kind::Flood => flood(&victim.authority, count, stopped, hold),
        Kind::FullDisk => {
            let filler = Filler::new(victim.disk.as_deref().context("the server has no disk of its own")?)?;
            wait(stopped, hold);
            Ok(format!("the last {} KiB taken", filler.bytes >> 10))
        }
        Kind::Balloon => bail!("a balloon is a process"),
    }
}

/// Processes that use a core each. They check that this process still runs, and exit when it is gone.
struct Neighbours(Vec<Child>);

impl Neighbours {
    fn start(count: usize) -> Result<Self> {
        let mut all = Self(Vec::new());
        for _ in 0..count {
            let mut command = Command::new("sh");
            command.args(["-c", "while kill -0 $PPID; do :; done"]).stdout(Stdio::null()).stderr(Stdio::null());
            all.0.push(command.spawn().context("sh")?);
        }
        Ok(all)
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Errors are ignored: the process may be gone already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn signal(name: &str, pid: u32) -> Result<()> {
    let done = Command::new("kill").args(["-s", name, &pid.to_string()]).stderr(Stdio::null()).status();
    if !done.context("kill")?.success() {
        bail!("process {pid} cannot be sent SIG{name}");
    }
    Ok(())
}

/// A process that is stopped with SIGSTOP until this is dropped.
struct Stopped(u32);

impl Stopped {
    fn new(pid: u32) -> Result<Self> {
        signal("STOP", pid)?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // The error is ignored: the process may be gone already.
        let _ = signal("CONT", self.0);
    }
}

/// Opens up to `count` connections and sends nothing on them.
fn flood(authority: &str, count: usize, stopped: &Receiver<()>, hold: Duration) -> Result<String> {
    let address: SocketAddr = authority.to_socket_addrs()?.next().context("no address")?;
    let until = Instant::now() + hold;
    let (mut open, mut refused) = (Vec::new(), 0_u64);
    while Instant::now() < until {
        if open.len() < count {
            match TcpStream::connect_timeout(&address, CONNECT_WITHIN) {
                Ok(stream) => open.push(stream),
                // The server accepts no more connections, or this process has no descriptor left: the flood is large enough.
                Err(_) => refused += 1,
            }
        }
        let pause = if open.len() < count && refused == 0 { Duration::ZERO } else { Duration::from_millis(100) };
        if !pause.is_zero() && !wait(stopped, pause) {
            break;
        }
    }
    Ok(format!("{} connections, {refused} not taken", open.len()))
}

/// A file that fills the free space of a disk; removed when this is dropped.
struct Filler {
    path: PathBuf,
    bytes: u64,
}

impl Filler {
    fn new(disk: &Path) -> Result<Self> {
        let mut filler = Self { path: disk.join("filler"), bytes: 0 };
        let mut file = File::create(&filler.path).with_context(|| filler.path.display().to_string())?;
        let piece = vec![1; FILL_BYTES];
        loop {
            match file.write(&piece) {
                Ok(written @ 1..) => filler.bytes += written as u64,
                Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(filler),
                Ok(0) => return Ok(filler),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // An error is ignored: the disk is unmounted with the server.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Reads the state of a process from `/proc`.
    fn state(pid: u32) -> char {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    }

    fn trouble(kind: Kind, count: Option<usize>) -> Trouble {
        let second = Duration::from_secs(1);
        Trouble { kind, first: Duration::ZERO, hold: second, pause: second * 60, leave_mib: Vec::new(), count }
    }

    #[test]
    fn a_stopped_process_goes_on_when_the_soak_ends() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let fault_log = Arc::new(FaultLog::new());
        let victim = Victim { pid: Some(child.id()), authority: "127.0.0.1:9".into(), disk: None };
        let began = Instant::now();
        let long = Trouble { hold: Duration::from_secs(600), ..trouble(Kind::Stop, None) };
        let faults = FaultInjector::start(vec![long], &victim, &fault_log).unwrap();
        while state(child.id()) != 'T' {
            assert!(began.elapsed() < Duration::from_secs(20), "it was not stopped");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(fault_log.hindered(Instant::now()) && fault_log.troubled());
        drop(faults);
        assert_ne!(state(child.id()), 'T');
        assert!(began.elapsed() < Duration::from_secs(30), "nobody waits for ten minutes");
        let faults = fault_log.all();
        assert!(faults.len() == 1 && faults[0].seen.is_ok() && faults[0].to_s.is_some(), "{faults:?}");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_flood_opens_what_it_says_and_hinders_until_a_moment_later() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let victim = Victim { pid: None, authority: listener.local_addr().unwrap().to_string(), disk: None };
        let fault_log = FaultLog::new();
        let (_stop, stopped) = channel();
        fault_log
            .record(Kind::Flood, || Ok(happen(Kind::Flood, 7, &victim, &stopped, Duration::from_secs(1)).unwrap()));
        assert_eq!(fault_log.all()[0].seen, Ok("7 connections, 0 not taken".into()));
        assert!(fault_log.hindered(Instant::now()) && !fault_log.hindered(Instant::now() + AFTERMATH));
    }

    #[test]
    fn what_needs_a_process_says_so() {
        let victim = Victim { pid: None, authority: "127.0.0.1:9".into(), disk: None };
        let fault_log = Arc::new(FaultLog::new());
        let words =
            FaultInjector::start(vec![trouble(Kind::Stop, None)], &victim, &fault_log).err().unwrap().to_string();
        assert!(words.contains("--pid"), "{words}");
    }

    #[test]
    fn neighbours_end_with_their_owner() {
        let neighbours = Neighbours::start(2).unwrap();
        let pids: Vec<u32> = neighbours.0.iter().map(Child::id).collect();
        drop(neighbours);
        assert!(pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    }
}
