//! Several models by name, over scripted engines: loaded by the first request, unloaded when idle or when another model
//! needs the memory.

mod drain;
mod ollama;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use plimsoll_engine::report::LedgerReport;
use plimsoll_engine::testing::{Observed, Script, Step, letters, limits, scripted};
use plimsoll_engine::{Cancel, EngineHandle, FinishReason, Request};
use plimsoll_server::{Listed, LoadError, Loader, Served, ServerConfig, serve_models};
use serde_json::{Value, json};

use crate::common::{self, Answer, PATIENCE, Server, TEMPLATE, config, eventually, post, served};

/// Bytes that the models may take together.
const LINE: u64 = 10;

/// One model of a test.
#[derive(Clone)]
struct Model {
    name: &'static str,
    bytes: u64,
    takes: Duration,
    /// Duration of the download of its files.
    fetched: Duration,
    fails: bool,
    /// The load never checks whether it is to be given up.
    deaf: bool,
    idle_after: Option<Duration>,
}

fn model(name: &'static str, bytes: u64) -> Model {
    Model { name, bytes, takes: Duration::ZERO, fetched: Duration::ZERO, fails: false, deaf: false, idle_after: None }
}

/// A loader of scripted engines that counts the bytes they would take.
struct Fake {
    models: Vec<Model>,
    engines: Mutex<Vec<(usize, EngineHandle, Arc<Observed>)>>,
    loads: AtomicU64,
    /// Loads that were given up.
    given_up: AtomicU64,
    /// Fetches that were started, and fetches that were given up.
    fetches: [AtomicU64; 2],
}

impl Fake {
    fn loaded(&self) -> Vec<&'static str> {
        let engines = self.engines.lock().unwrap();
        engines.iter().filter(|(_, engine, _)| !engine.draining()).map(|(index, ..)| self.models[*index].name).collect()
    }

    fn aborted(&self) -> u64 {
        self.sum(|observed| &observed.aborted)
    }

    /// Returns the requests that engines run at the moment.
    fn active(&self) -> u64 {
        self.sum(|observed| &observed.active)
    }

    fn sum(&self, of: fn(&Observed) -> &AtomicU64) -> u64 {
        self.engines.lock().unwrap().iter().map(|(.., observed)| of(observed).load(Ordering::Acquire)).sum()
    }
}

impl Loader for Fake {
    fn needed(&self, index: usize, cancel: &Cancel) -> Result<u64, LoadError> {
        self.fetches[0].fetch_add(1, Ordering::AcqRel);
        let until = Instant::now() + self.models[index].fetched;
        while Instant::now() < until {
            if cancel.is_cancelled() {
                self.fetches[1].fetch_add(1, Ordering::AcqRel);
                return Err(LoadError::Cancelled);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        match self.models[index].bytes {
            bytes if bytes > LINE => Err(LoadError::TooLarge(format!("it needs {bytes} B"))),
            bytes => Ok(bytes),
        }
    }

    fn room(&self) -> u64 {
        let engines = self.engines.lock().unwrap();
        let held = engines.iter().filter(|(_, engine, _)| !engine.draining());
        LINE - held.map(|(index, ..)| self.models[*index].bytes).sum::<u64>()
    }

    fn load(&self, index: usize, cancel: &Cancel) -> Result<Served, LoadError> {
        let model = &self.models[index];
        assert!(model.bytes <= self.room(), "there is room before a load begins");
        self.loads.fetch_add(1, Ordering::AcqRel);
        let until = Instant::now() + model.takes;
        while Instant::now() < until {
            if cancel.is_cancelled() && !model.deaf {
                self.given_up.fetch_add(1, Ordering::AcqRel);
                return Err(LoadError::Cancelled);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if model.fails {
            return Err(LoadError::Failed("its weights are broken".into()));
        }
        let (served, observed) = served(TEMPLATE, limits(), script, &[model.name, &format!("{}-alias", model.name)]);
        self.engines.lock().unwrap().push((index, served.engine.clone(), observed));
        Ok(served)
    }

    fn unload(&self, engine: EngineHandle) -> bool {
        engine.stop();
        let until = Instant::now() + Duration::from_secs(5);
        while !engine.stopped() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        engine.stopped()
    }

    fn report(&self, engines: &[&EngineHandle]) -> LedgerReport {
        match engines.first() {
            Some(engine) => engine.report(),
            None => self.shared_report(engines),
        }
    }

    fn shared_report(&self, _: &[&EngineHandle]) -> LedgerReport {
        scripted(limits(), letters).handle.report()
    }
}

/// Generates letters; a prompt of one token with the id 1 takes two seconds.
fn script(request: &Request) -> Script {
    if request.prompt != [1] {
        return letters(request);
    }
    let slow = (0..20).flat_map(|_| [Step::Token(97, "a".into()), Step::Wait(Duration::from_millis(100))]);
    Box::new(slow.chain([Step::Finish(FinishReason::Length, None)]))
}

fn start(models: Vec<Model>, config: ServerConfig) -> (Server, Arc<Fake>) {
    let listed = models.iter().map(|model| Listed {
        names: vec![model.name.into(), format!("{}-alias", model.name)],
        idle_after: model.idle_after,
        grammar_bytes: 8 << 20,
    });
    let listed: Vec<Listed> = listed.collect();
    let fake = Arc::new(Fake {
        models,
        engines: Mutex::default(),
        loads: AtomicU64::new(0),
        given_up: AtomicU64::new(0),
        fetches: Default::default(),
    });
    let loader: Arc<dyn Loader> = Arc::clone(&fake) as Arc<dyn Loader>;
    let none = scripted(limits(), letters);
    let server = Server::around(none.handle, none.observed, config, move |listener, config, told| {
        serve_models(listener, listed, loader, config, told)
    });
    (server, fake)
}

fn ask(server: &Server, model: &str) -> Answer {
    server.post("/v1/completions", &json!({"model": model, "prompt": "x", "max_tokens": 2}))
}

fn states(server: &Server) -> Vec<String> {
    let list = server.get("/v1/models").ok();
    let names = list["data"].as_array().unwrap().iter().filter(|model| model["id"] == model["root"]);
    names.map(|model| format!("{} {}", model["id"].as_str().unwrap(), model["state"].as_str().unwrap())).collect()
}

/// Returns one model's part of the page at `/v1/status` or `/v1/memory`.
fn part(page: &Value, name: &str) -> Value {
    page["models"].as_array().unwrap().iter().find(|part| part["model"] == name).unwrap().clone()
}

#[test]
fn models_are_loaded_when_they_are_asked_for_by_any_of_their_names() {
    let (server, fake) = start(vec![model("a", 4), model("b", 5)], config());
    assert_eq!(states(&server), ["a unloaded", "b unloaded"]);
    eventually("healthy without a model", || server.get("/health").status == 200 && server.get("/ready").status == 200);
    assert_eq!(ask(&server, "b-alias").ok()["model"], "b-alias");
    assert_eq!(states(&server), ["a unloaded", "b loaded"]);
    // A request without a model, or for `default`, goes to the first model.
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).ok()["model"], "a");
    ask(&server, "default").ok();
    assert_eq!((fake.loads.load(Ordering::Acquire), fake.loaded()), (2, vec!["b", "a"]));
    let error = ask(&server, "c").error(404);
    assert_eq!(error["code"], "model_not_found");
    assert!(error["message"].as_str().unwrap().contains("`a`, `b`"), "{error}");
    assert_eq!(server.get("/v1/models/c").status, 404);
    let one = server.get("/v1/models/b-alias").ok();
    assert_eq!((&one["root"], &one["max_model_len"]), (&json!("b"), &json!(512)));
    // Every API finds its model; the handler reports other errors of a body.
    let messages = json!([{"role": "user", "content": "x"}]);
    let said = server.post("/v1/messages", &json!({"model": "b", "max_tokens": 2, "messages": messages})).ok();
    assert_eq!(said["model"], "b");
    server.post("/v1/responses", &json!({"model": "b", "input": "x", "max_output_tokens": 2})).ok();
    server.post("/tokenize", &json!({"model": "a", "prompt": "x"})).ok();
    assert_eq!(
        server.post("/v1/completions", &json!({"model": "a", "prompt": "x", "nonsense": 1})).error(400)["param"],
        "nonsense"
    );
    let metrics = server.get("/metrics");
    assert!(metrics.ok_text().contains("plimsoll_requests_refused_invalid_total{model=\"a\"} 1\n"), "{}", metrics.body);
    assert_eq!(server.post_text("/v1/completions", "{").error(400)["code"], "invalid_json");
    assert_eq!(server.post("/v1/completions", &json!({"model": 7, "prompt": "x"})).error(400)["param"], "model");
}

#[test]
fn the_one_not_used_for_longest_goes_when_another_needs_its_room() {
    let models = vec![model("six", 6), model("four", 4), model("five", 5), model("eleven", 11)];
    let (server, fake) = start(models, config());
    ask(&server, "six").ok();
    ask(&server, "four").ok();
    assert_eq!(fake.loaded(), ["six", "four"]);
    ask(&server, "five").ok();
    assert_eq!(fake.loaded(), ["four", "five"], "only who had to");
    // A model that can never fit is refused, and no model is unloaded for it.
    let error = ask(&server, "eleven").error(400);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_does_not_fit"), &json!("model")));
    assert_eq!(fake.loaded(), ["four", "five"]);
    // A model in use stays loaded.
    let body = json!({"model": "five", "prompt": [1], "stream": true, "max_tokens": 100});
    let mut busy = server.send(post("/v1/completions", &body.to_string()));
    busy.until("data: ");
    let refused = ask(&server, "six");
    let error = refused.error(503);
    assert_eq!(error["code"], "model_has_no_room");
    assert!(refused.header("retry-after").is_some());
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("needs 6 B") && message.contains("5 B are left") && message.contains("`five` (5 B)"),
        "{message}"
    );
    assert_eq!(fake.loaded(), ["four", "five"], "nobody goes in vain");
    busy.until("[DONE]");
    eventually("it is its turn", || ask(&server, "six").status == 200);
    assert_eq!(fake.loaded(), ["four", "six"], "five was idle");
    let page = server.get("/v1/memory").ok();
    assert_eq!(part(&page, "five")["state"], "unloaded");
    assert_eq!((&part(&page, "six")["loads"], &part(&page, "six")["planned_bytes"]), (&json!(2), &json!(6)));
}

#[test]
fn requests_wait_for_one_load_of_a_model() {
    let slow = Model { takes: Duration::from_millis(2500), ..model("slow", 5) };
    let patient = ServerConfig { keep_alive: Duration::from_millis(200), ..config() };
    let (server, fake) = start(vec![model("quick", 5), slow], patient);
    std::thread::scope(|scope| {
        let whole = scope.spawn(|| ask(&server, "slow").ok());
        let streams = ["/v1/completions", "/v1/messages", "/v1/responses"].map(|path| {
            let server = &server;
            scope.spawn(move || {
                let body = match path {
                    "/v1/completions" => json!({"model": "slow", "prompt": "x", "max_tokens": 2, "stream": true}),
                    "/v1/messages" => json!({"model": "slow", "max_tokens": 2, "stream": true,
                        "messages": [{"role": "user", "content": "x"}]}),
                    _ => json!({"model": "slow", "input": "x", "max_output_tokens": 2, "stream": true}),
                };
                let answer = server.post(path, &body);
                assert_eq!(answer.header("content-type"), Some("text/event-stream; charset=utf-8"));
                let text = answer.ok_text().to_owned();
                assert!(text.starts_with(": waiting\n\n: waiting\n\n"), "{text}");
                text
            })
        });
        eventually("it is being loaded", || states(&server).contains(&"slow loading".into()));
        assert_eq!(whole.join().unwrap()["usage"]["completion_tokens"], 2);
        let [completion, message, response] = streams.map(|stream| stream.join().unwrap());
        assert!(completion.ends_with("data: [DONE]\n\n"), "{completion}");
        assert!(message.contains("event: message_stop"), "{message}");
        assert!(response.contains("response.completed") || response.contains("response.incomplete"), "{response}");
    });
    assert_eq!(fake.loads.load(Ordering::Acquire), 1);
    eventually("nobody uses it", || part(&server.get("/v1/status").ok(), "slow")["in_use"] == 0);
}

#[test]
fn failed_load_is_reported_and_harms_no_other_model() {
    let broken = Model { fails: true, takes: Duration::from_millis(1500), ..model("broken", 5) };
    let (server, fake) = start(vec![model("a", 5), broken], config());
    let mut other = server.send(post(
        "/v1/completions",
        &json!({"model": "a", "prompt": [1], "stream": true, "max_tokens": 100}).to_string(),
    ));
    other.until("data: ");
    let asking = |path: &str, body: Value| {
        let (path, body) = (path.to_owned(), body.to_string());
        let mut client = server.send(post(&path, &body));
        std::thread::spawn(move || client.answer())
    };
    let chat = json!([{"role": "user", "content": "x"}]);
    let whole = asking("/v1/completions", json!({"model": "broken", "prompt": "x"}));
    let stream = asking("/v1/chat/completions", json!({"model": "broken", "messages": chat, "stream": true}));
    let message = asking("/v1/messages", json!({"model": "broken", "max_tokens": 2, "messages": chat, "stream": true}));
    let response = asking("/v1/responses", json!({"model": "broken", "input": "x", "stream": true}));
    let error = whole.join().unwrap().error(500);
    assert_eq!(error["code"], "model_load_failed");
    assert!(error["message"].as_str().unwrap().contains("weights are broken"), "{error}");
    let text = stream.join().unwrap();
    assert!(
        text.ok_text().contains("\"code\":\"model_load_failed\"") && text.body.ends_with("data: [DONE]\n\n"),
        "{text:?}"
    );
    let text = message.join().unwrap();
    assert!(
        text.ok_text().contains("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\""),
        "{text:?}"
    );
    let text = response.join().unwrap();
    assert!(
        text.ok_text().contains("event: error\ndata: {\"type\":\"error\",\"code\":\"model_load_failed\""),
        "{text:?}"
    );
    // Requests that waited for the failed load get the same error without another load.
    assert_eq!(fake.loads.load(Ordering::Acquire), 2, "`a`, and one failure");
    other.until("[DONE]");
    assert_eq!(states(&server), ["a loaded", "broken unloaded"]);
    let metrics = server.get("/metrics");
    assert!(metrics.ok_text().contains("plimsoll_models_failed_total 1\n"), "{}", metrics.body);
    ask(&server, "a").ok();
}

#[test]
fn idle_models_are_unloaded_and_come_back() {
    let idle = Model { idle_after: Some(Duration::from_millis(300)), ..model("idle", 5) };
    let (server, fake) = start(vec![idle, model("stays", 5)], config());
    ask(&server, "idle").ok();
    ask(&server, "stays").ok();
    // Twenty pieces in two seconds: longer than the model may be idle.
    let body = json!({"model": "idle", "prompt": [1], "stream": true, "max_tokens": 100});
    let text = server.post("/v1/completions", &body);
    assert!(text.ok_text().ends_with("[DONE]\n\n"), "a model in use stays: {}", text.body);
    eventually("it goes", || states(&server)[0] == "idle unloaded");
    assert_eq!(fake.loaded(), ["stays"]);
    ask(&server, "idle").ok();
    assert_eq!(fake.loaded(), ["stays", "idle"]);
    let metrics = server.get("/metrics");
    assert!(metrics.ok_text().contains("plimsoll_models_loaded_total 3\n"), "{}", metrics.body);
}

#[test]
fn clients_that_go_leave_no_use_behind() {
    // Idle for longer than an engine takes to notice a disconnect, also on a busy machine. Unloading ends a request that the engine has not
    // noticed.
    let slow =
        Model { takes: Duration::from_millis(700), idle_after: Some(Duration::from_secs(1)), ..model("slow", 5) };
    let (server, fake) = start(vec![slow], config());
    for stream in [false, true] {
        // The client disconnects while the model is loaded, and while it answers.
        let body = json!({"model": "slow", "prompt": [1], "max_tokens": 100, "stream": stream}).to_string();
        let client = server.send(post("/v1/completions", &body));
        eventually("it is being loaded", || states(&server) == ["slow loading"]);
        drop(client);
        eventually("what has begun goes on for a moment", || states(&server) == ["slow loaded"]);
        let client = server.send(post("/v1/completions", &body));
        // A model counts as in use a moment before its engine has the request.
        eventually("it answers", || fake.active() == 1);
        assert_eq!(part(&server.get("/v1/status").ok(), "slow")["in_use"], 1);
        drop(client);
        eventually("and is unloaded, since nobody uses it", || states(&server) == ["slow unloaded"]);
    }
    assert!(fake.aborted() >= 2, "{}", fake.aborted());
}

/// Asserts that closed objects have the members of their schema and no others, however deep.
fn fits(document: &Value, schema: &str, value: &Value) {
    let schema = &document["components"]["schemas"][schema];
    let (Some(known), Some(members)) = (schema["properties"].as_object(), value.as_object()) else { return };
    if schema["additionalProperties"] == false {
        let strange: Vec<_> = members.keys().filter(|name| !known.contains_key(*name)).collect();
        assert!(strange.is_empty(), "{strange:?} in {value}");
        let required = schema["required"].as_array().unwrap();
        assert!(required.iter().all(|name| members.contains_key(name.as_str().unwrap())), "{required:?} {value}");
    }
    for (name, member) in members {
        let kind = &known[name];
        let named = |kind: &Value| kind["$ref"].as_str().and_then(|name| name.rsplit('/').next()).map(str::to_owned);
        if let Some(inner) = named(kind) {
            fits(document, &inner, member);
        } else if let (Some(inner), Some(list)) = (named(&kind["items"]), member.as_array()) {
            list.iter().for_each(|item| fits(document, &inner, item));
        }
    }
}

#[test]
fn pages_carry_the_models_names() {
    let (server, _) = start(vec![model("a", 4), model("b", 5)], config());
    ask(&server, "a").ok();
    ask(&server, "b").ok();
    let body = json!({"model": "b", "prompt": [1], "stream": true, "max_tokens": 100});
    let mut client = server.send(post("/v1/completions", &body.to_string()));
    client.until("data: ");
    let status = server.get("/v1/status").ok();
    assert_eq!(status["requests"][0]["model"], "b", "{status}");
    assert_eq!((&part(&status, "b")["in_use"], &part(&status, "a")["in_use"]), (&json!(1), &json!(0)));
    let memory = server.get("/v1/memory").ok();
    assert!(part(&memory, "a")["ledger"]["pools"]["requests"]["running_max"] == 8, "{memory}");
    assert!(memory["pools"]["http_bytes"]["total"].as_u64() > Some(0));
    let metrics = server.get("/metrics");
    let text = metrics.ok_text();
    for line in ["plimsoll_requests_running{model=\"a\"} 0", "plimsoll_requests_running{model=\"b\"} 1"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let mut described: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let all = described.len();
    described.sort_unstable();
    described.dedup();
    assert_eq!(described.len(), all, "every family is described once");
    let mut open = server
        .send("GET /metrics HTTP/1.1\r\nhost: localhost\r\naccept: application/openmetrics-text;version=1.0.0\r\n\r\n");
    let open = open.answer();
    assert!(open.body.ends_with("# EOF\n") && open.body.matches("# EOF").count() == 1);
    // The document lists the routes of several models.
    let document = server.get("/openapi.json").ok();
    assert!(document["paths"]["/tokenizer_info"].is_null());
    for (path, schema) in
        [("/v1/models", "ModelList"), ("/v1/status", "Status"), ("/v1/memory", "Memory"), ("/v1/cache", "Caches")]
    {
        let named =
            &document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"];
        assert_eq!(named, &json!(format!("#/components/schemas/{schema}")));
        fits(&document, schema, &server.get(path).ok());
    }
    let caches = server.send("DELETE /v1/cache HTTP/1.1\r\nhost: localhost\r\n\r\n").answer().ok();
    assert_eq!(caches["models"].as_array().unwrap().len(), 2, "{caches}");
    assert_eq!(server.get("/v1/cache").ok()["models"][1]["model"], "b");
}
