//! A test that passes without the code it guards proves nothing. `tests/museum/mutations.toml` lists that code, with the text
//! that takes each protection away. The slow tier applies all rows to a copy of the source and runs every test of the list
//! against it, with one protection missing at a time. Each test must fail.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Deserialize;

use crate::product::{outside_of_cargo, repository};

/// Each protection's id, and the test that must fail without it.
pub const BROKEN: &[(&str, &str)] = &[
    ("T-01", "activation::t_01_prompt_logprobs_of_a_whole_context_come_in_steps_of_the_self_test"),
    ("T-11", "profiling::t_11_of_two_that_start_at_once_in_room_for_one_and_a_half_one_stays_in_port"),
    ("T-19", "profiling::t_19_a_cgroups_limit_is_the_line"),
    ("T-24", "media::t_24_more_images_than_were_planned_are_refused"),
    ("T-29", "media::t_29_t_33_v_03_hundreds_of_images_leave_nothing"),
    ("T-31", "media::t_31_image_larger_than_its_header_costs_nothing"),
    ("T-47", "accounting::t_47_a_thousand_short_requests_leave_no_entry_and_no_byte"),
    ("T-56", "overload::t_56_what_is_larger_than_the_pool_is_refused_at_the_door"),
    ("T-60", "overload::t_60_a_line_that_sinks_under_a_running_server_is_noticed"),
    ("V-3", "accounting::v_03_places_come_back_one_by_one"),
    ("V-7", "accounting::v_07_what_a_request_held_is_back_at_its_last_word_though_the_client_stays"),
    ("V-13", "profiling::v_13_the_limit_that_was_given_is_the_limit"),
    ("V-20", "accounting::v_20_v_21_unread_answers_return_their_bytes"),
    ("V-22", "accounting::v_22_a_cache_that_is_off_holds_nothing"),
    ("V-27", "leaving::v_27_disconnect_in_prefill_cancels_the_rest"),
    ("V-28", "leaving::v_28_disconnect_with_unread_input_is_noticed"),
    ("V-37", "streams::v_37_streams_go_on_while_a_long_prompt_is_computed"),
    ("V-43", "streams::v_43_every_end_of_a_stream_has_its_terminator"),
    ("V-46", "isolation::v_46_shared_prefix_reveals_nothing_after_it"),
    ("V-47", "media::v_47_images_with_the_same_beginning_are_two"),
    ("V-50", "isolation::v_50_tokens_are_told_apart_by_all_their_bits"),
    ("V-60", "overload::v_60_an_input_too_long_to_embed_is_refused_and_not_cut"),
    ("V-61", "stores::v_61_bodies_are_bounded_however_they_come"),
    ("V-62", "profiling::v_62_a_budget_beyond_the_machine_is_the_machines"),
    ("V-65", "host::v_65_an_idle_server_costs_nothing"),
    ("V-66", "isolation::v_66_other_sampling_finds_the_same_prefix"),
    ("V-70", "stores::v_70_schemas_are_bounded_in_bytes"),
    ("V-A", "leaving::v_a_disconnect_while_waiting_leaves_the_queue_at_once"),
    ("V-AB", "overload::v_ab_a_full_queue_says_when_to_come_back"),
    ("V-C", "accounting::v_c_aborts_in_the_answer_give_every_host_byte_back"),
    ("V-F", "stores::v_f_addresses_that_were_seen_once_are_forgotten"),
    ("V-G", "stores::v_g_v_h_a_cleared_cache_is_empty_when_the_answer_comes"),
    ("V-I", "leaving::v_i_a_stream_is_cancelled_by_the_id_it_shows"),
    ("V-J", "isolation::v_j_parameters_of_a_neighbour_are_not_mine"),
    ("V-K", "media::v_k_images_are_told_apart_by_content_and_order"),
    ("V-N", "stores::v_n_stored_responses_are_bounded_in_bytes"),
    ("V-O", "overload::v_o_what_requests_may_hold_unread_is_bounded_together"),
];

/// One place of the source, with and without its protection.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutation {
    file: String,
    from: String,
    to: String,
}

impl Mutation {
    /// The ids in `broken("ID")`.
    fn ids(&self) -> impl Iterator<Item = &str> {
        self.to.split("broken(\"").skip(1).filter_map(|rest| rest.split('"').next())
    }
}

/// Code that the mutated copy has in addition: the switch that its servers read.
const SWITCH: &str = r#"
/// Whether the environment takes the protection `id` away.
pub fn broken(id: &str) -> bool {
    static ID: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    ID.get_or_init(|| std::env::var("MUSEUM_BROKEN").ok()).as_deref() == Some(id)
}
"#;

fn mutations() -> Vec<Mutation> {
    #[derive(Deserialize)]
    struct File {
        mutation: Vec<Mutation>,
    }
    let text = fs::read_to_string(repository().join("tests/museum/mutations.toml")).expect("the list of mutations");
    toml::from_str::<File>(&text).expect("rows of file, from, to").mutation
}

/// `file`'s text with the protections of all its rows made optional.
fn mutated(file: &str, mut text: String, rows: &[Mutation]) -> String {
    let path = if file.starts_with("crates/plimsoll-memory/") { "crate" } else { "plimsoll_memory" };
    for row in rows.iter().filter(|row| row.file == file) {
        let found = text.matches(&row.from).count();
        assert_eq!(
            found,
            1,
            "{file}: the text of {} occurs {found} times, not once:\n{}",
            row.ids().collect::<Vec<_>>().join(" "),
            row.from
        );
        text = text.replace(&row.from, &row.to.replace("broken(\"", &format!("{path}::broken(\"")));
    }
    if file == "crates/plimsoll-memory/src/lib.rs" { text + SWITCH } else { text }
}

/// The workspace's manifest with another version.
///
/// Cargo names intermediate files by package and version. With the same version the copy's files would replace those of the
/// source, and a later build would take them for its own.
fn renamed(manifest: &str) -> String {
    let version = format!("\nversion = \"{}\"\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(manifest.matches(&version).count(), 1, "one line gives the version of all crates");
    manifest.replace(&version, &version.replace("\"\n", "-mutated\"\n"))
}

/// Removes files and folders from `folder` of `copy` that the source no longer has.
fn remove_stale(folder: &str, copy: &Path) {
    for entry in fs::read_dir(copy.join(folder)).expect("a folder in the build directory") {
        let entry = entry.expect("an entry");
        let built = folder.is_empty() && entry.file_name() == "target";
        let source = repository().join(folder).join(entry.file_name());
        if built || source.is_dir() == entry.path().is_dir() && source.exists() {
            continue;
        }
        let removed =
            if entry.path().is_dir() { fs::remove_dir_all(entry.path()) } else { fs::remove_file(entry.path()) };
        removed.expect("a file in the build directory");
    }
}

/// Copies `folder` of the source to `copy`, with the mutations. A file that would not change is not written, so that a second run
/// builds little.
fn copy(folder: &str, copy: &Path, rows: &[Mutation]) {
    fs::create_dir_all(copy.join(folder)).expect("a folder in the build directory");
    remove_stale(folder, copy);
    for entry in fs::read_dir(repository().join(folder)).expect("a folder of the source") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        let file = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        if entry.path().is_dir() {
            if !(folder.is_empty() && (name == "target" || name.starts_with('.'))) {
                self::copy(&file, copy, rows);
            }
            continue;
        }
        let mut bytes = fs::read(entry.path()).expect("a file of the source");
        if name.ends_with(".rs") {
            bytes = mutated(&file, String::from_utf8(bytes).expect("UTF-8"), rows).into_bytes();
        }
        if file == "Cargo.toml" {
            bytes = renamed(&String::from_utf8(bytes).expect("UTF-8")).into_bytes();
        }
        let to = copy.join(&file);
        if fs::read(&to).ok().as_ref() != Some(&bytes) {
            fs::write(&to, bytes).expect("a file in the build directory");
            // Tests run scripts of the copy.
            let mode = entry.metadata().expect("a mode").permissions();
            fs::set_permissions(to, mode).expect("its mode");
        }
    }
}

/// Builds these tests from a copy of the source with all mutations. Returns the test binary's path.
///
/// It shares the built dependencies of the build that made this test. The whole workspace is named, as there, so that they
/// have the same features: only the copied crates are built.
fn build() -> PathBuf {
    let root = repository().join("target/museum");
    copy("", &root, &mutations());
    let shared = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a folder of the build directory");
    let cargo = std::env::var_os("CARGO").expect("cargo runs this test");
    let mut command = Command::new(cargo);
    outside_of_cargo(&mut command);
    command.current_dir(&root).stderr(Stdio::inherit());
    command.env("CARGO_BUILD_BUILD_DIR", shared).env("CARGO_TARGET_DIR", root.join("target"));
    command.args(["test", "--workspace", "--test", "museum", "--no-run", "--offline", "--message-format", "json"]);
    let output = command.output().expect("cargo starts");
    assert!(output.status.success(), "the copy with mutations does not build");
    let messages = String::from_utf8(output.stdout).expect("UTF-8");
    let mut binaries = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let source = message["target"]["src_path"].as_str()?;
        source
            .ends_with("crates/plimsoll/tests/museum/main.rs")
            .then(|| message["executable"].as_str().map(PathBuf::from))?
    });
    binaries.next_back().expect("cargo names the test binary")
}

/// Tests that need a cgroup pass with a message where none can be made.
const NEED_A_CGROUP: [&str; 3] = ["T-11", "T-19", "T-60"];

/// The message of the test `name` when the protection `id` is missing; an error where the test passes.
fn noticed(binary: &Path, id: &str, name: &str) -> Result<String, String> {
    let mut command = Command::new(binary);
    command.args([name, "--exact", "--test-threads", "1"]).env("MUSEUM_BROKEN", id).stdin(Stdio::null());
    let output = command.env("RUST_BACKTRACE", "0").output().expect("the test runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let no_cgroup = String::from_utf8_lossy(&output.stderr).contains("NO MEMORY CGROUP");
    // A server that does not even start proves nothing.
    if text.contains("0 passed; 1 failed") && !text.contains("not ready") {
        let message = text.split_once("panicked at").map_or("", |(_, rest)| rest);
        return Ok(message.lines().skip(1).take(3).collect::<Vec<_>>().join(" ").chars().take(200).collect());
    }
    if NEED_A_CGROUP.contains(&id) && no_cgroup {
        return Ok("not run: no memory cgroup can be made here".into());
    }
    Err(format!("{name} passes without the protection {id}:\n{text}"))
}

// Three tests run at a time: most of them wait for a server.
#[test]
#[ignore = "soak"]
fn every_regression_fails_without_its_protection() {
    let (binary, next, only) = (build(), AtomicUsize::new(0), std::env::var("ONLY").ok());
    let wanted = |id: &str| only.as_deref().is_none_or(|only| only.split(',').any(|one| one == id));
    let unnoticed: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            let mut found = Vec::new();
            while let Some((id, name)) = BROKEN.get(next.fetch_add(1, Ordering::Relaxed)) {
                match wanted(id).then(|| noticed(&binary, id, name)) {
                    Some(Ok(message)) => println!("{id}: {message}"),
                    Some(Err(message)) => found.push(message),
                    None => {}
                }
            }
            found
        };
        let workers: Vec<_> = (0..3).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no panic")).collect()
    });
    assert!(unnoticed.is_empty(), "{}", unnoticed.join("\n\n"));
}

#[test]
fn every_mutation_matches_the_source() {
    let rows = mutations();
    let files: BTreeSet<&str> = rows.iter().map(|row| row.file.as_str()).collect();
    for file in files {
        let text = fs::read_to_string(repository().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_ne!(mutated(file, text.clone(), &rows), text);
    }
}

#[test]
fn every_mutation_has_a_test_and_every_test_a_mutation() {
    let rows = mutations();
    let found: BTreeSet<&str> = rows.iter().flat_map(Mutation::ids).collect();
    let listed: BTreeSet<&str> = BROKEN.iter().map(|(id, _)| *id).collect();
    assert_eq!(found, listed);
}
