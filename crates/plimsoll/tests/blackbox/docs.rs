//! The guides in `docs/`: every command in them works, in order.
//!
//! All blocks of a guide that are fenced as `sh` run in one shell, in a directory that looks like a checkout, with this binary as
//! `plimsoll`. A block that cannot be run here says why in its fence (`sh not-run: needs root`).

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::product::{binary, cache, default_model, repository};

/// Time limit of a guide.
const FOLLOWED_WITHIN: Duration = Duration::from_secs(600);

/// The fenced blocks of a text: the info string of the fence, and the lines inside.
fn blocks(text: &str) -> Vec<(String, String)> {
    let mut blocks: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match (line.strip_prefix("```"), inside) {
            (Some(info), false) => blocks.push((info.trim().to_owned(), String::new())),
            (Some(_), true) => {}
            (None, true) => blocks.last_mut().unwrap().1.extend([line, "\n"]),
            (None, false) => continue,
        }
        inside = inside != line.starts_with("```");
    }
    assert!(!inside, "a block has no end");
    blocks
}

fn guide(name: &str) -> String {
    let path = repository().join("docs").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The blocks of a guide that run, as one script.
fn script(name: &str) -> String {
    let all = blocks(&guide(name));
    for (info, block) in &all {
        let reason = info.strip_prefix("sh ").map(|rest| rest.strip_prefix("not-run: ").unwrap_or_default());
        assert!(reason.is_none_or(|reason| reason.len() > 8), "{name}: why is this not run? {info}\n{block}");
    }
    let run: Vec<_> = all.into_iter().filter(|(info, _)| info == "sh").map(|(_, block)| block).collect();
    assert!(!run.is_empty(), "{name}: there is nothing to follow");
    run.concat()
}

/// A directory like a checkout. It is removed when it is dropped, and every process that was started in it is killed.
struct Scratch {
    path: PathBuf,
    shell: Option<Child>,
}

impl Scratch {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("guide-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("bin")).unwrap();
        symlink(binary(), path.join("bin/plimsoll")).unwrap();
        for part in ["crates", "deploy", "tests", "tools"] {
            symlink(repository().join(part), path.join(part)).unwrap();
        }
        Self { path, shell: None }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(shell) = &mut self.shell {
            // The shell's process group, which may have ended already.
            let _ = Command::new("kill")
                .args(["-s", "KILL", "--", &format!("-{}", shell.id())])
                .stderr(Stdio::null())
                .status();
            let _ = shell.wait();
        }
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Follows a guide to its end.
fn follow(name: &str) {
    default_model();
    let mut scratch = Scratch::new(name);
    // The guides use port 8000. Several guides run at once here, so each gets its own port.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let script = format!("set -eux\n{}", script(name).replace(":8000", &format!(":{port}")));
    let log = scratch.path.join("log");
    let out = File::create(&log).unwrap();
    let path = format!("{}:{}", scratch.path.join("bin").display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.args(["-c", &script]).current_dir(&scratch.path).process_group(0).stdin(Stdio::null());
    command.env("PATH", path).env("PLIMSOLL_CACHE", cache()).env("PLIMSOLL_PORT", &port).env_remove("RUST_LOG");
    command.stderr(out.try_clone().unwrap()).stdout(out);
    let shell = scratch.shell.insert(command.spawn().unwrap());
    let since = Instant::now();
    let status = loop {
        if let Some(status) = shell.try_wait().unwrap() {
            break Some(status);
        }
        if since.elapsed() > FOLLOWED_WITHIN {
            break None;
        }
        thread::sleep(Duration::from_millis(50));
    };
    let said = String::from_utf8_lossy(&fs::read(&log).unwrap()).into_owned();
    assert!(status.is_some_and(|status| status.success()), "{name}: {status:?}\n{said}");
}

macro_rules! guides {
    ($($test:ident $name:literal)*) => {
        /// Every guide.
        const GUIDES: &[&str] = &[$($name),*];

        $(#[test]
        #[ignore = "external"]
        fn $test() {
            follow($name);
        })*
    };
}

guides! {
    getting_started_can_be_followed "getting-started.md"
    serving_can_be_followed "serving.md"
    sizing_can_be_followed "sizing.md"
    speculation_can_be_followed "speculation.md"
    media_can_be_followed "media.md"
    ollama_can_be_followed "ollama.md"
    models_and_formats_can_be_followed "models-and-formats.md"
    operating_can_be_followed "operating.md"
    the_terminal_can_be_followed "terminal.md"
    disk_cache_can_be_followed "disk-cache.md"
    scaling_out_can_be_followed "scaling-out.md"
    adding_a_model_can_be_followed "adding-a-model.md"
    adding_a_kernel_can_be_followed "adding-a-kernel.md"
}

/// Files that a text links to, relative to its own directory.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains("://")).collect()
}

#[test]
fn the_readme_leads_to_every_guide_and_guides_to_files_that_are_there() {
    let readme = fs::read_to_string(repository().join("README.md")).unwrap();
    for name in GUIDES {
        assert!(links(&readme).contains(&&*format!("docs/{name}")), "the README does not lead to {name}");
        let text = guide(name);
        for target in links(&text) {
            assert!(repository().join("docs").join(target).exists(), "{name}: {target} is not there");
        }
        // Paths in code spans of the text.
        for word in
            text.split('`').skip(1).step_by(2).filter(|word| word.starts_with("crates/") || word.starts_with("deploy/"))
        {
            assert!(repository().join(word).exists(), "{name}: {word} is not there");
        }
    }
}

#[test]
fn a_block_is_what_stands_between_its_fences() {
    let text = "a\n```sh\none\ntwo\n```\nb\n```sh not-run: needs root\nthree\n```\n```\nfour\n```\n";
    let expected = [("sh", "one\ntwo\n"), ("sh not-run: needs root", "three\n"), ("", "four\n")];
    assert_eq!(blocks(text), expected.map(|(info, block)| (info.to_owned(), block.to_owned())));
}
