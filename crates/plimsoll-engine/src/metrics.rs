//! Counters and histograms of the engine, named as Prometheus users expect.
//!
//! The metrics are here, where they are incremented; the server only encodes them.

mod disk;

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

pub(crate) use self::disk::CAUSES;
pub use self::disk::{DISK_KINDS, DiskMetrics, KindMetrics};
use crate::api::degradation::DegradationLevel;

/// Counters, gauges and histograms of one engine.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Prompt tokens computed (not those found in the prefix cache).
    pub prompt_tokens: Counter,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: Counter,
    /// Tokens generated, those of aborted requests included.
    pub generated_tokens: Counter,
    /// Inputs that became an embedding or a score.
    pub pooled: Counter,
    /// Requests that ended well.
    pub finished: Counter,
    /// Requests that were cancelled, by a call or by a client's disconnect.
    pub aborted: Counter,
    /// Requests that failed.
    pub failed: Counter,
    /// Requests refused because they can never run here, by the engine or before it by the HTTP side.
    pub refused_invalid: Counter,
    /// Requests refused because the server was full.
    pub refused_full: Counter,
    /// Requests refused because memory was short on the machine.
    pub refused_memory: Counter,
    /// How often each degradation level was entered, cheapest first.
    pub levels: [Counter; DegradationLevel::ALL.len()],
    /// How often a refused allocation cost a block of the emergency reserve.
    pub reserve_releases: Counter,
    /// Times a request was preempted, to be recomputed later.
    pub preemptions: Counter,
    /// Chunks of long prompts that were computed layer by layer, between steps.
    pub layered_chunks: Counter,
    /// Layered chunks that were not completed: their requests ended or were preempted.
    pub layered_dropped: Counter,
    /// Steps that failed; their sequences were run again one by one.
    pub failed_steps: Counter,
    /// Bytes of results copied back from a GPU.
    pub device_fetched_bytes: Counter,
    /// Rows of tables in the model's files that the row cache had.
    pub table_rows_cached: Counter,
    /// Rows of tables that were read from a file.
    pub table_rows_read: Counter,
    /// Panics that were caught, in the engine or on a request's way to or from it.
    pub panics: Counter,
    /// Times the engine requeued all requests and rebuilt the page tables.
    pub recoveries: Counter,
    /// Pages that were missing when no request ran. Rebuilding the page tables recovered them.
    pub lost_pages: Counter,
    /// State slots that were missing when no request ran.
    pub lost_slots: Counter,
    /// Pages of encoder outputs that were missing when no request ran.
    pub lost_outputs: Counter,
    /// Times the engine made no progress for too long.
    pub stalls: Counter,
    /// Times free memory was returned to the system.
    pub trims: Counter,
    /// Pages evicted from the prefix index.
    pub evicted_pages: Counter,
    /// Prefixes that were pinned.
    pub pins: Counter,
    /// Pages of pinned prefixes that were not pinned, because too many pages were.
    pub unpinned_pages: Counter,
    /// Window pages that the prefix index evicted.
    pub evicted_windows: Counter,
    /// Drafted tokens that were checked.
    pub drafted_tokens: Counter,
    /// Drafted tokens that were accepted.
    pub accepted_tokens: Counter,
    /// Accepted over drafted tokens, since start.
    pub acceptance_ratio: Gauge<f64, AtomicU64>,
    /// State checkpoints written by prompts. Decoding writes none: nothing in the engine copies a state.
    pub checkpoints_made: Counter,
    /// State checkpoints evicted because slots or pages ran out.
    pub checkpoints_evicted: Counter,
    /// State checkpoints dropped because their conversation had continued.
    pub checkpoints_superseded: Counter,
    /// State checkpoints not made because every slot was held.
    pub checkpoints_missed: Counter,
    /// Media encoded.
    pub encoded_media: Counter,
    /// Batches that went through the encoder.
    pub encoder_batches: Counter,
    /// Media that needed no encoding: their outputs were cached.
    pub encoder_hits: Counter,
    /// Media on which the encoder failed, each of which ended its request.
    pub encoder_failures: Counter,
    /// 1 if the weights were mapped from the packed cache, 0 if they were packed.
    pub weights_mapped: Gauge,
    /// Seconds that packing or mapping the weights took.
    pub weights_load_seconds: Gauge<f64, AtomicU64>,
    /// Pages of encoder outputs that requests hold.
    pub encoder_pages_used: Gauge,
    /// Pages of encoder outputs kept for later requests with the same medium.
    pub encoder_pages_cached: Gauge,
    /// Host bytes reserved for media.
    pub media_bytes: Gauge,
    /// Seconds of one batch in the encoder.
    pub encode_seconds: Histogram,
    /// Seconds from the engine's queue to the first scheduled step.
    pub queue_seconds: Histogram,
    /// Seconds from the client's request to the first token; includes the HTTP side's reading, fetching and decoding.
    pub ttft_seconds: Histogram,
    /// Seconds between tokens of one request.
    pub inter_token_seconds: Histogram,
    /// Seconds of one step.
    pub step_seconds: Histogram,
    /// The prefix cache on disk.
    pub disk: DiskMetrics,
}

fn seconds() -> Histogram {
    // 0.5 ms to about 262 s, doubling.
    Histogram::new(exponential_buckets(0.0005, 2.0, 20))
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            pooled: Counter::default(),
            finished: Counter::default(),
            aborted: Counter::default(),
            failed: Counter::default(),
            refused_invalid: Counter::default(),
            refused_full: Counter::default(),
            refused_memory: Counter::default(),
            levels: Default::default(),
            reserve_releases: Counter::default(),
            preemptions: Counter::default(),
            layered_chunks: Counter::default(),
            layered_dropped: Counter::default(),
            failed_steps: Counter::default(),
            device_fetched_bytes: Counter::default(),
            table_rows_cached: Counter::default(),
            table_rows_read: Counter::default(),
            panics: Counter::default(),
            recoveries: Counter::default(),
            lost_pages: Counter::default(),
            lost_slots: Counter::default(),
            lost_outputs: Counter::default(),
            stalls: Counter::default(),
            trims: Counter::default(),
            evicted_pages: Counter::default(),
            pins: Counter::default(),
            unpinned_pages: Counter::default(),
            evicted_windows: Counter::default(),
            drafted_tokens: Counter::default(),
            accepted_tokens: Counter::default(),
            acceptance_ratio: Gauge::default(),
            checkpoints_made: Counter::default(),
            checkpoints_evicted: Counter::default(),
            checkpoints_superseded: Counter::default(),
            checkpoints_missed: Counter::default(),
            encoded_media: Counter::default(),
            encoder_batches: Counter::default(),
            encoder_hits: Counter::default(),
            encoder_failures: Counter::default(),
            weights_mapped: Gauge::default(),
            weights_load_seconds: Gauge::default(),
            encoder_pages_used: Gauge::default(),
            encoder_pages_cached: Gauge::default(),
            media_bytes: Gauge::default(),
            encode_seconds: seconds(),
            queue_seconds: seconds(),
            ttft_seconds: seconds(),
            inter_token_seconds: seconds(),
            step_seconds: seconds(),
            disk: DiskMetrics::default(),
        }
    }
}

/// The help text of a metric under its old name, which the next release removes.
const OLD_NAME: &str = "Old name, removed in 0.2: plimsoll_degradation_LEVEL, plimsoll_reserve_blocks_released";

impl Metrics {
    /// Registers every metric under its public name (the encoder appends `_total` to counters).
    pub fn register(&self, registry: &mut Registry) {
        let mut counter = |name: &str, help: &str, counter: &Counter| {
            registry.register(format!("plimsoll_{name}"), help, counter.clone());
        };
        self.each_request_counter(&mut counter);
        self.each_memory_counter(&mut counter);
        self.each_step_counter(&mut counter);
        self.each_cache_counter(&mut counter);
        self.each_encoder_counter(&mut counter);
        self.disk.register(registry);
        self.register_gauges(registry);
        self.register_histograms(registry);
    }

    /// Tokens, and the outcomes of requests.
    fn each_request_counter(&self, mut counter: impl FnMut(&str, &str, &Counter)) {
        counter("prompt_tokens", "Prompt tokens computed", &self.prompt_tokens);
        counter("prompt_cached_tokens", "Prompt tokens found in the prefix cache", &self.cached_tokens);
        counter("generated_tokens", "Tokens generated", &self.generated_tokens);
        counter("pooled_inputs", "Inputs that became an embedding or a score", &self.pooled);
        counter("requests_finished", "Requests that ended well", &self.finished);
        counter("requests_aborted", "Requests that their client cancelled or left", &self.aborted);
        counter("requests_failed", "Requests that failed", &self.failed);
        counter(
            "requests_refused_invalid",
            "Requests for this model refused as invalid (400, 404, 413, 415), by HTTP or by the engine",
            &self.refused_invalid,
        );
        counter("requests_refused_full", "Requests refused with a 429", &self.refused_full);
        counter(
            "requests_refused_memory",
            "Requests refused with a 503 because memory was short",
            &self.refused_memory,
        );
    }

    /// Degradation levels and the emergency reserve.
    fn each_memory_counter(&self, mut counter: impl FnMut(&str, &str, &Counter)) {
        for (level, entered) in DegradationLevel::ALL.iter().zip(&self.levels) {
            counter(&format!("degradation_{}", level.name()), "How often this degradation level was entered", entered);
            counter(&format!("governor_{}", level.name()), OLD_NAME, entered);
        }
        counter(
            "reserve_blocks_released",
            "How often a refused allocation cost a block of the emergency reserve",
            &self.reserve_releases,
        );
        counter("canary_released", OLD_NAME, &self.reserve_releases);
    }

    /// Steps, their failures, and the state that failures lose.
    fn each_step_counter(&self, mut counter: impl FnMut(&str, &str, &Counter)) {
        counter("preemptions", "Requests preempted, to be recomputed later", &self.preemptions);
        counter(
            "layered_chunks",
            "Chunks of long prompts computed layer by layer, between the steps of decoding sequences",
            &self.layered_chunks,
        );
        counter(
            "layered_chunks_dropped",
            "Such chunks that were begun and not ended: their requests were gone or preempted",
            &self.layered_dropped,
        );
        counter("steps_failed", "Steps that failed; their sequences were run again one by one", &self.failed_steps);
        counter("device_fetched_bytes", "Bytes of results that came back from a GPU", &self.device_fetched_bytes);
        counter(
            "table_rows_cached",
            "Rows of tables in the model's files that the table cache had",
            &self.table_rows_cached,
        );
        counter("table_rows_read", "Rows of such tables that were read from a file", &self.table_rows_read);
        counter("panics", "Panics that were caught", &self.panics);
        counter("engine_recoveries", "Times the engine ended what it had and started over", &self.recoveries);
        counter("kv_pages_lost", "Pages that were missing when nothing ran; taken back", &self.lost_pages);
        counter("state_slots_lost", "State slots that were missing when nothing ran; taken back", &self.lost_slots);
        counter(
            "encoder_pages_lost",
            "Pages of encoder outputs that were missing when nothing ran",
            &self.lost_outputs,
        );
        counter("engine_stalls", "Times the engine made no progress for too long", &self.stalls);
        counter("memory_trims", "Times free memory was given back to the system", &self.trims);
    }

    /// Prefix cache, speculation and state checkpoints.
    fn each_cache_counter(&self, mut counter: impl FnMut(&str, &str, &Counter)) {
        counter("prefix_evicted_pages", "Pages evicted from the prefix index", &self.evicted_pages);
        counter("prefix_pins", "Prefixes pinned by cache_control, each time that they were", &self.pins);
        counter(
            "prefix_unpinned_pages",
            "Pages of them that were not: a quarter of all was pinned",
            &self.unpinned_pages,
        );
        counter(
            "prefix_evicted_window_pages",
            "Window pages that the prefix index gave up to sequences",
            &self.evicted_windows,
        );
        counter("speculation_drafted_tokens", "Drafted tokens that were checked", &self.drafted_tokens);
        counter("speculation_accepted_tokens", "Drafted tokens that were right", &self.accepted_tokens);
        counter("state_checkpoints_made", "State checkpoints written by prompts", &self.checkpoints_made);
        counter(
            "state_checkpoints_evicted",
            "State checkpoints given up because slots or pages ran out",
            &self.checkpoints_evicted,
        );
        counter(
            "state_checkpoints_superseded",
            "State checkpoints given up because their conversation had gone on",
            &self.checkpoints_superseded,
        );
        counter(
            "state_checkpoints_missed",
            "State checkpoints not made because every slot was held",
            &self.checkpoints_missed,
        );
    }

    /// The encoder.
    fn each_encoder_counter(&self, mut counter: impl FnMut(&str, &str, &Counter)) {
        counter("encoder_media", "Media encoded", &self.encoded_media);
        counter("encoder_batches", "Batches that went through the encoder", &self.encoder_batches);
        counter("encoder_hits", "Media with outputs found in the cache", &self.encoder_hits);
        counter("encoder_failures", "Media on which the encoder failed", &self.encoder_failures);
    }

    fn register_gauges(&self, registry: &mut Registry) {
        for (name, help, gauge) in [
            ("encoder_pages_used", "Pages of encoder outputs that requests hold", &self.encoder_pages_used),
            ("encoder_pages_cached", "Pages of unused encoder outputs", &self.encoder_pages_cached),
            ("weights_mapped", "1 if the weights were mapped from the packed cache", &self.weights_mapped),
            ("media_host_bytes", "Host bytes reserved for media", &self.media_bytes),
        ] {
            registry.register(format!("plimsoll_{name}"), help, gauge.clone());
        }
        let load = self.weights_load_seconds.clone();
        registry.register("plimsoll_weights_load_seconds", "Seconds that packing or mapping the weights took", load);
        let ratio = self.acceptance_ratio.clone();
        registry.register("plimsoll_speculation_acceptance_ratio", "Accepted over drafted tokens since start", ratio);
    }

    fn register_histograms(&self, registry: &mut Registry) {
        let mut histogram = |name: &str, help: &str, histogram: &Histogram| {
            registry.register(format!("plimsoll_{name}_seconds"), help, histogram.clone());
        };
        histogram("queue", "From the engine's queue to the first scheduled step", &self.queue_seconds);
        histogram("ttft", "From the arrival of the HTTP request to the first token", &self.ttft_seconds);
        histogram("inter_token", "Between tokens of one request", &self.inter_token_seconds);
        histogram("encode", "One batch in the encoder", &self.encode_seconds);
        histogram("step", "One engine step, layers of a long prompt behind it included", &self.step_seconds);
    }
}
