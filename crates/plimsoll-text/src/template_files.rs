//! Which chat templates a model folder has, and which of several files wins. `chat` runs the template.

use std::path::Path;

use serde_json::Value;

use crate::error::TextError;
use crate::neighbours::{FILE_BYTES_MAX, read, read_json};

/// The folder of templates that have a name.
const NAMED_DIR: &str = "additional_chat_templates";

/// The text of a model's chat templates. A checkpoint may have more, under names of its own, which nothing asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateSources {
    /// The only one, or the one that is called `default`.
    pub default: String,
    /// The one that is called `tool_use`: what conversations with tools are rendered with.
    pub tool_use: Option<String>,
}

/// The chat templates of a model folder, if it has any: the files `chat_template.jinja` and `additional_chat_templates/*.jinja`, then
/// `chat_template.json`, then the entry in `tokenizer_config.json`, a text or several by name. The first of the three that has a default
/// is taken; a model that has only templates with names has none.
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

/// A template's file, if there is one.
fn jinja(file: &Path) -> Result<Option<String>, TextError> {
    match read(file, FILE_BYTES_MAX) {
        Ok(bytes) => String::from_utf8(bytes).map(Some).map_err(|error| TextError::BadTemplate(error.to_string())),
        Err(TextError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The entry of a JSON file: a text, a list of names and texts, or an object of them. Of two with one name the last one stands.
fn of_entry(entry: &Value) -> Option<TemplateSources> {
    let named = |name: &str| match entry {
        Value::Array(list) => list.iter().rfind(|one| one["name"] == name).and_then(|one| one["template"].as_str()),
        other => other[name].as_str(),
    };
    let default = entry.as_str().or_else(|| named("default"))?.to_owned();
    Some(TemplateSources { default, tool_use: named("tool_use").map(str::to_owned) })
}
