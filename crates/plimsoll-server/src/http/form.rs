//! Parses a form with files (`multipart/form-data`) in memory: the body has arrived as a whole and is bounded.

use axum::http::{HeaderMap, header};
use memchr::memmem;
use serde_json::{Map, Value};

use crate::http::error::{ApiError, ApiResult, quote};

/// The most parts of a form.
const PARTS_MAX: usize = 64;
/// The most bytes of the lines before a part's content.
const HEAD_MAX: usize = 8 << 10;
/// The longest boundary that RFC 2046 allows.
const BOUNDARY_MAX: usize = 70;

/// One part of a form.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part<'b> {
    pub name: String,
    pub content: &'b [u8],
}

/// Returns the boundary between the parts, from `Content-Type`.
pub(crate) fn boundary(headers: &HeaderMap) -> ApiResult<String> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let found = parameter(kind, "boundary").filter(|found| (1..=BOUNDARY_MAX).contains(&found.len()));
    found.ok_or_else(|| {
        ApiError::bad_body(format!("Content-Type names no boundary of 1 to {BOUNDARY_MAX} characters for the form"))
    })
}

/// Returns the parts of a form, in order.
pub(crate) fn parts<'b>(body: &'b [u8], boundary: &str) -> ApiResult<Vec<Part<'b>>> {
    let broken = |why: &str| ApiError::bad_body(format!("the form is malformed: {why}"));
    let delimiter = format!("\r\n--{boundary}");
    let finder = memmem::Finder::new(delimiter.as_bytes());
    // The first delimiter may be the first line.
    let mut rest = match body.strip_prefix(&delimiter.as_bytes()[2..]) {
        Some(rest) => rest,
        None => {
            let at = finder.find(body).ok_or_else(|| broken("its boundary is not there"))?;
            &body[at + delimiter.len()..]
        }
    };
    let mut parts = Vec::new();
    while !rest.starts_with(b"--") {
        if parts.len() == PARTS_MAX {
            return Err(broken(&format!("it has more than {PARTS_MAX} parts")));
        }
        let line = memmem::find(&rest[..rest.len().min(HEAD_MAX)], b"\r\n");
        let start = line.ok_or_else(|| broken("a boundary is not followed by a line"))?;
        let head = &rest[start..rest.len().min(start + HEAD_MAX)];
        let end = memmem::find(head, b"\r\n\r\n").ok_or_else(|| broken("the head of a part does not end"))?;
        let name = name(&head[..end]).ok_or_else(|| broken("a part has no name"))?;
        let content = &rest[start + end + 4..];
        // The delimiter's line break may be the one that ends the head of an empty part.
        let until = match content.strip_prefix(&delimiter.as_bytes()[2..]) {
            Some(_) => None,
            None => Some(finder.find(content).ok_or_else(|| broken("a part does not end"))?),
        };
        let (own, next) = match until {
            Some(until) => (&content[..until], until + delimiter.len()),
            None => (&content[..0], delimiter.len() - 2),
        };
        parts.push(Part { name, content: own });
        rest = &content[next..];
    }
    Ok(parts)
}

/// Returns the text fields of a form as a JSON object. Fields in `typed` are numbers or booleans; names that end with `[]` are lists.
pub(crate) fn object(parts: &[Part<'_>], typed: &[&str]) -> ApiResult<Map<String, Value>> {
    let mut object = Map::new();
    for part in parts {
        let text = std::str::from_utf8(part.content)
            .map_err(|_| ApiError::invalid(part.name.as_str(), format!("{} is not UTF-8", quote(&part.name))))?;
        if let Some(name) = part.name.strip_suffix("[]") {
            let list = object.entry(name).or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(list) = list {
                list.push(text.into());
            }
            continue;
        }
        // A value that is not a number or boolean stays a string, and is refused later because of its type.
        let value = typed.contains(&part.name.as_str()).then(|| serde_json::from_str::<Value>(text).ok()).flatten();
        let value = value.filter(|value| value.is_number() || value.is_boolean()).unwrap_or_else(|| text.into());
        if object.insert(part.name.clone(), value).is_some() {
            let message = format!("{} is there twice", quote(&part.name));
            return Err(ApiError::invalid(part.name.as_str(), message));
        }
    }
    Ok(object)
}

/// Returns the name in the lines before a part's content.
fn name(head: &[u8]) -> Option<String> {
    let head = std::str::from_utf8(head).ok()?;
    let disposition = head.split("\r\n").find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    })?;
    parameter(disposition, "name").filter(|name| !name.is_empty())
}

/// Returns a parameter of a header's value: `name=value` or `name="value"` after a semicolon.
fn parameter(value: &str, name: &str) -> Option<String> {
    let mut rest = value.split_once(';')?.1;
    loop {
        let (key, after) = rest.split_once('=')?;
        let (key, after) = (key.trim(), after.trim_start());
        let (found, next) = match after.strip_prefix('"') {
            Some(quoted) => quoted_text(quoted)?,
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        if key.eq_ignore_ascii_case(name) {
            return Some(found);
        }
        rest = next.trim_start().strip_prefix(';')?;
    }
}

/// Returns a quoted text after its first quotation mark, and the rest after the last.
fn quoted_text(quoted: &str) -> Option<(String, &str)> {
    let (mut text, mut escaped) = (String::new(), false);
    for (at, c) in quoted.char_indices() {
        match c {
            '\\' if !escaped => escaped = true,
            '"' if !escaped => return Some((text, &quoted[at + 1..])),
            c => {
                text.push(c);
                escaped = false;
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(body: &str) -> Result<Vec<(String, String)>, String> {
        let parts = parts(body.as_bytes(), "edge").map_err(|error| error.message)?;
        let text = |part: &Part<'_>| (part.name.clone(), String::from_utf8(part.content.to_vec()).unwrap());
        Ok(parts.iter().map(text).collect())
    }

    #[test]
    fn parts_keep_their_bytes() {
        let body = "--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a;b\\\".wav\"\r\nContent-Type: audio/wav\r\n\r\n\
            line\r\n--edg\r\n\r\n--edge\r\ncontent-disposition: form-data; name=empty\r\n\r\n\r\n--edge\r\n\
            Content-Disposition: form-data; filename=\"name=x\"; name=\"last\"\r\n\r\n1\r\n--edge--\r\n";
        let expected = [("file", "line\r\n--edg\r\n"), ("empty", ""), ("last", "1")];
        let expected: Vec<_> = expected.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        assert_eq!(taken(body).unwrap(), expected);
        assert_eq!(taken(&format!("preamble\r\n{body}")).unwrap(), expected);
        assert_eq!(taken("--edge--").unwrap(), []);
    }

    #[test]
    fn what_is_cut_or_endless_is_refused() {
        let part = "--edge\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nx\r\n";
        for (body, why) in [
            (String::new(), "its boundary is not there"),
            ("--edge".into(), "a boundary is not followed by a line"),
            ("--edge\r\nContent-Disposition: form-data; name=\"a\"\r\n".into(), "the head of a part does not end"),
            (format!("--edge\r\n{}\r\n\r\n", "x".repeat(9 << 10)), "the head of a part does not end"),
            ("--edge\r\nContent-Disposition: form-data; name=\"\"\r\n\r\n\r\n--edge--".into(), "a part has no name"),
            ("--edge\r\nContent-Disposition: form-data; name=\"a\r\n\r\n\r\n--edge--".into(), "a part has no name"),
            (part.into(), "a part does not end"),
            (part.repeat(65) + "--edge--", "it has more than 64 parts"),
        ] {
            assert_eq!(taken(&body), Err(format!("the form is malformed: {why}")));
        }
        assert_eq!(taken(&(part.repeat(64) + "--edge--")).unwrap().len(), 64);
    }

    #[test]
    fn texts_become_the_values_that_they_stand_for() {
        let part = |name: &str, content: &'static str| Part { name: name.into(), content: content.as_bytes() };
        let given = [
            part("stream", "true"),
            part("temperature", "0.5"),
            part("model", "7"),
            part("a[]", "x"),
            part("a[]", "y"),
        ];
        let found = Value::Object(object(&given, &["stream", "temperature", "seed"]).unwrap());
        assert_eq!(found, serde_json::json!({"stream": true, "temperature": 0.5, "model": "7", "a": ["x", "y"]}));
        let twice = object(&[part("model", "a"), part("model", "b")], &[]).unwrap_err();
        assert_eq!((twice.message.as_str(), twice.param.as_deref()), ("model is there twice", Some("model")));
        let broken = object(&[Part { name: "prompt".into(), content: b"\xff" }], &[]).unwrap_err();
        assert_eq!(broken.message, "prompt is not UTF-8");
    }

    #[test]
    fn the_boundary_is_a_parameter_of_the_type() {
        let of = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, value.parse().unwrap());
            boundary(&headers).ok()
        };
        assert_eq!(of("multipart/form-data; boundary=edge").as_deref(), Some("edge"));
        assert_eq!(of("multipart/form-data; charset=utf-8; boundary=\"e d\"").as_deref(), Some("e d"));
        let long = "x".repeat(71);
        assert_eq!([of("multipart/form-data"), of(&format!("multipart/form-data; boundary={long}"))], [None, None]);
    }
}
