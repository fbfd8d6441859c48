//! `background: true`: the response is generated without a connection. It is read when it has ended, and its stream is resumed.

use plimsoll_engine::Request;
use plimsoll_server::UnknownFields;

use super::*;
use crate::common::{PATIENCE, endless};

const PATH: &str = "/v1/responses";

fn started(server: &Server, more: &Value) -> String {
    let mut body = json!({"background": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let response = create(server, &body);
    assert_eq!((&response["status"], &response["background"]), (&json!("queued"), &json!(true)), "{response}");
    response["id"].as_str().unwrap().to_owned()
}

fn look(server: &Server, id: &str) -> Value {
    server.get(&format!("{PATH}/{id}")).ok()
}

fn running(server: &Server) -> u64 {
    server.metric("plimsoll_responses_in_background")
}

/// A server slow enough that a client leaves before the end.
fn slow(text: &'static str, config: ServerConfig) -> Server {
    let script = move |_: &Request| -> Script {
        let letters =
            text.chars().flat_map(|c| [Step::Wait(Duration::from_millis(20)), Step::Token(97, c.to_string())]);
        Box::new(letters.chain([Step::Finish(FinishReason::Stop, None)]))
    };
    Server::over(PLAIN, config, limits(), script)
}

#[test]
fn response_is_made_without_its_client() {
    let server = slow("Hello there", config());
    let id = started(&server, &json!({"metadata": {"a": "b"}}));
    let first = look(&server, &id);
    assert!(["in_progress", "completed"].contains(&first["status"].as_str().unwrap()), "{first}");
    eventually("it is made", || look(&server, &id)["status"] == "completed");
    let response = look(&server, &id);
    assert_eq!(response["output"][0]["content"][0]["text"], "Hello there");
    assert_eq!((&response["background"], &response["metadata"]), (&json!(true), &json!({"a": "b"})));
    // The response can be continued, and has no events.
    create(&server, &json!({"previous_response_id": id, "input": "And?"}));
    assert!(prompt_text(&server).contains("[assistant]Hello there[user]And?"));
    let error = server.get(&format!("{PATH}/{id}?stream=true")).error(400);
    assert!(error["message"].as_str().unwrap().contains("no events to stream"), "{error}");
    server.get(&format!("{PATH}/resp_none?stream=true")).error(404);
    for (query, param) in [
        ("starting_after=1", "starting_after"),
        ("stream=yes", "stream"),
        ("stream=true&starting_after=x", "starting_after"),
        ("x=1", "x"),
    ] {
        assert_eq!(server.get(&format!("{PATH}/{id}?{query}")).error(400)["param"], param);
    }
    for more in [json!({"store": false}), json!({"background": "yes"})] {
        let mut body = ask(&json!({"background": true}));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post(PATH, &body).error(400);
    }
    assert_eq!(running(&server), 0);
    server.assert_idle();
}

#[test]
fn stream_is_resumed_where_it_broke_off() {
    let server = slow("Hello there", config());
    let mut client = server.send(post(PATH, &ask(&json!({"background": true, "stream": true})).to_string()));
    let head = client.until("response.output_text.delta");
    assert!(head.contains("response.queued") && head.contains("\"status\":\"queued\""), "{head}");
    let id = head.split("\"id\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    drop(client);
    assert_eq!(running(&server), 1, "it goes on without its client");
    // A stream from the beginning, and from each event on: the same events, now and after the end.
    let whole = events(&server.get(&format!("{PATH}/{id}?stream=true")));
    let kinds: Vec<&str> = whole.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["response.created", "response.queued", "response.in_progress"]);
    assert_eq!(kinds.last(), Some(&"response.completed"));
    assert_eq!(whole.last().unwrap()["response"], look(&server, &id));
    for after in [0, 4, whole.len() - 2] {
        let answer = server.get(&format!("{PATH}/{id}?stream=true&starting_after={after}"));
        let rest: Vec<Value> = answer
            .ok_text()
            .split("\n\n")
            .filter(|block| !block.is_empty())
            .map(|block| serde_json::from_str(block.split_once("data: ").unwrap().1).unwrap())
            .collect();
        assert_eq!(rest, whole[after + 1..]);
    }
    let answer = server.get(&format!("{PATH}/{id}?stream=true&starting_after={}", whole.len() + 9));
    assert_eq!(answer.ok_text(), "", "there is nothing after the end");
    assert_eq!(server.metric("plimsoll_response_logs_lost_total"), 0);
    server.assert_idle();
}

#[test]
fn response_in_the_background_is_cancelled() {
    let server = Server::over(PLAIN, config(), limits(), endless);
    for more in [json!({}), json!({"stream": true})] {
        let mut body = ask(&json!({"background": true}));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut client = server.send(post(PATH, &body.to_string()));
        let head = client.until("\"id\":\"resp_");
        assert!(head.contains("200 OK"), "{head}");
        let id = format!("resp_{}", client.until("\"").trim_end_matches('"'));
        drop(client);
        eventually("it has begun", || server.engine.reserved().1 == 1);
        server.send(format!("DELETE {PATH}/{id} HTTP/1.1\r\nhost: localhost\r\n\r\n")).answer().error(409);
        let cancelled = server.post(&format!("{PATH}/{id}/cancel"), &json!({})).ok();
        assert_eq!(cancelled["status"], "cancelled");
        assert_eq!(look(&server, &id), cancelled);
    }
    eventually("their places are free", || running(&server) == 0);
    server.assert_idle();
}

#[test]
fn background_is_bounded_in_count_and_bytes() {
    let few = ServerConfig { response_store_bytes: 24 << 10, unknown_fields: UnknownFields::Refuse, ..config() };
    let server = Server::over(PLAIN, few, limits(), endless);
    let body = ask(&json!({"background": true, "stream": true})).to_string();
    let mut client = server.send(post(PATH, &body));
    let text = client.until("\"code\":\"events_lost\"");
    assert!(text.len() < 24 << 10, "{}", text.len());
    assert!(server.metric("plimsoll_response_store_bytes") <= 24 << 10);
    assert_eq!(server.metric("plimsoll_response_logs_lost_total"), 1);
    let mut ids = Vec::new();
    let refused = loop {
        let answer = server.post(PATH, &ask(&json!({"background": true})));
        match answer.status {
            200 => ids.push(answer.json()["id"].as_str().unwrap().to_owned()),
            _ => break answer,
        }
    };
    assert!(refused.header("retry-after").is_some(), "{refused:?}");
    let error = refused.error(503);
    assert!(ids.len() <= 15, "{}", ids.len());
    assert!(ids.len() < 15 || error["message"].as_str().unwrap().contains("16 responses"), "{error}");
    for id in ids {
        server.post(&format!("{PATH}/{id}/cancel"), &json!({})).ok();
    }
    let id = text.split("\"id\":\"").nth(1).unwrap().split('"').next().unwrap();
    server.post(&format!("{PATH}/{id}/cancel"), &json!({})).ok();
    eventually("all have ended", || running(&server) == 0);
    server.assert_idle();
}

#[test]
fn shutdown_waits_for_the_background_until_its_deadline() {
    let times = ServerConfig { drain_deadline: Duration::from_secs(30), ..config() };
    let server = slow("Hello there", times);
    started(&server, &json!({}));
    server.shut_down();
    assert!(server.wait_for_end(PATIENCE), "it has ended");
    assert_eq!(server.aborted(), 0, "the response was made to its end");
    let server = Server::over(PLAIN, config(), limits(), endless);
    started(&server, &json!({}));
    eventually("it runs", || server.engine.reserved().1 == 1);
    server.shut_down();
    assert!(server.wait_for_end(Duration::from_secs(20)), "it is cut at the deadline");
    eventually("nothing is left", || server.engine.reserved() == (0, 0));
}
