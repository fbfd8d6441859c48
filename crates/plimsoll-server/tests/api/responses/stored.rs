//! Stored responses: items that a later request refers to, cancelling, and the bytes of the store.

use super::*;

#[test]
fn items_reach_the_template_and_a_response_is_gone_on_from() {
    let server = says(ALL, "Ok.</think>Fine.", 4, FinishReason::Stop);
    let call = |id: &str, city: &str| json!({"type": "function_call", "call_id": id, "name": "weather", "arguments": json!({"city": city}).to_string()});
    let result = |id: &str, output: Value| json!({"type": "function_call_output", "call_id": id, "output": output});
    let input = json!([
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}]},
        call("x", "Oslo"), call("y", "Rome"),
        result("x", json!("rain")), result("y", json!([{"type": "input_text", "text": "sun"}])),
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "So."}]}, call("z", "Bonn"), result("z", json!("fog"))
    ]);
    let first = create(&server, &json!({"input": input, "instructions": "Kind!"}));
    // The template has no role `developer`.
    let told = "[system]Be brief.[user]a\nb[assistant]Wait.<r>Hm.</r><tool_call>weather{\"city\": \"Oslo\"}</tool_call>\
        <tool_call>weather{\"city\": \"Rome\"}</tool_call>[tool]rain[tool]sun\
        [assistant]None<r>So.</r><tool_call>weather{\"city\": \"Bonn\"}</tool_call>[tool]fog";
    assert_eq!(prompt_text(&server), format!("[system]Kind!{told}<think>\n"));
    // A later response keeps all but the instructions, and so does a response after that.
    let second = create(&server, &json!({"previous_response_id": first["id"], "input": "And?"}));
    let more = format!("{told}[assistant]Fine.<r>Ok.</r>[user]And?");
    assert_eq!(prompt_text(&server), format!("{more}<think>\n"));
    assert_eq!(second["previous_response_id"], first["id"]);
    streamed(&server, &json!({"previous_response_id": second["id"], "input": "So?"}));
    assert_eq!(prompt_text(&server), format!("{more}[assistant]Fine.<r>Ok.</r>[user]So?<think>\n"));
    // Stored responses can be read.
    let path = |response: &Value, rest: &str| format!("/v1/responses/{}{rest}", response["id"].as_str().unwrap());
    assert_eq!(server.get(&path(&first, "")).ok(), first);
    let list = server.get(&path(&second, "/input_items?order=asc&limit=100")).ok();
    let items = list["data"].as_array().unwrap();
    assert_eq!((items.len(), &list["has_more"]), (14, &json!(false)));
    assert_eq!(
        items[2],
        json!({"id": "rs_1", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]})
    );
    assert_eq!(items[12]["content"][0]["text"], "Fine.");
    assert_eq!(items[13]["content"], json!([{"type": "input_text", "text": "And?"}]));
    let page = server.get(&path(&second, "/input_items?limit=3")).ok();
    assert_eq!((&page["data"][0], &page["has_more"]), (&items[13], &json!(true)));
    let last = page["last_id"].as_str().unwrap();
    let next = server.get(&path(&second, &format!("/input_items?limit=3&after={last}"))).ok();
    assert_eq!((&next["data"][0], &next["first_id"]), (&items[10], &items[10]["id"]));
    server.get(&path(&second, "/input_items?after=nobody")).error(400);
    server.get(&path(&second, "/input_items?limit=0")).error(400);
    // A deleted response is gone; later responses that continue it stay.
    assert_eq!(
        server.send(format!("DELETE {} HTTP/1.1\r\nhost: localhost\r\n\r\n", path(&first, ""))).answer().ok()["deleted"],
        true
    );
    server.get(&path(&first, "")).error(404);
    assert_eq!(
        server.post("/v1/responses", &ask(&json!({"previous_response_id": first["id"]}))).error(400)["param"],
        "previous_response_id"
    );
    create(&server, &json!({"previous_response_id": second["id"]}));
    assert!(server.get("/metrics").ok_text().contains("plimsoll_responses_stored 3"));
    server.assert_idle();
}

/// Clients that use the server's store send the ids of its items.
#[test]
fn stored_items_are_sent_by_their_ids() {
    let server = says(ALL, "Ok.</think>Fine.", 4, FinishReason::Stop);
    let first = create(&server, &json!({"input": [{"role": "user", "id": "msg_mine", "content": "Hi"}]}));
    let id = |at: usize| first["output"][at]["id"].clone();
    let refer = |id: Value| json!({"type": "item_reference", "id": id});
    let whole = json!([{"role": "user", "content": "Hi"}, first["output"][0], first["output"][1], {"role": "user", "content": "So?"}]);
    let named = json!([refer(json!("msg_mine")), {"id": id(0)}, refer(id(1)), {"role": "user", "content": "So?"}]);
    let [told, known] = [whole, named].map(|input| {
        let answer = create(&server, &json!({"input": input}));
        (prompt_text(&server), answer)
    });
    assert_eq!(told.0, known.0);
    assert!(known.0.starts_with("[user]Hi[assistant]Fine.<r>Ok.</r>[user]So?"), "{}", known.0);
    // The items are stored with the new response, which does not need the old one for them.
    let path = |response: &Value| format!("/v1/responses/{}", response["id"].as_str().unwrap());
    let items = server.get(&format!("{}/input_items?order=asc", path(&known.1))).ok();
    assert_eq!((&items["data"][2]["id"], &items["data"][2]["content"][0]["text"]), (&id(1), &json!("Fine.")));
    for response in [&first, &told.1, &known.1] {
        server.send(format!("DELETE {} HTTP/1.1\r\nhost: localhost\r\n\r\n", path(response))).answer().ok();
    }
    let gone = server.post("/v1/responses", &ask(&json!({"input": [refer(id(1))]}))).error(400);
    assert_eq!((&gone["param"], &gone["code"]), (&json!("input[0].id"), &json!("item_not_found")));
    server.assert_idle();
}

/// Short references can stand for many bytes: the referenced items are held like a body, or refused.
#[test]
fn references_are_bounded_in_bytes() {
    let server =
        says_with(PLAIN, ServerConfig { max_bytes_in_flight: 4 << 20, ..config() }, "ok", 2, FinishReason::Stop);
    let text = "x".repeat(3000);
    create(&server, &json!({"input": [{"role": "user", "id": "msg_long", "content": text}]}));
    let many: Vec<Value> = (0..4000).map(|_| json!({"type": "item_reference", "id": "msg_long"})).collect();
    let refused = server.post("/v1/responses", &ask(&json!({"input": many}))).error(400);
    assert!(refused["message"].as_str().unwrap().contains("--max-bytes-in-flight"), "{refused}");
    server.assert_idle();
}

#[test]
fn the_store_keeps_to_its_bytes() {
    let tight = ServerConfig { response_store_bytes: 12 << 10, ..config() };
    let server = says_with(PLAIN, tight, "ok", 2, FinishReason::Stop);
    let ids: Vec<Value> = (0..12).map(|_| create(&server, &json!({"input": "x".repeat(400)}))["id"].clone()).collect();
    let gauge = |name: &str| server.metric(name);
    let (kept, bytes) = (gauge("plimsoll_responses_stored"), gauge("plimsoll_response_store_bytes"));
    assert!((2..12).contains(&kept) && bytes <= 12 << 10, "{kept} responses of {bytes} bytes");
    assert_eq!(gauge("plimsoll_responses_evicted_total"), 12 - kept);
    let found = |id: &Value| server.get(&format!("/v1/responses/{}", id.as_str().unwrap())).status;
    assert_eq!((found(&ids[0]), found(&ids[11])), (404, 200));
    // Without a store nothing is kept, and a request to store is refused.
    let none = ServerConfig { response_store_bytes: 0, ..config() };
    let server = says_with(PLAIN, none, "ok", 2, FinishReason::Stop);
    assert_eq!(create(&server, &json!({}))["store"], false);
    assert_eq!(server.post("/v1/responses", &ask(&json!({"store": true}))).error(400)["param"], "store");
}

#[test]
fn a_running_response_is_cancelled() {
    let server = Server::start(|_| {
        let token = |_| [Step::Token(97, "a".into()), Step::Wait(Duration::from_millis(5))];
        Box::new((0..).flat_map(token))
    });
    let cancel = |id: &str| {
        server
            .send(format!("POST /v1/responses/{id}/cancel HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"))
            .answer()
    };
    for store in [true, false] {
        let body = ask(&json!({"stream": true, "store": store}));
        let mut client = server.send(post("/v1/responses", &body.to_string()));
        let begun = client.until("response.output_text.delta");
        let at = begun.find("\"id\":\"resp_").unwrap() + 6;
        let id = &begun[at..at + begun[at..].find('"').unwrap()];
        let meanwhile = server.get(&format!("/v1/responses/{id}"));
        match store {
            true => {
                let object = meanwhile.ok();
                assert_eq!(
                    (&object["id"], &object["status"], &object["output"]),
                    (&json!(id), &json!("in_progress"), &json!([]))
                );
                assert!(object["usage"].is_null() && object["completed_at"].is_null(), "{object}");
                let gone = format!("DELETE /v1/responses/{id} HTTP/1.1\r\nhost: localhost\r\n\r\n");
                assert_eq!(server.send(gone).answer().status, 409, "it is still being made");
            }
            false => assert_eq!(meanwhile.status, 404, "what is not to be kept is not shown"),
        }
        // The client continues to read the stream while it is being cancelled.
        let reads = std::thread::spawn(move || client.until("\r\n0\r\n\r\n"));
        let cancelled = cancel(id).ok();
        assert_eq!((&cancelled["status"], &cancelled["id"]), (&json!("cancelled"), &json!(id)));
        assert!(cancelled["output"][0]["content"][0]["text"].as_str().unwrap().starts_with('a'));
        let rest = reads.join().unwrap();
        assert!(rest.contains("event: response.incomplete") && rest.contains("\"status\":\"cancelled\""), "{rest}");
        let after = server.get(&format!("/v1/responses/{id}"));
        assert_eq!(after.status, if store { 200 } else { 404 });
        assert_eq!(cancel(id).status, after.status, "what has ended stays as it is");
    }
    cancel("resp_none").error(404);
    // A response that is not streamed is found by the request's id.
    let body = ask(&json!({})).to_string();
    let mut client =
        server.send(post("/v1/responses", &body).replace("host: localhost", "host: localhost\r\nx-request-id: mine"));
    eventually("it runs", || server.engine.reserved().1 == 1);
    server.send("DELETE /v1/requests/mine HTTP/1.1\r\nhost: localhost\r\n\r\n").answer().ok();
    assert_eq!(client.answer().ok()["status"], "cancelled");
    server.assert_idle();
}
