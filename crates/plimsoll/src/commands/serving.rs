//! A model as it is served, alone or with others, and the ready line.

use std::io::Write;
use std::net::SocketAddr;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{CheckpointDefaults, EngineHandle, LoadedModel, Pooling, Sentence};
use plimsoll_formats::Encoder;
use plimsoll_memory::Bytes;
use plimsoll_server::{Formats, Pooled, SamplingDefaults, Served};

use crate::args::{GenerationConfig, ReadingArgs};

/// A model with its engine, as it is served.
pub fn served(
    model: LoadedModel,
    engine: EngineHandle,
    reading: &ReadingArgs,
    names: Vec<String>,
) -> anyhow::Result<Served> {
    let (pooled, sampling) = settled(model.defaults, model.checkpoint.config.encoder, reading)?;
    if sampling != SamplingDefaults::default() {
        let SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty } = sampling;
        tracing::info!(
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            "default sampling comes from generation_config.json (--generation-config off turns it off)"
        );
    }
    Ok(Served {
        engine,
        tokenizer: model.tokenizer,
        formats: Formats::new(model.template.as_deref(), reading.tool_call_parser, reading.reasoning_parser),
        template: model.template,
        pooled,
        names,
        created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs()),
        default_max_tokens: None,
        sampling,
    })
}

/// What is known of a model's use without loading it, as the operator and the checkpoint's own files say: how embeddings and scores
/// are made, and the sampling of requests that name none.
pub fn settled(
    by: CheckpointDefaults,
    encoder: Option<Encoder>,
    reading: &ReadingArgs,
) -> anyhow::Result<(Pooled, SamplingDefaults)> {
    let pooled = pooled(reading.pooling, by.sentence, encoder)?;
    let sampling = match reading.generation_config {
        GenerationConfig::Auto => recommended(&by.sampling?),
        GenerationConfig::Off => SamplingDefaults::default(),
    };
    Ok((pooled, sampling))
}

fn recommended(by: &SamplingParams) -> SamplingDefaults {
    let SamplingParams { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *by;
    SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty }
}

/// How embeddings and scores are made: as the operator says, or else the checkpoint's own files; an encoder without either gives
/// the mean.
fn pooled(asked: Option<Pooling>, sentence: Option<Sentence>, encoder: Option<Encoder>) -> anyhow::Result<Pooled> {
    let classifies = encoder.is_some_and(|encoder| encoder.labels.is_some());
    if classifies && asked.is_some() {
        anyhow::bail!("--pooling: this model scores pairs and makes no embeddings");
    }
    let default = encoder.is_some().then_some(Pooling::Mean);
    let pooling = asked.or(sentence.map(|sentence| sentence.pooling)).or(default);
    Ok(Pooled {
        pooling: pooling.filter(|_| !classifies),
        normalize: sentence.is_none_or(|sentence| sentence.normalize),
        sigmoid: encoder.is_none_or(|encoder| encoder.sigmoid),
    })
}

/// Prints the ready line to standard output. A failed write is ignored: the output may have no reader.
pub fn say_ready(began: Instant, names: &str, address: SocketAddr, planned: u64, line: u64) {
    let seconds = began.elapsed().as_secs_f64();
    let (planned, line) = (Bytes(planned), Bytes(line));
    let _ = writeln!(
        std::io::stdout(),
        "ready in {seconds:.2} s: {names} at http://{address}/v1 ({planned} planned of {line})"
    );
}
