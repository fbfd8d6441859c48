//! A chat request passes few functions, and ARCHITECTURE.md lists them. Names and their number are checked, not the calls.

use std::collections::HashMap;

use crate::{code_files, root};

/// Functions from the accepted connection to the first token.
const FUNCTIONS_MAX: usize = 40;

/// The functions that the page lists, each with its file: `` - `file`: `function`, `function` ``.
fn listed(page: &str) -> Vec<(String, &str)> {
    let section = page.split("\n## ").find(|section| section.starts_with("The way of a request")).unwrap_or_default();
    let items = section.split("\n- ").skip(1).flat_map(|item| item.split("\n\n").next());
    let (mut all, mut file) = (Vec::new(), String::new());
    for word in items.flat_map(|item| item.split('`').skip(1).step_by(2)) {
        match word.contains('/') {
            true => word.clone_into(&mut file),
            false => all.push((file.clone(), word)),
        }
    }
    all
}

#[test]
fn a_chat_request_passes_few_functions_and_they_are_listed() {
    let page = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page");
    let (listed, files) = (listed(&page), code_files().into_iter().collect::<HashMap<_, _>>());
    let there = |file: &str, name: &str| {
        files.get(file).is_some_and(|text| ["(", "<"].iter().any(|open| text.contains(&format!("fn {name}{open}"))))
    };
    let gone: Vec<_> = listed.iter().filter(|(file, name)| !there(file, name)).collect();
    assert!(gone.is_empty(), "ARCHITECTURE.md lists what is not there: {gone:?}");
    assert!((30..=FUNCTIONS_MAX).contains(&listed.len()), "{} functions: {listed:?}", listed.len());
    println!("{} functions from the accepted connection to the first token", listed.len());
}
