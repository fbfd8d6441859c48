//! `launch` with programs in place of the clients, and the output of `completions` and `man`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::page::modules;
use crate::product::{Finished, Server, plimsoll, run};
use crate::terminal::Data;

/// A directory with programs of these names, which print their variables and arguments.
fn programs(data: &Data, names: &[&str]) -> PathBuf {
    let folder = data.0.join("bin");
    fs::create_dir_all(&folder).unwrap();
    for name in names {
        let path = folder.join(name);
        fs::write(&path, "#!/bin/sh\n/usr/bin/env\nfor word; do echo \"arg: $word\"; done\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

#[test]
fn launch_starts_clients_with_the_address_and_the_key() {
    let data = Data::new("launch");
    let server =
        Server::start_model(Path::new("demo"), &["--max-total-token-num", "1024", "--api-key", "a-secret-key"]);
    let url = format!("http://{}", server.address);
    let names = ["claude", "codex", "opencode", "aider", "continue"];
    let folder = programs(&data, &["claude", "codex", "opencode", "aider", "cn"]);
    let launch = |client: &str, path: &Path, more: &[&str]| {
        let mut command = plimsoll([&["launch", client, "--url", &url][..], more].concat());
        command.env("PATH", path).env("XDG_DATA_HOME", &data.0);
        command.env("PLIMSOLL_API_KEY", "a-secret-key").stdin(Stdio::null());
        Finished::of(command.output().unwrap())
    };
    for client in names {
        let said = launch(client, &folder, &["--", "-p", "Say hi"]).good();
        assert!(said.contains(&url) || said.contains("cn.yaml"), "{client}: {said}");
        assert!(said.contains("arg: -p\narg: Say hi\n"), "{client}: {said}");
        let key =
            ["ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY", "PLIMSOLL_API_KEY"].map(|name| format!("{name}=a-secret-key"));
        assert!(key.iter().any(|key| said.contains(key)), "{client}: {said}");
        let printed = launch(client, &folder, &["--print"]);
        assert!(!printed.stdout.contains("a-secret-key") && printed.stdout.contains(&url), "{client}: {printed:?}");
        let error = launch(client, Path::new("/nowhere"), &[]).refused();
        assert!(error.contains("is not installed") && error.contains("install"), "{client}: {error}");
    }
    // The printed script does the same, with the key from its file.
    let keys = data.0.join("keys of ann");
    fs::write(&keys, "# mine\n  a-secret-key \nanother\n").unwrap();
    fs::remove_file(data.0.join("plimsoll/cn.yaml")).unwrap();
    let here = data.0.join("here");
    fs::create_dir_all(&here).unwrap();
    for client in names {
        let mut command =
            plimsoll(["launch", client, "--url", &url, "--print", "--api-key-file", keys.to_str().unwrap()]);
        command.env("XDG_DATA_HOME", &data.0).env_remove("PLIMSOLL_API_KEY");
        let printed = Finished::of(command.output().unwrap()).good();
        assert!(!printed.contains("a-secret-key"), "{client}: {printed}");
        let mut shell = Command::new("/bin/sh");
        shell.args(["-euc", &printed]).current_dir(&here).env("PATH", format!("{}:/usr/bin:/bin", folder.display()));
        let said = Finished::of(shell.output().unwrap()).good();
        assert!(said.contains("=a-secret-key") && !said.contains("YOUR_KEY"), "{client}: {said}");
    }
    assert_eq!(fs::read_dir(&here).unwrap().count(), 0, "nothing is written beside the user's files");
    let file = data.0.join("plimsoll/cn.yaml");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let text = fs::read_to_string(file).unwrap();
    assert!(text.contains(&format!("{url}/v1")) && text.contains("a-secret-key"), "{text}");
    drop(server);
    let error = launch("claude", &folder, &[]).refused();
    assert!(error.contains("plimsoll serve"), "{error}");
}

/// A program on the default port is asked without the key.
#[test]
fn key_is_sent_to_named_servers_only() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, heads) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                if stream.read(&mut byte).unwrap_or(0) == 0 {
                    break;
                }
                head.push(byte[0]);
            }
            let _ = stream.write_all(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}");
            let _ = sender.send(String::from_utf8_lossy(&head).into_owned());
        }
    });
    let data = Data::new("key");
    let url = format!("http://127.0.0.1:{port}");
    let ask = |words: &[&str]| {
        let mut command = plimsoll(words);
        command.env("PLIMSOLL_PORT", port.to_string()).env("PLIMSOLL_API_KEY", "a-secret-key");
        command.env("XDG_DATA_HOME", &data.0).stdin(Stdio::null());
        Finished::of(command.output().unwrap())
    };
    let error = ask(&["launch", "aider"]).refused();
    assert!(error.contains(&format!("add --url {url}")), "{error}");
    let head = heads.recv().unwrap();
    assert!(head.starts_with("GET /v1/models") && !head.contains("a-secret-key"), "{head}");
    // The process starts its own engine, which answers.
    let finished = ask(&["run", "demo", "Hi", "--max-tokens", "2"]);
    assert!(finished.stderr.contains("starting an engine here"), "{finished:?}");
    assert!(!heads.recv().unwrap().contains("a-secret-key"));
    ask(&["launch", "aider", "--url", &url]).refused();
    assert!(heads.recv().unwrap().contains("a-secret-key"), "a named server gets it");
}

#[test]
fn completions_and_manual_pages_are_printed() {
    let data = Data::new("man");
    let script = run(&["completions", "bash"]).good();
    assert!(script.contains("complete -F _plimsoll"), "{script}");
    let done = Command::new("bash").args(["-n", "-c", &script]).status().unwrap();
    assert!(done.success(), "bash reads the script");
    let folder = data.0.join("man1");
    assert_eq!(run(&["man", folder.to_str().unwrap()]).good(), "");
    let page = fs::read_to_string(folder.join("plimsoll-serve.1")).unwrap();
    assert!(
        page.contains("memory\\-budget")
            && folder.join("plimsoll.1").is_file()
            && !folder.join("plimsoll-balloon.1").exists()
    );
    assert!(run(&["man"]).good().contains(".TH"));
}

/// A file for tests with clients that need none.
const NOTE: (&str, &str) = ("note.txt", "a note");

/// Starts a client from an npm package as users do, in a directory with this file, and returns its output. `FILE` in
/// its arguments stands for the file's path.
fn answer(client: &str, package: &str, server: &Server, words: &[&str], (name, text): (&str, &str)) -> String {
    let programs = modules(client, &[package]).join("node_modules/.bin");
    let home = Data::new(client);
    fs::write(home.0.join(name), text).unwrap();
    let url = format!("http://{}", server.address);
    let words = words.iter().map(|word| word.replace("FILE", &home.at(name)));
    let mut command = plimsoll(["launch", client, "--url", &url, "--"]);
    command.args(words);
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
    command.env("PATH", path).env("HOME", &home.0).env("XDG_DATA_HOME", home.0.join("data"));
    command.current_dir(&home.0).envs([("NO_PROXY", "*"), ("no_proxy", "*")]).stdin(Stdio::null());
    let answer = Finished::of(command.output().unwrap()).good();
    println!("{answer}");
    assert!(!answer.trim().is_empty(), "{}", server.log());
    answer
}

/// The real Claude Code. Its own instructions and tools would be 20,000 tokens for the small model, so they are left out.
#[test]
#[ignore = "manual: downloads 730 MB of packages and models"]
fn manual_claude_code_answers_through_launch() {
    run(&["pull", "qwen2.5-coder-0.5b"]).good();
    let flags = ["--port", "0", "--max-req-total-len", "32768", "--max-total-token-num", "40000"];
    let server = Server::try_start(plimsoll([&["serve", "qwen2.5-coder-0.5b"][..], &flags].concat()));
    let server = server.unwrap_or_else(|words| panic!("{words}"));
    let said = ["-p", "say hi", "--system-prompt", "Be brief.", "--tools", ""];
    answer("claude", "@anthropic-ai/claude-code@2.1.332", &server, &said, NOTE);
    let log = server.log();
    assert!(log.contains("api=\"messages\"") && log.contains("reason=\"finished\""), "{log}");
}

/// A server of the small model with a context for an agent's instructions.
fn roomy() -> Server {
    Server::start(&["--max-req-total-len", "8192", "--max-total-token-num", "16384"])
}

/// The real Continue, with its own instructions.
#[test]
#[ignore = "external"]
fn continue_answers_through_launch() {
    let server = roomy();
    answer("continue", "@continuedev/cli@1.5.47", &server, &["-p", "Say hi"], NOTE);
    assert!(server.log().contains("api=\"chat\""), "{}", server.log());
}

/// The real OpenCode. Its own instructions and tools would be 7,700 tokens, so its settings leave them out.
#[test]
#[ignore = "manual: downloads 360 MB of packages"]
fn manual_opencode_answers_through_launch() {
    let server = roomy();
    let brief = r#"{"tools": {"*": false}, "agent": {"build": {"prompt": "Be brief."}, "title": {"disable": true}}}"#;
    answer("opencode", "opencode-ai@1.18.33", &server, &["run", "Say hi"], ("opencode.json", brief));
    assert!(server.log().contains("api=\"chat\""), "{}", server.log());
}

/// The real Codex. Its own instructions are too long for the small model.
#[test]
#[ignore = "manual: downloads 430 MB of packages"]
fn manual_codex_answers_through_launch() {
    let server = roomy();
    let said = ["exec", "--skip-git-repo-check", "-c", "model_instructions_file=FILE", "Say hi"];
    answer("codex", "@openai/codex@0.171.0", &server, &said, ("brief.md", "Be brief."));
    assert!(server.log().contains("api=\"responses\""), "{}", server.log());
}
