//! Log-probabilities of responses.

use super::*;

#[test]
fn log_probabilities_go_with_the_text() {
    let server = Server::start(letters);
    let more =
        json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3, "seed": 1});
    let response = create(&server, &more);
    let logprobs = response["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    assert_eq!((logprobs.len(), logprobs[0]["top_logprobs"].as_array().unwrap().len()), (3, 2));
    assert_eq!(plain(streamed(&server, &more)), plain(response));
}

#[test]
fn tokens_whose_text_comes_later_are_reported_with_it() {
    // A character of three tokens, a letter, and an end without text: each is a separate delta.
    let server = Server::over(PLAIN, config(), limits(), |_| {
        let pieces = ["", "", "\u{1f980}", "x", ""].map(|piece| Step::Token(97, piece.into()));
        let pauses = pieces.into_iter().flat_map(|token| [token, Step::Wait(Duration::from_millis(30))]);
        Box::new(pauses.chain([Step::Finish(FinishReason::Stop, None)]))
    });
    let body = ask(&json!({"include": ["message.output_text.logprobs"], "stream": true}));
    let events = events(&server.post("/v1/responses", &body));
    let reports = |of: &Value| of["logprobs"].as_array().map_or(0, Vec::len);
    let of = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let deltas: Vec<_> =
        of("response.output_text.delta").map(|event| (event["delta"].clone(), reports(event))).collect();
    assert_eq!(deltas, [(json!("\u{1f980}"), 3), (json!("x"), 1)]);
    assert_eq!(of("response.output_text.done").map(reports).collect::<Vec<_>>(), [5]);
    let whole = &events.last().unwrap()["response"]["output"][0]["content"][0];
    assert_eq!((whole["text"].as_str().unwrap(), reports(whole)), ("\u{1f980}x", 5));
}

#[test]
fn reasoning_markers_and_calls_have_no_reports() {
    let said = |pieces: &'static [&'static str], pause: bool| {
        let server = Server::over(ALL, config(), limits(), move |_| {
            let step = move |piece: &&str| {
                let wait = pause.then_some(Step::Wait(Duration::from_millis(5)));
                [Some(Step::Token(97, (*piece).into())), wait].into_iter().flatten()
            };
            Box::new(pieces.iter().flat_map(step).chain([Step::Finish(FinishReason::Stop, None)]))
        });
        let tools = json!([{"type": "function", "name": "f", "parameters": {}}]);
        let body = ask(&json!({"include": ["message.output_text.logprobs"], "tools": tools}));
        let answer = server.post("/v1/responses", &body).ok();
        let texts: Vec<Value> =
            answer["output"].as_array().unwrap().iter().map(|item| item["content"][0].clone()).collect();
        let texts = texts.iter().filter(|part| part["type"] == "output_text");
        texts
            .map(|part| (part["text"].as_str().unwrap().to_owned(), part["logprobs"].as_array().unwrap().len()))
            .collect::<Vec<_>>()
    };
    // Token by token, and all at once.
    for pause in [true, false] {
        let reasoning = said(&["a", " ", "<", " b", "</", "think", ">", "\n\n", "H", "i", ""], pause);
        assert_eq!(reasoning, [("Hi".to_owned(), 3)], "and the end, {pause}");
        assert_eq!(said(&["a</think>", "\n", "1", "<", "2"], pause), [("1<2".to_owned(), 3)], "{pause}");
        assert_eq!(said(&["a</think>H", "i"], pause), [("Hi".to_owned(), 2)], "of both, {pause}");
        let call = [
            "a",
            "</think>",
            "Now:",
            "<tool_call>",
            "{\"name\": \"f\", \"arguments\": {}}",
            "\n</tool_call>",
            "\n",
            "So",
            ".",
        ];
        let call: &'static [&'static str] = Box::leak(Box::new(call));
        assert_eq!(said(call, pause), [("Now:".to_owned(), 1), ("So.".to_owned(), 2)], "{pause}");
    }
}
