//! Clients that disconnect: in the queue, in the prompt, in the answer, with bytes unread; and requests that are cancelled.

use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

use crate::http::request;
use crate::product::{eventually, posted};
use crate::visitor::{count, events, greedy, ids, number, prompt, rests, says, tiny, until, with};

// vllm-mlx engine_core.py:457, Rapid-MLX 1759: a waiting request stayed in the queue after its client had gone, and ran
// to its end.
#[test]
fn v_a_disconnect_while_waiting_leaves_the_queue_at_once() {
    let server = tiny(&["--running-max-req-size", "1", "--graph-max-batch-size", "1"]);
    let first = server.send("/v1/completions", &with(greedy(&prompt(1, 20), 4000), json!({"logprobs": 5})));
    eventually("the first runs", || !server.rows("decode").is_empty());
    let queue: Vec<TcpStream> = (0..30).map(|i| server.send("/v1/completions", &greedy(&prompt(i, 20), 50))).collect();
    let waiting = || number(&server.memory()["pools"]["requests"]["waiting"]);
    eventually("thirty wait", || waiting() == 30);
    drop(queue);
    eventually("nobody waits", || waiting() == 0);
    assert_eq!(server.rows("decode").len(), 1, "the first still runs: the queue did not wait for it");
    assert_eq!(count(&server, "aborted"), 30);
    drop(first);
    rests(&server);
}

// vllm-mlx af46e0d: the server did not check whether the client was still there, and computed prompts for clients that
// had gone.
#[test]
fn v_27_disconnect_in_prefill_cancels_the_rest() {
    let server = tiny(&["--batch-max-tokens", "16", "--graph-max-batch-size", "4"]);
    let body = with(greedy(&prompt(1, 4000), 50), json!({"prompt_logprobs": 5}));
    for going in [Shutdown::Both, Shutdown::Write] {
        let aborted = count(&server, "aborted");
        let client = server.send("/v1/completions", &body);
        eventually("its prompt is computed", || !server.rows("prefill").is_empty());
        client.shutdown(going).expect("open");
        eventually("it was aborted", || count(&server, "aborted") == aborted + 1);
        rests(&server);
    }
    assert_eq!(count(&server, "finished"), 0, "nobody got an answer, and none was made");
}

// vllm-mlx 457: behind a middleware that reads bodies, requests without `stream` ran on for two minutes after a disconnect.
#[test]
fn v_28_disconnect_with_unread_input_is_noticed() {
    let server = tiny(&["--max-total-token-num", "139264"]);
    let body = with(greedy(&prompt(1, 20), 3900), json!({"n": 64, "return_token_ids": false}));
    let mut client = server.send("/v1/completions", &body);
    // A second request is sent: the end of the connection is then behind bytes that the server does not read.
    std::io::Write::write_all(&mut client, &posted("/v1/completions", &body)).expect("open");
    eventually("64 run", || number(&server.memory()["pools"]["requests"]["running"]) == 64);
    drop(client);
    eventually("they were aborted", || count(&server, "aborted") >= 64);
    rests(&server);
    assert_eq!(count(&server, "finished"), 0);
}

// vllm-mlx 49ef8e6, 5513615: an abort changed the batch while the device was in the middle of a step; the process aborted.
#[test]
fn v_25_aborts_at_every_offset_change_no_other_answer() {
    let server = tiny(&[]);
    let stay = |i: u64| greedy(&prompt(i, 30 + i as usize), 500);
    let alone: Vec<Vec<u64>> = (0..4).map(|i| says(&server, &stay(i))).collect();
    let together = std::thread::scope(|scope| {
        let staying: Vec<_> = (0..4)
            .map(|i| {
                scope.spawn({
                    let server = &server;
                    move || says(server, &stay(i))
                })
            })
            .collect();
        for i in 0..150 {
            let body = with(greedy(&prompt(50 + i, 200), 400), json!({"stream": i % 2 == 0}));
            let client = server.send("/v1/completions", &body);
            std::thread::sleep(Duration::from_millis(i % 7));
            drop(client);
        }
        staying.into_iter().map(|thread| thread.join().expect("an answer")).collect::<Vec<_>>()
    });
    assert_eq!(alone, together);
    assert_eq!(count(&server, "failed"), 0);
    rests(&server);
}

// vllm-mlx 220, 280: cancelling released a lock while the worker went on; two generations ran on one model.
#[test]
fn v_39_cancel_and_send_again_a_hundred_times() {
    let server = tiny(&["--running-max-req-size", "2", "--graph-max-batch-size", "2"]);
    let body = greedy(&prompt(4, 40), 60);
    let expected = says(&server, &body);
    for i in 0..100 {
        let mut client = server.send("/v1/completions", &with(greedy(&prompt(4, 40), 2000), json!({"stream": true})));
        if i % 3 > 0 {
            until(&mut client, "data: ");
        }
        drop(client);
        assert_eq!(says(&server, &body), expected, "round {i}");
    }
    rests(&server);
    assert_eq!(count(&server, "failed"), 0);
}

// vllm-mlx 370, 363: closing a stream early touched the model from the wrong thread.
#[test]
fn v_42_v_r_v_40_streams_closed_early_leave_no_error_in_the_log() {
    let server = tiny(&[]);
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "stream": true});
    let message =
        json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "stream": true, "model": "default"});
    let response = json!({"input": "x", "max_output_tokens": 300, "stream": true});
    let text = json!({"prompt": [1, 2, 3], "max_tokens": 300, "stream": true});
    let paths = [
        ("/v1/completions", text),
        ("/v1/chat/completions", chat),
        ("/v1/messages", message),
        ("/v1/responses", response),
    ];
    for i in 0..200 {
        let (path, body) = &paths[i % 4];
        let mut client = server.send(path, body);
        if i % 8 < 4 {
            let said = until(&mut client, "\r\n\r\n");
            assert!(said.starts_with("HTTP/1.1 200"), "{path}: {said}");
        }
        drop(client);
    }
    rests(&server);
    let log = server.log();
    assert!(!log.contains("ERROR") && !log.contains("panicked"), "{log}");
}

// vllm-mlx server.py:3842: the id that clients knew was not the engine's; cancelling said yes and stopped nothing.
#[test]
fn v_i_a_stream_is_cancelled_by_the_id_it_shows() {
    let server = tiny(&[]);
    let mut answer = server.post("/v1/completions", &with(greedy(&prompt(1, 9), 4000), json!({"stream": true})));
    let first: Value = serde_json::from_str(&answer.event().expect("a first")).expect("JSON");
    let id = first["id"].as_str().expect("an id");
    let cancel = |id: &str| request(server.address, "DELETE", &format!("/v1/requests/{id}"), b"").expect("an answer");
    let done = cancel(id);
    assert_eq!(done.status, 200);
    let last = events(answer).pop().expect("a last event");
    assert_eq!(last["error"]["code"], "request_cancelled", "{last}");
    rests(&server);
    assert_eq!(count(&server, "aborted"), 1);
    assert_eq!(cancel(id).status, 404, "it has ended");
    assert_eq!(cancel("cmpl-unknown").status, 404);
}

// Rapid-MLX 723: a submission that was cancelled half-way left its request without a consumer.
#[test]
fn r_723_bodies_that_end_half_way_leave_no_request() {
    let server = tiny(&[]);
    let bytes = posted("/v1/completions", &greedy(&prompt(1, 300), 50));
    for i in 0..60 {
        let mut client = TcpStream::connect(server.address).expect("it listens");
        let cut = bytes.len() * i / 60;
        std::io::Write::write_all(&mut client, &bytes[..cut]).expect("open");
    }
    rests(&server);
    assert_eq!((count(&server, "finished"), count(&server, "aborted")), (0, 0));
    assert_eq!(ids(&server.ask("/v1/completions", &greedy(&[1], 3))).len(), 3);
}
