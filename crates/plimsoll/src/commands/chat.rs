//! `chat`: the same engine in the terminal. Ctrl-C stops the answer, not the program; Ctrl-D ends it.

use std::io::IsTerminal;
use std::sync::Arc;

use anyhow::{Context, bail};
use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{EngineHandle, LoadedModel, Request};
use plimsoll_text::Ending;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::args::ChatArgs;
use crate::output::{say, say_part};

/// Runs the conversation.
pub fn run(args: ChatArgs) -> anyhow::Result<()> {
    // No HTTP here: the terminal takes next to nothing.
    let options = args.engine.options(16 << 20);
    let (model, engine) = super::start_engine(&args.model, &options)?;
    let Some(template) = model.template.clone() else {
        bail!("'{}' has no chat template; use `serve` and /v1/completions", args.model);
    };
    let mut history = Vec::new();
    if let Some(system) = &args.system {
        history.push(json!({"role": "system", "content": system}));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        loop {
            prompt();
            let line = tokio::select! {
                line = lines.next_line() => line?,
                _ = tokio::signal::ctrl_c() => { say!(""); continue }
            };
            let Some(line) = line else { break };
            if line.trim().is_empty() {
                continue;
            }
            history.push(json!({"role": "user", "content": line}));
            let rendered = template.render(&Value::Array(history.clone()), None, Ending::Open, &Map::new())?;
            let answer = answer(&engine, &model, &args, &rendered).await?;
            history.push(json!({"role": "assistant", "content": answer}));
        }
        anyhow::Ok(())
    })
}

fn prompt() {
    if std::io::stdin().is_terminal() {
        say_part!("> ");
        // A terminal that cannot be written to will be noticed at the next line.
    }
}

/// Streams one answer to standard output and returns it.
async fn answer(engine: &EngineHandle, model: &LoadedModel, args: &ChatArgs, prompt: &str) -> anyhow::Result<String> {
    let ids = Arc::clone(&model.tokenizer).encode(prompt, false, true)?;
    let room = (engine.limits().max_req_total_len as usize).saturating_sub(ids.len());
    if room == 0 {
        bail!("the conversation has filled the context of {} tokens", engine.limits().max_req_total_len);
    }
    let request = Request {
        id: "chat".into(),
        prompt: ids,
        sampling: SamplingParams { temperature: args.temperature, seed: rand_seed(), ..SamplingParams::default() },
        max_tokens: args.max_tokens.min(room as u32),
        min_tokens: 0,
        stop: Vec::new(),
        keep_stop: false,
        stop_token_ids: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        prompt_logprobs: None,
        skip_special_tokens: true,
        kept_special_ids: Vec::new(),
        grammar: None,
        speculate: true,
        cache_salt: 0,
        embed: None,
        media: Vec::new(),
    };
    let mut reader = engine.submit(request).context("the engine refused the request")?;
    let mut text = String::new();
    loop {
        let delta = tokio::select! {
            delta = reader.next() => delta,
            _ = tokio::signal::ctrl_c() => break,
        };
        let Some(delta) = delta else { break };
        say_part!("{}", delta.text);
        text.push_str(&delta.text);
        if let Some(error) = delta.error {
            bail!("the answer failed: {error}");
        }
    }
    say!("");
    Ok(text)
}

/// A seed that differs from run to run.
fn rand_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::Instant::now())
}
