//! Transcripts with times, of clips of any length, compared with `generate` of transformers with `return_timestamps=True`.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};

use crate::hearing::{FORM, PATH, WHISPER, form, number, sent, streamed, transcribe_at, wave, wave_of};
use crate::http::request_of;
use crate::product::{Server, eventually, fixture};

fn serve(flags: &[&str]) -> Server {
    let exact = ["--dtype", "f32", "--kv-dtype", "f32"];
    Server::start_model(&fixture(WHISPER), &[&exact[..], flags].concat())
}

/// The answers with times of the fixture.
fn timed() -> Vec<Value> {
    let text = std::fs::read(fixture(WHISPER).join("reference.json")).expect("a reference");
    let all: Value = serde_json::from_slice(&text).expect("JSON");
    all["timed"].as_array().expect("answers with times").clone()
}

/// The fields of the form that an answer of the reference was asked with.
fn texts(asked: &Value) -> Vec<(&str, String)> {
    let mut texts = vec![("max_tokens", asked["max_tokens"].to_string())];
    for field in ["language", "prompt"] {
        texts.extend(asked[field].as_str().map(|value| (field, value.to_owned())));
    }
    texts
}

fn ask(server: &Server, asked: &Value, more: &[(&str, &str)]) -> String {
    let path = if asked["task"] == "translate" { "/v1/audio/translations" } else { PATH };
    let texts = texts(asked);
    let texts: Vec<(&str, &str)> =
        texts.iter().map(|(name, text)| (*name, text.as_str())).chain(more.iter().copied()).collect();
    transcribe_at(server, path, &wave(asked), &texts)
}

fn verbose(server: &Server, asked: &Value) -> Value {
    let form = [("response_format", "verbose_json"), ("timestamp_granularities[]", "segment")];
    serde_json::from_str(&ask(server, asked, &form)).expect("JSON")
}

/// The segments of an answer, with only these fields.
fn segments(answer: &Value, fields: &[&str]) -> Vec<Value> {
    let kept = |segment: &Value| {
        fields.iter().map(|field| (field.to_string(), segment[*field].clone())).collect::<serde_json::Map<_, _>>()
    };
    answer["segments"].as_array().expect("segments").iter().map(|segment| Value::Object(kept(segment))).collect()
}

#[test]
fn whisper_gives_times_as_transformers_does() {
    all_at_once(&serve(&["--max-total-token-num", "2048"]));
}

/// Less room than three windows need, and draft tokens from prompt lookup.
#[test]
#[ignore = "soak"]
fn times_are_the_same_with_drafts_and_little_room() {
    // The adaptive limit depends on the load of the machine, so it is off.
    let drafts = ["--prompt-lookup-num-tokens", "4", "--disable-mtp-adaptive"];
    let server = serve(&[&["--max-total-token-num", "320"][..], &drafts].concat());
    all_at_once(&server);
    let metrics = server.get("/metrics").text();
    let accepted = metrics.lines().find_map(|line| line.strip_prefix("plimsoll_speculation_accepted_tokens_total "));
    assert!(accepted.is_some_and(|count| count.parse::<u64>().is_ok_and(|count| count > 0)), "{accepted:?}");
}

fn all_at_once(server: &Server) {
    let all = timed();
    std::thread::scope(|scope| {
        for asked in all.iter().chain(&all) {
            scope.spawn(|| answers(server, asked));
        }
    });
    eventually("everything is given back", || server.at_rest());
    for row in server.memory()["components"].as_array().expect("components") {
        assert!(number(&row["peak_bytes"]) <= number(&row["planned_bytes"]), "I2: {row}");
    }
}

/// One answer of the reference: its segments, and the same text in all other forms.
fn answers(server: &Server, asked: &Value) {
    let found = verbose(server, asked);
    let fields = ["start", "end", "tokens", "text"];
    let (own, expected) = (segments(&found, &fields), segments(asked, &fields));
    for (own, expected) in own.iter().zip(&expected) {
        assert_eq!(own, expected, "{} samples", asked["samples"]);
    }
    assert_eq!(own.len(), expected.len(), "{} samples", asked["samples"]);
    let joined: String = expected.iter().filter_map(|segment| segment["text"].as_str()).collect();
    let (text, windows) = (json!(joined.trim_start()), number(&asked["windows"]));
    assert_eq!((&found["text"], &found["task"]), (&text, &asked["task"]));
    assert_eq!(found["duration"], json!((number(&asked["frames"]) * 160) as f64 / 16_000.0));
    assert!(found["language"].is_string(), "{found}");
    assert_eq!(number(&found["usage"]["input_token_details"]["audio_tokens"]), 100 * windows);
    let logprob = |segment: &Value| segment["avg_logprob"].as_f64().expect("a log-probability");
    let each = found["segments"].as_array().unwrap();
    assert!(each.iter().all(|segment| logprob(segment) < 0.0 && segment["compression_ratio"].is_number()), "{found}");
    let silence = |segment: &Value| segment["no_speech_prob"].as_f64().expect("a probability");
    let mut numbered = each.iter().enumerate();
    assert!(numbered.all(|(id, segment)| segment["id"] == id && silence(segment) > 0.0), "{found}");
    if let (Some(mean), Some(silent)) = (asked["avg_logprob"].as_f64(), asked["no_speech_prob"].as_f64()) {
        assert!((logprob(&each[0]) - mean).abs() < 2e-3, "{} instead of {mean}", logprob(&each[0]));
        assert!((silence(&each[0]) / silent).ln().abs() < 2e-3, "{} instead of {silent}", silence(&each[0]));
    }
    let srt = ask(server, asked, &[("response_format", "srt")]);
    let vtt = ask(server, asked, &[("response_format", "vtt")]);
    let spoken = expected.iter().filter(|segment| !segment["text"].as_str().unwrap().trim().is_empty()).count();
    assert_eq!([srt.matches(" --> ").count(), vtt.matches(" --> ").count()], [spoken; 2], "{srt}");
    assert!(vtt.starts_with("WEBVTT\n\n00:00:0") && srt.starts_with("1\n00:00:0"), "{srt}{vtt}");
    if number(&asked["samples"]) > 32_000 {
        let plain: Value = serde_json::from_str(&ask(server, asked, &[])).expect("JSON");
        assert_eq!(plain, json!({"text": text, "usage": found["usage"]}));
        let (done, pieces) = streamed(&ask(server, asked, &[("stream", "true")]), &text);
        assert_eq!(done["usage"], found["usage"]);
        assert!(pieces as u64 >= windows.min(expected.len() as u64) / 2, "{pieces} pieces of {windows} windows");
        assert_eq!(ask(server, asked, &[("response_format", "text")]), format!("{}\n", text.as_str().unwrap()));
    }
}

#[test]
fn whisper_takes_long_clips_within_limits() {
    let server = serve(&["--max-transcription-seconds", "60", "--max-audio-bytes", "4000000"]);
    let silence = |seconds: u32| wave_of(16_000, (0..seconds as i32 * 16_000).map(|_| 0_i16));
    for (file, texts, why) in [
        (silence(61), vec![], "61 seconds; the limit is 60 (--max-transcription-seconds)"),
        (silence(61), vec![("stream", "true")], "61 seconds; the limit is 60 (--max-transcription-seconds)"),
        (silence(130), vec![], "the limit is 4000000 (--max-audio-bytes)"),
        (silence(3)[..9_000].to_vec(), vec![], "it is cut off"),
        (wave_of(16_000, (0..100).map(|_| 5)), vec![("response_format", "srt")], "too few to transform"),
        (silence(1), vec![("response_format", "srt"), ("stream", "true")], "srt is not available with stream"),
        (silence(1), vec![("timestamp_granularities[]", "segment")], "needs response_format verbose_json, not json"),
        (silence(1), vec![("response_format", "verbose_json"), ("timestamp_granularities[]", "word")], "not of words"),
        (
            silence(1),
            vec![("response_format", "verbose_json"), ("timestamp_granularities[]", "line")],
            "supported is segment",
        ),
        (silence(1), vec![("response_format", "ass")], "supported are json, text, verbose_json, srt and vtt"),
    ] {
        let (status, text) = sent(&server, PATH, &file, &texts);
        assert!(status == 400 && text.contains(why), "{status}: {text}");
    }
    // Silence of nearly the limit, and a clip at another rate.
    let texts = [("max_tokens", "6"), ("response_format", "verbose_json"), ("language", "en")];
    let tone = wave_of(8_000, (0..40_123).map(|i: i32| (i % 37 * 500) as i16));
    for (file, duration) in [(silence(59), 59.0), (tone, 5.01)] {
        let answer: Value = serde_json::from_str(&transcribe_at(&server, PATH, &file, &texts)).expect("JSON");
        assert_eq!(answer["duration"], duration, "{answer}");
        assert!(!answer["segments"].as_array().expect("segments").is_empty());
    }
    eventually("everything is given back", || server.at_rest());
    // Clips of whole windows, if a flag allows no more than a part of one.
    drop(server);
    let server = serve(&["--max-audio-seconds", "1"]);
    let (status, text) = sent(&server, PATH, &silence(3), &[("response_format", "srt")]);
    assert!(status == 400 && text.contains("3 seconds; the limit is 1 (--max-audio-seconds)"), "{status}: {text}");
    assert_eq!(sent(&server, PATH, &silence(1), &[("response_format", "vtt"), ("max_tokens", "4")]).0, 200);
}

#[test]
fn a_client_that_leaves_ends_a_long_transcript() {
    let server = serve(&[]);
    let long = timed().pop().expect("a long clip");
    for (stream, read) in [("true", 3_000), ("true", 10), ("false", 0)] {
        let body = form(&wave(&long), &[("stream", stream), ("max_tokens", "10")]);
        let mut client = TcpStream::connect(server.address).expect("a connection");
        let head = format!(
            "POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        client.write_all(head.as_bytes()).expect("written");
        client.write_all(&body).expect("written");
        if read > 0 {
            client.read_exact(&mut vec![0; read]).expect("a part of the answer");
        } else {
            eventually("it runs", || server.status()["requests"].as_array().is_some_and(|all| !all.is_empty()));
        }
        drop(client);
        eventually("everything is given back", || server.at_rest());
    }
    // The server still works.
    assert_eq!(number(&verbose(&server, &timed()[0])["usage"]["output_tokens"]), 16);
}

/// A transcript that ends early in a later window is an error, never a shorter text.
#[test]
fn a_transcript_that_ends_early_is_an_error() {
    let server = serve(&[]);
    let long = timed().pop().expect("a long clip");
    for stream in ["true", "false"] {
        let texts = [("stream", stream), ("max_tokens", "10")];
        let answer = std::thread::scope(|scope| {
            let asked = scope.spawn(|| sent(&server, PATH, &wave(&long), &texts));
            let running = || server.status()["requests"].as_array().and_then(|all| all.first().cloned());
            let finished = || number(&server.status()["totals"]["finished"]);
            let before = finished();
            eventually("some windows have gone by", || finished() >= before + 3 && running().is_some());
            let id = running().expect("a request")["id"].as_str().expect("an id").to_owned();
            let ended =
                request_of(server.address, "DELETE", &format!("/v1/requests/{id}"), "", b"").expect("an answer");
            assert_eq!(ended.status, 200);
            asked.join().expect("an answer")
        });
        assert!(answer.1.contains("cancelled") && !answer.1.contains("transcript.text.done"), "{answer:?}");
        assert!(stream == "true" || answer.0 >= 400, "{answer:?}");
        eventually("everything is given back", || server.at_rest());
    }
}

/// Models without times return an error that says so.
#[test]
fn other_models_refuse_times() {
    let server = Server::start_model(&fixture("asr"), &["--max-total-token-num", "2048"]);
    let clip = wave_of(16_000, (0..16_000).map(|i: i32| (i % 50 * 300) as i16));
    for (texts, why) in [
        (vec![("response_format", "srt")], "the served model gives no times for subtitles"),
        (
            vec![("response_format", "verbose_json"), ("timestamp_granularities[]", "segment")],
            "gives no times: leave the field out",
        ),
    ] {
        let (status, text) = sent(&server, PATH, &clip, &texts);
        assert!(status == 400 && text.contains(why), "{status}: {text}");
    }
}
