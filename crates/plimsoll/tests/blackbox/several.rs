//! `serve --models` with real models. Answers are those of a server with that model alone. Memory is taken and freed with the
//! models, and stays under one memory limit.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use serde_json::{Value, json};

use crate::product::{Server, default_model, eventually, fixture, plimsoll, run};

/// Most bytes that anonymous memory may grow by after all models are unloaded. The allocator and the HTTP threads keep them after
/// their first use.
const KEPT: u64 = 4 << 20;

/// Most unaccounted bytes during a load. The process and the ledger are read one after the other, and the heap may change in
/// between. For comparison, the KV cache alone is 176 MiB.
const BETWEEN_LOOKS: i64 = 16 << 20;

/// A directory for one test's files, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("several-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// A server of the models that `toml` lists.
    fn serve(&self, toml: &str, flags: &[&str]) -> Server {
        let file = self.0.join("models.toml");
        fs::write(&file, toml).unwrap();
        let args = ["serve", "--port", "0", "--models", file.to_str().unwrap()];
        Server::try_start(plimsoll([&args, flags].concat())).unwrap_or_else(|words| panic!("{words}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that cannot be removed stays in the build directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        let (from, to) = (file.path(), to.join(file.file_name()));
        if from.is_dir() {
            copy_all(&from, &to);
        } else {
            fs::copy(from, to).unwrap();
        }
    }
}

fn anonymous(server: &Server) -> u64 {
    server.memory()["process"]["rss_anon"].as_u64().unwrap()
}

fn part(server: &Server, name: &str) -> Value {
    let page = server.memory();
    page["models"].as_array().unwrap().iter().find(|part| part["model"] == name).unwrap().clone()
}

fn all_unloaded(server: &Server) -> bool {
    server.memory()["models"].as_array().unwrap().iter().all(|part| part["state"] == "unloaded")
}

/// The most unaccounted bytes of the ledger while `act` runs.
fn unaccounted_while(server: &Server, act: impl FnOnce()) -> i64 {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = i64::MIN;
            while !over.load(Relaxed) {
                most = most.max(server.memory()["unaccounted_bytes"].as_i64().unwrap());
            }
            most
        });
        act();
        over.store(true, Relaxed);
        watch.join().unwrap()
    })
}

fn story(model: &str) -> Value {
    json!({"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": true})
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

fn toml(name: &str, model: &Path, more: &str) -> String {
    format!("[[models]]\nname = '{name}'\nmodel = '{}'\n{more}\n", model.display())
}

/// The memory report. Checks that the plans fit the memory limit, and each row fits its plan.
fn within_the_plan(server: &Server, line: u64) -> Value {
    let page = server.memory();
    assert!(page["planned_bytes"].as_u64().unwrap() <= line, "I1: {page}");
    for row in page["components"].as_array().unwrap() {
        assert!(row["committed_bytes"].as_u64() <= row["planned_bytes"].as_u64(), "I2: {row}");
    }
    page
}

/// The memory report of a server without loaded models: its rows are all that is planned.
fn only_the_shared_part(server: &Server) -> Value {
    let page = server.memory();
    let rows = page["components"].as_array().unwrap().iter();
    let planned: u64 = rows.map(|row| row["planned_bytes"].as_u64().unwrap()).sum();
    assert_eq!(page["planned_bytes"], planned);
    assert_eq!(page["device_allocations"]["after_ready"], 0);
    page
}

#[test]
#[ignore = "models"]
fn models_come_and_go_and_so_does_their_memory() {
    default_model();
    let folder = Folder::new("come-and-go");
    let (tiny, broken) = (fixture("llama"), folder.0.join("broken.gguf"));
    fs::copy(fixture("gguf-llama-q4_0"), &broken).unwrap();
    copy_all(&fixture("bert"), &folder.0.join("words"));
    let listed = [
        "[[models]]\nname = 'smol'\nmodel = 'smollm2'\nmax-total-token-num = 8192\nidle-seconds = 2\n".to_owned(),
        toml("tiny", &tiny, "served-model-name = ['little']\nidle-seconds = 2"),
        toml("words", &folder.0.join("words"), "idle-seconds = 2"),
        toml("broken", &broken, ""),
    ];
    let server = folder.serve(&listed.concat(), &["--threads", "2"]);
    // Breaks the file of a model after the server's start.
    fs::write(&broken, "nothing of the kind").unwrap();
    let alone = Server::start_model(&tiny, &["--threads", "2"]);
    let expected = text(&alone.ask("/v1/completions", &story("llama"))).to_owned();
    drop(alone);
    let (before, line) = (anonymous(&server), server.memory()["line_bytes"].as_u64().unwrap());
    assert!(server.memory()["planned_bytes"].as_u64().unwrap() <= line);
    for round in 0..3 {
        assert_eq!(text(&server.ask("/v1/completions", &story("little"))), expected, "as alone");
        let unaccounted = unaccounted_while(&server, || drop(server.ask("/v1/completions", &story("smol"))));
        assert!(unaccounted < BETWEEN_LOOKS, "{unaccounted} bytes in no row while it loads");
        let embedding = server.ask("/v1/embeddings", &json!({"model": "words", "input": "a ship"}));
        assert!(embedding["data"][0]["embedding"].as_array().unwrap().len() > 8);
        let refused = server.post("/v1/completions", &story("broken"));
        assert_eq!(refused.status, 500);
        assert_eq!(refused.json()["error"]["code"], "model_load_failed");
        // Beside the others, the model answers as it does alone.
        assert_eq!(text(&server.ask("/v1/completions", &story("tiny"))), expected);
        let page = within_the_plan(&server, line);
        let (held, unaccounted) = (anonymous(&server), page["unaccounted_bytes"].as_i64().unwrap());
        assert!(held > before + (100 << 20), "SmolLM2 alone has more than that: {held}");
        eventually("all are unloaded", || all_unloaded(&server));
        let after = anonymous(&server);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!(
            "round {round}: {:.1} MiB before the first load, {:.1} with three models ({:.1} unaccounted), {:.1} when they are gone",
            mib(before),
            mib(held),
            unaccounted as f64 / f64::from(1 << 20),
            mib(after)
        );
        assert!(after <= before + KEPT, "{after} bytes when all are gone, {before} before");
        let page = only_the_shared_part(&server);
        // The counts of requests stay after their model is unloaded.
        assert!(page["requests"]["finished"].as_u64().unwrap() >= 3 * (round + 1), "{page}");
    }
    // A new model under the old name is planned and loaded next.
    let planned = |name: &str| part(&server, name)["planned_bytes"].as_u64().unwrap();
    let before = planned("words");
    let files = folder.0.join("words");
    fs::rename(&files, folder.0.join("gone")).unwrap();
    copy_all(&fixture("bert-cross"), &files);
    let scores = json!({"model": "words", "query": "a ship", "documents": ["water", "a ship"]});
    assert_eq!(server.ask("/v1/rerank", &scores)["results"].as_array().unwrap().len(), 2);
    assert_ne!(planned("words"), before);
    // The log has lines for each load, also for a failed one.
    for line in [
        "loading model=\"smol\" planned_bytes=",
        "loaded model=\"smol\" planned_bytes=",
        "not loaded model=\"broken\" planned_bytes=0 seconds=0.0 error=",
    ] {
        assert!(server.log().contains(line), "{line}: {}", server.log());
    }
    // On a slow machine, the model may also have been unloaded between two requests of a round.
    assert!(part(&server, "tiny")["loads"].as_u64() >= Some(3));
}

/// The lines of a stream, once its head was sent.
fn stream(server: &Server, body: &Value) -> BufReader<TcpStream> {
    let body = body.to_string();
    let mut client = TcpStream::connect(server.address).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    client.write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    BufReader::new(client)
}

fn read_to(stream: &mut BufReader<TcpStream>, marker: &str) {
    let mut line = String::new();
    while !line.contains(marker) {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "ended before {marker}");
    }
}

#[test]
#[ignore = "models"]
fn one_line_for_all_of_them() {
    default_model();
    let folder = Folder::new("one-line");
    let listed = [
        "[[models]]\nname = 'smol'\nmodel = 'smollm2'\nmax-total-token-num = 4096\n".to_owned(),
        "[[models]]\nname = 'giant'\nmodel = 'smollm2'\nmax-total-token-num = 50000000\n".to_owned(),
        toml("tiny", &fixture("llama"), "max-total-token-num = 4096"),
        toml("small", &fixture("qwen3"), "max-total-token-num = 4096"),
    ]
    .concat();
    let server = folder.serve(&listed, &[]);
    let shared = server.memory()["planned_bytes"].as_u64().unwrap();
    for name in ["smol", "tiny"] {
        server.ask("/v1/completions", &story(name));
    }
    let of = |name: &str| part(&server, name)["planned_bytes"].as_u64().unwrap();
    let (smol, tiny) = (of("smol"), of("tiny"));
    // I8: the plan says what the server does.
    let file = folder.0.join("models.toml");
    let plan = run(&["plan", "--json", "--models", file.to_str().unwrap()]).good();
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["shared_total"], shared);
    let planned = |at: usize| (plan["models"][at]["name"].clone(), plan["models"][at]["total"].clone());
    assert_eq!((planned(0), planned(2)), ((json!("smol"), json!(smol)), (json!("tiny"), json!(tiny))));
    assert!(plan["models"][1]["error"].as_str().unwrap().contains("it needs"), "{plan}");
    let plan = run(&["plan", "--models", file.to_str().unwrap()]).good();
    assert!(plan.contains("giant: never loaded: it needs"), "{plan}");
    assert!(plan.contains("all but `giant` at once: ") && plan.contains(": they fit together"), "{plan}");
    assert!(server.log().contains("it can never be loaded; requests for it are refused: it needs"), "{}", server.log());
    assert_eq!(server.memory()["planned_bytes"].as_u64().unwrap(), shared + smol + tiny);
    drop(server);
    // A memory limit for the large model, or for the two small ones.
    let budget = shared + smol + (1 << 20);
    assert!(tiny > 1 << 20 && 2 * tiny < smol, "{tiny} {smol}");
    let mut server = folder.serve(&listed, &["--memory-budget", &budget.to_string()]);
    server.ask("/v1/completions", &story("tiny"));
    server.ask("/v1/completions", &story("small"));
    server.ask("/v1/completions", &story("smol"));
    for gone in ["tiny", "small"] {
        assert_eq!(part(&server, gone)["state"], "unloaded", "{gone} made room");
    }
    let page = server.memory();
    assert!(page["process"]["rss_anon"].as_u64().unwrap() <= budget, "{page}");
    let refused = server.post("/v1/completions", &story("giant"));
    assert_eq!(refused.status, 400);
    let error = refused.json()["error"].clone();
    assert_eq!(error["code"], "model_does_not_fit");
    assert!(error["message"].as_str().unwrap().contains("it needs"), "{error}");
    // A model in use stays loaded. A request that needs its memory for another model is refused and told so.
    let body = json!({"model": "smol", "prompt": "Once", "max_tokens": 2000, "ignore_eos": true, "stream": true});
    let mut busy = stream(&server, &body);
    read_to(&mut busy, "data: ");
    let refused = server.post("/v1/completions", &story("tiny"));
    assert_eq!((refused.status, refused.header("retry-after").is_some()), (503, true));
    let error = refused.json()["error"].clone();
    assert!(error["message"].as_str().unwrap().contains("`smol` ("), "{error}");
    drop(busy);
    eventually("its room is another's", || server.post("/v1/completions", &story("tiny")).status == 200);
    assert_eq!(part(&server, "smol")["state"], "unloaded");
    server.signal("TERM");
    assert!(server.ended().success(), "{}", server.log());
    assert!(server.log().contains("the ledger at the end"), "{}", server.log());
}

/// When "ready" is printed, every name must lead to a model.
#[test]
fn a_name_without_a_model_is_found_before_ready() {
    let folder = Folder::new("nothing-there");
    let missing = folder.0.join("nothing.gguf");
    let file = folder.0.join("models.toml");
    let serve = ["serve", "--port", "0", "--models", file.to_str().unwrap()];
    fs::write(&file, toml("tiny", &fixture("llama"), "") + &toml("gone", &missing, "")).unwrap();
    let words = run(&serve).refused();
    for part in ["models.toml", "`gone`", missing.to_str().unwrap()] {
        assert!(words.contains(part), "{part}: {words}");
    }
    // A directory that is no model.
    let adapter = folder.0.join("adapter");
    fs::create_dir_all(&adapter).unwrap();
    fs::write(adapter.join("adapter_config.json"), "{}").unwrap();
    fs::write(&file, toml("tiny", &fixture("llama"), "") + &toml("tuned", &adapter, "")).unwrap();
    let words = run(&serve).refused();
    assert!(words.contains("`tuned`") && words.contains("adapter_config.json"), "{words}");
    // A model that cannot use this setting.
    fs::write(&file, toml("tiny", &fixture("llama"), "") + &toml("close", &fixture("bert"), "max-total-token-num = 9"))
        .unwrap();
    let words = run(&serve).refused();
    assert!(words.contains("`close`") && words.contains("--max-total-token-num is 9, but this model"), "{words}");
    // The same holds for settings of replies and files that are only read, and `plan` reports the same errors.
    let odd = folder.0.join("odd");
    copy_all(&fixture("llama"), &odd);
    fs::write(odd.join("generation_config.json"), r#"{"top_p": 7}"#).unwrap();
    for (listed, part) in [
        (toml("judge", &fixture("bert-cross"), "pooling = 'mean'"), "this model scores pairs"),
        (toml("judge", &odd, ""), "generation_config.json"),
    ] {
        fs::write(&file, toml("tiny", &fixture("llama"), "") + &listed).unwrap();
        let words = run(&serve).refused();
        assert!(words.contains("`judge`") && words.contains(part), "{words}");
        for form in [&["plan", "--models"][..], &["plan", "--json", "--models"]] {
            let plan = run(&[form, &[file.to_str().unwrap()]].concat());
            assert!(plan.code == Some(1) && plan.stdout.contains(part), "{plan:#?}");
            assert!(plan.stderr.contains("models.toml: no plan for `judge`"), "{plan:#?}");
        }
    }
    // An error in the file is reported with file, line and key, not with a flag.
    fs::write(&file, toml("tiny", &fixture("llama"), "max-waiting = 'many'")).unwrap();
    let words = run(&serve).refused();
    assert!(words.contains("models.toml: line 4: `max-waiting`: `many`: invalid digit"), "{words}");
    assert!(!words.contains("--"), "{words}");
}

/// A real load stops at a tensor when its server has no time left for it.
#[test]
#[ignore = "models"]
fn a_server_that_ends_does_not_load_on() {
    default_model();
    let folder = Folder::new("ends");
    let mut server = folder.serve("[[models]]\nname = 'smol'\nmodel = 'smollm2'\n", &["--drain-seconds", "0"]);
    let client = stream(&server, &story("smol"));
    eventually("it is being loaded", || part(&server, "smol")["state"] != "unloaded");
    server.signal("TERM");
    assert!(server.ended().success(), "{}", server.log());
    // On a fast machine, the model was already loaded.
    let log = server.log();
    assert!(
        log.contains("load cancelled: no request waits for it model=\"smol\"") || log.contains("loaded model=\"smol\""),
        "{log}"
    );
    assert!(log.contains("the ledger at the end"), "{log}");
    drop(client);
}
