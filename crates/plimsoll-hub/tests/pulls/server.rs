//! A small HTTP/1.1 server on the loopback interface that serves a hub's listing and files, and misbehaves on demand.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::fixtures::sha256;

/// The commit every test repository is at.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The answer at a path, with its faults.
#[derive(Clone, Default)]
pub struct Page {
    pub body: Vec<u8>,
    pub etag: Option<String>,
    pub ignore_range: bool,
    /// For each request in turn: close the connection after this many bytes of the body.
    pub cuts: Vec<usize>,
    /// For each request in turn: answer with this status and nothing else.
    pub statuses: Vec<u16>,
    /// Send this many bytes at a time, with this pause between them.
    pub drip: Option<(usize, Duration)>,
    /// After this many bytes of the body, send nothing for this long, the first time only.
    pub silence: Option<(usize, Duration)>,
    pub redirect: Option<String>,
    /// Do not announce a length; the end of the connection is the end of the body.
    pub no_length: bool,
}

/// A request as it arrived: path and lower-case headers.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    pub headers: HashMap<String, String>,
}

#[derive(Default)]
struct State {
    pages: Mutex<HashMap<String, Page>>,
    requests: Mutex<Vec<Request>>,
}

/// The running server; its threads end with the test process.
pub struct Server {
    port: u16,
    state: Arc<State>,
}

impl Server {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                // A client that goes away is part of the tests.
                thread::spawn(move || serve(&state, stream));
            }
        });
        Self { port, state }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The same server under another host name.
    pub fn other_endpoint(&self) -> String {
        format!("http://localhost:{}", self.port)
    }

    pub fn publish(&self, path: &str, page: Page) {
        self.state.pages.lock().unwrap().insert(path.to_owned(), page);
    }

    pub fn change(&self, path: &str, change: impl FnOnce(&mut Page)) {
        change(self.state.pages.lock().unwrap().get_mut(path).expect("published"));
    }

    /// Publishes a repository: its listing, with sums for large files only as the hub does, and its files.
    pub fn publish_repo(&self, repo: &str, files: &[(&str, &[u8])]) {
        let siblings: Vec<_> = files
            .iter()
            .map(|(name, body)| {
                let mut file = json!({"rfilename": name, "size": body.len(), "blobId": &sha256(body)[..40]});
                if name.ends_with(".gguf") || name.ends_with(".safetensors") {
                    file["lfs"] = json!({"sha256": sha256(body), "size": body.len()});
                }
                file
            })
            .collect();
        self.publish_listing(repo, &json!({"sha": COMMIT, "siblings": siblings}));
        for (name, body) in files {
            let page =
                Page { body: body.to_vec(), etag: Some(format!("\"{}\"", &sha256(body)[..16])), ..Page::default() };
            self.publish(&file_path(repo, name), page);
        }
    }

    pub fn publish_listing(&self, repo: &str, listing: &serde_json::Value) {
        let page = Page { body: listing.to_string().into_bytes(), ..Page::default() };
        self.publish(&format!("/api/models/{repo}/revision/main?blobs=true"), page);
    }

    /// All requests so far with `part` in their path.
    pub fn requests(&self, part: &str) -> Vec<Request> {
        let all = self.state.requests.lock().unwrap();
        all.iter().filter(|request| request.path.contains(part)).cloned().collect()
    }
}

pub fn file_path(repo: &str, name: &str) -> String {
    format!("/{repo}/resolve/{COMMIT}/{name}")
}

/// Answers requests until the client goes away.
fn serve(state: &State, stream: TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut stream = stream;
    loop {
        let request = read_request(&mut reader)?;
        let page = {
            state.requests.lock().unwrap().push(request.clone());
            let mut pages = state.pages.lock().unwrap();
            take_turn(pages.get_mut(&request.path))
        };
        let Some(page) = page else {
            head(&mut stream, 404, &[("Content-Length", "0".to_owned())])?;
            continue;
        };
        answer(&mut stream, &request, page)?;
    }
}

/// A copy of the page for this request; what happens once is taken out of the original.
fn take_turn(page: Option<&mut Page>) -> Option<Page> {
    let page = page?;
    let now = page.clone();
    if !page.cuts.is_empty() {
        page.cuts.remove(0);
    }
    if !page.statuses.is_empty() {
        page.statuses.remove(0);
    }
    page.silence = None;
    Some(now)
}

fn read_request(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            return Some(Request { path, headers });
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
}

fn head(stream: &mut TcpStream, status: u16, headers: &[(&str, String)]) -> Option<()> {
    let mut text = format!("HTTP/1.1 {status} Whatever\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    stream.write_all(text.as_bytes()).ok()
}

fn answer(stream: &mut TcpStream, request: &Request, page: Page) -> Option<()> {
    if let Some(status) = page.statuses.first() {
        let headers = [("Content-Length", "0".to_owned()), ("Retry-After", "0".to_owned())];
        return head(stream, *status, &headers);
    }
    if let Some(location) = page.redirect {
        let headers = [("Content-Length", "0".to_owned()), ("Location", location)];
        return head(stream, 302, &headers);
    }
    let total = page.body.len();
    let unchanged = request.headers.get("if-range").is_none_or(|etag| Some(etag) == page.etag.as_ref());
    let from = request
        .headers
        .get("range")
        .filter(|_| unchanged && !page.ignore_range)
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok())
        .unwrap_or(0);
    let mut headers = vec![if page.no_length {
        ("Connection", "close".to_owned())
    } else {
        ("Content-Length", (total - from).to_string())
    }];
    headers.extend(page.etag.map(|etag| ("ETag", etag)));
    if from > 0 {
        headers.push(("Content-Range", format!("bytes {from}-{}/{total}", total - 1)));
    }
    head(stream, if from > 0 { 206 } else { 200 }, &headers)?;
    let body = &page.body[from..];
    let (chunk, pause) = page.drip.unwrap_or((usize::MAX, Duration::ZERO));
    let mut sent = 0;
    while sent < body.len() {
        let mut end = body.len().min(sent.saturating_add(chunk));
        if let Some(cut) = page.cuts.first() {
            if sent >= *cut {
                return None;
            }
            end = end.min(*cut);
        }
        if let Some((after, silence)) = page.silence {
            if sent >= after {
                thread::sleep(silence);
            } else {
                end = end.min(after);
            }
        }
        stream.write_all(&body[sent..end]).ok()?;
        sent = end;
        thread::sleep(pause);
    }
    (!page.no_length).then_some(())
}
