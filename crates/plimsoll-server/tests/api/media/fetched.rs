//! Images fetched from other servers or read from files: under limits, in turns, within the request's time-out.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use plimsoll_server::{MediaConfig, MediaFetch, RecordConfig, ServerConfig};
use serde_json::{Value, json};

use super::{asked, chat, data, fixture, idle, image_part, seeing, text};
use crate::common::{PATIENCE, config, eventually, post};

/// A server of images on the loopback network. It sends only half of `/slow`.
struct EncoderInput {
    url: String,
    asked: Arc<AtomicUsize>,
    /// Connections that wait for the other half.
    held: Arc<Mutex<Option<Vec<TcpStream>>>>,
}

impl EncoderInput {
    fn start(address: &str, pages: BTreeMap<&'static str, Vec<u8>>) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(AtomicUsize::new(0));
        let held = Arc::new(Mutex::new(Some(Vec::new())));
        let (count, hold) = (Arc::clone(&asked), Arc::clone(&held));
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::SeqCst);
                let (pages, hold) = (pages.clone(), Arc::clone(&hold));
                std::thread::spawn(move || {
                    let mut head = [0; 4096];
                    let read = stream.read(&mut head).unwrap();
                    let line = String::from_utf8_lossy(&head[..read]).into_owned();
                    let path = line.split(' ').nth(1).unwrap();
                    let body = pages.get(path).cloned().unwrap_or_default();
                    let status = if pages.contains_key(path) { "200 OK" } else { "404 Not Found" };
                    if path == "/late" {
                        std::thread::sleep(Duration::from_millis(600));
                    }
                    let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
                    if path == "/slow" {
                        let _ = stream.write_all(&body[..50]);
                        if let Some(held) = &mut *hold.lock().unwrap() {
                            held.push(stream);
                        }
                    } else {
                        let _ = stream.write_all(&body);
                    }
                });
            }
        });
        Self { url, asked, held }
    }

    /// Closes the connections that wait for the other half of `/slow`, and every later request for it.
    fn hang_up(&self) {
        self.held.lock().unwrap().take();
    }
}

fn images() -> EncoderInput {
    images_at("127.0.0.1")
}

fn images_at(address: &str) -> EncoderInput {
    let pages = [
        ("/a.png", fixture("rgb.png")),
        ("/late", fixture("rgb.png")),
        ("/slow", fixture("rgb.png")),
        ("/text", b"no picture".to_vec()),
        ("/large", vec![0; 3 << 20]),
    ];
    EncoderInput::start(address, BTreeMap::from(pages))
}

fn fetching(fetch: MediaFetch) -> ServerConfig {
    let mut media = MediaConfig { fetch, fetch_timeout: Duration::from_secs(3), ..MediaConfig::default() };
    media.image.file_bytes = 1 << 20;
    ServerConfig { media, ..config() }
}

#[test]
fn images_are_fetched_under_limits() {
    let elsewhere = images();
    let (server, spec) = seeing(fetching(MediaFetch::Any));
    let at = |path: &str| chat(&json!([text("x"), image_part(&format!("{}{path}", elsewhere.url))]));
    let fetched = asked(&server, "/v1/chat/completions", &at("/a.png"));
    let inline =
        asked(&server, "/v1/chat/completions", &chat(&json!([text("x"), image_part(&data(&fixture("rgb.png")))])));
    assert_eq!((fetched.prompt, fetched.media[0].key), (inline.prompt, inline.media[0].key));
    let counted = json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": format!("{}/a.png", elsewhere.url)}}]}]});
    assert!(server.post("/v1/messages/count_tokens", &counted).ok()["input_tokens"].as_u64().unwrap() > 20);
    for (path, what) in [
        ("/none", "`127.0.0.1` answered with status 404"),
        ("/text", "supported are PNG"),
        ("/large", "limit is 1048576 (--max-image-bytes)"),
        ("/slow", "`127.0.0.1` took longer than 3 s to fetch it (--media-fetch-timeout)"),
    ] {
        let error = server.post("/v1/chat/completions", &at(path)).error(400);
        assert!(error["message"].as_str().unwrap().contains(what), "{path}: {error}");
        assert_eq!(error["param"], "messages[0].content[1].image_url");
    }
    drop((fetched.media, inline.media));
    let page = server.get("/metrics").ok_text().to_owned();
    assert!(page.contains("plimsoll_media_fetched_total 3"), "{page}");
    idle(&server, &spec);
    // The default connects only to public addresses; `off` connects to none.
    let before = elsewhere.asked.load(Ordering::SeqCst);
    let (public, spec) = seeing(fetching(MediaFetch::Public));
    let error = public.post("/v1/chat/completions", &at("/a.png")).error(400);
    assert!(error["message"].as_str().unwrap().contains("not a public one (--media-fetch)"), "{error}");
    idle(&public, &spec);
    let (off, _) = seeing(fetching(MediaFetch::Off));
    let error = off.post("/v1/chat/completions", &at("/a.png")).error(400);
    assert!(error["message"].as_str().unwrap().contains("--media-fetch off"), "{error}");
    assert_eq!(elsewhere.asked.load(Ordering::SeqCst), before);
}

/// A slow host uses only its own fetch turns. Fetches from another host do not wait for it.
#[test]
fn slow_host_delays_no_other_requests_images() {
    let (slow, quick) = (images(), images_at("127.0.0.2"));
    let mut config = fetching(MediaFetch::Any);
    config.media.fetch_timeout = PATIENCE;
    let (server, spec) = seeing(config);
    let at = |images: &EncoderInput, path: &str| chat(&json!([image_part(&format!("{}{path}", images.url))]));
    let stuck: Vec<_> =
        (0..7).map(|_| server.send(post("/v1/chat/completions", &at(&slow, "/slow").to_string()))).collect();
    let metric = |line: &str| server.get("/metrics").ok_text().contains(line);
    eventually("four are fetched and three wait", || {
        metric("plimsoll_media_fetching 4\n") && metric("plimsoll_media_fetches_waiting 3\n")
    });
    eventually("the four have asked", || slow.asked.load(Ordering::SeqCst) == 4);
    server.post("/v1/chat/completions", &at(&quick, "/a.png")).ok();
    assert!(slow.asked.load(Ordering::SeqCst) == 4 && metric("plimsoll_media_fetches_waiting 3\n"), "they still wait");
    // The waiting fetches have their turn when the first ones end, with half an image each.
    slow.hang_up();
    eventually("all had their turn", || slow.asked.load(Ordering::SeqCst) == 7);
    for mut client in stuck {
        let error = client.answer().error(400);
        assert!(error["message"].as_str().unwrap().contains("`127.0.0.1`"), "{error}");
    }
    assert!(metric("plimsoll_media_fetching 0\n") && metric("plimsoll_media_fetches_waiting 0\n"));
    idle(&server, &spec);
}

/// Time to first token counts from the request's arrival: it includes fetching and decoding before the engine.
#[test]
fn the_clock_starts_when_the_request_arrives() {
    let elsewhere = images();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let record = Some(RecordConfig { file: file.clone(), content: false, max_bytes: 1 << 20 });
    let (server, spec) = seeing(ServerConfig { record, ..fetching(MediaFetch::Any) });
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&file).unwrap();
        text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    server.post("/v1/chat/completions", &chat(&json!([image_part(&format!("{}/late", elsewhere.url))]))).ok();
    server.post("/v1/chat/completions", &chat(&json!("x"))).ok();
    eventually("both are recorded", || lines().len() == 2);
    let ms = |at: usize, name: &str| lines()[at][name].as_u64().unwrap();
    assert!(ms(0, "first_ms") >= 600 && ms(0, "ms") >= ms(0, "first_ms"), "{:?}", lines());
    assert!(ms(1, "first_ms") < 500 && ms(1, "at_ms") >= ms(0, "at_ms") + 600, "{:?}", lines());
    idle(&server, &spec);
}

/// V-3, V-E: clients that disconnect while their image is fetched or while they wait for room leave nothing behind.
#[test]
fn clients_that_go_leave_nothing() {
    let elsewhere = images();
    let (server, spec) = seeing(fetching(MediaFetch::Any));
    let slow = chat(&json!([image_part(&data(&fixture("rgb.png"))), image_part(&format!("{}/slow", elsewhere.url))]));
    let slow = post("/v1/chat/completions", &slow.to_string());
    let clients: Vec<_> = (0..3).map(|_| server.send(&slow)).collect();
    eventually("all are being fetched", || elsewhere.asked.load(Ordering::SeqCst) == 3);
    drop(clients);
    idle(&server, &spec);
    assert!(server.observed.requests.lock().unwrap().is_empty());
    let taken = spec.staging.reserve(spec.staging.limit()).unwrap();
    let ready = post("/v1/chat/completions", &chat(&json!([image_part(&data(&fixture("rgb.png")))])).to_string());
    let clients: Vec<_> = (0..3).map(|_| server.send(&ready)).collect();
    std::thread::sleep(Duration::from_millis(200));
    drop(clients);
    std::thread::sleep(Duration::from_millis(200));
    drop(taken);
    idle(&server, &spec);
    assert!(server.observed.requests.lock().unwrap().is_empty(), "nobody decodes for who has gone");
}

#[test]
fn files_are_read_under_their_roots() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("pictures");
    std::fs::create_dir(&root).unwrap();
    std::fs::write(root.join("a b.png"), fixture("rgb.png")).unwrap();
    std::fs::write(folder.path().join("secret.png"), fixture("rgb.png")).unwrap();
    let media = MediaConfig { roots: vec![root.clone()], ..MediaConfig::default() };
    let (server, spec) = seeing(ServerConfig { media, ..config() });
    let at = |path: &str| chat(&json!([image_part(&format!("file://{}/{path}", root.display()))]));
    let request = asked(&server, "/v1/chat/completions", &at("a%20b.png"));
    let inline = asked(&server, "/v1/chat/completions", &chat(&json!([image_part(&data(&fixture("rgb.png")))])));
    assert_eq!(request.media[0].key, inline.media[0].key);
    for path in ["../secret.png", "%2e%2e/secret.png", "none.png", ""] {
        let error = server.post("/v1/chat/completions", &at(path)).error(400);
        assert!(error["message"].as_str().unwrap().contains("no such file under this server's media roots"), "{error}");
    }
    drop((request, inline));
    idle(&server, &spec);
}
