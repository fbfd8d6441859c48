//! A medium as a request names it, and where its bytes come from.

use std::path::PathBuf;

use plimsoll_media::Modality;
use plimsoll_media::ffmpeg::Film;

/// One medium as a request names it.
#[derive(Clone, Debug)]
pub(crate) struct Medium {
    /// Where it stands in the body.
    pub param: String,
    pub kind: Modality,
    /// One file, or the frames of a list.
    pub sources: Vec<Source>,
    /// The client wants no more pixels than this after the resize.
    pub pixels_max: Option<u64>,
    /// Frames of a list a second; none for one file.
    pub listed: Option<f64>,
    /// It is the audio track of the video before it.
    pub of_video: bool,
    /// What ffmpeg has found in a video file.
    pub film: Option<Film>,
    /// Whether an audio clip is taken window by window.
    pub windows: Windowing,
}

/// Whether an audio clip is taken window by window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Windowing {
    /// It is one item.
    #[default]
    Never,
    /// If it is longer than a window.
    IfLonger,
    /// Also if it fits into one.
    Always,
}

/// Where bytes come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// They are here.
    Bytes(Vec<u8>),
    /// From another server.
    Url(String),
    /// From a file under one of the server's roots.
    File(PathBuf),
    /// The audio track of the video before it.
    Track,
}

impl Medium {
    /// One file of a kind, or the frames of a list with its frames a second.
    pub fn new(param: String, kind: Modality, sources: Vec<Source>, listed: Option<f64>) -> Self {
        let windows = Windowing::Never;
        Self { param, kind, sources, pixels_max: None, listed, of_video: false, film: None, windows }
    }

    /// The audio track of the video before it.
    pub fn track(param: String) -> Self {
        Self { of_video: true, ..Self::new(param, Modality::Audio, vec![Source::Track], None) }
    }

    /// Whether any of its files has to be got first.
    pub fn needs_fetch(&self) -> bool {
        self.sources.iter().any(|source| matches!(source, Source::Url(_) | Source::File(_)))
    }

    /// Bytes that are here.
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
