//! Sizing, and other processes on the same machine.

use serde_json::json;

use crate::limit::Cage;
use crate::product::{Server, fixture, run};
use crate::visitor::{
    anonymous, completion, crowd, greedy, keeps_its_plan, number, plan, prompt, rests, serve, served, tiny,
};

// vllm 37419: a safety buffer of 150 MiB was computed, and never subtracted.
#[test]
fn t_14_what_is_kept_free_is_a_line_of_the_sum() {
    let server = tiny(&[]);
    let page = server.memory();
    let rows = page["components"].as_array().expect("rows");
    let sum: u64 = rows.iter().map(|row| number(&row["planned_bytes"])).sum();
    assert_eq!(sum, number(&page["planned_bytes"]));
    let emergency_reserve = rows.iter().find(|row| row["component"] == "emergency_reserve").expect("it is a line");
    assert!(
        number(&emergency_reserve["planned_bytes"]) >= 16 << 20
            && emergency_reserve["committed_bytes"] == emergency_reserve["planned_bytes"]
    );
    assert_eq!(number(&plan("llama", &["--max-total-token-num", "8192"])["total"]), sum, "the plan says the same");
}

// vllm 10643, 10533, 18974: two servers that started at once both saw an empty machine.
#[test]
fn t_11_of_two_that_start_at_once_in_room_for_one_and_a_half_one_stays_in_port() {
    let flags = ["--max-total-token-num", "8192"];
    let one = number(&plan("llama", &flags)["total"]);
    let Some(cage) = Cage::open("t11", one + one / 2) else { return };
    let start = || Server::try_start(cage.plimsoll(&served("llama", &flags)));
    let started = std::thread::scope(|scope| {
        let both = [scope.spawn(start), scope.spawn(start)];
        both.map(|one| one.join().expect("no panic"))
    });
    let ready = started.iter().filter(|server| server.is_ok()).count();
    assert_eq!(ready, 1, "{:?}", started.iter().filter_map(|server| server.as_ref().err()).collect::<Vec<_>>());
}

// vllm 45086; ollama 10292: the container's limit was ignored, the kernel killed the server.
#[test]
fn t_19_a_cgroups_limit_is_the_line() {
    const LIMIT: u64 = 600 << 20;
    let Some(cage) = Cage::open("t19", LIMIT) else { return };
    let server = Server::try_start(cage.plimsoll(&served("llama", &[]))).unwrap_or_else(|words| panic!("{words}"));
    let page = server.memory();
    assert!(number(&page["line_bytes"]) <= LIMIT, "{page}");
    crowd(&server, 40, |i| completion(greedy(&prompt(i, 300), 20)));
    let [limit, peak, kills] = cage.report();
    assert!(peak <= limit && kills == 0, "{peak} of {limit} bytes, {kills} kills");
}

// llama.cpp 21801, 27620, 18097: "it fits" left out the projector, the draft model, or the other slots.
#[test]
fn t_20_what_fits_by_the_plan_fits_with_all_slots_at_their_longest() {
    let flags = ["--enable-mtp", "--running-max-req-size", "4", "--max-total-token-num", "4096"];
    let total = number(&plan("mtp-half", &flags)["total"]);
    let server = serve("mtp-half", &flags);
    crowd(&server, 4, |i| completion(greedy(&prompt(i, 500), 500)));
    let anonymous = anonymous(&server) as u64;
    assert!(anonymous <= total, "{anonymous} bytes of {total} planned");
    keeps_its_plan(&server);
}

// Found by this museum in Plimsoll: a pool that `plan` accepted was refused by `serve`, which measured it against a default one.
#[test]
fn t_20_a_pool_that_is_planned_starts() {
    for tokens in ["139264", "300000"] {
        let flags = ["--max-total-token-num", tokens];
        let planned = plan("llama", &flags);
        let page = serve("llama", &flags).memory();
        assert_eq!(page["planned_bytes"], planned["total"], "{tokens} tokens");
        assert_eq!(page["pools"]["kv_pages"]["total"], tokens.parse::<u64>().expect("a number") / 16);
    }
}

// sglang-omni 292: one flag had to go up for one shortage and down for another, and no message said which it was.
#[test]
fn t_18_a_plan_that_does_not_fit_names_what_is_short_and_every_flag_that_helps() {
    let words = run(&served("llama", &["--memory-budget", "30MiB"])).refused();
    for word in ["host_heap", "--max-connections", "--memory-budget"] {
        assert!(words.contains(word), "{word}: {words}");
    }
    let llama = fixture("llama");
    let planned = run(&["plan", llama.to_str().expect("UTF-8"), "--memory-budget", "30MiB"]);
    let words = planned.stdout + &planned.stderr;
    for word in ["request_table", "host_heap", "--max-connections", "--grammar-bytes", "--memory-budget"] {
        assert!(words.contains(word), "{word}: {words}");
    }
}

// ollama 7440, 12846, 9457: estimates were off by class of model.
#[test]
fn t_22_every_family_holds_what_was_planned_for_it() {
    for model in ["gemma3", "qwen3-moe", "qwen3.5", "mlx-llama-4bit-g64", "gguf-qwen2-q8_0"] {
        let server = serve(model, &["--max-total-token-num", "4096"]);
        crowd(&server, 8, |i| completion(greedy(&prompt(i, 100), 10)));
        keeps_its_plan(&server);
        let page = server.memory();
        let rows = page["components"].as_array().expect("rows");
        for component in ["weights", "kv_pages", "state_slots", "step_workspace"] {
            let row = rows.iter().find(|row| row["component"] == component).expect(component);
            assert_eq!(row["committed_bytes"], row["planned_bytes"], "{model}: {row}");
        }
    }
}

// local-inference-lab/vllm 201, 257: buffers that the runner made at its start were in no budget.
#[test]
fn t_23_what_is_in_no_line_stays_under_a_hundredth() {
    let server = tiny(&[]);
    let round = || {
        crowd(&server, 150, |i| completion(greedy(&prompt(i, 200), 20)));
        rests(&server);
        let page = server.memory();
        let unaccounted = page["unaccounted_bytes"].as_i64().expect("a number");
        let committed = page["committed_bytes"].as_i64().expect("a number");
        assert!(unaccounted <= committed / 100 + (256 << 10), "{unaccounted} bytes beside {committed}");
    };
    (0..3).for_each(|_| round());
}

// vllm-mlx 620: a constant of 32 GB overrode the limit that the user had given.
#[test]
fn v_13_the_limit_that_was_given_is_the_limit() {
    let server = serve("llama", &["--memory-budget", "300MiB"]);
    let page = server.memory();
    assert_eq!(number(&page["line_bytes"]), 300 << 20, "{page}");
    assert!(number(&page["planned_bytes"]) <= 300 << 20, "{page}");
}

// vllm-mlx 696: a budget larger than the device was taken at its word.
#[test]
fn v_62_a_budget_beyond_the_machine_is_the_machines() {
    let plan = plan("llama", &["--memory-budget", "1000TiB"]);
    assert!(number(&plan["plan"]["limit"]) < 100 << 40, "{}", plan["plan"]["limit"]);
}

// vllm-mlx 62: a quantized entry of 33 MB took 62, its original was still referenced.
#[test]
fn v_19_quantized_keys_and_values_take_what_their_format_says() {
    let per_token = |dtype: &str| number(&plan("llama", &["--kv-dtype", dtype])["kv_bytes_per_token"]);
    let (half, quantized) = (per_token("f16"), per_token("q8"));
    assert!(quantized * 8 <= half * 5, "{quantized} bytes a token, {half} in f16");
    let server = serve("llama", &["--kv-dtype", "q8", "--max-total-token-num", "4096"]);
    crowd(&server, 8, |i| completion(greedy(&prompt(i, 300), 20)));
    let page = server.memory();
    let rows = page["components"].as_array().expect("rows");
    let pages = rows.iter().find(|row| row["component"] == "kv_pages").expect("a row");
    assert_eq!(number(&pages["committed_bytes"]), 4096 * quantized, "{pages}");
}

// sglang 4602: the pages that a request would need were counted wrongly at the edges of pages.
#[test]
fn t_16_prompts_around_the_edges_of_pages_fit_a_pool_made_for_them() {
    let server = tiny(&["--max-total-token-num", "64", "--batch-max-tokens", "16", "--graph-max-batch-size", "4"]);
    for tokens in [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63] {
        let rest = 64 - tokens as u32;
        let answer = server.ask("/v1/completions", &greedy(&prompt(tokens, tokens as usize), rest));
        assert_eq!(answer["usage"]["completion_tokens"], json!(rest), "{tokens} tokens of prompt");
    }
    let words = crate::visitor::refused(server.post("/v1/completions", &greedy(&prompt(1, 60), 5)), 400);
    assert!(words.contains("64"), "{words}");
    rests(&server);
}
