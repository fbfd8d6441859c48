//! One file a command.

pub mod chat;
mod checks;
pub mod doctor;
mod k8s;
pub mod models;
pub mod plan;
pub mod replay;
pub mod serve;
mod serving;
mod several;
mod signals;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use plimsoll_engine::{Blueprint, EngineHandle, Host, LoadedModel, Options, start};
use plimsoll_hub::{Cache, HubError, ModelRef, Progress, TerminalProgress};

use crate::progress::Loading;

/// Finds a model's files, fetching them if need be.
pub fn resolve(model: &str) -> anyhow::Result<PathBuf> {
    resolve_telling(model, &mut TerminalProgress::new())
}

/// The same, and `progress` is told.
pub fn resolve_telling(model: &str, progress: &mut dyn Progress) -> anyhow::Result<PathBuf> {
    let what = || format!("model '{model}'");
    if let ModelRef::GgufFile(path) | ModelRef::Directory(path) = ModelRef::parse(model).with_context(what)? {
        return Ok(path);
    }
    let cache = Cache::default_location()?;
    plimsoll_hub::resolve(model, &cache, progress).with_context(what)
}

/// Where a model's files are, if they need no fetching. Local files need no cache, which needs HOME.
pub fn ready(model: &ModelRef) -> Result<Option<PathBuf>, HubError> {
    match model {
        ModelRef::GgufFile(path) | ModelRef::Directory(path) => Ok(Some(path.clone())),
        other => Ok(Cache::default_location()?.ready(other)),
    }
}

/// Opens, plans, loads and proves a model.
pub fn start_engine(model: &str, options: &Options) -> anyhow::Result<(LoadedModel, EngineHandle)> {
    let path = resolve(model)?;
    let loaded = LoadedModel::open(&path).with_context(|| path.display().to_string())?;
    let options = &Options { tokenizer_bytes: loaded.text_bytes, ..options.clone() };
    let host = Host::read(options)?;
    let bytes = Blueprint::new(&loaded.checkpoint, options)?.weights.bytes as u64;
    let mut loading = Loading::new(bytes);
    let engine =
        start(&loaded.checkpoint, Arc::clone(&loaded.tokenizer), options, &host, |bytes| loading.advance(bytes))?;
    Ok((loaded, engine))
}
