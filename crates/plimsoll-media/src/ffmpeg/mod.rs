//! Video files and audio codecs that ffmpeg decodes, where the operator allows it.
//!
//! A decoder of H.264 computes on a client's bytes, and its code is foreign. So each file is read by a process of its own
//! with a limit in bytes ([`RUN_BYTES`]), time, processor time and output. It gets no environment, no network protocol, and
//! one demuxer, which the file's first bytes choose. A file that breaks a limit is the client's error, like any other.
//!
//! Contents: [`Film`], a video's size and frames by its packets; its frames; an audio track as WAV, which `audio` decodes.

mod container;
mod process;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::AtomicBool;

pub use container::Container;
pub use process::RUN_BYTES;

use crate::audio::AudioLimits;
use crate::image::{ImageLimits, Rgb};
use crate::{MediaError, Modality, Size};
use process::Run;

const VIDEO: &str = "a video";
const SOUND: &str = "an audio clip";

/// Most frames that are taken from one file: their numbers are in one argument.
const TAKEN_MAX: u64 = 4096;
/// One in `MISSING` frames may be missing at the end; the last decoded frame replaces them.
const MISSING: usize = 16;
/// Bytes of a line of the list of packets.
const LINE_BYTES: u64 = 256;
/// Part of ffmpeg's message for a track that a file lacks.
const NO_STREAM: &str = "matches no streams";
/// Seconds beyond the limit that are decoded, to detect a track that is too long.
const BEYOND: u64 = 1;

/// The ffmpeg program; it was started once successfully.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ffmpeg {
    program: PathBuf,
    /// Its release, from its own output.
    version: String,
}

/// A video file, by its packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Film {
    container: Container,
    /// Pixels of a frame, upright.
    pub size: Size,
    /// Frames: as many as packets.
    pub frames: u64,
    /// Duration of all frames; 0 if the file does not declare it.
    pub duration_ms: u64,
}

impl Ffmpeg {
    /// Starts the program once. A name without a slash is searched for in `PATH`.
    ///
    /// # Errors
    /// The reason why the program cannot be used, and the next step.
    pub fn new(program: PathBuf) -> Result<Self, String> {
        if cfg!(not(target_os = "linux")) {
            return Err("decoding with ffmpeg needs Linux, whose limits bound it; send frames instead".into());
        }
        let name = program.display().to_string();
        let output = Command::new(&program).args(["-hide_banner", "-version"]).output();
        let output =
            output.map_err(|error| format!("{name}: {error}; install ffmpeg 5.1 or newer, or name its path"))?;
        let words = String::from_utf8_lossy(&output.stdout);
        let version = words.split_whitespace().skip_while(|word| *word != "version").nth(1);
        match version.filter(|_| output.status.success()) {
            Some(version) => Ok(Self { version: version.to_owned(), program: which(program)? }),
            None => Err(format!("{name} does not say which version of ffmpeg it is; name the path of ffmpeg")),
        }
    }

    /// Returns its release, from its own output. Another release may decode to other pixels.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Reads a video's packets and decodes its first frame. `bytes` are in a [`Container`].
    pub fn film(&self, bytes: &[u8], limits: &ImageLimits, stop: &AtomicBool) -> Result<Film, MediaError> {
        let container = known(VIDEO, bytes)?;
        let start = |before: &[&str], decode: &[&str]| {
            Run::start(&self.program, (VIDEO, container), bytes, (before, decode), stop)
        };
        let packets = packets(start(&[], &["-map", "0:V:0", "-c", "copy", "-f", "framecrc"])?)?;
        check_pixels(packets.pixels, limits)?;
        let most = limits.pixels.to_string();
        let first = ["-map", "0:V:0", "-frames:v", "1", "-c:v", "ppm", "-f", "image2pipe"];
        let mut run = start(&["-max_pixels", &most], &first)?;
        let mut head = [0; 16];
        let size = if run.frame(&mut head)? { ppm_size(&head) } else { None };
        let size = size.ok_or_else(|| run.failed("its first frame cannot be decoded"))?;
        check_pixels(size.pixels(), limits)?;
        Ok(Film { container, size, frames: packets.count, duration_ms: packets.milliseconds() })
    }

    /// Decodes the frames of a video at `indices`, which ascend, and passes each to `take`, one at a time.
    pub fn frames(
        &self,
        bytes: &[u8],
        film: &Film,
        indices: &[u64],
        stop: &AtomicBool,
        mut take: impl FnMut(&Rgb),
    ) -> Result<(), MediaError> {
        let asked = indices.len() as u64;
        if asked > TAKEN_MAX {
            let (limit, flag) = (TAKEN_MAX, Modality::Video.flag());
            return Err(MediaError::OverLimit { what: VIDEO, asked, limit, unit: "sampled frames", flag });
        }
        let mut single = indices.to_vec();
        single.dedup();
        let select: Vec<String> = single.iter().map(|index| format!("eq(n,{index})")).collect();
        let select = format!("select='{}'", select.join("+"));
        let decode =
            ["-map", "0:V:0", "-vf", &select, "-fps_mode", "passthrough", "-pix_fmt", "rgb24", "-f", "rawvideo"];
        let mut run = Run::start(&self.program, (VIDEO, film.container), bytes, (&[], &decode), stop)?;
        let mut frame = Rgb { size: film.size, data: vec![0; 3 * film.size.pixels() as usize] };
        let (mut wanted, mut there) = (indices.iter().peekable(), 0);
        for index in single {
            if !run.frame(&mut frame.data)? {
                break;
            }
            while wanted.next_if_eq(&&index).is_some() {
                there += 1;
                take(&frame);
            }
        }
        let missing = wanted.count();
        if missing * MISSING > indices.len() || there == 0 {
            return Err(run.failed(&format!("of {asked} sampled frames {there} are there")));
        }
        (0..missing).for_each(|_| take(&frame));
        run.end()
    }

    /// Returns the first audio track of an audio or video file as WAV: one channel of 16 bits, the average of all, at `rate`.
    pub fn audio(
        &self,
        bytes: &[u8],
        rate: u32,
        limits: &AudioLimits,
        stop: &AtomicBool,
    ) -> Result<Vec<u8>, MediaError> {
        let container = known(SOUND, bytes)?;
        let (seconds, hz) = ((limits.seconds + BEYOND).to_string(), rate.to_string());
        let decode = ["-map", "0:a:0", "-t", &seconds, "-ac", "1", "-ar", &hz, "-c:a", "pcm_s16le", "-f", "wav"];
        let run = Run::start(&self.program, (SOUND, container), bytes, (&[], &decode), stop)?;
        run.all(Self::audio_bytes(rate, limits)).map_err(|error| match error {
            MediaError::Malformed { why, .. } if why.contains(NO_STREAM) => MediaError::NoAudioTrack,
            error => error,
        })
    }

    /// Returns the most bytes that [`Self::audio`] returns.
    #[must_use]
    pub fn audio_bytes(rate: u32, limits: &AudioLimits) -> u64 {
        (limits.seconds + BEYOND + 1) * 2 * u64::from(rate) + (4 << 10)
    }
}

/// Returns the path of a program that `PATH` may name: later runs have no environment.
fn which(program: PathBuf) -> Result<PathBuf, String> {
    if program.components().count() > 1 {
        return std::path::absolute(&program).map_err(|error| format!("{}: {error}", program.display()));
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&paths).map(|folder| folder.join(&program)).find(|path| path.is_file());
    found.ok_or_else(|| format!("{} is in no directory of PATH; name its path", program.display()))
}

fn known(what: &'static str, bytes: &[u8]) -> Result<Container, MediaError> {
    let supported = "MP4, QuickTime, Matroska, WebM, AVI, MPEG-TS, Ogg Opus and AAC";
    Container::of(bytes).ok_or(MediaError::Unsupported { what, supported })
}

fn check_pixels(asked: u64, limits: &ImageLimits) -> Result<(), MediaError> {
    let (limit, flag) = (limits.pixels, "--max-decode-pixels");
    match asked > limit {
        true => Err(MediaError::OverLimit { what: VIDEO, asked, limit, unit: "pixels", flag }),
        false => Ok(()),
    }
}

/// The properties of a video track's packets.
#[derive(Debug, Default, PartialEq)]
struct Packets {
    count: u64,
    /// Duration of all packets, in units of time.
    units: u64,
    /// Seconds of a unit, as a fraction.
    unit: (u64, u64),
    pixels: u64,
}

impl Packets {
    fn milliseconds(&self) -> u64 {
        let parts = u128::from(self.units) * u128::from(self.unit.0) * 1000;
        u64::try_from(parts / u128::from(self.unit.1.max(1))).unwrap_or(u64::MAX)
    }

    /// Parses one line of ffmpeg's `framecrc`: `#tb 0: 1/12800`, `#dimensions 0: 320x240`, or
    /// `stream, dts, pts, duration, bytes, checksum`.
    fn read(&mut self, line: &str) {
        let pair = |text: &str, between: char| {
            let (one, other) = text.trim().split_once(between)?;
            Some((one.parse().ok()?, other.parse().ok()?))
        };
        if let Some(unit) = line.strip_prefix("#tb 0:") {
            self.unit = pair(unit, '/').unwrap_or_default();
        } else if let Some(size) = line.strip_prefix("#dimensions 0:") {
            let (width, height): (u64, u64) = pair(size, 'x').unwrap_or_default();
            self.pixels = width.saturating_mul(height);
        } else if let Some(duration) = line.split(',').nth(3).filter(|_| !line.starts_with('#')) {
            self.count += 1;
            self.units = self.units.saturating_add(duration.trim().parse().unwrap_or(0));
        }
    }
}

/// Reads ffmpeg's list of packets line by line.
fn packets(run: Run<'_>) -> Result<Packets, MediaError> {
    let (mut lines, mut packets, mut line) = (BufReader::new(run), Packets::default(), Vec::new());
    loop {
        line.clear();
        match std::io::Read::take(&mut lines, LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(_) => packets.read(&String::from_utf8_lossy(&line)),
            Err(error) => return Err(lines.into_inner().unread(&error)),
        }
    }
    let mut run = lines.into_inner();
    if packets.count == 0 {
        return Err(run.failed("it has no video track"));
    }
    run.end().map(|()| packets)
}

/// Returns the size in the header of a portable pixmap: `P6`, width, height.
fn ppm_size(head: &[u8]) -> Option<Size> {
    let text = head.split(|byte| byte.is_ascii_whitespace()).map(|word| std::str::from_utf8(word).ok());
    let mut words = text.skip(1);
    let (width, height) = (words.next()??.parse().ok()?, words.next()??.parse().ok()?);
    Some(Size { height, width })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_tell_frames_and_seconds() {
        let mut packets = Packets::default();
        let lines = "#software: Lavf59\n#tb 0: 1/12800\n#media_type 0: video\n#dimensions 0: 320x240\n#sar 0: 1/1\n\
            0,      -1024,          0,      512,     5173, 0xf40aae36\n\
            0,       -512,       2048,      512,     2477, 0x9870d926, F=0x0\n";
        lines.lines().for_each(|line| packets.read(line));
        assert_eq!(packets, Packets { count: 2, units: 1024, unit: (1, 12_800), pixels: 320 * 240 });
        assert_eq!(packets.milliseconds(), 80);
        packets.read("#tb 0: 1/0");
        assert_eq!(packets.milliseconds(), 1_024_000, "no unit of time is no crash");
    }

    #[test]
    fn a_pixmaps_header_has_its_size() {
        assert_eq!(ppm_size(b"P6\n1920 1080\n255"), Some(Size { height: 1080, width: 1920 }));
        assert_eq!(ppm_size(b"P6\n19"), None);
        assert_eq!(ppm_size(b"P6\nx 8\n255\n...."), None);
    }

    #[test]
    fn a_program_that_is_not_there_or_not_ffmpeg_is_named() {
        let missing = Ffmpeg::new("/no/such/ffmpeg".into()).unwrap_err();
        assert!(missing.starts_with("/no/such/ffmpeg: ") && missing.contains("install"), "{missing}");
        let other = Ffmpeg::new("true".into()).unwrap_err();
        assert!(other.contains("true does not say"), "{other}");
    }
}
