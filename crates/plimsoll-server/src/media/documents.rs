//! Files among the parts of a message: text, and the text of PDFs.
//!
//! The text of a text file is put into its message at once. A PDF, or a file that is fetched, leaves a mark in the message; its text
//! replaces the mark before the prompt is made. A PDF is read in a child process, one file at a time.

use std::sync::Arc;
use std::time::Instant;

use plimsoll_document::{DocumentError, FILE_BYTES_MAX, Kind};
use serde_json::Value;
use tokio::time::timeout;

use crate::http::budget::Held;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::{Fields, Text};
use crate::media::{data_url, fetch_file, fetchable, from_base64};
use crate::state::documents::READ_WITHIN;
use crate::state::model::ModelState;
use crate::state::server::ServerState;
use crate::state::threads::spawn_thread;

/// Copies of a text that exist while it is put into a message.
const COPIES: u64 = 3;

/// The most bytes of a file's name.
const NAME_BYTES_MAX: usize = 256;

/// The most files of one request that are fetched.
const FETCHED_MAX: usize = 64;

/// The most bytes of a file, and the end of the error for a larger file.
const LIMIT: (u64, &str) = (FILE_BYTES_MAX, "no flag raises it");

/// A file with text that is still to be read.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    /// The path of the file's field in the body.
    param: String,
    /// The text that stands for the file in its message.
    mark: String,
    name: Option<String>,
    source: Source,
}

/// The place of a file's bytes.
#[derive(Clone, Debug)]
enum Source {
    Pdf(Vec<u8>),
    /// On another server.
    Url(String),
}

impl Document {
    /// Returns the heap bytes of the file, its field's name and its mark.
    pub fn bytes(&self) -> u64 {
        let own = match &self.source {
            Source::Pdf(file) => file.capacity(),
            Source::Url(url) => url.capacity(),
        };
        (own + self.param.len() + self.mark.len()) as u64
    }
}

/// A file as a request sends it.
#[derive(Debug)]
pub(crate) struct SentFile {
    pub name: Option<String>,
    pub data: String,
    /// Whether `data` is the file's URL.
    pub is_url: bool,
}

/// Collects the files of one request while it is parsed.
pub(crate) struct DocumentParser<'a> {
    server: &'a ServerState,
    pub documents: Vec<Document>,
}

impl<'a> DocumentParser<'a> {
    pub fn new(server: &'a ServerState) -> Self {
        Self { server, documents: Vec::new() }
    }

    /// Takes OpenAI's fields of a file. Returns the text for its message, and the file as it was sent; the data are empty unless `kept`.
    pub fn take(&mut self, fields: &mut Fields<'_>, kept: bool) -> ApiResult<(String, SentFile)> {
        fields.never(&["file_id"], "this server keeps no files; send file_data")?;
        fields.hints(&["detail"]);
        let name = fields.take::<String>("filename")?;
        if let Some(url) = fields.take::<Text<'_>>("file_url")? {
            fields.never(&["file_data"], "file_url is there already; send one of them")?;
            let text = self.url(fields.param("file_url"), name.clone(), &url.0)?;
            let data = if kept { url.0.into_owned() } else { String::new() };
            return Ok((text, SentFile { name, data, is_url: true }));
        }
        let param = fields.param("file_data");
        let data = fields.required::<Text<'_>>("file_data")?;
        // A data: URL, or base64 alone.
        let base64 = data_url(&param, &data.0)?.map_or(&*data.0, |(_, base64)| base64);
        let text = self.base64(param, name.clone(), base64)?;
        let data = if kept { data.0.into_owned() } else { String::new() };
        Ok((text, SentFile { name, data, is_url: false }))
    }

    /// Takes a file by its URL, which is fetched later by the rules of media. Returns the text for its message.
    pub fn url(&mut self, param: String, name: Option<String>, url: &str) -> ApiResult<String> {
        if let Some((_, base64)) = data_url(&param, url)? {
            return self.base64(param, name, base64);
        }
        check_name(&param, name.as_deref())?;
        fetchable(&self.server.config.media, &param, url, "https://, http:// or data:")?;
        let is_url = |document: &&Document| matches!(document.source, Source::Url(_));
        if self.documents.iter().filter(is_url).count() == FETCHED_MAX {
            let message =
                format!("{param}: a request may have {FETCHED_MAX} files by URL; send the others in the body");
            return Err(ApiError::invalid(param, message));
        }
        Ok(self.mark(param, name, Source::Url(url.to_owned())))
    }

    /// Makes a mark for a file. It is random, so no client can write it.
    fn mark(&mut self, param: String, name: Option<String>, source: Source) -> String {
        let mark = format!("[{}]", self.server.ids.named("file"));
        self.documents.push(Document { param, mark: mark.clone(), name, source });
        mark
    }

    /// Takes a file in base64, and returns the text for its message.
    pub fn base64(&mut self, param: String, name: Option<String>, data: &str) -> ApiResult<String> {
        check_name(&param, name.as_deref())?;
        let file = from_base64(&param, data, LIMIT)?;
        match checked(self.server, &param, name.as_deref(), &file)? {
            Kind::Text => Ok(shown(name.as_deref(), &text_of(&param, file)?)),
            Kind::Pdf => Ok(self.mark(param, name, Source::Pdf(file))),
        }
    }
}

fn check_name(param: &str, name: Option<&str>) -> ApiResult<()> {
    if name.is_some_and(|name| name.len() > NAME_BYTES_MAX || name.contains(char::is_control)) {
        let message = format!("{param}: the file's name must have at most {NAME_BYTES_MAX} bytes in one line");
        return Err(ApiError::invalid(param, message));
    }
    Ok(())
}

/// Returns the kind of a file. Refuses files that this server does not read.
fn checked(server: &ServerState, param: &str, name: Option<&str>, file: &[u8]) -> ApiResult<Kind> {
    match Kind::of(file) {
        Some(Kind::Pdf) if server.documents.is_none() => {
            let message = format!(
                "{param}: this server reads no PDF (--document-bytes 0); send its text, or images of its pages"
            );
            Err(ApiError::unsupported(param, message))
        }
        Some(kind) => Ok(kind),
        None => {
            let name = name.map_or_else(String::new, |name| format!(" `{}`", quote(name)));
            let message = format!("{param}: the file{name} is neither UTF-8 text nor a PDF; convert it to one");
            Err(ApiError::unsupported(param, message))
        }
    }
}

/// Returns the text of a text file.
fn text_of(param: &str, file: Vec<u8>) -> ApiResult<String> {
    // [`Kind::of`] found that it is UTF-8.
    let text = String::from_utf8(file).unwrap_or_default();
    if text.trim().is_empty() {
        return Err(ApiError::invalid(param, format!("{param}: the file is empty")));
    }
    Ok(text)
}

/// Returns a file's text under its name.
pub(crate) fn shown(name: Option<&str>, text: &str) -> String {
    match name {
        Some(name) => format!("{name}:\n\n{}\n", text.trim_end()),
        None => text.to_owned(),
    }
}

/// Replaces the documents' marks with their texts. `held` grows with the texts.
pub(crate) async fn read(
    state: &Arc<ModelState>,
    messages: &mut Value,
    documents: Vec<Document>,
    held: &mut Held,
) -> ApiResult<()> {
    let since = Instant::now();
    let mut files = Vec::with_capacity(documents.len());
    for Document { param, mark, name, source } in documents {
        let file = match source {
            Source::Pdf(file) => file,
            Source::Url(url) => fetch_file(state, &param, (url, LIMIT), since, held).await?,
        };
        files.push((param, mark, name, file));
    }
    for (param, mark, name, file) in files {
        let text = match checked(&state.server, &param, name.as_deref(), &file)? {
            Kind::Text => text_of(&param, file)?,
            Kind::Pdf => text(&state.server, &param, file).await?,
        };
        let text = shown(name.as_deref(), &text);
        held.grow_for(&param, COPIES * text.len() as u64)?;
        replace(messages, &mark, &text);
    }
    Ok(())
}

/// Returns the text of a PDF, after waiting until no other one is being read.
async fn text(server: &ServerState, param: &str, file: Vec<u8>) -> ApiResult<String> {
    let documents = server.documents.as_ref().ok_or_else(|| ApiError::internal("no document can be read here"))?;
    let busy = || {
        let message = format!("{param}: other documents are being read; try again later");
        ApiError { param: Some(param.into()), ..ApiError::unavailable(message, 5) }
    };
    let turn = timeout(READ_WITHIN, Arc::clone(&documents.turn).acquire_owned()).await;
    let turn = turn.map_err(|_| busy())?.map_err(|_| busy())?;
    let waits = Arc::new(());
    let (client, reader) = (Arc::downgrade(&waits), documents.reader.clone());
    let reading = spawn_thread("plimsoll-document", move || {
        // Held until the process has ended, also if the client has left.
        let _turn = turn;
        reader.text(&file, &|| client.strong_count() == 0)
    });
    let read = reading.map_err(|_| busy())?.await;
    drop(waits);
    match read {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) if error.is_the_clients() => Err(refused(param, &error)),
        Ok(Err(error)) => Err(ApiError::internal(format!("{param}: {error}"))),
        Err(_) => Err(server.panicked("reading a document")),
    }
}

fn refused(param: &str, error: &DocumentError) -> ApiError {
    ApiError { code: Some("document_unreadable"), ..ApiError::invalid(param, format!("{param}: {error}")) }
}

/// Replaces the mark at its first place in the texts of the messages. Returns false if it is not there.
fn replace(value: &mut Value, mark: &str, text: &str) -> bool {
    match value {
        Value::String(said) => match said.find(mark) {
            Some(at) => {
                said.replace_range(at..at + mark.len(), text);
                true
            }
            None => false,
        },
        Value::Array(list) => list.iter_mut().any(|value| replace(value, mark, text)),
        Value::Object(map) => map.values_mut().any(|value| replace(value, mark, text)),
        _ => false,
    }
}
