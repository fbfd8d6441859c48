//! The HTTP side at its bounds: what connections, bodies and unsent answers really take of the heap, against the line of the plan that
//! is made for them (`ServerConfig::heap_bytes_max`).

mod common;

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Server, eventually, tokenizer};
use plimsoll_engine::testing::{letters, limits};
use plimsoll_memory::heap;
use plimsoll_server::ServerConfig;

#[global_allocator]
static HEAP: heap::CountingHeap = heap::CountingHeap;

const CONNECTIONS: u32 = 96;

fn config() -> ServerConfig {
    let patient = Duration::from_secs(60);
    ServerConfig {
        port: 0,
        max_connections: CONNECTIONS,
        max_body_bytes: 1 << 20,
        max_bytes_in_flight: 32 << 20,
        header_timeout: patient,
        body_gap_timeout: patient,
        body_timeout: patient,
        write_timeout: patient,
        ..ServerConfig::default()
    }
}

fn report(what: &str, planned: u64, measured: u64) {
    let slack = 100.0 * (planned as f64 - measured as f64) / planned as f64;
    println!("{what:<44} {planned:>12} {measured:>12} {slack:>7.2} %");
    assert!(measured <= planned, "{what}: {measured} bytes, {planned} planned");
}

/// Writes until the other side takes no more.
fn stuff(stream: &mut TcpStream, bytes: &[u8]) {
    stream.set_nonblocking(true).unwrap();
    let (mut last, mut sent) = (Instant::now(), 0);
    while last.elapsed() < Duration::from_millis(100) {
        match stream.write(&bytes[sent % bytes.len()..]) {
            Ok(n) => (sent, last) = (sent + n, Instant::now()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => panic!("{error}"),
        }
    }
}

/// The heap once it has stood still for a while.
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
    let server = Server::with(config.clone(), limits(), letters);
    server.get("/metrics").ok_text();
    let idle = settled();

    // Every connection has sent more than is read and takes nothing of what is sent: both buffers are full.
    let mut clients: Vec<TcpStream> = Vec::new();
    for _ in 0..CONNECTIONS {
        let stream = TcpStream::connect(server.address).unwrap();
        socket_buffers(&stream);
        clients.push(stream);
    }
    let wall = "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(2000);
    std::thread::scope(|scope| {
        for stream in &mut clients {
            scope.spawn(|| stuff(stream, wall.as_bytes()));
        }
    });
    let full = settled() - idle;
    report("connections with both buffers full", config.connection_bytes_max(), full);
    assert!(full > config.connection_bytes_max() / 2, "the buffers are not full: {full}");
    drop(clients);
    eventually("the connections are gone", || settled() < idle + (1 << 20));

    // Bodies up to the budget, all but their last byte.
    let idle = settled();
    let body = format!("{{\"model\": \"tiny\", \"max_tokens\": 1, \"prompt\": \"{}\"}}", "word ".repeat(200_000));
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let bodies = config.max_bytes_in_flight / (4 * body.len() as u64);
    heap::restart_peak();
    let mut clients: Vec<TcpStream> = (0..bodies).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    for stream in &mut clients {
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&body.as_bytes()[..body.len() - 1]).unwrap();
    }
    eventually("the bodies have arrived", || {
        server.get("/v1/memory").json()["pools"]["http_bytes"]["used"].as_u64().unwrap() > 31 << 20
    });
    let connections = bodies * config.connection_bytes_max() / u64::from(CONNECTIONS);
    report("bodies while they arrive", config.max_bytes_in_flight + connections, settled() - idle);
    // And then all at once: parsed, tokenized, refused as too long.
    for stream in &mut clients {
        stream.write_all(b"}").unwrap();
    }
    eventually("every body was answered", || {
        server.get("/v1/memory").json()["pools"]["http_bytes"]["used"].as_u64() == Some(0)
    });
    report("bodies while they are parsed", config.heap_bytes_max(), heap::peak() - idle);
    drop(clients);
    drop(tokenizer());
}

/// Small buffers in the kernel, so that ours fill soon.
fn socket_buffers(stream: &TcpStream) {
    let socket = socket2::SockRef::from(stream);
    socket.set_recv_buffer_size(4096).unwrap();
}
