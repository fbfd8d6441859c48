//! `GET /v1/memory`: the load line, the plan, the ledger and the pools in one JSON page.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::extract::State;
use axum::response::Response;
use plimsoll_engine::EngineHandle;
use plimsoll_engine::governor::Rung;
use plimsoll_memory::heap;
use plimsoll_memory::host::{OwnProcess, Root};
use serde::Serialize;

use crate::app::App;
use crate::limits::ByteBudget;
use crate::models::json;

/// Where every byte is. All sizes are bytes.
#[derive(Debug, Serialize)]
pub(crate) struct MemoryPage {
    pub line_bytes: u64,
    pub line_source: String,
    pub planned_bytes: u64,
    pub committed_bytes: u64,
    /// Anonymous memory, resident or swapped, that is in no component. Negative while planned memory is untouched.
    pub unaccounted_bytes: i64,
    pub components: Vec<ComponentRow>,
    pub process: OwnProcess,
    pub heap: Heap,
    pub device_allocations: DeviceAllocations,
    pub ladder: Ladder,
    pub pools: Pools,
}

/// One component of plan and ledger.
#[derive(Debug, Serialize)]
pub(crate) struct ComponentRow {
    pub component: &'static str,
    pub planned_bytes: u64,
    pub committed_bytes: u64,
    pub peak_bytes: u64,
    /// The arithmetic behind the plan, in words.
    pub detail: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct Heap {
    pub in_use_bytes: u64,
    pub peak_bytes: u64,
    pub calls: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct DeviceAllocations {
    pub before_ready: u64,
    pub after_ready: u64,
}

/// Where the engine stands on the governor's ladder, and how often it climbed each rung.
#[derive(Debug, Serialize)]
pub(crate) struct Ladder {
    /// `calm` when nothing is wrong.
    pub rung: &'static str,
    /// Every rung, from the cheapest to the dearest.
    pub climbed: Vec<Climbed>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Climbed {
    pub rung: &'static str,
    pub times: u64,
}

/// What must be full again at idle.
#[derive(Debug, Serialize)]
pub(crate) struct Pools {
    pub kv_pages: Pages,
    pub requests: Requests,
    /// Host bytes reserved by requests.
    pub host_bytes: Share,
    /// Bodies and unsent answers.
    pub http_bytes: Share,
}

#[derive(Debug, Serialize)]
pub(crate) struct Pages {
    pub used: u64,
    pub total: u64,
    /// Held by the prefix index alone; given up as soon as a request needs them.
    pub cached: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Requests {
    pub running: u64,
    pub waiting: u64,
    pub in_system: u64,
    pub running_max: u64,
    pub waiting_max: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Share {
    pub used: u64,
    pub total: u64,
}

impl MemoryPage {
    /// Reads everything now.
    pub fn of(engine: &EngineHandle, http: &ByteBudget) -> Self {
        let (plan, ledger, process) = (engine.plan(), engine.ledger(), OwnProcess::read(&Root::system()));
        let committed_bytes = ledger.committed_total();
        let (before_ready, after_ready) = ledger.allocations();
        let row = |row: plimsoll_memory::ledger::Row| ComponentRow {
            component: row.component.name(),
            planned_bytes: row.planned,
            committed_bytes: row.committed,
            peak_bytes: row.peak,
            detail: plan
                .lines
                .iter()
                .find(|l| l.component == row.component)
                .map_or_else(String::new, |l| l.detail.clone()),
        };
        Self {
            line_bytes: plan.limit,
            line_source: plan.limit_source.clone(),
            planned_bytes: plan.total(),
            committed_bytes,
            unaccounted_bytes: difference(process.leak_gauge(), committed_bytes),
            components: ledger.rows().into_iter().map(row).collect(),
            heap: Heap { in_use_bytes: heap::in_use(), peak_bytes: heap::peak(), calls: heap::calls() },
            device_allocations: DeviceAllocations { before_ready, after_ready },
            ladder: Ladder::of(engine),
            pools: Pools::of(engine, http),
            process,
        }
    }
}

impl Ladder {
    fn of(engine: &EngineHandle) -> Self {
        let rungs = Rung::LADDER.iter().zip(&engine.metrics().rungs);
        let climbed = rungs.map(|(rung, count)| Climbed { rung: rung.name(), times: count.get() }).collect();
        Self { rung: engine.rung().name(), climbed }
    }
}

impl Pools {
    fn of(engine: &EngineHandle, http: &ByteBudget) -> Self {
        let (status, limits) = (engine.status(), engine.limits());
        let (reserved, in_system) = engine.reserved();
        Self {
            kv_pages: Pages {
                used: status.pages_used.load(Relaxed),
                total: status.pages_total.load(Relaxed),
                cached: status.pages_cached.load(Relaxed),
            },
            requests: Requests {
                running: status.running.load(Relaxed),
                waiting: status.waiting.load(Relaxed),
                in_system,
                running_max: limits.running_max_req_size.into(),
                waiting_max: limits.max_waiting.into(),
            },
            host_bytes: Share { used: reserved, total: limits.host_bytes },
            http_bytes: Share { used: http.used(), total: http.limit() },
        }
    }
}

fn difference(a: u64, b: u64) -> i64 {
    let clamp = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    clamp(a).saturating_sub(clamp(b))
}

/// The page.
pub(crate) async fn handle(State(app): State<Arc<App>>) -> Response {
    json(&MemoryPage::of(&app.served.engine, &app.bytes), None)
}
