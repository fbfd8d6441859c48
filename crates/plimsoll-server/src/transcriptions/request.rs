//! The form of a transcription, field by field.

use plimsoll_engine::Transcript;
use plimsoll_media::Modality;
use serde_json::{Value, json};

use super::{languages, tagged};
use crate::conversation::ChatRequest;
use crate::conversation::marks::Marks;
use crate::conversation::messages::Conversation;
use crate::conversation::params::Common;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Fields;
use crate::http::form::{Part, object, parts};
use crate::media::MediaParser;
use crate::state::model::ModelState;

/// Fields that are no texts.
const TYPED: [&str; 12] = [
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "mtp",
];

/// How a transcription is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// An object with the text.
    Json,
    /// The text alone.
    Text,
    /// An object with the language that was given, and the length of the audio.
    Verbose,
}

/// A parsed request.
pub(crate) struct Transcription {
    pub chat: ChatRequest,
    pub(super) format: Format,
    /// The language's name, where the client gives it.
    pub(super) language: Option<&'static str>,
    /// Whether the answer begins with the language that the model detects.
    pub(super) tagged: bool,
}

/// The file of a form, and its texts.
fn split(parts: Vec<Part<'_>>) -> (Vec<Part<'_>>, Vec<Part<'_>>) {
    parts.into_iter().partition(|part| part.name == "file")
}

/// The texts of a form as JSON.
fn written(texts: &[Part<'_>]) -> ApiResult<String> {
    let mut given = object(texts, &TYPED)?;
    // Whatever the model's own default is.
    given.entry("temperature").or_insert_with(|| json!(0));
    Ok(Value::Object(given).to_string())
}

/// The texts of a form as JSON, without its file.
pub(crate) fn texts(body: &[u8], boundary: &str) -> ApiResult<String> {
    written(&split(parts(body, boundary)?).1)
}

/// Takes a form apart. Runs on a text worker.
pub(crate) fn parse(body: &[u8], boundary: &str, state: &ModelState) -> ApiResult<Transcription> {
    let (files, texts) = split(parts(body, boundary)?);
    let json = written(&texts)?;
    let mut fields = Fields::of_body(json.as_bytes())?;
    let mut media = MediaParser::new(state);
    let common = Common::take_few(&mut fields, state)?;
    media.takes("file", "audio", Modality::Audio)?;
    let [file] = files.as_slice() else {
        let message = format!("{} files are in the form; one is needed, as `file`", files.len());
        return Err(ApiError::invalid("file", message));
    };
    let audio = media.audio_file("file", file.content)?;
    let newer = fields.has("max_completion_tokens");
    let max_tokens = fields.either::<u32>("max_completion_tokens", "max_tokens")?;
    let language = fields.take::<String>("language")?.map(|language| languages::name(&language)).transpose()?;
    let prompt = fields.take::<String>("prompt")?.filter(|prompt| !prompt.is_empty());
    let format = format(&mut fields, common.stream)?;
    let why = "the served model gives no times, log-probabilities or speakers of what it hears";
    fields.never(&["timestamp_granularities", "include", "known_speaker_names", "known_speaker_references"], why)?;
    fields.only("chunking_strategy", &["\"auto\""])?;
    fields.hints(&["user"]);
    fields.finish()?;
    let system = prompt.map(|prompt| json!({"role": "system", "content": prompt}));
    let alone = state.served.engine.media().and_then(|spec| spec.transcript()) == Some(Transcript::Tagged);
    let content = match alone {
        true => json!([audio]),
        false => json!([audio, {"type": "text", "text": instruction(language)}]),
    };
    let begun = language.filter(|_| alone).map(tagged::begun);
    let begun = begun.map(|begun| json!({"role": "assistant", "content": begun}));
    let tagged = alone && begun.is_none();
    let continues = begun.is_some();
    let said = [json!({"role": "user", "content": content})];
    let messages = system.into_iter().chain(said).chain(begun).collect();
    let mut conversation = Conversation::new("file", messages, media.media, None);
    if continues {
        conversation.continue_last()?;
    }
    conversation.set_thinking(false);
    let chat = ChatRequest {
        conversation,
        common: Common { max_tokens, ..common },
        logprobs: None,
        add_special: false,
        include_reasoning: false,
        budget: None,
        call_prefix: "call",
        length_param: if newer { "max_completion_tokens" } else { "max_tokens" },
        fills_context: false,
        // The last event of a stream has the whole text.
        gathers: true,
        drops_oldest: false,
        marks: Marks::default(),
    };
    Ok(Transcription { chat, format, language, tagged })
}

fn format(fields: &mut Fields<'_>, stream: bool) -> ApiResult<Format> {
    let asked = fields.take::<String>("response_format")?;
    let format = match asked.as_deref() {
        None | Some("json") => Format::Json,
        Some("text") => Format::Text,
        Some("verbose_json") => Format::Verbose,
        Some(other) => {
            let message = format!(
                "response_format is `{}`; supported are json, text and verbose_json: the served model gives no times for subtitles",
                quote(other)
            );
            return Err(ApiError::unsupported("response_format", message));
        }
    };
    if stream && format == Format::Verbose {
        let message = "response_format verbose_json is not available with stream; use json";
        return Err(ApiError::unsupported("response_format", message));
    }
    Ok(format)
}

/// What the model is asked to do.
fn instruction(language: Option<&str>) -> String {
    match language {
        Some(language) => format!("Transcribe the {language} audio into text."),
        None => "Transcribe the audio into text.".to_owned(),
    }
}
