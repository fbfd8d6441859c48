//! Checks `tests/museum/README.md`: it has every row of the catalogue, and every test that it names exists.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::product::repository;

/// The letters of vllm-mlx's rows that were found by reading.
const LETTERS: &str = "A A2 B C D E F G H I J K L M N O P Q R S T U V W X Y Z AA AB AC AD";

fn readme() -> (PathBuf, String) {
    let path = repository().join("tests/museum/README.md");
    let text = fs::read_to_string(&path).expect("the exhibition");
    (path, text)
}

/// Rows by id; a row may stand for several.
fn rows(text: &str) -> BTreeMap<&str, &str> {
    let lines = text.lines().filter(|line| line.starts_with("| T-") || line.starts_with("| V-"));
    lines.map(|line| (line[2..].split(" |").next().expect("an id").trim(), line)).collect()
}

#[test]
fn every_row_of_the_catalogue_is_exhibited_or_says_why_not() {
    let (_, text) = readme();
    let rows = rows(&text);
    let ids = (1..=70).flat_map(|i| [format!("T-{i}"), format!("V-{i}")]);
    for id in ids.chain(LETTERS.split(' ').map(|letter| format!("V-{letter}"))) {
        let row = rows.get(&*id).unwrap_or_else(|| panic!("{id} is missing"));
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        assert_eq!(cells.len(), 4, "{row}");
        assert!(cells.iter().all(|cell| !cell.is_empty()), "{row}");
        assert!(
            cells[3].contains("](") || cells[3].starts_with("cannot be:") || cells[3].starts_with("open:"),
            "{row}"
        );
    }
}

/// `[name](path)` in a text.
fn links(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split('[').skip(1).filter_map(|piece| {
        let (name, rest) = piece.split_once("](")?;
        Some((name.trim_matches('`'), rest.split_once(')')?.0))
    })
}

fn has_test(path: &Path, name: &str) -> bool {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    // A name with a star stands for all tests that begin with it.
    match name.strip_suffix('*') {
        Some(beginning) => text.contains(&format!("fn {beginning}")),
        None => text.contains(&format!("fn {name}(")) || text.contains(&format!("{name}:")),
    }
}

#[test]
fn every_test_that_is_named_exists() {
    let (path, text) = readme();
    let folder = path.parent().expect("a folder");
    let mut checked = 0;
    for (name, file) in links(&text) {
        assert!(has_test(&folder.join(file), name), "{name} is not in {file}");
        checked += 1;
    }
    assert!(checked >= 120, "only {checked} links were found");
}

#[test]
fn every_exhibit_of_this_binary_is_in_the_list() {
    let (_, text) = readme();
    let rooms = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/museum");
    for room in fs::read_dir(rooms).expect("rooms") {
        let path = room.expect("a room").path();
        let code = fs::read_to_string(&path).expect("text");
        for name in code.lines().filter_map(|line| line.strip_prefix("fn ")?.split('(').next()) {
            let exhibit = ["t_", "v_", "r_"].iter().any(|kind| name.starts_with(kind));
            assert!(!exhibit || text.contains(&format!("`{name}`")), "{name} in {} is not exhibited", path.display());
        }
    }
}

#[test]
fn what_is_said_to_fail_without_its_protection_does() {
    let (_, text) = readme();
    let rows = rows(&text);
    for (id, exhibit) in crate::broken::BROKEN {
        let number = id.replace("-0", "-");
        let name = exhibit.split("::").nth(1).expect("a name");
        let row = rows.get(&*number).unwrap_or_else(|| panic!("{id} is missing"));
        assert!(row.contains(name) && row.contains("✂"), "{row}");
    }
    assert_eq!(
        text.lines().filter(|line| line.starts_with("| ") && line.contains("✂")).count(),
        crate::broken::BROKEN.len()
    );
}
