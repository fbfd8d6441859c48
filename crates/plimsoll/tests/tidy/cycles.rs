//! Modules of a crate import each other downwards only: no module reaches itself through others.
//!
//! An import between a module and one that encloses it is not counted: the two are one unit.

use std::collections::{BTreeMap, BTreeSet};

use crate::{code, root, sources};

/// A module's place in its crate: `["cache", "radix"]`; empty for the crate itself.
type Module = Vec<String>;

/// The modules of a crate, without tests, and the code of each on one line.
fn modules(name: &str) -> BTreeMap<Module, String> {
    let folder = root().join("crates").join(name).join("src");
    let mut all = BTreeMap::new();
    for path in sources(&folder) {
        let relative = path.strip_prefix(&folder).expect("it is in there").with_extension("");
        let mut module: Module = relative.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let is_test = module.iter().any(|part| part == "tests" || part.ends_with("_tests"));
        if is_test || module[0] == "bin" {
            continue;
        }
        if ["mod", "lib", "main"].contains(&module[module.len() - 1].as_str()) {
            module.pop();
        }
        let text = std::fs::read_to_string(&path).expect("a source can be read");
        let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        all.insert(module, text.lines().map(code).collect::<Vec<_>>().join(" "));
    }
    all
}

/// The paths in a use declaration, braces taken apart.
fn spread(tree: &str, prefix: &str, paths: &mut Vec<String>) {
    let (mut depth, mut start) = (0, 0);
    for (at, c) in tree.char_indices().chain([(tree.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let item = tree[start..at].trim();
                start = at + 1;
                match item.split_once('{') {
                    Some((head, rest)) => {
                        spread(rest.trim_end().trim_end_matches('}'), &format!("{prefix}{head}"), paths)
                    }
                    None if !item.is_empty() => paths.push(format!("{prefix}{item}")),
                    None => {}
                }
            }
            _ => {}
        }
    }
}

/// The modules that a module's code names.
fn named(module: &Module, text: &str, all: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let mut paths = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in text.match_indices(start) {
            if text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let is_use = text[..at].trim_end().ends_with("use");
            let end = |c: char| if is_use { c == ';' } else { !(c.is_alphanumeric() || c == '_' || c == ':') };
            let path = text[at..].split(end).next().unwrap_or_default();
            spread(path, "", &mut paths);
        }
    }
    let resolve = |path: &String| {
        let mut place = module.clone();
        for (index, part) in path.split("::").map(str::trim).enumerate() {
            match part {
                "crate" => place.clear(),
                "self" if index == 0 => {}
                "super" => drop(place.pop()),
                part => place.push(part.split(' ').next().unwrap_or_default().to_owned()),
            }
        }
        // What is no module is an item of the last one.
        (0..=place.len()).rev().map(|length| place[..length].to_vec()).find(|part| all.contains_key(part))
    };
    let encloses = |a: &Module, b: &Module| b.starts_with(a) || a.starts_with(b);
    paths.iter().filter_map(resolve).filter(|other| !encloses(module, other)).collect()
}

/// Everything that can be reached from a module.
fn reached(from: &Module, edges: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<Module> {
    let (mut seen, mut left) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(module) = left.pop() {
        for next in edges.get(&module).into_iter().flatten() {
            if seen.insert(next.clone()) {
                left.push(next.clone());
            }
        }
    }
    seen
}

/// What a crate's modules import.
fn imports(name: &str) -> BTreeMap<Module, BTreeSet<Module>> {
    let all = modules(name);
    all.iter().map(|(module, text)| (module.clone(), named(module, text, &all))).collect()
}

/// The modules that reach themselves.
fn rings(edges: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<String> {
    let in_ring = edges.keys().filter(|module| reached(module, edges).contains(*module));
    in_ring.map(|module| module.join("::")).collect()
}

#[test]
fn no_module_imports_itself_through_others() {
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(root().join("crates")).expect("there are crates") {
        let name = entry.expect("it can be listed").file_name().to_string_lossy().into_owned();
        let edges = imports(&name);
        let rings = rings(&edges);
        println!("{name}: {} of {} modules in rings", rings.len(), edges.len());
        if !rings.is_empty() {
            wrong.push(format!("{name}: {} modules in rings: {rings:?}", rings.len()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The folders and files of a crate in the table of ARCHITECTURE below `title`, from the top.
fn listed(title: &str) -> Vec<String> {
    let page = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the page");
    let section = page.split("\n## ").find(|section| section.starts_with(title)).unwrap_or_default();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let names = cells.flat_map(|cell| cell.split("`, `"));
    names.map(|name| name.trim_end_matches('`').trim_end_matches('/').trim_end_matches(".rs").to_owned()).collect()
}

/// In the two crates with many folders each is a layer: it imports only those that ARCHITECTURE lists below it.
#[test]
fn folders_of_engine_and_server_import_downwards_only() {
    for (name, title) in [("plimsoll-engine", "The engine's folders"), ("plimsoll-server", "The server's folders")] {
        let listed = listed(title);
        let level = |module: &Module| listed.iter().position(|folder| Some(folder) == module.first());
        let mut wrong = Vec::new();
        for (module, imported) in imports(name) {
            // The crate itself names all of them; a test engine may.
            if module.is_empty() || ["testing", "fuzzed"].contains(&module[0].as_str()) {
                continue;
            }
            let from = level(&module);
            let above = |to: &&Module| !to.is_empty() && to[0] != module[0] && (from.is_none() || level(to) <= from);
            wrong.extend(imported.iter().filter(above).map(|to| [&module, to].map(|at| at.join("::"))));
            if from.is_none() {
                wrong.push([module.join("::"), "is not in the table".into()]);
            }
        }
        assert!(wrong.is_empty() && listed.len() > 10, "{name}: {listed:?}: {wrong:#?}");
    }
}
