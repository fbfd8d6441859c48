//! The fields that completions and chat share: choices, length, sampling, stop conditions, reports.

use std::collections::BTreeMap;
use std::fmt;

use plimsoll_engine::sampling::{LOGIT_BIAS_MAX, ParamError, SamplingParams, TOP_LOGPROBS_MAX};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use crate::conversation::output_format::OutputFormat;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Fields;
use crate::state::model::ModelState;

/// The shared fields, checked.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    /// The model's name as the client spelled it, for the answer.
    pub model: String,
    pub n: u32,
    pub stream: bool,
    /// Whether the stream ends with a usage chunk.
    pub include_usage: bool,
    /// Whether every chunk has the usage.
    pub continuous_usage: bool,
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    /// Sampling, with the seed of the first choice. The seed is drawn if the client sets none; further choices count up from it.
    pub sampling: SamplingParams,
    pub stop: Vec<String>,
    pub keep_stop: bool,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub skip_special_tokens: bool,
    pub prompt_logprobs: Option<u32>,
    pub return_token_ids: bool,
    /// Whether tokens in log-probabilities are spelled as `token_id:123`.
    pub tokens_as_ids: bool,
    /// The field `mtp`: allows speculation of any kind for this request. The answer is the same either way.
    pub speculate: bool,
    pub cache_salt: u64,
    /// The output format, for structured output.
    pub output_format: Option<OutputFormat>,
}

impl Common {
    /// Takes the shared fields.
    pub fn take(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let model = model_name(fields, state)?;
        state.check_generates()?;
        let (stream, include_usage, continuous_usage) = stream(fields)?;
        let sampling = sampling(fields, state)?;
        let seed = fields.take::<i64>("seed")?;
        let common = Self {
            model,
            n: count(fields, state)?,
            stream,
            include_usage,
            continuous_usage,
            max_tokens: max_tokens(fields)?,
            min_tokens: fields.take("min_tokens")?.unwrap_or(0),
            sampling: SamplingParams { seed: seed_of(seed, state), ..sampling },
            stop: stops(fields)?,
            keep_stop: keep_stop(fields)?,
            stop_token_ids: fields.take("stop_token_ids")?.unwrap_or_default(),
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            skip_special_tokens: fields.take("skip_special_tokens")?.unwrap_or(true),
            prompt_logprobs: fields.take("prompt_logprobs")?,
            return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
            tokens_as_ids: fields.take("return_tokens_as_token_ids")?.unwrap_or(false),
            speculate: fields.take("mtp")?.unwrap_or(true),
            cache_salt: cache_salt(fields, state)?,
            output_format: OutputFormat::take(fields)?,
        };
        if common.prompt_logprobs.is_some() && stream {
            let message = "prompt_logprobs is not available with stream; ask without stream";
            return Err(ApiError::unsupported("prompt_logprobs", message));
        }
        refuse_the_rest(fields)?;
        Ok(common)
    }
}

impl Common {
    /// Returns about the heap bytes of the fields that have no limit of their own before the engine checks them.
    pub fn bytes(&self) -> u64 {
        let stops = self.stop.iter().map(|stop| size_of::<String>() + stop.capacity()).sum::<usize>();
        let ids = self.stop_token_ids.capacity() * size_of::<u32>();
        (stops + ids) as u64 + self.output_format.as_ref().map_or(0, OutputFormat::bytes)
    }

    /// For APIs with fewer fields: takes the model, `stream` and the sampling fields. The rest is default.
    pub fn take_few(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let model = model_name(fields, state)?;
        state.check_generates()?;
        Self::take_rest(model, fields, state)
    }

    /// Takes the same fields for transcripts.
    pub fn take_for_transcript(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let model = model_name(fields, state)?;
        state.check_writes()?;
        Self::take_rest(model, fields, state)
    }

    fn take_rest(model: String, fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let stream = fields.take("stream")?.unwrap_or(false);
        let sampling = sampling(fields, state)?;
        let seed = fields.take::<i64>("seed")?;
        let sampling = SamplingParams { seed: seed_of(seed, state), ..sampling };
        let (speculate, cache_salt) = (fields.take("mtp")?.unwrap_or(true), cache_salt(fields, state)?);
        Ok(Self { speculate, cache_salt, ..Self::new(model, stream, sampling) })
    }

    /// The fields of a request for one choice with this sampling; the rest is default.
    pub fn new(model: String, stream: bool, sampling: SamplingParams) -> Self {
        Self {
            model,
            n: 1,
            stream,
            include_usage: false,
            continuous_usage: false,
            max_tokens: None,
            min_tokens: 0,
            sampling,
            stop: Vec::new(),
            keep_stop: false,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            skip_special_tokens: true,
            prompt_logprobs: None,
            return_token_ids: false,
            tokens_as_ids: false,
            speculate: true,
            cache_salt: 0,
            output_format: None,
        }
    }
}

/// Returns the seed. A negative seed is taken by its bits: every 64-bit pattern is a seed.
pub(crate) fn seed_of(asked: Option<i64>, state: &ModelState) -> u64 {
    asked.map_or_else(|| state.server.ids.next(), |seed| seed as u64)
}

/// Takes `stop`: a text or a list of texts.
pub(crate) fn stops(fields: &mut Fields<'_>) -> ApiResult<Vec<String>> {
    Ok(fields.take::<Stop>("stop")?.map_or_else(Vec::new, |stop| stop.0))
}

/// Takes the model's name as the client spelled it.
pub(crate) fn model_name(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<String> {
    match fields.take::<String>("model")? {
        None => Ok(state.served.names[0].clone()),
        Some(name) => state.check_model(&name).map(|()| name),
    }
}

fn count(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<u32> {
    let n = fields.take::<u32>("n")?.unwrap_or(1);
    let limit = state.choices_max();
    if n == 0 || n > limit {
        return Err(ApiError::invalid("n", format!("n is {n}; 1 to {limit} are allowed")));
    }
    let best_of = fields.take::<u32>("best_of")?.unwrap_or(n);
    if best_of != n {
        let message = format!("best_of is {best_of}; only best_of equal to n ({n}) is supported");
        return Err(ApiError::unsupported("best_of", message));
    }
    Ok(n)
}

fn stream(fields: &mut Fields<'_>) -> ApiResult<(bool, bool, bool)> {
    let stream = fields.take("stream")?.unwrap_or(false);
    let Some(raw) = fields.raw("stream_options") else {
        return Ok((stream, false, false));
    };
    if !stream {
        return Err(ApiError::invalid("stream_options", "stream_options is only allowed when stream is true"));
    }
    let mut options = Fields::of("stream_options".into(), raw)?;
    let include = options.take("include_usage")?.unwrap_or(false);
    let continuous = options.take("continuous_usage_stats")?.unwrap_or(false);
    options.only("include_obfuscation", &["false"])?;
    options.finish()?;
    Ok((stream, include, include && continuous))
}

fn max_tokens(fields: &mut Fields<'_>) -> ApiResult<Option<u32>> {
    // Names of other servers. -1 stands for no limit.
    let other = match fields.either::<i64>("n_predict", "num_predict")? {
        None | Some(-1) => None,
        Some(tokens) => Some(u32::try_from(tokens).map_err(|_| {
            ApiError::invalid("n_predict", format!("n_predict is {tokens}; -1 (no limit) or a count is needed"))
        })?),
    };
    let old = fields.take::<u32>("max_tokens")?;
    let new = fields.take::<u32>("max_completion_tokens")?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => {
            let message = format!("max_completion_tokens is {new} but max_tokens is {old}; give one of them");
            Err(ApiError::invalid("max_completion_tokens", message))
        }
        _ => match (new.or(old), other) {
            (Some(known), Some(other)) if known != other => {
                let message = format!("max_tokens is {known} but n_predict is {other}; give one of them");
                Err(ApiError::invalid("n_predict", message))
            }
            (known, other) => Ok(known.or(other)),
        },
    }
}

/// Takes `top_p`. OpenAI accepts 0, which keeps only the most probable token.
fn top_p(fields: &mut Fields<'_>) -> ApiResult<Option<f32>> {
    let asked = fields.number("top_p")?;
    Ok(asked.map(|top_p| if top_p == 0.0 { f32::MIN_POSITIVE } else { top_p }))
}

/// Takes `repetition_penalty`, or llama.cpp's name for it.
fn repetition_penalty(fields: &mut Fields<'_>) -> ApiResult<Option<f32>> {
    match (fields.number("repetition_penalty")?, fields.number("repeat_penalty")?) {
        (Some(own), Some(other)) if own != other => {
            let message = format!("repetition_penalty is {own} but repeat_penalty is {other}; give one of them");
            Err(ApiError::invalid("repeat_penalty", message))
        }
        (own, other) => Ok(own.or(other)),
    }
}

/// Takes the sampling fields, except the seed.
pub(crate) fn sampling(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<SamplingParams> {
    let defaults = state.served.sampling;
    let params = SamplingParams {
        temperature: fields.number("temperature")?.unwrap_or(defaults.temperature),
        top_k: fields.take("top_k")?.unwrap_or(defaults.top_k),
        top_p: top_p(fields)?.unwrap_or(defaults.top_p),
        min_p: fields.number("min_p")?.unwrap_or(defaults.min_p),
        repetition_penalty: repetition_penalty(fields)?.unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields.number("presence_penalty")?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(0.0),
        logit_bias: fields.take::<Bias>("logit_bias")?.map_or_else(Vec::new, |bias| bias.0),
        seed: 0,
    };
    let vocab = state.served.engine.limits().vocab_size as usize;
    params.validate(vocab).map_err(|error| {
        let param = match &error {
            ParamError::OutOfRange { field, .. } => field,
            ParamError::TopK { .. } => "top_k",
            ParamError::TooManyBiases { .. } | ParamError::UnknownToken { .. } => "logit_bias",
        };
        ApiError::invalid(fields.param(param), error.to_string())
    })?;
    Ok(params)
}

/// Returns whether the text that ends an output stays part of it. Takes vLLM's field, and SGLang's, which gateways add whatever the client
/// asks for.
fn keep_stop(fields: &mut Fields<'_>) -> ApiResult<bool> {
    let [vllm, sglang] = ["include_stop_str_in_output", "no_stop_trim"].map(|name| fields.take(name));
    Ok(vllm?.unwrap_or(false) || sglang?.unwrap_or(false))
}

/// Returns how many alternatives of each token are reported, by default none.
pub(crate) fn top_logprobs(asked: Option<u32>) -> ApiResult<u32> {
    let n = asked.unwrap_or(0);
    if n as usize > TOP_LOGPROBS_MAX {
        let message = format!("top_logprobs is {n}, more than the limit of {TOP_LOGPROBS_MAX}");
        return Err(ApiError::invalid("top_logprobs", message));
    }
    Ok(n)
}

fn cache_salt(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<u64> {
    match fields.take::<String>("cache_salt")? {
        None => Ok(0),
        Some(salt) if salt.is_empty() => Err(ApiError::invalid("cache_salt", "cache_salt is empty")),
        Some(salt) => Ok(state.server.ids.salt(&salt)),
    }
}

/// Fields that clients send to other servers and that change no answer: storage, speed hints, verbosity. Every value is
/// accepted.
const HINTS: [&str; 13] = [
    "store",
    "verbosity",
    "prediction",
    "prompt_cache_retention",
    "prompt_cache_options",
    "safe_prompt",
    "cache_prompt",
    "keep_alive",
    "ttl",
    "slot_id",
    "id_slot",
    "provider_specific_fields",
    "reasoning_details",
];

/// Takes metadata, fields without an effect, and fields that this server does not support and refuses.
fn refuse_the_rest(fields: &mut Fields<'_>) -> ApiResult<()> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.take::<String>(name)?;
    }
    fields.take_few::<BTreeMap<String, String>>("metadata", METADATA_NODES_MAX)?;
    fields.hints(&HINTS);
    fields.only("typical_p", &["1", "1.0"])?;
    fields.service_tier()?;
    fields.only("use_beam_search", &["false"])?;
    fields.only("early_stopping", &["false"])?;
    fields.only("length_penalty", &["1", "1.0"])?;
    fields.only("spaces_between_special_tokens", &["true"])?;
    fields.only("priority", &["0"])?;
    // Gateways add this field whatever the client asks for.
    fields.only("return_hidden_states", &["false"])?;
    let guided = ["structural_tag", "guided_decoding_backend", "guided_whitespace_pattern"];
    fields.never(&guided, "use response_format, structured_outputs, or guided_json, _regex, _choice, _grammar")?;
    let logits = ["logits_processors", "bad_words", "allowed_token_ids", "vllm_xargs"];
    fields.never(&logits, "logits can be changed only through logit_bias and the penalties")?;
    fields.never(&["truncate_prompt_tokens"], "a prompt is never cut; shorten it")?;
    fields.never(&["request_id"], "send it as the x-request-id header")
}

/// The most stop strings that are read before the engine's own limit is applied: two bytes of a body may be a stop string of fifty heap
/// bytes.
pub(crate) const STOPS_MAX: usize = 1024;

/// The most values in `metadata` that are read; OpenAI takes 16 pairs.
pub(crate) const METADATA_NODES_MAX: usize = 256;

/// `stop`: a string or a list of strings.
struct Stop(Vec<String>);

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StopVisitor;
        impl<'de> Visitor<'de> for StopVisitor {
            type Value = Stop;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }
            fn visit_str<E>(self, text: &str) -> Result<Stop, E> {
                Ok(Stop(vec![text.into()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Stop, A::Error> {
                let mut stops = Vec::new();
                while let Some(text) = seq.next_element()? {
                    if stops.len() == STOPS_MAX {
                        return Err(A::Error::custom(format_args!("more than {STOPS_MAX} stop strings")));
                    }
                    stops.push(text);
                }
                Ok(Stop(stops))
            }
        }
        deserializer.deserialize_any(StopVisitor)
    }
}

/// `logit_bias`: an object from token id (as a string) to bias.
struct Bias(Vec<(u32, f32)>);

impl<'de> Deserialize<'de> for Bias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BiasVisitor;
        impl<'de> Visitor<'de> for BiasVisitor {
            type Value = Bias;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from token id to bias")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Bias, A::Error> {
                let mut biases: Vec<(u32, f32)> = Vec::new();
                while let Some((key, bias)) = map.next_entry::<String, f32>()? {
                    let id = key.parse::<u32>();
                    let id = id.map_err(|_| A::Error::custom(format_args!("`{}` is not a token id", quote(&key))))?;
                    if biases.len() == LOGIT_BIAS_MAX {
                        return Err(A::Error::custom(format_args!("more than {LOGIT_BIAS_MAX} entries")));
                    }
                    if biases.iter().any(|(known, _)| *known == id) {
                        return Err(A::Error::custom(format_args!("token id {id} appears twice")));
                    }
                    biases.push((id, bias));
                }
                Ok(Bias(biases))
            }
        }
        deserializer.deserialize_map(BiasVisitor)
    }
}
