//! Models with audio, served: audio in chats and transcriptions, with the prompts and answers of transformers.

use base64::Engine as _;
use serde_json::{Value, json};

use crate::http::request_of;
use crate::product::{Server, eventually, fixture, run};

/// Qwen3-ASR, which takes audio alone, and the same from GGUF. The template of the GGUF file takes text alone.
const MODEL: &str = "asr";
const GGUF: &str = "gguf-asr";
/// Gemma 4, which also sees.
const GEMMA: &str = "vl-gemma4-audio";
/// Qwen2.5-Omni, which also sees, and both Omnis from GGUF.
const OMNIS: [&str; 3] = ["omni2.5", "vl-gguf-omni2.5", "vl-gguf-omni"];
/// A decoder that attends to an encoder's output.
pub const WHISPER: &str = "whisper";
pub const PATH: &str = "/v1/audio/transcriptions";

pub fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// A sound as a WAV file of 16 bits, made by the formula of `tools/fixturelib/omni.py`.
pub fn wave(item: &Value) -> Vec<u8> {
    let (seed, count) = (number(&item["seed"]) as i64, number(&item["samples"]) as i64);
    let at = |i: i64| {
        let rising = (i * (i / 37 + 40 + seed)) % 16_001 - 8_000;
        let beating = (i * 911 + (i / 800) * seed * 733) % 4_001 - 2_000;
        (rising + beating) as i16
    };
    wave_of(16_000, (0..count as usize).map(|i| at(i as i64)))
}

/// Samples as a WAV file of 16 bits and one channel.
pub fn wave_of(rate: u32, samples: impl ExactSizeIterator<Item = i16>) -> Vec<u8> {
    let bytes = 2 * samples.len() as u32;
    let mut file = Vec::new();
    file.extend(b"RIFF");
    file.extend((36 + bytes).to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend(16_u32.to_le_bytes());
    // PCM, one channel.
    file.extend([1_u16, 1].map(u16::to_le_bytes).as_flattened());
    file.extend([rate, 2 * rate].map(u32::to_le_bytes).as_flattened());
    file.extend([2_u16, 16].map(u16::to_le_bytes).as_flattened());
    file.extend(b"data");
    file.extend(bytes.to_le_bytes());
    samples.for_each(|sample| file.extend(sample.to_le_bytes()));
    file
}

fn cases(model: &str) -> Vec<Value> {
    let at = fixture(model);
    let folder = if at.is_file() { at.parent().expect("a folder") } else { &at };
    let text = std::fs::read(folder.join("reference.json")).expect("a reference");
    let all: Value = serde_json::from_slice(&text).expect("JSON");
    all["cases"].as_array().expect("cases").clone()
}

fn serve(model: &str) -> Server {
    let exact = ["--dtype", "f32", "--kv-dtype", "f32", "--max-total-token-num", "4096", "--max-audio-seconds", "10"];
    Server::start_model(&fixture(model), &exact)
}

/// Sends a form with a file and these texts, and returns the answer.
fn transcribe(server: &Server, file: &[u8], texts: &[(&str, &str)]) -> String {
    transcribe_at(server, PATH, file, texts)
}

pub fn transcribe_at(server: &Server, path: &str, file: &[u8], texts: &[(&str, &str)]) -> String {
    let (status, text) = sent(server, path, file, texts);
    assert_eq!(status, 200, "{text}");
    text
}

/// Sends a form and returns the status and the body of the answer.
pub fn sent(server: &Server, path: &str, file: &[u8], texts: &[(&str, &str)]) -> (u16, String) {
    let answer = request_of(server.address, "POST", path, FORM, &form(file, texts));
    let answer = answer.expect("an answer");
    let status = answer.status;
    (status, answer.text())
}

/// The content type of a form.
pub const FORM: &str = "multipart/form-data; boundary=edge";

/// A form with a file and these texts.
pub fn form(file: &[u8], texts: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, text) in texts {
        body.extend(format!("--edge\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{text}\r\n").bytes());
    }
    body.extend(b"--edge\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n");
    body.extend_from_slice(file);
    body.extend(b"\r\n--edge--\r\n");
    body
}

/// The sounds of a case, as parts of a message.
fn sounds(case: &Value) -> Vec<Value> {
    let audio = |item: &Value| {
        let data = base64::engine::general_purpose::STANDARD.encode(wave(item));
        json!({"type": "input_audio", "input_audio": {"format": "wav", "data": data}})
    };
    case["items"].as_array().expect("items").iter().map(audio).collect()
}

/// A request for twelve greedy tokens.
fn ask(messages: &[Value]) -> Value {
    json!({"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": true, "return_token_ids": true, "logprobs": true})
}

/// A chat with the sounds of a case. If the case names a language, the answer begins with it.
fn chat(case: &Value) -> Value {
    let mut parts = sounds(case);
    let prompt = case["text"].as_str().expect("a prompt");
    // The user's text after the sounds, and the beginning of the answer.
    let said = prompt.rsplit_once("<|audio|>").and_then(|(_, rest)| rest.split_once("<|im_end|>"));
    parts.extend(said.map(|(said, _)| json!({"type": "text", "text": said})));
    let mut messages = vec![json!({"role": "user", "content": parts})];
    let begun = prompt.rsplit('\n').next().expect("a line").to_owned();
    let continues = !begun.is_empty();
    if continues {
        messages.push(json!({"role": "assistant", "content": begun}));
    }
    let mut asked = ask(&messages);
    asked["continue_final_message"] = json!(continues);
    asked["add_generation_prompt"] = json!(!continues);
    asked
}

#[test]
fn a_model_that_only_hears_answers_as_transformers_does() {
    answers_as_transformers(GGUF);
    let server = answers_as_transformers(MODEL);
    let refused = server.post(
        "/v1/chat/completions",
        &json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}),
    );
    let status = refused.status;
    assert_eq!(status, 400, "{}", refused.text());
}

#[test]
fn gemma_4_hears_what_transformers_hears() {
    answers_as_transformers("vl-gemma4-unified-audio");
    let server = answers_as_transformers(GEMMA);
    let long = json!({"kind": "sound", "seed": 3, "samples": 16_000 * 11});
    let data = base64::engine::general_purpose::STANDARD.encode(wave(&long));
    let content = json!([{"type": "input_audio", "input_audio": {"format": "wav", "data": data}}]);
    let refused = server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": content}]}));
    let (status, text) = (refused.status, refused.text());
    assert!(status == 400 && text.contains("11 seconds; the limit is 10 (--max-audio-seconds)"), "{status}: {text}");
}

/// Qwen2.5-Omni and Qwen3-Omni: the cases that have only sounds.
#[test]
fn omni_models_hear_what_transformers_hears() {
    OMNIS.into_iter().for_each(sounds_alone);
}

fn sounds_alone(model: &str) {
    let server = serve(model);
    let said = |case: &Value| {
        let prompt = server.ask("/detokenize", &json!({"tokens": case["ids"]}))["prompt"].clone();
        let prompt = prompt.as_str().expect("a prompt").to_owned();
        let (_, said) = prompt.rsplit_once("Next to it ").expect("what follows a sound");
        format!("Next to it {}", said.split("<|im_end|>").next().unwrap_or_default())
    };
    let mut same = 0;
    let heard = |case: &&Value| case["items"].as_array().expect("items").iter().all(|item| item["kind"] == "sound");
    for case in cases(model).iter().filter(heard) {
        let mut parts = sounds(case);
        parts.push(json!({"type": "text", "text": said(case)}));
        let answer = server.ask("/v1/chat/completions", &ask(&[json!({"role": "user", "content": parts})]));
        assert_eq!(answer["choices"][0]["token_ids"], case["greedy"], "{model}: {}", case["name"]);
        same += 1;
    }
    assert_eq!(same, 2);
    let text =
        transcribe(&server, &wave(&cases(model)[0]["items"][0]), &[("response_format", "json"), ("max_tokens", "8")]);
    assert!(serde_json::from_str::<Value>(&text).expect("JSON")["text"].is_string(), "{text}");
    eventually("everything is given back", || server.at_rest());
}

fn answers_as_transformers(model: &str) -> Server {
    let server = serve(model);
    for case in cases(model) {
        let answer = server.ask("/v1/chat/completions", &chat(&case));
        let name = &case["name"];
        assert_eq!(number(&answer["usage"]["prompt_tokens"]), case["ids"].as_array().unwrap().len() as u64, "{name}");
        assert_eq!(answer["choices"][0]["token_ids"], case["greedy"], "{name}");
        let found = answer["choices"][0]["logprobs"]["content"].as_array().expect("log-probabilities");
        for (found, expected) in found.iter().zip(case["greedy_logprobs"].as_array().unwrap()) {
            let (found, expected) = (found["logprob"].as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((found - expected).abs() < 2e-3, "{name}: {found} instead of {expected}");
        }
    }
    eventually("everything is given back", || server.at_rest());
    for row in server.memory()["components"].as_array().expect("components") {
        assert!(number(&row["peak_bytes"]) <= number(&row["planned_bytes"]), "I2: {row}");
    }
    server
}

#[test]
fn a_transcription_asks_the_model_as_its_processor_does() {
    for model in [MODEL, GGUF] {
        transcribes(model);
    }
}

fn transcribes(model: &str) {
    let server = serve(model);
    for case in cases(model).iter().filter(|case| case["items"].as_array().expect("items").len() == 1) {
        let said = server.ask("/v1/chat/completions", &chat(case))["choices"][0]["message"]["content"].clone();
        let file = wave(&case["items"][0]);
        // One case names the language.
        let begun = case["text"].as_str().expect("a prompt").contains("language English<asr_text>");
        let language: &[(&str, &str)] = if begun { &[("language", "en")] } else { &[] };
        let with = |more: (&'static str, &'static str)| [language, &[("max_tokens", "12"), more][..]].concat();
        let answer = transcribe(&server, &file, &with(("response_format", "verbose_json")));
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["text"], said, "{}", case["name"]);
        assert_eq!(number(&answer["usage"]["input_tokens"]), case["ids"].as_array().unwrap().len() as u64);
        assert_eq!(answer["language"], if begun { json!("english") } else { Value::Null });
        let stream = transcribe(&server, &file, &with(("stream", "true")));
        let event = |line: &str| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok();
        let done = stream.lines().rev().find_map(event).expect("an event");
        assert_eq!((&done["type"], &done["text"]), (&json!("transcript.text.done"), &said), "{stream}");
    }
    eventually("everything is given back", || server.at_rest());
}

/// Whisper: the output of `generate` of transformers, with the language given or detected, all requests at once.
#[test]
fn whisper_transcribes_and_translates_as_transformers_does() {
    let server = serve(WHISPER);
    let text = std::fs::read(fixture(WHISPER).join("reference.json")).expect("a reference");
    let all: Value = serde_json::from_slice(&text).expect("JSON");
    let transcripts = all["transcripts"].as_array().expect("transcripts");
    std::thread::scope(|scope| {
        for asked in transcripts.iter().chain(transcripts) {
            scope.spawn(|| transcript(&server, asked));
        }
    });
    let (status, text) = sent(&server, PATH, &wave(&transcripts[0]), &[("language", "is")]);
    assert!(status == 400 && text.contains("language is `is`; supported are de, en, fr"), "{status}: {text}");
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}]})),
        ("/v1/embeddings", json!({"input": "a"})),
    ] {
        let answer = server.post(path, &body);
        let (status, text) = (answer.status, answer.text());
        assert!(status == 400 && text.contains("/v1/audio/transcriptions"), "{path}: {text}");
    }
    assert_eq!(server.get("/v1/models").json()["data"][0]["input_modalities"], json!(["audio"]));
    // The language is the most likely one at any temperature. A heading that is cut off gives no text.
    let detected = |more: &[(&str, &str)]| {
        let form = [&[("response_format", "verbose_json"), ("max_tokens", "2")], more].concat();
        let text = transcribe(&server, &wave(&transcripts[0]), &form);
        serde_json::from_str::<Value>(&text).expect("JSON")
    };
    let greedy = detected(&[]);
    assert!(greedy["language"].is_string() && greedy["text"] == "", "{greedy}");
    for seed in ["1", "2", "3", "4", "5", "6"] {
        assert_eq!(detected(&[("temperature", "1"), ("seed", seed)]), greedy, "seed {seed}");
    }
    eventually("everything is given back", || server.at_rest());
    for row in server.memory()["components"].as_array().expect("components") {
        assert!(number(&row["peak_bytes"]) <= number(&row["planned_bytes"]), "I2: {row}");
    }
}

/// Checks one answer of the reference, as an object and streamed.
fn transcript(server: &Server, asked: &Value) {
    let (file, tokens) = (wave(asked), asked["said"].as_array().expect("ids").len().to_string());
    let path = if asked["task"] == "translate" { "/v1/audio/translations" } else { PATH };
    let mut texts = vec![("max_tokens", tokens.as_str())];
    for field in ["language", "prompt"] {
        texts.extend(asked[field].as_str().map(|value| (field, value)));
    }
    let said = json!(asked["text"].as_str().expect("a text").trim_start());
    let plain = transcribe_at(server, path, &file, &texts);
    let plain: Value = serde_json::from_str(&plain).expect("JSON");
    assert_eq!(plain["text"], said, "{asked}");
    let verbose = transcribe_at(server, path, &file, &[&texts[..], &[("response_format", "verbose_json")]].concat());
    let verbose: Value = serde_json::from_str(&verbose).expect("JSON");
    assert_eq!(verbose["task"], asked["task"], "{asked}");
    let names = json!({"en": "english", "de": "german", "fr": "french"});
    let detected = ["en", "de", "fr"].iter().find(|code| asked["said"][0] == all_ids()[**code]);
    let code = asked["language"].as_str().or(detected.copied()).expect("a language");
    assert_eq!(verbose["language"], names[code], "{asked}");
    let frames = number(&asked["samples"]) / 160;
    assert_eq!(verbose["duration"], json!(frames as f64 * 160.0 / 16_000.0));
    assert_eq!(number(&plain["usage"]["input_tokens"]), 100 + asked["given"].as_array().expect("ids").len() as u64);
    streamed(&transcribe_at(server, path, &file, &[&texts[..], &[("stream", "true")]].concat()), &said);
}

/// Checks that the pieces of a stream, and its last event, are this text. Returns that event and the number of pieces.
pub fn streamed(stream: &str, said: &Value) -> (Value, usize) {
    let event = |line: &str| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok();
    let mut events: Vec<Value> = stream.lines().filter_map(event).collect();
    let done = events.pop().expect("events");
    assert_eq!((&done["type"], &done["text"]), (&json!("transcript.text.done"), said), "{stream}");
    let joined: String = events.iter().filter_map(|piece| piece["delta"].as_str()).collect();
    assert_eq!(json!(joined), *said);
    (done, events.len())
}

/// The token ids of the fixture's languages.
pub fn all_ids() -> Value {
    let text = std::fs::read(fixture(WHISPER).join("generation_config.json")).expect("a configuration");
    let all: Value = serde_json::from_slice(&text).expect("JSON");
    let id = |code: &str| all["lang_to_id"][format!("<|{code}|>")].clone();
    json!({"en": id("en"), "de": id("de"), "fr": id("fr")})
}

#[test]
fn users_with_audio_are_planned() {
    let path = fixture(MODEL);
    let said =
        run(&["plan", path.to_str().expect("UTF-8"), "--users", "4", "--context", "512", "--audio-seconds", "5"])
            .good();
    assert!(said.contains("4 users x 512 tokens"), "{said}");
}
