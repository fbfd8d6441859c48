//! `/v1/audio/transcriptions`: the form becomes a conversation with the audio, and the answer is its text.

use std::sync::Arc;

use plimsoll_engine::testing::{letters, limits};
use plimsoll_engine::{AudioSpec, Limits, MediaSpec, Request, Spelling, Transcript};
use plimsoll_media::audio::Mel;
use plimsoll_media::geometry::{AudioRule, ProcessorFiles};
use plimsoll_media::{OutputPool, Staging};
use serde_json::{Value, json};

use super::{STAGING, VIDEO, fixture, idle};
use crate::common::{Answer, SEEING_SPECIALS, Server, config, tokenizer_with};

const PATH: &str = "/v1/audio/transcriptions";
const TEMPLATE: &str = "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}\
{%- for part in m.content %}{% if part.type == 'audio' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}\
{% endif %}{% endfor %}{%- endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn hearing() -> (Server, MediaSpec) {
    let rule = AudioRule::windows(&ProcessorFiles::default().audio, 50, 200, 2).unwrap();
    let mel = Arc::new(Mel::new(&rule, 8));
    let spec = MediaSpec {
        image: None,
        video: None,
        audio: Some(AudioSpec {
            tokens_max: rule.worst().tokens,
            rule,
            mel,
            placeholder: VIDEO,
            transcript: Transcript::Instructed,
        }),
        parameters: "test".into(),
        places: None,
        image_in_one_step: false,
        spelling: Spelling::Plain,
        items_max: 4,
        batch: 2,
        staging: Staging::new(STAGING),
        outputs: OutputPool::new(4, 16, 64).unwrap(),
    };
    let limits = Limits { vocab_size: 262, max_req_total_len: 2048, max_total_token_num: 8 * 2048, ..limits() };
    (Server::seeing(TEMPLATE, config(), limits, Some(spec.clone()), letters), spec)
}

/// Returns a form with these texts and files.
fn form(texts: &[(&str, &str)], files: &[&[u8]]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, text) in texts {
        body.extend(format!("--edge\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{text}\r\n").bytes());
    }
    for file in files {
        let head = "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav";
        body.extend(format!("--edge\r\n{head}\r\n\r\n").bytes());
        body.extend_from_slice(file);
        body.extend(b"\r\n");
    }
    body.extend(b"--edge--\r\n");
    body
}

fn send(server: &Server, kind: &str, body: &[u8]) -> Answer {
    send_to(server, PATH, kind, body)
}

fn send_to(server: &Server, path: &str, kind: &str, body: &[u8]) -> Answer {
    let length = body.len();
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n");
    server.send([head.as_bytes(), body].concat()).answer()
}

fn ask(server: &Server, texts: &[(&str, &str)]) -> Answer {
    send(server, "multipart/form-data; boundary=edge", &form(texts, &[&fixture("chord.wav")]))
}

fn last(server: &Server) -> Request {
    server.observed.requests.lock().unwrap().last().unwrap().clone()
}

#[test]
fn a_file_is_transcribed_in_every_format() {
    let (server, spec) = hearing();
    let plain = ask(&server, &[("model", "tiny"), ("max_tokens", "4")]).ok();
    let request = last(&server);
    let [item] = &request.media[..] else { panic!("{} items", request.media.len()) };
    let tokens = item.shape.tokens;
    assert_eq!(request.prompt.iter().filter(|id| **id == VIDEO).count() as u64, tokens);
    assert_eq!((request.max_tokens, request.sampling.temperature), (4, 0.0));
    let words = |request: &Request| tokenizer_with(&SEEING_SPECIALS).decode(&request.prompt, true);
    assert_eq!(words(&request), "user\nTranscribe the audio into text.\nassistant\n");
    let text = plain["text"].as_str().unwrap();
    assert_eq!(text.len(), 4, "{text}");
    let input = request.prompt.len() as u64;
    let details = json!({"audio_tokens": tokens, "text_tokens": input - tokens});
    let usage = json!({"type": "tokens", "input_tokens": input, "input_token_details": details, "output_tokens": 4, "total_tokens": input + 4});
    assert_eq!(plain, json!({"text": text, "usage": usage}));

    let verbose =
        [("response_format", "verbose_json"), ("language", "de"), ("prompt", "Plimsoll"), ("max_tokens", "4")];
    let verbose = ask(&server, &verbose).ok();
    assert_eq!(words(&last(&server)), "system\nPlimsoll\nuser\nTranscribe the German audio into text.\nassistant\n");
    assert_eq!((&verbose["task"], &verbose["language"]), (&json!("transcribe"), &json!("german")));
    assert_eq!(verbose["text"].as_str().map(str::len), Some(4));
    assert_eq!(verbose["duration"], json!(0.2), "a fifth of a second");

    let bare = ask(&server, &[("response_format", "text"), ("temperature", "0.5"), ("max_tokens", "4")]);
    assert_eq!((bare.ok_text(), last(&server).sampling.temperature), (&*format!("{text}\n"), 0.5));
    assert!(bare.header("content-type").unwrap().starts_with("text/plain"));

    let events = ask(&server, &[("stream", "true"), ("max_tokens", "4")]).events();
    let (done, pieces) = events.split_last().unwrap();
    assert_eq!(done, &json!({"type": "transcript.text.done", "text": text, "usage": usage}));
    assert!(pieces.iter().all(|piece| piece["type"] == "transcript.text.delta"));
    let joined: String = pieces.iter().map(|piece| piece["delta"].as_str().unwrap()).collect();
    assert_eq!(joined, text);
    // The recorded request holds the spectrogram.
    drop(request);
    idle(&server, &spec);
}

#[test]
fn what_a_transcription_cannot_have_is_refused_by_name() {
    let (server, spec) = hearing();
    for (texts, param, words) in [
        (&[("response_format", "srt")][..], "response_format", "supported are json, text and verbose_json"),
        (&[("response_format", "verbose_json"), ("stream", "true")], "response_format", "not available with stream"),
        (&[("timestamp_granularities[]", "word")], "timestamp_granularities", "gives no times"),
        (&[("include[]", "logprobs")], "include", "gives no log-probabilities"),
        (&[("language", "tlh")], "language", "language is `tlh`; known are ar, "),
        (&[("temperature", "warm")], "temperature", ""),
        (&[("stream", "yes")], "stream", ""),
        (&[("model", "other")], "model", "the model `other` does not exist here"),
        (&[("model", "tiny"), ("model", "tiny")], "model", "model is there twice"),
    ] {
        let answer = ask(&server, texts);
        let error = answer.error(if param == "model" && texts.len() == 1 { 404 } else { 400 });
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    let kind = "multipart/form-data; boundary=edge";
    let chord = fixture("chord.wav");
    for (body, status, words) in [
        (form(&[("model", "tiny")], &[]), 400, "0 files are in the form; one is needed, as `file`"),
        (form(&[], &[&chord, &chord]), 400, "2 files are in the form"),
        (form(&[], &[b"%PDF-1.7"]), 400, "supported are WAV, FLAC, MP3 and Ogg Vorbis"),
        (form(&[], &[&chord])[..200].to_vec(), 400, "the form is malformed: a part does not end"),
    ] {
        let error = send(&server, kind, &body).error(status);
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    let boundless = send(&server, "multipart/form-data", &form(&[], &[&chord])).error(400);
    assert!(boundless["message"].as_str().unwrap().contains("names no boundary"), "{boundless}");
    let error = send(&server, "application/json", b"{}").error(415);
    assert!(error["message"].as_str().unwrap().contains("multipart/form-data"), "{error}");
    let error = send_to(&server, "/v1/audio/translations", kind, &form(&[], &[&chord])).error(400);
    assert!(error["message"].as_str().unwrap().contains("an instruction to /v1/chat/completions"), "{error}");
    // A browser sends a form of any page without a preflight.
    let foreign = format!("{kind}\r\norigin: https://elsewhere.example");
    let error = send(&server, &foreign, &form(&[], &[&chord])).error(403);
    assert!(error["message"].as_str().unwrap().contains("--allowed-origins"), "{error}");
    assert_eq!(server.observed.requests.lock().unwrap().len(), 0, "nothing of this reached the engine");
    idle(&server, &spec);
}

#[test]
fn a_model_that_hears_nothing_transcribes_nothing() {
    let server = Server::start(letters);
    let error = ask(&server, &[]).error(400);
    assert_eq!(error["param"], "file");
    assert!(error["message"].as_str().unwrap().contains("the served model `tiny` takes no audio"), "{error}");
    assert_eq!(error.get("code").map(Value::is_null), Some(false));
    server.assert_idle();
}
