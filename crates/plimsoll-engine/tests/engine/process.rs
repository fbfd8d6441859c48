//! Tests in separate processes: the counted heap, mappings and injected faults belong to the process.

use std::process::Command;

use crate::common::settle;

/// The environment variable that marks such a process.
const MARK: &str = "PLIMSOLL_TEST_PROCESS";

/// Runs the rest of a test in a separate process, in which no other test runs.
macro_rules! own_process {
    () => {{
        fn here() {}
        if $crate::process::has_run(std::any::type_name_of_val(&here)) {
            return;
        }
    }};
}
pub(crate) use own_process;

/// Runs this program for one test, and fails if the test fails; false in the process that it starts. `here` is the path of a function in
/// the test.
pub fn has_run(here: &str) -> bool {
    if std::env::var_os(MARK).is_some() {
        // The harness may still record the test, on the same heap.
        settle();
        return false;
    }
    let (_, path) = here.split_once("::").expect("the path begins with the program");
    let test = path.strip_suffix("::here").expect("it ends with the function");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([test, "--exact", "--include-ignored", "--nocapture"]).env(MARK, "1");
    let output = command.output().expect("it starts");
    let [said, complained] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success() && said.contains("1 passed"), "{test}: {}\n{said}\n{complained}", output.status);
    print!("{said}");
    eprint!("{complained}");
    true
}
