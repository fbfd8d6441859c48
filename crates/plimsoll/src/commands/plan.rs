//! `plan`: what serving would take, from headers and configuration alone. The same code as start-up (I8).

use std::path::Path;

use plimsoll_engine::{Blueprint, Host};
use plimsoll_formats::Checkpoint;
use plimsoll_server::ServerConfig;
use serde_json::json;

use crate::args::PlanArgs;

/// Prints the plan.
pub fn run(args: PlanArgs) -> anyhow::Result<()> {
    let options = args.engine.options(ServerConfig::default().heap_bytes_max());
    let local = Path::new(&args.model);
    let path = if local.exists() { local.to_path_buf() } else { super::resolve(&args.model)? };
    let checkpoint = Checkpoint::open(&path)?;
    let host = Host::read(&options)?;
    let planned = Blueprint::new(&checkpoint, &options)?.plan(&options, host.threads, &host.line)?;
    let [prefill, decode] = planned.work;
    if args.json {
        let work = |w: plimsoll_device::Work| json!({"flops": w.flops, "weight_bytes": w.weight_bytes, "kv_bytes": w.kv_bytes});
        let document = json!({
            "plan": planned.plan,
            "total": planned.plan.total(),
            "limits": planned.limits,
            "kv_bytes_per_token": planned.kv.token_bytes(),
            "work": {"largest_prefill_step": work(prefill), "one_decode_row_at_position_127": work(decode)},
        });
        println!("{}", serde_json::to_string_pretty(&document)?);
        return Ok(());
    }
    println!("{}: {} threads, {:?}", path.display(), host.threads, host.isa);
    println!("{}", planned.plan);
    let limits = planned.limits;
    println!(
        "  {} tokens in the pool, {} per request at most, {} requests at once, {} waiting",
        limits.max_total_token_num, limits.max_req_total_len, limits.running_max_req_size, limits.max_waiting
    );
    println!(
        "  a decoded token reads {} of weights and takes {:.2} GFLOP",
        plimsoll_memory::Bytes(decode.weight_bytes),
        decode.flops as f64 / 1e9
    );
    Ok(())
}
