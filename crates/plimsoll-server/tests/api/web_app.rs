//! The web app over HTTP: its files, their headers and their size. Nothing in them refers to another server. Its behaviour in a browser is
//! tested in `plimsoll/tests/blackbox/page.rs`.

use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use plimsoll_engine::testing::letters;
use sha2::{Digest, Sha256};

use crate::common::{Answer, Server};

/// Bytes of all files together, each compressed with gzip as a proxy would.
const COMPRESSED_BYTES_MAX: usize = 150 << 10;
/// Bytes of this repository's files, without the libraries.
const OWN_BYTES_MAX: usize = 192 << 10;
/// Lines of one of this repository's files.
const LINES_MAX: usize = 400;

/// The files in the source directory that are served, by their path below it.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("page");
    let (mut folders, mut files) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
            if path.is_dir() {
                folders.push(path);
            } else if !name.ends_with(".md") && !name.ends_with(".LICENSE") {
                files.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files
}

fn is_library(name: &str) -> bool {
    name.starts_with("vendor/")
}

fn compressed_bytes(text: &str) -> usize {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap().len()
}

fn route(name: &str) -> String {
    if name == "index.html" { "/".into() } else { format!("/page/{name}") }
}

fn with_head(server: &Server, method: &str, path: &str, head: &str) -> Answer {
    server.send(format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n{head}connection: close\r\n\r\n")).answer()
}

#[test]
fn every_file_is_served_with_its_policy() {
    let server = Server::start(letters);
    let kinds = [("html", "text/html"), ("css", "text/css"), ("js", "text/javascript"), ("svg", "image/svg+xml")];
    let sources = sources();
    assert!(sources.len() >= 30, "{}", sources.len());
    for (name, text) in sources {
        let answer = server.get(&route(&name));
        assert!(answer.ok_text() == text, "{name}: another text is served");
        let (_, kind) = kinds.iter().find(|(end, _)| name.ends_with(&format!(".{end}"))).unwrap();
        assert!(answer.header("content-type").unwrap().starts_with(kind), "{name}");
        let policy = answer.header("content-security-policy").unwrap();
        let rules: Vec<&str> = policy.split(';').map(str::trim).collect();
        assert!(rules.contains(&"default-src 'none'") && rules.contains(&"frame-ancestors 'none'"), "{policy}");
        assert!(
            rules.contains(&"require-trusted-types-for 'script'") && rules.contains(&"trusted-types 'none'"),
            "{policy}"
        );
        for rule in rules.into_iter().filter(|rule| *rule != "require-trusted-types-for 'script'") {
            let mut words = rule.split(' ').skip(1);
            assert!(words.all(|source| matches!(source, "'none'" | "'self'")), "only this server: {rule}");
        }
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
        assert_eq!(answer.header("cache-control"), Some("no-cache"));
        assert!(answer.header("x-request-id").is_some());
    }
    let page = server.get("/metrics");
    assert!(page.ok_text().contains("plimsoll_http_answers_total{path=\"/page/{*file}\",code=\"200\"}"));
}

#[test]
fn a_browser_that_has_it_is_told_so() {
    let server = Server::start(letters);
    let tag = server.get("/").header("etag").unwrap().to_owned();
    let other = server.get("/page/app.js").header("etag").unwrap().to_owned();
    assert!(tag != other && tag.starts_with('"') && tag.ends_with('"'));
    for head in [format!("if-none-match: {tag}"), format!("if-none-match: \"x\", W/{tag}"), "if-none-match: *".into()] {
        let answer = with_head(&server, "GET", "/", &format!("{head}\r\n"));
        assert_eq!(
            (answer.status, answer.body.as_str(), answer.header("etag")),
            (304, "", Some(tag.as_str())),
            "{head}"
        );
        assert!(answer.header("content-security-policy").is_some());
    }
    let stale = with_head(&server, "GET", "/", &format!("if-none-match: {other}\r\n"));
    stale.ok_text();
}

#[test]
fn only_what_there_is() {
    let server = Server::start(letters);
    let none = ["/page/", "/page/none.js", "/page/chat", "/page/..%2Fsrc%2Fpage.rs", "/page/chat/../app.js"];
    for path in none.into_iter().chain(["/page/index.html", "/page/a/b", "/page/vendor/README.md", "/index.html"]) {
        assert_eq!(server.get(path).error(404)["code"], "not_found", "{path}");
    }
    for path in ["/", "/page/app.js"] {
        assert_eq!(with_head(&server, "POST", path, "content-length: 0\r\n").error(405)["code"], "method_not_allowed");
    }
}

#[test]
fn the_app_fits_its_size_budget() {
    let sources = sources();
    let compressed: usize = sources.iter().map(|(_, text)| compressed_bytes(text)).sum();
    let own: usize = sources.iter().filter(|(name, _)| !is_library(name)).map(|(_, text)| text.len()).sum();
    println!("{compressed} bytes compressed, {own} bytes without the libraries");
    assert!(compressed <= COMPRESSED_BYTES_MAX, "{compressed} bytes compressed, {COMPRESSED_BYTES_MAX} allowed");
    assert!(own <= OWN_BYTES_MAX, "{own} bytes without the libraries, {OWN_BYTES_MAX} allowed");
}

/// `vendor/README.md` names the version and the hash of each library.
#[test]
fn each_library_has_a_licence_and_is_what_its_readme_says() {
    let vendor = Path::new(env!("CARGO_MANIFEST_DIR")).join("page/vendor");
    let readme = std::fs::read_to_string(vendor.join("README.md")).unwrap();
    for (name, text) in sources().into_iter().filter(|(name, _)| is_library(name)) {
        let file = name.strip_prefix("vendor/").unwrap();
        let hash: String = Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(readme.contains(&format!("| `{file}` | `{hash}` |")), "{file}: {hash}");
        let licence = vendor.join(format!("{}.LICENSE", file.split('.').next().unwrap()));
        assert!(licence.is_file(), "{}", licence.display());
    }
}

/// The content policy would block all this in a browser. The files must not contain it at all.
#[test]
fn nothing_in_it_is_inline_or_from_elsewhere() {
    let sources = sources();
    for (name, text) in sources.iter().filter(|(name, _)| !is_library(name)) {
        // The namespace of SVG, which browsers do not fetch.
        let text = text.replace("http://www.w3.org/2000/svg", "");
        for forbidden in [
            "http:",
            "https:",
            "//cdn",
            "@import",
            "url(",
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "javascript:",
        ] {
            assert!(!text.contains(forbidden), "{name}: {forbidden}");
        }
        assert!(text.lines().count() <= LINES_MAX, "{name} has {} lines", text.lines().count());
    }
    let (_, html) = sources.iter().find(|(name, _)| name == "index.html").unwrap();
    let lower = html.to_lowercase();
    assert!(!lower.contains("style=") && !lower.contains("<style"), "inline style");
    for script in lower.match_indices("<script") {
        let tag = &lower[script.0..];
        assert!(tag.split('>').next().unwrap().contains("src=\"page/"), "{tag:.40}");
    }
    let handler = |word: &str| word.starts_with("on") && word.split_once('=').is_some_and(|(name, _)| name.len() > 2);
    assert!(!lower.split_whitespace().any(handler), "inline event handler");
}
