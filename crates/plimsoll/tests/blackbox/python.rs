//! Python for the tests that need it: packages, and scripts that check a server.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::product::{Server, repository};

/// Installs packages of PyPI once, in a directory of the build directory. `wishes` are the arguments of pip.
///
/// It uses a plain directory instead of a virtual environment. This needs only pip, and also works where pip may not change the
/// system's packages.
pub fn packages(name: &str, wishes: &[&str]) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let complete = target.join("complete");
    // Requirement files are included: another release is another installation.
    let file = |word: &str| std::fs::read_to_string(repository().join(word)).unwrap_or_default();
    let wanted: String = wishes.iter().map(|word| format!("{word}\n{}", file(word))).collect();
    if std::fs::read_to_string(&complete).is_ok_and(|installed| installed == wanted) {
        return target;
    }
    let mut pip = Command::new("python3");
    // Modules that are never imported need not be compiled.
    pip.args(["-m", "pip", "install", "--quiet", "--no-compile", "--upgrade", "--target"]).arg(&target).args(wishes);
    let output = pip.current_dir(repository()).output().expect("python3 runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "pip could not install {wishes:?}: {said}");
    std::fs::write(&complete, wanted).expect("the directory is ours");
    target
}

/// A program that finds the packages of this requirement, and uses no proxy for the loopback address.
pub fn beside(requirement: &str, program: impl AsRef<OsStr>) -> Command {
    among(&requirement.replace("==", "-"), &[requirement], program)
}

/// As [`beside`], with packages that need several arguments of pip, in a directory of this name.
pub fn among(name: &str, wishes: &[&str], program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("PYTHONPATH", packages(name, wishes));
    command.env("PYTHONPYCACHEPREFIX", Path::new(env!("CARGO_TARGET_TMPDIR")).join("pycache"));
    command.envs([("NO_PROXY", "*"), ("no_proxy", "*")]);
    command
}

/// Runs a script of `tests/clients` against a server, with further arguments. It must succeed.
pub fn satisfies(requirement: &str, script: &str, server: &Server, more: &[PathBuf]) {
    ends_well(beside(requirement, "python3"), script, server, more);
}

/// Runs a script with a command that finds its packages.
pub fn ends_well(mut command: Command, script: &str, server: &Server, more: &[PathBuf]) {
    command.arg(repository().join("tests/clients").join(script)).arg(format!("http://{}", server.address)).args(more);
    comes_to_its_end(&mut command, server);
}

/// Runs a command that checks a server. Its output must end with `all good`.
pub fn comes_to_its_end(command: &mut Command, server: &Server) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    print!("{stdout}");
    assert!(output.status.success(), "{stdout}\n{stderr}\nserver:\n{}", server.log());
    assert!(stdout.trim_end().ends_with("all good"), "the script came to its end: {stdout}");
}
