//! Ollama's `options`: output length, sampling, stop strings.

use plimsoll_engine::sampling::SamplingParams;

use crate::conversation::params::{sampling, seed_of, stops};
use crate::http::error::{ApiError, ApiResult};
use crate::http::fields::Fields;
use crate::http::unknown;
use crate::state::model::ModelState;

/// Options for loading and computing a model; the server's own settings decide these.
pub(crate) const LOADING: [&str; 14] = [
    "numa",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "low_vram",
    "f16_kv",
    "logits_all",
    "vocab_only",
    "use_mmap",
    "use_mlock",
    "embedding_only",
    "num_thread",
    // Prompt tokens that stay when a full context is shifted: this server never shifts it.
    "num_keep",
    // Applies only with other servers' `repeat_last_n` window; this server's window has every token.
    "penalize_newline",
];

/// Options without an effect unless mirostat is on.
pub(crate) const OF_MIROSTAT: [&str; 2] = ["mirostat_tau", "mirostat_eta"];

/// Options for generating, which an embedding does not need.
const GENERATING: [&str; 15] = [
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
    "num_predict",
    "num_ctx",
    "stop",
    "mirostat",
    "tfs_z",
    "typical_p",
];

/// Takes the options of an embedding, none of which has an effect.
pub(crate) fn of_embedding(mut options: Fields<'_>) -> ApiResult<()> {
    options.hints(&LOADING);
    options.hints(&OF_MIROSTAT);
    options.hints(&GENERATING);
    options.finish()
}

/// The parsed options.
pub(super) struct Options {
    pub sampling: SamplingParams,
    pub max_tokens: Option<u32>,
    pub stop: Vec<String>,
}

impl Options {
    /// Takes the field `options`.
    pub fn take(fields: &mut Fields<'_>, state: &ModelState) -> ApiResult<Self> {
        let mut options = match fields.raw("options") {
            Some(raw) => Fields::of("options".into(), raw)?,
            None => Fields::none("options".into()),
        };
        let seed = options.take::<i64>("seed")?.filter(|seed| *seed != -1);
        let sampling = SamplingParams { seed: seed_of(seed, state), ..sampling(&mut options, state)? };
        let sampling = window(&mut options, sampling)?;
        let max_tokens = num_predict(&mut options)?;
        let stop = stops(&mut options)?;
        num_ctx(&mut options, state)?;
        options.only("mirostat", &["0"])?;
        options.only("tfs_z", &["1"])?;
        options.only("typical_p", &["1"])?;
        options.hints(&LOADING);
        options.hints(&OF_MIROSTAT);
        options.finish()?;
        Ok(Self { sampling, max_tokens, stop })
    }
}

/// Reads the number of tokens to generate; none for the rest of the context.
fn num_predict(options: &mut Fields<'_>) -> ApiResult<Option<u32>> {
    let param = options.param("num_predict");
    match options.take::<i64>("num_predict")? {
        None | Some(-1 | -2) => Ok(None),
        Some(n) => match u32::try_from(n) {
            Ok(n) if n > 0 => Ok(Some(n)),
            _ => Err(ApiError::invalid(&param, format!("{param} is {n}; at least 1, or -1 for no limit, is needed"))),
        },
    }
}

/// Checks the context size that a client asks for. The server's own size always applies; a larger request is reported as a field without
/// effect.
fn num_ctx(options: &mut Fields<'_>, state: &ModelState) -> ApiResult<()> {
    let param = options.param("num_ctx");
    let Some(asked) = options.take::<u64>("num_ctx")? else { return Ok(()) };
    let context = state.served.engine.limits().max_req_total_len;
    if asked > u64::from(context) && !unknown::passes(&param) {
        let message = format!("{param} is {asked}, more than this server's limit of {context} (--max-req-total-len)");
        return Err(ApiError::invalid(param, message));
    }
    Ok(())
}

/// Reads `repeat_last_n`, the window of the penalties. This server supports the whole context, or none.
fn window(options: &mut Fields<'_>, sampling: SamplingParams) -> ApiResult<SamplingParams> {
    let param = options.param("repeat_last_n");
    let neutral =
        SamplingParams { repetition_penalty: 1.0, presence_penalty: 0.0, frequency_penalty: 0.0, ..sampling.clone() };
    match options.take::<i64>("repeat_last_n")? {
        None | Some(-1) => Ok(sampling),
        Some(0) => Ok(neutral),
        // Without penalties the window changes nothing.
        Some(_) if sampling == neutral => Ok(sampling),
        Some(n) => {
            let message =
                format!("{param} is {n}: penalties count the whole context; -1 (all of it) and 0 (off) are supported");
            Err(ApiError::unsupported(param, message))
        }
    }
}
