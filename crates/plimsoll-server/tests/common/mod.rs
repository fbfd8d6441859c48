//! A server on a loopback port with a scripted engine behind it, and a client that can misbehave.
#![allow(dead_code, unreachable_pub, unused_imports)] // each test file uses its part

mod answer;
pub mod collector;
pub mod http2;
pub mod request;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub use answer::{Answer, events};
pub use plimsoll_engine::testing::Script;
use plimsoll_engine::testing::{Observed, Scripted, Step, limits, scripted_with_media};
use plimsoll_engine::{EngineHandle, Limits, MediaSpec, Pooling, Request};
use plimsoll_reply::Choice;
use plimsoll_server::{
    About, Formats, Pooled, SamplingDefaults, ServeError, Served, ServerConfig, StopSignals, UnknownFields, bind, serve,
};
use plimsoll_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;

/// A ChatML template with tools and an additional variable; it refuses one message.
pub const TEMPLATE: &str = "{%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif -%}\
{%- for m in messages %}{% if m.content == 'RAISE' %}{{ raise_exception('template raised') }}{% endif %}\
<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}\
{%- if mood %}{{ mood }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A tokenizer of 256 bytes and two special tokens, 256 and 257.
pub fn tokenizer() -> Tokenizer {
    tokenizer_with(&["<|im_start|>", "<|im_end|>"])
}

/// A tokenizer of 256 bytes and these special tokens, from 256 on.
pub fn tokenizer_with(specials: &[&str]) -> Tokenizer {
    let mut vocab = Map::new();
    // The field's byte-level alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100.
    let mut next = 0x100;
    for byte in 0..=255u32 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { byte } else { next };
        next += u32::from(!printable);
        vocab.insert(char::from_u32(code).unwrap().to_string(), byte.into());
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let specials: Vec<Value> = (256..).zip(specials).map(|(id, content)| special(id, content)).collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let description = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": specials,
        "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": []}
    });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tokenizer.json");
    std::fs::write(&path, description.to_string()).unwrap();
    Tokenizer::from_file(&path).unwrap()
}

/// The special tokens of a vision model: ids 256 to 261.
pub const SEEING_SPECIALS: [&str; 6] =
    ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"];

/// A running server.
pub struct Server {
    pub address: SocketAddr,
    pub engine: EngineHandle,
    pub observed: Arc<Observed>,
    tell: tokio::sync::mpsc::Sender<()>,
    done: std::sync::Mutex<std::sync::mpsc::Receiver<()>>,
    _runtime: tokio::runtime::Runtime,
}

/// Upper limit of a wait for an expected event, also on a machine that stands still for seconds.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Long time-outs, so that a slow machine makes no difference; a drain is short.
pub fn config() -> ServerConfig {
    ServerConfig {
        // Unknown fields are refused, so that tests notice them.
        unknown_fields: UnknownFields::Refuse,
        port: 0,
        max_choices: 8,
        max_body_bytes: 1 << 20,
        max_bytes_in_flight: 16 << 20,
        header_timeout: PATIENCE,
        body_gap_timeout: PATIENCE,
        body_timeout: PATIENCE,
        write_timeout: PATIENCE,
        drain_deadline: Duration::from_millis(600),
        load_linger: Duration::from_millis(700),
        load_checkpoint_timeout: Duration::from_secs(1),
        ..ServerConfig::default()
    }
}

/// Short time-outs, for tests of slow clients.
pub fn hasty() -> ServerConfig {
    ServerConfig {
        header_timeout: Duration::from_millis(700),
        body_gap_timeout: Duration::from_millis(500),
        body_timeout: Duration::from_secs(2),
        write_timeout: Duration::from_millis(700),
        ..config()
    }
}

/// Generates one token every five milliseconds, for ever.
pub fn endless(_: &Request) -> Script {
    Box::new((0..).flat_map(|_| [Step::Token(97, "a".into()), Step::Wait(Duration::from_millis(5))]))
}

/// Generates nothing, for ever.
pub fn silent(_: &Request) -> Script {
    Box::new(std::iter::empty())
}

/// Returns a request for many tokens.
pub fn ask(stream: bool) -> String {
    post("/v1/completions", &json!({"prompt": "x", "max_tokens": 500, "stream": stream}).to_string())
}

/// Returns a scripted model.
pub fn served(
    template: &str,
    limits: Limits,
    script: impl FnMut(&Request) -> Script + Send + 'static,
    names: &[&str],
) -> (Served, Arc<Observed>) {
    served_with_media(template, limits, None, script, names)
}

fn served_with_media(
    template: &str,
    limits: Limits,
    media: Option<MediaSpec>,
    script: impl FnMut(&Request) -> Script + Send + 'static,
    names: &[&str],
) -> (Served, Arc<Observed>) {
    let tokenizer = if media.is_some() { tokenizer_with(&SEEING_SPECIALS) } else { tokenizer() };
    // An encoder without a classifier makes embeddings.
    let pooling = (limits.encoder && limits.labels == 0).then_some(Pooling::Mean);
    let pooled = Pooled { pooling, normalize: true, sigmoid: true, ..Pooled::default() };
    let Scripted { handle, observed } = scripted_with_media(limits, media, script);
    handle.set_stall_limit(PATIENCE);
    let template = Arc::new(ChatTemplate::new(template, "", "<|im_end|>").unwrap());
    let formats = Formats::new(Some(&template), Choice::Auto, Choice::Auto);
    let served = Served {
        engine: handle,
        tokenizer: Arc::new(tokenizer),
        formats,
        template: Some(template),
        names: names.iter().map(|name| (*name).into()).collect(),
        about: About {
            format: "gguf",
            family: "llama".into(),
            quantization: "Q4_1".into(),
            parameters: 134_515_008,
            bytes: 98_765_432,
        },
        created_s: 1_700_000_000,
        default_max_tokens: None,
        pooled,
        sampling: SamplingDefaults::default(),
    };
    (served, observed)
}

impl Server {
    pub fn start(script: impl FnMut(&Request) -> Script + Send + 'static) -> Self {
        Self::with(config(), limits(), script)
    }

    pub fn with(config: ServerConfig, limits: Limits, script: impl FnMut(&Request) -> Script + Send + 'static) -> Self {
        Self::over(TEMPLATE, config, limits, script)
    }

    /// A server with a model that has this chat template.
    pub fn over(
        template: &str,
        config: ServerConfig,
        limits: Limits,
        script: impl FnMut(&Request) -> Script + Send + 'static,
    ) -> Self {
        Self::seeing(template, config, limits, None, script)
    }

    /// A server with a model that takes these media: its tokenizer has the special tokens of the Qwen family, from 258
    /// on.
    pub fn seeing(
        template: &str,
        config: ServerConfig,
        limits: Limits,
        media: Option<MediaSpec>,
        script: impl FnMut(&Request) -> Script + Send + 'static,
    ) -> Self {
        let (served, observed) = served_with_media(template, limits, media, script, &["tiny", "org/tiny-alias"]);
        let handle = served.engine.clone();
        Self::around(handle, observed, config, |listener, config, told| serve(listener, served, config, told))
    }

    /// Starts the server that `serving` makes of a listener, with this engine.
    pub fn around<F: Future<Output = Result<(), ServeError>> + Send>(
        engine: EngineHandle,
        observed: Arc<Observed>,
        config: ServerConfig,
        serving: impl FnOnce(TcpListener, ServerConfig, StopSignals) -> F + Send + 'static,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(bind(&config)).unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, told) = tokio::sync::mpsc::channel(2);
        let (over, done) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            serving(listener, config, told).await.unwrap();
            let _ = over.send(());
        });
        Self { address, engine, observed, tell, done: done.into(), _runtime: runtime }
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).answer()
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, &body.to_string())
    }

    pub fn post_text(&self, path: &str, body: &str) -> Answer {
        self.send(post(path, body)).answer()
    }

    /// Returns the value of a metric without labels, by its name with `_total`.
    pub fn metric(&self, name: &str) -> u64 {
        let page = self.get("/metrics").ok_text().to_owned();
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name}: {page}")).parse::<f64>().unwrap() as u64
    }

    /// Waits until the server has noticed that every other connection is closed.
    pub fn alone(&self) {
        eventually("the connections are gone", || self.get("/metrics").body.contains("plimsoll_http_connections 1\n"));
    }

    /// Opens a connection and sends `bytes`.
    pub fn send(&self, bytes: impl AsRef<[u8]>) -> Client {
        let mut client = self.connect();
        client.write(bytes);
        client
    }

    pub fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { stream, pending: Vec::new() }
    }

    /// Tells the server to shut down, or tells it again.
    pub fn shut_down(&self) {
        self.tell.blocking_send(()).unwrap();
    }

    /// Waits for `serve` to return.
    pub fn wait_for_end(&self, within: Duration) -> bool {
        self.done.lock().unwrap().recv_timeout(within).is_ok()
    }

    /// Waits until no request has engine work, bytes or reserved places.
    pub fn assert_idle(&self) {
        eventually("the engine is idle", || {
            self.observed.active.load(Ordering::Acquire) == 0 && self.engine.reserved() == (0, 0)
        });
        eventually("no bytes are in flight", || {
            let page = self.get("/v1/memory").json();
            page["pools"]["http_bytes"]["used"] == 0
        });
    }

    pub fn aborted(&self) -> u64 {
        self.observed.aborted.load(Ordering::Acquire)
    }

    pub fn last_request(&self) -> Request {
        self.observed.requests.lock().unwrap().last().unwrap().clone()
    }
}

/// Returns the text of a POST request.
pub fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Waits for `condition`.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A client's connection.
pub struct Client {
    pub stream: TcpStream,
    pending: Vec<u8>,
}

impl Client {
    pub fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    /// Reads the next piece that the server sends and returns its length; 0 at the end.
    pub fn more(&mut self) -> usize {
        let mut buffer = [0; 16 << 10];
        match self.stream.read(&mut buffer) {
            Ok(n) => {
                self.pending.extend_from_slice(&buffer[..n]);
                n
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => 0,
            Err(error) => panic!("no more data: {error}"),
        }
    }

    /// Reads until `marker` has come; returns false if the connection ends before.
    pub fn comes(&mut self, marker: &str) -> bool {
        let mut searched = 0;
        while find(&self.pending[searched..], marker.as_bytes()).is_none() {
            searched = self.pending.len().saturating_sub(marker.len() - 1);
            if self.more() == 0 {
                return false;
            }
        }
        true
    }

    /// Reads until `marker` has come, and returns everything up to and including it.
    pub fn until(&mut self, marker: &str) -> String {
        if !self.comes(marker) {
            let tail = &self.pending[self.pending.len().saturating_sub(300)..];
            panic!("ended before {marker:?}: …{}", String::from_utf8_lossy(tail));
        }
        let end = find(&self.pending, marker.as_bytes()).unwrap() + marker.len();
        String::from_utf8(self.pending.drain(..end).collect()).unwrap()
    }

    /// Whether the server has closed the connection without sending more.
    pub fn is_closed(&mut self) -> bool {
        self.more() == 0
    }

    /// Reads one whole answer.
    pub fn answer(&mut self) -> Answer {
        let head = self.until("\r\n\r\n");
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let header = |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        let body = if [204, 304].contains(&status) {
            Vec::new()
        } else if let Some(length) = header("content-length") {
            self.exactly(length.parse().unwrap())
        } else if header("transfer-encoding").as_deref() == Some("chunked") {
            self.chunks()
        } else {
            while self.more() > 0 {}
            std::mem::take(&mut self.pending)
        };
        Answer { status, headers, body: String::from_utf8(body).unwrap() }
    }

    fn exactly(&mut self, bytes: usize) -> Vec<u8> {
        while self.pending.len() < bytes {
            assert!(self.more() > 0, "the body ended early");
        }
        self.pending.drain(..bytes).collect()
    }

    /// Reads a chunked body to its end.
    pub fn chunks(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        loop {
            let line = self.until("\r\n");
            let size = usize::from_str_radix(line.trim(), 16).unwrap();
            let chunk = self.exactly(size + 2);
            if size == 0 {
                return body;
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}
