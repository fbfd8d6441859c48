//! One run of ffmpeg on one file, with limits in bytes, processor time and time. Dropping its value ends the run.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use plimsoll_memory::child::{OwnedChild, isolate};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Container, NO_STREAM};
use crate::MediaError;

/// Bytes that one run may allocate. Measured with ffmpeg 5.1: 128 MiB for H.264 of 1920 × 1080.
pub const RUN_BYTES: u64 = 192 << 20;
/// Most time of a run, and most processor time. A longer run is ended.
const RUN_TIME: Duration = Duration::from_secs(30);
/// Most bytes of its error output.
const WORDS_BYTES: u64 = 16 << 10;
/// Lines and characters at the end of that output that a client gets.
const LINES: usize = 3;
const REASON_CHARS: usize = 200;
/// Time between two checks of a run: of its time limit, and whether its request has ended.
const LOOK: Duration = Duration::from_millis(20);

/// A run of ffmpeg. Dropping it ends the run.
pub(super) struct Run<'a> {
    what: &'static str,
    child: OwnedChild,
    output: ChildStdout,
    words: File,
    until: Instant,
    stop: &'a AtomicBool,
}

/// Creates anonymous memory for a file in which ffmpeg must be able to seek. It is in no directory; it is freed when both sides have
/// closed it.
#[cfg(target_os = "linux")]
fn in_memory(bytes: &[u8]) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let mut file = File::from(memfd_create(c"plimsoll-media", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

#[cfg(target_os = "linux")]
fn limit(child: &Child) -> io::Result<()> {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = Pid::from_child(child);
    let limits = [(Resource::Data, RUN_BYTES), (Resource::Cpu, RUN_TIME.as_secs()), (Resource::Fsize, WORDS_BYTES)];
    for (resource, most) in limits {
        match prlimit(Some(pid), resource, Rlimit { current: Some(most), maximum: Some(most) }) {
            // The run has ended already.
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            done => done.map(drop)?,
        }
    }
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn in_memory(_: &[u8]) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn limit(_: &Child) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

impl<'a> Run<'a> {
    /// Starts ffmpeg on a file. `decode` are arguments after the input, `before` are arguments before it.
    pub fn start(
        program: &Path,
        (what, container): (&'static str, Container),
        bytes: &[u8],
        (before, decode): (&[&str], &[&str]),
        stop: &'a AtomicBool,
    ) -> Result<Self, MediaError> {
        let lost =
            |error: io::Error| MediaError::Decoder { program: program.display().to_string(), why: error.to_string() };
        let (input, words) = (in_memory(bytes).map_err(lost)?, in_memory(&[]).map_err(lost)?);
        let mut command = Command::new(program);
        command.args(["-hide_banner", "-nostdin", "-loglevel", "error", "-threads", "1", "-filter_threads", "1"]);
        // One demuxer, and no other file than this one.
        command.args(["-protocol_whitelist", "file"]).args(before);
        command.args(["-f", container.demuxer(), "-i", "/dev/stdin"]).args(decode).arg("pipe:1");
        isolate(&mut command).stdin(input).stdout(Stdio::piped()).stderr(words.try_clone().map_err(lost)?);
        let mut child = OwnedChild::from(command.spawn().map_err(lost)?);
        let Some(output) = child.stdout.take() else { return Err(lost(io::Error::other("it has no output"))) };
        let run = Self { what, child, output, words, until: Instant::now() + RUN_TIME, stop };
        limit(&run.child).map_err(lost)?;
        Ok(run)
    }

    /// Waits until the run has ended; the error has the reason of a failure.
    pub fn end(mut self) -> Result<(), MediaError> {
        loop {
            self.check()?;
            match self.child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(self.failed(&status.to_string())),
                Ok(None) => std::thread::sleep(LOOK),
                Err(error) => return Err(self.failed(&error.to_string())),
            }
        }
    }

    /// Returns all of its output, which has at most `most` bytes.
    pub fn all(mut self, most: u64) -> Result<Vec<u8>, MediaError> {
        let mut bytes = Vec::new();
        let read = (&mut self).take(most + 1).read_to_end(&mut bytes);
        read.map_err(|error| self.unread(&error))?;
        if bytes.len() as u64 > most {
            return Err(self.failed(&format!("it decodes to more than {most} bytes")));
        }
        self.end().map(|()| bytes)
    }

    /// Fills `frame`; false at the end of the output.
    pub fn frame(&mut self, frame: &mut [u8]) -> Result<bool, MediaError> {
        let mut filled = 0;
        while filled < frame.len() {
            match self.read(&mut frame[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(self.failed("its output is cut off")),
                Ok(bytes) => filled += bytes,
                Err(error) => return Err(self.unread(&error)),
            }
        }
        Ok(true)
    }

    /// Returns the error for output that cannot be read.
    pub fn unread(&mut self, error: &io::Error) -> MediaError {
        self.check().err().unwrap_or_else(|| self.failed(&error.to_string()))
    }

    fn check(&self) -> Result<(), MediaError> {
        if self.stop.load(Relaxed) {
            return Err(MediaError::Abandoned);
        }
        if Instant::now() > self.until {
            let why = format!("decoding it takes longer than {} s", RUN_TIME.as_secs());
            return Err(MediaError::Malformed { what: self.what, why });
        }
        Ok(())
    }

    /// Returns the error with ffmpeg's last output, or with `how` it ended.
    pub fn failed(&mut self, how: &str) -> MediaError {
        let mut words = Vec::new();
        let said =
            self.words.seek(SeekFrom::Start(0)).and_then(|_| (&self.words).take(WORDS_BYTES).read_to_end(&mut words));
        let words = String::from_utf8_lossy(if said.is_ok() { &words } else { &[] });
        // A component of ffmpeg puts its name and an address before its message.
        let plain = |line: &str| {
            line.split_once("] ").filter(|_| line.starts_with('[')).map_or(line, |(_, rest)| rest).trim().to_owned()
        };
        let lines: Vec<String> = words.lines().map(plain).filter(|line| !line.is_empty()).collect();
        // A missing stream is the cause of all later messages of newer releases.
        let last = lines.len().saturating_sub(LINES);
        let first = lines.iter().position(|line| line.contains(NO_STREAM)).unwrap_or(last);
        let reason = if lines.is_empty() { how.to_owned() } else { lines[first..].join("; ") };
        let reason: String = reason.chars().filter(|char| !char.is_control()).take(REASON_CHARS).collect();
        MediaError::Malformed { what: self.what, why: format!("ffmpeg, within {} MiB: {reason}", RUN_BYTES >> 20) }
    }
}

impl Read for Run<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let look = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as _ };
        loop {
            if self.stop.load(Relaxed) || Instant::now() > self.until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut ready = [PollFd::new(&self.output, PollFlags::IN)];
            if poll(&mut ready, Some(&look))? > 0 {
                return self.output.read(into);
            }
        }
    }
}
