//! The checkpoint: one value over either file format, and the way to its rows.
//!
//! Deciding which reader to use, looking tensors up, slicing a row's bytes: no format is parsed here.

use crate::config::ModelConfig;
use crate::decode::{affine, float};
use crate::directory::{Directory, Entry, Span, Storage};
use crate::encoding::{Encoding, TensorInfo};
use crate::error::{FormatError, quote};
use crate::gguf::{self, GgufMeta};
use crate::hf;
use crate::mapping::Mapping;
use crate::row::RowBuf;
use std::io::Read;
use std::path::{Path, PathBuf};

/// An opened checkpoint: configuration, tensor directory, and the mapped files behind it.
///
/// The files are memory-mapped while this value lives. After reading, a caller checks that they are still the files
/// that were opened ([`Checkpoint::unchanged`]).
pub struct Checkpoint {
    /// The model's configuration, bounded and with all defaults resolved.
    pub config: ModelConfig,
    directory: Directory,
    files: Vec<Mapping>,
    meta: Option<GgufMeta>,
    dir: PathBuf,
}

impl Checkpoint {
    /// Opens a GGUF file (the first part, if it is split), a Hugging Face directory, or a lone `config.json`. The last,
    /// and a directory without weights, can be planned with but hold no tensors. A directory that has no `config.json`
    /// but exactly one GGUF file stands for that file.
    ///
    /// # Errors
    ///
    /// Whatever breaks the formats or this crate's limits, by name; no partial checkpoint is returned.
    pub fn open(path: &Path) -> Result<Checkpoint, FormatError> {
        let status = std::fs::metadata(path).map_err(FormatError::io(path))?;
        if status.is_dir() {
            if path.join("adapter_config.json").is_file() {
                return Err(FormatError::adapter("the directory has an adapter_config.json"));
            }
            return match path.join("config.json").is_file() {
                true => Ok(Checkpoint::from_hf(hf::open_dir(path)?, path)),
                false => Checkpoint::open_gguf(&lone_gguf(path)?),
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
        Checkpoint::open_gguf(path)
    }

    fn open_gguf(path: &Path) -> Result<Checkpoint, FormatError> {
        let gguf::Opened { files, config, directory, meta } = gguf::open(path)?;
        Ok(Checkpoint { config, directory, files, meta: Some(meta), dir: parent(path) })
    }

    fn from_hf(opened: hf::Opened, dir: &Path) -> Checkpoint {
        let hf::Opened { files, config, directory } = opened;
        Checkpoint { config, directory, files, meta: None, dir: dir.to_path_buf() }
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

    /// Decodes the part of a float tensor that lies in these rows and columns, row after row, into `out`.
    pub fn decode_block(
        &self,
        name: &str,
        rows: std::ops::Range<usize>,
        columns: std::ops::Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), FormatError> {
        let entry = self.entry(name)?;
        let (all, width) = (entry.info.rows(), entry.info.cols());
        let Storage::Float(span) = &entry.storage else {
            return Err(FormatError::Unsupported(format!("columns of the quantized tensor {}", quote(name))));
        };
        if rows.end > all || columns.end > width || columns.start > columns.end {
            return Err(FormatError::NoSuchRow { name: name.to_owned(), rows: all, row: rows.end });
        }
        out.clear();
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
    /// [`FormatError::NoSuchTensor`] or [`FormatError::NoSuchRow`].
    pub fn decode_rows(&self, name: &str, row: usize, out: &mut RowBuf) -> Result<(), FormatError> {
        let entry = self.entry(name)?;
        let rows = entry.info.rows();
        if row >= rows {
            return Err(FormatError::NoSuchRow { name: name.to_owned(), rows, row });
        }
        match &entry.storage {
            Storage::Float(span) => float::decode(entry.info.encoding, self.row_of(span, rows, row), out),
            Storage::Blocks(span, kind) => kind.decode_row(self.row_of(span, rows, row), out),
            Storage::Affine { codes, scales, biases } => {
                let Encoding::Quant(layout) = entry.info.encoding else {
                    return Ok(());
                };
                let part = |span| self.row_of(span, rows, row);
                affine::decode(layout, part(codes), part(scales), part(biases), out);
            }
        }
        Ok(())
    }

    /// The bytes of a tensor as they lie in the file, or `None` when there is no such tensor or when it is stored in
    /// several pieces (MLX quantization).
    pub fn raw(&self, name: &str) -> Option<&[u8]> {
        match &self.directory.get(name)?.storage {
            Storage::Float(span) | Storage::Blocks(span, _) => Some(self.bytes(span)),
            Storage::Affine { .. } => None,
        }
    }

    /// Lets the pages of a tensor's bytes go, so that the peak while loading stays near the final size plus one tensor.
    /// Reading the tensor again is allowed and faults the pages back in. An unknown name does nothing.
    pub fn release(&self, name: &str) {
        if let Some(entry) = self.directory.get(name) {
            for span in entry.storage.spans() {
                self.files[span.file].release(span.range.clone());
            }
        }
    }

    /// That what was read came from the files as they were opened: none was written to or cut meanwhile, and every part could be read.
    ///
    /// # Errors
    ///
    /// [`FormatError::Changed`], which explains any other error on the way.
    pub fn unchanged(&self) -> Result<(), FormatError> {
        self.files.iter().try_for_each(Mapping::unchanged)
    }

    /// The metadata of a GGUF checkpoint, for the tokenizer and the chat template.
    pub fn gguf(&self) -> Option<&GgufMeta> {
        self.meta.as_ref()
    }

    /// Whether there are weights, or only a configuration to plan with.
    pub fn has_data(&self) -> bool {
        !self.directory.is_empty()
    }

    /// The directory where `tokenizer.json` and its like would lie.
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
    // A pipe would be waited for.
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
        if name.ends_with(".gguf") && !later_part && !name.starts_with("mmproj") {
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
