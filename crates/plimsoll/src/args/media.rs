//! Flags about the images, videos and audio of clients: their sources, and the limits of a file. The flags about their memory are
//! the engine's.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use clap::builder::RangedU64ValueParser;
use plimsoll_media::audio::AudioLimits;
use plimsoll_media::ffmpeg::Ffmpeg;
use plimsoll_media::image::ImageLimits;
use plimsoll_server::{MediaConfig, MediaFetch};

use super::values::size;

/// Flags of the HTTP side about images, videos and audio, for models that take them.
#[derive(Debug, Args)]
pub struct MediaArgs {
    /// Addresses that media URLs may be fetched from: off, public (the internet only), any (private networks too). No proxy is used.
    #[arg(long, default_value_t)]
    pub media_fetch: MediaFetch,
    /// Host that media may be fetched from, repeatable [default: every host].
    #[arg(long, value_delimiter = ',')]
    pub allowed_media_domains: Vec<String>,
    /// Most seconds of one fetch.
    #[arg(long, default_value_t = 10, value_parser = RangedU64ValueParser::<u64>::new().range(1..=600))]
    pub media_fetch_timeout: u64,
    /// Directory that file:// URLs may read media from, repeatable [default: none].
    #[arg(long, value_delimiter = ',')]
    pub media_root: Vec<PathBuf>,
    /// Decode video files, AAC and Opus with ffmpeg (5.1 or newer, Linux), each in a process with limits; needs more --media-bytes [default
    /// program: ffmpeg].
    #[arg(long, value_name = "PROGRAM", num_args = 0..=1, default_missing_value = "ffmpeg")]
    pub ffmpeg: Option<PathBuf>,
    /// Largest image or video file in bytes.
    #[arg(long, value_parser = size, default_value_t = ImageLimits::default().file_bytes)]
    pub max_image_bytes: u64,
    /// Largest audio file in bytes.
    #[arg(long, value_parser = size, default_value_t = AudioLimits::default().file_bytes)]
    pub max_audio_bytes: u64,
    /// Longest audio clip in seconds that Whisper transcribes window by window.
    #[arg(long, default_value_t = MediaConfig::TRANSCRIPTION_SECONDS, value_parser = RangedU64ValueParser::<u64>::new().range(1..=86_400))]
    pub max_transcription_seconds: u64,
    /// Most pixels of an image before it is resized.
    #[arg(long, default_value_t = ImageLimits::default().pixels)]
    pub max_decode_pixels: u64,
    /// Most frames of an animation; the frames of a video are taken from them.
    #[arg(long, default_value_t = ImageLimits::default().frames)]
    pub max_animation_frames: u64,
    /// Most pixels of an animation, all frames together.
    #[arg(long, default_value_t = ImageLimits::default().animation_pixels)]
    pub max_animation_pixels: u64,
}

impl MediaArgs {
    /// The server's configuration of media.
    pub fn config(&self) -> anyhow::Result<MediaConfig> {
        for root in &self.media_root {
            let found = root.metadata().with_context(|| format!("--media-root {}", root.display()))?;
            anyhow::ensure!(found.is_dir(), "--media-root {} is not a directory", root.display());
        }
        let ffmpeg = self.ffmpeg.clone().map(Ffmpeg::new).transpose();
        Ok(MediaConfig {
            ffmpeg: ffmpeg.map_err(|why| anyhow::anyhow!("--ffmpeg: {why}"))?,
            fetch: self.media_fetch,
            allowed_domains: self.allowed_media_domains.clone(),
            fetch_timeout: Duration::from_secs(self.media_fetch_timeout),
            roots: self.media_root.clone(),
            image: ImageLimits {
                file_bytes: self.max_image_bytes,
                pixels: self.max_decode_pixels,
                frames: self.max_animation_frames,
                animation_pixels: self.max_animation_pixels,
            },
            audio_bytes: self.max_audio_bytes,
            transcription_seconds: self.max_transcription_seconds,
            root_certificates: plimsoll_hub::Settings::from_env().root_certificates,
            ..MediaConfig::default()
        })
    }
}
