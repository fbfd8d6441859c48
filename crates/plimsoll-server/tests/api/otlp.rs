//! OpenTelemetry traces: spans of requests at a collector that accepts them, refuses them, hangs or is missing.

use std::time::{Duration, Instant};

use plimsoll_engine::FinishReason;
use plimsoll_engine::testing::{Script, Step, letters, limits};
use plimsoll_engine::{Limits, Request};
use plimsoll_server::{OtlpConfig, ServerConfig};
use serde_json::json;

use crate::common::collector::{Collector, Manner, Span};
use crate::common::{Client, Server, config, eventually, post};
use crate::refused_log::{OURS, keep, lines};

fn traced(url: &str, variables: &[(&str, &str)]) -> ServerConfig {
    let variable = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
    ServerConfig { otlp: OtlpConfig::read(Some(url), variable).unwrap(), ..config() }
}

fn server(url: &str, script: impl FnMut(&Request) -> Script + Send + 'static) -> Server {
    Server::with(traced(url, &[]), limits(), script)
}

/// A script with a prompt of 30 ms, then three tokens in 40 ms.
fn measured(_: &Request) -> Script {
    let token = |text: &str| Step::Token(97, text.into());
    let wait = |ms| Step::Wait(Duration::from_millis(ms));
    let end = Step::Finish(FinishReason::Stop, None);
    let steps = [Step::Cached(2), wait(30), token("a"), wait(20), token("b"), wait(20), token("c"), end];
    Box::new(steps.into_iter())
}

fn ask(server: &Server, path: &str, headers: &str, body: &serde_json::Value) -> Client {
    server.send(post(path, &body.to_string()).replacen("content-type", &format!("{headers}content-type"), 1))
}

/// Waits until there are `count` spans and returns them.
fn spans(collector: &Collector, count: usize) -> Vec<Span> {
    eventually("the spans are there", || collector.spans().len() >= count);
    let spans = collector.spans();
    assert_eq!(spans.len(), count, "{spans:#?}");
    spans
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name}: {spans:#?}"))
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

#[test]
fn spans_nest_carry_the_genai_attributes_and_agree_with_the_request_log() {
    keep();
    let collector = Collector::start(Manner::Takes);
    let server = server(&collector.url(), measured);
    let id = format!("{OURS}otlp");
    let headers = format!("traceparent: 00-{TRACE}-b7ad6b7169203331-01\r\nx-request-id: {id}\r\n");
    let body = json!({"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 9, "temperature": 0.5});
    let began = Instant::now();
    ask(&server, "/v1/chat/completions", &headers, &body).answer().ok();
    let seen_ms = began.elapsed().as_secs_f64() * 1000.0;
    let spans = spans(&collector, 5);
    let root = named(&spans, "chat tiny");
    assert_eq!((root.trace.as_str(), root.parent.as_str(), root.kind), (TRACE, "b7ad6b7169203331", 2));
    assert_eq!((root.flags, root.status), (0x301, 0), "sampled, with a parent in another process");
    for (name, value) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "plimsoll"),
        ("gen_ai.request.model", "tiny"),
        ("gen_ai.response.model", "tiny"),
        ("gen_ai.request.max_tokens", "9"),
        ("gen_ai.request.temperature", "0.5"),
        ("gen_ai.usage.output_tokens", "3"),
        ("gen_ai.usage.cache_read.input_tokens", "2"),
        ("gen_ai.response.finish_reasons", "stop"),
        ("http.route", "/v1/chat/completions"),
        ("plimsoll.request_id", &id),
        ("plimsoll.stream", "false"),
    ] {
        assert_eq!(root.attribute(name), Some(value), "{name}");
    }
    assert!(root.attribute("gen_ai.usage.input_tokens").unwrap().parse::<u64>().unwrap() > 8);
    assert!(root.attribute("gen_ai.response.id").unwrap().starts_with("chatcmpl-"));
    assert_eq!(root.attribute("error.type"), None);
    let phases = ["prepare", "queue", "prefill", "decode"].map(|name| named(&spans, name));
    for phase in phases {
        assert_eq!((phase.trace.as_str(), &phase.parent, phase.kind), (TRACE, &root.id, 1), "{}", phase.name);
        assert!(
            root.start <= phase.start && phase.start <= phase.end && phase.end <= root.end,
            "{phase:?} in {root:?}"
        );
    }
    assert!(phases.windows(2).all(|two| two[0].end.abs_diff(two[1].start) < 1000), "one begins where the last ended");
    let [_, _, prefill, decode] = phases;
    assert!(prefill.ms() >= 30.0 && decode.ms() >= 40.0, "{} {}", prefill.ms(), decode.ms());
    assert_eq!(decode.attribute("gen_ai.usage.output_tokens"), Some("3"));
    let mut ids: Vec<&str> = spans.iter().map(|span| span.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 5, "every span has an id of its own");
    // The log has the same times, to a tenth of a millisecond, and names the trace.
    let line = lines(&id).pop().unwrap();
    let number = |name: &str| {
        let value = line.split(name).nth(1).unwrap().split([' ', ')']).next().unwrap();
        value.trim_start_matches("Some(").parse::<f64>().unwrap()
    };
    let logged = number("duration_ms=");
    assert!((logged - root.ms()).abs() <= 0.11, "{logged} in the log, {} in the span", root.ms());
    assert!(root.ms() <= seen_ms, "{} ms, the client saw {seen_ms}", root.ms());
    let first = root.attribute("gen_ai.response.time_to_first_chunk").unwrap().parse::<f64>().unwrap() * 1000.0;
    assert!((number("ttft_ms=") - first).abs() <= 0.11, "{line} and {first}");
    assert!(line.contains(TRACE), "{line}");
    let all = collector.seen.lock().unwrap();
    assert!(!all.bodies.iter().any(|body| body.windows(6).any(|six| six == b"secret")), "no content");
    assert_eq!(all.resources[0]["service.name"], "plimsoll");
    assert!(all.heads[0].starts_with("post /v1/traces http/1.1\r\n"), "{}", all.heads[0]);
    assert!(all.heads[0].contains("content-type: application/x-protobuf\r\n"), "{}", all.heads[0]);
}

#[test]
fn streams_choices_embeddings_failures_and_clients_that_leave_have_spans() {
    let collector = Collector::start(Manner::Takes);
    let one = server(&collector.url(), letters);
    let body = json!({"prompt": "x", "max_tokens": 3, "stream": true, "n": 6});
    ask(&one, "/v1/completions", "", &body).answer().events();
    // The request, `prepare`, and three phases of the first four choices.
    let found = spans(&collector, 2 + 3 * 4);
    let root = named(&found, "text_completion tiny");
    assert_eq!((root.parent.as_str(), root.flags), ("", 0x101), "a trace of its own");
    assert_eq!(root.attribute("gen_ai.request.choice.count"), Some("6"));
    assert_eq!(root.attribute("gen_ai.usage.output_tokens"), Some("18"));
    assert_eq!(root.attribute("gen_ai.response.finish_reasons"), Some("length,length,length,length"));
    assert!(found.iter().all(|span| span.trace == root.trace && span.trace.len() == 32));

    let collector = Collector::start(Manner::Takes);
    let encoder = Limits { encoder: true, ..limits() };
    let embed = |_: &Request| -> Script { Box::new([Step::Pooled(vec![1.0; 8])].into_iter()) };
    let two = Server::with(traced(&collector.url(), &[]), encoder, embed);
    two.post("/v1/embeddings", &json!({"input": ["ab", "c"]})).ok();
    let found = spans(&collector, 2 + 2 * 2);
    let root = named(&found, "embeddings tiny");
    assert_eq!(root.attribute("gen_ai.usage.input_tokens"), Some("3"));
    assert_eq!(found.iter().filter(|span| span.name == "prefill").count(), 2);

    let collector = Collector::start(Manner::Takes);
    let three = server(&collector.url(), |_| Box::new([Step::Fail("broken".into())].into_iter()));
    assert_eq!(three.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 3})).status, 500);
    let found = spans(&collector, 4);
    let root = named(&found, "text_completion tiny");
    assert_eq!((root.status, root.attribute("error.type")), (2, Some("failed")));

    let collector = Collector::start(Manner::Takes);
    let four = server(&collector.url(), crate::common::endless);
    let mut client = ask(&four, "/v1/completions", "", &json!({"prompt": "x", "max_tokens": 500, "stream": true}));
    assert!(client.comes("data: "));
    drop(client);
    let found = spans(&collector, 5);
    let root = named(&found, "text_completion tiny");
    assert_eq!((root.status, root.attribute("error.type")), (0, Some("aborted")));
    four.assert_idle();
}

#[test]
fn the_clients_decision_and_the_samplers_hold() {
    let collector = Collector::start(Manner::Takes);
    let body = json!({"prompt": "x", "max_tokens": 1});
    let header = |flag: &str| format!("traceparent: 00-{TRACE}-b7ad6b7169203331-{flag}\r\n");
    let server = server(&collector.url(), letters);
    ask(&server, "/v1/completions", &header("00"), &body).answer().ok();
    ask(&server, "/v1/completions", "traceparent: nonsense\r\n", &body).answer().ok();
    let found = spans(&collector, 5);
    assert_ne!(found[0].trace, TRACE, "the one that was not sampled left no span");
    let variables = [
        ("OTEL_TRACES_SAMPLER", "always_off"),
        ("OTEL_SERVICE_NAME", "front"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key"),
    ];
    let off = Server::with(traced(&collector.url(), &variables), limits(), letters);
    ask(&off, "/v1/completions", &header("01"), &body).answer().ok();
    let on = Server::with(traced(&collector.url(), &variables[1..]), limits(), letters);
    ask(&on, "/v1/completions", &header("01"), &body).answer().ok();
    spans(&collector, 10);
    let seen = collector.seen.lock().unwrap();
    assert_eq!(seen.resources.last().unwrap()["service.name"], "front");
    assert!(seen.heads.last().unwrap().contains("authorization: bearer key\r\n"), "{:?}", seen.heads.last());
}

#[test]
#[ignore = "soak"]
fn a_collector_that_hangs_is_gone_or_refuses_delays_nothing_and_drops_are_counted() {
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let timeout = [("OTEL_EXPORTER_OTLP_TIMEOUT", "300")];
    let hung = Collector::start(Manner::Hangs);
    let busy = Collector::start(Manner::Answers(503));
    let wrong = Collector::start(Manner::Answers(404));
    let partial = Collector::start(Manner::Rejects(2));
    let body = json!({"prompt": "x", "max_tokens": 1});
    let cases = [
        (hung.url(), Some(&hung), 5, 3),
        (format!("http://{gone}"), None, 5, 3),
        (busy.url(), Some(&busy), 5, 3),
        // Sending these spans again would not help.
        (wrong.url(), Some(&wrong), 5, 1),
        (partial.url(), Some(&partial), 2, 0),
    ];
    let given_up = |(url, exports, dropped, failures): (String, Option<&Collector>, u64, u64)| {
        let server = Server::with(traced(&url, &timeout), limits(), letters);
        let began = Instant::now();
        ask(&server, "/v1/completions", "", &body).answer().ok();
        eventually("the spans are given up", || server.metric("plimsoll_otlp_spans_dropped_total") == dropped);
        assert_eq!(server.metric("plimsoll_otlp_export_failures_total"), failures, "{url}");
        assert_eq!(server.metric("plimsoll_otlp_spans_exported_total"), 5 - dropped, "{url}");
        if let Some(collector) = exports {
            assert_eq!(collector.exports() as u64, failures.max(1), "{url}");
        }
        println!("{url}: given up after {:?}", began.elapsed());
    };
    let given_up = &given_up;
    std::thread::scope(|scope| cases.into_iter().for_each(|case| drop(scope.spawn(move || given_up(case)))));
}

#[test]
fn a_full_queue_drops_spans_and_no_request_waits_for_a_collector_that_hangs() {
    let collector = Collector::start(Manner::Hangs);
    let server = server(&collector.url(), letters);
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let request = crate::common::post("/v1/completions", &body);
    // The exporter holds a batch, and the queue 512 records.
    let mut client = server.connect();
    let mut slowest = Duration::ZERO;
    for _ in 0..700 {
        let began = Instant::now();
        client.write(&request);
        client.answer().ok();
        slowest = slowest.max(began.elapsed());
    }
    let dropped = server.metric("plimsoll_otlp_spans_dropped_total");
    assert!((100 * 5..=700 * 5).contains(&dropped), "{dropped}");
    assert!(slowest < Duration::from_secs(5), "an export lasts 10 s, a request {slowest:?}");
    collector.becomes(Manner::Takes);
}

#[test]
fn a_server_that_ends_exports_what_is_left() {
    let collector = Collector::start(Manner::Takes);
    let server = server(&collector.url(), letters);
    server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1})).ok();
    server.shut_down();
    assert!(server.wait_for_end(Duration::from_secs(30)));
    assert_eq!(collector.spans().len(), 5);
}
