//! Checks options that no plan can be made of; each error names its flag.

use plimsoll_device::{ComputeDtype, Isa};
use plimsoll_formats::Checkpoint;

use crate::api::options::{DeviceChoice, Options};
use crate::api::plan_error::PlanError;

/// The bytes of a request of a few hundred tokens, roughly.
const REQUEST_BYTES_MIN: u64 = 16 << 10;

/// Checks every number against its range, and those options that depend on one another, whatever the model.
///
/// # Errors
/// [`PlanError::Option`] with the flag.
pub fn check_options(options: &Options) -> Result<(), PlanError> {
    let problem = |flag, problem: String| Err(PlanError::Option { flag, problem });
    if options.batch_max_tokens == 0 || options.batch_max_tokens > 1 << 20 {
        return problem("--batch-max-tokens", format!("is {}; 1 to 1048576 are allowed", options.batch_max_tokens));
    }
    for (flag, value) in [
        ("--graph-max-batch-size", options.graph_max_batch_size),
        ("--running-max-req-size", options.running_max_req_size),
    ] {
        if value == 0 || value > 1 << 16 {
            return problem(flag, format!("is {value}; 1 to 65536 are allowed"));
        }
    }
    if options.graph_max_batch_size > options.batch_max_tokens {
        let (decode, rows) = (options.graph_max_batch_size, options.batch_max_tokens);
        return problem("--graph-max-batch-size", format!("is {decode}, more than --batch-max-tokens ({rows})"));
    }
    if options.running_max_req_size > options.graph_max_batch_size {
        let (running, decode) = (options.running_max_req_size, options.graph_max_batch_size);
        return problem(
            "--running-max-req-size",
            format!(
                "is {running}, more than --graph-max-batch-size ({decode}): every running request decodes in every step"
            ),
        );
    }
    if options.enable_mtp && !(1..=Options::DRAFTS_MAX).contains(&options.mtp_num_draft_tokens) {
        let (drafts, most) = (options.mtp_num_draft_tokens, Options::DRAFTS_MAX);
        return problem("--mtp-num-draft-tokens", format!("is {drafts}; 1 to {most} are allowed"));
    }
    let looked_up = options.prompt_lookup_num_tokens;
    if looked_up > Options::DRAFTS_MAX {
        let most = Options::DRAFTS_MAX;
        return problem("--prompt-lookup-num-tokens", format!("is {looked_up}; at most {most} are allowed"));
    }
    if looked_up > 0 && options.enable_mtp {
        return problem("--prompt-lookup-num-tokens", format!("is {looked_up}, but --enable-mtp drafts already"));
    }
    check_drafter(options)?;
    if options.state_checkpoints > 64 {
        return problem("--state-checkpoints", format!("is {}; at most 64 are allowed", options.state_checkpoints));
    }
    if !(1..=10_000).contains(&options.long_prompt_slowdown) {
        let percent = options.long_prompt_slowdown;
        return problem("--long-prompt-slowdown", format!("is {percent}; 1 to 10000 percent are allowed"));
    }
    if options.request_bytes < REQUEST_BYTES_MIN {
        let bytes = options.request_bytes;
        return problem("--request-bytes", format!("is {bytes}; at least {REQUEST_BYTES_MIN} are wanted"));
    }
    if options.max_waiting > 1 << 20 {
        return problem("--max-waiting", format!("is {}; at most 1048576 are allowed", options.max_waiting));
    }
    for (flag, value) in [
        ("--threads", options.threads.unwrap_or(1)),
        ("--visual-infer-batch-size", options.visual_infer_batch_size),
        ("--max-media-per-request", options.max_media_per_request),
    ] {
        if value == 0 || value > 1024 {
            return problem(flag, format!("is {value}; 1 to 1024 are allowed"));
        }
    }
    if options.compute_dtype == ComputeDtype::Bf16 && options.isa() != Isa::Amx {
        let problem = format!("is bf16, which takes a processor with AMX; this is {}", options.isa());
        return Err(PlanError::Option { flag: "--compute-dtype", problem });
    }
    check_cache(options)?;
    if options.max_req_total_len == Some(0) {
        return problem("--max-req-total-len", "is 0; at least 1 is needed".into());
    }
    if options.max_total_token_num == Some(0) {
        return problem("--max-total-token-num", "is 0; at least one page of 16 tokens is needed".into());
    }
    Ok(())
}

/// Checks that a step has room for an image that cannot be divided among steps, beside the newest token of every request.
///
/// # Errors
/// [`PlanError::Option`] with the flag.
pub(super) fn check_image_rows(options: &Options, image_rows: usize) -> Result<(), PlanError> {
    let (rows, running) = (options.batch_max_tokens, options.running_max_req_size);
    if image_rows == 0 || image_rows + running <= rows {
        return Ok(());
    }
    let problem = format!(
        "is {rows}; this model computes the {image_rows} tokens of an image in one step, beside {running} requests: give \
         {} or more, or fewer --running-max-req-size",
        image_rows + running
    );
    Err(PlanError::Option { flag: "--batch-max-tokens", problem })
}

/// Checks a draft model against the options that it cannot be used with.
fn check_drafter(options: &Options) -> Result<(), PlanError> {
    let problem = |flag, problem: String| Err(PlanError::Option { flag, problem });
    if options.draft_model.is_none() {
        return Ok(());
    }
    let (drafts, most) = (options.draft_num_tokens, Options::DRAFTS_MAX);
    if !(1..=most).contains(&drafts) {
        return problem("--draft-num-tokens", format!("is {drafts}; 1 to {most} are allowed"));
    }
    let unusable = [
        (options.enable_mtp, "cannot be used with --enable-mtp, which drafts already: leave one out"),
        (
            options.prompt_lookup_num_tokens > 0,
            "cannot be used with --prompt-lookup-num-tokens, which drafts already: leave one out",
        ),
        (options.hosted, "is for a server of one model: leave it out, or serve one model"),
    ];
    match unusable.into_iter().find(|(so, _)| *so) {
        Some((_, why)) => problem("--draft-model", why.into()),
        None => Ok(()),
    }
}

/// Checks that the checkpoint was opened with the draft model that the options name.
pub(super) fn check_draft(options: &Options, checkpoint: &Checkpoint) -> Result<(), PlanError> {
    check_drafter(options)?;
    let problem = match (&options.draft_model, checkpoint.draft()) {
        (Some(_), Some(_)) if checkpoint.config.encoder.is_some() => {
            "drafts text, but this model is an encoder: it writes none"
        }
        (Some(_), Some(_)) | (None, None) => return Ok(()),
        (Some(_), None) => "was not opened with the model",
        (None, Some(_)) => "was opened, but is not set",
    };
    Err(PlanError::Option { flag: "--draft-model", problem: problem.into() })
}

/// The smallest prefix cache on disk.
const DISK_BYTES_MIN: u64 = 1 << 20;

/// Checks the options for reports of the prefix cache's contents, and for the prefix cache on disk.
fn check_cache(options: &Options) -> Result<(), PlanError> {
    let problem = |flag, problem: String| Err(PlanError::Option { flag, problem });
    let untold = [
        (!options.prefix_cache, "and --disable-prefix-cache leaves nothing to tell"),
        (options.hosted, "which a server of several models does not report"),
    ];
    if let Some((_, why)) = untold.iter().find(|(so, _)| options.kv_events && *so) {
        return problem("--kv-events", format!("tells what the prefix cache holds, {why}"));
    }
    let Some(disk) = &options.disk_cache else { return Ok(()) };
    if !options.prefix_cache {
        return problem("--cache-dir", "keeps prefixes on disk, but --disable-prefix-cache leaves none".into());
    }
    if matches!(options.device, DeviceChoice::Gpu(_)) {
        return problem("--cache-dir", "copies pages of the host's memory: it cannot be used with --device gpu".into());
    }
    if disk.bytes < DISK_BYTES_MIN {
        let bytes = disk.bytes;
        return problem("--cache-bytes", format!("is {bytes}; at least {DISK_BYTES_MIN} are needed"));
    }
    Ok(())
}

/// Checks the same, and the options that mean nothing for an encoder.
pub(super) fn check_model(options: &Options, encoder: bool) -> Result<(), PlanError> {
    check_options(options)?;
    if !encoder {
        return Ok(());
    }
    if options.kv_events {
        let problem = "tells what the prefix cache holds, but this model is an encoder: it has none".into();
        return Err(PlanError::Option { flag: "--kv-events", problem });
    }
    match options.max_total_token_num {
        Some(tokens) => Err(PlanError::Option {
            flag: "--max-total-token-num",
            problem: format!("is {tokens}, but this model is an encoder: it has no keys and values to keep"),
        }),
        None if options.disk_cache.is_some() => {
            let problem = "keeps prefixes, but this model is an encoder: it has none".into();
            Err(PlanError::Option { flag: "--cache-dir", problem })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::options::DiskCache;

    #[test]
    fn a_cache_on_disk_needs_prefixes_room_and_host_memory() {
        let disk = |bytes| Some(DiskCache { bytes, ..DiskCache::at("/nowhere".into()) });
        let options = Options { disk_cache: disk(1 << 20), ..Options::default() };
        check_options(&options).unwrap();
        for (flag, bad) in [
            ("--cache-bytes", Options { disk_cache: disk((1 << 20) - 1), ..Options::default() }),
            ("--cache-dir", Options { prefix_cache: false, ..options.clone() }),
            ("--cache-dir", Options { device: DeviceChoice::Gpu(None), ..options }),
        ] {
            let error = check_options(&bad).unwrap_err().to_string();
            assert!(error.contains(flag), "{error}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_flag_and_range() {
        let threads = |threads| Options { threads: Some(threads), ..Options::default() };
        let batch = Options { visual_infer_batch_size: 0, ..Options::default() };
        for slowdown in [0, 10_001] {
            let options = Options { long_prompt_slowdown: slowdown, ..Options::default() };
            let error = check_options(&options).unwrap_err().to_string();
            assert!(error.contains("--long-prompt-slowdown is") && error.contains("1 to 10000 percent"), "{error}");
        }
        for (flag, options) in
            [("--threads", threads(0)), ("--threads", threads(1025)), ("--visual-infer-batch-size", batch)]
        {
            let error = check_options(&options).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains("1 to 1024 are allowed"), "{error}");
        }
        check_options(&threads(1024)).unwrap();
        check_options(&Options::default()).unwrap();
    }
}
