//! The chat templates in a model folder, and the order of precedence among several files. `chat` runs the template.

use std::path::Path;

use serde_json::Value;

use crate::error::TextError;
use crate::neighbours::{FILE_BYTES_MAX, read, read_json};

/// The folder of named templates.
const NAMED_DIR: &str = "additional_chat_templates";

/// The texts of a model's chat templates. Templates with other names in a checkpoint are not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateSources {
    /// The only template, or the one named `default`.
    pub default: String,
    /// The template named `tool_use`, for conversations with tools.
    pub tool_use: Option<String>,
}

/// Reads the chat templates of a model folder, if it has any. The sources are, in this order: the files `chat_template.jinja` and
/// `additional_chat_templates/*.jinja`, then `chat_template.json`, then the entry in `tokenizer_config.json`, which is one text or several
/// by name. The first of the three with a default template is used. A model that only has templates with other names has no template.
///
/// # Errors
///
/// [`TextError::Io`], [`TextError::FileTooLarge`], [`TextError::BadTokenizer`] and [`TextError::BadTemplate`] for files that exist but
/// cannot be read.
pub fn chat_template_sources(folder: &Path) -> Result<Option<TemplateSources>, TextError> {
    let named = |name: &str| jinja(&folder.join(NAMED_DIR).join(name));
    let default = match named("default.jinja")? {
        Some(source) => Some(source),
        None => jinja(&folder.join("chat_template.jinja"))?,
    };
    if let Some(default) = default {
        return Ok(Some(TemplateSources { default, tool_use: named("tool_use.jinja")? }));
    }
    for file in ["chat_template.json", "tokenizer_config.json"] {
        let content = read_json(folder, file)?;
        if let Some(sources) = of_entry(&content["chat_template"]) {
            return Ok(Some(sources));
        }
    }
    Ok(None)
}

/// Reads a template's file, if there is one.
fn jinja(file: &Path) -> Result<Option<String>, TextError> {
    match read(file, FILE_BYTES_MAX) {
        Ok(bytes) => String::from_utf8(bytes).map(Some).map_err(|error| TextError::BadTemplate(error.to_string())),
        Err(TextError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the entry of a JSON file: a text, a list of names and texts, or an object of them. The last of two templates with one name is
/// used.
fn of_entry(entry: &Value) -> Option<TemplateSources> {
    let named = |name: &str| match entry {
        Value::Array(list) => list.iter().rfind(|one| one["name"] == name).and_then(|one| one["template"].as_str()),
        other => other[name].as_str(),
    };
    let default = entry.as_str().or_else(|| named("default"))?.to_owned();
    Some(TemplateSources { default, tool_use: named("tool_use").map(str::to_owned) })
}
