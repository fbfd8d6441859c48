//! The file of a trace: whole lines, and nothing else. Lines that cannot be written are cut off and lost. When there is room again, later
//! lines follow the last whole one. A file that another program truncates begins anew, with a head.

use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, Error, ErrorKind, Result, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use plimsoll_engine::trace::{Head, Line};
use serde::Serialize;

/// Bytes of lines that are written at once; a longer line is written alone.
pub(crate) const BUFFER_BYTES: usize = 8 << 10;

/// Counters for the metrics.
#[derive(Debug, Default)]
pub(crate) struct Recorded {
    pub lines: AtomicU64,
    pub bytes: AtomicU64,
    pub lost: AtomicU64,
}

/// The medium that lines are written to.
pub(crate) trait Storage {
    /// Writes all of `bytes` at the end, or fails anywhere in between.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Truncates to the first `bytes`; later writes follow them.
    fn cut(&mut self, bytes: u64) -> Result<()>;

    /// Returns the number of bytes.
    fn bytes(&self) -> Result<u64>;
}

/// The most traces of earlier servers that are kept.
const EARLIER_MAX: usize = 3;

/// Creates a file, opened for appending. An existing file becomes `FILE.1`, that one `FILE.2`, and so on; the oldest is removed. A
/// restarted server thus keeps recording.
pub(crate) fn create(path: &Path) -> Result<File> {
    let earlier = |n: usize| match n {
        0 => path.to_path_buf(),
        n => {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{n}"));
            name.into()
        }
    };
    if let Ok(there) = File::open(path) {
        if let Err(TryLockError::WouldBlock) = there.try_lock() {
            return Err(Error::other("another server records there"));
        }
        // A trace without a request would only displace traces that have some.
        if BufReader::new(there).lines().take(2).count() < 2 {
            std::fs::remove_file(path)?;
        }
    }
    for n in (0..EARLIER_MAX).rev().filter(|_| path.exists()) {
        match std::fs::rename(earlier(n), earlier(n + 1)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let file = File::options().append(true).create_new(true).open(path)?;
    // On a file system without locks, two servers that record to one file are not detected.
    let _ = file.lock();
    Ok(file)
}

impl Storage for File {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_all(bytes)
    }

    fn cut(&mut self, bytes: u64) -> Result<()> {
        self.set_len(bytes)
    }

    fn bytes(&self) -> Result<u64> {
        Ok(self.metadata()?.len())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Writing,
    /// The last lines could not be written; the next lines are tried.
    Failing,
    /// No further line is written.
    Over,
}

/// A trace that is being written.
pub(crate) struct TraceFile<S> {
    storage: S,
    state: State,
    /// Bytes in the storage, all of them of whole lines.
    written: u64,
    max_bytes: u64,
    /// Whole lines to be written next, and their number.
    buffer: Vec<u8>,
    lines: u64,
    recorded: Arc<Recorded>,
}

impl<S: Storage> TraceFile<S> {
    /// Begins a trace of at most `max_bytes`, with its head.
    pub fn begin(storage: S, max_bytes: u64) -> Result<Self> {
        let (buffer, recorded) = (Vec::with_capacity(BUFFER_BYTES), Arc::default());
        let mut file = Self { storage, state: State::Writing, written: 0, max_bytes, buffer, lines: 0, recorded };
        file.write()?;
        Ok(file)
    }

    /// Returns the counters of written and lost lines, which stay current.
    pub fn recorded(&self) -> Arc<Recorded> {
        Arc::clone(&self.recorded)
    }

    /// Adds a line, or counts it as lost.
    pub fn put(&mut self, line: &Line) {
        if self.state != State::Over {
            match self.add(line) {
                Ok(()) => {
                    self.lines += 1;
                    if self.buffer.len() >= BUFFER_BYTES {
                        self.flush();
                    }
                    return;
                }
                Err(error) => self.end(&error),
            }
        }
        self.recorded.lost.fetch_add(1, Relaxed);
    }

    /// Writes the added lines, or loses them.
    pub fn flush(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        match self.write() {
            Ok(()) => {
                self.recorded.lines.fetch_add(lines, Relaxed);
                if lines > 0 && self.state == State::Failing {
                    self.state = State::Writing;
                    tracing::info!("--record: lines are written again");
                }
            }
            Err(error) => {
                self.recorded.lost.fetch_add(lines, Relaxed);
                self.buffer.clear();
                if let Err(error) = self.storage.cut(self.written) {
                    self.end(&error);
                } else if self.state == State::Writing {
                    self.state = State::Failing;
                    tracing::error!(%error, "--record: lines are lost until the file can be written again");
                }
            }
        }
        self.buffer.shrink_to(BUFFER_BYTES);
    }

    fn add(&mut self, line: &Line) -> Result<()> {
        let whole = self.buffer.len();
        let added = put_line(&mut self.buffer, line).and_then(|()| self.fits(self.buffer.len()));
        if added.is_err() {
            self.buffer.truncate(whole);
        }
        added
    }

    fn fits(&self, bytes: usize) -> Result<()> {
        match self.written + bytes as u64 > self.max_bytes {
            true => Err(Error::other("--record-bytes is reached")),
            false => Ok(()),
        }
    }

    fn write(&mut self) -> Result<()> {
        // The file is empty, or another program has truncated it.
        let held = self.storage.bytes()?;
        if held < self.written.max(1) {
            self.written = 0;
            if held > 0 {
                self.storage.cut(0)?;
            }
            let mut head = Vec::new();
            put_line(&mut head, &Head::default())?;
            self.fits(head.len() + self.buffer.len())?;
            self.buffer.splice(..0, head);
        }
        self.storage.append(&self.buffer)?;
        let bytes = self.buffer.len() as u64;
        self.buffer.clear();
        self.written += bytes;
        self.recorded.bytes.fetch_add(bytes, Relaxed);
        Ok(())
    }

    fn end(&mut self, error: &Error) {
        self.state = State::Over;
        tracing::error!(%error, "--record: nothing more is recorded");
    }
}

fn put_line(into: &mut Vec<u8>, line: &impl Serialize) -> Result<()> {
    serde_json::to_writer(&mut *into, line)?;
    into.push(b'\n');
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use plimsoll_engine::trace::Prompt;

    use super::*;

    /// A disk with this many bytes of free space, which writes up to its end before it fails.
    struct Disk {
        text: Vec<u8>,
        room: usize,
        cuts: bool,
    }

    impl Storage for &mut Disk {
        fn append(&mut self, bytes: &[u8]) -> Result<()> {
            let fits = bytes.len().min(self.room);
            self.text.extend(&bytes[..fits]);
            self.room -= fits;
            if fits < bytes.len() { Err(ErrorKind::StorageFull.into()) } else { Ok(()) }
        }

        fn cut(&mut self, bytes: u64) -> Result<()> {
            if !self.cuts {
                return Err(ErrorKind::Other.into());
            }
            self.room += self.text.len() - bytes as usize;
            self.text.truncate(bytes as usize);
            Ok(())
        }

        fn bytes(&self) -> Result<u64> {
            Ok(self.text.len() as u64)
        }
    }

    fn line(at_ms: u64) -> Line {
        Line::plain(at_ms, Prompt::default(), 0)
    }

    fn counts<S>(file: &TraceFile<S>) -> [u64; 3] {
        [&file.recorded.lines, &file.recorded.bytes, &file.recorded.lost].map(|count| count.load(Relaxed))
    }

    /// The times of the lines on the disk, each of which must be whole.
    fn times(disk: &Disk) -> Vec<u64> {
        let text = std::str::from_utf8(&disk.text).unwrap();
        assert!(text.ends_with('\n'), "{text}");
        let lines = text.lines().skip(1).map(|line| serde_json::from_str::<Line>(line).unwrap().at_ms);
        lines.collect()
    }

    #[test]
    fn a_full_disk_costs_the_lines_of_its_time_and_no_others() {
        let mut disk = Disk { text: Vec::new(), room: 1 << 20, cuts: true };
        let mut file = TraceFile::begin(&mut disk, u64::MAX).unwrap();
        file.put(&line(1));
        file.flush();
        // The space ends in the middle of the second line.
        file.storage.room = file.buffer.len() + 40;
        for time in [2, 3] {
            file.put(&line(time));
            file.flush();
        }
        file.storage.room = 1 << 20;
        file.put(&line(4));
        file.put(&line(5));
        file.flush();
        file.flush();
        let [lines, bytes, lost] = counts(&file);
        assert_eq!((lines, lost), (3, 2));
        assert_eq!(times(&disk), [1, 4, 5]);
        assert_eq!(bytes, disk.text.len() as u64);
    }

    #[test]
    fn a_file_that_is_cut_goes_on_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let mut file = create(&path).unwrap();
        file.append(b"a\nhal").unwrap();
        file.cut(2).unwrap();
        file.append(b"b\n").unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), file.bytes().unwrap()), (b"a\nb\n".to_vec(), 4));
        // Another program truncates the file.
        File::create(&path).unwrap();
        file.append(b"c\n").unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), file.bytes().unwrap()), (b"c\n".to_vec(), 2));
    }

    #[test]
    fn truncated_file_begins_anew() {
        let mut disk = Disk { text: Vec::new(), room: 1 << 20, cuts: true };
        let mut file = TraceFile::begin(&mut disk, u64::MAX).unwrap();
        let head = file.storage.text.clone();
        for (time, left) in [(1, 0), (2, head.len() + 3), (3, 0)] {
            file.put(&line(time));
            file.flush();
            assert_eq!((&file.storage.text[..head.len()], times(file.storage)), (&head[..], vec![time]));
            file.storage.text.truncate(left);
        }
        // The space is now too small even for the head.
        file.storage.room = 10;
        file.put(&line(4));
        file.flush();
        file.storage.room = 1 << 20;
        file.put(&line(5));
        file.flush();
        assert_eq!((times(&disk), &disk.text[..head.len()]), (vec![5], &head[..]));
    }

    #[test]
    fn what_cannot_be_cut_off_ends_the_trace() {
        let mut disk = Disk { text: Vec::new(), room: 1 << 20, cuts: false };
        let mut file = TraceFile::begin(&mut disk, u64::MAX).unwrap();
        file.storage.room = 40;
        file.put(&line(1));
        file.flush();
        file.storage.room = 1 << 20;
        let torn = file.storage.text.len();
        file.put(&line(2));
        file.flush();
        assert_eq!((counts(&file)[0], counts(&file)[2]), (0, 2));
        assert_eq!(disk.text.len(), torn, "nothing comes after half a line");
    }

    #[test]
    fn beyond_its_bytes_a_trace_is_over() {
        let mut disk = Disk { text: Vec::new(), room: 1 << 20, cuts: true };
        let mut file = TraceFile::begin(&mut disk, u64::MAX).unwrap();
        let head = file.written;
        file.put(&line(1));
        let each = file.buffer.len() as u64;
        file.max_bytes = head + 2 * each;
        for time in [2, 3, 4] {
            file.put(&line(time));
        }
        file.flush();
        let [lines, bytes, lost] = counts(&file);
        assert_eq!((lines, lost), (2, 2));
        assert!(bytes <= head + 2 * each, "{bytes}");
        assert_eq!(times(&disk), [1, 2]);
        let mut empty = Disk { text: Vec::new(), room: 1 << 20, cuts: true };
        assert!(TraceFile::begin(&mut empty, 3).is_err(), "not even the head fits");
    }

    #[test]
    fn a_long_line_is_not_kept() {
        let mut disk = Disk { text: Vec::new(), room: 1 << 20, cuts: true };
        let mut file = TraceFile::begin(&mut disk, u64::MAX).unwrap();
        let prompt = Prompt { ids: Some(vec![12_345; 10_000]), ..Prompt::default() };
        file.put(&Line::plain(7, prompt, 0));
        assert_eq!((file.buffer.len(), file.buffer.capacity() <= 2 * BUFFER_BYTES), (0, true), "it is written at once");
        assert_eq!(times(&disk), [7]);
    }
}
