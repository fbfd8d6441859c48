//! The form of a transcription, field by field.

use std::sync::Arc;

use plimsoll_engine::Transcript;
use plimsoll_engine::constraint::Grammar;
use plimsoll_media::Modality;
use serde_json::{Value, json};

use super::tagged::{self, Heading};
use super::whisper::WindowPrompts;
use super::{Task, languages, whisper};
use crate::conversation::ChatRequest;
use crate::conversation::cache_control::Marks;
use crate::conversation::params::Common;
use crate::conversation::prompt::Conversation;
use crate::http::error::{ApiError, ApiResult, quote};
use crate::http::fields::Fields;
use crate::http::form::{Part, object, parts};
use crate::media::{MediaParser, Windowing};
use crate::state::model::ModelState;

/// Fields with values that are not strings.
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

/// The format of a transcription's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// An object with the text.
    Json,
    /// The text alone.
    Text,
    /// An object with the language, the length of the audio, and the segments if the model gives times.
    Verbose,
    /// Subtitles in SubRip.
    Srt,
    /// Subtitles in WebVTT.
    Vtt,
}

impl Format {
    /// Whether the format shows the times of the text.
    pub fn shows_times(self) -> bool {
        matches!(self, Self::Verbose | Self::Srt | Self::Vtt)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Text => "text",
            Self::Verbose => "verbose_json",
            Self::Srt => "srt",
            Self::Vtt => "vtt",
        }
    }
}

/// A parsed request.
pub(crate) struct Transcription {
    pub chat: ChatRequest,
    pub(super) format: Format,
    /// The language's name, where the client gives it.
    pub(super) language: Option<&'static str>,
    /// The text or tokens before the transcript in the answer.
    pub(super) heading: Heading,
    /// The grammar of the answer.
    pub(super) grammar: Option<Arc<dyn Grammar>>,
    /// The prompts if the clip is transcribed window by window; none for a model without times.
    pub(super) windows: Option<WindowPrompts>,
}

/// Splits a form into its file and its text fields.
fn split(parts: Vec<Part<'_>>) -> (Vec<Part<'_>>, Vec<Part<'_>>) {
    parts.into_iter().partition(|part| part.name == "file")
}

/// Returns the text fields of a form as JSON.
fn written(texts: &[Part<'_>]) -> ApiResult<String> {
    let mut given = object(texts, &TYPED)?;
    // The default is 0 whatever the model's own default is.
    given.entry("temperature").or_insert_with(|| json!(0));
    Ok(Value::Object(given).to_string())
}

/// Returns the text fields of a form as JSON, without its file.
pub(crate) fn texts(body: &[u8], boundary: &str) -> ApiResult<String> {
    written(&split(parts(body, boundary)?).1)
}

/// Parses a form. Runs on a text worker.
pub(crate) fn parse(body: &[u8], boundary: &str, task: Task, state: &ModelState) -> ApiResult<Transcription> {
    let (files, texts) = split(parts(body, boundary)?);
    let json = written(&texts)?;
    let mut fields = Fields::of_body(json.as_bytes())?;
    let mut media = MediaParser::new(state);
    let common = Common::take_for_transcript(&mut fields, state)?;
    media.takes("file", "audio", Modality::Audio)?;
    let [file] = files.as_slice() else {
        let message = format!("{} files are in the form; one is needed, as `file`", files.len());
        return Err(ApiError::invalid("file", message));
    };
    let newer = fields.has("max_completion_tokens");
    let max_tokens = fields.either::<u32>("max_completion_tokens", "max_tokens")?;
    let language = fields.take::<String>("language")?;
    let prompt = fields.take::<String>("prompt")?.filter(|prompt| !prompt.is_empty());
    let asked = whisper::ask(state, task, language.as_deref(), prompt.as_deref())?;
    let timed = asked.as_ref().is_some_and(|asked| asked.windows.is_some());
    let format = format(&mut fields, common.stream, timed)?;
    granularities(&mut fields, format, timed)?;
    let why = "the server gives no log-probabilities or speakers of audio";
    fields.never(&["include", "known_speaker_names", "known_speaker_references"], why)?;
    fields.only("chunking_strategy", &["\"auto\""])?;
    fields.hints(&["user"]);
    fields.finish()?;
    let windowing = match timed {
        true if format.shows_times() => Windowing::Always,
        true => Windowing::IfLonger,
        false => Windowing::Never,
    };
    let audio = media.audio_file("file", file.content, windowing)?;
    let asked = match asked {
        Some(asked) => Asked::by_tokens(asked),
        None => Asked::by_message(state, task, audio, language.as_deref(), prompt.as_deref())?,
    };
    let Asked { messages, tokens, language, heading, grammar, windows } = asked;
    let continues = messages.last().is_some_and(|last| last["role"] == "assistant");
    let mut conversation = Conversation::new("file", messages, media.media, None);
    conversation.tokens = tokens;
    if continues {
        conversation.continue_last()?;
    }
    conversation.set_thinking(false);
    // The heading consists of special tokens.
    let skip_special_tokens = heading != Heading::Tokens;
    let chat = ChatRequest {
        conversation,
        common: Common { max_tokens, skip_special_tokens, ..common },
        logprobs: None,
        add_special: false,
        include_reasoning: false,
        budget: None,
        call_prefix: "call",
        length_param: if newer { "max_completion_tokens" } else { "max_tokens" },
        clamps_max_tokens: false,
        // The last event of a stream has the whole text.
        repeats_output: true,
        drops_oldest: false,
        marks: Marks::default(),
    };
    Ok(Transcription { chat, format, language, heading, grammar, windows })
}

/// The prompt for the model and the rules of its answer.
struct Asked {
    messages: Vec<Value>,
    /// The prompt, where no template writes it.
    tokens: Option<Vec<u32>>,
    language: Option<&'static str>,
    heading: Heading,
    grammar: Option<Arc<dyn Grammar>>,
    windows: Option<WindowPrompts>,
}

impl Asked {
    /// For Whisper: a prompt in tokens of its vocabulary.
    fn by_tokens(asked: whisper::Asked) -> Self {
        let whisper::Asked { tokens, grammar, heading, language, windows } = asked;
        let (tokens, grammar) = (Some(tokens), Some(grammar));
        Self { messages: Vec::new(), tokens, language, heading, grammar, windows }
    }

    /// For other models: a prompt as messages.
    fn by_message(
        state: &ModelState,
        task: Task,
        audio: Value,
        language: Option<&str>,
        prompt: Option<&str>,
    ) -> ApiResult<Self> {
        if task == Task::Translate {
            let message =
                "the served model does not translate audio: send the clip and an instruction to /v1/chat/completions";
            return Err(ApiError::unsupported("model", message));
        }
        let language = language.map(languages::name).transpose()?;
        let alone = state.transcript() == Some(Transcript::Tagged);
        let content = match alone {
            true => json!([audio]),
            false => json!([audio, {"type": "text", "text": instruction(language)}]),
        };
        let system = prompt.map(|prompt| json!({"role": "system", "content": prompt}));
        let begun = language.filter(|_| alone).map(tagged::begun);
        let heading = if alone && begun.is_none() { Heading::Named } else { Heading::None };
        let begun = begun.map(|begun| json!({"role": "assistant", "content": begun}));
        let said = [json!({"role": "user", "content": content})];
        let messages = system.into_iter().chain(said).chain(begun).collect();
        Ok(Self { messages, tokens: None, language, heading, grammar: None, windows: None })
    }
}

/// Reads the answer's format. `timed`: the served model gives times.
fn format(fields: &mut Fields<'_>, stream: bool, timed: bool) -> ApiResult<Format> {
    let asked = fields.take::<String>("response_format")?;
    let format = match asked.as_deref() {
        None | Some("json") => Format::Json,
        Some("text") => Format::Text,
        Some("verbose_json") => Format::Verbose,
        Some("srt") if timed => Format::Srt,
        Some("vtt") if timed => Format::Vtt,
        Some(other) => {
            let supported = match timed {
                true => "json, text, verbose_json, srt and vtt",
                false => "json, text and verbose_json: the served model gives no times for subtitles",
            };
            let message = format!("response_format is `{}`; supported are {supported}", quote(other));
            return Err(ApiError::unsupported("response_format", message));
        }
    };
    if stream && format.shows_times() {
        let message = format!("response_format {} is not available with stream; use json", format.name());
        return Err(ApiError::unsupported("response_format", message));
    }
    Ok(format)
}

/// Checks the requested granularities of times: only segments are supported.
fn granularities(fields: &mut Fields<'_>, format: Format, timed: bool) -> ApiResult<()> {
    const FIELD: &str = "timestamp_granularities";
    let Some(asked) = fields.take::<Value>(FIELD)? else { return Ok(()) };
    let asked = if let Value::Array(asked) = asked { asked } else { vec![asked] };
    if !timed {
        let message = format!("{FIELD}: the served model gives no times: leave the field out");
        return Err(ApiError::unsupported(FIELD, message));
    }
    for one in &asked {
        match one.as_str() {
            Some("segment") => {}
            Some("word") => {
                let message =
                    format!("{FIELD} is `word`: the server gives times of segments, not of words; use segment");
                return Err(ApiError::unsupported(FIELD, message));
            }
            _ => {
                let message = format!("{FIELD} is `{}`; supported is segment", quote(&one.to_string()));
                return Err(ApiError::unsupported(FIELD, message));
            }
        }
    }
    if format != Format::Verbose {
        let message = format!("{FIELD} needs response_format verbose_json, not {}", format.name());
        return Err(ApiError::invalid(FIELD, message));
    }
    Ok(())
}

/// Returns the instruction to the model.
fn instruction(language: Option<&str>) -> String {
    match language {
        Some(language) => format!("Transcribe the {language} audio into text."),
        None => "Transcribe the audio into text.".to_owned(),
    }
}
