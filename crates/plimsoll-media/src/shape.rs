//! The size of an encoder's input, before the item is decoded: rows and sequences.

/// The kinds of media.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Modality {
    /// One image.
    Image,
    /// A list of frames.
    Video,
    /// Audio.
    Audio,
}

impl Modality {
    /// All kinds.
    pub const ALL: [Modality; 3] = [Modality::Image, Modality::Video, Modality::Audio];

    /// Returns the kind's name.
    pub fn name(self) -> &'static str {
        match self {
            Modality::Image => "image",
            Modality::Video => "video",
            Modality::Audio => "audio",
        }
    }

    /// Returns the name with its article, for messages.
    pub fn noun(self) -> &'static str {
        match self {
            Modality::Image => "an image",
            Modality::Video => "a video",
            Modality::Audio => "an audio clip",
        }
    }

    /// Returns the flag that bounds one item of this kind.
    pub fn flag(self) -> &'static str {
        match self {
            Modality::Image => "--max-image-pixels",
            Modality::Video => "--max-video-frames",
            Modality::Audio => "--max-audio-seconds",
        }
    }
}

/// Height and width in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Size {
    /// Rows.
    pub height: u32,
    /// Columns.
    pub width: u32,
}

impl Size {
    /// A size.
    pub fn new(height: u32, width: u32) -> Self {
        Self { height, width }
    }

    /// Pixels.
    pub fn pixels(self) -> u64 {
        u64::from(self.height) * u64::from(self.width)
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} × {} pixels", self.width, self.height)
    }
}

/// The size of one item in the encoder's memory. The cost of an item must never fall when a field grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// The kind of medium.
    pub modality: Modality,
    /// Rows of the encoder's activations: patches, or audio frames after the convolutions.
    pub rows: u64,
    /// Attention sequences that the rows are divided into: frames, tiles, or windows.
    pub sequences: u64,
    /// Rows of the longest attention sequence of any layer.
    pub longest: u64,
    /// Placeholder tokens in the prompt, which is also the number of output embeddings (A32).
    pub tokens: u64,
}
