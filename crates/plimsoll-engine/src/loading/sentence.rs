//! The sentence-transformers files beside a checkpoint: `modules.json`, and the pooling's `config.json` in the folder that it names. A GGUF
//! file has the key `pooling_type` instead.
//!
//! Supported modules are a transformer, pooling, normalization, and the dense layers of an encoder, which the model computes. Any other
//! module changes the embedding, so its checkpoint is refused.

use std::path::Path;

use plimsoll_formats::{Dense, Encoder, GgufMeta};
use serde_json::Value;

use crate::api::pooling::Pooling;
use crate::loading::error::{LoadingError, small_json};

/// Values of `pooling_type` in GGUF files.
const NONE: u64 = 0;
const MEAN: u64 = 1;
const CLS: u64 = 2;
const LAST: u64 = 3;
const RANK: u64 = 4;

/// The way embeddings are made, as a checkpoint's own files say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sentence {
    /// The pooling of a sequence's hidden states.
    pub pooling: Pooling,
    /// Whether embeddings are scaled to length 1.
    pub normalize: bool,
}

impl Sentence {
    /// Reads the files in `folder`; `None` where there is no `modules.json`. `dense`: the dense layers that the model has read.
    ///
    /// # Errors
    /// [`LoadingError::Sentence`] for files that are broken or ask for an unsupported module or pooling.
    pub fn read(folder: &Path, dense: Option<Dense>) -> Result<Option<Self>, LoadingError> {
        let file = folder.join("modules.json");
        if !file.is_file() {
            return Ok(None);
        }
        let modules = json(&file)?;
        let modules = modules.as_array().ok_or_else(|| wrong(&file, "is not a list"))?;
        let (mut pooling, mut normalize) = (None, false);
        for module in modules {
            let kind = module["type"].as_str().and_then(|kind| kind.rsplit('.').next()).unwrap_or_default();
            match kind {
                "Transformer" => {}
                "Pooling" => pooling = Some(read_pooling(folder, module["path"].as_str().unwrap_or_default())?),
                "Normalize" => normalize = true,
                "Dense" if dense.is_some() && pooling.is_some() && !normalize => {}
                other => return Err(wrong(&file, &format!("asks for the module {other:?}, which is not supported"))),
            }
        }
        let mut pooling = pooling.ok_or_else(|| wrong(&file, "names no pooling"))?;
        if let Some(dense) = dense {
            let expected = if dense.mean { Pooling::Mean } else { Pooling::First };
            if pooling != expected {
                return Err(wrong(
                    &file,
                    "pools before dense layers by something else than the mean or cls; supported are these two",
                ));
            }
            pooling = Pooling::Dense;
        }
        Ok(Some(Self { pooling, normalize }))
    }
}

impl Sentence {
    /// Returns the pooling that a GGUF file names. `None` where it names none, or a classifier. Embeddings are scaled to length 1, as
    /// llama.cpp's server does.
    ///
    /// # Errors
    /// [`LoadingError::Pooling`] for an unsupported pooling.
    pub fn of_gguf(meta: &GgufMeta, encoder: Option<Encoder>) -> Result<Option<Self>, LoadingError> {
        let key = format!("{}.pooling_type", meta.str("general.architecture").unwrap_or_default());
        let Some(number) = meta.u64(&key) else { return Ok(None) };
        let named = match number {
            NONE | RANK => None,
            MEAN => Some(Pooling::Mean),
            CLS => Some(Pooling::First),
            LAST => Some(Pooling::Last),
            other => {
                let what = format!("'{key}' is {other}; supported are 0 to {RANK}: none, mean, cls, last and rank");
                return Err(LoadingError::Pooling(what));
            }
        };
        let pooling = match encoder.and_then(|encoder| encoder.dense) {
            Some(_) => Some(Pooling::Dense),
            None => named,
        };
        Ok(pooling.map(|pooling| Self { pooling, normalize: true }))
    }
}

fn read_pooling(folder: &Path, path: &str) -> Result<Pooling, LoadingError> {
    let file = folder.join(path).join("config.json");
    // The path comes from the checkpoint: it must not leave the folder.
    if Path::new(path).components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
        return Err(wrong(&folder.join("modules.json"), "names a path outside of the checkpoint"));
    }
    let config = json(&file)?;
    let modes = config.as_object().ok_or_else(|| wrong(&file, "is not an object"))?;
    // Older files set one of many switches; since sentence-transformers 6 they give one name, or several.
    let on = modes.iter().filter(|(name, value)| name.starts_with("pooling_mode_") && **value == Value::Bool(true));
    let on = on.map(|(name, _)| name.trim_start_matches("pooling_mode_").trim_end_matches("_tokens"));
    let named = match modes.get("pooling_mode") {
        Some(Value::Array(names)) => names.as_slice(),
        Some(name) => std::slice::from_ref(name),
        None => &[],
    };
    let on: Vec<&str> = on.chain(named.iter().map(|name| name.as_str().unwrap_or("no name"))).collect();
    match on[..] {
        ["mean"] => Ok(Pooling::Mean),
        ["lasttoken"] => Ok(Pooling::Last),
        ["cls" | "cls_token"] => Ok(Pooling::First),
        _ => Err(wrong(&file, &format!("asks for {on:?}; supported is one of mean, last and cls"))),
    }
}

fn json(file: &Path) -> Result<Value, LoadingError> {
    small_json(file).map_err(|error| wrong(file, &error))
}

fn wrong(file: &Path, what: &str) -> LoadingError {
    LoadingError::Sentence(format!("'{}' {what}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(modules: &str, pooling: Option<&str>) -> Result<Option<Sentence>, LoadingError> {
        read_with(modules, pooling, None)
    }

    fn read_with(modules: &str, pooling: Option<&str>, dense: Option<Dense>) -> Result<Option<Sentence>, LoadingError> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("modules.json"), modules).unwrap();
        if let Some(pooling) = pooling {
            std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
            std::fs::write(folder.path().join("1_Pooling/config.json"), pooling).unwrap();
        }
        Sentence::read(folder.path(), dense)
    }

    fn modules(kinds: &[&str]) -> String {
        let module = |kind: &&str| serde_json::json!({"type": format!("sentence_transformers.models.{kind}"), "path": "1_Pooling"});
        Value::from(kinds.iter().map(module).collect::<Vec<_>>()).to_string()
    }

    #[test]
    fn the_three_poolings_with_and_without_normalization() {
        for (mode, pooling) in [
            ("pooling_mode_mean_tokens", Pooling::Mean),
            ("pooling_mode_lasttoken", Pooling::Last),
            ("pooling_mode_cls_token", Pooling::First),
        ] {
            let config =
                format!("{{\"word_embedding_dimension\": 4, \"pooling_mode_max_tokens\": false, \"{mode}\": true}}");
            for normalize in [true, false] {
                let kinds: &[&str] =
                    if normalize { &["Transformer", "Pooling", "Normalize"] } else { &["Transformer", "Pooling"] };
                assert_eq!(read(&modules(kinds), Some(&config)).unwrap(), Some(Sentence { pooling, normalize }));
            }
        }
        for (name, pooling) in [("mean", Pooling::Mean), ("lasttoken", Pooling::Last), ("cls", Pooling::First)] {
            let config = format!("{{\"embedding_dimension\": 4, \"pooling_mode\": \"{name}\"}}");
            let read = read(&modules(&["Transformer", "Pooling"]), Some(&config)).unwrap();
            assert_eq!(read, Some(Sentence { pooling, normalize: false }));
        }
        assert_eq!(Sentence::read(tempfile::tempdir().unwrap().path(), None).unwrap(), None);
    }

    #[test]
    fn dense_layers_are_the_models_and_stand_behind_their_pooling() {
        let (mean, last) = ("{\"pooling_mode_mean_tokens\": true}", "{\"pooling_mode_lasttoken\": true}");
        let kinds = modules(&["Transformer", "Pooling", "Dense", "Dense", "Normalize"]);
        let dense = |mean| Some(Dense { mean, layers: [None; 2] });
        let found = read_with(&kinds, Some(mean), dense(true)).unwrap();
        assert_eq!(found, Some(Sentence { pooling: Pooling::Dense, normalize: true }));
        let error = read_with(&kinds, Some(last), dense(true)).unwrap_err().to_string();
        assert!(error.contains("supported are these two"), "{error}");
        let before = modules(&["Transformer", "Pooling", "Normalize", "Dense"]);
        assert!(read_with(&before, Some(mean), dense(true)).is_err(), "a layer behind the normalization");
    }

    #[test]
    fn gguf_files_name_their_pooling() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models");
        for (model, pooling) in [
            ("bert-gguf", Some(Pooling::First)),
            ("bert-gguf-nomic", Some(Pooling::Mean)),
            ("embeddinggemma-gguf", Some(Pooling::Dense)),
            ("bert-gguf-cross", None),
            ("gguf-qwen2-f16", None),
        ] {
            let checkpoint = plimsoll_formats::Checkpoint::open(&models.join(model)).unwrap();
            let found = Sentence::of_gguf(checkpoint.gguf().unwrap(), checkpoint.config.encoder).unwrap();
            assert_eq!(found, pooling.map(|pooling| Sentence { pooling, normalize: true }), "{model}");
        }
    }

    #[test]
    fn what_would_change_the_embedding_is_refused() {
        let mean = "{\"pooling_mode_mean_tokens\": true}";
        let both = "{\"pooling_mode_mean_tokens\": true, \"pooling_mode_max_tokens\": true}";
        for (modules, pooling, words) in [
            (modules(&["Transformer", "Pooling", "Dense"]), mean, "Dense"),
            (modules(&["Transformer"]), mean, "no pooling"),
            (modules(&["Transformer", "Pooling"]), both, "max"),
            (modules(&["Transformer", "Pooling"]), "{\"pooling_mode\": [\"mean\", \"cls\"]}", "cls"),
            ("{}".into(), mean, "not a list"),
            ("[".into(), mean, "modules.json"),
            (modules(&["Pooling"]).replace("1_Pooling", "../x"), mean, "outside"),
        ] {
            let error = read(&modules, Some(pooling)).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(read(&modules(&["Pooling"]), None).is_err(), "no pooling configuration");
    }
}
