//! Many conversations over the prefix cache on disk, with a restart in the middle.

use plimsoll_engine::{DiskCache, EngineHandle, Options, Request};

use crate::common::{Answer, collect, engine, greedy};
use crate::restart::{drafting, found, let_it_write, on_disk, same, stop, tokens};

/// Conversations that run at once.
const TOGETHER: usize = 8;
const NEW_TOKENS: u32 = 4;

/// Number and size of the conversations.
#[derive(Clone, Copy)]
struct Crowd {
    conversations: usize,
    turns: usize,
    /// Tokens of the pool, fewer than all conversations have.
    pool_tokens: u64,
}

/// The size for the fast tests.
const SOME: Crowd = Crowd { conversations: 80, turns: 10, pool_tokens: 6 << 10 };
const MANY: Crowd = Crowd { conversations: 200, turns: 20, pool_tokens: 12 << 10 };

impl Crowd {
    /// Options with memory for all conversations.
    fn forever(self) -> Options {
        Options { state_checkpoints: 64, ..drafting(8 * self.pool_tokens, 0) }
    }

    /// Options with memory for some conversations.
    fn small(self) -> Options {
        Options { state_checkpoints: 8, ..drafting(self.pool_tokens, 0) }
    }
}

/// Returns the prompt of a conversation's first turn: half of them begin with one system prompt.
fn beginning(number: usize) -> Vec<u32> {
    let own = tokens(1000 + number as u64, 6 + number as u64 % 23);
    if number.is_multiple_of(2) { [tokens(7, 40), own].concat() } else { own }
}

/// Runs all conversations turn by turn. `pause` is called before the next ones are submitted. `between` gets the engine after each turn and
/// returns the engine for the next one.
fn converse(
    crowd: Crowd,
    mut engine: EngineHandle,
    pause: impl Fn(&EngineHandle),
    mut between: impl FnMut(usize, EngineHandle) -> EngineHandle,
) -> Vec<Answer> {
    let Crowd { conversations, turns, .. } = crowd;
    let mut prompts: Vec<Vec<u32>> = (0..conversations).map(beginning).collect();
    let mut answers = Vec::with_capacity(conversations * turns);
    for turn in 0..turns {
        for (group, prompts) in prompts.chunks_mut(TOGETHER).enumerate() {
            let ask = |prompt: &Vec<u32>| Request { logprobs: Some(1), ..greedy(prompt, NEW_TOKENS) };
            let readers: Vec<_> = prompts.iter().map(|prompt| engine.submit(ask(prompt)).unwrap()).collect();
            for ((at, prompt), reader) in prompts.iter_mut().enumerate().zip(readers) {
                let answer = collect(reader);
                let seed = 10_000 + (turn * conversations + group * TOGETHER + at) as u64;
                prompt.extend(&answer.ids);
                prompt.extend(tokens(seed, 5 + seed % 7));
                answers.push(answer);
            }
            pause(&engine);
        }
        engine = between(turn, engine);
    }
    drop(engine);
    answers
}

fn outlive_a_restart(model: &str, crowd: Crowd) {
    let plain = engine(model, &Options { prefix_cache: false, ..crowd.small() });
    let expected = converse(crowd, plain, |_| {}, |_, engine| engine);
    let remembered = converse(crowd, engine(model, &crowd.forever()), |_| {}, |_, engine| engine);
    same(&remembered, &expected, model);
    let most = found(&remembered);
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let mut options = on_disk(&dir, &crowd.small());
    options.disk_cache = options.disk_cache.map(|disk| DiskCache { bytes: 1 << 30, ..disk });
    let mut reports = Vec::new();
    let answers = converse(crowd, engine(model, &options), let_it_write, |turn, running| {
        if ![crowd.turns / 2, crowd.turns].contains(&(turn + 1)) {
            return running;
        }
        reports.push(running.cache_report().disk.unwrap());
        stop(running, &dir);
        engine(model, &options)
    });
    same(&answers, &expected, model);
    let found = found(&answers);
    println!(
        "{model}: {found} of {most} tokens found ({:.2} %); {reports:?}",
        f64::from(found) / f64::from(most) * 100.0
    );
    assert!(u64::from(found) * 100 >= u64::from(most) * 95, "{model}: {found} of {most}");
    assert!(reports.iter().all(|disk| disk.misses.damaged == 0 && disk.bytes <= 1 << 30), "{reports:?}");
}

#[test]
#[ignore = "soak"]
fn many_conversations_of_a_hybrid_model_outlive_a_restart() {
    outlive_a_restart("qwen3.5", SOME);
}

#[test]
#[ignore = "soak"]
fn many_conversations_of_a_windowed_model_outlive_a_restart() {
    outlive_a_restart("gemma3", SOME);
}

#[test]
#[ignore = "soak"]
fn two_hundred_conversations_outlive_a_restart() {
    outlive_a_restart("qwen3.5", MANY);
    outlive_a_restart("gemma3", MANY);
}
