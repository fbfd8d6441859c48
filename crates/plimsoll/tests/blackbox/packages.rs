//! The packages of a release, built from this checkout and tried, and the service managers' files.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::product::{Finished, binary, outside_of_cargo, repository};
use crate::python::packages;

fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn file(folder: &Path, suffix: &str) -> PathBuf {
    let entries = std::fs::read_dir(folder).expect("a folder of packages");
    let found =
        entries.map(|entry| entry.expect("an entry").path()).find(|path| path.to_string_lossy().ends_with(suffix));
    found.unwrap_or_else(|| panic!("no file in {} ends with {suffix}", folder.display()))
}

fn run(command: &mut Command) -> String {
    Finished::of(command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))).good()
}

/// Runs the program of a package: it plans the model that is built into it.
fn plans(program: &Path) {
    let plan = run(Command::new(program).args(["plan", "demo"]));
    assert!(plan.contains("weights"), "{plan}");
}

#[test]
#[ignore = "external"]
fn archive_wheel_and_debian_package_carry_the_program() {
    let out = folder();
    let host = run(Command::new("rustc").arg("-vV"));
    let triple = host.lines().find_map(|line| line.strip_prefix("host: ")).expect("rustc names the host");
    let maturin = packages("maturin-1.16.0", &["maturin==1.16.0"]).join("bin/maturin");
    let mut package = Command::new(repository().join("deploy/package.sh"));
    package.arg(triple).arg(&out).env("PROFILE", "dev").env("FEATURES", "plimsoll-memory/fault-injection");
    outside_of_cargo(&mut package);
    package.env("MATURIN", maturin).env("CARGO_DEB", "cargo-deb");
    println!("{}", run(&mut package));

    run(Command::new("tar").arg("-xzf").arg(file(&out, ".tar.gz")).arg("-C").arg(&out));
    plans(&file(&out, triple).join("plimsoll"));

    let wheel = out.join("installed");
    let mut pip = Command::new("python3");
    run(pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(&wheel).arg(file(&out, ".whl")));
    plans(&wheel.join("bin/plimsoll"));

    let deb = out.join("unpacked");
    run(Command::new("dpkg-deb").arg("-x").arg(file(&out, ".deb")).arg(&deb));
    plans(&deb.join("usr/bin/plimsoll"));
    for path in ["etc/plimsoll/plimsoll.toml", "usr/lib/systemd/system/plimsoll.service"] {
        assert!(deb.join(path).is_file(), "{path}");
    }
    let sums = std::fs::read_to_string(file(&out, ".deb.sha256")).expect("a sum");
    let summed = run(Command::new("sha256sum").arg(file(&out, ".deb")));
    assert_eq!(sums.split(' ').next(), summed.split(' ').next());
}

#[test]
#[ignore = "external"]
fn a_service_manager_passes_a_socket_and_hears_of_ready() {
    let mut script = Command::new("python3");
    script.arg(repository().join("tests/clients/activation.py")).arg(binary()).arg("demo");
    assert!(run(&mut script).trim_end().ends_with("all good"));
}

#[test]
#[ignore = "external"]
fn launchd_reads_its_property_list() {
    let read = "import plistlib, sys; print(plistlib.load(open(sys.argv[1], 'rb'))['ProgramArguments'][1])";
    let list = repository().join("deploy/launchd/plimsoll.plist");
    assert_eq!(run(Command::new("python3").args(["-c", read]).arg(list)).trim(), "serve");
}
