//! Peaks that the warm-up missed: logits of every position, experts that all tokens choose, the worst legal step.

use serde_json::json;

use crate::visitor::{
    completion, count, crowd, greedy, keeps_its_plan, number, plan, planned, prompt, refused, rests, says, serve, tiny,
    with,
};

// vllm 5907, 5550, 1532, 14239, 52054: logits of every prompt token were not in the profile; one such request ended the engine.
#[test]
fn t_01_prompt_logprobs_of_a_whole_context_come_in_steps_of_the_self_test() {
    let server = tiny(&["--max-total-token-num", "4096", "--graph-max-batch-size", "8"]);
    let body = with(greedy(&prompt(1, 4000), 1), json!({"prompt_logprobs": 20}));
    let answer = server.ask("/v1/completions", &body);
    assert_eq!(answer["choices"][0]["prompt_logprobs"].as_array().map(Vec::len), Some(4000));
    let steps = number(&server.memory()["steps"]);
    assert!(steps >= 4000 / 8, "{steps} steps of 8 rows with logits");
    keeps_its_plan(&server);
    rests(&server);
}

// TensorRT-LLM 2335: the buffer for the logits of a whole context was taken at once.
#[test]
fn t_02_an_echo_of_the_longest_prompt_takes_no_buffer_of_its_own() {
    let server = tiny(&["--max-total-token-num", "4096", "--batch-max-tokens", "64", "--graph-max-batch-size", "4"]);
    let body = json!({"prompt": prompt(2, 4096), "echo": true, "logprobs": 5, "max_tokens": 0});
    let answer = server.ask("/v1/completions", &body);
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"].as_array().map(Vec::len), Some(4096));
    keeps_its_plan(&server);
    rests(&server);
}

// vllm 57270: the profile's tokens were spread evenly over experts, real ones are not; 1.3 GiB became 20.
#[test]
fn t_03_all_tokens_may_choose_the_same_experts() {
    let server = serve("qwen3-moe", &[]);
    // Equal tokens have equal hidden states, whatever their position: all rows go to the same experts.
    let alone = says(&server, &greedy(&[77; 900], 4));
    let even = says(&server, &greedy(&prompt(3, 900), 4));
    assert_eq!((alone.len(), even.len()), (4, 4));
    keeps_its_plan(&server);
}

// vllm 14067, 9995; llama.cpp 23472: the draft model's weights and keys were missing from the profile.
#[test]
fn t_04_a_draft_head_is_in_the_plan_and_fits_at_its_edge() {
    let pool = ["--max-total-token-num", "2048"];
    let (plain, drafting) = (plan("mtp-half", &pool), plan("mtp-half", &[&pool[..], &["--enable-mtp"]].concat()));
    for component in ["weights", "kv_pages", "state_slots"] {
        let (without, with) = (planned(&plain, component), planned(&drafting, component));
        assert!(with > without, "{component}: {with} with a draft head, {without} without");
    }
    let line = number(&drafting["total"]).to_string();
    let server = serve("mtp-half", &["--enable-mtp", "--max-total-token-num", "2048", "--memory-budget", &line]);
    crowd(&server, 32, |i| completion(greedy(&prompt(i, 40), 20)));
    keeps_its_plan(&server);
    let page = server.memory();
    assert!(number(&page["planned_bytes"]) <= number(&page["line_bytes"]), "{page}");
}

// lightllm 28, 171, 187: a guessed fraction and a large prefill; users were told to lower knobs until it held.
#[test]
fn t_06_every_shape_that_starts_survives_its_own_worst_step() {
    for (rows, decodes) in [("16", "1"), ("16", "16"), ("512", "4"), ("1024", "64")] {
        let server = tiny(&["--batch-max-tokens", rows, "--graph-max-batch-size", decodes]);
        let width: u64 = decodes.parse().expect("a number");
        crowd(&server, 4 + width / 4, |i| completion(greedy(&prompt(i, 600), 6)));
        let n = width.min(13);
        server.ask("/v1/completions", &with(greedy(&prompt(9, 30), 30), json!({"n": n, "logprobs": 20})));
        assert_eq!(count(&server, "failed"), 0, "{rows} rows, {decodes} decodes");
        keeps_its_plan(&server);
    }
}

// lightllm fix_qwen2-5_vl-oom: a mask of N² for N tokens.
#[test]
fn t_07_a_steps_workspace_does_not_grow_with_the_square_of_the_context() {
    let workspace = |context: &str| {
        let flags = ["--max-total-token-num", "4096", "--max-req-total-len", context, "--batch-max-tokens", "512"];
        planned(&plan("llama", &flags), "step_workspace")
    };
    let (short, long) = (workspace("512"), workspace("4096"));
    // A mask of one head would be 512 × 4,096 numbers, 8 MiB.
    assert!(long - short <= 512 << 10, "{short} bytes for 512 tokens, {long} for 4,096");
}

// TGI 2744, 1374, 2083, 563: the warm-up was not the worst case; it passed, and the server died at run time.
#[test]
fn t_08_two_hundred_legal_requests_stay_inside_the_self_test() {
    let server = tiny(&["--batch-max-tokens", "64", "--graph-max-batch-size", "16"]);
    crowd(&server, 200, |i| {
        let dice = |salt: u64, sides: u64| u64::from(prompt(i * 31 + salt, 1)[0]) % sides;
        let body = greedy(&prompt(i, 1 + dice(1, 300) as usize), 1 + dice(2, 60) as u32);
        completion(match dice(3, 6) {
            0 => with(body, json!({"logprobs": dice(4, 21)})),
            1 => with(body, json!({"prompt_logprobs": dice(4, 21)})),
            2 => with(body, json!({"n": 1 + dice(4, 6), "temperature": 1.5, "top_k": 7})),
            3 => with(body, json!({"frequency_penalty": 0.7, "repetition_penalty": 1.3, "stop": ["a", "xyz"]})),
            4 => with(body, json!({"min_p": 0.1, "top_p": 0.8, "temperature": 0.9, "logit_bias": {"5": -3}})),
            _ => body,
        })
    });
    assert!(number(&server.memory()["steps"]) >= 300);
    assert_eq!(count(&server, "failed"), 0, "{}", server.log());
    keeps_its_plan(&server);
    rests(&server);
}

// vllm-mlx 303: chunked prefill was on again when the cache was, whatever the flag said.
#[test]
fn v_58_a_prompt_takes_as_many_steps_as_its_flag_says() {
    for (rows, cache) in [(4096, true), (512, true), (100, true), (512, false)] {
        let rows_flag = rows.to_string();
        let off: &[&str] = if cache { &[] } else { &["--disable-prefix-cache"] };
        let server = tiny(&[&["--batch-max-tokens", &rows_flag], off].concat());
        let before = number(&server.memory()["steps"]);
        says(&server, &greedy(&prompt(1, 2000), 1));
        rests(&server);
        let steps = number(&server.memory()["steps"]) - before;
        assert_eq!(steps, 2000_u64.div_ceil(rows), "steps of {rows} rows, prefix cache: {cache}");
    }
}

// vllm users: `max_logprobs` beyond what was planned was taken.
#[test]
fn t_01_more_alternatives_than_were_planned_are_refused() {
    let server = tiny(&[]);
    for field in ["logprobs", "prompt_logprobs"] {
        let words = refused(server.post("/v1/completions", &with(greedy(&[1, 2], 1), json!({field: 21}))), 400);
        assert!(words.contains("20"), "{words}");
    }
}
