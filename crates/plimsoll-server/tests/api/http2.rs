//! HTTP/2 with prior knowledge: a real client, and clients that misbehave.

use std::io::Write;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::select_all;
use h2::client::{Builder, ResponseFuture, SendRequest, handshake};
use h2::{Reason, RecvStream};
use plimsoll_engine::testing::{letters, limits};
use plimsoll_server::ServerConfig;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use crate::common::http2::frame;
use crate::common::{self, Client, Server, config, endless, eventually, hasty, silent};

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Connects a client and returns it with the task that runs its connection.
async fn connect(server: &Server) -> (SendRequest<Bytes>, tokio::task::JoinHandle<Result<(), h2::Error>>) {
    connect_with(server, &Builder::new()).await
}

async fn connect_with(
    server: &Server,
    builder: &Builder,
) -> (SendRequest<Bytes>, tokio::task::JoinHandle<Result<(), h2::Error>>) {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let (client, connection) = builder.handshake(stream).await.unwrap();
    let running = tokio::spawn(connection);
    (client.ready().await.unwrap(), running)
}

fn request(method: &str, path: &str) -> axum::http::Request<()> {
    let uri = format!("http://localhost{path}");
    axum::http::Request::builder().method(method).uri(uri).header("content-type", "application/json").body(()).unwrap()
}

fn send(client: &mut SendRequest<Bytes>, path: &str, body: &Value) -> ResponseFuture {
    let (answer, mut stream) = client.send_request(request("POST", path), false).unwrap();
    stream.send_data(body.to_string().into(), true).unwrap();
    answer
}

/// Returns the next piece of a body; None at its end.
async fn piece(body: &mut RecvStream) -> Option<Result<Bytes, h2::Error>> {
    let piece = body.data().await?;
    if let Ok(bytes) = &piece {
        body.flow_control().release_capacity(bytes.len()).unwrap();
    }
    Some(piece)
}

async fn whole(answer: ResponseFuture) -> (u16, String) {
    let answer = answer.await.unwrap();
    let (status, mut body) = (answer.status().as_u16(), answer.into_body());
    let mut all = Vec::new();
    while let Some(bytes) = piece(&mut body).await {
        all.extend_from_slice(&bytes.unwrap());
    }
    (status, String::from_utf8(all).unwrap())
}

fn stalled(server: &Server) -> bool {
    !server.get("/metrics").ok_text().contains("plimsoll_http_streams_stalled_total 0")
}

#[test]
fn answers_are_those_of_http_1_and_requests_share_a_connection() {
    let server = Server::start(letters);
    let whole_body = json!({"model": "tiny", "prompt": "x", "max_tokens": 40});
    let stream_body = json!({"model": "tiny", "prompt": "x", "max_tokens": 40, "stream": true});
    let expected = server.post("/v1/completions", &whole_body).ok()["choices"].clone();
    runtime().block_on(async {
        let (mut client, _running) = connect(&server).await;
        let one = send(&mut client, "/v1/completions", &whole_body);
        let two = send(&mut client, "/v1/completions", &stream_body);
        let ((one, text), (two, events)) = tokio::join!(whole(one), whole(two));
        assert_eq!((one, two), (200, 200), "{text} {events}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["choices"], expected);
        let streamed: String =
            common::events(&events).iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        assert_eq!(streamed, expected[0]["text"].as_str().unwrap());
        let (answer, _) = client.send_request(request("GET", "/nowhere"), true).unwrap();
        assert_eq!(whole(answer).await.0, 404);
        // A body that is larger than both windows, and an answer in many pieces.
        let (answer, mut upload) = client.send_request(request("POST", "/v1/completions"), false).unwrap();
        upload.send_data(" ".repeat(300_000).into(), false).unwrap();
        upload.send_data(whole_body.to_string().into(), true).unwrap();
        let (status, text) = whole(answer).await;
        assert_eq!((status, &serde_json::from_str::<Value>(&text).unwrap()["choices"]), (200, &expected));
        let (answer, _) = client.send_request(request("GET", "/openapi.json"), true).unwrap();
        let (status, text) = whole(answer).await;
        assert!(status == 200 && text.len() > 64 << 10, "{status} {}", text.len());
        assert_eq!(text, server.get("/openapi.json").ok_text());
        // Another host name, as a page with a rebound name would use it.
        let foreign = axum::http::Request::builder().uri("http://evil.example/health").body(()).unwrap();
        let (answer, _) = client.send_request(foreign, true).unwrap();
        assert_eq!(whole(answer).await.0, 421);
    });
    server.assert_idle();
}

#[test]
fn resetting_a_stream_ends_its_request_only() {
    let server = Server::start(endless);
    let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 500, "stream": true});
    runtime().block_on(async {
        let (mut client, _running) = connect(&server).await;
        let (first, mut first_stream) = client.send_request(request("POST", "/v1/completions"), false).unwrap();
        first_stream.send_data(body.to_string().into(), true).unwrap();
        let second = send(&mut client, "/v1/completions", &body);
        let mut first = first.await.unwrap().into_body();
        let mut second = second.await.unwrap().into_body();
        piece(&mut first).await.unwrap().unwrap();
        first_stream.send_reset(Reason::CANCEL);
        let began = Instant::now();
        while server.aborted() == 0 {
            assert!(began.elapsed() < common::PATIENCE, "in vain: the first request ends");
            piece(&mut second).await.unwrap().unwrap();
        }
        piece(&mut second).await.unwrap().unwrap();
        assert_eq!(server.aborted(), 1);
    });
    // The client has ended with its runtime, and so has the second request.
    server.assert_idle();
    assert_eq!(server.aborted(), 2);
}

#[test]
fn requests_on_a_connection_are_limited_and_count_as_connections() {
    let server = Server::with(ServerConfig { max_connections: 8, ..config() }, limits(), silent);
    let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 5});
    runtime().block_on(async {
        let stream = TcpStream::connect(server.address).await.unwrap();
        let (mut client, mut connection) = handshake(stream).await.unwrap();
        let answers: Vec<_> = (0..5).map(|_| Box::pin(whole(send(&mut client, "/v1/completions", &body)))).collect();
        // Any of the requests may be the one that finds no place.
        let ((status, text), _, others) = tokio::select! {
            first = select_all(answers) => first,
            ended = &mut connection => panic!("{ended:?}"),
        };
        assert_eq!(connection.max_concurrent_send_streams(), 32);
        assert!(status == 503 && text.contains("--max-connections"), "{status} {text}");
        drop((client, others));
    });
    server.assert_idle();
    // A second connection finds no place, and gets an error.
    let server = Server::with(ServerConfig { max_connections: 3, ..config() }, limits(), letters);
    let mut crowded = server.send(PREFACE);
    assert_eq!(frames(&mut crowded).last().unwrap(), &(7, vec![0, 0, 0, 0, 0, 0, 0, 0xb]), "ENHANCE_YOUR_CALM");
    assert!(server.get("/metrics").ok_text().contains("plimsoll_http_connections_refused_total 1"));
}

#[test]
#[ignore = "soak"]
fn clients_that_take_nothing_lose_their_stream_or_their_connection() {
    let server = Server::with(hasty(), limits(), endless);
    let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 500, "stream": true});
    for window in [0, 1] {
        let before = server.aborted();
        runtime().block_on(async {
            let (mut client, running) = connect_with(&server, Builder::new().initial_window_size(window)).await;
            let answer = send(&mut client, "/v1/completions", &body).await.unwrap();
            // The stream is reset; its connection continues.
            let mut stream = answer.into_body();
            let ended = loop {
                match stream.data().await {
                    Some(Ok(_)) => {}
                    ended => break ended,
                }
            };
            assert!(matches!(&ended, Some(Err(error)) if error.is_reset()), "{ended:?}");
            assert!(!running.is_finished());
            // A complete answer that is not read ends the connection.
            let (answer, _) = client.send_request(request("GET", "/metrics"), true).unwrap();
            let _kept = answer.await.unwrap();
            // The client sees an error or none.
            let _ = running.await.unwrap();
        });
        eventually("the request has ended", || server.aborted() == before + 1);
    }
    assert!(stalled(&server));
    server.assert_idle();
}

#[test]
fn a_slow_reader_that_goes_on_reading_keeps_its_stream() {
    let server = Server::with(hasty(), limits(), letters);
    runtime().block_on(async {
        // Pieces of 16 KiB, each within the write timeout, all of them together beyond it.
        let (mut client, _running) = connect_with(&server, Builder::new().initial_window_size(16 << 10)).await;
        let (answer, _) = client.send_request(request("GET", "/openapi.json"), true).unwrap();
        let mut body = answer.await.unwrap().into_body();
        let (mut bytes, began) = (0, Instant::now());
        while let Some(piece) = body.data().await {
            let piece = piece.unwrap().len();
            bytes += piece;
            tokio::time::sleep(Duration::from_millis(250)).await;
            body.flow_control().release_capacity(piece).unwrap();
        }
        assert!(bytes > 48 << 10 && began.elapsed() > Duration::from_millis(700), "{bytes} in {:?}", began.elapsed());
    });
    assert!(!stalled(&server));
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// The header block of a POST to `/v1/completions` on `localhost`.
fn head() -> Vec<u8> {
    let literal = |name: u8, value: &str| [&[name, value.len() as u8][..], value.as_bytes()].concat();
    [&[0x83, 0x86][..], &literal(1, "localhost"), &literal(4, "/v1/completions")].concat()
}

/// Returns the frames until the server closes: kind and payload.
fn frames(client: &mut Client) -> Vec<(u8, Vec<u8>)> {
    let mut bytes = Vec::new();
    let _ = std::io::Read::read_to_end(&mut client.stream, &mut bytes);
    let (mut all, mut rest) = (Vec::new(), &bytes[..]);
    while rest.len() >= 9 {
        let length = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
        all.push((rest[3], rest[9..9 + length].to_vec()));
        rest = &rest[9 + length..];
    }
    all
}

/// Sends `pieces` until the server closes or all are sent.
fn flood(server: &Server, pieces: impl Iterator<Item = Vec<u8>>) -> Client {
    let mut client = server.send(PREFACE);
    for piece in pieces {
        if client.stream.write_all(&piece).is_err() {
            break;
        }
    }
    client
}

#[test]
fn floods_of_continuations_resets_and_heads_end_their_connection_alone() {
    let server = Server::start(silent);
    let many = |n: u32| (0..n).map(|i| 2 * i + 1);
    // A head that never ends.
    let endless = std::iter::once(frame(1, 0, 1, &head())).chain(many(5000).map(|_| frame(9, 0, 1, &[0; 8 << 10])));
    assert_ends(flood(&server, endless));
    // Continuations without content.
    let empty = std::iter::once(frame(1, 0, 1, &head())).chain(many(100_000).map(|_| frame(9, 0, 1, &[])));
    assert_ends(flood(&server, empty));
    // Rapid reset: many requests, each reset at once.
    let pairs = many(20_000).map(|id| [frame(1, 4, id, &head()), frame(3, 0, id, &[0, 0, 0, 8])].concat());
    assert_ends(flood(&server, pairs));
    // More requests at once than allowed: the excess requests are refused (kind 3, REFUSED_STREAM), the connection continues.
    let mut client = flood(&server, many(40).map(|id| frame(1, 4, id, &head())));
    client.stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let refused = frames(&mut client).into_iter().filter(|(kind, why)| *kind == 3 && why == &[0, 0, 0, 7]).count();
    assert_eq!(refused, 8);
    drop(client);
    // A head that is too large is answered with an error.
    runtime().block_on(async {
        let (mut client, _running) = connect(&server).await;
        let mut large = request("GET", "/health");
        large.headers_mut().insert("x-large", "x".repeat(9 << 10).parse().unwrap());
        let (answer, _) = client.send_request(large, true).unwrap();
        assert_eq!(answer.await.unwrap().status().as_u16(), 431);
        let (answer, _) = client.send_request(request("GET", "/health"), true).unwrap();
        assert_eq!(whole(answer).await.0, 200);
    });
    server.assert_idle();
    assert_eq!(server.get("/health").status, 200);
}

/// Asserts that the server has closed the connection, after an error if the client still read.
fn assert_ends(mut client: Client) {
    client.stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut rest = Vec::new();
    match std::io::Read::read_to_end(&mut client.stream, &mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
    }
}

#[test]
#[ignore = "soak"]
fn idle_connections_and_incomplete_prefaces_end_in_time() {
    let server = Server::with(hasty(), limits(), letters);
    let parts = [&PREFACE[..2], &PREFACE[..3], &PREFACE[..20], PREFACE, b""];
    let began = Instant::now();
    for (part, mut client) in parts.map(|part| (part, server.send(part))) {
        let mut rest = Vec::new();
        let _ = std::io::Read::read_to_end(&mut client.stream, &mut rest);
        assert!(began.elapsed() < Duration::from_secs(20), "{part:?}: {:?}", began.elapsed());
    }
    server.alone();
}

#[test]
fn a_server_that_drains_finishes_running_streams_and_takes_no_more() {
    let server = Server::with(ServerConfig { drain_deadline: Duration::from_secs(30), ..config() }, limits(), |_| {
        use plimsoll_engine::FinishReason;
        use plimsoll_engine::testing::Step;
        let token = (0..60).flat_map(|_| [Step::Token(97, "a".into()), Step::Wait(Duration::from_millis(5))]);
        Box::new(token.chain([Step::Finish(FinishReason::Length, None)]))
    });
    let body = json!({"model": "tiny", "prompt": "x", "max_tokens": 60, "stream": true});
    runtime().block_on(async {
        let (mut client, running) = connect(&server).await;
        let answer = send(&mut client, "/v1/completions", &body).await.unwrap();
        let mut stream = answer.into_body();
        let mut text = piece(&mut stream).await.unwrap().unwrap().to_vec();
        std::thread::scope(|scope| drop(scope.spawn(|| server.shut_down()).join()));
        while let Some(more) = piece(&mut stream).await {
            text.extend_from_slice(&more.unwrap());
        }
        assert!(String::from_utf8(text).unwrap().ends_with("data: [DONE]\n\n"));
        assert!(client.ready().await.is_err(), "no more requests");
        running.await.unwrap().unwrap();
    });
    assert!(server.wait_for_end(common::PATIENCE));
}
