//! Faults of unloading: models that leave memory behind.

use std::path::Path;

use serde_json::json;

use crate::product::{Server, eventually, fixture, plimsoll};
use crate::visitor::{anonymous, greedy, number, prompt, with};

// vllm-mlx 638, constrained/cache.py: idle models were not unloaded, or left their vocabulary's trie and their pool behind.
#[test]
fn v_11_v_z_a_model_that_was_unloaded_takes_its_grammars_along() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("museum-unloading-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (file, model) = (folder.join("models.toml"), fixture("llama"));
    let toml = format!(
        "[[models]]\nname = 'tiny'\nmodel = '{}'\nmax-total-token-num = 8192\nidle-seconds = 1\n",
        model.display()
    );
    std::fs::write(&file, toml).expect("a file");
    let args = ["serve", "--port", "0", "--models", file.to_str().expect("UTF-8")];
    let server = Server::try_start(plimsoll(args)).unwrap_or_else(|words| panic!("{words}"));
    let mut after = Vec::new();
    for round in 0..6 {
        for i in 0..10 {
            let schema =
                json!({"type": "object", "properties": {"a": {"type": "string", "minLength": i}}, "required": ["a"]});
            let form = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
            let body = with(greedy(&prompt(round, 200), 8), json!({"model": "tiny", "response_format": form}));
            server.ask("/v1/completions", &body);
        }
        let unloaded = || server.memory()["models"][0]["state"] == "unloaded";
        eventually("it is unloaded", unloaded);
        after.push(anonymous(&server));
    }
    let page = server.memory();
    assert_eq!(number(&page["models"][0]["loads"]), 6, "{page}");
    // A leak stays. A block between others may stay only for a moment, so the smallest of the last three values counts.
    let least = after[3..].iter().min().expect("six times");
    assert!(least - after[1] <= 1 << 20, "anonymous memory after each time: {after:?}");
    drop(server);
    std::fs::remove_dir_all(&folder).expect("removed");
}
