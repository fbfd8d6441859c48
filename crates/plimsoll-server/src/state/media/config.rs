//! The operator's settings for media.

use std::path::PathBuf;
use std::time::Duration;

use plimsoll_media::Modality;
use plimsoll_media::audio::AudioLimits;
use plimsoll_media::ffmpeg::Ffmpeg;
use plimsoll_media::image::ImageLimits;

/// The most images and videos that are decoded at once. Audio has a separate limit of the same size: an image never waits for minutes of
/// audio.
pub(crate) const DECODERS: usize = 2;

/// The addresses from which media may be fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MediaFetch {
    /// No address: media come in the body, or from a directory of the server's.
    Off,
    /// Public addresses.
    #[default]
    Public,
    /// Public addresses, private networks and this machine.
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

/// Settings for media, where the served model takes any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaConfig {
    /// The addresses from which media may be fetched.
    pub fetch: MediaFetch,
    /// Host names that media may be fetched from; empty for all.
    pub allowed_domains: Vec<String>,
    /// A file must arrive completely within this time.
    pub fetch_timeout: Duration,
    /// Directories from which `file://` may read.
    pub roots: Vec<PathBuf>,
    /// Limits on an image before it is resized.
    pub image: ImageLimits,
    /// The most bytes of an audio clip's file. The engine limits the clip's length.
    pub audio_bytes: u64,
    /// The most seconds of an audio clip that is transcribed window by window.
    pub transcription_seconds: u64,
    /// A request waits this long for memory to decode its media, and as long for a decoder.
    pub room_timeout: Duration,
    /// Decodes video files, and audio in formats that the server itself does not decode.
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
    /// Seconds of a transcribed clip at most, unless the operator says otherwise: four hours.
    pub const TRANSCRIPTION_SECONDS: u64 = 4 * 3600;

    /// Returns the most bytes of a file of this kind, and the flag that sets this limit.
    pub(crate) fn file_limit(&self, kind: Modality) -> (u64, &'static str) {
        match kind {
            Modality::Image | Modality::Video => (self.image.file_bytes, "--max-image-bytes"),
            Modality::Audio => (self.audio_bytes, "--max-audio-bytes"),
        }
    }
}
