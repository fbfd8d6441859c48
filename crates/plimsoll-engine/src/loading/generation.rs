//! The sampling that a checkpoint recommends in its `generation_config.json`, for requests without sampling parameters.

use std::path::Path;

use serde_json::Value;

use crate::loading::error::{LoadingError, small_json};
use crate::sampling::SamplingParams;

/// The fields of a recommendation.
const FIELDS: [&str; 5] = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"];

/// Reads the file in `folder`. None: there is no file, or it recommends no sampling. A field that the file does not name
/// has its neutral value. `do_sample` is ignored, as in other servers: a request's temperature decides.
///
/// # Errors
/// [`LoadingError::Generation`] for a file that is broken or recommends what no request may ask for.
pub(crate) fn sampling(folder: &Path) -> Result<Option<SamplingParams>, LoadingError> {
    let file = folder.join("generation_config.json");
    if !file.is_file() {
        return Ok(None);
    }
    let wrong = |what: String| LoadingError::Generation(format!("'{}': {what}", file.display()));
    let said = small_json(&file).map_err(wrong)?;
    if FIELDS.iter().all(|field| said[field].is_null()) {
        return Ok(None);
    }
    let number = |key: &str, neutral: f32| match &said[key] {
        Value::Null => Ok(neutral),
        value => value.as_f64().map(|value| value as f32).ok_or_else(|| wrong(format!("{key} is not a number"))),
    };
    let neutral = SamplingParams::default();
    let top_k = match &said["top_k"] {
        Value::Null => neutral.top_k,
        value => value.as_i64().ok_or_else(|| wrong("top_k is no whole number".into()))?,
    };
    let sampling = SamplingParams {
        temperature: number("temperature", neutral.temperature)?,
        top_p: number("top_p", neutral.top_p)?,
        top_k,
        min_p: number("min_p", neutral.min_p)?,
        repetition_penalty: number("repetition_penalty", neutral.repetition_penalty)?,
        ..neutral
    };
    sampling.validate(0).map_err(|error| wrong(error.to_string()))?;
    Ok(Some(sampling))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<SamplingParams>, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("generation_config.json"), text).unwrap();
        sampling(folder.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_recommended_is_read_and_the_rest_is_neutral() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(sampling(folder.path()).unwrap(), None);
        assert_eq!(read(r#"{"do_sample": true, "eos_token_id": 1}"#).unwrap(), None);
        let said = r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null, "eos_token_id": [1, 2]}"#;
        let expected = SamplingParams { temperature: 0.6, top_k: 20, top_p: 0.95, ..SamplingParams::default() };
        assert_eq!(read(said).unwrap(), Some(expected));
        let penalty = SamplingParams { repetition_penalty: 1.1, ..SamplingParams::default() };
        assert_eq!(read(r#"{"repetition_penalty": 1.1}"#).unwrap(), Some(penalty));
    }

    #[test]
    fn what_no_request_may_ask_for_is_refused_by_name() {
        for (text, words) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"top_p": "much"}"#, "top_p is not a number"),
            (r#"{"top_k": 1.5}"#, "top_k"),
            ("{", "generation_config.json"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(words) && error.contains("--generation-config off"), "{error}");
        }
    }
}
