//! Faults of accounting: lists that were never emptied, pools that were not freed, caches counted by entries.

use serde_json::json;

use crate::product::eventually;
use crate::visitor::{
    anonymous, cached, completion, count, crowd, events, greedy, heap, keeps_its_plan, number, prompt, rests, says,
    serve, tiny, until, with,
};

// vllm 44490, 28726: lists of ids that were never drained; memory grew with every short request.
#[test]
fn t_47_a_thousand_short_requests_leave_no_entry_and_no_byte() {
    let server = tiny(&[]);
    let round = |seed: u64| {
        crowd(&server, 500, |i| completion(greedy(&prompt(seed + i, 5), 2)));
        rests(&server);
        anonymous(&server)
    };
    let (_warm, before, after) = (round(0), round(1000), round(2000));
    assert!(server.status()["requests"].as_array().expect("a list").is_empty());
    assert!(after - before <= 512 << 10, "{} bytes more", after - before);
}

// vllm-mlx 44: with other sampling parameters the generator was replaced, and what it held was not given back.
#[test]
fn v_01_two_hundred_kinds_of_sampling_leave_the_heap_as_it_was() {
    let server = tiny(&[]);
    let round = || {
        crowd(&server, 100, |i| {
            let temperature = 0.1 + i as f64 / 100.0;
            let fields = json!({"temperature": temperature, "top_p": 1.0 - i as f64 / 200.0, "top_k": i, "seed": i,
                                "frequency_penalty": i as f64 / 100.0, "min_p": i as f64 / 1000.0});
            completion(with(greedy(&prompt(1, 20), 10), fields))
        });
        rests(&server);
        heap(&server)
    };
    let (before, after) = (round(), round());
    assert!(after - before <= 32 << 10, "{} bytes more", after - before);
}

// vllm-mlx a158cef, 157: the pool grew inside one long answer, and the whole graph was evaluated at its end.
#[test]
fn v_02_v_04_one_long_answer_takes_at_no_time_more_than_its_plan() {
    let server = tiny(&[]);
    server.ask("/v1/completions", &greedy(&prompt(1, 100), 200));
    let before = anonymous(&server);
    let mut stream = server.post("/v1/completions", &with(greedy(&prompt(2, 20), 4000), json!({"stream": true})));
    let (mut events, mut most) = (0, 0);
    while stream.event().is_some() {
        events += 1;
        if events % 250 == 0 {
            most = most.max(anonymous(&server) - before);
        }
    }
    most = most.max(anonymous(&server) - before);
    // Ids, pages and the unread text of 4,000 tokens; the keys of one layer would be another half.
    assert!(events > 100 && most <= 1 << 20, "{most} bytes more after {events} events");
    keeps_its_plan(&server);
    rests(&server);
}

// vllm-mlx 154: requests were never taken out of a map; 7,000 orphans before memory was out.
#[test]
fn v_03_places_come_back_one_by_one() {
    let server = tiny(&["--running-max-req-size", "2", "--graph-max-batch-size", "2", "--max-waiting", "2"]);
    for i in 0..60 {
        says(&server, &greedy(&prompt(i, 8), 2));
    }
    // The last answer may be read before its request is counted.
    rests(&server);
    assert_eq!((count(&server, "finished"), count(&server, "refused_full")), (60, 0));
}

// vllm-mlx 453: a request's cache and pixels lived until the request object was collected; 232 GB beside 19 that were counted.
#[test]
fn v_07_what_a_request_held_is_back_at_its_last_word_though_the_client_stays() {
    let server = tiny(&[]);
    let mut clients = Vec::new();
    for i in 0..10 {
        let mut client = server.send("/v1/completions", &with(greedy(&prompt(i, 200), 20), json!({"stream": true})));
        until(&mut client, "data: [DONE]\n\n\r\n0\r\n\r\n");
        clients.push(client);
    }
    // Ten connections are open, and nothing is held for any of them.
    rests(&server);
    drop(clients);
}

// vllm-mlx 642: an entry of the prefix cache was a view of the batch it came from, and kept all of it; 0.9 GB a request.
#[test]
fn v_08_an_entry_of_the_cache_holds_its_own_tokens_and_nothing_else() {
    let server = tiny(&[]);
    let pages = |server: &crate::product::Server| number(&server.get("/v1/cache").json()["pages"]);
    // Four in one batch; each leaves its own whole pages.
    crowd(&server, 4, |i| completion(greedy(&prompt(i, 100 + 16 * i as usize), 1)));
    rests(&server);
    let expected: u64 = (0..4).map(|i| (100 + 16 * i) / 16).sum();
    assert_eq!(pages(&server), expected);
    let page = server.get("/v1/cache").json();
    assert_eq!(number(&page["bytes"]), expected * number(&page["page_bytes"]));
}

// vllm-mlx 667: every new length of a text was a new buffer size; 50 GB in a week.
#[test]
fn v_10_embeddings_of_all_lengths_reach_a_plateau() {
    let server = serve("bert", &[]);
    let round = |seed: u64| {
        crowd(&server, 250, |i| {
            let tokens = 1 + (seed + i * 7) as usize % 90;
            let ids: Vec<u32> = prompt(i, tokens).iter().map(|id| 5 + id % 200).collect();
            ("/v1/embeddings", json!({"input": ids}))
        });
        rests(&server);
        anonymous(&server)
    };
    let (_warm, before, after) = (round(0), round(3), round(5));
    assert!(after - before <= 512 << 10, "{} bytes more", after - before);
}

// vllm-mlx 634: a thread was left over whenever the engine started anew.
#[test]
fn v_12_threads_and_descriptors_are_those_of_the_start() {
    let server = tiny(&[]);
    let look = || {
        let process = server.memory()["process"].take();
        (number(&process["threads"]), number(&process["fds"]))
    };
    let chat = |i: u64| json!({"messages": [{"role": "user", "content": format!("{i}")}], "max_tokens": 3});
    crowd(&server, 20, |i| ("/v1/chat/completions", chat(i)));
    let before = look();
    crowd(&server, 200, |i| ("/v1/chat/completions", chat(i)));
    for i in 0..50 {
        drop(server.send("/v1/completions", &greedy(&prompt(i, 50), 500)));
    }
    rests(&server);
    // Idle workers of the text pool end after ten seconds; none is added.
    eventually("no more than before", || look().0 <= before.0 && look().1 <= before.1);
}

// vllm-mlx 18: the prefix cache was bounded by the number of its entries.
#[test]
fn v_14_a_hundred_long_prompts_stay_within_the_pool() {
    let server = tiny(&[]);
    for i in 0..100 {
        says(&server, &greedy(&prompt(i, 1500), 1));
    }
    let page = server.get("/v1/cache").json();
    assert!(number(&page["bytes"]) <= 512 * number(&page["page_bytes"]), "{page}");
    assert!(number(&page["evicted_pages"]) > 5000, "it was full many times: {page}");
    keeps_its_plan(&server);
}

// vllm-mlx 06b7af4: each longer prefix was stored in full beside its beginning; 34 GB for 190,000 tokens.
#[test]
fn v_15_a_conversation_of_thirty_turns_is_stored_once() {
    let server = tiny(&[]);
    let mut talk = prompt(7, 30);
    for turn in 0..30 {
        let said = says(&server, &greedy(&talk, 20));
        talk.extend(said.iter().map(|id| *id as u32));
        talk.extend(prompt(100 + turn, 30));
    }
    rests(&server);
    let stored = 16 * number(&server.get("/v1/cache").json()["entries"]);
    assert!(stored <= talk.len() as u64, "{stored} tokens stored of a conversation of {}", talk.len());
}

// vllm-mlx 541: a cache with one place, and two agents in turn; each computed its 28,000 tokens anew, every time.
#[test]
fn v_59_two_system_prompts_in_turn_are_both_found() {
    let server = tiny(&[]);
    for turn in 0..6 {
        for agent in [1, 2] {
            let body = greedy(&[prompt(agent, 320), prompt(10 * turn + agent, 20)].concat(), 2);
            let found = cached(&server.ask("/v1/completions", &body));
            assert!(turn == 0 || found >= 320, "turn {turn} of agent {agent}: {found} tokens found");
        }
    }
}

// vllm-mlx prefix_cache.py:503: tables of every request were kept for ever; the cache froze after 1,000 blocks.
#[test]
fn v_b_a_hot_prompt_is_found_however_many_others_pass() {
    let server = tiny(&["--max-total-token-num", "2048"]);
    let hot = prompt(999, 160);
    let mut found = 0;
    for i in 0..300 {
        says(&server, &greedy(&prompt(i, 300), 1));
        if i % 3 == 0 {
            found += cached(&server.ask("/v1/completions", &greedy(&hot, 1)));
        }
    }
    let page = server.get("/v1/cache").json();
    assert!(number(&page["evicted_pages"]) > 3000, "others passed: {page}");
    assert!(found >= 95 * 144, "{found} tokens of the hot prompt were found");
}

// vllm-mlx a19cbac, mllm_batch_generator.py:562: an id, a detokenizer, a progress entry was left of every aborted request.
#[test]
fn v_c_aborts_in_the_answer_give_every_host_byte_back() {
    // Room for a few dozen requests: if it were not freed, the rest would be refused.
    let server = tiny(&["--request-bytes", "4000000"]);
    for i in 0..120 {
        let mut client = server.send("/v1/completions", &with(greedy(&prompt(i, 10), 3000), json!({"stream": true})));
        until(&mut client, "data: ");
        drop(client);
    }
    rests(&server);
    assert!(count(&server, "aborted") >= 110, "{}", server.memory()["requests"]);
}

// vllm-mlx 403: what a finished or cancelled stream had collected was not released.
#[test]
fn v_20_v_21_unread_answers_return_their_bytes() {
    let server = tiny(&[]);
    // Each whole answer holds eight megabytes of the 24 until it is sent. If they were not freed, the fourth would be too many.
    let body = |i: u64, tokens| with(greedy(&prompt(i, 10), tokens), json!({"logprobs": 20}));
    for i in 0..20 {
        let client = server.send("/v1/completions", &body(i, 3000));
        eventually("it runs", || !server.status()["requests"].as_array().expect("a list").is_empty());
        drop(client);
        eventually("it is gone", || server.status()["requests"].as_array().expect("a list").is_empty());
    }
    rests(&server);
    assert_eq!(says(&server, &body(1, 400)).len(), 400);
}

// vllm-mlx 469: --disable-prefix-cache did not reach the path of images; memory was used though it was "off".
#[test]
fn v_22_a_cache_that_is_off_holds_nothing() {
    let server = tiny(&["--disable-prefix-cache"]);
    crowd(&server, 12, |i| completion(greedy(&prompt(i % 3, 200), 5)));
    rests(&server);
    let page = server.get("/v1/cache").json();
    assert_eq!((&page["enabled"], &page["entries"], &page["pages"]), (&json!(false), &json!(0), &json!(0)));
    assert_eq!(cached(&server.ask("/v1/completions", &greedy(&prompt(1, 200), 1))), 0);
}

// vllm-mlx 456: what aborted requests had produced was not counted; the throughput of a busy server was invisible.
#[test]
fn v_45_tokens_of_an_aborted_answer_are_counted() {
    let server = tiny(&[]);
    let mut answer =
        server.post("/v1/completions", &with(greedy(&[1, 2, 3], 3900), json!({"stream": true, "logprobs": 20})));
    let mut seen = 0;
    while seen < 50 {
        let event: serde_json::Value = serde_json::from_str(&answer.event().expect("more")).expect("JSON");
        seen += event["choices"][0]["token_ids"].as_array().map_or(0, Vec::len) as u64;
    }
    drop(answer);
    rests(&server);
    assert_eq!((count(&server, "aborted"), count(&server, "finished")), (1, 0));
    assert!(number(&server.status()["totals"]["generated_tokens"]) >= seen, "{}", server.status()["totals"]);
}

// sglang-mlx 39251: what the last batch held was released by the next decode; an idle server kept it.
#[test]
fn v_a2_last_request_returns_its_memory_without_a_successor() {
    let server = tiny(&[]);
    let client = server.send("/v1/completions", &with(greedy(&prompt(3, 300), 3700), json!({"logprobs": 5})));
    eventually("it generates", || !server.rows("decode").is_empty());
    drop(client);
    // Only the status page is read: no request wakes the engine.
    eventually("all is back", || server.at_rest());
    assert_eq!((count(&server, "aborted"), count(&server, "finished")), (1, 0));
}

// TensorRT-LLM 5509, 13777: buffers of stop words, and statistics without a reader, grew without bound.
#[test]
fn t_66_v_54_stop_strings_leave_nothing_and_hold_back_no_more_than_themselves() {
    let server = tiny(&[]);
    let stops = json!({"stop": ["never said by this model", "nor this", "\u{1F6A2}", "0123456789".repeat(20)]});
    let round = || {
        crowd(&server, 200, |i| completion(with(greedy(&prompt(i, 10), 8), stops.clone())));
        rests(&server);
        heap(&server)
    };
    let (_warm, before, after) = (round(), round(), round());
    assert!(after - before <= 32 << 10, "{} bytes more", after - before);
    // A stream with stop strings holds back no more text than the longest of them.
    let plain = with(greedy(&prompt(5, 10), 1500), json!({"stream": true}));
    let text = |body: &serde_json::Value| -> String {
        let events = events(server.post("/v1/completions", body));
        events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect()
    };
    assert_eq!(text(&with(plain.clone(), stops.clone())), text(&plain));
}
