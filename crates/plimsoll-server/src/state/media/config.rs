//! What the operator allows of media.

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_media::Modality;
use plimsoll_media::audio::AudioLimits;
use plimsoll_media::ffmpeg::Ffmpeg;
use plimsoll_media::image::ImageLimits;

/// Images and videos that are decoded at once, and as many audio clips: an image never waits for minutes of audio.
pub(crate) const DECODERS: usize = 2;

/// From where media may be fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MediaFetch {
    /// From nowhere: they come in the body, or from a directory of the server's.
    Off,
    /// From public addresses.
    #[default]
    Public,
    /// From private networks and from this machine, too.
    Any,
}

impl std::str::FromStr for MediaFetch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "public" => Ok(Self::Public),
            "any" => Ok(Self::Any),
            other => Err(format!("`{other}` is none of off, public and any")),
        }
    }
}

impl std::fmt::Display for MediaFetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Public => "public",
            Self::Any => "any",
        })
    }
}

/// What the HTTP side takes of media, where the served model takes any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaConfig {
    /// From where they may be fetched.
    pub fetch: MediaFetch,
    /// Hosts that may be asked; empty for all.
    pub allowed_domains: Vec<String>,
    /// A file must have come within this time.
    pub fetch_timeout: Duration,
    /// Directories from which `file://` may read.
    pub roots: Vec<PathBuf>,
    /// What an image may be at most, before it is resized.
    pub image: ImageLimits,
    /// What the file of an audio clip may have in bytes at most. How long it may be, the engine says.
    pub audio_bytes: u64,
    /// Most seconds of an audio clip that is transcribed window by window.
    pub transcription_seconds: u64,
    /// A request waits this long for room to decode its media in, and as long for a decoder.
    pub room_timeout: Duration,
    /// Decodes video files and audio that nothing here decodes.
    pub ffmpeg: Option<Ffmpeg>,
    /// Certificates that replace the built-in roots.
    pub root_certificates: Option<PathBuf>,
}

impl Default for MediaConfig {
    fn default() -> Self {
        Self {
            fetch: MediaFetch::default(),
            allowed_domains: Vec::new(),
            fetch_timeout: Duration::from_secs(10),
            roots: Vec::new(),
            image: ImageLimits::default(),
            audio_bytes: AudioLimits::default().file_bytes,
            transcription_seconds: Self::TRANSCRIPTION_SECONDS,
            room_timeout: Duration::from_secs(10),
            ffmpeg: None,
            root_certificates: None,
        }
    }
}

impl MediaConfig {
    /// Seconds of a transcribed clip unless the operator says otherwise: four hours.
    pub const TRANSCRIPTION_SECONDS: u64 = 4 * 3600;

    /// Bytes of a file of this kind, at most, and the flag that says so.
    pub(crate) fn file_limit(&self, kind: Modality) -> (u64, &'static str) {
        match kind {
            Modality::Image | Modality::Video => (self.image.file_bytes, "--max-image-bytes"),
            Modality::Audio => (self.audio_bytes, "--max-audio-bytes"),
        }
    }
}
