//! The user's text for a model, and its parsing. No network access, and no file system access beyond a check for existence.

use std::path::{Path, PathBuf};

use crate::catalogue::{self, CATALOGUE};
use crate::entry::Entry;
use crate::error::{HubError, printable};
use crate::known::{self, KNOWN};
use crate::names::{check_file, check_repo, closest};

/// A model, as the user named it.
#[derive(Debug)]
pub enum ModelRef {
    /// A name of the catalogue.
    Catalogue(&'static Entry),
    /// `hf:org/repo` or `hf:org/repo:file`.
    Hub {
        /// `org/repo`, checked.
        repo: String,
        /// The requested file; without it the repository's checkpoint, or its obvious GGUF file.
        file: Option<String>,
    },
    /// A GGUF file on this machine.
    GgufFile(PathBuf),
    /// A checkpoint directory on this machine.
    Directory(PathBuf),
}

impl ModelRef {
    /// Parses the user's text.
    ///
    /// A catalogue name wins over a file of the same name in the working directory; `./name` means the file.
    ///
    /// # Errors
    ///
    /// [`HubError::UnknownModel`] lists the catalogue and the closest name; [`HubError::NoSuchPath`],
    /// [`HubError::BadReference`] and [`HubError::UnsafeName`] have the reason.
    pub fn parse(spec: &str) -> Result<Self, HubError> {
        if let Some(entry) = catalogue::find(spec) {
            return Ok(Self::Catalogue(entry));
        }
        if let Some(repo) = known::find(spec).and_then(|known| known.repo) {
            return Ok(Self::Hub { repo: repo.to_owned(), file: None });
        }
        if let Some(rest) = spec.strip_prefix("hf:") {
            return Self::parse_hub(rest);
        }
        let bad = |why: &str| Err(HubError::BadReference { spec: printable(spec), why: why.to_owned() });
        if spec.is_empty() {
            return bad("it is empty");
        }
        if spec.contains("://") {
            return bad("addresses are not fetched; write hf:org/repo[:file] for the hub");
        }
        let path = Path::new(spec);
        if path.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        if path.is_file() {
            return if has_gguf_extension(path) {
                Ok(Self::GgufFile(path.to_owned()))
            } else {
                bad("a model file ends in .gguf; for a checkpoint give its directory")
            };
        }
        Err(nothing_there(spec))
    }

    fn parse_hub(rest: &str) -> Result<Self, HubError> {
        let (repo, file) = match rest.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (rest, None),
        };
        check_repo(repo)?;
        file.map_or(Ok(()), check_file)?;
        Ok(Self::Hub { repo: repo.to_owned(), file: file.map(str::to_owned) })
    }

    /// Returns the one spelling under which the cache stores and lists it; a path for local files.
    #[must_use]
    pub fn canonical_name(&self) -> String {
        match self {
            Self::Catalogue(entry) => entry.name.to_owned(),
            Self::Hub { repo, file: None } => format!("hf:{repo}"),
            Self::Hub { repo, file: Some(file) } => format!("hf:{repo}:{file}"),
            Self::GgufFile(path) | Self::Directory(path) => path.display().to_string(),
        }
    }
}

fn has_gguf_extension(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Returns the most helpful error for a text that is no catalogue name and no existing path.
fn nothing_there(spec: &str) -> HubError {
    let is_path = spec.starts_with(['.', '/', '~']) || has_gguf_extension(Path::new(spec));
    if is_path || spec.contains('/') {
        let hint = if spec.starts_with('~') {
            "; the shell did not expand `~`".to_owned()
        } else if !is_path && check_repo(spec).is_ok() {
            format!("; for the hub write hf:{spec}")
        } else {
            String::new()
        };
        return HubError::NoSuchPath { path: printable(spec), hint };
    }
    HubError::UnknownModel {
        spec: printable(spec),
        closest: {
            let names = CATALOGUE.iter().map(|entry| entry.name).chain(KNOWN.iter().map(|known| known.name));
            closest(spec, names).map(str::to_owned)
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catalogue_names_and_hub_references_are_read() {
        assert!(matches!(ModelRef::parse("smollm2"), Ok(ModelRef::Catalogue(entry)) if entry.name == "smollm2"));
        let ModelRef::Hub { repo, file } = ModelRef::parse("hf:org/repo").unwrap() else {
            panic!("not a hub reference");
        };
        assert_eq!((repo.as_str(), file), ("org/repo", None));
        let reference = ModelRef::parse("hf:org/repo:sub/m.gguf").unwrap();
        assert_eq!(reference.canonical_name(), "hf:org/repo:sub/m.gguf");
        for bad in ["hf:", "hf:repo", "hf:a/b:../c", "hf:a/b:", "hf:a/b:c:d"] {
            assert!(matches!(ModelRef::parse(bad), Err(HubError::UnsafeName { .. })), "{bad}");
        }
    }

    #[test]
    fn a_known_name_means_its_repository() {
        let reference = ModelRef::parse("qwen3-4b").unwrap();
        assert_eq!(reference.canonical_name(), "hf:Qwen/Qwen3-4B-GGUF");
        let error = ModelRef::parse("qwen3-4bb").unwrap_err().to_string();
        assert!(error.contains("did you mean `qwen3-4b`?"), "{error}");
    }

    #[test]
    fn paths_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let gguf = dir.path().join("m.GGUF");
        let other = dir.path().join("m.bin");
        std::fs::write(&gguf, b"x").unwrap();
        std::fs::write(&other, b"x").unwrap();
        let parse = |path: &Path| ModelRef::parse(path.to_str().unwrap());
        assert!(matches!(parse(dir.path()), Ok(ModelRef::Directory(_))));
        assert!(matches!(parse(&gguf), Ok(ModelRef::GgufFile(_))));
        assert!(matches!(parse(&other), Err(HubError::BadReference { .. })));
    }

    #[test]
    fn errors_help() {
        let message = |spec: &str| ModelRef::parse(spec).unwrap_err().to_string();
        let unknown = message("smolm2");
        assert!(unknown.contains("did you mean `smollm2`?"), "{unknown}");
        assert!(unknown.contains("gemma3-270m") && unknown.contains("hf:org/repo"), "{unknown}");
        assert!(message("zzzzzzzzzzz").contains("known names: smollm2"));
        assert!(message("Qwen/Qwen2.5-0.5B").contains("hf:Qwen/Qwen2.5-0.5B"));
        assert!(message("nowhere.gguf").contains("no such file"));
        assert!(message("https://example.org/x.gguf").contains("hf:org/repo"));
        assert!(message("").contains("empty"));
        assert!(message("a\x1b[31mb").contains("\\u{1b}"));
    }
}
