//! The checkpoint: one value for either file format, with access to its rows.
//!
//! This module chooses the reader, looks tensors up and slices the bytes of a row. It parses no format.

use crate::config::ModelConfig;
use crate::decode::{float, float8, grouped};
use crate::directory::{Directory, Entry, Grouped, Span, Storage};
use crate::encoding::{Encoding, TensorInfo};
use crate::error::FormatError;
use crate::gguf::{self, GgufMeta, Mmproj, MmprojState};
use crate::hf;
use crate::mapping::{FileIdentity, Mapping};
use crate::row::RowBuf;
use crate::scaled;
use crate::stored_rows::StoredTensors;
use std::io::Read;
use std::path::{Path, PathBuf};

/// An opened checkpoint: configuration, tensor directory, and mapped files.
///
/// The files are memory-mapped while this value lives. After reading, a caller checks that they did not change since they were opened
/// ([`Checkpoint::unchanged`]).
pub struct Checkpoint {
    /// The model's configuration, bounded and with all defaults resolved.
    pub config: ModelConfig,
    directory: Directory,
    files: Vec<Mapping>,
    meta: Option<GgufMeta>,
    mmproj: MmprojState,
    draft: Option<Box<Draft>>,
    dir: PathBuf,
}

/// A draft model that is part of a checkpoint.
struct Draft {
    config: ModelConfig,
    sources: Sources,
}

/// The sources of a checkpoint, with which it can be opened again: its path, a vision encoder's file, and its draft model's sources.
#[derive(Clone, Debug)]
pub struct Sources {
    path: PathBuf,
    mmproj: Mmproj,
    draft: Option<Box<Sources>>,
}

impl Sources {
    /// Opens the same checkpoint again.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::open_with`] and [`Checkpoint::with_draft`].
    pub fn open(&self) -> Result<Checkpoint, FormatError> {
        let checkpoint = Checkpoint::open_with(&self.path, &self.mmproj)?;
        match &self.draft {
            Some(draft) => checkpoint.with_draft(draft.open()?),
            None => Ok(checkpoint),
        }
    }
}

/// The prefix of the names of a draft model's tensors ([`Checkpoint::with_draft`]).
pub const DRAFT_PREFIX: &str = "draft.";

impl Checkpoint {
    /// Opens a GGUF file (the first part, if it is split), a Hugging Face directory, or a lone `config.json`. The last,
    /// and a directory without weights, can be planned with but hold no tensors. A directory that has no `config.json`
    /// but exactly one GGUF file stands for that file. A GGUF model has the vision encoder of an `mmproj` file beside it.
    ///
    /// # Errors
    ///
    /// A file that breaks its format or a limit of this crate. The error names the value; no partial checkpoint is returned.
    pub fn open(path: &Path) -> Result<Checkpoint, FormatError> {
        Checkpoint::open_with(path, &Mmproj::Beside)
    }

    /// [`Checkpoint::open`] with a choice of the file that has a GGUF model's vision encoder.
    ///
    /// # Errors
    ///
    /// The same, and a file that is named for a model in another format.
    pub fn open_with(path: &Path, mmproj: &Mmproj) -> Result<Checkpoint, FormatError> {
        let checkpoint = Checkpoint::open_any(path, mmproj)?;
        if let (Mmproj::File(file), None) = (mmproj, &checkpoint.meta) {
            let reason =
                "an mmproj file is for a GGUF model; the encoder of a checkpoint directory is in its own files";
            return Err(FormatError::Mmproj { path: file.clone(), reason: reason.to_owned() });
        }
        Ok(checkpoint)
    }

    fn open_any(path: &Path, mmproj: &Mmproj) -> Result<Checkpoint, FormatError> {
        let status = std::fs::metadata(path).map_err(FormatError::io(path))?;
        if status.is_dir() {
            if path.join("adapter_config.json").is_file() {
                return Err(FormatError::adapter("the directory has an adapter_config.json"));
            }
            return match path.join("config.json").is_file() {
                true => Ok(Checkpoint::from_hf(hf::open_dir(path)?, path)),
                false => Checkpoint::open_gguf(&lone_gguf(path)?, mmproj),
            };
        }
        if path.extension().is_some_and(|extension| extension == "json") {
            return Ok(Checkpoint::from_hf(hf::open_config(path)?, &parent(path)));
        }
        if !begins_as_gguf(path)? {
            return Err(FormatError::NotACheckpoint {
                path: path.to_path_buf(),
                reason: "expected a GGUF file, a directory with config.json, or a config.json".to_owned(),
            });
        }
        Checkpoint::open_gguf(path, mmproj)
    }

    /// Reads a configuration without weights, for planning: `text` is a `config.json`.
    ///
    /// # Errors
    ///
    /// A text that is no valid configuration.
    pub fn of_config(text: &str) -> Result<Checkpoint, FormatError> {
        let config = hf::parse_config(text)?;
        // The configuration belongs to no directory, so this path does not exist.
        let dir = PathBuf::from("/nonexistent");
        Ok(Checkpoint {
            config,
            directory: Directory::default(),
            files: Vec::new(),
            meta: None,
            mmproj: MmprojState::None,
            draft: None,
            dir,
        })
    }

    fn open_gguf(path: &Path, mmproj: &Mmproj) -> Result<Checkpoint, FormatError> {
        let mut opened = gguf::open(path)?;
        let mmproj = gguf::attach(&mut opened, path, mmproj)?;
        let gguf::Opened { files, config, directory, meta } = opened;
        Ok(Checkpoint { config, directory, files, meta: Some(meta), mmproj, draft: None, dir: parent(path) })
    }

    fn from_hf(opened: hf::Opened, dir: &Path) -> Checkpoint {
        let hf::Opened { files, config, directory } = opened;
        Checkpoint {
            config,
            directory,
            files,
            meta: None,
            mmproj: MmprojState::None,
            draft: None,
            dir: dir.to_path_buf(),
        }
    }

    /// Adds a draft model: a smaller model with the same vocabulary. The names of its tensors are [`DRAFT_PREFIX`] and their own names.
    ///
    /// # Errors
    ///
    /// [`FormatError::Draft`] when the vocabularies differ in size, or one of the two is a configuration alone.
    pub fn with_draft(mut self, draft: Checkpoint) -> Result<Checkpoint, FormatError> {
        let [own, other] = [&self.config, &draft.config].map(|config| config.vocab_size);
        if own != other {
            return Err(FormatError::Draft(format!(
                "it has a vocabulary of {other} tokens, and the model has {own}: use a model of the same family"
            )));
        }
        if self.has_data() != draft.has_data() {
            let lacks = if self.has_data() { "the draft model" } else { "the model" };
            return Err(FormatError::Draft(format!("{lacks} has a configuration alone: give both with weights")));
        }
        let (first, sources) = (self.files.len(), draft.sources());
        let mut entries = draft.directory.into_entries();
        for entry in &mut entries {
            entry.name.insert_str(0, DRAFT_PREFIX);
            entry.storage.spans_mut().for_each(|span| span.file += first);
        }
        self.directory = self.directory.with(entries)?;
        self.files.extend(draft.files);
        self.draft = Some(Box::new(Draft { config: draft.config, sources }));
        Ok(self)
    }

    /// The draft model's configuration, if there is one.
    pub fn draft(&self) -> Option<&ModelConfig> {
        self.draft.as_ref().map(|draft| &draft.config)
    }

    /// All tensors by canonical name, in the order in which they lie in the files.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.directory.iter().map(|entry| (entry.name.as_str(), &entry.info))
    }

    /// The tensor of this canonical name, for example `model.layers.0.self_attn.q_proj.weight`. Its shape has not been
    /// compared with the configuration.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.directory.get(name).map(|entry| &entry.info)
    }

    /// Decodes the part of a tensor that lies in these rows and columns, row after row, into `out`.
    pub fn decode_block(
        &self,
        name: &str,
        rows: std::ops::Range<usize>,
        columns: std::ops::Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), FormatError> {
        let entry = self.entry(name)?;
        let (all, width) = (entry.info.rows(), entry.info.cols());
        if rows.end > all || columns.end > width || columns.start > columns.end {
            return Err(FormatError::NoSuchRow { name: name.to_owned(), rows: all, row: rows.end });
        }
        out.clear();
        let Storage::Float(span) = &entry.storage else {
            let (mut buf, mut values) = (RowBuf::default(), vec![0.0; width]);
            for row in rows {
                self.decode_rows(name, row, &mut buf)?;
                buf.dequantize(&mut values);
                out.extend_from_slice(&values[columns.clone()]);
            }
            return Ok(());
        };
        for row in rows {
            let bytes = self.row_of(span, all, row);
            let size = bytes.len() / width.max(1);
            float::widen(entry.info.encoding, &bytes[columns.start * size..columns.end * size], out);
        }
        Ok(())
    }

    /// Decodes one row of a tensor (of a vector: row 0) into `out` and reuses its buffers.
    ///
    /// # Errors
    ///
    /// [`FormatError::NoSuchTensor`] or [`FormatError::NoSuchRow`]; a row of FP8 or NVFP4 with NaN.
    pub fn decode_rows(&self, name: &str, row: usize, out: &mut RowBuf) -> Result<(), FormatError> {
        let entry = self.entry(name)?;
        let rows = entry.info.rows();
        if row >= rows {
            return Err(FormatError::NoSuchRow { name: name.to_owned(), rows, row });
        }
        let mut spans = entry.storage.spans();
        let parts: [Option<&Span>; 3] = std::array::from_fn(|_| spans.next());
        let part = |number: usize| parts[number].map_or(&[][..], |span| self.row_of(span, rows, row));
        if let Some(form) = entry.storage.row_form(entry.info.encoding) {
            form.decode(part, out);
            return Ok(());
        }
        match &entry.storage {
            // Decoded above.
            Storage::Float(_) | Storage::Blocks(..) | Storage::Affine { .. } | Storage::Micro { .. } => {}
            Storage::Turns { parts, run } => {
                let (turn, at) = (row / run, row % run);
                let bytes = self.row_of(&parts[turn % 2], rows / 2, turn / 2 * run + at);
                float::decode(entry.info.encoding, bytes, out);
            }
            Storage::Scaled(scaled) => {
                if !scaled::decode(scaled, (row, rows), part, out) {
                    return Err(FormatError::holds_nan(name, row));
                }
            }
            Storage::F8(parts) => {
                let Encoding::F8 { group } = entry.info.encoding else {
                    return Ok(());
                };
                let scales = (&parts.scales.1, self.bytes(&parts.scales.0));
                let numbers = self.row_of(&parts.numbers, rows, row);
                if !float8::decode(group, numbers, row / parts.block_rows, scales, out) {
                    return Err(FormatError::holds_nan(name, row));
                }
            }
            Storage::Grouped(parts) => {
                let Encoding::Quant(layout) = entry.info.encoding else {
                    return Ok(());
                };
                let Grouped { codes, scales, zeros, order } = &**parts;
                let zeros = zeros.as_ref().map(|(span, cells)| (cells, self.bytes(span)));
                let (codes, scales) = ((&codes.1, self.bytes(&codes.0)), (&scales.1, self.bytes(&scales.0)));
                grouped::decode(layout, (row, entry.info.cols()), codes, scales, zeros, out);
                if let Some(order) = order {
                    let stored = out.codes.clone();
                    out.codes.iter_mut().zip(&**order).for_each(|(code, column)| *code = stored[*column as usize]);
                }
            }
        }
        Ok(())
    }

    /// Returns the rows of these tensors, to be read from their files after the checkpoint is closed.
    ///
    /// # Errors
    ///
    /// A file that cannot be opened again; [`FormatError::NoSuchTensor`]; [`FormatError::Unsupported`] for a tensor without
    /// [plain rows](Checkpoint::has_plain_rows).
    pub fn stored_rows<'a>(&self, names: impl Iterator<Item = &'a str>) -> Result<StoredTensors, FormatError> {
        StoredTensors::open(&self.directory, &self.files, names)
    }

    /// Whether each row of a tensor can be decoded from its own bytes.
    pub fn has_plain_rows(&self, name: &str) -> bool {
        self.directory.get(name).is_some_and(|entry| entry.storage.row_form(entry.info.encoding).is_some())
    }

    /// Returns for each column of a decoded row the index of its input. None if the two are the same. Columns of GPTQ with act-order are
    /// decoded group by group.
    pub fn column_order(&self, name: &str) -> Option<&[u32]> {
        match &self.directory.get(name)?.storage {
            Storage::Grouped(parts) => parts.order.as_deref(),
            _ => None,
        }
    }

    /// The stored bytes of a tensor. `None` if there is no such tensor, or if it is stored in several pieces (quantized checkpoints of
    /// Hugging Face).
    pub fn raw(&self, name: &str) -> Option<&[u8]> {
        match &self.directory.get(name)?.storage {
            Storage::Float(span) | Storage::Blocks(span, _) => Some(self.bytes(span)),
            Storage::Turns { .. }
            | Storage::Affine { .. }
            | Storage::Micro { .. }
            | Storage::Grouped(_)
            | Storage::F8(_)
            | Storage::Scaled(_) => None,
        }
    }

    /// Releases the mapped pages of a tensor's bytes, so that the peak while loading stays near the final size plus one tensor.
    /// Reading the tensor again is allowed and faults the pages back in. An unknown name does nothing.
    pub fn release(&self, name: &str) {
        if let Some(entry) = self.directory.get(name) {
            for span in entry.storage.spans() {
                self.files[span.file].release(span.range.clone());
            }
        }
    }

    /// Checks that the files are still as they were when they were opened: none was written to or cut, and every part could be read.
    ///
    /// # Errors
    ///
    /// [`FormatError::Changed`], which also explains any other error of a read before it.
    pub fn unchanged(&self) -> Result<(), FormatError> {
        self.files.iter().try_for_each(Mapping::unchanged)
    }

    /// Returns the sources of the checkpoint, to open it again.
    pub fn sources(&self) -> Sources {
        let path = match (&self.meta, self.files.first()) {
            (Some(_), Some(file)) => file.path(),
            _ => &self.dir,
        };
        let mmproj = match &self.mmproj {
            MmprojState::Loaded { path, .. } => Mmproj::File(path.clone()),
            MmprojState::None | MmprojState::LeftOut { .. } => Mmproj::Off,
        };
        let draft = self.draft.as_ref().map(|draft| Box::new(draft.sources.clone()));
        Sources { path: path.to_path_buf(), mmproj, draft }
    }

    /// Returns the identities of all its files, with those of a draft model and a vision encoder. None if a file was changed just before it
    /// was opened, or if the system gives no identity.
    pub fn identity(&self) -> Option<Vec<&FileIdentity>> {
        self.files.iter().map(Mapping::identity).collect()
    }

    /// The metadata of a GGUF checkpoint, for the tokenizer and the chat template.
    pub fn gguf(&self) -> Option<&GgufMeta> {
        self.meta.as_ref()
    }

    /// The state of the file with a GGUF model's vision encoder.
    pub fn mmproj(&self) -> &MmprojState {
        &self.mmproj
    }

    /// Whether there are weights, or only a configuration to plan with.
    pub fn has_data(&self) -> bool {
        !self.directory.is_empty()
    }

    /// The directory in which `tokenizer.json` and similar files are looked for.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn entry(&self, name: &str) -> Result<&Entry, FormatError> {
        self.directory.get(name).ok_or_else(|| FormatError::NoSuchTensor(name.to_owned()))
    }

    /// The bytes of a span. The readers checked it against its file.
    fn bytes(&self, span: &Span) -> &[u8] {
        &self.files[span.file].bytes()[span.range.clone()]
    }

    /// The bytes of row `row` of `rows` equal rows.
    fn row_of(&self, span: &Span, rows: usize, row: usize) -> &[u8] {
        let bytes = self.bytes(span);
        let row_bytes = bytes.len() / rows;
        &bytes[row * row_bytes..(row + 1) * row_bytes]
    }
}

/// The directory of a file.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    }
}

/// Whether a file begins with GGUF's magic.
fn begins_as_gguf(path: &Path) -> Result<bool, FormatError> {
    // A read from a named pipe would block.
    if !std::fs::metadata(path).map_err(FormatError::io(path))?.is_file() {
        return Ok(false);
    }
    let mut head = Vec::with_capacity(4);
    let file = std::fs::File::open(path).map_err(FormatError::io(path))?;
    file.take(4).read_to_end(&mut head).map_err(FormatError::io(path))?;
    Ok(head == gguf::MAGIC)
}

/// The only GGUF file of a directory (or the first part of the only split one).
fn lone_gguf(dir: &Path) -> Result<PathBuf, FormatError> {
    let mut found = Vec::new();
    for file in std::fs::read_dir(dir).map_err(FormatError::io(dir))? {
        let path = file.map_err(FormatError::io(dir))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let later_part = name.contains("-of-") && !name.contains("-00001-of-");
        if name.ends_with(".gguf") && !later_part && !gguf::is_mmproj(name) {
            found.push(path);
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        count => Err(FormatError::NotACheckpoint {
            path: dir.to_path_buf(),
            reason: format!("no config.json, and {count} GGUF files where one would do"),
        }),
    }
}
