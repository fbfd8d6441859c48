//! ffmpeg as a decoder: its limits, with a program that breaks them, and pixels and samples, with ffmpeg itself.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plimsoll_media::audio::{self, AudioLimits};
use plimsoll_media::ffmpeg::{Container, Ffmpeg};
use plimsoll_media::image::{ImageLimits, Rgb};
use plimsoll_media::{MediaError, Size};

static GO_ON: AtomicBool = AtomicBool::new(false);

fn fake() -> Ffmpeg {
    Ffmpeg::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-ffmpeg.sh")).unwrap()
}

/// Reads a file that makes the fake ffmpeg behave as `does` names, and returns the error's text.
fn said(does: &str) -> String {
    let file = [b"\0\0\0\x20ftyp", does.as_bytes()].concat();
    let limits = AudioLimits { seconds: 1, ..AudioLimits::default() };
    fake().audio(&file, 16_000, &limits, &GO_ON).unwrap_err().to_string()
}

#[test]
fn a_file_that_breaks_a_limit_is_an_error_that_says_so() {
    assert_eq!(said("fails"), "an audio clip cannot be read: ffmpeg, within 192 MiB: moov atom not found");
    assert_eq!(said("silent"), "the file has no audio track");
    let flood = said("floods");
    assert!(flood.contains("it decodes to more than 100096 bytes"), "{flood}");
    let grown = said("grows");
    assert!(grown.contains("within 192 MiB") && grown.contains("memory exhausted"), "{grown}");
    let began = Instant::now();
    let talked = said("talks");
    assert!(talked.contains("words without end"), "{talked}");
    assert!(began.elapsed() < Duration::from_secs(20), "its words are bounded, not only its time");
}

#[test]
fn a_run_ends_with_its_request() {
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| fake().audio(b"\0\0\0\x20ftypsleeps", 16_000, &AudioLimits::default(), &stop));
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(read.join().unwrap().unwrap_err(), MediaError::Abandoned);
    });
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// A clip that ffmpeg makes of these arguments.
fn clip(name: &str, arguments: &[&str]) -> Vec<u8> {
    let path: PathBuf = std::env::temp_dir().join(format!("plimsoll-{}-{name}", std::process::id()));
    let mut command = Command::new("ffmpeg");
    command.args(["-v", "error", "-y", "-nostdin"]).args(arguments).arg(&path);
    let output = command.output().expect("ffmpeg is installed (tests/clients/install.sh)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bytes = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    bytes
}

const PICTURES: [&str; 4] = ["-f", "lavfi", "-i", "testsrc2=s=64x48:r=10:d=3"];

/// Every frame, as ffmpeg writes them in one go.
fn all_frames(pixels: &[&str]) -> Vec<Vec<u8>> {
    let raw = clip("all.rgb", &[&PICTURES[..], pixels, &["-pix_fmt", "rgb24", "-f", "rawvideo"]].concat());
    raw.chunks(64 * 48 * 3).map(<[u8]>::to_vec).collect()
}

#[test]
#[ignore = "external"]
fn frames_of_video_files_are_those_that_were_written() {
    let ffmpeg = Ffmpeg::new("ffmpeg".into()).unwrap();
    let frames = all_frames(&[]);
    assert_eq!(frames.len(), 30);
    for (name, codec) in [
        ("a.mp4", &["-c:v", "libx264rgb", "-qp", "0", "-bf", "2"][..]),
        ("a.mov", &["-c:v", "libx264rgb", "-qp", "0"]),
        ("a.mkv", &["-c:v", "libx264rgb", "-qp", "0"]),
        ("a.avi", &["-c:v", "rawvideo", "-pix_fmt", "bgr24"]),
    ] {
        let file = clip(name, &[&PICTURES[..], codec].concat());
        assert!(Container::of(&file).is_some(), "{name}");
        let film = ffmpeg.film(&file, &ImageLimits::default(), &GO_ON).unwrap();
        assert_eq!((film.size, film.frames), (Size { height: 48, width: 64 }, 30), "{name}");
        assert!((2900..=3100).contains(&film.duration_ms), "{name}: {}", film.duration_ms);
        let (indices, mut taken) = ([0, 7, 7, 29], Vec::new());
        ffmpeg.frames(&file, &film, &indices, &GO_ON, |frame: &Rgb| taken.push(frame.data.clone())).unwrap();
        let expected: Vec<_> = indices.iter().map(|index| frames[*index as usize].clone()).collect();
        assert_eq!(taken, expected, "{name}");
    }
}

#[test]
#[ignore = "external"]
fn video_files_are_upright_limited_and_whole() {
    let ffmpeg = Ffmpeg::new("ffmpeg".into()).unwrap();
    let limits = ImageLimits::default();
    let upright = clip("b.mp4", &[&PICTURES[..], &["-c:v", "libx264", "-pix_fmt", "yuv420p"]].concat());
    let path = std::env::temp_dir().join(format!("plimsoll-{}-turned.mp4", std::process::id()));
    std::fs::write(&path, &upright).unwrap();
    let turned = clip("c.mp4", &["-i", path.to_str().unwrap(), "-metadata:s:v", "rotate=90", "-c", "copy"]);
    std::fs::remove_file(&path).unwrap();
    let size = |file: &[u8]| ffmpeg.film(file, &limits, &GO_ON).map(|film| film.size);
    assert_eq!(size(&upright), Ok(Size { height: 48, width: 64 }));
    // Newer releases of ffmpeg no longer write the old tag.
    assert!([Ok(Size { height: 64, width: 48 }), size(&upright)].contains(&size(&turned)));
    let small = ImageLimits { pixels: 64 * 48 - 1, ..limits };
    let over = ffmpeg.film(&upright, &small, &GO_ON).unwrap_err().to_string();
    assert_eq!(over, "a video has 3072 pixels; the limit is 3071 (--max-decode-pixels)");
    let cut = ffmpeg.film(&upright[..upright.len() / 2], &limits, &GO_ON).unwrap_err().to_string();
    assert!(cut.contains("moov atom not found"), "{cut}");
    let sound = clip("d.m4a", &["-f", "lavfi", "-i", "sine=d=1", "-c:a", "aac"]);
    assert!(ffmpeg.film(&sound, &limits, &GO_ON).is_err(), "it has no video track");
    let silent = ffmpeg.audio(&upright, 16_000, &AudioLimits::default(), &GO_ON);
    assert_eq!(silent, Err(MediaError::NoAudioTrack));
    // Matroska can be read up to where it ends; then too few of its frames are there.
    let whole = clip("e.mkv", &[&PICTURES[..], &["-c:v", "libx264"]].concat());
    let film = ffmpeg.film(&whole, &limits, &GO_ON).unwrap();
    let missing = ffmpeg.frames(&whole[..whole.len() / 2], &film, &[0, 10, 20, 29], &GO_ON, |_| ()).unwrap_err();
    assert!(missing.to_string().contains("a video cannot be read"), "{missing}");
}

#[test]
#[ignore = "external"]
fn sounds_become_wav_of_one_channel() {
    let ffmpeg = Ffmpeg::new("ffmpeg".into()).unwrap();
    let limits = AudioLimits::default();
    for (name, codec) in [("a.m4a", "aac"), ("a.aac", "aac"), ("a.opus", "libopus"), ("a.webm", "libopus")] {
        let source =
            ["-f", "lavfi", "-i", "sine=frequency=440:sample_rate=48000:duration=2", "-ac", "2", "-c:a", codec];
        let file = clip(name, &source);
        let wave = ffmpeg.audio(&file, 16_000, &limits, &GO_ON).unwrap();
        let clip = audio::decode(&wave, &limits, &GO_ON).unwrap();
        assert_eq!(clip.rate, 16_000, "{name}");
        assert!((31_900..34_000).contains(&clip.samples.len()), "{name}: {} samples", clip.samples.len());
        // As many rises through zero as the tone has waves.
        let middle = &clip.samples[8_000..24_000];
        let rises = middle.windows(2).filter(|pair| pair[0] < 0.0 && pair[1] >= 0.0).count();
        assert!((438..=442).contains(&rises), "{name}: {rises} waves a second");
        let short = AudioLimits { seconds: 1, ..limits };
        let cut = ffmpeg.audio(&file, 16_000, &short, &GO_ON).unwrap();
        let over = audio::decode(&cut, &short, &GO_ON).unwrap_err().to_string();
        assert!(over.contains("the limit is 1 (--max-audio-seconds)"), "{name}: {over}");
    }
}
