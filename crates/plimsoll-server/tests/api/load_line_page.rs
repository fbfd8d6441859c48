//! The load-line page as HTTP sees it: its files, their headers and their size. Nothing in them refers to another
//! server. What it does in a browser is tested in `plimsoll/tests/blackbox/page.rs`.

use std::path::Path;

use plimsoll_engine::testing::letters;

use crate::common::{Answer, Server};

/// Everything that is served; a page that grows beyond this is no longer a page to look at in passing.
const BYTES_MAX: usize = 96 << 10;

/// The files in the source directory.
fn sources() -> Vec<(String, String)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("page");
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let named = files.map(|path| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read_to_string(&path).unwrap())
    });
    named.collect()
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
    assert!(sources.len() >= 10, "{}", sources.len());
    for (name, text) in sources {
        let answer = server.get(&route(&name));
        assert_eq!(answer.ok_text(), text, "{name}");
        let (_, kind) = kinds.iter().find(|(end, _)| name.ends_with(&format!(".{end}"))).unwrap();
        assert!(answer.header("content-type").unwrap().starts_with(kind), "{name}");
        let policy = answer.header("content-security-policy").unwrap();
        let rules: Vec<&str> = policy.split(';').map(str::trim).collect();
        assert!(rules.contains(&"default-src 'none'") && rules.contains(&"frame-ancestors 'none'"), "{policy}");
        for rule in rules {
            let mut words = rule.split(' ').skip(1);
            assert!(words.all(|source| matches!(source, "'none'" | "'self'")), "only this server: {rule}");
        }
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
        assert_eq!(answer.header("cache-control"), Some("no-cache"));
        assert!(answer.header("x-request-id").is_some());
    }
    let page = server.get("/metrics");
    assert!(page.ok_text().contains("plimsoll_http_answers_total{path=\"/page/{file}\",code=\"200\"}"));
}

#[test]
fn a_browser_that_has_it_is_told_so() {
    let server = Server::start(letters);
    let tag = server.get("/").header("etag").unwrap().to_owned();
    let other = server.get("/page/page.js").header("etag").unwrap().to_owned();
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
    for path in ["/page/", "/page/none.js", "/page/..%2Fsrc%2Fpage.rs", "/page/index.html", "/page/a/b", "/index.html"]
    {
        assert_eq!(server.get(path).error(404)["code"], "not_found", "{path}");
    }
    for path in ["/", "/page/page.js"] {
        assert_eq!(with_head(&server, "POST", path, "content-length: 0\r\n").error(405)["code"], "method_not_allowed");
    }
}

/// The policy would stop all this in a browser; it shall not be there in the first place.
#[test]
fn nothing_in_it_is_inline_or_from_elsewhere() {
    let sources = sources();
    let total: usize = sources.iter().map(|(_, text)| text.len()).sum();
    assert!(total <= BYTES_MAX, "{total} bytes");
    for (name, text) in &sources {
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
        assert!(text.lines().count() <= 400, "{name} has {} lines", text.lines().count());
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
