//! Names of models that the user gave as paths.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The last name in a path; for `.` and `..` the name of their directory, and none for the root. Links are not followed: the name of
/// a link's target may be a checksum.
pub fn last_name(path: &Path) -> Option<OsString> {
    let found = || Some(path.canonicalize().ok()?.file_name()?.to_owned());
    path.file_name().map(ToOwned::to_owned).or_else(found)
}

/// A model's name if the user gave none: the name of the file or directory, or else the catalogue name.
pub fn default_name(spec: &str) -> String {
    let path = PathBuf::from(spec);
    let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    // A directory's name may have dots: Qwen2.5-0.5B.
    let name = if path.is_file() && is_gguf { path.file_stem().map(ToOwned::to_owned) } else { last_name(&path) };
    match (path.exists(), name) {
        (true, Some(name)) => name.to_string_lossy().into_owned(),
        _ => spec.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_as_its_directory_or_its_file() {
        let folder = std::env::temp_dir().join(format!("plimsoll-names-{}", std::process::id()));
        let directory = folder.join("Qwen2.5-0.5B-Instruct");
        std::fs::create_dir_all(&directory).unwrap();
        let file = folder.join("SmolLM2-1.7B.Q4_1.gguf");
        std::fs::write(&file, b"").unwrap();
        assert_eq!(default_name(directory.to_str().unwrap()), "Qwen2.5-0.5B-Instruct");
        assert_eq!(default_name(file.to_str().unwrap()), "SmolLM2-1.7B.Q4_1");
        assert_eq!(default_name("smollm2"), "smollm2");
        // A path may end in `..`, which is no name.
        for end in ["..", "../.", "../Qwen2.5-0.5B-Instruct/.."] {
            let spec = directory.join(end);
            assert_eq!(default_name(spec.to_str().unwrap()), folder.file_name().unwrap().to_str().unwrap(), "{end}");
        }
        let here = std::env::current_dir().unwrap();
        assert_eq!(default_name("."), here.file_name().unwrap().to_str().unwrap());
        assert_eq!(default_name("/"), "/");
        std::os::unix::fs::symlink(&file, folder.join("linked.gguf")).unwrap();
        assert_eq!(default_name(folder.join("linked.gguf").to_str().unwrap()), "linked", "not what it leads to");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
