//! Loads that no request waits for, and models at a shutdown.

use super::*;

#[test]
fn loads_have_the_times_that_the_documents_name() {
    let default = ServerConfig::default();
    let times = [default.load_linger, default.load_checkpoint_timeout];
    assert_eq!(times, [6, 10].map(Duration::from_secs), "SPECIFICATION.md and docs/models-and-formats.md name them");
}

#[test]
fn a_drain_lets_running_answers_end_and_takes_nothing_new() {
    let patient = ServerConfig { drain_deadline: PATIENCE, ..config() };
    let slow = Model { takes: Duration::from_millis(800), ..model("slow", 5) };
    let (server, fake) = start(vec![model("a", 3), slow, model("never", 1)], patient);
    let body = json!({"model": "a", "prompt": [1], "stream": true, "max_tokens": 100});
    let mut running = server.send(post("/v1/completions", &body.to_string()));
    running.until("data: ");
    let accepted = json!({"model": "slow", "prompt": "x", "max_tokens": 2});
    let mut accepted = server.send(post("/v1/completions", &accepted.to_string()));
    eventually("it is being loaded", || states(&server)[1] == "slow loading");
    let waiting = json!({"model": "never", "prompt": "x"});
    let mut waiting = server.send(post("/v1/completions", &waiting.to_string()));
    eventually("two are being answered", || server.metric("plimsoll_http_connections") >= 4);
    server.shut_down();
    running.until("[DONE]");
    assert_eq!(accepted.answer().ok()["usage"]["completion_tokens"], 2, "what had begun comes to its end");
    let error = waiting.answer().error(503);
    assert!(error["message"].as_str().unwrap().contains("shutting down"), "{error}");
    assert!(server.wait_for_end(PATIENCE));
    assert!(fake.loaded().is_empty() && fake.loads.load(Ordering::Acquire) == 2, "{:?}", fake.loaded());
    let engines = fake.engines.lock().unwrap();
    assert!(engines.iter().all(|(_, engine, _)| engine.stopped()));
}

#[test]
fn abandoned_load_is_cancelled() {
    let minute = Model { takes: Duration::from_secs(60), ..model("minute", 5) };
    let (server, fake) = start(vec![model("a", 5), minute], config());
    let body = json!({"model": "minute", "prompt": "x", "stream": true}).to_string();
    let clients = [0, 1].map(|_| server.send(post("/v1/completions", &body)));
    eventually("it is being loaded", || states(&server)[1] == "minute loading");
    let began = Instant::now();
    let [first, second] = clients;
    drop(first);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(states(&server)[1], "minute loading", "the other still waits for it");
    drop(second);
    eventually("it is given up", || states(&server)[1] == "minute unloaded");
    assert!(
        began.elapsed() > Duration::from_millis(1700),
        "clients that try again find it under way: {:?}",
        began.elapsed()
    );
    let metrics = server.get("/metrics");
    for line in ["plimsoll_models_load_cancelled_total 1\n", "plimsoll_models_failed_total 0\n"] {
        assert!(metrics.ok_text().contains(line), "{line}: {}", metrics.body);
    }
    // The load's turn is over, so other models answer. A load that was given up is no failure: the next request loads it again.
    ask(&server, "a").ok();
    let again = server.send(post("/v1/completions", &body));
    eventually("it is tried anew", || states(&server)[1] == "minute loading");
    eventually("the load has begun", || fake.loads.load(Ordering::Acquire) == 3);
    drop(again);
    server.shut_down();
    assert!(server.wait_for_end(PATIENCE));
    assert_eq!(fake.given_up.load(Ordering::Acquire), 2, "nor is it left behind");
}

#[test]
fn abandoned_fetch_delays_no_request() {
    let far = Model { fetched: Duration::from_secs(60), ..model("far", 5) };
    let (server, fake) = start(vec![model("a", 5), far], config());
    let client = server.send(post("/v1/completions", &json!({"model": "far", "prompt": "x"}).to_string()));
    eventually("it is being fetched", || fake.fetches[0].load(Ordering::Acquire) == 1);
    drop(client);
    // The turn of `a` comes when the fetch is given up.
    let began = Instant::now();
    ask(&server, "a").ok();
    let took = began.elapsed();
    assert!(took > Duration::from_millis(500) && took < Duration::from_secs(40), "{took:?}");
    eventually("the fetch has heard of it", || fake.fetches[1].load(Ordering::Acquire) == 1);
    assert_eq!((fake.loads.load(Ordering::Acquire), &states(&server)[1][..]), (1, "far unloaded"));
    let metrics = server.get("/metrics");
    for line in ["plimsoll_models_load_cancelled_total 1\n", "plimsoll_models_failed_total 0\n"] {
        assert!(metrics.ok_text().contains(line), "{line}: {}", metrics.body);
    }
}

/// A server with a model that takes long to load, and clients that wait for it: a stream and a whole answer.
fn waiting_for(deaf: bool) -> (Server, Arc<Fake>, [common::Client; 2]) {
    let takes = Duration::from_secs(if deaf { 20 } else { 60 });
    let minute = Model { takes, deaf, ..model("minute", 5) };
    let (server, fake) = start(vec![minute], ServerConfig { keep_alive: Duration::from_millis(100), ..config() });
    let clients = [true, false].map(|stream| {
        let body = json!({"model": "minute", "prompt": "x", "stream": stream});
        server.send(post("/v1/completions", &body.to_string()))
    });
    eventually("both wait", || part(&server.get("/v1/status").ok(), "minute")["waiting"] == 2);
    (server, fake, clients)
}

#[test]
fn a_drain_gives_a_load_its_time_and_no_more() {
    let (server, fake, [mut stream, mut whole]) = waiting_for(false);
    stream.until(": waiting\n\n");
    let began = Instant::now();
    server.shut_down();
    let rest = stream.until("data: [DONE]\n\n");
    assert!(rest.contains("\"code\":\"unavailable\"") && rest.contains("shutting down"), "{rest}");
    assert!(whole.answer().error(503)["message"].as_str().unwrap().contains("shutting down"));
    assert!(server.wait_for_end(PATIENCE));
    // The load has 600 ms; then it is told to end, and the server waits for it.
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(600), "{took:?}");
    assert_eq!(fake.given_up.load(Ordering::Acquire), 1);
}

#[test]
fn drain_does_not_wait_for_an_abandoned_load() {
    // A load whose client has disconnected gets no time. One success of three is enough, since a machine may stand still for a while.
    let quick = (0..3).any(|_| {
        let patient = ServerConfig { drain_deadline: PATIENCE, ..config() };
        let minute = Model { takes: PATIENCE, ..model("minute", 5) };
        let (server, fake) = start(vec![minute], patient);
        let client = server.send(post("/v1/completions", &json!({"model": "minute", "prompt": "x"}).to_string()));
        eventually("it is being loaded", || states(&server) == ["minute loading"]);
        drop(client);
        server.shut_down();
        server.wait_for_end(Duration::from_secs(5)) && fake.given_up.load(Ordering::Acquire) == 1
    });
    assert!(quick, "the deadline is for those who wait");
}

#[test]
fn load_without_checkpoints_delays_others_briefly() {
    let (server, fake, clients) = waiting_for(true);
    drop(clients);
    server.shut_down();
    let began = Instant::now();
    assert!(server.wait_for_end(PATIENCE));
    // The load is told to end at once: no request waits for it.
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    assert!(fake.engines.lock().unwrap().is_empty(), "it is left behind after one second of twenty");
}
