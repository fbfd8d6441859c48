//! `unsafe` stands only where ARCHITECTURE.md says, and a comment above each place says why it is sound.

use std::collections::BTreeMap;

use crate::{code, root, sources};

/// What is unsafe in a line.
fn kinds(line: &str) -> Vec<&'static str> {
    let code = code(line);
    let after = code.match_indices("unsafe").map(|(at, word)| code[at + word.len()..].trim_start());
    let kind = |rest: &str| ["{", "impl", "fn", "trait", "extern"].into_iter().find(|kind| rest.starts_with(kind));
    // `unsafe` as a part of a name or in an attribute is none of these.
    after.filter_map(kind).collect()
}

/// Whether the comment directly above the statement that a line belongs to says this.
fn says(lines: &[&str], at: usize, words: &[&str]) -> bool {
    let mut above = lines[..at].iter().rev().map(|line| line.trim()).peekable();
    // The beginning of the statement: what is above ends another one, or is a comment.
    while let Some(line) = above.peek() {
        let ends = line.is_empty() || line.starts_with("//") || line.ends_with([';', '{', '}', ',']);
        if ends && !line.starts_with("#[") {
            break;
        }
        above.next();
    }
    let comment = above.take_while(|line| line.starts_with("//") || line.starts_with("#["));
    comment.into_iter().any(|line| words.iter().any(|word| line.contains(word)))
}

/// The crates that the table in ARCHITECTURE.md lets use `unsafe`.
fn allowed() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("it is there");
    let (_, table) = text.split_once("## Where `unsafe` is").expect("it has the chapter");
    let table = table.split("\n## ").next().unwrap_or_default();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.to_owned()).collect()
}

#[test]
fn unsafe_code_stands_where_the_table_says_and_says_why_it_holds() {
    let mut inventory: BTreeMap<String, BTreeMap<&str, usize>> = BTreeMap::new();
    let (mut bare, mut crates) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(root().join("crates")).expect("there are crates") {
        let folder = entry.expect("it can be listed").path();
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut used = false;
        for path in sources(&folder) {
            let text = std::fs::read_to_string(&path).expect("a source can be read");
            let lines: Vec<&str> = text.lines().collect();
            let file = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
            for (at, kind) in
                lines.iter().enumerate().flat_map(|(at, line)| kinds(line).into_iter().map(move |k| (at, k)))
            {
                *inventory.entry(file.clone()).or_default().entry(kind).or_default() += 1;
                used |= path.starts_with(folder.join("src"));
                let words: &[&str] = match kind {
                    "fn" | "trait" => &["Safety", "SAFETY"],
                    _ => &["SAFETY:"],
                };
                let inherited = kind == "fn" && of_a_trait(&lines, at);
                if !says(&lines, at, words) && !inherited && kind != "extern" {
                    bare.push(format!("{file}:{}: {}", at + 1, lines[at].trim()));
                }
            }
        }
        let root_file = std::fs::read_to_string(folder.join("src/lib.rs")).expect("every crate has one");
        assert_ne!(used, root_file.contains("#![forbid(unsafe_code)]"), "{name} forbids unsafe code, or uses it");
        if used {
            crates.push(name);
        }
    }
    crates.sort();
    for (file, kinds) in &inventory {
        println!("{file}: {kinds:?}");
    }
    let all: usize = inventory.values().flat_map(BTreeMap::values).sum();
    println!("{all} places in {} files", inventory.len());
    assert!(all > 100, "the search finds what there is");
    assert!(bare.is_empty(), "nothing above says why these hold: {bare:#?}");
    let mut allowed = allowed();
    allowed.sort();
    assert_eq!(crates, allowed, "the table in ARCHITECTURE.md");
}

/// Whether a method implements a trait's method and so has its contract.
fn of_a_trait(lines: &[&str], at: usize) -> bool {
    let head = lines[..at].iter().rev().find(|line| line.starts_with("impl") || line.starts_with("unsafe impl"));
    lines[at].starts_with(' ') && head.is_some_and(|line| line.contains(" for "))
}
