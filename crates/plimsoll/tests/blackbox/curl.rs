//! README's curl commands, word for word, against a running server; and curl's own view of streams and errors.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::product::{Server, repository};

/// Runs a shell command in which `curl` fails on errors of the server and after a minute.
fn shell(command: &str) -> String {
    let script = format!("curl() {{ command curl -sS --fail-with-body --max-time 60 \"$@\"; }}\n{command}");
    let output = Command::new("bash").args(["-c", &script]).output().expect("bash runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command}\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// The curl commands in README's code blocks. A command ends where its quotes are closed and no backslash joins a line.
fn examples(readme: &str) -> Vec<String> {
    let (mut found, mut current, mut in_block) = (Vec::new(), String::new(), false);
    for line in readme.lines() {
        if line.starts_with("```") {
            in_block = !in_block;
            continue;
        }
        let line = line.strip_prefix("$ ").unwrap_or(line);
        if !in_block || (current.is_empty() && !line.starts_with("curl ")) {
            continue;
        }
        current.push_str(line);
        current.push('\n');
        if current.matches('\'').count() % 2 == 0 && !line.trim_end().ends_with('\\') {
            found.push(std::mem::take(&mut current));
        }
    }
    assert!(current.is_empty(), "a command without an end: {current}");
    found
}

#[test]
#[ignore = "external"]
fn the_examples_of_the_readme_work_as_printed() {
    let readme = fs::read_to_string(repository().join("README.md")).expect("there is a README");
    let examples = examples(&readme);
    assert!(!examples.is_empty(), "README has no curl example");
    let server = Server::start(&["--max-total-token-num", "8192"]);
    let address = server.address.to_string();
    for example in examples {
        let here = example.replace("127.0.0.1:8000", &address).replace("localhost:8000", &address);
        assert!(here.contains(&address), "an example for another address: {example}");
        let answer = shell(&here);
        assert!(!answer.trim().is_empty(), "{example} answers nothing");
        if example.contains("/v1/chat/completions") && !example.contains("\"stream\"") {
            let answer: Value =
                serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{example}: {error}: {answer}"));
            let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default();
            assert!(!text.is_empty(), "{example}: {answer}");
            // Only a greedy answer is the same on every run, so only its text is checked.
            let certain = example.contains("\"temperature\": 0") && example.contains("capital of France");
            assert!(!certain || text.contains("Paris"), "{example}: {answer}");
        }
    }
}

#[test]
#[ignore = "external"]
fn curl_sees_streams_and_errors_as_it_should() {
    let server = Server::start(&["--max-total-token-num", "8192"]);
    let base = format!("http://{}", server.address);
    let body = r#"{"model":"smollm2","prompt":"Once upon a time","max_tokens":8,"stream":true}"#;
    let stream = shell(&format!("curl -N {base}/v1/completions -H 'Content-Type: application/json' -d '{body}'"));
    assert!(stream.starts_with("data: {") && stream.ends_with("data: [DONE]\n\n"), "{stream}");
    let json = "-H 'Content-Type: application/json'";
    let status = |more: &str| shell(&format!("command curl -s -o /dev/null -w '%{{http_code}}' {more}"));
    assert_eq!(status(&format!("{base}/health")), "200");
    assert_eq!(status(&format!("{base}/nothing")), "404");
    assert_eq!(status(&format!("{base}/v1/completions")), "405");
    assert_eq!(status(&format!("{base}/v1/completions {json} -d '{{'")), "400");
    assert_eq!(status(&format!("{base}/v1/completions -d '{{}}'")), "400", "curl's own content type is a form's");
    assert_eq!(status(&format!("{base}/v1/completions -H 'Origin: http://a.example' -d '{{}}'")), "415");
    // curl announces long bodies and waits for permission ("Expect: 100-continue"); the limit is 8 MiB.
    let long =
        format!("command curl -s -o /dev/null -w '%{{http_code}}' {base}/v1/completions {json} --data-binary @-");
    assert_eq!(shell(&format!("head -c 9000000 /dev/zero | {long}")), "413");
    assert_eq!(status(&format!("{base}/ready")), "200", "and goes on");
}

#[test]
fn examples_are_found_whole() {
    let readme = "```sh\nx\ncurl a -d '{\n 1 }'\n$ curl b \\\n  c\n```\ncurl no\n```\ncurl d # e\n```\n";
    assert_eq!(examples(readme), ["curl a -d '{\n 1 }'\n", "curl b \\\n  c\n", "curl d # e\n"]);
}
