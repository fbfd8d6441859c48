//! Overload: more requests than slots, requests larger than the pool, memory that other processes take.

use std::time::Duration;

use serde_json::json;

use crate::limit::Cage;
use crate::product::{Server, eventually, eventually_within};
use crate::visitor::{
    completion, count, crowd, greedy, keeps_its_plan, number, plan, prompt, refused, rests, says, serve, served, tiny,
    with,
};

// vllm-mlx scheduler.py:1982: no bound on the queue; every client waited, and memory grew until it was out.
#[test]
fn v_ab_a_full_queue_says_when_to_come_back() {
    let flags = ["--running-max-req-size", "2", "--graph-max-batch-size", "2", "--max-waiting", "4"];
    let server = tiny(&flags);
    let body = |i: u64| with(greedy(&prompt(i, 20), 3900), json!({"logprobs": 3, "stream": true}));
    let clients: Vec<_> = (0..6).map(|i| server.send("/v1/completions", &body(i))).collect();
    eventually("six are in", || number(&server.memory()["pools"]["requests"]["in_system"]) == 6);
    for i in 0..50 {
        let answer = server.post("/v1/completions", &body(i));
        assert!(answer.header("retry-after").is_some());
        assert!(refused(answer, 429).contains("6 places"));
    }
    drop(clients);
    rests(&server);
    assert_eq!(says(&server, &greedy(&[1, 2], 3)).len(), 3);
}

// vllm-mlx mllm_scheduler.py:1071: a queue without bound for the output of each request; a slow reader was enough.
#[test]
fn v_o_what_requests_may_hold_unread_is_bounded_together() {
    let server = tiny(&["--request-bytes", "400000"]);
    let body = with(greedy(&prompt(1, 20), 3000), json!({"stream": true}));
    let one = server.post("/v1/completions", &with(body.clone(), json!({"logprobs": 20, "max_tokens": 4000})));
    assert!(refused(one, 400).contains("400000"), "alone it is too large for all of it");
    let clients: Vec<_> = (0..2).map(|_| server.send("/v1/completions", &body)).collect();
    eventually("they are in", || number(&server.memory()["pools"]["requests"]["in_system"]) == 2);
    let words = refused(server.post("/v1/completions", &with(body, json!({"max_tokens": 3900}))), 429);
    assert!(words.contains("400000 bytes"), "{words}");
    drop(clients);
    rests(&server);
}

// mistral.rs 2022, 1774: a request larger than the pool was preempted, and admitted, and preempted, without an end.
#[test]
fn t_56_what_is_larger_than_the_pool_is_refused_at_the_door() {
    let server = tiny(&["--max-total-token-num", "512"]);
    for (tokens, output) in [(600, 1), (100, 413), (512, 1), (1, 512)] {
        let words = refused(server.post("/v1/completions", &greedy(&prompt(1, tokens), output)), 400);
        assert!(words.contains("512"), "{words}");
    }
    assert_eq!(says(&server, &greedy(&prompt(1, 500), 12)).len(), 12, "the largest legal one is served");
    rests(&server);
}

// vllm-mlx 278, 160: a prompt that was too long raised in the step and stayed queued; it was tried for ever.
#[test]
fn v_33_a_prompt_too_long_is_one_answer_and_nothing_more() {
    let server = tiny(&[]);
    let talking = server.send("/v1/completions", &with(greedy(&prompt(1, 20), 3000), json!({"stream": true})));
    eventually("somebody talks", || !server.rows("decode").is_empty());
    let long = "word ".repeat(5000);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": prompt(1, 4097)})),
        ("/v1/completions", json!({"prompt": long, "stream": true})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": long}], "stream": true})),
        ("/v1/messages", json!({"messages": [{"role": "user", "content": long}], "max_tokens": 5, "model": "default"})),
        ("/v1/responses", json!({"input": long})),
    ] {
        let words = refused(server.post(path, &body), 400);
        assert!(words.contains("4096"), "{path}: {words}");
    }
    assert_eq!(server.status()["requests"].as_array().expect("a list").len(), 1, "only the one who talks");
    drop(talking);
    rests(&server);
    assert_eq!(count(&server, "failed"), 0);
}

// vllm-mlx 455: keys and values of one sequence grew without bound.
#[test]
fn v_64_one_sequence_never_has_more_than_its_share() {
    let server = tiny(&["--max-req-total-len", "256"]);
    let answer = server.ask("/v1/completions", &greedy(&prompt(1, 200), 56));
    assert_eq!(answer["usage"]["completion_tokens"], 56);
    let words = refused(server.post("/v1/completions", &greedy(&prompt(1, 200), 57)), 400);
    assert!(words.contains("256"), "{words}");
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "ignore_eos": true});
    let answer = server.ask("/v1/chat/completions", &chat);
    assert!(number(&answer["usage"]["total_tokens"]) <= 256, "without a number it is the rest: {}", answer["usage"]);
}

// vllm-mlx 695, 626: the length of an input to embed was unbounded, or cut at 512 without a word.
#[test]
fn v_60_an_input_too_long_to_embed_is_refused_and_not_cut() {
    let server = serve("bert", &[]);
    let embed = |tokens: usize| json!({"input": vec![7; tokens]});
    assert_eq!(server.ask("/v1/embeddings", &embed(96))["usage"]["prompt_tokens"], 96);
    for tokens in [97, 200, 2000] {
        let words = refused(server.post("/v1/embeddings", &embed(tokens)), 400);
        assert!(words.contains("96"), "{words}");
    }
    rests(&server);
    keeps_its_plan(&server);
}

// vllm 54644, 15996, 546, 41951; vllm-ascend 16315: preemption threw work away, forgot its victims, or never came to an end.
#[test]
fn t_52_t_53_t_55_four_times_what_the_pool_holds_comes_to_its_end_with_the_same_words() {
    let server = tiny(&["--max-total-token-num", "1024", "--disable-prefix-cache"]);
    let body = |i: u64| greedy(&prompt(i, 40), 200);
    let alone: Vec<_> = (0..16).map(|i| says(&server, &body(i))).collect();
    let computed = || number(&server.status()["totals"]["prompt_tokens"]);
    let before = computed();
    let together: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..16)
            .map(|i| {
                scope.spawn({
                    let server = &server;
                    move || says(server, &body(i))
                })
            })
            .collect();
        asked.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    });
    assert_eq!(alone, together);
    let (preempted, again) = (count(&server, "preemptions"), computed() - before - 16 * 40);
    println!("{preempted} preemptions, {again} rows of prompts computed again");
    assert!(preempted > 0, "the pool was too small for all");
    assert!(preempted <= 16, "nobody is preempted over and over: {preempted}");
    rests(&server);
}

// omlx 947, 1372: there was a guard against memory pressure, and no code called it.
#[test]
fn t_60_a_line_that_sinks_under_a_running_server_is_noticed() {
    let flags = ["--max-total-token-num", "8192"];
    let total = number(&plan("llama", &flags)["total"]);
    let Some(cage) = Cage::open("t60", 2 * total) else { return };
    let server = Server::try_start(cage.plimsoll(&served("llama", &flags))).unwrap_or_else(|words| panic!("{words}"));
    crowd(&server, 8, |i| completion(greedy(&prompt(i, 300), 5)));
    let stands = |level: &str| server.memory()["degradation"]["level"] == level;
    assert!(stands("calm"), "{}", server.memory()["degradation"]);
    cage.limit(number(&server.memory()["process"]["rss_anon"]) + (24 << 20));
    eventually("the governor gives way", || !stands("calm"));
    eventually("cold prefixes go first", || server.get("/v1/cache").json()["pages"] == 0);
    cage.limit(2 * total);
    eventually_within("the governor comes back", Duration::from_secs(60), || stands("calm"));
    assert_eq!(says(&server, &greedy(&[1, 2], 3)).len(), 3);
    assert_eq!(cage.report()[2], 0, "nobody was killed");
}

// vllm: n of a hundred thousand made a hundred thousand sequences before anything was checked.
#[test]
fn t_30_counts_in_a_request_are_checked_before_they_are_multiplied() {
    let server = tiny(&[]);
    for body in [
        with(greedy(&[1], 1), json!({"n": 100_000})),
        with(greedy(&[1], 1), json!({"prompt": vec![[1, 2]; 2000]})),
        with(greedy(&[1], 1), json!({"n": 128, "prompt": [[1], [2]]})),
        with(greedy(&[1], 1), json!({"stop": vec!["x"; 1000]})),
        with(greedy(&[1], 1), json!({"stop": ["x".repeat(100_000)]})),
    ] {
        refused(server.post("/v1/completions", &body), 400);
    }
    rests(&server);
}
