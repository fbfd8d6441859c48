//! The server of a chat: a running server, or a server of this process on a loopback port. Both are used over HTTP.

use std::hash::{BuildHasher, RandomState};
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, bail};
use plimsoll_bench::client::{Answer, Target};
use plimsoll_bench::client_runtime;
use plimsoll_engine::{Blueprint, EngineHandle, LoadedModel, Options};
use plimsoll_server::{ApiKeys, ServerConfig};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::conversation::CONVERSATION_BYTES_MAX;
use crate::args::{EngineArgs, ReadingArgs, RunArgs};
use crate::commands::offer;
use crate::commands::serving::served;
use crate::commands::{load_engine, open_model, with_draft};
use crate::names::default_name;
use crate::output::tell;
use crate::runtime::{end, http_runtime};

/// The port that `serve` listens on.
const PORT: u16 = 8000;

/// The path of a server's list of models.
const MODELS: &str = "/v1/models";

/// The HTTP status of a request without the key that the server requires.
const UNAUTHORIZED: u16 = 401;

/// Most bytes of a request to the engine of this process.
const OWN_BODY_BYTES_MAX: u64 = 8 << 20;

/// A server at the default URL answers within this time, or the chat starts its own engine.
const PROBE_WITHIN: Duration = Duration::from_secs(2);

/// A server in use sends its list of models within this time.
const LIST_WITHIN: Duration = Duration::from_secs(30);

/// A model of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Tokens of prompt and answer together; absent if the server does not say.
    pub context: Option<u64>,
    /// Its input modalities; absent if the server does not say.
    pub inputs: Option<Vec<String>>,
}

/// A connection to a server, and the model in use.
pub struct Link {
    /// The server's address and key.
    pub target: Target,
    /// The server's address, for messages; none for the engine of this process.
    pub url: Option<String>,
    /// The model in use.
    pub model: Listed,
    /// All models of the server.
    pub models: Vec<Listed>,
    /// Most bytes of a request.
    pub body_bytes_max: u64,
    /// The server of this process.
    own: Option<OwnServer>,
}

/// The URL that `serve` listens on by default, with the port of `PLIMSOLL_PORT` if it is set.
pub fn default_url() -> String {
    let port = std::env::var("PLIMSOLL_PORT").ok().and_then(|port| port.parse().ok()).unwrap_or(PORT);
    format!("http://{}:{port}", Ipv4Addr::LOCALHOST)
}

impl Link {
    /// Connects as the flags say.
    ///
    /// # Errors
    /// The named server cannot be reached or lacks the model, or the engine does not start.
    pub fn open(args: &RunArgs) -> anyhow::Result<Self> {
        if let Some(url) = &args.url {
            let key = args.keys.first()?;
            if let Some(flag) = &args.engine_flag {
                bail!("{flag} is for an engine of this process, and {url} has its own: leave out {flag} or --url");
            }
            return Self::to(url, key.as_deref(), args.model.as_deref());
        }
        if args.engine_flag.is_none()
            && let Some(link) = Self::to_default(args.model.as_deref())
        {
            return Ok(link);
        }
        Self::own(&args.model.clone().unwrap_or_else(offer::ask), &args.engine)
    }

    /// Connects to a server.
    ///
    /// # Errors
    /// It cannot be reached, or it lacks the model.
    pub fn to(url: &str, key: Option<&str>, model: Option<&str>) -> anyhow::Result<Self> {
        let target = Target::parse(url, key)?;
        let models = client_runtime()?.block_on(list(&target))?;
        Self::among(target, url, models, model)
    }

    /// A connection to a server with these models, for the wanted model or the first.
    fn among(target: Target, url: &str, models: Vec<Listed>, model: Option<&str>) -> anyhow::Result<Self> {
        let model = choose(&models, model).with_context(|| {
            let names: Vec<_> = models.iter().map(|model| model.name.as_str()).collect();
            format!("{url} has no model '{}': use one of {}", model.unwrap_or_default(), names.join(", "))
        })?;
        let body_bytes_max = CONVERSATION_BYTES_MAX;
        Ok(Self { target, url: Some(url.to_owned()), model, models, body_bytes_max, own: None })
    }

    /// Connects to the server at [`default_url`]. No key is sent, because any program may listen there: keys go only to servers
    /// that the user named.
    ///
    /// # Errors
    /// No server is there, it lacks the model, or it wants a key.
    pub fn unnamed(model: Option<&str>) -> anyhow::Result<Self> {
        let url = default_url();
        let (target, runtime) = (Target::parse(&url, None)?, client_runtime()?);
        let page = runtime.block_on(target.get(MODELS, LIST_WITHIN))?;
        if page.status() == UNAUTHORIZED {
            bail!("the server at {url} wants an API key, which is sent to named servers only: add --url {url}");
        }
        let (models, _) = runtime.block_on(listed(page))?;
        Self::among(target, &url, models, model)
    }

    /// Connects to the Plimsoll on this machine, if one runs and has the model. No key is sent.
    fn to_default(model: Option<&str>) -> Option<Self> {
        let url = default_url();
        let target = Target::parse(&url, None).ok()?;
        let runtime = client_runtime().ok()?;
        let page = runtime.block_on(target.get(MODELS, PROBE_WITHIN)).ok()?;
        if page.status() == UNAUTHORIZED {
            tell!(
                "the server at {url} wants an API key (name it with --url {url} to send one): starting an engine here"
            );
            return None;
        }
        // Another program may listen there.
        let (models, is_plimsoll) = runtime.block_on(listed(page)).ok()?;
        let chosen = choose(&models, model).filter(|_| is_plimsoll);
        let Some(model) = chosen else {
            if is_plimsoll {
                let names: Vec<_> = models.iter().map(|model| model.name.as_str()).collect();
                tell!("the server at {url} has {}: starting an engine here", names.join(", "));
            }
            return None;
        };
        Some(Self { target, url: Some(url), model, models, body_bytes_max: CONVERSATION_BYTES_MAX, own: None })
    }

    /// Starts a server in this process.
    fn own(spec: &str, engine: &EngineArgs) -> anyhow::Result<Self> {
        let own = OwnServer::start(spec, engine)?;
        let models = client_runtime()?.block_on(list(&own.target))?;
        let model = models.first().cloned().context("the server lists no model")?;
        let target = own.target.clone();
        Ok(Self { target, url: None, model, models, body_bytes_max: OWN_BODY_BYTES_MAX, own: Some(own) })
    }

    /// Changes the model: to another of the server, or for the engine of this process to any that `serve` takes.
    ///
    /// # Errors
    /// The server has no such model, or it cannot be loaded; the model in use stays.
    pub fn change(&mut self, name: &str, engine: &EngineArgs) -> anyhow::Result<()> {
        let Some(own) = self.own.take() else {
            let names: Vec<_> = self.models.iter().map(|model| model.name.as_str()).collect();
            let found = choose(&self.models, Some(name));
            self.model = found.with_context(|| format!("no model '{name}' here: use one of {}", names.join(", ")))?;
            return Ok(());
        };
        // Most mistakes show here, before the old engine is stopped.
        if let Err(error) = open_model(name, &engine.media.mmproj()).and_then(|model| chats(&model, name)) {
            self.own = Some(own);
            return Err(error);
        }
        let before = own.spec.clone();
        drop(own);
        let (link, failed) = match Self::own(name, engine) {
            Ok(link) => (link, None),
            Err(error) => (Self::own(&before, engine).context("starting the model before again")?, Some(error)),
        };
        *self = link;
        failed.map_or(Ok(()), Err)
    }
}

/// The models of a server.
async fn list(target: &Target) -> anyhow::Result<Vec<Listed>> {
    Ok(listed(target.get(MODELS, LIST_WITHIN).await?).await?.0)
}

/// Reads the models from a server's answer, and whether the server is Plimsoll.
async fn listed(page: Answer) -> anyhow::Result<(Vec<Listed>, bool)> {
    let page = page.good().await?.json().await?;
    let entries = page["data"].as_array().context("the server's /v1/models has no list")?;
    let listed = |entry: &Value| {
        let inputs = entry["input_modalities"].as_array();
        let inputs = inputs.map(|all| all.iter().filter_map(Value::as_str).map(str::to_owned).collect());
        let name = entry["id"].as_str().filter(|id| !id.contains(char::is_control))?.to_owned();
        Some(Listed { name, context: entry["max_model_len"].as_u64(), inputs })
    };
    let is_plimsoll = entries.iter().any(|entry| entry["owned_by"] == "plimsoll");
    let models: Vec<_> = entries.iter().filter_map(listed).collect();
    if models.is_empty() {
        bail!("the server lists no model");
    }
    Ok((models, is_plimsoll))
}

/// The model of this name or path, or the first.
fn choose(models: &[Listed], model: Option<&str>) -> Option<Listed> {
    let Some(model) = model else { return models.first().cloned() };
    let name = default_name(model);
    models.iter().find(|listed| listed.name == model || listed.name == name).cloned()
}

/// Returns an error for a model that cannot chat.
fn chats(model: &LoadedModel, spec: &str) -> anyhow::Result<()> {
    if model.checkpoint.config.encoder.is_some() {
        bail!("'{spec}' makes embeddings or scores and no text: serve it with `plimsoll serve {spec}`");
    }
    // An unknown architecture is a better error than a missing template, so it comes first.
    Blueprint::new(&model.checkpoint, &Options::default())?;
    if model.template.is_none() {
        bail!("'{spec}' is a base model without a chat template: use `plimsoll serve {spec}` and /v1/completions");
    }
    Ok(())
}

/// An engine of this process and its HTTP side. Dropping it ends both.
struct OwnServer {
    spec: String,
    target: Target,
    engine: EngineHandle,
    /// The HTTP side; taken when it is ended.
    running: Option<Running>,
}

struct Running {
    runtime: Runtime,
    tell: mpsc::Sender<()>,
    task: JoinHandle<()>,
}

/// The configuration for one user of this machine: few connections, no structured output, no stored responses. The key keeps
/// other users out.
fn config(key: &str) -> anyhow::Result<ServerConfig> {
    Ok(ServerConfig {
        port: 0,
        api_keys: ApiKeys::new([key.to_owned()]).map_err(anyhow::Error::msg)?,
        max_connections: 8,
        max_body_bytes: OWN_BODY_BYTES_MAX,
        grammar_bytes: 0,
        response_store_bytes: 0,
        drain_deadline: Duration::ZERO,
        ..ServerConfig::default()
    })
}

/// A key that no other process can guess: the hash's own keys come from the operating system.
fn random_key() -> String {
    let part = |_| format!("{:016x}", RandomState::new().hash_one(std::process::id()));
    (0..2).map(part).collect()
}

impl OwnServer {
    fn start(spec: &str, engine: &EngineArgs) -> anyhow::Result<Self> {
        let key = random_key();
        let config = config(&key)?;
        let model = open_model(spec, &engine.media.mmproj())?;
        chats(&model, spec)?;
        let options = engine.options_beside(&config);
        let model = with_draft(model, &options)?;
        let engine = load_engine(&model, &options)?;
        let served = served(model, engine.clone(), &ReadingArgs::default(), vec![default_name(spec)])?;
        let runtime = http_runtime(&config)?;
        let listener = runtime.block_on(plimsoll_server::bind(&config))?;
        let address = listener.local_addr().context("the listening address")?;
        let (tell, told) = mpsc::channel(1);
        let task = runtime.spawn(async move {
            if let Err(error) = plimsoll_server::serve(listener, served, config, told).await {
                tracing::error!("the server of this process has ended: {error}");
            }
        });
        let target = Target::parse(&format!("http://{address}"), Some(&key))?;
        Ok(Self { spec: spec.to_owned(), target, engine, running: Some(Running { runtime, tell, task }) })
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        if let Some(Running { runtime, tell, task }) = self.running.take() {
            let _ = tell.try_send(());
            let _ = runtime.block_on(task);
            end(runtime);
        }
        self.engine.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_is_found_by_its_name_and_the_first_one_is_the_default() {
        let listed = |name: &str| Listed { name: name.into(), ..Listed::default() };
        let models = [listed("qwen"), listed("smollm2")];
        assert_eq!(choose(&models, None).unwrap().name, "qwen");
        assert_eq!(choose(&models, Some("smollm2")).unwrap().name, "smollm2");
        assert!(choose(&models, Some("other")).is_none() && choose(&[], None).is_none());
    }

    #[test]
    fn keys_differ_and_servers_take_them() {
        let keys = [random_key(), random_key()];
        assert!(keys[0] != keys[1] && keys[0].len() == 32, "{keys:?}");
        config(&keys[0]).unwrap().check().unwrap();
    }
}
