//! A model as it is served, alone or with others, and the ready line.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use plimsoll_engine::sampling::SamplingParams;
use plimsoll_engine::{CheckpointDefaults, EngineHandle, LoadedModel, LoadingError, Pooling, Sentence, ranks};
use plimsoll_formats::{Architecture, Checkpoint, Encoding, ModelConfig};
use plimsoll_memory::Bytes;
use plimsoll_server::{About, Formats, Pooled, SamplingDefaults, SamplingSource, Served};
use sd_notify::NotifyState;

use crate::args::{GenerationConfig, PoolingMode, ReadingArgs};

/// A model with its engine, as it is served.
pub fn served(
    model: LoadedModel,
    engine: EngineHandle,
    reading: &ReadingArgs,
    names: Vec<String>,
) -> anyhow::Result<Served> {
    let (pooled, sampling) = pooling_and_sampling(model.defaults, Some(&model.checkpoint.config), reading)?;
    let judges = model.checkpoint.config.variant.judges;
    let rank = match judges || reading.pooling == Some(PoolingMode::Rank) {
        true => Some(model.rank.map_err(|why| anyhow::anyhow!("the model cannot score texts: {why}"))?),
        false => None,
    };
    log_sampling(&sampling);
    Ok(Served {
        about: about(&model.checkpoint),
        engine,
        tokenizer: model.tokenizer,
        formats: Formats::new(model.template.as_deref(), reading.tool_call_parser, reading.reasoning_parser),
        template: model.template,
        pooled: Pooled { rank, judges, ..pooled },
        names,
        created_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs()),
        default_max_tokens: None,
        sampling,
    })
}

/// Describes the model for the API: format, family, quantization, parameters and bytes.
fn about(checkpoint: &Checkpoint) -> About {
    let meta = checkpoint.gguf();
    let known = || checkpoint.config.architecture.gguf_name();
    let mut parameters: BTreeMap<String, u64> = BTreeMap::new();
    let mut bytes = 0;
    for (_, tensor) in checkpoint.tensors() {
        let count = tensor.shape.iter().map(|size| *size as u64).product::<u64>();
        *parameters.entry(encoding_name(tensor.encoding)).or_default() += count;
        bytes += tensor.bytes;
    }
    let most = parameters.iter().max_by_key(|(_, count)| **count).map(|(name, _)| name.clone());
    let file_type = meta.and_then(|meta| meta.u64("general.file_type")).and_then(file_type_name);
    About {
        format: if meta.is_some() { "gguf" } else { "safetensors" },
        family: meta.and_then(|meta| meta.str("general.architecture")).map_or_else(known, str::to_owned),
        quantization: file_type.map(str::to_owned).or(most).unwrap_or_default(),
        parameters: parameters.values().sum(),
        bytes,
    }
}

fn encoding_name(encoding: Encoding) -> String {
    match encoding {
        Encoding::F32 => "F32".into(),
        Encoding::F16 => "F16".into(),
        Encoding::BF16 => "BF16".into(),
        Encoding::F8 { .. } => "FP8".into(),
        Encoding::Quant(layout) => format!("{}-bit", layout.code_bits),
    }
}

/// The name of a GGUF file's `general.file_type`, as `llama_ftype` in llama.h numbers them.
fn file_type_name(number: u64) -> Option<&'static str> {
    Some(match number {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        21 => "Q2_K_S",
        25 => "IQ4_NL",
        30 => "IQ4_XS",
        32 => "BF16",
        38 => "MXFP4",
        _ => return None,
    })
}

/// Reads how the model makes embeddings and scores, and the sampling of requests that name none. Both come from the flags and the
/// checkpoint's own files; nothing is loaded.
pub fn pooling_and_sampling(
    by: CheckpointDefaults,
    config: Option<&ModelConfig>,
    reading: &ReadingArgs,
) -> anyhow::Result<(Pooled, SamplingDefaults)> {
    let pooled = pooled(reading.pooling, by.sentence, config)?;
    let sampling = match reading.generation_config {
        GenerationConfig::Auto => by.sampling?.map_or(SamplingDefaults::GENERAL, |by| recommended(&by)),
        GenerationConfig::Off => SamplingDefaults::default(),
    };
    Ok((pooled, sampling))
}

fn recommended(by: &SamplingParams) -> SamplingDefaults {
    let SamplingParams { temperature, top_p, top_k, min_p, repetition_penalty, .. } = *by;
    SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty, source: SamplingSource::Model }
}

/// Logs the sampling of requests that name none.
fn log_sampling(sampling: &SamplingDefaults) {
    let SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty, source } = *sampling;
    let origin = match source {
        SamplingSource::Model => "the model's generation_config.json",
        SamplingSource::Server => "the server, because the model recommends none",
        SamplingSource::Off => "--generation-config off",
    };
    tracing::info!(%temperature, %top_p, top_k, %min_p, %repetition_penalty, "default sampling comes from {origin}");
}

/// How embeddings and scores are made: as `--pooling` says, or else the checkpoint's own files. An encoder without either uses the
/// mean.
fn pooled(
    asked: Option<PoolingMode>,
    sentence: Result<Option<Sentence>, LoadingError>,
    config: Option<&ModelConfig>,
) -> anyhow::Result<Pooled> {
    if config.is_some_and(|config| config.architecture == Architecture::Whisper) && asked.is_some() {
        anyhow::bail!("--pooling: this model takes audio and makes no embeddings; leave --pooling out");
    }
    let encoder = config.and_then(|config| config.encoder);
    let judges = config.is_some_and(|config| config.variant.judges);
    let asked = match asked {
        Some(PoolingMode::Embedding(pooling)) => Some(pooling),
        Some(PoolingMode::Rank) => match config {
            Some(config) if !ranks(&config.architecture) => {
                anyhow::bail!("--pooling rank: {} does not score texts; Qwen3-Reranker does", config.architecture)
            }
            _ => return Ok(Pooled { sigmoid: true, ..Pooled::default() }),
        },
        None => None,
    };
    let classifies = judges || encoder.is_some_and(|encoder| encoder.labels.is_some());
    if classifies && asked.is_some() {
        anyhow::bail!("--pooling: this model scores pairs and makes no embeddings");
    }
    if encoder.is_some_and(|encoder| encoder.dense.is_some()) && asked.is_some() {
        anyhow::bail!("--pooling: this model has dense layers behind a pooling of its own; leave --pooling out");
    }
    let sentence = match sentence {
        // `--pooling` overrides the file, and a classifier does not pool.
        Err(_) if asked.is_some() || classifies => None,
        Err(error) if encoder.is_none() => {
            tracing::warn!("no embeddings are made: {error}");
            None
        }
        sentence => sentence?,
    };
    let default = encoder.is_some().then_some(Pooling::Mean);
    let pooling = asked.or(sentence.map(|sentence| sentence.pooling)).or(default);
    Ok(Pooled {
        pooling: pooling.filter(|_| !classifies),
        normalize: sentence.is_none_or(|sentence| sentence.normalize),
        sigmoid: encoder.is_none_or(|encoder| encoder.sigmoid),
        ..Pooled::default()
    })
}

/// Prints the ready line to standard output and tells the service manager. A failed write is ignored: the output may have
/// no reader.
pub fn say_ready(began: Instant, names: &str, address: SocketAddr, planned: u64, line: u64) {
    let seconds = began.elapsed().as_secs_f64();
    let (planned, line) = (Bytes(planned), Bytes(line));
    let _ = writeln!(
        std::io::stdout(),
        "ready in {seconds:.2} s: {names} at http://{address}/v1 ({planned} planned of {line}); page: http://{address}/ (Ctrl-C stops)"
    );
    notify(&[NotifyState::Ready]);
}

/// Tells systemd (`Type=notify`); without it, nothing happens.
pub fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager could not be told");
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use plimsoll_engine::sampling::SamplingParams;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        reading: ReadingArgs,
    }

    fn sampling(recommended: Option<SamplingParams>, flags: &[&str]) -> SamplingDefaults {
        let reading = Flags::parse_from([&["plimsoll"], flags].concat()).reading;
        let by = CheckpointDefaults { sentence: Ok(None), sampling: Ok(recommended) };
        pooling_and_sampling(by, None, &reading).unwrap().1
    }

    #[test]
    fn sampling_comes_from_the_model_then_from_the_server_unless_it_is_off() {
        let recommended = SamplingParams { temperature: 0.6, top_k: 20, ..SamplingParams::default() };
        let expected = SamplingDefaults {
            temperature: 0.6,
            top_k: 20,
            source: SamplingSource::Model,
            ..SamplingDefaults::default()
        };
        assert_eq!(sampling(Some(recommended.clone()), &[]), expected);
        let general = sampling(None, &[]);
        assert_eq!((general.temperature, general.top_p, general.min_p), (0.7, 0.95, 0.05));
        assert_eq!(general.source, SamplingSource::Server);
        for recommended in [Some(recommended), None] {
            assert_eq!(sampling(recommended, &["--generation-config", "off"]), SamplingDefaults::default());
        }
    }

    #[test]
    fn an_unknown_pooling_of_the_file_ends_no_chat_and_gives_way_to_the_flag() {
        let with = |config: Option<&ModelConfig>, flags: &[&str]| {
            let reading = Flags::parse_from([&["plimsoll"], flags].concat()).reading;
            let sentence = Err(LoadingError::Pooling("'bert.pooling_type' is 9".into()));
            let pooled = pooling_and_sampling(CheckpointDefaults { sentence, sampling: Ok(None) }, config, &reading);
            pooled.map(|(pooled, _)| pooled.pooling)
        };
        let config = |model: &str| {
            let path = format!("{}/../../tests/fixtures/models/{model}", env!("CARGO_MANIFEST_DIR"));
            Checkpoint::open(path.as_ref()).unwrap().config
        };
        assert_eq!(with(None, &[]).unwrap(), None);
        let encoder = config("bert-gguf");
        for config in [None, Some(&encoder)] {
            assert_eq!(with(config, &["--pooling", "cls"]).unwrap(), Some(Pooling::First));
        }
        assert_eq!(with(Some(&config("bert-gguf-cross")), &[]).unwrap(), None, "a classifier");
        let error = with(Some(&encoder), &[]).unwrap_err().to_string();
        assert!(error.contains("'bert.pooling_type' is 9 (--pooling mean, last or cls overrides it)"), "{error}");
    }
}
