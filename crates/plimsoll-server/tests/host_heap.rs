//! The HTTP side at its limits: the heap that connections, bodies and unsent answers take, against its part of the plan
//! (`ServerConfig::heap_bytes_max`).

mod common;

use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::http2::frame;
use common::{Server, eventually};
use plimsoll_engine::Limits;
use plimsoll_engine::testing::{letters, limits};
use plimsoll_memory::heap;
use plimsoll_server::{OtlpConfig, ServerConfig};

#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

const CONNECTIONS: u32 = 96;

fn config() -> ServerConfig {
    ServerConfig { max_connections: CONNECTIONS, max_bytes_in_flight: 32 << 20, ..common::config() }
}

fn report(what: &str, planned: u64, measured: u64) {
    let slack = 100.0 * (planned as f64 - measured as f64) / planned as f64;
    println!("{what:<44} {planned:>12} {measured:>12} {slack:>7.2} %");
    assert!(measured <= planned, "{what}: {measured} bytes, {planned} planned");
}

/// A client that continues to write after its request.
struct Writer {
    stream: TcpStream,
    sent: usize,
}

impl Writer {
    /// Writes until the other side has accepted nothing for `patience`.
    fn stuff(&mut self, bytes: &[u8], patience: Duration) {
        self.stream.set_nonblocking(true).unwrap();
        let mut last = Instant::now();
        while self.sent < bytes.len() {
            match self.stream.write(&bytes[self.sent..]) {
                Ok(n) => (self.sent, last) = (self.sent + n, Instant::now()),
                Err(error) if error.kind() != ErrorKind::WouldBlock => panic!("{error}"),
                Err(_) if last.elapsed() >= patience => break,
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
}

/// Returns the heap in bytes when both buffers of every connection are full. On a busy machine a write may find no room at first. Writes
/// are repeated until they make no difference.
fn stuffed(clients: &mut [Writer], bytes: &[u8]) -> u64 {
    let (mut most, mut vain) = (0, 0);
    while vain < 3 {
        clients.iter_mut().for_each(|client| client.stuff(bytes, Duration::ZERO));
        let now = settled();
        vain = if now > most { 0 } else { vain + 1 };
        most = most.max(now);
    }
    settled()
}

/// Returns the heap once it has not changed for a while.
fn settled() -> u64 {
    let mut last = heap::in_use();
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(50));
        if last.abs_diff(heap::in_use()) < 1024 {
            break;
        }
        last = heap::in_use();
    }
    heap::in_use()
}

/// One test, since the heap is counted for the whole process.
#[test]
fn the_http_side_takes_no_more_than_its_line() {
    println!("{:<44} {:>12} {:>12} {:>9}", "", "planned", "measured", "slack");
    let config = config();
    // A context long enough for every body: a body that is refused at once holds nothing.
    let roomy = Limits { max_req_total_len: 4 << 20, max_total_token_num: 4 << 20, host_bytes: 4 << 30, ..limits() };
    let roomy = Limits { running_max_req_size: CONNECTIONS, ..roomy };
    let server = Server::with(config.clone(), roomy, letters);
    server.get("/metrics").ok_text();
    full_connections(&server, &config);
    full_bodies(&server, &config);
    full_http2(&server, &config);
    drop(server);
    full_exporter(&config);
}

/// Every connection has sent a large body and more behind it, and reads nothing of the stream it requested: both buffers are full. The
/// engine's bytes for it are another part of the plan.
fn full_connections(server: &Server, config: &ServerConfig) {
    let body = format!(
        "{{\"model\": \"tiny\", \"stream\": true, \"max_tokens\": 4000, \"prompt\": [1, 2, 3]{}}}",
        " ".repeat(400_000)
    );
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let wall = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(8000);
    // The clients' own memory is allocated before.
    let idle = settled();
    let mut clients: Vec<Writer> = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(server.address).unwrap();
        socket2::SockRef::from(&stream).set_recv_buffer_size(4096).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        let mut client = Writer { stream, sent: 0 };
        client.stuff(wall.as_bytes(), Duration::from_millis(60));
        clients.push(client);
        eventually("the stream is on its way", || server.observed.requests.lock().unwrap().len() == clients.len());
    }
    eventually("every answer is complete", || server.observed.ended.load(Ordering::Acquire) == u64::from(CONNECTIONS));
    let full = stuffed(&mut clients, wall.as_bytes()) - idle;
    let engines = server.engine.held();
    println!("{full} on the heap, {engines} of them the engine's");
    let of_connections = full.saturating_sub(engines);
    // An event waits behind the full buffer. It is small if the server kept up with the engine, and of the largest size if not.
    report(
        "connections with both buffers full",
        config.connection_bytes_max() + config.event_bytes_max(),
        of_connections,
    );
    let never = config.connection_bytes_max().saturating_sub(of_connections);
    // The kernel decides how full the last buffer gets.
    assert!(never <= config.connection_bytes_max() / 10, "{never} bytes were never used, whatever waits behind");
    drop(clients);
    eventually("the answers are gone", || server.engine.held() == 0);
    server.alone();
    println!("{} more on the heap than before the first connection", settled().saturating_sub(idle));
}

/// Sends bodies up to the budget without their last byte; then all last bytes at once.
fn full_bodies(server: &Server, config: &ServerConfig) {
    let idle = settled();
    let body = format!("{{\"model\": \"tiny\", \"max_tokens\": 1, \"prompt\": \"{}\"}}", "word ".repeat(200_000));
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    // Room for a body grows by an eighth, and 64 KiB are in buffers.
    let bodies = config.max_bytes_in_flight / (body.len() as u64 * 9 / 8 + (64 << 10));
    heap::restart_peak();
    let mut clients: Vec<TcpStream> = (0..bodies).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    for stream in &mut clients {
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&body.as_bytes()[..body.len() - 1]).unwrap();
    }
    eventually("the bodies have arrived", || {
        server.get("/v1/memory").json()["pools"]["http_bytes"]["used"].as_u64().unwrap()
            >= bodies * (body.len() as u64 - 1)
    });
    let connections = bodies * config.connection_bytes_max() / u64::from(CONNECTIONS);
    let measured = settled() - idle;
    let held = server.get("/v1/memory").json()["pools"]["http_bytes"]["used"].as_u64().unwrap();
    report("bodies while they arrive", held + connections, measured);
    println!("{bodies} bodies hold {held} of {} bytes", config.max_bytes_in_flight);
    assert!(measured * 100 >= held * 95, "what is held for bodies is taken by them: {measured} of {held}");
    assert!(held * 100 >= config.max_bytes_in_flight * 85, "{held} of {}", config.max_bytes_in_flight);
    // Then all at once: parsed, tokenized, answered.
    for stream in &mut clients {
        stream.write_all(b"}").unwrap();
    }
    eventually("every body was answered", || {
        server.get("/v1/memory").json()["pools"]["http_bytes"]["used"].as_u64() == Some(0)
    });
    report("bodies while they are parsed", config.heap_bytes_max(), heap::peak() - idle);
    drop(clients);
    server.alone();
}

/// The collector never answers: the queue of spans is full of the largest records, and so is the batch.
fn full_exporter(config: &ServerConfig) {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", collector.local_addr().unwrap());
    let traced = ServerConfig { otlp: OtlpConfig::read(Some(&url), |_| None).unwrap(), ..config.clone() };
    let planned = traced.heap_bytes_max() - config.heap_bytes_max();
    let server = Server::with(traced, limits(), letters);
    let mut client = server.connect();
    let body = r#"{"prompt": "x", "max_tokens": 1, "n": 4}"#;
    let id = "i".repeat(128);
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {id}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    client.write("GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n");
    client.answer().ok_text();
    let idle = settled();
    for _ in 0..600 {
        client.write(&request);
        client.answer().ok();
    }
    let page = server.get("/metrics").ok_text().to_owned();
    let dropped = page.lines().find(|line| line.starts_with("plimsoll_otlp_spans_dropped_total")).unwrap();
    assert!(!dropped.ends_with(" 0"), "the queue is full: {dropped}");
    // The scripted engine keeps its requests.
    drop(std::mem::take(&mut *server.observed.requests.lock().unwrap()));
    report("spans that no collector takes", planned, settled().saturating_sub(idle));
}

/// HTTP/2 connections with as many requests as there are places, each with a large head and the beginning of a body. Each has as many more
/// as it may have, whose refusals are not read, and the beginning of a head.
fn full_http2(server: &Server, config: &ServerConfig) {
    let idle = settled();
    let literal = |name: &[u8], value: &str| [name, &[value.len() as u8], value.as_bytes()].concat();
    let mut head = [&[0x83, 0x86][..], &literal(&[1], "localhost"), &literal(&[4], "/v1/completions")].concat();
    for i in 0..48 {
        head.extend(literal(&[&[0, 5][..], format!("x-{i:03}").as_bytes()].concat(), &"v".repeat(120)));
    }
    // No window for answers.
    let settings = frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]);
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS / 8 {
        let mut stream = TcpStream::connect(server.address).unwrap();
        let _ = stream.write_all(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings].concat());
        for i in 0..32 {
            let body = if i < 4 { frame(0, 0, 2 * i + 1, &[b' '; 14 << 10]) } else { Vec::new() };
            let _ = stream.write_all(&[frame(1, 4, 2 * i + 1, &head), body].concat());
        }
        let _ = stream.write_all(&frame(1, 0, 65, &head));
        clients.push(stream);
    }
    std::thread::sleep(Duration::from_millis(500));
    let measured = settled() - idle;
    // The places are taken: this request is answered as a probe is. Connections that came too late take the places of probes until they are
    // closed.
    eventually("a probe has a place", || server.get("/v1/memory").status == 200);
    let held = server.get("/v1/memory").ok()["pools"]["http_bytes"]["used"].as_u64().unwrap();
    println!("{held} bytes are held for bodies");
    assert!(held > 0, "requests are being read");
    report("HTTP/2 connections with all their requests", config.connection_bytes_max() + held, measured);
    drop(clients);
    server.alone();
    assert_eq!(server.get("/v1/memory").ok()["pools"]["http_bytes"]["used"], 0);
}
