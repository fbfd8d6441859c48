//! API keys, rate limits and origins: admitted requests, errors of refused requests, and headers of answers.

use plimsoll_engine::Request;
use plimsoll_engine::testing::{Step, letters, limits};
use plimsoll_server::{ApiKeys, Origins, RateLimits, ServerConfig};
use serde_json::{Value, json};

use crate::common::{Answer, Server, config, eventually};

const KEYS: [&str; 2] = ["first-secret", "second-secret"];

fn keyed(rates: RateLimits) -> ServerConfig {
    ServerConfig { api_keys: ApiKeys::new(KEYS.map(String::from)).unwrap(), rates, ..config() }
}

/// Sends a request with additional header lines.
fn ask(server: &Server, method: &str, path: &str, head: &[&str], body: &Value) -> Answer {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let head: String = head.iter().map(|line| format!("{line}\r\n")).collect();
    let length = body.len();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\n{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    server.send(text).answer()
}

#[test]
fn without_a_key_nothing_but_the_probes_and_the_page_opens() {
    let server = Server::with(keyed(RateLimits::default()), limits(), letters);
    let prompt = json!({"prompt": "x", "max_tokens": 2});
    let routes = [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/v1/status"),
        ("GET", "/v1/memory"),
        ("DELETE", "/v1/cache"),
        ("DELETE", "/v1/requests/x"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/version"),
        ("GET", "/nowhere"),
    ];
    let wrong = ["authorization: Bearer first-secre", "authorization: Basic first-secret", "x-api-key: ", "x: y"];
    for (method, path) in routes {
        for head in wrong {
            let answer = ask(&server, method, path, &[head], &prompt);
            assert_eq!(answer.header("x-should-retry"), Some("false"), "the same key is no better later");
            let error = answer.error(401);
            assert_eq!((&error["code"], &error["type"]), (&json!("invalid_api_key"), &json!("invalid_request_error")));
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
            assert!(answer.header("x-request-id").is_some());
            assert!(!answer.body.contains("secret"), "{}", answer.body);
        }
    }
    eventually("healthy", || server.get("/health").status == 200);
    server.get("/ready").ok();
    // The page needs no key and shows nothing without one.
    assert!(server.get("/").ok_text().contains("key-dialog"));
    server.get("/page/app.js").ok_text();
    for head in ["authorization: Bearer first-secret", "Authorization: bearer second-secret", "x-api-key: first-secret"]
    {
        let answer = ask(&server, "POST", "/v1/completions", &[head], &prompt).ok();
        assert_eq!(answer["usage"]["completion_tokens"], 2);
        ask(&server, "GET", "/metrics", &[head], &Value::Null).ok_text();
    }
    assert!(server.observed.requests.lock().unwrap().len() == 3, "nothing of what was turned away reached the engine");
    let page = ask(&server, "GET", "/metrics", &["x-api-key: first-secret"], &Value::Null);
    let turned =
        format!("plimsoll_http_turned_away_total{{reason=\"invalid_api_key\"}} {}", routes.len() * wrong.len());
    assert!(page.ok_text().contains(&turned), "{}", page.body);
}

#[test]
fn a_key_ends_only_its_own_requests() {
    let server = Server::with(keyed(RateLimits::default()), limits(), |_: &Request| Box::new(std::iter::empty()));
    let [mine, other] = ["x-api-key: first-secret", "x-api-key: second-secret"];
    let body = json!({"prompt": "x"}).to_string();
    let text = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{mine}\r\nx-request-id: 1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut client = server.send(text);
    eventually("it runs", || server.engine.reserved().1 == 1);
    ask(&server, "DELETE", "/v1/requests/1", &[other], &Value::Null).error(404);
    ask(&server, "DELETE", "/v1/requests/1", &[mine], &Value::Null).ok();
    client.answer().error(499);
}

#[test]
fn each_key_has_its_own_minute() {
    let rates = RateLimits { requests: Some(3), tokens: None };
    let server = Server::with(keyed(rates), limits(), letters);
    let prompt = json!({"prompt": "x", "max_tokens": 1});
    let [first, second] = ["x-api-key: first-secret", "x-api-key: second-secret"];
    for left in ["2", "1", "0"] {
        let answer = ask(&server, "POST", "/v1/completions", &[first], &prompt);
        answer.ok();
        assert_eq!(answer.header("x-ratelimit-limit-requests"), Some("3"));
        assert_eq!(answer.header("x-ratelimit-remaining-requests"), Some(left));
        assert!(answer.header("x-ratelimit-reset-requests").unwrap().ends_with('s'));
        assert_eq!(answer.header("x-ratelimit-limit-tokens"), None);
    }
    let refused = ask(&server, "POST", "/v1/completions", &[first], &prompt);
    let error = refused.error(429);
    assert_eq!((&error["code"], &error["type"]), (&json!("rate_limit_exceeded"), &json!("rate_limit_error")));
    assert!(error["message"].as_str().unwrap().contains("3 requests per minute"), "{error}");
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((15..=20).contains(&wait), "{wait}");
    assert_eq!(refused.header("x-ratelimit-remaining-requests"), Some("0"));
    // Reading is free, and other keys are not affected.
    ask(&server, "GET", "/v1/models", &[first], &Value::Null).ok();
    ask(&server, "POST", "/v1/completions", &[second], &prompt).ok();
    eventually("the engine is idle", || server.engine.reserved() == (0, 0));
}

#[test]
fn tokens_of_prompts_and_answers_are_charged_as_they_come() {
    let rates = RateLimits { requests: None, tokens: Some(100) };
    let open = ServerConfig { rates, ..config() };
    let server = Server::with(open, limits(), |request: &Request| {
        if request.max_tokens > 50 {
            let all = (0..request.max_tokens).map(|_| Step::Token(97, "a".into()));
            return Box::new(all.chain([Step::Finish(plimsoll_engine::FinishReason::Length, None)]));
        }
        letters(request)
    });
    let answer = server.post("/v1/completions", &json!({"prompt": "0123456789", "max_tokens": 20}));
    answer.ok();
    assert_eq!(answer.header("x-ratelimit-limit-tokens"), Some("100"));
    let left: u32 = answer.header("x-ratelimit-remaining-tokens").unwrap().parse().unwrap();
    assert!((70..=72).contains(&left), "30 of 100 were used: {left}");
    // A stream is charged too; it may exceed the rate and is not cut.
    let stream = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 300, "stream": true}));
    assert!(stream.events().len() > 2);
    let error = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1})).error(429);
    assert!(error["message"].as_str().unwrap().contains("100 tokens per minute"), "{error}");
    server.post("/tokenize", &json!({"prompt": "x"})).error(429);
    server.get("/v1/models").ok();
}

#[test]
fn browsers_are_told_whose_scripts_may_read() {
    let origins = Origins::new(["https://chat.example".to_owned(), "http://localhost:3000".to_owned()]).unwrap();
    let server = Server::with(ServerConfig { origins, ..keyed(RateLimits::default()) }, limits(), letters);
    let preflight = |origin: &str| {
        let head = [
            &format!("origin: {origin}"),
            "access-control-request-method: POST",
            "access-control-request-headers: authorization, content-type",
        ];
        ask(&server, "OPTIONS", "/v1/chat/completions", &head, &Value::Null)
    };
    // A browser's preflight has no key.
    let allowed = preflight("http://localhost:3000");
    assert_eq!((allowed.status, allowed.header("access-control-allow-origin")), (204, Some("http://localhost:3000")));
    assert_eq!(allowed.header("access-control-allow-headers"), Some("authorization, content-type"));
    assert!(allowed.header("access-control-allow-methods").unwrap().contains("DELETE"));
    let foreign = preflight("https://evil.example");
    assert!(foreign.header("access-control-allow-origin").is_none() && foreign.header("vary") == Some("origin"));
    assert!(foreign.header("access-control-allow-methods").is_none());
    let head = ["origin: https://chat.example", "x-api-key: first-secret"];
    let answer = ask(&server, "GET", "/v1/models", &head, &Value::Null);
    answer.ok();
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://chat.example"));
    assert!(answer.header("access-control-expose-headers").unwrap().contains("x-request-id"));
    // An allowed origin can read errors, too. Answers to other origins lack the header, so browsers hide them.
    let answer = ask(&server, "GET", "/v1/models", &["origin: https://chat.example"], &Value::Null);
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (401, Some("https://chat.example")));
    let answer = ask(&server, "GET", "/v1/models", &["origin: https://evil.example", head[1]], &Value::Null);
    assert!(answer.header("access-control-allow-origin").is_none());
    // Without allowed origins the answer has no such headers.
    let plain = Server::start(letters);
    let answer = ask(&plain, "GET", "/v1/models", &head[..1], &Value::Null);
    assert!(answer.header("access-control-allow-origin").is_none() && answer.header("vary").is_none());
    assert_eq!(ask(&plain, "OPTIONS", "/v1/models", &head[..1], &Value::Null).status, 405);
}

/// A browser sends a POST without a body for any page, without a preflight.
#[test]
fn pages_of_other_origins_cancel_nothing() {
    let server = Server::start(letters);
    let cancel = |head: &str| {
        let text = format!(
            "POST /v1/responses/resp_none/cancel HTTP/1.1\r\nhost: app.localhost\r\n{head}content-length: 0\r\n\r\n"
        );
        server.send(text).answer().status
    };
    assert_eq!(cancel("origin: http://evil.example\r\n"), 403);
    assert_eq!(cancel("origin: http://app.localhost\r\n"), 404);
    assert_eq!(cancel(""), 404);
}

/// A page of a name that now resolves to the loopback address: for the browser this server has the page's origin.
#[test]
fn pages_of_rebound_names_get_nothing() {
    let get = |server: &Server, path: &str, host: &str| {
        server.send(format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n")).answer()
    };
    let open = Server::start(letters);
    for path in ["/", "/v1/status", "/v1/memory", "/health", "/v1/models", "/page/app.js"] {
        let error = get(&open, path, "rebound.example:8000").error(421);
        assert_eq!(error["code"], "unknown_host", "{error}");
        assert!(error["message"].as_str().unwrap().contains("--allowed-hosts"), "{error}");
        assert_eq!(get(&open, path, "localhost").status, 200, "{path}");
    }
    let chat = "POST /v1/completions HTTP/1.1\r\nhost: rebound.example\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n{\"prompt\": \"\"}";
    assert_eq!(open.send(chat).answer().status, 421);
    assert_eq!(open.observed.requests.lock().unwrap().len(), 0, "nothing was computed");
    let named = ServerConfig { allowed_hosts: vec!["models.lan".into()], ..config() };
    let named = Server::with(named, limits(), letters);
    assert_eq!(get(&named, "/v1/models", "models.lan:8000").status, 200);
    assert_eq!(get(&named, "/v1/models", "other.lan").status, 421);
    // Keys protect against this too.
    let keyed = Server::with(keyed(RateLimits::default()), limits(), letters);
    assert_eq!(get(&keyed, "/v1/models", "other.lan").status, 401);
}

/// RFC 9112, section 3.2.
#[test]
fn a_request_of_http_1_1_names_one_host() {
    let server = Server::start(letters);
    let status = |head: &str| server.send(format!("GET /version {head}\r\n\r\n")).answer().status;
    assert_eq!(status("HTTP/1.1\r\nhost: localhost"), 200);
    assert_eq!(status("HTTP/1.0"), 200);
    assert_eq!(status("HTTP/1.0\r\nhost: localhost"), 200);
    assert_eq!(status("HTTP/1.1\r\naccept: */*"), 400);
    assert_eq!(status("HTTP/1.1\r\nhost: localhost\r\nhost: localhost"), 400);
    let answer = server.send("GET /version HTTP/1.1\r\n\r\n").answer();
    assert_eq!(answer.json()["error"]["param"], "host");
    assert_eq!(answer.header("connection"), Some("close"));
}
