//! The web app in a real Chromium: `tests/page/page.mjs` through playwright-core, against servers of five kinds.
//!
//! `tests/clients/install.sh` installs Chromium, Node.js and npm. The variable `CHROMIUM` names another browser of that family.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::product::{Server, fixture, repository};
use crate::python::comes_to_its_end;

/// The release that the script was written for. It drives an installed browser and includes none.
const PLAYWRIGHT: &str = "playwright-core@1.65.1";

/// The accessibility rules that the script checks.
const AXE: &str = "axe-core@4.14.1";

/// Program names of the browser in distributions.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome"];

fn good(command: &mut Command) -> Result<Output, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(output) } else { Err(format!("{command:?}: {}: {said}", output.status)) }
}

/// The first of these programs that is on PATH.
pub fn program(names: &[&str]) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places =
        std::env::split_paths(&path).flat_map(|directory| names.iter().map(move |name| directory.join(name)));
    let found = places.find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("{} is not on PATH: tests/clients/install.sh installs it", names[0]))
}

/// The browser that `CHROMIUM` names, or one on PATH.
fn browser() -> PathBuf {
    let given = std::env::var_os("CHROMIUM").filter(|value| !value.is_empty());
    given.map_or_else(|| program(&BROWSERS), PathBuf::from)
}

/// Installs npm packages once, in a directory of this name in the build directory.
pub fn modules(name: &str, packages: &[&str]) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let complete = target.join("complete");
    let wanted = packages.join("\n");
    if !std::fs::read_to_string(&complete).is_ok_and(|installed| installed == wanted) {
        std::fs::create_dir_all(&target).expect("the build's directory is ours");
        let mut npm = Command::new(program(&["npm"]));
        npm.args(["install", "--no-audit", "--no-fund", "--no-save", "--prefix"]).arg(&target).args(packages);
        good(&mut npm).unwrap_or_else(|why| panic!("npm could not install {packages:?}: {why}"));
        std::fs::write(&complete, wanted).expect("the directory is ours");
    }
    target
}

#[test]
#[ignore = "external"]
fn the_web_app_works_in_a_real_browser() {
    let (browser, playwright) = (browser(), modules(PLAYWRIGHT, &[PLAYWRIGHT, AXE]));
    let plain = Server::start(&["--max-total-token-num", "16384", "--max-req-total-len", "2048"]);
    let (key, hostile) = ("a-key-for-the-page", "<img src=x onerror=alert(1)>");
    let keyed = ["--max-total-token-num", "8192", "--api-key", key, "--served-model-name", hostile];
    let keyed = Server::start_model(&fixture("qwen3.5"), &keyed);
    let encoder = Server::start_model(&fixture("bert"), &[]);
    let seeing =
        Server::start_model(&fixture("vl-qwen3.5"), &["--max-total-token-num", "8192", "--media-bytes", "67108864"]);
    let hearing = Server::start_model(&fixture("omni"), &["--max-total-token-num", "8192"]);
    let url = |server: &Server| format!("http://{}", server.address);
    let mut command = Command::new(program(&["node"]));
    command
        .arg(repository().join("tests/page/page.mjs"))
        .env("CHROMIUM", browser)
        .env("PLAYWRIGHT", playwright)
        .envs([("PLAIN", url(&plain)), ("KEYED", url(&keyed)), ("ENCODER", url(&encoder)), ("KEY", key.into())])
        .envs([("SEEING", url(&seeing)), ("HEARING", url(&hearing))])
        // The browser must not use a proxy for the loopback address.
        .envs([("NO_PROXY", "*"), ("no_proxy", "*")]);
    comes_to_its_end(&mut command, &plain);
}
