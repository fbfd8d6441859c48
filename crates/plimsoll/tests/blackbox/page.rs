//! The load-line page in a real Chromium: `tests/page/page.mjs` through playwright-core, against servers of four kinds.
//! With root, the test installs Debian's `chromium`, `nodejs` and `npm` where they are missing. Without root, they must
//! be installed already. `CHROMIUM` may name another browser of that family. If one of them is missing, the test fails
//! and says so.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::product::{Server, fixture, repository};

/// The release the script was written against; it drives a browser that is there and brings none.
const PLAYWRIGHT: &str = "playwright-core@1.65.1";

/// Names of the browser, as distributions have them.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome"];

fn good(command: &mut Command) -> Result<Output, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(output) } else { Err(format!("{command:?}: {}: {said}", output.status)) }
}

/// The first of these programs that is there, or what Debian's packages bring.
pub fn program(names: &[&str], packages: &[&str]) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let there = || {
        let mut places =
            std::env::split_paths(&path).flat_map(|directory| names.iter().map(move |name| directory.join(name)));
        places.find(|place| place.is_file())
    };
    if let Some(found) = there() {
        return found;
    }
    let apt = |args: &[&str]| {
        good(Command::new("apt-get").args(args).args(["-y", "-qq"]).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    let install = [&["install", "--no-install-recommends"], packages].concat();
    let installed = apt(&["update"]).and_then(|_| apt(&install));
    let why = installed.err().unwrap_or_else(|| "apt-get brought none".into());
    there().unwrap_or_else(|| panic!("the test needs {}: {why}", names[0]))
}

/// The browser that `CHROMIUM` names, an installed one, or Debian's.
fn browser() -> PathBuf {
    let given = std::env::var_os("CHROMIUM").filter(|value| !value.is_empty());
    given.map_or_else(|| program(&BROWSERS, &["chromium", "fonts-dejavu-core"]), PathBuf::from)
}

/// Packages of npm, installed once below the build's own files, in a directory of this name.
pub fn modules(name: &str, packages: &[&str]) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let complete = target.join("complete");
    let wanted = packages.join("\n");
    if !std::fs::read_to_string(&complete).is_ok_and(|installed| installed == wanted) {
        std::fs::create_dir_all(&target).expect("the build's directory is ours");
        let mut npm = Command::new(program(&["npm"], &["nodejs", "npm"]));
        npm.args(["install", "--no-audit", "--no-fund", "--no-save", "--prefix"]).arg(&target).args(packages);
        good(&mut npm).unwrap_or_else(|why| panic!("npm could not install {packages:?}: {why}"));
        std::fs::write(&complete, wanted).expect("the directory is ours");
    }
    target
}

#[test]
fn the_page_does_what_it_shows_in_a_real_browser() {
    let (browser, playwright) = (browser(), modules(PLAYWRIGHT, &[PLAYWRIGHT]));
    let plain = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    let (key, hostile) = ("a-key-for-the-page", "<img src=x onerror=alert(1)>");
    let keyed = ["--max-total-token-num", "8192", "--api-key", key, "--served-model-name", hostile];
    let keyed = Server::start_model(&fixture("qwen3.5"), &keyed);
    let encoder = Server::start_model(&fixture("bert"), &[]);
    let seeing =
        Server::start_model(&fixture("vl-qwen3.5"), &["--max-total-token-num", "8192", "--media-bytes", "67108864"]);
    let url = |server: &Server| format!("http://{}", server.address);
    let output = Command::new(program(&["node"], &["nodejs"]))
        .arg(repository().join("tests/page/page.mjs"))
        .env("CHROMIUM", browser)
        .env("PLAYWRIGHT", playwright)
        .envs([("PLAIN", url(&plain)), ("KEYED", url(&keyed)), ("ENCODER", url(&encoder)), ("KEY", key.into())])
        .env("SEEING", url(&seeing))
        // Nothing on this machine may come between the browser and the loopback address.
        .envs([("NO_PROXY", "*"), ("no_proxy", "*")])
        .output()
        .expect("node runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    print!("{stdout}");
    assert!(output.status.success(), "{stdout}\n{stderr}\nserver:\n{}", plain.log());
    assert!(stdout.trim_end().ends_with("all good"), "the script came to its end: {stdout}");
}
