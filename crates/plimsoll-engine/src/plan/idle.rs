//! Options that are valid but change nothing for a model. The model starts all the same, and a warning tells the
//! operator.

use plimsoll_device::{Bf16Rows, ComputeDtype, KvDtype, TablePlace, Target};

use super::Blueprint;
use crate::api::options::Options;
use crate::media::MediaRules;

/// A flag, and whether it was set.
type Flag<'a> = (&'a str, bool);

impl Blueprint {
    /// A line for each option that was set and changes nothing here, with its flag.
    pub(super) fn idle_flags(&self, options: &Options) -> Vec<String> {
        let usual = Options::default();
        let shape = self.model.shape(options.kv_dtype);
        let stateless = shape.state.is_none() && shape.kv.window().is_none();
        let drafts = options.mtp_num_draft_tokens != usual.mtp_num_draft_tokens;
        let checkpoints = options.state_checkpoints != usual.state_checkpoints;
        // `--compute-dtype bf16` also changes keys and values that are kept in bfloat16.
        let rounds_kept = options.kv_dtype == KvDtype::Bf16 && self.encoder.is_none();
        let context = format!("this model takes {} tokens", self.max_context);
        // For each group of flags: whether they change nothing, and why.
        let groups: [(bool, &str, &[Flag<'_>]); 13] = [
            (
                options.max_req_total_len.is_some_and(|asked| asked > self.max_context),
                &context,
                &[("--max-req-total-len", true)],
            ),
            (
                !self.weights.quantizes(),
                "this model has no quantized weights",
                &[("--compute-dtype int8", options.compute_dtype == ComputeDtype::Int8)],
            ),
            (
                self.weights.bf16() == Bf16Rows::None && !rounds_kept,
                "no layer of this model computes in bfloat16",
                &[("--compute-dtype bf16", options.compute_dtype == ComputeDtype::Bf16)],
            ),
            (
                stateless,
                "this model has no recurrent state",
                &[("--state-ratio", options.state_ratio.is_some()), ("--state-checkpoints", checkpoints)],
            ),
            (
                !stateless && !options.prefix_cache,
                "with --disable-prefix-cache no state is kept",
                &[("--state-checkpoints", checkpoints)],
            ),
            (
                !options.enable_mtp,
                "without --enable-mtp no head drafts",
                &[("--mtp-num-draft-tokens", drafts), ("--mtp-optimistic", options.mtp_optimistic)],
            ),
            (
                options.draft_model.is_none(),
                "without --draft-model no model drafts",
                &[("--draft-num-tokens", options.draft_num_tokens != usual.draft_num_tokens)],
            ),
            (
                options.drafts() == 0 || options.optimistic(),
                "nothing drafts that is checked",
                &[("--disable-mtp-adaptive", !options.mtp_adaptive)],
            ),
            (self.weights.file_tables().is_empty(), "no table stays in the model's files", &table_flags(options)),
            (self.media.is_none(), "this model takes text alone", &media_flags(options, &usual)),
            (
                self.media.as_ref().is_some_and(|media| !media.sees()),
                "this model takes no images",
                &[
                    ("--max-image-pixels", options.max_image_pixels.is_some()),
                    ("--max-video-frames", options.max_video_frames.is_some()),
                ],
            ),
            (
                !self.media.as_ref().is_some_and(MediaRules::hears),
                "this model takes no audio",
                &[("--max-audio-seconds", options.max_audio_seconds.is_some())],
            ),
            (
                self.encoder.is_some(),
                "this model is an encoder: it keeps nothing and writes nothing",
                &decoder_flags(options, &usual),
            ),
        ];
        let idle = groups.iter().filter(|(idle, ..)| *idle);
        let flags = idle.flat_map(|(_, why, flags)| flags.iter().map(move |(flag, set)| (*set, flag, why)));
        flags.filter(|(set, ..)| *set).map(|(_, flag, why)| words(flag, why)).chain(beside_device(options)).collect()
    }
}

/// Flags of media encoders, and whether they are set.
fn media_flags(options: &Options, usual: &Options) -> [Flag<'static>; 6] {
    [
        ("--visual-infer-batch-size", options.visual_infer_batch_size != usual.visual_infer_batch_size),
        ("--max-image-pixels", options.max_image_pixels.is_some()),
        ("--max-video-frames", options.max_video_frames.is_some()),
        ("--max-media-per-request", options.max_media_per_request != usual.max_media_per_request),
        ("--encoder-output-bytes", options.encoder_output_bytes.is_some()),
        ("--media-bytes", options.media_bytes != usual.media_bytes),
    ]
}

/// Flags of models that write text, and whether they are set.
fn decoder_flags(options: &Options, usual: &Options) -> [Flag<'static>; 4] {
    [
        ("--disable-prefix-cache", !options.prefix_cache),
        ("--prompt-lookup-num-tokens", options.prompt_lookup_num_tokens > 0),
        ("--long-prompt-slowdown", options.long_prompt_slowdown != usual.long_prompt_slowdown),
        ("--elastic", options.elastic),
    ]
}

/// Flags of tables in files, and whether they are set.
fn table_flags(options: &Options) -> [Flag<'static>; 2] {
    [("--tables", options.tables() == TablePlace::File), ("--table-cache-bytes", options.table_cache_bytes.is_some())]
}

/// A flag that changes nothing, and why.
fn words(flag: &str, why: &str) -> String {
    format!("{flag} changes nothing: {why}")
}

/// Lines for the flags of a device other than the one that computes.
fn beside_device(options: &Options) -> impl Iterator<Item = String> {
    let (cpu, gpu) = ("--device is cpu", "--device is a GPU");
    let flags = match options.target() {
        Target::Cpu(_) => vec![
            ("--allow-software-gpu", options.allow_software_gpu, cpu),
            ("--gpu-memory-budget", options.gpu_memory_budget.is_some(), cpu),
        ],
        Target::Gpu => {
            let tables = options.tables == TablePlace::File;
            vec![
                ("--isa", options.isa.is_some(), gpu),
                ("--packed-cache", options.packed_cache.is_some(), gpu),
                ("--tables", tables, gpu),
            ]
        }
    };
    flags.into_iter().filter(|(_, set, _)| *set).map(|(flag, _, why)| words(flag, why))
}

#[cfg(test)]
mod tests {
    use plimsoll_device::Isa;
    use plimsoll_formats::Checkpoint;

    use super::*;

    fn idle(model: &str, options: &Options) -> Vec<String> {
        let path = format!("{}/../../tests/fixtures/models/{model}", env!("CARGO_MANIFEST_DIR"));
        Blueprint::new(&Checkpoint::open(path.as_ref()).unwrap(), options).unwrap().idle_flags(options)
    }

    #[test]
    fn an_arithmetic_that_changes_nothing_is_said() {
        let idle =
            |model, compute_dtype| idle(model, &Options { compute_dtype, isa: Some(Isa::Amx), ..Options::default() });
        for (dtype, name) in [(ComputeDtype::Int8, "int8"), (ComputeDtype::Bf16, "bf16")] {
            let lines = idle("gguf-llama-f16", dtype);
            assert!(
                lines.len() == 1 && lines[0].starts_with(&format!("--compute-dtype {name} changes nothing")),
                "{lines:?}"
            );
        }
        // Keys and values that are kept in bfloat16 are an effect of the flag.
        let options = Options { compute_dtype: ComputeDtype::Bf16, kv_dtype: KvDtype::Bf16, ..Options::default() };
        assert_eq!(self::idle("gguf-llama-f16", &options), [""; 0]);
        for dtype in [ComputeDtype::Auto, ComputeDtype::F32, ComputeDtype::Bf16, ComputeDtype::Int8] {
            assert_eq!(idle("gguf-llama-q4_0", dtype), [""; 0]);
        }
    }

    #[test]
    fn flags_of_what_a_model_has_not_are_said_each() {
        let text = Options {
            state_ratio: "0.5".parse().ok(),
            mtp_optimistic: true,
            mtp_adaptive: false,
            max_image_pixels: Some(1 << 16),
            media_bytes: 1 << 20,
            ..Options::default()
        };
        let lines = idle("gguf-llama-q4_0", &text);
        let flags =
            ["--state-ratio", "--mtp-optimistic", "--disable-mtp-adaptive", "--max-image-pixels", "--media-bytes"];
        let said: Vec<_> = lines.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(said, flags, "{lines:?}");
        let long = Options { max_req_total_len: Some(1 << 20), ..Options::default() };
        let lines = idle("llama", &long);
        assert!(lines[0].starts_with("--max-req-total-len changes nothing: this model takes "), "{lines:?}");
        let budget = Options { gpu_memory_budget: "1GiB".parse().ok(), ..Options::default() };
        let lines = idle("llama", &budget);
        assert!(lines.contains(&"--gpu-memory-budget changes nothing: --device is cpu".into()), "{lines:?}");
        let looked_up = Options { prompt_lookup_num_tokens: 2, ..text.clone() };
        let lines = idle("gguf-llama-q4_0", &looked_up);
        assert!(!lines.iter().any(|line| line.contains("adaptive")), "{lines:?}");
        let hybrid = idle("qwen3.5", &text);
        assert!(!hybrid.iter().any(|line| line.contains("state")), "{hybrid:?}");
        let unkept = Options { prefix_cache: false, state_checkpoints: 9, ..Options::default() };
        assert!(idle("qwen3.5", &unkept)[0].starts_with("--state-checkpoints changes nothing"), "{unkept:?}");
        let all = Options { max_audio_seconds: Some(5), ..text };
        let sees = idle("vl-qwen3", &all);
        assert!(!sees.iter().any(|line| line.contains("pixels") || line.contains("media")), "{sees:?}");
        assert!(sees.iter().any(|line| line.contains("audio")), "{sees:?}");
        let hears = idle("omni", &all);
        assert!(!hears.iter().any(|line| line.contains("audio")), "{hears:?}");
        let only_hears = idle("asr", &all);
        assert!(
            only_hears
                .iter()
                .any(|line| line.contains("--max-image-pixels changes nothing: this model takes no images"))
        );
        assert!(
            !only_hears.iter().any(|line| line.contains("audio") || line.contains("--media-bytes")),
            "{only_hears:?}"
        );
        let encoder = Options { prefix_cache: false, ..Options::default() };
        assert!(idle("bert", &encoder)[0].starts_with("--disable-prefix-cache changes nothing"));
    }
}
