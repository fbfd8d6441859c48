//! The commands, one file each, and the steps that several of them share.

pub mod cache;
mod checks;
pub mod doctor;
pub mod fits;
mod k8s;
pub mod launch;
pub mod manual;
pub mod models;
mod offer;
pub mod plan;
pub mod replay;
pub mod run;
pub mod serve;
mod serving;
mod several;
mod signals;
pub mod top;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use plimsoll_engine::{Blueprint, EngineHandle, Host, LoadedModel, Options, choose_device, start};
use plimsoll_formats::{Architecture, Checkpoint, Mmproj, MmprojState};
use plimsoll_hub::{Cache, HubError, ModelRef, Progress, TerminalProgress};

use crate::progress::Loading;

/// Finds a model's files, fetching them if need be.
pub fn resolve(model: &str) -> anyhow::Result<PathBuf> {
    resolve_telling(model, &mut TerminalProgress::new())
}

/// As [`resolve`], and reports the fetch to `progress`.
pub fn resolve_telling(model: &str, progress: &mut dyn Progress) -> anyhow::Result<PathBuf> {
    let what = || format!("model '{model}'");
    if let ModelRef::GgufFile(path) | ModelRef::Directory(path) = ModelRef::parse(model).with_context(what)? {
        return Ok(path);
    }
    let cache = Cache::default_location()?;
    plimsoll_hub::resolve(model, &cache, progress).with_context(what)
}

/// The path of a model's files; none if they must be fetched. Local files are found without the cache, which needs HOME.
pub fn ready(model: &ModelRef) -> Result<Option<PathBuf>, HubError> {
    match model {
        ModelRef::GgufFile(path) | ModelRef::Directory(path) => Ok(Some(path.clone())),
        other => Ok(Cache::default_location()?.ready(other)),
    }
}

/// Logs whether the file with a GGUF model's encoders was loaded, or why it was left out.
pub fn tell_encoder(checkpoint: &Checkpoint) {
    match checkpoint.mmproj() {
        MmprojState::None => {}
        MmprojState::Loaded { path, .. } => tracing::info!("encoders: {}", path.display()),
        MmprojState::LeftOut { path, why } => {
            let next = "name another file with --mmproj FILE, or leave this one out with --no-mmproj";
            tracing::warn!("the model takes text only: {}: {why}; {next}", path.display());
        }
    }
}

/// Finds a model's files and opens them; nothing is loaded yet.
pub fn open_model(model: &str, mmproj: &Mmproj) -> anyhow::Result<LoadedModel> {
    let path = resolve(model)?;
    let loaded = LoadedModel::open_with(&path, mmproj).with_context(|| path.display().to_string())?;
    tell_encoder(&loaded.checkpoint);
    Ok(loaded)
}

/// The model with the draft model that the options name, if they do.
pub fn with_draft(loaded: LoadedModel, options: &Options) -> anyhow::Result<LoadedModel> {
    let Some(draft) = &options.draft_model else { return Ok(loaded) };
    let path = resolve(draft)?;
    loaded.with_draft(&path).with_context(|| format!("{} as draft model", path.display()))
}

/// The options with `--device auto` replaced by its choice, which is logged.
pub fn with_device_chosen(checkpoint: &Checkpoint, options: &Options) -> anyhow::Result<Options> {
    let (options, said) = choose_device(checkpoint, options)?;
    if let Some(said) = said {
        tracing::info!("{said}");
    }
    Ok(options)
}

/// Plans, loads and tests a model.
pub fn load_engine(loaded: &LoadedModel, options: &Options) -> anyhow::Result<EngineHandle> {
    let options = Options { tokenizer_bytes: loaded.text_bytes, ..options.clone() };
    let options = &with_device_chosen(&loaded.checkpoint, &options)?;
    let host = Host::read(options)?;
    let bytes = Blueprint::new(&loaded.checkpoint, options)?.weights.bytes as u64;
    let mut loading = Loading::new(bytes);
    Ok(start(&loaded.checkpoint, Arc::clone(&loaded.tokenizer), options, &host, |bytes| loading.advance(bytes))?)
}

/// Opens, plans, loads and tests a model.
pub fn start_engine(model: &str, options: &Options) -> anyhow::Result<(LoadedModel, EngineHandle)> {
    let loaded = with_draft(open_model(model, &options.mmproj)?, options)?;
    let config = &loaded.checkpoint.config;
    let chats = config.encoder.is_none() && config.architecture != Architecture::Whisper;
    if loaded.template.is_none() && chats {
        tracing::warn!("the model has no chat template: chat requests get a 400, /v1/completions works");
    }
    let engine = load_engine(&loaded, options)?;
    Ok((loaded, engine))
}
