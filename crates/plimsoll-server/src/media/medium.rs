//! A medium as a request names it, and the source of its bytes.

use std::path::PathBuf;

use plimsoll_media::Modality;
use plimsoll_media::ffmpeg::Film;

/// One medium as a request names it.
#[derive(Clone, Debug)]
pub(crate) struct Medium {
    /// The path of the medium's field in the body.
    pub param: String,
    pub kind: Modality,
    /// One file, or the frames of a list.
    pub sources: Vec<Source>,
    /// The most pixels after the resize, if the client sets a limit.
    pub pixels_max: Option<u64>,
    /// Frames a second of a list of frames; none for a file.
    pub listed: Option<f64>,
    /// Whether it is the audio track of the video before it.
    pub of_video: bool,
    /// The result of ffmpeg for a video file.
    pub film: Option<Film>,
    /// Whether an audio clip is transcribed window by window.
    pub windows: Windowing,
}

/// Whether an audio clip is transcribed window by window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Windowing {
    /// The clip is one item.
    #[default]
    Never,
    /// Window by window if the clip is longer than a window.
    IfLonger,
    /// Window by window even if the clip fits into one.
    Always,
}

/// The source of a medium's bytes.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// In memory.
    Bytes(Vec<u8>),
    /// On another server.
    Url(String),
    /// In a file under one of the server's roots.
    File(PathBuf),
    /// In the audio track of the video before it.
    Track,
}

impl Medium {
    /// A medium from one file, or from a list of frames with its frames a second.
    pub fn new(param: String, kind: Modality, sources: Vec<Source>, listed: Option<f64>) -> Self {
        let windows = Windowing::Never;
        Self { param, kind, sources, pixels_max: None, listed, of_video: false, film: None, windows }
    }

    /// The audio track of the video before it.
    pub fn track(param: String) -> Self {
        Self { of_video: true, ..Self::new(param, Modality::Audio, vec![Source::Track], None) }
    }

    /// Returns whether a file must be fetched or read before the medium is measured.
    pub fn needs_fetch(&self) -> bool {
        self.sources.iter().any(|source| matches!(source, Source::Url(_) | Source::File(_)))
    }

    /// Returns the heap bytes of its files in memory, URLs and paths.
    pub fn bytes(&self) -> u64 {
        let own = |source: &Source| match source {
            Source::Bytes(bytes) => bytes.capacity(),
            Source::Url(url) => url.capacity(),
            Source::File(path) => path.as_os_str().len(),
            Source::Track => 0,
        };
        self.sources.iter().map(|source| own(source) as u64).sum()
    }
}
