//! One engine's values, read at each request.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use plimsoll_engine::EngineHandle;
use plimsoll_engine::cache::PAGE_TOKENS;
use plimsoll_engine::report::LedgerReport;
use plimsoll_grammar::Usage;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{Single, encode_each, encode_rows, signed};
use crate::ops::gateway::kv_usage;

/// Values of one engine, read at each request.
pub(super) struct EngineValues {
    pub engine: EngineHandle,
    pub grammars: Usage,
}

impl fmt::Debug for EngineValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineValues")
    }
}

impl Collector for EngineValues {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let page = self.engine.report();
        encode_each(&mut encoder, &self.singles(&page), ConstGauge::new)?;
        encode_each(&mut encoder, &self.counters(&page), ConstCounter::new)?;
        encode_cache(&mut encoder, &self.engine)?;
        encode_renamed(&mut encoder, &self.engine)?;
        encode_rows(&mut encoder, &page.components)
    }
}

/// Encodes metrics for routers: the share of the pool that requests hold, the pool's shape, and the counters of the KV event log.
fn encode_cache(encoder: &mut DescriptorEncoder<'_>, engine: &EngineHandle) -> Result<(), fmt::Error> {
    let usage = ConstGauge::new(kv_usage(engine));
    let help = "Share of the pool's pages that requests hold, 0 to 1";
    let metric = encoder.encode_descriptor("plimsoll_kv_usage_ratio", help, None, usage.metric_type())?;
    usage.encode(metric)?;
    let block_size = ConstGauge::new(PAGE_TOKENS as i64);
    let help = "Tokens of a page";
    let metric = encoder.encode_descriptor("plimsoll_kv_page_tokens", help, None, block_size.metric_type())?;
    block_size.encode(metric)?;
    // In the form that the endpoint picker of Kubernetes' inference extension reads, including the labels' names.
    let pages = engine.status().pages_total.load(Ordering::Relaxed).to_string();
    let labels = [("block_size", PAGE_TOKENS.to_string()), ("num_gpu_blocks", pages)];
    let one = ConstGauge::new(1i64);
    let help = "The pool's shape: tokens of a page, pages";
    let mut family = encoder.encode_descriptor("plimsoll_cache_config_info", help, None, one.metric_type())?;
    one.encode(family.encode_family(&labels)?)?;
    let Some(kv_event_log) = engine.kv_event_log().map(|kv_event_log| kv_event_log.stats()) else { return Ok(()) };
    encode_each(
        encoder,
        &[("plimsoll_kv_changes", "Changes of the prefix cache", kv_event_log.changes)],
        ConstCounter::new,
    )?;
    encode_each(
        encoder,
        &[
            ("plimsoll_kv_events_pages", "Pages that routers are told of", kv_event_log.pages as i64),
            ("plimsoll_kv_events_removals", "Departures kept for slow readers", kv_event_log.removals_kept as i64),
            ("plimsoll_kv_events_removals_limit", "Limit of the above", kv_event_log.removals_max as i64),
        ],
        ConstGauge::new,
    )
}

/// Encodes gauges under their names of version 0.1, for one more release. `_total` is a counter's suffix, so these have no type.
fn encode_renamed(encoder: &mut DescriptorEncoder<'_>, engine: &EngineHandle) -> Result<(), fmt::Error> {
    let status = engine.status();
    for (name, help, value) in [
        ("plimsoll_kv_pages_total", "Deprecated: plimsoll_kv_pool_pages", &status.pages_total),
        ("plimsoll_state_slots_total", "Deprecated: plimsoll_state_pool_slots", &status.slots_total),
    ] {
        let value = ConstGauge::new(signed(value.load(Ordering::Relaxed)));
        value.encode(encoder.encode_descriptor(name, help, None, MetricType::Unknown)?)?;
    }
    Ok(())
}

impl EngineValues {
    fn singles(&self, page: &LedgerReport) -> [Single<i64>; 19] {
        let status = self.engine.status();
        let read = |value: &AtomicU64| signed(value.load(Ordering::Relaxed));
        let (pools, grammars) = (&page.pools, &self.grammars);
        [
            ("plimsoll_requests_running", "Requests that hold a slot", read(&status.running)),
            ("plimsoll_requests_waiting", "Requests that wait for a slot", read(&status.waiting)),
            ("plimsoll_requests_in_system", "Requests accepted and not yet ended", signed(pools.requests.in_system)),
            ("plimsoll_kv_pages_used", "Pages in use, those of the prefix index included", read(&status.pages_used)),
            ("plimsoll_kv_pages_peak", "The most pages that were in use at once since start", read(&status.pages_peak)),
            ("plimsoll_kv_pool_pages", "Pages of the pool", read(&status.pages_total)),
            ("plimsoll_kv_pages_cached", "Pages held by the prefix index alone", read(&status.pages_cached)),
            (
                "plimsoll_kv_window_pages_used",
                "Window pages in use, those of the prefix index included",
                read(&status.windows_used),
            ),
            ("plimsoll_kv_window_pool_pages", "Window pages of the pool", read(&status.windows_total)),
            (
                "plimsoll_kv_window_pages_cached",
                "Window pages held by the prefix index alone",
                read(&status.windows_cached),
            ),
            ("plimsoll_state_slots_used", "State slots held or kept as checkpoints", read(&status.slots_used)),
            ("plimsoll_state_pool_slots", "State slots of the pool", read(&status.slots_total)),
            ("plimsoll_state_slots_kept", "State slots kept as checkpoints", read(&status.slots_kept)),
            ("plimsoll_engine_stalled", "1 while the engine makes no progress", i64::from(!self.engine.healthy())),
            ("plimsoll_host_reserved_bytes", "Host bytes reserved by requests", signed(pools.host_bytes.used)),
            ("plimsoll_host_limit_bytes", "Host bytes requests may reserve", signed(pools.host_bytes.total)),
            ("plimsoll_grammar_bytes", "What constrained output holds", signed(grammars.used)),
            ("plimsoll_grammar_limit_bytes", "Limit of the above", signed(grammars.limit)),
            ("plimsoll_grammars", "Compiled grammars", signed(grammars.grammars)),
        ]
    }

    fn counters(&self, page: &LedgerReport) -> [Single<u64>; 8] {
        let (grammars, allocations) = (&self.grammars, &page.device_allocations);
        let steps = self.engine.status().steps.load(Ordering::Relaxed);
        [
            ("plimsoll_engine_steps", "Steps taken since start", steps),
            ("plimsoll_grammars_compiled", "Grammars compiled since start", grammars.compiled),
            ("plimsoll_grammar_hits", "Requests that found their grammar compiled", grammars.hits),
            ("plimsoll_grammars_evicted", "Grammars dropped to make room", grammars.evicted),
            ("plimsoll_grammar_sandbox_starts", "Sandbox processes started since start", grammars.sandbox_starts),
            (
                "plimsoll_grammar_invalid_answers",
                "Answers ended because they broke their schema",
                grammars.invalid_answers,
            ),
            ("plimsoll_device_allocations", "Device allocations before ready", allocations.before_ready),
            ("plimsoll_device_allocations_after_ready", "Device allocations after ready", allocations.after_ready),
        ]
    }
}
