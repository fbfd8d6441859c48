//! Operators' routes: running requests, their cancellation, the cache.

use std::time::Duration;

use plimsoll_engine::Request;
use plimsoll_engine::testing::{Step, letters, limits};
use serde_json::{Value, json};

use crate::common::{self, Client, Server, config, eventually, post};

type Steps = Box<dyn Iterator<Item = Step> + Send>;

/// One token every five milliseconds, for ever.
fn endless(_: &Request) -> Steps {
    Box::new((0..).flat_map(|_| [Step::Token(97, "a".into()), Step::Wait(Duration::from_millis(5))]))
}

fn silent(_: &Request) -> Steps {
    Box::new(std::iter::empty())
}

fn with_id(path: &str, id: &str, body: &Value) -> String {
    post(path, &body.to_string()).replacen("host: localhost", &format!("host: localhost\r\nx-request-id: {id}"), 1)
}

fn delete(server: &Server, path: &str) -> common::Answer {
    server.send(format!("DELETE {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).answer()
}

fn rows(server: &Server) -> Vec<Value> {
    server.get("/v1/status").ok()["requests"].as_array().unwrap().clone()
}

/// Returns the id in the first event of a stream.
fn stream_id(client: &mut Client) -> String {
    client.until("\"id\":\"");
    client.until("\"").trim_end_matches('"').to_owned()
}

#[test]
fn status_shows_every_request_with_its_phase_and_what_it_holds() {
    let server = Server::start(|request| if request.max_tokens == 7 { silent(request) } else { endless(request) });
    assert!(rows(&server).is_empty());
    let waiting = server.send(with_id("/v1/completions", "mine", &json!({"prompt": "abc", "max_tokens": 7})));
    eventually("it is there", || rows(&server).len() == 1);
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "stream": true, "n": 2});
    let mut talking = server.send(post("/v1/chat/completions", &chat.to_string()));
    let id = stream_id(&mut talking);
    eventually("both are there and one talks", || {
        rows(&server).len() == 2 && rows(&server)[1]["generated_tokens"].as_u64() > Some(4)
    });
    let page = server.get("/v1/status").ok();
    let [first, second] = &page["requests"].as_array().unwrap()[..] else { panic!("{page}") };
    assert_eq!((&first["request_id"], &first["endpoint"]), (&json!("mine"), &json!("/v1/completions")));
    assert_eq!(
        (&first["phase"], &first["prompt_tokens"], &first["stream"]),
        (&json!("prefill"), &json!(3), &json!(false))
    );
    assert_eq!(first["tokens_per_second"], Value::Null);
    assert_eq!((&second["id"], &second["phase"], &second["choices"]), (&json!(id), &json!("decode"), &json!(2)));
    assert!(second["tokens_per_second"].as_f64().unwrap() > 1.0, "{second}");
    assert!(first["memory_bytes"].as_u64().unwrap() >= 1280, "a request is never free: {first}");
    assert!(second["age_seconds"].as_f64().unwrap() < first["age_seconds"].as_f64().unwrap());
    assert_eq!((&page["totals"]["answering"], &page["degradation"]["level"]), (&json!(2), &json!("calm")));
    drop((waiting, talking));
    eventually("nothing is left", || rows(&server).is_empty());
    server.assert_idle();
}

#[test]
fn a_stream_is_cancelled_by_the_id_in_its_answer_and_ends_with_its_terminator() {
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let server = Server::start(endless);
        let body = match path.contains("chat") {
            true => json!({"messages": [{"role": "user", "content": "x"}], "stream": true}),
            false => json!({"prompt": "x", "max_tokens": 500, "stream": true}),
        };
        let mut client = server.send(post(path, &body.to_string()));
        let head = client.until("\r\n\r\n");
        assert!(head.contains("x-request-id"), "{head}");
        let id = stream_id(&mut client);
        let answer = delete(&server, &format!("/v1/requests/{id}")).ok();
        assert_eq!((&answer["id"], &answer["cancelled"]), (&json!(id), &json!(1)));
        let rest = String::from_utf8(chunked_rest(&mut client)).unwrap();
        let last = rest.rsplit("data: ").nth(1).unwrap();
        let error: Value = serde_json::from_str(last.trim()).unwrap();
        assert_eq!(error["error"]["code"], "request_cancelled", "{error}");
        assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
        eventually("the engine knows", || server.aborted() == 1);
        assert_eq!(delete(&server, &format!("/v1/requests/{id}")).error(404)["code"], "request_not_found");
        server.assert_idle();
    }
}

/// Reads the rest of a chunked body, from the middle of a chunk.
fn chunked_rest(client: &mut Client) -> Vec<u8> {
    client.until("\r\n");
    client.chunks()
}

#[test]
fn whole_answers_are_cancelled_by_the_id_in_the_head() {
    let server = Server::start(silent);
    let body = json!({"prompt": "x", "n": 3});
    let mut clients = [0, 1].map(|_| server.send(with_id("/v1/completions", "job-7", &body)));
    let mut other = server.send(with_id("/v1/completions", "job-8", &json!({"prompt": "x"})));
    eventually("all run", || server.engine.reserved().1 == 7);
    assert_eq!(delete(&server, "/v1/requests/job-7").ok()["cancelled"], 2);
    for client in &mut clients {
        let answer = client.answer();
        assert_eq!(answer.header("x-request-id"), Some("job-7"));
        assert_eq!(answer.error(499)["code"], "request_cancelled");
    }
    eventually("the engine has let go of six", || server.aborted() == 6);
    assert_eq!(rows(&server).len(), 1);
    assert_eq!(delete(&server, "/v1/requests/job-8").ok()["cancelled"], 1);
    other.answer().error(499);
    delete(&server, "/v1/requests/job-8").error(404);
    server.get("/v1/requests/job-8").error(405);
    let metrics = server.get("/metrics");
    let ended = "plimsoll_generations_ended_total{api=\"completions\",reason=\"cancelled\"} 3";
    assert!(metrics.ok_text().contains(ended), "{}", metrics.body);
    server.assert_idle();
}

/// A request is cancelled even if its client does not read.
#[test]
fn a_client_that_does_not_read_is_cancelled_all_the_same() {
    let mut roomy = limits();
    roomy.max_req_total_len = 200_000;
    roomy.host_bytes = 1 << 30;
    let server = Server::with(config(), roomy, |_| Box::new((0..).map(|_| Step::Token(97, "a".repeat(2000)))));
    let body = json!({"prompt": "x", "max_tokens": 100_000, "stream": true});
    let mut client = server.send(with_id("/v1/completions", "slow", &body));
    client.until("data: ");
    // The wait is long enough for every buffer in between to fill.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.aborted(), 0);
    assert_eq!(delete(&server, "/v1/requests/slow").ok()["cancelled"], 1);
    eventually("the engine has let go", || server.aborted() == 1);
    // A client that continues to read gets the end of the stream.
    let rest = client.until("data: [DONE]\n\n");
    assert!(rest.contains("request_cancelled"));
    server.assert_idle();
}

#[test]
fn the_list_of_running_requests_is_bounded_and_empties() {
    let tight = plimsoll_server::ServerConfig { max_connections: 3, ..config() };
    let server = Server::with(tight, limits(), letters);
    for _ in 0..50 {
        server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 3})).ok();
    }
    assert!(rows(&server).is_empty());
    server.assert_idle();
}

#[test]
fn cache_is_shown_and_cleared() {
    let server = Server::start(letters);
    let page = server.get("/v1/cache").ok();
    for field in ["enabled", "entries", "pages", "bytes", "hit_tokens", "miss_tokens", "evicted_pages", "page_tokens"] {
        assert!(page.get(field).is_some(), "{field}: {page}");
    }
    let cleared = delete(&server, "/v1/cache").ok();
    assert_eq!((&cleared["object"], &cleared["after"]["pages"]), (&json!("cache.cleared"), &json!(0)));
    // An engine that has ended is reported as such.
    server.engine.stop();
    eventually("it has ended", || server.engine.stopped());
    delete(&server, "/v1/cache").error(503);
}

#[test]
fn gateways_learn_what_is_served_and_how_much_there_is_to_do() {
    let server = Server::start(|request| if request.max_tokens == 1 { letters(request) } else { endless(request) });
    let (info, model) = (server.get("/server_info").ok(), server.get("/model_info").ok());
    assert_eq!((&info, &model), (&server.get("/get_server_info").ok(), &server.get("/get_model_info").ok()));
    let bounds = limits();
    assert_eq!(info["context_length"], json!(bounds.max_req_total_len));
    assert_eq!(info["max_running_requests"], json!(bounds.running_max_req_size));
    assert_eq!((&info["page_size"], &info["kv_events"], &info["status"]), (&json!(16), &json!(false), &json!("ready")));
    let name = &server.get("/v1/models").ok()["data"][0]["id"];
    assert_eq!((&info["served_model_name"], &model["served_model_name"]), (name, name));
    assert_eq!(model["is_generation"], json!(true));
    assert_eq!((&model["has_image_understanding"], &model["has_audio_understanding"]), (&json!(false), &json!(false)));
    let idle = server.get("/v1/loads").ok();
    assert_eq!((&idle["dp_rank_count"], &idle["aggregate"]["total_reqs"]), (&json!(1), &json!(0)));
    assert_eq!(idle["loads"][0]["token_usage"], json!(0.0));
    assert_eq!(server.get("/get_load").json()[0]["num_reqs"], json!(0));
    // Fields that gateways add to a client's fields are accepted if they request nothing.
    let beside = json!({"prompt": "a", "max_tokens": 1, "no_stop_trim": false, "return_hidden_states": false});
    server.post("/v1/completions", &beside).ok();
    let asking = json!({"prompt": "a", "max_tokens": 1, "return_hidden_states": true});
    assert_eq!(server.post("/v1/completions", &asking).error(400)["param"], "return_hidden_states");
    let mut talking = server.send(post("/v1/completions", r#"{"prompt": "x", "stream": true}"#));
    talking.until("data: ");
    eventually("it is counted", || server.get("/v1/loads").ok()["loads"][0]["num_running_reqs"] == 1);
    assert_eq!(server.get("/get_load").json()[0]["num_reqs"], json!(1));
}
