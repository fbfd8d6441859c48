//! Faults of isolation: an answer changed by another request, through cached keys and values or sampling parameters.

use serde_json::{Value, json};

use crate::http::request;
use crate::product::Server;
use crate::visitor::{cached, count, greedy, ids, number, prompt, refused, rests, says, serve, tiny, with};

/// Token ids and log-probabilities of an answer, and its cached prompt tokens. They are equal only if the same was computed.
fn answer(server: &Server, prompt: &[u32]) -> (Value, u64) {
    let answer = server.ask("/v1/completions", &with(greedy(prompt, 8), json!({"logprobs": 5})));
    (json!([answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]]), cached(&answer))
}

/// Clears the prefix cache.
fn forget(server: &Server) {
    let cleared = request(server.address, "DELETE", "/v1/cache", b"").expect("an answer");
    assert_eq!(cleared.status, 200);
}

// vllm-mlx a1fd848, fba51b4: a cut cache kept keys behind its end; 22 of 204 answers had words of other requests.
#[test]
fn v_46_shared_prefix_reveals_nothing_after_it() {
    let server = tiny(&[]);
    for shared in [8, 16, 24, 31, 32, 40, 47] {
        let with_secret = [prompt(1, shared), prompt(666, 80 - shared)].concat();
        let mine = [prompt(1, shared), prompt(2, 80 - shared)].concat();
        forget(&server);
        let (cold, _) = answer(&server, &mine);
        forget(&server);
        answer(&server, &with_secret);
        let (warm, found) = answer(&server, &mine);
        assert_eq!((found, &warm), (shared as u64 / 16 * 16, &cold), "{shared} tokens are the same");
    }
}

// vllm-mlx 444: a block's hash took the low eight bits of its tokens; other prompts were found.
#[test]
fn v_50_tokens_are_told_apart_by_all_their_bits() {
    let server = tiny(&[]);
    let (low, high): (Vec<u32>, Vec<u32>) = (0..64).map(|i| (i % 100, i % 100 + 256)).unzip();
    let (cold, _) = answer(&server, &high);
    forget(&server);
    answer(&server, &low);
    assert_eq!(answer(&server, &high), (cold, 0));
}

// vllm-mlx 311: a prefix was one token too long; warm answers drifted from cold ones.
#[test]
fn v_51_a_warm_answer_is_the_cold_one_to_the_last_bit() {
    let server = tiny(&[]);
    for tokens in [1, 16, 17, 32, 33, 100, 1000] {
        let prompt = prompt(tokens, tokens as usize);
        let (cold, found) = answer(&server, &prompt);
        let again = answer(&server, &prompt);
        assert_eq!((found, again), (0, (cold, (tokens - 1) / 16 * 16)), "{tokens} tokens");
    }
}

// vllm-mlx 296, 353: caches of sliding windows were cut and joined in the wrong shape.
#[test]
fn v_52_windows_of_attention_are_reused_like_everything_else() {
    let server = serve("gemma3", &["--max-total-token-num", "4096"]);
    for tokens in [15, 16, 17, 40, 200] {
        let mine = [prompt(1, tokens as usize), prompt(2, 20)].concat();
        forget(&server);
        let (cold, _) = answer(&server, &mine);
        forget(&server);
        answer(&server, &[prompt(1, tokens as usize), prompt(3, 50)].concat());
        assert_eq!(answer(&server, &mine), (cold, tokens / 16 * 16), "{tokens} tokens are the same");
    }
}

// vllm-mlx 43ce701: the cache was emptied whenever a sampling parameter changed, and never filled by prompts in chunks.
#[test]
fn v_66_other_sampling_finds_the_same_prefix() {
    let server = tiny(&["--batch-max-tokens", "64"]);
    let mine = prompt(1, 300);
    says(&server, &greedy(&mine, 1));
    for fields in
        [json!({"temperature": 0.9, "seed": 1}), json!({"temperature": 1.4, "top_k": 3}), json!({"logprobs": 3})]
    {
        let answer = server.ask("/v1/completions", &with(greedy(&mine, 2), fields.clone()));
        assert_eq!(cached(&answer), 288, "{fields}");
    }
}

// vllm-mlx scheduler.py:1455: temperature, top-p and stop tokens of the first request of a batch held for all of it.
#[test]
fn v_j_parameters_of_a_neighbour_are_not_mine() {
    let server = tiny(&[]);
    let mine = |seed: u32| {
        with(
            greedy(&prompt(8, 20), 60),
            json!({"temperature": 1.3, "seed": seed, "top_k": 40, "frequency_penalty": 0.5}),
        )
    };
    let bodies: Vec<Value> = (0..4).map(mine).collect();
    let alone: Vec<_> = bodies.iter().map(|body| says(&server, body)).collect();
    let neighbour = with(greedy(&prompt(9, 20), 3900), json!({"stream": true}));
    let mut stream = server.post("/v1/completions", &neighbour);
    stream.event().expect("it runs");
    let beside: Vec<_> = bodies.iter().map(|body| says(&server, body)).collect();
    assert_eq!(server.rows("decode").len(), 1, "the neighbour was there all the while");
    assert_eq!(alone, beside);
    assert!(alone[0] != alone[1], "the seed counts");
}

// vllm-mlx 594: one request without a logits processor in a batch with others failed every step; 26,916 crashes.
#[test]
fn v_57_grammars_penalties_and_plain_requests_in_one_batch() {
    let server = tiny(&[]);
    let schema = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}}});
    let bodies: Vec<Value> = (0..12)
        .map(|i| {
            let body = greedy(&prompt(i, 10 + i as usize), 40);
            match i % 4 {
                0 => with(body, json!({"response_format": schema, "ignore_eos": false})),
                1 => with(body, json!({"repetition_penalty": 1.5, "presence_penalty": 0.5})),
                2 => with(body, json!({"logit_bias": {"7": 4.0, "8": -100}, "min_tokens": 5})),
                _ => body,
            }
        })
        .collect();
    let alone: Vec<_> = bodies.iter().map(|body| says(&server, body)).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = bodies.iter().map(|body| scope.spawn(|| says(&server, body))).collect();
        asked.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    });
    assert_eq!(alone, together);
    assert_eq!(count(&server, "failed"), 0);
}

// vllm-mlx scheduler.py CACHE_CORRUPTION_PATTERNS: an error that had a certain word in it emptied every cache.
#[test]
fn v_s_an_error_of_one_request_empties_no_cache() {
    let server = tiny(&[]);
    let mine = prompt(1, 160);
    says(&server, &greedy(&mine, 1));
    for body in [
        json!({"prompt": [999_999]}),
        json!({"prompt": [1], "temperature": "hot"}),
        json!({"prompt": prompt(2, 5000)}),
        json!({"prompt": [1], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}),
    ] {
        refused(server.post("/v1/completions", &body), 400);
    }
    drop(server.send("/v1/completions", &greedy(&prompt(3, 20), 3000)));
    rests(&server);
    assert_eq!(cached(&server.ask("/v1/completions", &greedy(&mine, 1))), 144);
}

// vllm-mlx: a cache that is shared tells one tenant what another has asked, by its speed; a salt sets them apart.
#[test]
fn v_46_prompts_with_different_salts_share_nothing() {
    let server = tiny(&[]);
    let mine = prompt(1, 160);
    let ask = |salt: &str| cached(&server.ask("/v1/completions", &with(greedy(&mine, 1), json!({"cache_salt": salt}))));
    assert_eq!((ask("a"), ask("a"), ask("b"), ask("b")), (0, 144, 0, 144));
    rests(&server);
}

// xinfer/vllm.rs 229: a recycled slot of recurrent state was not cleared; the answer began with another user's state.
#[test]
fn t_43_a_recycled_state_slot_tells_nothing_of_its_last_user() {
    let flags = ["--running-max-req-size", "1", "--graph-max-batch-size", "1", "--state-checkpoints", "0"];
    let server = serve("qwen3.5", &[&flags[..], &["--max-total-token-num", "4096"]].concat());
    let mine = greedy(&prompt(1, 40), 20);
    let cold = ids(&server.ask("/v1/completions", &mine));
    for i in 0..8 {
        says(&server, &greedy(&prompt(100 + i, 60), 10));
        assert_eq!(says(&server, &mine), cold, "after another user");
    }
    let slots = &server.status()["pools"]["state_slots"];
    assert_eq!(number(&slots["total"]), 1, "{slots}");
}
