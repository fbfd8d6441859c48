//! Transcriptions: a form instead of JSON.

use serde_json::{Value, json};

use super::errors;
use super::schema::{Object, reference};

pub(super) const OBJECTS: &[Object] = &[
    (
        "Transcription",
        &[
            ("task", "~string"),
            ("language", "~string"),
            ("duration", "~number"),
            ("text", "string"),
            ("segments", "~[TranscriptionSegment]"),
            ("usage", "TranscriptionUsage"),
        ],
    ),
    (
        "TranscriptionSegment",
        &[
            ("id", "integer"),
            ("seek", "integer"),
            ("start", "number"),
            ("end", "number"),
            ("text", "string"),
            ("tokens", "[integer]"),
            ("temperature", "number"),
            ("avg_logprob", "~number"),
            ("no_speech_prob", "~number"),
            ("compression_ratio", "~number"),
        ],
    ),
    (
        "TranscriptionUsage",
        &[
            ("type", "string"),
            ("input_tokens", "integer"),
            ("input_token_details", "TranscriptionInput"),
            ("output_tokens", "integer"),
            ("total_tokens", "integer"),
        ],
    ),
    ("TranscriptionInput", &[("audio_tokens", "integer"), ("text_tokens", "integer")]),
];

/// The routes.
pub(super) fn paths() -> Value {
    json!({
        "/v1/audio/transcriptions": {"post": operation("What is said in an audio file, as text")},
        "/v1/audio/translations": {"post": operation("The same in English, by Whisper")}
    })
}

/// A route's operation.
fn operation(summary: &str) -> Value {
    let number = || json!({"type": "number"});
    let integer = || json!({"type": "integer", "minimum": 0});
    let form = json!({
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "WAV, FLAC, MP3 or Ogg Vorbis"},
            "model": {"type": "string"},
            "language": {"type": "string", "description": "An ISO 639 code, or the language's English name"},
            "prompt": {"type": "string", "description": "Words and names to expect; it becomes the system message, or for Whisper the text that precedes the clip"},
            "response_format": {"type": "string", "enum": ["json", "text", "verbose_json", "srt", "vtt"], "description": "Whisper alone has srt and vtt"},
            "timestamp_granularities": {"type": "array", "items": {"type": "string", "enum": ["segment"]}, "description": "With verbose_json, by Whisper"},
            "stream": {"type": "boolean"},
            "temperature": number(), "top_p": number(), "min_p": number(), "top_k": {"type": "integer"},
            "repetition_penalty": number(), "presence_penalty": number(), "frequency_penalty": number(),
            "seed": {"type": "integer"}, "max_tokens": integer(), "max_completion_tokens": integer(),
            "chunking_strategy": {"type": "string", "enum": ["auto"]},
            "mtp": {"type": "boolean"}, "user": {"type": "string"}
        }
    });
    json!({
        "summary": summary,
        "requestBody": {"required": true, "content": {"multipart/form-data": {"schema": form}}},
        "responses": {
            "200": {
                "description": "The text",
                "content": {
                    "application/json": {"schema": reference("Transcription")},
                    "text/plain": {"schema": {"type": "string"}},
                    "application/x-subrip": {"schema": {"type": "string"}},
                    "text/vtt": {"schema": {"type": "string"}},
                    "text/event-stream": {"schema": {
                        "type": "object", "required": ["data"], "properties": {"data": {"type": "string"}},
                        "description": "`transcript.text.delta` events, one `transcript.text.done` with the whole text, then `data: [DONE]`"
                    }}
                }
            },
            "default": errors()
        }
    })
}
