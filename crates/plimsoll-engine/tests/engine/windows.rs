//! Sliding windows on a real model. Whatever the chunks, the pool, the neighbours and the turns, the answers are those of a request that
//! runs alone with one chunk.

use std::sync::atomic::Ordering::Acquire;

use plimsoll_device::KvDtype;
use plimsoll_engine::{Options, Request};

use crate::common::recall::mix;
use crate::common::{Answer, ask, collect, engine, full_pools, greedy, quiet};

/// Gemma 3 has a window of 16 positions in six of seven layers. Gemma 4 E2B has one of 18 in four of six layers; three of them read the
/// keys and values of earlier layers. Gemma 4 26B has it in two of four, with experts, and with wider heads in the others. Laguna has one
/// of 19 in three of five; Llama 4 has chunks of 21 in four of five.
const MODELS: [&str; 5] = ["gemma3", "gemma4-e2b", "gemma4-26b", "laguna", "llama4"];

fn options(rows: usize) -> Options {
    Options {
        kv_dtype: KvDtype::F16,
        batch_max_tokens: rows,
        graph_max_batch_size: rows.min(8),
        running_max_req_size: rows.min(8),
        max_waiting: 64,
        max_total_token_num: Some(4096),
        threads: Some(1),
        ..Options::default()
    }
}

fn request(seed: u64, len: u64, output: u32) -> Request {
    let prompt: Vec<u32> = (0..len).map(|i| (mix(seed * 1000 + i) % 300) as u32).collect();
    let mut request = greedy(&prompt, output);
    request.logprobs = Some(1);
    request
}

/// Three turns of six conversations; the first three begin alike. Each turn's prompt has the answer of the turn before.
fn conversations(answer: &mut dyn FnMut(usize, usize, &Request) -> Answer) {
    for number in 0..6u64 {
        let shared = request(7, 100, 1).prompt;
        let own = request(number + 20, 10 + 17 * number, 1).prompt;
        let mut prompt = if number < 3 { [shared, own].concat() } else { own };
        for turn in 0..3u64 {
            let mut next = greedy(&prompt, 21);
            next.logprobs = Some(1);
            let said = answer(number as usize, turn as usize, &next);
            prompt.extend(said.ids);
            prompt.extend(request(100 + turn, 5 + turn, 1).prompt);
        }
    }
}

#[test]
fn chunks_of_any_size_and_turns_do_not_show() {
    chunks_and_turns(MODELS[0]);
}

#[test]
#[ignore = "soak"]
fn chunks_of_any_size_and_turns_do_not_show_in_other_models() {
    MODELS[1..].iter().copied().for_each(chunks_and_turns);
}

fn chunks_and_turns(model: &str) {
    let alone = engine(model, &Options { prefix_cache: false, ..options(512) });
    let mut expected = Vec::new();
    conversations(&mut |_, _, request| {
        let answer = ask(&alone, request.clone());
        expected.push(ask(&alone, request.clone()));
        answer
    });
    drop(alone);
    for rows in [5, 13, 16, 33, 100] {
        for tokens in [4096, 400] {
            let warm = engine(model, &Options { max_total_token_num: Some(tokens), ..options(rows) });
            let (mut cached, mut asked) = (0, 0);
            conversations(&mut |number, turn, request| {
                let answer = ask(&warm, request.clone());
                let name = format!("{model}, {rows} rows, {tokens} tokens, conversation {number}, turn {turn}");
                answer.is_the_same_as(&expected[asked], &name);
                asked += 1;
                cached += answer.cached_tokens;
                answer
            });
            quiet(&warm);
            full_pools(&warm);
            assert!(cached > 1000, "{model}, {rows} rows, {tokens} tokens: {cached} tokens were found");
        }
    }
}

/// More requests than window pages have room for, in a pool with room for their whole contexts; some of them leave.
#[test]
fn a_crowd_that_preempts_for_windows_answers_as_alone() {
    MODELS.into_iter().for_each(crowd_of);
}

/// The other families with sliding layers.
#[test]
#[ignore = "soak"]
fn other_families_with_windows_answer_as_alone() {
    for model in ["gemma2", "gpt-oss-mxfp4", "olmo3", "muse-glimmer", "gemma3-layer-types"] {
        chunks_and_turns(model);
        crowd_of(model);
    }
}

fn crowd_of(model: &str) {
    let requests: Vec<Request> =
        (0..24).map(|i| request(i % 9, 3 + mix(i) % 120, 1 + (mix(i + 50) % 50) as u32)).collect();
    let alone = engine(model, &Options { prefix_cache: false, ..options(512) });
    let expected: Vec<Answer> = requests.iter().map(|request| ask(&alone, request.clone())).collect();
    drop(alone);
    let mut preempted = 0;
    for (rows, prefix_cache) in [(9, true), (40, true), (40, false)] {
        let crowd = engine(model, &Options { prefix_cache, threads: Some(2), ..options(rows) });
        let status = crowd.status();
        let (windows, pages) = (status.windows_total.load(Acquire), status.pages_total.load(Acquire));
        assert!(windows > 0 && windows * 4 < pages, "{windows} window pages beside {pages}");
        let readers: Vec<_> = requests.iter().map(|request| crowd.submit(request.clone()).unwrap()).collect();
        for (i, reader) in readers.into_iter().enumerate() {
            match i % 7 {
                3 => drop(reader),
                _ => collect(reader).is_the_same_as(&expected[i], &format!("{model}, {rows} rows, request {i}")),
            }
        }
        quiet(&crowd);
        full_pools(&crowd);
        preempted += crowd.metrics().preemptions.get();
    }
    println!("{model}: {preempted} preemptions");
}
