//! Python packages for the tests that need some.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// A package of PyPI, installed once below the build's own files.
///
/// A plain directory instead of a virtual environment: it needs nothing but pip, and where pip may not touch the system's
/// packages it may still fill a directory.
pub fn packages(requirement: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join(requirement.replace("==", "-"));
    let complete = target.join("complete");
    if !complete.is_file() {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"]).arg(&target).arg(requirement);
        let output = pip.output().expect("python3 runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "pip could not install {requirement}: {said}");
        std::fs::write(&complete, requirement).expect("the directory is ours");
    }
    target
}
