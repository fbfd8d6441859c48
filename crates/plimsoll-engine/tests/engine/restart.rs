//! The prefix cache on disk over restarts: an engine reuses the prefixes of the engine before, with the same bits.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll_device::KvDtype;
use plimsoll_engine::{DiskCache, EngineHandle, Host, LoadedModel, Options, Request, start};
use plimsoll_formats::Checkpoint;
use plimsoll_hub::{Cache, Quiet};
use plimsoll_text::Tokenizer;
use plimsoll_tier::{Store, System};

use crate::common::recall::mix;
use crate::common::{
    Answer, ask, collect, engine, fixtures, full_pools, greedy, quiet, until, with_drafts, within_plan,
};

/// Whole contexts; windows of 16 positions in six of seven layers; recurrent state in three of four, without and with its draft head.
const MODELS: [(&str, usize); 4] = [("llama", 0), ("gemma3", 0), ("qwen3.5", 0), ("qwen3.5", 2)];
const CONVERSATIONS: usize = 12;
const TURNS: usize = 6;

fn options(tokens: u64) -> Options {
    drafting(tokens, 0)
}

pub fn drafting(tokens: u64, drafts: usize) -> Options {
    Options {
        kv_dtype: KvDtype::F16,
        batch_max_tokens: 64,
        running_max_req_size: 8,
        graph_max_batch_size: 8,
        max_total_token_num: Some(tokens),
        state_checkpoints: 8,
        threads: Some(1),
        ..with_drafts(drafts)
    }
}

/// Options with a cache on disk in `dir`. Fixtures compute a page very fast, so pages are read even if reading takes longer.
pub fn on_disk(dir: &Path, options: &Options) -> Options {
    let disk = DiskCache { bytes: 64 << 20, read_always: true, ..DiskCache::at(dir.to_owned()) };
    Options { disk_cache: Some(disk), ..options.clone() }
}

/// Ends an engine; returns when its directory is free.
pub fn stop(engine: EngineHandle, dir: &Path) {
    quiet(&engine);
    full_pools(&engine);
    within_plan(&engine);
    drop(engine);
    let deadline = Instant::now() + Duration::from_secs(30);
    while !Store::is_free(dir) {
        assert!(Instant::now() < deadline, "the engine does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until no part of a prefix needs a buffer of the disk's thread. A user reads the answer and writes the next message meanwhile. A
/// fixture computes pages faster than any disk writes them.
pub fn let_it_write(engine: &EngineHandle) {
    quiet(engine);
    until(engine, |engine| engine.cache_report().disk.unwrap().waiting_parts == 0);
}

pub fn tokens(seed: u64, len: u64) -> Vec<u32> {
    (0..len).map(|i| (mix(seed * 1000 + i) % 300) as u32).collect()
}

/// Runs conversations turn by turn, the first half of which begin alike. `answer` is given the turn.
fn converse(mut answer: impl FnMut(usize, Request) -> Answer) -> Vec<Answer> {
    let begin = |number| match number < CONVERSATIONS / 2 {
        true => [tokens(7, 50), tokens(20 + number as u64, 5 + 3 * number as u64)].concat(),
        false => tokens(20 + number as u64, 40 + 5 * number as u64),
    };
    let mut prompts: Vec<Vec<u32>> = (0..CONVERSATIONS).map(begin).collect();
    let mut answers = Vec::new();
    for turn in 0..TURNS {
        for (number, prompt) in prompts.iter_mut().enumerate() {
            let said = answer(turn, Request { logprobs: Some(1), ..greedy(prompt, 9) });
            prompt.extend(&said.ids);
            prompt.extend(tokens(100 + (turn * CONVERSATIONS + number) as u64, 11 + turn as u64));
            answers.push(said);
        }
    }
    answers
}

pub fn found(answers: &[Answer]) -> u32 {
    answers.iter().map(|answer| answer.cached_tokens).sum()
}

pub fn same(answers: &[Answer], expected: &[Answer], what: &str) {
    for (i, (answer, expected)) in answers.iter().zip(expected).enumerate() {
        answer.is_the_same_as(expected, &format!("{what}, request {i}"));
    }
}

/// Returns the answers of an engine without a cache, and the cached tokens in an engine with memory for all conversations.
fn bounds(model: &str) -> (Vec<Answer>, u32) {
    let plain = engine(model, &Options { prefix_cache: false, ..options(2048) });
    let expected = converse(|_, request| ask(&plain, request));
    drop(plain);
    let forever = engine(model, &options(32 << 10));
    let remembered = converse(|_, request| ask(&forever, request));
    same(&remembered, &expected, model);
    (expected, found(&remembered))
}

fn key_file(path: &Path, byte: u8) {
    std::fs::write(path, [byte; 32]).unwrap();
    #[cfg(unix)]
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
}

/// Returns the error of a start that is refused.
fn refusal(options: &Options) -> String {
    let checkpoint = Checkpoint::open(&fixtures().join("models/llama")).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_file(&fixtures().join("models/llama/tokenizer.json")).unwrap());
    let host = Host::read(options).unwrap();
    start(&checkpoint, tokenizer, options, &host, |_| {}).err().unwrap().to_string()
}

#[test]
fn an_encrypted_cache_is_read_by_its_key_alone() {
    let temp = tempfile::tempdir().unwrap();
    let (dir, key) = (temp.path().join("cache"), temp.path().join("key"));
    let encrypted = |options: Options| {
        let disk = options.disk_cache.clone().map(|disk| DiskCache { key_file: Some(key.clone()), ..disk });
        Options { disk_cache: disk, ..options }
    };
    key_file(&key, 1);
    let options = encrypted(on_disk(&dir, &options(2048)));
    let first = engine("llama", &options);
    let expected = ask(&first, greedy(&tokens(1, 100), 5));
    stop(first, &dir);
    key_file(&key, 2);
    let refused = refusal(&options);
    assert!(refused.contains("encrypted with another key"), "{refused}");
    let refused = refusal(&on_disk(&dir, &self::options(2048)));
    assert!(refused.contains("--cache-key-file"), "{refused}");
    key_file(&key, 1);
    let again = engine("llama", &options);
    let answer = ask(&again, greedy(&tokens(1, 100), 5));
    answer.is_the_same_as(&expected, "from an encrypted file");
    assert_eq!((answer.cached_tokens, again.cache_report().disk.unwrap().hit_tokens), (96, 96));
    stop(again, &dir);
}

#[test]
fn a_restart_loses_no_prefix_and_changes_no_bit() {
    for (model, drafts) in MODELS {
        let (expected, most) = bounds(model);
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("cache");
        let options = on_disk(&dir, &drafting(8 << 10, drafts));
        let mut current = (0, Some(engine(model, &options)));
        let answers = converse(|turn, request| {
            if turn != current.0 {
                stop(current.1.take().unwrap(), &dir);
                current = (turn, Some(engine(model, &options)));
            }
            ask(current.1.as_ref().unwrap(), request)
        });
        same(&answers, &expected, model);
        let (found, last) = (found(&answers), current.1.take().unwrap());
        let disk = last.cache_report().disk.unwrap();
        println!("{model}: {found} tokens found, {most} with memory alone and no restart; {disk:?}");
        assert!(u64::from(found) * 100 >= u64::from(most) * 95, "{model}: {found} of {most}");
        assert!(disk.hit_tokens > 0 && disk.files > 0 && disk.misses.damaged == 0, "{disk:?}");
        assert!(disk.write_amplification >= 1.0, "{disk:?}");
        stop(last, &dir);
    }
}

/// The pool holds one conversation: the others' prefixes are read from the disk without a restart.
#[test]
fn what_memory_forgets_the_disk_has() {
    for (model, drafts) in MODELS {
        let (expected, most) = bounds(model);
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("cache");
        let small = Options { state_checkpoints: 1, running_max_req_size: 2, ..drafting(320, drafts) };
        let engine = engine(model, &on_disk(&dir, &small));
        let answers = converse(|_, request| {
            let_it_write(&engine);
            ask(&engine, request)
        });
        same(&answers, &expected, model);
        let found = found(&answers);
        println!("{model}: {found} tokens found in a pool of 320, {most} with memory for all");
        assert!(u64::from(found) * 100 >= u64::from(most) * 95, "{model}: {found} of {most}");
        stop(engine, &dir);
    }
}

/// All requests run at once in a pool that preempts; some clients leave.
#[test]
fn a_crowd_that_comes_back_answers_as_alone() {
    for (model, drafts) in MODELS {
        let requests: Vec<Request> = (0..24)
            .map(|i| {
                let own = tokens(i % 7 + 50, 20 + mix(i) % 90);
                let prompt = if i % 2 == 0 { [tokens(3, 64), own].concat() } else { own };
                Request { logprobs: Some(1), ..greedy(&prompt, 1 + (mix(i + 9) % 20) as u32) }
            })
            .collect();
        let plain = engine(model, &Options { prefix_cache: false, ..options(2048) });
        let expected: Vec<Answer> = requests.iter().map(|request| ask(&plain, request.clone())).collect();
        drop(plain);
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("cache");
        let mut cached = Vec::new();
        for round in 0..3 {
            let engine = engine(model, &on_disk(&dir, &drafting(512, drafts)));
            let readers: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
            let mut sum = 0;
            for (i, reader) in readers.into_iter().enumerate() {
                if (i + round) % 6 == 3 {
                    drop(reader);
                    continue;
                }
                let answer = collect(reader);
                sum += answer.cached_tokens;
                answer.is_the_same_as(&expected[i], &format!("{model}, round {round}, request {i}"));
            }
            cached.push((sum, engine.cache_report().disk.unwrap().hit_tokens));
            stop(engine, &dir);
        }
        println!("{model}: {cached:?}");
        assert!(cached[0].1 < cached[1].1 && cached[1].1 > 500, "{model}: {cached:?}");
    }
}

/// Every file has a flipped bit, is cut short, or is missing: all is computed and written again.
#[test]
fn damaged_files_cost_a_miss() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let options = on_disk(&dir, &options(4096));
    let request = Request { logprobs: Some(1), ..greedy(&tokens(1, 200), 8) };
    let first = engine("llama", &options);
    let expected = ask(&first, request.clone());
    stop(first, &dir);
    for damage in 0..3 {
        let mut files = Vec::new();
        for shard in std::fs::read_dir(dir.join("blobs")).unwrap() {
            files.extend(std::fs::read_dir(shard.unwrap().path()).unwrap().map(|file| file.unwrap().path()));
        }
        assert!(files.len() >= 12, "{}", files.len());
        let again = engine("llama", &options);
        for file in &files {
            let mut bytes = std::fs::read(file).unwrap();
            let middle = bytes.len() / 2;
            match damage {
                0 => bytes[middle] ^= 16,
                1 => bytes.truncate(middle),
                _ => std::fs::remove_file(file).unwrap(),
            }
            if damage < 2 {
                std::fs::write(file, bytes).unwrap();
            }
        }
        let answer = ask(&again, request.clone());
        answer.is_the_same_as(&expected, "after damage");
        let misses = again.cache_report().disk.unwrap().misses;
        assert_eq!(answer.cached_tokens, 0, "{misses:?}");
        assert!(if damage < 2 { misses.damaged > 0 } else { misses.gone > 0 }, "{misses:?}");
        stop(again, &dir);
        let healed = engine("llama", &options);
        assert_eq!(ask(&healed, request.clone()).cached_tokens, 192);
        stop(healed, &dir);
    }
}

/// Pages of other weights, other arithmetic or other storage are never found, nor those of a prompt with a salt.
#[test]
fn pages_of_another_model_are_not_found() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let base = options(4096);
    let request = greedy(&tokens(1, 100), 4);
    let others = [
        ("llama", base.clone()),
        ("llama", Options { kv_dtype: KvDtype::F32, ..base.clone() }),
        ("llama", Options { isa: Some(plimsoll_device::Isa::Portable), ..base.clone() }),
        ("qwen3", base.clone()),
    ];
    for (model, options) in &others {
        let engine = engine(model, &on_disk(&dir, options));
        assert_eq!(ask(&engine, request.clone()).cached_tokens, 0, "{model} {options:?}");
        let salted = Request { cache_salt: 7, ..request.clone() };
        assert_eq!(ask(&engine, salted).cached_tokens, 0);
        stop(engine, &dir);
    }
    for (model, options) in &others {
        let engine = engine(model, &on_disk(&dir, options));
        assert_eq!(ask(&engine, Request { cache_salt: 7, ..request.clone() }).cached_tokens, 0);
        assert_eq!(ask(&engine, request.clone()).cached_tokens, 96, "{model}");
        stop(engine, &dir);
    }
}

#[test]
fn a_cleared_cache_is_cleared_on_disk() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let options = on_disk(&dir, &options(4096));
    let warm = engine("llama", &options);
    ask(&warm, greedy(&tokens(1, 100), 4));
    let llama = fixtures().join("models/llama");
    let tokenizer = Arc::new(Tokenizer::from_file(&llama.join("tokenizer.json")).unwrap());
    let (checkpoint, host) = (Checkpoint::open(&llama).unwrap(), Host::read(&options).unwrap());
    let refused = start(&checkpoint, tokenizer, &options, &host, |_| {}).err().unwrap().to_string();
    assert!(refused.contains("--cache-dir: another process uses"), "{refused}");
    until(&warm, |engine| engine.cache_report().disk.unwrap().files >= 6);
    pollster::block_on(warm.clear_cache()).unwrap();
    until(&warm, |engine| engine.cache_report().disk.unwrap().files == 0);
    assert_eq!(ask(&warm, greedy(&tokens(1, 100), 4)).cached_tokens, 0);
    stop(warm, &dir);
    let mut files = 0;
    Store::each(&dir, &System, |_, _, _| files += 1);
    assert_eq!(files, 6, "what was said since");
}

/// A real model with a prompt of 7,000 tokens: the first token after a restart comes much sooner than cold.
#[test]
#[ignore = "models"]
fn a_long_prompt_is_soon_there_after_a_restart() {
    let path = plimsoll_hub::resolve("smollm2", &Cache::default_location().unwrap(), &mut Quiet).unwrap();
    let model = LoadedModel::open(&path).unwrap();
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("cache");
    let disk_cache = Some(DiskCache::at(dir.clone()));
    let options = Options { max_total_token_num: Some(8192), disk_cache, ..Options::default() };
    let prompt: Vec<u32> = (0..7000).map(|i| 100 + (mix(i) % 40_000) as u32).collect();
    let first_token = || {
        let host = Host::read(&options).unwrap();
        let engine = start(&model.checkpoint, Arc::clone(&model.tokenizer), &options, &host, |_| {}).unwrap();
        let began = Instant::now();
        let answer = ask(&engine, Request { logprobs: Some(1), ..greedy(&prompt, 1) });
        let took = began.elapsed();
        let disk = engine.cache_report().disk.unwrap();
        stop(engine, &dir);
        println!("{took:?} to the first token, {} of 7000 tokens cached; {disk:?}", answer.cached_tokens);
        (took, answer)
    };
    let (cold, warm) = (first_token(), first_token());
    warm.1.is_the_same_as(&cold.1, "after a restart");
    assert_eq!((cold.1.cached_tokens, warm.1.cached_tokens), (0, 6992));
    assert!(warm.0 * 3 < cold.0, "{:?} after {:?}", warm.0, cold.0);
}
