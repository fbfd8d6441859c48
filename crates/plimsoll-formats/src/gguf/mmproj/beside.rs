//! Finds the `mmproj` file that belongs to a model, by file names alone.

use crate::error::FormatError;
use std::path::{Path, PathBuf};

/// Most `mmproj` files of a directory that are compared.
const CANDIDATES_MAX: usize = 256;

/// Words in names that do not distinguish models.
const COMMON_WORDS: [&str; 3] = ["mmproj", "model", "gguf"];

/// Element types in file names, the preferred type first: published encoders are in bfloat16.
const TYPES: [&str; 4] = ["bf16", "f16", "f32", "q8_0"];

/// Whether a file of this name holds encoders, not a model.
pub(crate) fn is_mmproj(name: &str) -> bool {
    let name = name.to_lowercase();
    name.ends_with(".gguf") && name.contains("mmproj")
}

/// Finds the file for the model at `model` in its directory. For a split model the directory above is searched too, where repositories
/// store it.
pub(super) fn find(model: &Path) -> Result<Option<PathBuf>, FormatError> {
    let name = model.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let dir = match model.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match in_directory(dir, name)? {
        None if name.contains("-of-") => match dir.parent().filter(|above| !above.as_os_str().is_empty()) {
            Some(above) => in_directory(above, name),
            None => Ok(None),
        },
        found => Ok(found),
    }
}

fn in_directory(dir: &Path, model: &str) -> Result<Option<PathBuf>, FormatError> {
    let (mut candidates, mut models) = (Vec::new(), 0);
    for file in std::fs::read_dir(dir).map_err(FormatError::io(dir))? {
        let path = file.map_err(FormatError::io(dir))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|_| path.is_file()) else { continue };
        if !is_mmproj(name) {
            let later_part = name.contains("-of-") && !name.contains("-00001-of-");
            models += usize::from(name.ends_with(".gguf") && !later_part);
        } else if candidates.len() == CANDIDATES_MAX {
            let reason = format!("more than {CANDIDATES_MAX} mmproj files; name one with --mmproj");
            return Err(FormatError::Mmproj { path: dir.to_path_buf(), reason });
        } else {
            candidates.push(name.to_owned());
        }
    }
    Ok(best(candidates, model, models <= 1).map(|name| dir.join(name)))
}

/// Returns the best of these files for a model. Every file fits a model that is `alone` in its directory. Among several models, all words
/// of the file's name must be in the model's.
fn best(mut candidates: Vec<String>, model: &str, alone: bool) -> Option<String> {
    let own = words(model);
    candidates.retain(|name| alone || words(name).iter().all(|word| own.contains(word)));
    candidates.into_iter().min_by_key(|name| {
        let known = words(name).iter().filter(|word| own.contains(word)).count();
        let lower = name.to_lowercase();
        let kind = TYPES.iter().position(|kind| words_of(&lower).any(|word| word == *kind)).unwrap_or(TYPES.len());
        (usize::MAX - known, kind, name.clone())
    })
}

/// The words of a name that may distinguish models.
fn words(name: &str) -> Vec<String> {
    let lower = name.to_lowercase();
    let telling = |word: &&str| !COMMON_WORDS.contains(word) && !TYPES.contains(word);
    words_of(&lower).filter(telling).map(str::to_owned).collect()
}

fn words_of(name: &str) -> impl Iterator<Item = &str> {
    name.split(['-', '.', ' ']).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_the_model_is_found_among_those_of_others() {
        let best =
            |names: &[&str], model, alone| best(names.iter().map(|&name| name.to_owned()).collect(), model, alone);
        let (f16, bf16) = ("mmproj-F16.gguf", "mmproj-BF16.gguf");
        assert_eq!(best(&[f16, bf16, "mmproj-F32.gguf"], "Qwen3.5-9B-Q4_K_M.gguf", true).as_deref(), Some(bf16));
        assert_eq!(best(&["mmproj-Q8_0.gguf", f16], "Qwen3.5-9B-Q4_K_M.gguf", false).as_deref(), Some(f16));
        let names =
            ["mmproj-Qwen3VL-8B-Instruct-F16.gguf", "Qwen2.5-VL-7B-Instruct-mmproj-f16.gguf", "mmproj-model-f16.gguf"];
        for (model, file) in [
            ("Qwen3VL-8B-Instruct-Q8_0.gguf", names[0]),
            ("Qwen2.5-VL-7B-Instruct-Q4_K_M.gguf", names[1]),
            ("llama-3-8B-Instruct.gguf", names[2]),
        ] {
            assert_eq!(best(&names, model, false).as_deref(), Some(file), "{model}");
        }
        assert_eq!(best(&names[..2], "llama-3-8B-Instruct.gguf", false), None);
        assert_eq!(best(&names[..1], "renamed.gguf", true).as_deref(), Some(names[0]));
    }

    #[test]
    fn names_with_mmproj_are_no_models() {
        for name in ["mmproj-F16.gguf", "Qwen2.5-VL-7B-Instruct-mmproj-f16.gguf", "MMPROJ.GGUF"] {
            assert!(is_mmproj(name), "{name}");
        }
        assert!(!is_mmproj("model.gguf") && !is_mmproj("mmproj.json"));
    }
}
