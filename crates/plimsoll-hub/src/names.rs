//! Names from outside (users, listings, markers): the check that they are fit for a path, and their form in a URL.
//!
//! No file system access here: these are rules about strings.

use crate::error::{HubError, printable};

/// The sidecar's name.
pub(crate) const MARKER_FILE: &str = "plimsoll.json";
/// The longest name of a repository or of one path component, in bytes.
const COMPONENT_BYTES_MAX: usize = 200;
/// The longest path inside a repository, in bytes.
const PATH_BYTES_MAX: usize = 1_000;

/// Checks a repository name, `org/repo`, both of letters, digits, `.`, `_` and `-`.
pub(crate) fn check_repo(repo: &str) -> Result<(), HubError> {
    let refuse = |why| Err(unsafe_name(repo, why));
    let Some((org, name)) = repo.split_once('/') else {
        return refuse("a repository is written org/repo");
    };
    for half in [org, name] {
        if half.is_empty() || half.len() > COMPONENT_BYTES_MAX {
            return refuse("both halves of org/repo must have 1 to 200 characters");
        }
        if !half.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-')) {
            return refuse("org/repo may contain letters, digits, '.', '_' and '-' only");
        }
        if half.starts_with(['.', '-']) || half.contains("..") {
            return refuse("org and repo must not start with '.' or '-' nor contain '..'");
        }
    }
    Ok(())
}

/// Checks the name of a file inside a repository: relative, below its directory, and none of this crate's own names.
pub(crate) fn check_file(file: &str) -> Result<(), HubError> {
    let refuse = |why| Err(unsafe_name(file, why));
    if file.is_empty() || file.len() > PATH_BYTES_MAX {
        return refuse("a file name must have 1 to 1000 bytes");
    }
    if file.chars().any(|c| c.is_control()) {
        return refuse("control characters");
    }
    if file.contains(['\\', ':']) {
        return refuse("'\\' and ':' mean something to some file systems");
    }
    for component in file.split('/') {
        if component.is_empty() {
            return refuse("an absolute path or an empty component");
        }
        if component.len() > COMPONENT_BYTES_MAX {
            return refuse("a component longer than 200 bytes");
        }
        // Also keeps `..` out, and names in the directory of partial files: it starts with a dot.
        if component.starts_with('.') {
            return refuse("a component that starts with '.'");
        }
    }
    if file == MARKER_FILE {
        return refuse("the cache uses this name itself");
    }
    Ok(())
}

fn unsafe_name(name: &str, why: &'static str) -> HubError {
    HubError::UnsafeName { name: printable(name), why }
}

/// Returns a path for a URL: everything but unreserved characters and `/` is percent-encoded.
pub(crate) fn url_path(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'/') {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Returns the candidate nearest to `name` by edit distance, ignoring case, if it is near enough to be a typing error.
pub(crate) fn closest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_lowercase();
    // The distance costs the product of the lengths; a very long name gets no suggestion.
    if name.len() > COMPONENT_BYTES_MAX {
        return None;
    }
    candidates
        .filter(|candidate| candidate.len() <= COMPONENT_BYTES_MAX)
        .filter_map(|candidate| {
            let other = candidate.to_lowercase();
            let part_of = name.len() >= 3 && (other.contains(&name) || name.contains(&other));
            let distance = edit_distance(&name, &other);
            let near = distance <= 2.max(other.chars().count() / 3);
            (part_of || near).then_some((distance, candidate))
        })
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Returns Levenshtein's distance in characters.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_file_names_are_refused() {
        for bad in [
            "",
            "/etc/passwd",
            "../x",
            "a/../b",
            "a//b",
            "a/",
            ".hidden",
            "a/.partial/x",
            "C:\\x",
            "a:b",
            "a\\b",
            "a\nb",
            "a\0b",
            "plimsoll.json",
            &"x".repeat(201),
            &"x/".repeat(600),
        ] {
            assert!(check_file(bad).is_err(), "{bad:?} was accepted");
        }
        for good in ["model.gguf", "sub/model-00001-of-00002.safetensors", "with space.json", "名.gguf"] {
            check_file(good).unwrap();
        }
    }

    #[test]
    fn hostile_repositories_are_refused() {
        for bad in ["", "repo", "a/b/c", "../b", "a/..", "a/.b", "-a/b", "a b/c", "a/b?x", "a/", "/b"] {
            assert!(check_repo(bad).is_err(), "{bad:?} was accepted");
        }
        check_repo("Qwen/Qwen2.5-Coder-0.5B_x").unwrap();
    }

    #[test]
    fn urls_carry_no_raw_specials() {
        assert_eq!(url_path("a b/ü?#%.gguf"), "a%20b/%C3%BC%3F%23%25.gguf");
    }

    #[test]
    fn near_names_are_found_and_far_ones_not() {
        let names = ["smollm2", "gemma3-270m", "qwen2.5-coder-0.5b"];
        let near = |name| closest(name, names.into_iter());
        assert_eq!(near("smolm2"), Some("smollm2"));
        assert_eq!(near("SmolLM"), Some("smollm2"));
        assert_eq!(near("gemma3"), Some("gemma3-270m"));
        assert_eq!(near("qwen2.5-coder"), Some("qwen2.5-coder-0.5b"));
        assert_eq!(near("llama-70b-instruct"), None);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }
}
