//! Writes the log to standard error. Log calls run on threads that serve requests, so a write never waits. If a pipe is
//! full because its reader stopped, or a disk is full, lines are lost. Their number is logged when there is room again.

use std::io::{Result, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes that a writable pipe takes at once (`PIPE_BUF`).
const PIECE: usize = 4096;

/// The message at the end of the process waits at most this long for room.
const MOMENT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Lost lines that have not been reported in the log yet.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Whether the last line in the log was cut off.
static TORN: AtomicBool = AtomicBool::new(false);

/// Whether reports of lost lines are JSON.
static JSON: AtomicBool = AtomicBool::new(false);

/// Writes reports of lost lines as JSON from now on.
pub fn speak_json() {
    JSON.store(true, Ordering::Relaxed);
}

/// Standard error, to which each write is one line or more, and never fails.
#[derive(Clone, Copy, Debug)]
pub struct Log;

impl Write for Log {
    fn write(&mut self, lines: &[u8]) -> Result<usize> {
        // One writer at a time: two writers could both find room, and the second write would wait.
        let mut log = std::io::stderr().lock();
        let lost = LOST.load(Ordering::Relaxed);
        let told = lost == 0 || at_once(&mut log, lost_lines(lost).as_bytes());
        if told {
            LOST.fetch_sub(lost, Ordering::Relaxed);
        }
        if !told || !at_once(&mut log, lines) {
            LOST.fetch_add(1, Ordering::Relaxed);
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Logs why the process ends. It waits for room in a full pipe, but only a moment: the process ends in any case.
pub fn last_words(error: &str) {
    has_room(&std::io::stderr(), MOMENT);
    let _ = Log.write(format!("Error: {error}\n").as_bytes());
}

fn lost_lines(lost: u64) -> String {
    let words = format!("{lost} lines of this log were lost: they could not be written at once");
    match JSON.load(Ordering::Relaxed) {
        true => format!("{{\"level\":\"WARN\",\"message\":\"{words}\"}}\n"),
        false => format!("WARN {words}\n"),
    }
}

/// Writes as many bytes as possible without waiting. False if bytes are left.
fn at_once(log: &mut (impl Write + AsFd), lines: &[u8]) -> bool {
    let torn = TORN.swap(false, Ordering::Relaxed);
    if torn && !piecewise(log, b"\n").is_empty() {
        TORN.store(true, Ordering::Relaxed);
        return false;
    }
    let left = piecewise(log, lines).len();
    TORN.store(left > 0 && left < lines.len(), Ordering::Relaxed);
    left == 0
}

/// Writes pieces while there is room, and returns the bytes that are left.
fn piecewise<'a>(log: &mut (impl Write + AsFd), mut lines: &'a [u8]) -> &'a [u8] {
    while !lines.is_empty() && has_room(log, Timespec { tv_sec: 0, tv_nsec: 0 }) {
        match log.write(&lines[..lines.len().min(PIECE)]) {
            Ok(written) => lines = &lines[written..],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    lines
}

/// Whether the log has room for a write, or gets it `within` this time. True also if the poll fails.
fn has_room(log: &impl AsFd, within: Timespec) -> bool {
    let mut asked = [PollFd::new(log, PollFlags::OUT)];
    poll(&mut asked, Some(&within)).map_or(true, |ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read, pipe};

    use super::*;

    fn read(mut from: &PipeReader, bytes: usize) -> String {
        let mut read = vec![0; bytes];
        from.read_exact(&mut read).unwrap();
        String::from_utf8(read).unwrap()
    }

    #[test]
    fn nothing_waits_for_a_reader_and_lines_stay_lines() {
        let (from, mut into) = pipe().unwrap();
        let line = [&[b'x'; 9_999][..], b"\n"].concat();
        let lines = (0..).find(|_| !at_once(&mut into, &line)).unwrap();
        assert!(lines > 0);
        assert!(!at_once(&mut into, &line), "it is still full");
        let whole = read(&from, lines * line.len());
        assert!(whole.lines().all(|whole| whole.len() == 9_999));
        // There is room again.
        assert!(at_once(&mut into, b"next\n"));
        drop(into);
        let mut rest = String::new();
        (&from).read_to_string(&mut rest).unwrap();
        assert!(rest.lines().rev().skip(1).all(|torn| torn.bytes().all(|byte| byte == b'x')), "{rest}");
        assert_eq!(rest.lines().last(), Some("next"));
    }
}
