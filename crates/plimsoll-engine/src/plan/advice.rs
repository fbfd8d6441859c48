//! Advice on a plan: the flags that make it smaller, and by how much. Every number comes from the planner.

use plimsoll_device::KvDtype;
use plimsoll_memory::Bytes;

use crate::api::options::Options;
use crate::api::plan_error::Advice;
use crate::media::MediaPlan;

/// A flag that trades something for memory, with the options that result.
pub(crate) struct Alternative {
    pub flag: &'static str,
    pub value: String,
    pub options: Options,
}

/// Returns the flags of the engine, of a model that takes `media`, and of the HTTP side. Each has the next smaller value worth trying.
pub(crate) fn alternatives(options: &Options, media: Option<&MediaPlan>) -> Vec<Alternative> {
    let mut all = Vec::new();
    let mut add = |flag, value: String, change: &dyn Fn(&mut Options)| {
        let mut options = options.clone();
        change(&mut options);
        all.push(Alternative { flag, value, options });
    };
    if options.kv_dtype != KvDtype::Q8 {
        add("--kv-dtype", "q8".into(), &|options| options.kv_dtype = KvDtype::Q8);
    }
    if options.batch_max_tokens > 64 {
        let rows = (options.batch_max_tokens / 2).max(64);
        add("--batch-max-tokens", rows.to_string(), &|options| options.batch_max_tokens = rows);
    }
    if options.request_bytes > 16 << 20 {
        let bytes = options.request_bytes / 2;
        add("--request-bytes", Bytes(bytes).flag(), &|options| options.request_bytes = bytes);
    }
    let bytes = options.table_cache_bytes.map_or(64 << 20, |bytes| bytes / 2);
    if bytes >= 1 << 20 {
        add("--table-cache-bytes", Bytes(bytes).flag(), &|options| options.table_cache_bytes = Some(bytes));
    }
    if let Some(longest) = options.max_req_total_len.filter(|longest| *longest > 256) {
        add("--max-req-total-len", (longest / 2).to_string(), &|options| options.max_req_total_len = Some(longest / 2));
    }
    if options.max_req_total_len.is_none() {
        let tokens = options.batch_max_tokens;
        add("--max-req-total-len", tokens.to_string(), &|options| options.max_req_total_len = Some(tokens));
    }
    if options.graph_max_batch_size > 4 {
        let users = options.graph_max_batch_size / 4;
        add("--graph-max-batch-size", users.to_string(), &|options| {
            options.graph_max_batch_size = users;
            options.running_max_req_size = options.running_max_req_size.min(users);
        });
    }
    if let Some(media) = media {
        let (pixels, frames) = media.smaller();
        pixels.into_iter().for_each(|pixels| {
            add("--max-image-pixels", pixels.to_string(), &|options| options.max_image_pixels = Some(pixels));
        });
        frames.into_iter().for_each(|frames| {
            add("--max-video-frames", frames.to_string(), &|options| options.max_video_frames = Some(frames));
        });
        media.shorter().into_iter().for_each(|seconds| {
            add("--max-audio-seconds", seconds.to_string(), &|options| options.max_audio_seconds = Some(seconds));
        });
        let bytes = options.media_bytes / 2;
        add("--media-bytes", Bytes(bytes).flag(), &|options| options.media_bytes = bytes);
    }
    for http in &options.http_alternatives {
        add(http.flag, http.value.clone(), &|options| options.http_bytes = http.http_bytes);
    }
    all
}

/// Returns the alternatives that make a plan of `needed` bytes smaller, the best first; `plan` returns the bytes that each needs.
pub(crate) fn advice(
    options: &Options,
    media: Option<&MediaPlan>,
    needed: u64,
    plan: impl Fn(&Options) -> Option<u64>,
) -> Vec<Advice> {
    let saves = |alternative: Alternative| {
        let saves = needed.saturating_sub(plan(&alternative.options)?);
        (saves > 0).then_some(Advice { flag: alternative.flag, value: alternative.value, saves })
    };
    let mut all: Vec<_> = alternatives(options, media).into_iter().filter_map(saves).collect();
    all.sort_by_key(|advice| std::cmp::Reverse(advice.saves));
    all
}

/// Returns the options with the first two changes of `advice`.
pub(crate) fn with_two(options: &Options, media: Option<&MediaPlan>, advice: &[Advice]) -> Options {
    advice.iter().take(2).fold(options.clone(), |options, change| {
        let same = |other: &Alternative| other.flag == change.flag && other.value == change.value;
        let changed = alternatives(&options, media).into_iter().find(same);
        changed.map_or(options, |alternative| alternative.options)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::options::HttpAlternative;

    #[test]
    fn what_saves_most_comes_first_and_what_saves_nothing_not_at_all() {
        let http = HttpAlternative { flag: "--max-connections", value: "128".into(), http_bytes: 60 };
        let options =
            Options { http_bytes: 100, request_bytes: 32 << 20, http_alternatives: vec![http], ..Options::default() };
        let cost = |options: &Options| {
            let rows = options.batch_max_tokens as u64 / 64;
            Some(options.http_bytes + rows + if options.kv_dtype == KvDtype::Q8 { 7 } else { 0 })
        };
        let found = advice(&options, None, cost(&options).unwrap(), cost);
        let words: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert_eq!(words, ["--max-connections 128 (40 B less)", "--batch-max-tokens 256 (4 B less)"]);
    }
}
