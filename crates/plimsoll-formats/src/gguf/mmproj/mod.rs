//! The encoders of a GGUF model. They are in a second file, which llama.cpp's converter calls `mmproj`.
//!
//! `beside` finds the file, `encoder` builds the encoders' configurations from its metadata, `names` maps its tensors. Reference:
//! llama.cpp, `conversion/qwenvl.py`, `conversion/qwen3vl.py`, `tools/mtmd/clip.cpp`. The metadata and names of other families are in
//! `gemma`, `gemma_audio`, `idefics3`, `intern`, `lfm2`, `llama4`, `pixtral` and `qwen_audio`.

mod beside;
mod encoder;
mod gemma;
mod gemma_audio;
mod idefics3;
mod intern;
mod lfm2;
mod llama4;
mod names;
mod parts;
mod pixtral;
mod qwen_audio;

use super::{Opened, add_file, scales};
use crate::error::{FormatError, quote};
use std::path::{Path, PathBuf};

pub(crate) use beside::is_mmproj;

/// `general.architecture` of these files.
const ARCHITECTURE: &str = "clip";

/// The choice of the file with a GGUF model's encoders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Mmproj {
    /// An `mmproj` file beside the model, if there is one.
    #[default]
    Beside,
    /// No file: the model takes text only.
    Off,
    /// This file.
    File(PathBuf),
}

/// The state of the encoders' file.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum MmprojState {
    /// There is no file, or none was requested.
    #[default]
    None,
    /// Its encoders are part of the checkpoint.
    Loaded {
        /// The file.
        path: PathBuf,
        /// The preparation of images.
        processor: Processor,
    },
    /// A file beside the model that is for another model or of an unknown type. The model takes text only.
    LeftOut {
        /// The file.
        path: PathBuf,
        /// The reason, with the value found and the expected one.
        why: String,
    },
}

/// The preparation of images according to an `mmproj` file. A value that the file lacks has the family's default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Processor {
    /// Mean of each colour.
    pub mean: Option<[f32; 3]>,
    /// Standard deviation of each colour.
    pub std: Option<[f32; 3]>,
    /// Fewest pixels of an image after it is resized.
    pub min_pixels: Option<u64>,
    /// Most pixels of an image after it is resized.
    pub max_pixels: Option<u64>,
    /// The longer side of an image after it is resized, before it is cut.
    pub longest: Option<u64>,
    /// The side of the encoder's input, or its longest allowed side.
    pub side: Option<u64>,
    /// Fewest and most tiles that an image is cut into.
    pub tiles: [Option<u64>; 2],
}

/// The reason why a file gives no encoder.
enum Refusal {
    /// The file is valid, but not for this model.
    Unfit(String),
    /// The file cannot be read.
    Broken(FormatError),
}

impl From<FormatError> for Refusal {
    fn from(error: FormatError) -> Self {
        Refusal::Broken(error)
    }
}

/// Adds the encoders to a model, if there is a file with encoders for it.
///
/// # Errors
///
/// A named file that does not fit the model, or a broken file.
pub(crate) fn attach(opened: &mut Opened, model: &Path, choice: &Mmproj) -> Result<MmprojState, FormatError> {
    let path = match choice {
        Mmproj::Off => return Ok(MmprojState::None),
        Mmproj::File(path) => path.clone(),
        Mmproj::Beside => match beside::find(model)? {
            Some(path) => path,
            None => return Ok(MmprojState::None),
        },
    };
    let files = opened.files.len();
    let read = add(opened, &path);
    if read.is_err() {
        opened.files.truncate(files);
    }
    let failed = |reason: String| Err(FormatError::Mmproj { path: path.clone(), reason });
    match read {
        Ok(processor) => Ok(MmprojState::Loaded { path, processor }),
        Err(Refusal::Unfit(why)) if *choice == Mmproj::Beside => Ok(MmprojState::LeftOut { path, why }),
        Err(Refusal::Unfit(why)) => failed(why),
        // The message of this error already names the file.
        Err(Refusal::Broken(error @ (FormatError::Io { .. } | FormatError::Changed { .. }))) => Err(error),
        Err(Refusal::Broken(error)) => failed(error.to_string()),
    }
}

/// Whether a file of this architecture is an `mmproj` file rather than a model.
pub(super) fn is_encoder(architecture: &str) -> bool {
    architecture == ARCHITECTURE
}

/// Maps the file and adds its encoders and their tensors to the model.
fn add(opened: &mut Opened, path: &Path) -> Result<Processor, Refusal> {
    let mut header = add_file(&mut opened.files, path, None)?;
    let architecture = header.meta.str("general.architecture").unwrap_or_default();
    if !is_encoder(architecture) {
        let found = quote(architecture);
        return Err(Refusal::Unfit(format!(
            "general.architecture is {found}; an mmproj file has {ARCHITECTURE:?}: give the file that holds the encoders"
        )));
    }
    let read = encoder::read(&header.meta, &header.entries, &opened.meta, &opened.config)?;
    scales::join(&mut header.entries, &opened.files)?;
    let entries = names::canonical(&read, header.entries)?;
    opened.directory = std::mem::take(&mut opened.directory).with(entries)?;
    opened.config.audio = read.audio.map(|encoder| encoder.audio);
    let mut processor = Processor::default();
    if let Some(images) = read.images {
        opened.config.vision = Some(images.vision);
        opened.config.rope_sections = images.sections;
        processor = images.processor;
    }
    opened.config.check()?;
    Ok(processor)
}
