//! Comments and documents in plain words; ignored tests name their tier.

use crate::{code_files, root};

/// Comment lines with a vague subject, of 1,000.
const VAGUE_MAX: usize = 4;
const VAGUE: [&str; 7] = ["who", "whoever", "nobody", "somebody", "everybody", "anybody", "whose"];

/// Comment paragraphs that begin without a thing, of 1,000 comment lines.
const NAMELESS_MAX: usize = 1;
const NAMELESS: [&str; 6] = ["What", "Those", "One that", "So many", "Whichever", "Who"];

/// Words of the median sentence of README.md and ARCHITECTURE.md.
const SENTENCE_WORDS_MAX: usize = 15;

/// What README.md may have: lines, and characters of a line and of a table's cell.
const README_MAX: [usize; 3] = [120, 120, 60];

/// Tiers that `#[ignore]` may name; `manual` stands before a reason.
const TIERS: [&str; 3] = ["models", "external", "soak"];

#[test]
fn comments_name_the_thing_that_acts() {
    let files = code_files();
    let comments = files.iter().flat_map(|(file, text)| text.lines().map(move |line| (file, line.trim())));
    let comments: Vec<_> = comments.filter(|(_, line)| line.starts_with("//")).collect();
    let is_vague = |line: &str| {
        line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| VAGUE.contains(&word.to_lowercase().as_str()))
    };
    let vague: Vec<String> =
        comments.iter().filter(|(_, line)| is_vague(line)).map(|(file, line)| format!("{file}: {line}")).collect();
    println!("{} of {} comment lines have a vague subject", vague.len(), comments.len());
    assert!(vague.len() * 1000 <= comments.len() * VAGUE_MAX, "{vague:#?}");
}

#[test]
fn comments_begin_with_a_thing() {
    let (mut nameless, mut lines) = (Vec::new(), 0);
    for (file, text) in code_files() {
        let mut goes_on = false;
        for line in text.lines().map(str::trim) {
            let words = line.strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']).trim());
            let begins = words.filter(|words| !goes_on && !words.is_empty());
            let is_nameless = |words: &str| NAMELESS.iter().any(|name| words.starts_with(&format!("{name} ")));
            nameless.extend(begins.filter(|words| is_nameless(words)).map(|words| format!("{file}: {words}")));
            lines += usize::from(words.is_some());
            goes_on = words.is_some_and(|words| !words.is_empty());
        }
    }
    println!("{} of {lines} comment lines begin without a thing", nameless.len());
    assert!(nameless.len() * 1000 <= lines * NAMELESS_MAX, "{nameless:#?}");
}

/// The number of words of every sentence in a Markdown text: without code, tables and headings.
fn sentences(text: &str) -> Vec<usize> {
    let (mut prose, mut code) = (String::new(), false);
    for line in text.lines() {
        code ^= line.starts_with("```");
        let item = line.trim_start().starts_with(['-', '*']) || line.starts_with(|c: char| c.is_ascii_digit());
        match line.trim_start().starts_with(['|', '#', '!', '`']) || code {
            true => prose.push_str(".\n"),
            false => prose.extend([if item || line.is_empty() { ".\n" } else { "" }, line, "\n"]),
        }
    }
    let ends = |c: char| matches!(c, '.' | '!' | '?' | ':' | ';');
    let mut all = vec![0];
    for word in prose.split_whitespace() {
        let counts = word.chars().any(char::is_alphanumeric);
        *all.last_mut().expect("it has one") += usize::from(counts);
        if word.ends_with(ends) {
            all.push(0);
        }
    }
    all.retain(|words| *words > 2);
    all
}

#[test]
fn readme_and_architecture_are_short_and_plain() {
    for name in ["README.md", "ARCHITECTURE.md"] {
        let text = std::fs::read_to_string(root().join(name)).expect("it is there");
        let mut all = sentences(&text);
        all.sort_unstable();
        let median = all[all.len() / 2];
        println!("{name}: {median} words in the median of {} sentences", all.len());
        assert!(median <= SENTENCE_WORDS_MAX, "{name}: the median sentence has {median} words");
    }
    let readme = std::fs::read_to_string(root().join("README.md")).expect("it is there");
    let cells = readme.lines().filter(|line| line.starts_with('|')).flat_map(|line| line.split('|'));
    let longest =
        |texts: &mut dyn Iterator<Item = &str>| texts.map(|text| text.trim().chars().count()).max().unwrap_or(0);
    let found = [readme.lines().count(), longest(&mut readme.lines()), longest(&mut cells.into_iter())];
    assert!(found.iter().zip(README_MAX).all(|(found, most)| *found <= most), "{found:?}, at most {README_MAX:?}");
}

#[test]
fn every_ignored_test_names_its_tier() {
    let mut wrong = Vec::new();
    for (file, text) in code_files().into_iter().filter(|(file, _)| !file.contains("tests/tidy/")) {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| line.starts_with("#[ignore")) {
            let reason = line.split('"').nth(1).unwrap_or_default();
            let manual = reason.starts_with("manual: ") && lines[at + 1].starts_with("fn manual_");
            if !TIERS.contains(&reason) && !manual {
                wrong.push(format!("{file}:{}: {line}", at + 1));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "use one of {TIERS:?}, or \"manual: why\" and a name that begins with manual_: {wrong:#?}"
    );
}

/// Words that the vocabulary has replaced. None is part of the name of a function, a type or a module.
const REPLACED: [&str; 17] = [
    "nobody",
    "somebody",
    "everybody",
    "whoever",
    "who",
    "canary",
    "ballast",
    "rung",
    "berth",
    "thoughts",
    "picture",
    "pictures",
    "tower",
    "towers",
    "stress",
    "proof",
    "doubt",
];

/// Characters behind the name of a function, a type or a module.
const NAME_ENDS: [char; 7] = ['(', '<', ' ', ';', '{', ':', '"'];

/// The words of a name in snake case or camel case, in lower case.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for letter in name.chars() {
        if letter == '_' || letter.is_uppercase() {
            words.push(String::new());
        }
        if letter != '_' {
            words.last_mut().expect("it has one").extend(letter.to_lowercase());
        }
    }
    words
}

#[test]
fn names_use_the_vocabulary() {
    let mut wrong = Vec::new();
    for (file, text) in code_files() {
        for line in text.lines() {
            let code = line.trim_start();
            let names = ["fn ", "struct ", "enum ", "trait ", "mod "].iter().filter_map(|kind| code.split_once(kind));
            for name in names.filter(|_| !code.starts_with('/')).filter_map(|(_, rest)| rest.split(NAME_ENDS).next()) {
                if words_of(name).iter().any(|word| REPLACED.contains(&word.as_str())) {
                    wrong.push(format!("{file}: {name}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// `mdbook` builds `docs/`: a link that leaves the folder works on the repository's pages, but not in the book.
#[test]
fn links_of_the_book_stay_in_it() {
    let mut wrong = Vec::new();
    for folder in ["docs", "docs/decisions", "docs/reports"] {
        let depth = folder.matches('/').count();
        for entry in std::fs::read_dir(root().join(folder)).expect("a folder of the book") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = std::fs::read_to_string(&path).expect("a page");
                let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
                let outside = links.filter(|link| link.matches("../").count() > depth);
                wrong.extend(outside.map(|link| format!("{}: {link}", path.display())));
            }
        }
    }
    assert!(wrong.is_empty(), "write the file's path as code instead: {wrong:#?}");
}
