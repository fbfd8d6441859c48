//! Stores beside the engine: responses, grammars, the prefix cache, the list of clients.

use serde_json::{Value, json};

use crate::http::request;
use crate::product::eventually;
use crate::visitor::{cached, greedy, heap, metric, number, prompt, refused, rests, says, tiny, with};

// vllm-mlx vision_embedding_cache, server.py: stores bounded by count only; a hundred entries of hundreds of megabytes.
#[test]
fn v_n_stored_responses_are_bounded_in_bytes() {
    let server = tiny(&["--response-store-bytes", "65536"]);
    let mut stored = Vec::new();
    for i in 0..60 {
        let input = format!("{i} {}", "abcdefgh".repeat(250));
        let answer = server.ask("/v1/responses", &json!({"input": input, "max_output_tokens": 16}));
        stored.push(answer["id"].as_str().expect("an id").to_owned());
        let bytes = metric(&server, "plimsoll_response_store_bytes");
        assert!(bytes <= 65536, "{bytes} bytes after {i} responses");
    }
    let status = |id: &String| server.get(&format!("/v1/responses/{id}")).status;
    assert_eq!((status(&stored[0]), status(&stored[59])), (404, 200), "the oldest went");
}

// vllm-mlx 662ecd9: the memory of schemas had no eviction, by design.
#[test]
fn v_70_schemas_are_bounded_in_bytes() {
    let server = tiny(&["--grammar-bytes", "4194304"]);
    for i in 0..120 {
        let schema = json!({"type": "object", "required": ["a"], "additionalProperties": false,
                            "properties": {"a": {"type": "string", "minLength": i}}});
        let form = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
        server.ask("/v1/completions", &with(greedy(&[1], 2), json!({"response_format": form})));
        let bytes = metric(&server, "plimsoll_grammar_bytes");
        assert!(bytes <= 4 << 20, "{bytes} bytes after {i} schemas");
    }
    rests(&server);
}

// vllm-mlx mllm_scheduler.py:1295, batched.py:1318: clearing the cache raised or did nothing, and said "cleared".
#[test]
fn v_g_v_h_a_cleared_cache_is_empty_when_the_answer_comes() {
    let server = tiny(&[]);
    let mine = prompt(1, 160);
    says(&server, &greedy(&mine, 1));
    // The answer is sent before its step has ended and is counted.
    eventually("the pages are the cache's", || number(&server.get("/v1/cache").json()["pages"]) >= 10);
    let cleared = request(server.address, "DELETE", "/v1/cache", b"").expect("an answer").json();
    assert_eq!(cleared["after"]["pages"], 0, "{cleared}");
    assert_eq!(server.memory()["pools"]["kv_pages"]["used"], 0);
    assert_eq!(cached(&server.ask("/v1/completions", &greedy(&mine, 1))), 0);
}

// vllm-mlx server.py:1702, Rapid-MLX 192: a bucket for whatever stood in the header, for ever.
#[test]
fn v_f_addresses_that_were_seen_once_are_forgotten() {
    let server = tiny(&["--rate-limit-requests", "1000000"]);
    let knock = |from: u32, to: u32| {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("threads");
        runtime.block_on(async {
            for i in from..to {
                // Every address in 127.0.0.0/8 is this machine's.
                let address = std::net::Ipv4Addr::from(0x7f01_0000 + i);
                let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
                socket.bind((address, 0).into()).expect("an address of this machine");
                let stream = socket.connect(server.address).await.expect("it listens").into_std().expect("a stream");
                stream.set_nonblocking(false).expect("a stream");
                let mut client = stream;
                std::io::Write::write_all(&mut client, b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer ")
                    .expect("open");
                let rest = format!(
                    "{i}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{{\"prompt\":\"x\"}}"
                );
                std::io::Write::write_all(&mut client, rest.as_bytes()).expect("open");
                let answer = crate::http::Answer::read(client).expect("an answer");
                assert_eq!(answer.status, 200);
            }
        });
        heap(&server)
    };
    let full = knock(1, 4300);
    let later = knock(4300, 6500);
    assert!(later - full <= 128 << 10, "{} bytes more for another 2,200 addresses", later - full);
}

// vllm-mlx 335, 339, 325: sizes of uploads and of answers were unbounded.
#[test]
fn v_61_bodies_are_bounded_however_they_come() {
    let server = tiny(&["--max-body-bytes", "65536"]);
    let body = |bytes: usize| {
        let empty = json!({"prompt": [1], "max_tokens": 1, "user": ""}).to_string().len();
        json!({"prompt": [1], "max_tokens": 1, "user": "x".repeat(bytes - empty)})
    };
    assert_eq!(body(65_536).to_string().len(), 65_536);
    assert_eq!(server.post("/v1/completions", &body(65_536)).status, 200, "the largest legal one is read");
    for bytes in [65_537, 200_000, 20_000_000] {
        let words = refused(server.post("/v1/completions", &body(bytes)), 413);
        assert!(words.contains("65536"), "{words}");
    }
    rests(&server);
    let too_many = refused(server.post("/v1/completions", &greedy(&[1], 100_000)), 400);
    assert!(too_many.contains("4096"), "{too_many}");
}

// vllm-mlx 335: the server fetched addresses from a request, wherever they led.
#[test]
fn v_61_nothing_in_a_request_to_a_model_of_text_is_fetched() {
    let server = tiny(&[]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a listener");
    let url = format!("http://{}/a.png", listener.local_addr().expect("an address"));
    for part in [
        json!({"type": "image_url", "image_url": {"url": url}}),
        json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        json!({"type": "video_url", "video_url": {"url": url}}),
        json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
    ] {
        let content = json!([{"type": "text", "text": "x"}, part]);
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
        let answer = server.post("/v1/chat/completions", &body);
        let words = refused(answer, 400);
        assert!(!words.is_empty());
    }
    let knocked: Value = listener.accept().is_ok().into();
    assert_eq!(knocked, json!(false), "nobody was asked for it");
}
