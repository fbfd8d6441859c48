//! Tool calls and reasoning in chat answers: the same whole and streamed, in OpenAI's shapes.

mod forced;

use std::sync::Arc;

use plimsoll_engine::testing::{Script, Step, limits};
use plimsoll_engine::{FinishReason, Request};
use plimsoll_reply::Choice;
use plimsoll_server::{Formats, serve};
use plimsoll_text::ChatTemplate;
use serde_json::{Value, json};

use crate::common::{Server, config, served};

const HERMES: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}\n{% endfor %}";
const THINKS: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}<|im_start|>\
{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}";
const PLAIN: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}";

/// A server with a scripted model: it writes `text`, `pace` characters a token, and ends with `finish`.
fn says(template: &str, text: &'static str, pace: usize, finish: FinishReason) -> Server {
    let script = move |_: &Request| -> Script {
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(pace).map(|piece| piece.iter().collect()).collect();
        let tokens = pieces.into_iter().map(|piece| Step::Token(97, piece));
        Box::new(tokens.chain([Step::Finish(finish, None)]))
    };
    Server::over(template, config(), limits(), script)
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "Weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}])
}

fn ask(more: &Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// Returns the message of a whole answer, and its finish reason.
fn whole(server: &Server, more: &Value) -> (Value, Value) {
    let answer = server.post("/v1/chat/completions", &ask(more)).ok();
    (answer["choices"][0]["message"].clone(), answer["choices"][0]["finish_reason"].clone())
}

/// Returns a streamed answer assembled as OpenAI's client does, without call ids, and its finish reason.
fn streamed(server: &Server, more: &Value) -> (Value, Value) {
    let mut more = more.clone();
    more["stream"] = true.into();
    let events = server.post("/v1/chat/completions", &ask(&more)).events();
    let (mut text, mut reasoning, mut calls, mut reason) =
        (String::new(), String::new(), Vec::<Value>::new(), Value::Null);
    for event in &events {
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        text += delta["content"].as_str().unwrap_or("");
        reasoning += delta["reasoning_content"].as_str().unwrap_or("");
        assert_eq!(delta["reasoning_content"], delta["reasoning"]);
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                assert_eq!((&call["type"], &call["function"]["arguments"]), (&json!("function"), &json!("")));
                assert!(call["id"].as_str().unwrap().starts_with("call_"));
                calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
            } else {
                assert_eq!(index + 1, calls.len(), "calls come one after the other");
                assert!(
                    call.get("id").is_none() && call.get("type").is_none() && call["function"].get("name").is_none()
                );
                let so_far = calls[index]["arguments"].as_str().unwrap().to_owned();
                calls[index]["arguments"] = (so_far + call["function"]["arguments"].as_str().unwrap()).into();
            }
        }
        if !choice["finish_reason"].is_null() {
            assert!(reason.is_null(), "one reason");
            reason = choice["finish_reason"].clone();
        }
    }
    (json!({"content": text, "reasoning": reasoning, "calls": calls}), reason)
}

/// Returns a whole message in the shape of [`streamed`].
fn flat(message: &Value) -> Value {
    let call = |call: &Value| json!({"name": call["function"]["name"], "arguments": call["function"]["arguments"]});
    let calls: Vec<Value> = message["tool_calls"].as_array().into_iter().flatten().map(call).collect();
    let text = |name: &str| message[name].as_str().unwrap_or("").to_owned();
    json!({"content": text("content"), "reasoning": text("reasoning_content"), "calls": calls})
}

const CALLS: &str = "On it.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n\
<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

#[test]
fn calls_come_in_openais_shape() {
    for pace in [1, 7, 1000] {
        let server = says(HERMES, CALLS, pace, FinishReason::Stop);
        let with = json!({"tools": tools()});
        let (message, reason) = whole(&server, &with);
        assert_eq!(reason, "tool_calls");
        assert_eq!(message["content"], "On it.");
        let calls = message["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 2);
        assert_eq!(calls[0]["type"], "function");
        assert_eq!(calls[1]["function"], json!({"name": "weather", "arguments": "{\"city\": \"Rome\"}"}));
        assert_ne!(calls[0]["id"], calls[1]["id"]);
        assert_eq!(streamed(&server, &with), (flat(&message), reason), "pace {pace}");
        // Only one call: output after it is not shown.
        let one = json!({"tools": tools(), "parallel_tool_calls": false});
        let (message, reason) = whole(&server, &one);
        assert_eq!((message["tool_calls"].as_array().unwrap().len(), &reason), (1, &json!("tool_calls")));
        assert_eq!(streamed(&server, &one), (flat(&message), reason));
        // Without tools, or with `tool_choice: none`, calls are text.
        for without in [json!({}), json!({"tools": tools(), "tool_choice": "none"}), json!({"tools": []})] {
            let (message, reason) = whole(&server, &without);
            assert_eq!((&message["content"], &reason), (&json!(CALLS), &json!("stop")));
            assert!(message.get("tool_calls").is_none());
            assert_eq!(streamed(&server, &without), (flat(&message), reason));
        }
        server.assert_idle();
    }
}

#[test]
fn a_call_alone_has_no_content_and_a_cut_one_is_no_reason() {
    let call = "<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>";
    let server = says(HERMES, call, 3, FinishReason::Stop);
    let (message, reason) = whole(&server, &json!({"tools": tools()}));
    assert_eq!((&message["content"], &reason), (&Value::Null, &json!("tool_calls")));
    let server = says(HERMES, "<tool_call>{\"name\": \"weather\", \"arguments\": {\"ci", 3, FinishReason::Length);
    let (message, reason) = whole(&server, &json!({"tools": tools()}));
    assert_eq!((&message["tool_calls"][0]["function"]["arguments"], &reason), (&json!("{\"ci"), &json!("length")));
    assert_eq!(streamed(&server, &json!({"tools": tools()})), (flat(&message), reason));
    let server = says(HERMES, "<tool_call>{broken}</tool_call>", 3, FinishReason::Stop);
    let (message, reason) = whole(&server, &json!({"tools": tools()}));
    assert_eq!((&message["content"], &reason), (&json!("<tool_call>{broken}</tool_call>"), &json!("stop")));
}

#[test]
fn reasoning_is_separated_from_content() {
    for pace in [1, 5, 1000] {
        let server = says(THINKS, "Hm.\nYes.\n</think>\n\nParis <think>.", pace, FinishReason::Stop);
        let (message, reason) = whole(&server, &json!({}));
        assert_eq!(message["reasoning_content"], "Hm.\nYes.");
        assert_eq!(message["reasoning"], "Hm.\nYes.");
        assert_eq!(message["content"], "Paris <think>.");
        assert_eq!(streamed(&server, &json!({})), (flat(&message), reason));
        let (message, _) = whole(&server, &json!({"include_reasoning": false}));
        assert!(message.get("reasoning_content").is_none() && message["content"] == "Paris <think>.");
        // With reasoning switched off all is content.
        for off in [json!({"enable_thinking": false}), json!({"chat_template_kwargs": {"enable_thinking": false}})] {
            let (message, reason) = whole(&server, &off);
            assert_eq!(message["content"], "Hm.\nYes.\n</think>\n\nParis <think>.");
            assert_eq!(streamed(&server, &off), (flat(&message), reason));
        }
    }
    // Cut while reasoning: the text is reasoning, not content.
    let server = says(THINKS, "Hm. I wonder", 4, FinishReason::Length);
    let (message, reason) = whole(&server, &json!({}));
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Hm. I wonder"), &Value::Null));
    assert_eq!(reason, "length");
    assert_eq!(streamed(&server, &json!({})), (flat(&message), reason));
}

#[test]
fn tools_are_told_to_models_whose_template_knows_none() {
    let server = says(PLAIN, CALLS, 9, FinishReason::Stop);
    let call =
        json!({"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}});
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
                     {"role": "tool", "content": "sunny", "tool_call_id": "1"}],
        "tools": tools(), "max_tokens": 300
    });
    let mut large = limits();
    large.max_req_total_len = 4096;
    large.max_total_token_num = 4096;
    drop(server);
    let server = Server::over(PLAIN, config(), large, |_| {
        Box::new([Step::Token(97, CALLS.into()), Step::Finish(FinishReason::Stop, None)].into_iter())
    });
    let answer = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    let prompt: Vec<u8> = server.last_request().prompt.iter().map(|id| u8::try_from(*id).unwrap_or(b'?')).collect();
    let prompt = String::from_utf8(prompt).unwrap();
    for part in
        ["<tools>\n{", "assistant:<tool_call>\n{\"name\":\"weather\"", "user:<tool_response>\nsunny\n</tool_response>"]
    {
        assert!(prompt.contains(part), "{part} in {prompt}");
    }
}

#[test]
fn integers_of_any_size_reach_the_prompt_of_history_unchanged() {
    const DUMPS: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:\
{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{{ c.function.arguments.n }}{% endfor %}{% endfor %}";
    let beyond = "1".repeat(45);
    for integer in
        ["9007199254740993", "-9223372036854775808", "18446744073709551615", "12345678901234567890123", &beyond]
    {
        let arguments = format!("{{\"n\": {integer}}}");
        let call = json!({"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}});
        let body = json!({
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
                         {"role": "tool", "content": "sunny", "tool_call_id": "1"}],
            "max_tokens": 8
        });
        for (template, expected) in
            [(DUMPS, format!("{{\"n\": {integer}}}{integer}")), (PLAIN, format!("\"arguments\":{{\"n\":{integer}}}"))]
        {
            let server = says(template, "Fine.", 9, FinishReason::Stop);
            server.post("/v1/chat/completions", &body).ok();
            let prompt: String = server.last_request().prompt.iter().map(|id| *id as u8 as char).collect();
            assert!(prompt.contains(&expected), "{expected} in {prompt}");
        }
    }
}

#[test]
fn a_template_for_tools_renders_them_and_says_how_replies_are_read() {
    let template = |source| ChatTemplate::new(source, "", "").unwrap();
    let xml = "{{ tools | length }} tools, <tool_call>\n<function=name>\n<parameter=p>";
    let both = Arc::new(template(THINKS).with_tool_use(template(xml)));
    let text = "Hm</think>Well.<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>";
    let script = move |_: &Request| -> Script {
        Box::new([Step::Token(97, text.into()), Step::Finish(FinishReason::Stop, None)].into_iter())
    };
    let (mut served, observed) = served(THINKS, limits(), script, &["tiny"]);
    served.formats = Formats::new(Some(&both), Choice::Auto, Choice::Auto);
    served.template = Some(both);
    let engine = served.engine.clone();
    let server =
        Server::around(engine, observed, config(), |listener, config, told| serve(listener, served, config, told));
    let prompt = || server.last_request().prompt.iter().map(|id| *id as u8 as char).collect::<String>();

    let (message, reason) = whole(&server, &json!({"tools": tools()}));
    assert!(prompt().starts_with("1 tools"), "{}", prompt());
    assert_eq!(
        (message["tool_calls"][0]["function"]["arguments"].as_str(), reason.as_str()),
        (Some(r#"{"city": "Oslo"}"#), Some("tool_calls"))
    );
    assert_eq!((message["content"].as_str(), &message["reasoning_content"]), (Some("Hm</think>Well."), &Value::Null));

    let (message, _) = whole(&server, &json!({}));
    assert!(prompt().starts_with("user:Hi"), "{}", prompt());
    assert_eq!(message["reasoning_content"], "Hm");
}

#[test]
fn what_clients_send_back_of_earlier_answers_is_taken() {
    let server = says(HERMES, "Hello.", 3, FinishReason::Stop);
    let said = |of: Value| {
        let mut message = json!({"role": "assistant"});
        message.as_object_mut().unwrap().extend(of.as_object().unwrap().clone());
        let messages = json!([{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "Go on"}]);
        server.post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 300, "unheard_of": null})).ok();
    };
    said(json!({"content": "{\"a\": 1}", "parsed": {"a": 1}, "refusal": null}));
    said(json!({"content": "x", "parsed": null}));
    // The answer is cut before its first word.
    said(json!({"content": null, "tool_calls": []}));
    said(json!({}));
}

#[test]
fn started_answer_or_reasoning_is_continued() {
    let after = |begun: &str, text: &'static str| {
        let server = says(THINKS, text, 3, FinishReason::Stop);
        let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]);
        let ask = json!({"messages": messages, "continue_final_message": true, "max_tokens": 300});
        let message = server.post("/v1/chat/completions", &ask).ok()["choices"][0]["message"].clone();
        (message["reasoning_content"].clone(), message["content"].clone())
    };
    assert_eq!(after("<think>\nHm, ", "so.</think>\n\nYes."), (json!("so."), json!("Yes.")));
    assert_eq!(after("<think>\nHm.\n</think>\n\nY", "es."), (Value::Null, json!("es.")));
    assert_eq!(after("The tag is ", "<think>, not </think>."), (Value::Null, json!("<think>, not </think>.")));
}

#[test]
fn a_model_that_cannot_be_told_not_to_think_is_read_as_it_thinks() {
    let always = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}<|im_start|><think>\n";
    let harmony = "{# <|channel|> <|message|> #}{{ messages[0].content }}";
    let channels =
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>";
    for (template, text) in [(always, "Hm.</think>Yes."), (harmony, channels)] {
        let server = says(template, text, 3, FinishReason::Stop);
        let (message, _) = whole(&server, &json!({"reasoning_effort": "none"}));
        assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Hm."), &json!("Yes.")));
    }
}

/// A template without an effort level may have a switch.
#[test]
fn reasoning_effort_none_turns_reasoning_off() {
    let template = "{{ messages[0].content }}{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}";
    let server = says(template, "Yes.", 9, FinishReason::Stop);
    for (asked, seen) in [
        (json!({}), "Hi"),
        (json!({"reasoning_effort": "none"}), "Hi[False]"),
        (json!({"reasoning_effort": "high"}), "Hi[True]"),
        (json!({"reasoning_effort": "high", "enable_thinking": false}), "Hi[False]"),
        (json!({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": false}}), "Hi"),
    ] {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300});
        body.as_object_mut().unwrap().extend(asked.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body).ok();
        let prompt = server.last_request().prompt.iter().map(|id| u8::try_from(*id).unwrap_or(b'?')).collect();
        assert_eq!(String::from_utf8(prompt).unwrap(), seen, "{asked}");
    }
}

#[test]
fn log_probabilities_go_with_calls_too() {
    let server = says(HERMES, CALLS, 1, FinishReason::Stop);
    let body = ask(&json!({"tools": tools(), "logprobs": true, "stream": true}));
    let events = server.post("/v1/chat/completions", &body).events();
    let reported = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten().count();
    assert_eq!(reported, CALLS.chars().count(), "every token once");
}

const WRITTEN: &str = "```json\n{\n  \"name\": \"weather\",\n  \"arguments\": {\"city\": \"Paris\"}\n}\n```";

/// Qwen2.5-Coder writes calls in plain JSON, whatever its template says.
#[test]
fn an_answer_that_is_a_call_in_plain_json_is_a_call_in_every_api() {
    for pace in [1, 7, 1000] {
        let server = says(HERMES, WRITTEN, pace, FinishReason::Stop);
        let with = json!({"tools": tools()});
        let (message, reason) = whole(&server, &with);
        assert_eq!((&message["content"], &reason), (&Value::Null, &json!("tool_calls")));
        assert_eq!(
            message["tool_calls"][0]["function"],
            json!({"name": "weather", "arguments": "{\"city\": \"Paris\"}"})
        );
        assert_eq!(streamed(&server, &with), (flat(&message), reason), "pace {pace}");

        let tool = json!({"name": "weather", "input_schema": {"type": "object"}});
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "tools": [tool]});
        let answer = server.post("/v1/messages", &body).ok();
        assert_eq!(answer["stop_reason"], "tool_use");
        let block = &answer["content"][0];
        assert_eq!((&block["type"], &block["input"]), (&json!("tool_use"), &json!({"city": "Paris"})));
        body["stream"] = true.into();
        let text = server.post("/v1/messages", &body);
        let text = text.ok_text();
        assert!(text.contains("\"stop_reason\":\"tool_use\"") && !text.contains("text_delta"), "{text}");

        let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
        let mut body = json!({"input": "Hi", "max_output_tokens": 300, "tools": [tool]});
        let answer = server.post("/v1/responses", &body).ok();
        let item = &answer["output"][0];
        assert_eq!((&item["type"], &item["arguments"]), (&json!("function_call"), &json!("{\"city\": \"Paris\"}")));
        body["stream"] = true.into();
        let text = server.post("/v1/responses", &body);
        let text = text.ok_text();
        assert!(
            text.contains("response.function_call_arguments.done") && !text.contains("output_text.delta"),
            "{text}"
        );
        // If the tool is not offered, the text has a format or no tool may be called, the call is text.
        for text in [
            json!({}),
            json!({"tools": tools(), "tool_choice": "none"}),
            json!({"tools": tools(), "response_format": {"type": "json_object"}}),
        ] {
            let (message, reason) = whole(&server, &text);
            assert_eq!((&message["content"], &reason), (&json!(WRITTEN), &json!("stop")), "{text}");
        }
        server.assert_idle();
    }
}

#[test]
fn json_with_text_behind_it_stays_content() {
    let text = "{\"name\": \"weather\", \"arguments\": {}}\nThat was the call.\n";
    for pace in [1, 1000] {
        let server = says(HERMES, text, pace, FinishReason::Stop);
        let with = json!({"tools": tools(), "logprobs": true});
        let (message, reason) = whole(&server, &with);
        assert_eq!((&message["content"], &reason), (&json!(text), &json!("stop")));
        assert_eq!(streamed(&server, &with), (flat(&message), reason));
    }
    let server = says(HERMES, "{\"name\": \"weather\", \"arguments\": {\"ci", 3, FinishReason::Length);
    let (message, reason) = whole(&server, &json!({"tools": tools()}));
    assert_eq!(
        (&message["content"], &reason),
        (&json!("{\"name\": \"weather\", \"arguments\": {\"ci"), &json!("length"))
    );
}

#[test]
fn a_stop_string_inside_a_call_leaves_no_half_call() {
    for (text, content, calls) in [
        ("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"", Value::Null, 0),
        ("On it.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"", json!("On it."), 0),
        (
            "<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"weather\", \"arg",
            Value::Null,
            1,
        ),
    ] {
        let script = move |_: &Request| -> Script {
            let pieces = text.chars().map(|c| Step::Token(97, c.to_string()));
            Box::new(pieces.chain([Step::Finish(FinishReason::Stop, Some("Par".into()))]))
        };
        let server = Server::over(HERMES, config(), limits(), script);
        for choice in ["auto", "required"] {
            let asked = json!({"tools": tools(), "tool_choice": choice, "stop": "Par"});
            let (message, reason) = whole(&server, &asked);
            assert_eq!(reason, "stop", "{text}");
            assert_eq!(message["tool_calls"].as_array().map_or(0, Vec::len), calls, "{message}");
            if choice == "auto" {
                assert_eq!(message["content"].as_str().unwrap_or(""), content.as_str().unwrap_or(""));
            }
            assert_eq!(streamed(&server, &asked), (flat(&message), reason));
        }
        let mut asked =
            json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "stop_sequences": ["Par"]});
        asked["tools"] = json!([{"name": "weather", "input_schema": {"type": "object"}}]);
        let answer = server.post("/v1/messages", &asked).ok();
        assert_eq!(answer["stop_reason"], "stop_sequence");
        let blocks = answer["content"].as_array().unwrap();
        assert_eq!(blocks.iter().filter(|block| block["type"] == "tool_use").count(), calls);
        server.assert_idle();
    }
}
