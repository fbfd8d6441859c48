//! Files and functions are short.

use crate::code_files;

/// Lines of a file, and of a function.
const FILE_LINES_MAX: usize = 450;
const FUNCTION_LINES_MAX: usize = 80;

/// The functions of a file that rustfmt has formatted: name and number of lines.
fn functions(text: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut all = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let Some(head) = line.trim_start().split("fn ").next().filter(|_| line.contains("fn ")) else { continue };
        if !head.split_whitespace().all(|word| word.starts_with("pub") || ["const", "async", "unsafe"].contains(&word))
        {
            continue;
        }
        let name = line.split("fn ").nth(1).unwrap_or_default().split(['(', '<']).next().unwrap_or_default();
        let same_indent = |line: &str| line.len() - line.trim_start().len() == indent;
        let ends = |line: &&str| same_indent(line) && (line.trim() == "}" || line.ends_with(';'));
        let end = lines[at..].iter().position(ends);
        if let Some(length) = end.filter(|_| !line.ends_with('}')) {
            all.push((name, length + 1));
        }
    }
    all
}

#[test]
fn files_and_functions_are_short() {
    let files = code_files();
    let long = |text: &str, most: usize| text.lines().count() > most;
    let files_over: Vec<_> =
        files.iter().filter(|(_, text)| long(text, FILE_LINES_MAX)).map(|(file, _)| file).collect();
    let functions_over: Vec<String> = files
        .iter()
        .flat_map(|(file, text)| functions(text).into_iter().map(move |(name, lines)| (file, name, lines)))
        .filter(|(.., lines)| *lines > FUNCTION_LINES_MAX)
        .map(|(file, name, lines)| format!("{file}: {name}: {lines} lines"))
        .collect();
    assert!(files_over.is_empty(), "more than {FILE_LINES_MAX} lines: {files_over:#?}");
    assert!(functions_over.is_empty(), "more than {FUNCTION_LINES_MAX} lines: {functions_over:#?}");
}
