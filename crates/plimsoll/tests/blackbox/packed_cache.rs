//! Packed weights on disk from outside: the log, the metrics, the doctor, and servers that start at once.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::product::{Server, fixture, plimsoll, run};
use crate::terminal::Data;

fn start(dir: &str, more: &[&str]) -> Server {
    let model = fixture("qwen3-moe");
    let words = ["serve", model.to_str().unwrap(), "--port", "0", "--threads", "1", "--max-total-token-num", "1024"];
    let command = plimsoll([&words[..], &["--packed-cache", dir], more].concat());
    Server::try_start(command).unwrap_or_else(|words| panic!("{words}"))
}

/// The text of a completion, and whether the server's weights were mapped.
fn said(server: &Server) -> (Value, bool) {
    let body = json!({"prompt": "a b c d e", "max_tokens": 12, "temperature": 0, "ignore_eos": true});
    let text = server.ask("/v1/completions", &body)["choices"][0]["text"].clone();
    let page = server.get("/metrics").text();
    (text, page.contains("\nplimsoll_weights_mapped 1\n"))
}

fn stop(mut server: Server) -> String {
    server.signal("TERM");
    assert!(server.ended().success(), "{}", server.log());
    server.log()
}

fn files(dir: &Path) -> usize {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".file")).count()
}

#[test]
fn servers_that_start_at_once_keep_one_file_and_the_next_start_says_that_it_maps() {
    let folder = Data::new("packed-cache");
    // The server creates the parents of the directory, too.
    let dir = folder.at("deep/packed");
    let first = std::thread::scope(|scope| {
        let both = [(); 2].map(|()| scope.spawn(|| start(&dir, &[])));
        both.map(|server| server.join().unwrap())
    });
    let said_first = first.each_ref().map(said);
    assert_eq!(said_first[0].0, said_first[1].0);
    for server in first {
        stop(server);
    }
    assert_eq!(files(Path::new(&dir)), 1);
    let next = start(&dir, &[]);
    assert_eq!(said(&next), (said_first[0].0.clone(), true));
    let held = next.memory()["process"]["held_file"].as_u64().unwrap();
    assert!(held > 0, "its pages count");
    let log = stop(next);
    assert!(log.contains("mapped from") && log.contains("every byte checked") && !log.contains(" packed\""), "{log}");
    // A server with another instruction set packs another file. Its text may differ: a matrix unit computes prompts in bf16.
    let (text, mapped) = said(&start(&dir, &["--isa", "portable"]));
    assert_eq!((mapped, files(Path::new(&dir))), (false, 2));
    assert_eq!(said(&start(&dir, &["--isa", "portable"])), (text, true));
    let doctor: Value = serde_json::from_str(
        &run(&["doctor", fixture("llama").to_str().unwrap(), "--json", "--port", "0", "--packed-cache", &dir]).stdout,
    )
    .unwrap();
    let found = doctor["checks"].as_array().unwrap().iter().find(|check| check["check"] == "packed cache").unwrap();
    assert!(found["level"] == "ok" && found["found"].as_str().unwrap().starts_with("2 models in "), "{found}");
}

#[test]
fn a_bound_that_holds_no_model_and_a_directory_of_others_are_said() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Data::new("packed-cache-bounds");
    let dir = folder.at("packed");
    let (_, mapped) = {
        let server = start(&dir, &["--packed-cache-bytes", "1000"]);
        let said = said(&server);
        let log = stop(server);
        assert!(log.contains("the weights are not kept") && log.contains("may take 1000"), "{log}");
        said
    };
    assert!(!mapped && files(Path::new(&dir)) == 0);
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    let refused = run(&["serve", fixture("llama").to_str().unwrap(), "--port", "0", "--packed-cache", &dir]).refused();
    assert!(refused.contains("--packed-cache: other users can enter"), "{refused}");
}
