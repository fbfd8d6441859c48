//! The server as an operator runs it: settings from a file and the environment, keys, the files in `deploy/`.

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::http::{Answer, request};
use crate::product::{Finished, PATIENCE, Server, binary, fixture, plimsoll, repository};

/// A file that is removed when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, text: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
        fs::write(&path, text).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn with_key(server: &Server, path: &str, key: &str) -> u16 {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(server.address).unwrap();
    let head =
        format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_server_from_a_file_with_keys_and_json_logs() {
    let keys = Scratch::new("keys", "# two of them\nfile-key-one\nfile-key-two\n");
    let llama = fixture("llama");
    let settings = format!(
        "model = {:?}\nport = 0\nmax-total-token-num = 1024\nserved-model-name = [\"a\", \"b\"]\napi-key-file = {:?}\nlog-format = \"text\"\n",
        llama.to_str().unwrap(),
        keys.path()
    );
    let settings = Scratch::new("settings.toml", &settings);
    let mut command = plimsoll(["serve", "--config", settings.path()]);
    command.env("PLIMSOLL_LOG_FORMAT", "json").env("PLIMSOLL_API_KEY", "from-environment");
    let server = Server::try_start(command).unwrap_or_else(|words| panic!("{words}"));
    assert!(server.ready.contains(": a at http://"), "{}", server.ready);
    assert_eq!(request(server.address, "GET", "/v1/models", b"").unwrap().status, 401);
    assert_eq!(request(server.address, "GET", "/health", b"").unwrap().status, 200);
    for (key, status) in [("file-key-one", 200), ("file-key-two", 200), ("from-environment", 200), ("other", 401)] {
        assert_eq!(with_key(&server, "/v1/models", key), status, "{key}");
    }
    let log = server.log();
    assert!(log.lines().count() > 0, "the start is logged");
    for line in log.lines() {
        let entry: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(entry["level"].is_string() && entry["timestamp"].is_string(), "{line}");
        assert!(!line.contains("file-key"), "keys are not logged: {line}");
    }
}

#[test]
fn print_config_says_where_everything_comes_from_and_loads_nothing() {
    let settings = Scratch::new("print.toml", "port = 1234\nmodel = 'not-there'\n");
    let mut command = plimsoll(["serve", "--config", settings.path(), "--print-config", "--threads", "1"]);
    let page = Finished::of(command.env("PLIMSOLL_DRAIN_SECONDS", "9").output().unwrap()).good();
    for (setting, origin) in [("port = 1234", "file"), ("drain-seconds = 9", "environment"), ("threads = 1", "flag")] {
        let line = page.lines().find(|line| line.starts_with(setting)).unwrap_or_else(|| panic!("{setting}: {page}"));
        assert!(line.ends_with(origin), "{line}");
    }
    let bad = Scratch::new("bad.toml", "prot = 1\n");
    let error = Finished::of(plimsoll(["serve", "--config", bad.path()]).output().unwrap()).refused();
    assert!(error.contains("`prot` (did you mean `port`?)"), "{error}");
}

#[test]
fn the_settings_in_deploy_are_settings() {
    let shipped = repository().join("deploy/plimsoll.toml");
    // Commented-out settings are checked, too, because users uncomment them.
    let text = fs::read_to_string(&shipped).unwrap();
    let lines = text.lines().map(|line| line.strip_prefix('#').filter(|rest| rest.contains(" = ")).unwrap_or(line));
    let all = Scratch::new("all.toml", &lines.collect::<Vec<_>>().join("\n"));
    for file in [shipped.to_str().unwrap(), all.path()] {
        let page = Finished::of(plimsoll(["serve", "--config", file, "--print-config"]).output().unwrap()).good();
        assert!(page.contains("port = 8000"), "{page}");
    }
}

#[test]
fn systemd_unit_is_valid_and_its_memory_is_the_plan() {
    let unit = fs::read_to_string(repository().join("deploy/plimsoll.service")).unwrap();
    for line in
        ["MemoryMax=", "Restart=on-failure", "KillSignal=SIGTERM", "NoNewPrivileges=yes", "ProtectSystem=strict"]
    {
        assert!(unit.lines().any(|known| known.starts_with(line)), "{line}");
    }
    let plan = Finished::of(
        Command::new(repository().join("deploy/memory-max.sh"))
            .args([fixture("llama").to_str().unwrap(), "--max-total-token-num", "1024"])
            .env("PLIMSOLL", binary())
            .output()
            .unwrap(),
    )
    .good();
    let number =
        |from: &str| plan.split_once(from).unwrap().1.split_whitespace().next().unwrap().parse::<u64>().unwrap();
    let (planned, max) = (number("The plan takes "), number("MemoryMax="));
    assert!(planned > 0 && max == planned + planned * 3 / 100, "{plan}");
    // If systemd is installed, it checks the unit, with the path of this binary.
    let here = unit.replace("ExecStart=plimsoll", &format!("ExecStart={}", binary().display()));
    let here = Scratch::new("plimsoll.service", &here);
    match Command::new("systemd-analyze").args(["verify", here.path()]).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && !said.contains("Unknown"), "{said}");
        }
        Err(_) => eprintln!("SYSTEMD-ANALYZE IS NOT HERE: the unit was not verified by it"),
    }
}

/// The image is not built here; its variables and arguments for the binary are checked.
#[test]
fn the_container_speaks_to_this_binary() {
    let file = fs::read_to_string(repository().join("deploy/Containerfile")).unwrap();
    let variables: Vec<_> =
        file.lines().filter_map(|line| line.strip_prefix("ENV ")).flat_map(str::split_whitespace).collect();
    assert!(variables.contains(&"PLIMSOLL_HOST=0.0.0.0"), "{variables:?}");
    let mut command = plimsoll(["serve", "--print-config"]);
    command.envs(variables.iter().filter_map(|variable| variable.split_once('=')));
    let page = Finished::of(command.output().unwrap()).good();
    assert!(page.contains("host = \"0.0.0.0\"") && page.contains("log-format = \"json\""), "{page}");
    for copied in file.lines().filter_map(|line| line.strip_prefix("COPY ")).filter(|line| !line.starts_with("--from"))
    {
        let (sources, _) = copied.rsplit_once(' ').unwrap();
        sources.split(' ').for_each(|source| assert!(repository().join(source).exists(), "{source}"));
    }
}

/// The metrics that a text names, without the suffixes of histograms.
fn metrics_in(text: &str) -> Vec<String> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let names = text.match_indices("plimsoll_").map(|(at, _)| {
        let name: String = text[at..].chars().take_while(|&c| is_name(c)).collect();
        name.strip_suffix("_bucket").map_or(name.clone(), str::to_owned)
    });
    names.collect()
}

#[test]
fn alerts_and_dashboard_name_metrics_that_exist() {
    let server = Server::start(&["--max-total-token-num", "1024"]);
    let page = server.get("/metrics").text();
    let known = |name: &str| page.contains(&format!("# TYPE {name} ")) || page.contains(&format!("# HELP {name} "));
    for file in ["prometheus/alerts.yml", "prometheus/tests.yml", "grafana/plimsoll.json"] {
        let text = fs::read_to_string(repository().join("deploy").join(file)).expect(file);
        let named = metrics_in(&text);
        assert!(named.len() > 4, "{file} names {named:?}");
        let missing: Vec<_> = named.iter().filter(|name| !known(name)).collect();
        assert!(missing.is_empty(), "{file}: {missing:?}");
    }
    let dashboard = fs::read(repository().join("deploy/grafana/plimsoll.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_slice(&dashboard).expect("JSON");
    let ids: std::collections::BTreeSet<_> =
        dashboard["panels"].as_array().expect("panels").iter().map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), dashboard["panels"].as_array().expect("panels").len(), "each panel has an id of its own");
}

#[test]
#[ignore = "external"]
fn promtool_accepts_the_alert_rules() {
    for arguments in [["check", "rules", "alerts.yml"], ["test", "rules", "tests.yml"]] {
        let mut command = Command::new("promtool");
        command.args(arguments).current_dir(repository().join("deploy/prometheus"));
        let output = command.output().expect("promtool is not on PATH: tests/clients/install.sh installs it");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn passed_socket_is_checked_before_the_model_loads() {
    let mut command = plimsoll(["serve", "/no/such/model"]);
    command.env("LISTEN_FDS", "1").env_remove("LISTEN_PID").env_remove("LISTEN_FDNAMES");
    let error = Finished::of(command.output().unwrap()).refused();
    assert!(error.contains("the socket of the service manager") && !error.contains("/no/such/model"), "{error}");
}

#[test]
fn passed_socket_serves_clients_that_came_before_the_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut early = TcpStream::connect(address).unwrap();
    early.set_read_timeout(Some(PATIENCE)).unwrap();
    early.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    // As in systemd's socket activation: descriptor 3, and the process ID in `LISTEN_PID`.
    let mut command = Command::new("sh");
    command.args(["-c", "exec 3<&0 0</dev/null; export LISTEN_PID=$$; exec \"$0\" \"$@\""]);
    command.arg(binary()).args(["serve", "demo", "--port", "1", "--max-total-token-num", "1024"]);
    command.env("LISTEN_FDS", "1").env_remove("LISTEN_FDNAMES").stdin(Stdio::from(OwnedFd::from(listener)));
    let server = Server::try_start(command).unwrap_or_else(|words| panic!("{words}"));
    assert_eq!(server.address, address, "{}", server.ready);
    assert_eq!(Answer::read(early).expect("the early client is answered").status, 200);
    assert_eq!(server.get("/v1/models").status, 200);
    assert!(server.log().contains("every client that reaches the service manager's socket"), "{}", server.log());
}
