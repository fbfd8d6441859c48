//! The web app: `GET /` and its files, which are part of the binary.
//!
//! The files are the same at every server and say nothing about it, so they need no key. The app uses the public API
//! like any other client. **Architecture invariant:** the app connects only to its own server, and no string becomes
//! markup. The content security policy makes the browser enforce both.
//! `tests/page/serve.mjs` serves the files from the source tree, for work on them without a build.

use std::hash::{DefaultHasher, Hasher};

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::path::Name;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// One file of the app.
struct File {
    name: &'static str,
    kind: &'static str,
    text: &'static str,
}

macro_rules! file {
    ($name:literal, $kind:expr) => {
        File { name: $name, kind: $kind, text: include_str!(concat!("../../page/", $name)) }
    };
}

const INDEX: File = file!("index.html", HTML);

const FILES: &[File] = &[
    file!("mark.svg", SVG),
    file!("base.css", CSS),
    file!("board.css", CSS),
    file!("chat.css", CSS),
    file!("markdown.css", CSS),
    file!("theme.js", SCRIPT),
    file!("app.js", SCRIPT),
    file!("feed.js", SCRIPT),
    file!("show.js", SCRIPT),
    file!("board/board.js", SCRIPT),
    file!("board/charts.js", SCRIPT),
    file!("board/disk.js", SCRIPT),
    file!("board/hull.js", SCRIPT),
    file!("board/levels.js", SCRIPT),
    file!("board/requests.js", SCRIPT),
    file!("chat/answer.js", SCRIPT),
    file!("chat/attach.js", SCRIPT),
    file!("chat/chat.js", SCRIPT),
    file!("chat/code.js", SCRIPT),
    file!("chat/composer.js", SCRIPT),
    file!("chat/copy.js", SCRIPT),
    file!("chat/entities.js", SCRIPT),
    file!("chat/icons.js", SCRIPT),
    file!("chat/keeper.js", SCRIPT),
    file!("chat/limits.js", SCRIPT),
    file!("chat/list.js", SCRIPT),
    file!("chat/log.js", SCRIPT),
    file!("chat/markdown.js", SCRIPT),
    file!("chat/message.js", SCRIPT),
    file!("chat/models.js", SCRIPT),
    file!("chat/request.js", SCRIPT),
    file!("chat/settings.js", SCRIPT),
    file!("chat/store.js", SCRIPT),
    file!("chat/stream.js", SCRIPT),
    file!("chat/transfer.js", SCRIPT),
    file!("chat/tree.js", SCRIPT),
    file!("vendor/highlight.min.js", SCRIPT),
    file!("vendor/marked.esm.js", SCRIPT),
];

/// The headers of every file.
const HEADERS: [(HeaderName, &str); 6] = [
    // Nothing from other servers, nothing inline, no frames around it. Trusted Types without a policy: the browser refuses every string
    // that a script would turn into markup or code.
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    // Cached, but revalidated each time: after an update, old and new files do not mix.
    (header::CACHE_CONTROL, "no-cache"),
];

impl File {
    /// Returns a tag that changes with the text.
    fn tag(&self) -> String {
        let mut hasher = DefaultHasher::new();
        hasher.write(self.text.as_bytes());
        format!("\"{:016x}\"", hasher.finish())
    }

    fn send(&self, asked: &HeaderMap) -> Response {
        let tag = self.tag();
        let mut response = if known(asked, &tag) {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            ([(header::CONTENT_TYPE, self.kind)], self.text).into_response()
        };
        let headers = response.headers_mut();
        for (name, value) in HEADERS {
            headers.insert(name, HeaderValue::from_static(value));
        }
        if let Ok(tag) = HeaderValue::try_from(tag) {
            headers.insert(header::ETAG, tag);
        }
        response
    }
}

/// Returns whether the client has the file with this tag. A proxy that compresses answers marks tags as weak.
fn known(asked: &HeaderMap, tag: &str) -> bool {
    let tags = asked.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut tags = tags.flat_map(|tags| tags.split(',')).map(str::trim);
    tags.any(|known| known == "*" || known.strip_prefix("W/").unwrap_or(known) == tag)
}

/// The app's document.
pub(crate) async fn index(headers: HeaderMap) -> Response {
    INDEX.send(&headers)
}

/// One of the app's files, by its path below `page/`.
pub(crate) async fn file(Name(name): Name, headers: HeaderMap) -> ApiResult<Response> {
    match FILES.iter().find(|file| file.name == name) {
        Some(file) => Ok(file.send(&headers)),
        None => {
            let message = format!("the page has no file `{}`", quote(&name));
            Err(ApiError { code: Some("not_found"), ..ApiError::new(StatusCode::NOT_FOUND, message) })
        }
    }
}
