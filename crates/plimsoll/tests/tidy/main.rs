//! House rules that no compiler holds: `unsafe`, module cycles, sizes, words, test tiers, the way of a request.

mod cycles;
mod sizes;
mod unsafe_code;
mod way;
mod words;

use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The Rust files under a folder.
pub fn sources(folder: &Path) -> Vec<PathBuf> {
    let (mut all, mut left) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(folder) = left.pop() {
        for entry in std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("it can be listed").path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                all.push(path);
            }
        }
    }
    all.sort();
    all
}

/// The code of a line: without its comment, and without what stands in quotes.
pub fn code(line: &str) -> String {
    let (mut code, mut quoted, mut escaped) = (String::new(), false, false);
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            '/' if !quoted && chars.peek() == Some(&'/') => break,
            c if !quoted => code.push(c),
            _ => {}
        }
    }
    code
}

/// Every Rust file of the workspace with its text, by its path from the root.
pub fn code_files() -> Vec<(String, String)> {
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(&path).expect("a source can be read");
        (path.strip_prefix(root()).unwrap_or(&path).display().to_string(), text)
    };
    sources(&root().join("crates")).into_iter().map(read).collect()
}
