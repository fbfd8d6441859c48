//! A test that passes without the code it stands for is no exhibit. Protections carry the ids of their exhibits in the source
//! (`plimsoll_memory::broken`); each is taken away in turn, in the servers that the exhibit starts, and the exhibit must fail.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The protection that is removed, and the test that must then fail.
pub const BROKEN: &[(&str, &str)] = &[
    ("T-01", "activation::t_01_prompt_logprobs_of_a_whole_context_come_in_steps_that_were_proven"),
    ("T-11", "profiling::t_11_of_two_that_start_at_once_in_room_for_one_and_a_half_one_stays_in_port"),
    ("T-19", "profiling::t_19_a_cgroups_limit_is_the_line"),
    ("T-24", "media::t_24_more_pictures_than_were_planned_are_refused"),
    ("T-29", "media::t_29_t_33_v_03_hundreds_of_pictures_leave_nothing"),
    ("T-31", "media::t_31_a_picture_that_is_larger_than_it_looks_costs_nothing"),
    ("T-47", "accounting::t_47_a_thousand_short_requests_leave_no_entry_and_no_byte"),
    ("T-56", "overload::t_56_what_is_larger_than_the_pool_is_refused_at_the_door"),
    ("T-60", "overload::t_60_a_line_that_sinks_under_a_running_server_is_noticed"),
    ("V-3", "accounting::v_03_places_come_back_one_by_one"),
    ("V-7", "accounting::v_07_what_a_request_held_is_back_at_its_last_word_though_the_client_stays"),
    ("V-13", "profiling::v_13_the_limit_that_was_given_is_the_limit"),
    ("V-20", "accounting::v_20_v_21_answers_that_nobody_takes_give_their_share_back"),
    ("V-22", "accounting::v_22_a_cache_that_is_off_holds_nothing"),
    ("V-27", "leaving::v_27_who_goes_in_the_prompt_takes_the_rest_of_it_along"),
    ("V-28", "leaving::v_28_who_goes_while_input_of_theirs_is_unread_is_noticed"),
    ("V-37", "streams::v_37_streams_go_on_while_a_long_prompt_is_computed"),
    ("V-43", "streams::v_43_every_end_of_a_stream_has_its_terminator"),
    ("V-46", "isolation::v_46_who_shares_a_beginning_hears_nothing_of_what_came_after_it"),
    ("V-47", "media::v_47_pictures_with_the_same_beginning_are_two"),
    ("V-50", "isolation::v_50_tokens_are_told_apart_by_all_their_bits"),
    ("V-60", "overload::v_60_an_input_too_long_to_embed_is_refused_and_not_cut"),
    ("V-61", "stores::v_61_bodies_are_bounded_however_they_come"),
    ("V-62", "profiling::v_62_a_budget_beyond_the_machine_is_the_machines"),
    ("V-65", "host::v_65_an_idle_server_costs_nothing"),
    ("V-66", "isolation::v_66_other_sampling_finds_the_same_prefix"),
    ("V-70", "stores::v_70_schemas_are_bounded_in_bytes"),
    ("V-A", "leaving::v_a_who_goes_while_waiting_leaves_the_queue_at_once"),
    ("V-AB", "overload::v_ab_a_full_queue_says_when_to_come_back"),
    ("V-C", "accounting::v_c_aborts_in_the_answer_give_every_host_byte_back"),
    ("V-F", "stores::v_f_addresses_that_were_seen_once_are_forgotten"),
    ("V-G", "stores::v_g_v_h_a_cleared_cache_is_empty_when_the_answer_comes"),
    ("V-I", "leaving::v_i_a_stream_is_cancelled_by_the_id_it_shows"),
    ("V-J", "isolation::v_j_parameters_of_a_neighbour_are_not_mine"),
    ("V-K", "media::v_k_pictures_are_told_apart_by_content_and_order"),
    ("V-N", "stores::v_n_stored_responses_are_bounded_in_bytes"),
    ("V-O", "overload::v_o_what_requests_may_hold_unread_is_bounded_together"),
];

/// Exhibits that need a cgroup pass without a word where none can be made.
const NEED_A_CAGE: [&str; 3] = ["T-11", "T-19", "T-60"];

/// What an exhibit says when its protection is gone; an error where it does not miss it.
fn noticed(id: &str, exhibit: &str) -> Result<String, String> {
    let this = std::env::current_exe().expect("a test binary");
    let mut command = Command::new(this);
    command.args([exhibit, "--exact", "--test-threads", "1"]).env("MUSEUM_BROKEN", id).stdin(Stdio::null());
    let output = command.env("RUST_BACKTRACE", "0").output().expect("the exhibit runs");
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    let caged = NEED_A_CAGE.contains(&id) && String::from_utf8_lossy(&output.stderr).contains("NO MEMORY CGROUP");
    // A server that does not even start proves nothing.
    match words.contains("0 passed; 1 failed") && !words.contains("not ready") {
        true => {
            let complaint = words.split_once("panicked at").map_or("", |(_, rest)| rest);
            Ok(complaint.lines().skip(1).take(3).collect::<Vec<_>>().join(" ").chars().take(200).collect())
        }
        false if caged => Ok("not run: no memory cgroup can be made here".into()),
        false => Err(format!("{exhibit} does not miss what is marked {id}:\n{words}")),
    }
}

// Servers are slower to say that they are broken than to be right: exhibits wait for what never comes.
#[test]
#[cfg(debug_assertions)]
fn every_exhibit_of_the_list_fails_without_its_protection() {
    let (next, only) = (AtomicUsize::new(0), std::env::var("ONLY").ok());
    let wanted = |id: &str| only.as_deref().is_none_or(|only| only.split(',').any(|one| one == id));
    let unnoticed: Vec<String> = std::thread::scope(|scope| {
        let work = || {
            let mut found = Vec::new();
            while let Some((id, exhibit)) = BROKEN.get(next.fetch_add(1, Ordering::Relaxed)) {
                if !wanted(id) {
                    continue;
                }
                match noticed(id, exhibit) {
                    Ok(complaint) => println!("{id}: {complaint}"),
                    Err(words) => found.push(words),
                }
            }
            found
        };
        let visitors: Vec<_> = (0..3).map(|_| scope.spawn(work)).collect();
        visitors.into_iter().flat_map(|visitor| visitor.join().expect("no panic")).collect()
    });
    assert!(unnoticed.is_empty(), "{}", unnoticed.join("\n\n"));
}

// A new switch needs a test that shows its purpose. A release build has no switch.
#[test]
fn every_switch_in_the_source_has_an_exhibit_and_every_exhibit_a_switch() {
    let mut found = Vec::new();
    let mut folders = vec![crate::product::repository().join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() && path.file_name().is_none_or(|name| name != "tests") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("text");
                let ids = text.split(['(', ' ']).filter_map(|word| word.strip_prefix('"')?.split('"').next());
                let marked = text.contains("plimsoll_memory::broken")
                    || text.contains("use crate::broken")
                    || text.contains("broken,");
                found.extend(ids.filter(|id| marked && is_id(id)).map(str::to_owned));
            }
        }
    }
    found.sort();
    found.dedup();
    let mut listed: Vec<String> = BROKEN.iter().map(|(id, _)| (*id).to_owned()).collect();
    listed.sort();
    assert_eq!(found, listed);
}

/// Whether this is the id of a row: T-1, V-70, V-AB.
fn is_id(word: &str) -> bool {
    let rest = word.strip_prefix("T-").or_else(|| word.strip_prefix("V-"));
    rest.is_some_and(|rest| !rest.is_empty() && rest.chars().all(|c| c.is_ascii_digit() || c.is_ascii_uppercase()))
}
