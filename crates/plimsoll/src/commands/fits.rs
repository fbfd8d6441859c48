//! `models --fits`: lists the models with a short name that this machine can serve. The planner is that of `serve`.

use clap::Parser;
use plimsoll_engine::whatif::{Load, Need, need};
use plimsoll_engine::{Host, Options};
use plimsoll_formats::Checkpoint;
use plimsoll_hub::{KNOWN, Kind, Known, Weights};
use plimsoll_memory::Bytes;
use serde_json::{Value, json};

use crate::args::{EngineArgs, HttpArgs, ModelsArgs};
use crate::output::say;

/// A server without flags.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Defaults {
    #[command(flatten)]
    http: HttpArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Configuration key of 4-bit weights with a scale and a bias for 64 weights. A GGUF file of Q4_K_M has about as many bits a
/// weight.
const QUANTIZED: &str = r#""quantization": {"group_size": 64, "bits": 4}"#;

/// The least context of a model of audio, in tokens: a clip of 30 seconds takes 1,500.
const AUDIO_CONTEXT_MIN: u64 = 2_048;

/// A model and what it needs.
pub struct Row {
    known: &'static Known,
    need: Need,
}

/// Prints the list.
pub fn list(args: &ModelsArgs) -> anyhow::Result<()> {
    let (fitting, limit, smallest) = planned(args)?;
    match args.json {
        true => say!("{}", serde_json::to_string_pretty(&document(&fitting, args, limit))?),
        false => print(&fitting, args, limit, smallest),
    }
    Ok(())
}

/// The models that fit, by kind and from the largest to the smallest; the memory limit in bytes; and the bytes that the
/// smallest of the others needs.
pub fn planned(args: &ModelsArgs) -> anyhow::Result<(Vec<Row>, u64, Option<u64>)> {
    let mut defaults = Defaults::try_parse_from(std::iter::empty::<&str>())?;
    defaults.engine.memory_budget = args.memory_budget;
    let options = defaults.engine.options_beside(&defaults.http.config()?);
    let host = Host::read(&options)?;
    let limit = args.memory_budget.map_or(host.limit.bytes, |budget| budget.bytes(host.limit.bytes));
    let load = Load { users: args.users, context: args.context, images: 0, audio_seconds: 0 };
    let rows = KNOWN.iter().map(|known| Ok(Row { known, need: need_of(known, &options, host.threads, load)? }));
    let (mut fitting, other): (Vec<_>, Vec<_>) =
        rows.collect::<anyhow::Result<Vec<_>>>()?.into_iter().partition(|row| row.need.bytes <= limit);
    fitting.sort_by_key(|row| (row.known.kind as u8, std::cmp::Reverse(row.known.millions)));
    let smallest = other.iter().map(|row| row.need.bytes).min();
    Ok((fitting, limit, smallest))
}

/// Plans a model from its configuration and returns the memory that it needs for this load.
fn need_of(known: &Known, options: &Options, threads: usize, load: Load) -> anyhow::Result<Need> {
    // Configurations may have Infinity, which JSON lacks, so the key is put into the text.
    let end = known.config.rfind('}').filter(|_| known.weights == Weights::Q4);
    let config = end.map_or_else(|| known.config.to_owned(), |end| format!("{}, {QUANTIZED}}}", &known.config[..end]));
    let least = if known.kind == Kind::Audio { AUDIO_CONTEXT_MIN } else { 0 };
    let load = Load { context: load.context.max(least), ..load };
    Ok(need(&Checkpoint::of_config(&config)?, options, threads, load)?)
}

fn print(rows: &[Row], args: &ModelsArgs, limit: u64, smallest: Option<u64>) {
    let (users, context) = (args.users, args.context);
    let load = format!("{users} user{} x {context} tokens", if users == 1 { "" } else { "s" });
    if rows.is_empty() {
        let least = Bytes(smallest.unwrap_or_default());
        say!(
            "no known model fits into {} with {load}: the smallest needs {least}; lower --users or --context",
            Bytes(limit)
        );
        return;
    }
    say!("models that fit into {} with {load}, the largest first:", Bytes(limit));
    say!("{:<22} {:<10} {:>10} {:>10} {:>12}  licence", "name", "kind", "parameters", "memory", "read a token");
    for Row { known, need } in rows {
        let (memory, read) = (Bytes(need.bytes).to_string(), Bytes(need.read_bytes).to_string());
        let size = parameters(known.millions);
        say!("{:<22} {:<10} {size:>10} {memory:>10} {read:>12}  {}", known.name, known.kind.name(), known.licence);
    }
    say!(
        "memory is planned from configurations, with 5 bits a weight for GGUF files; `plimsoll plan NAME` reads the files"
    );
}

/// The number of parameters in words.
pub fn parameters(millions: u32) -> String {
    if millions < 1000 { format!("{millions} M") } else { format!("{:.1} B", f64::from(millions) / 1000.0) }
}

/// The list in JSON.
pub fn document(rows: &[Row], args: &ModelsArgs, limit: u64) -> Value {
    let row = |Row { known, need }: &Row| {
        json!({
            "name": known.name,
            "kind": known.kind.name(),
            "parameters_millions": known.millions,
            "licence": known.licence,
            "repository": known.repo,
            "needed_bytes": need.bytes,
            "weight_bytes": need.weight_bytes,
            "read_bytes_per_token": need.read_bytes,
            "context_max": need.context_max,
        })
    };
    let rows: Vec<_> = rows.iter().map(row).collect();
    json!({"limit_bytes": limit, "users": args.users, "context": args.context, "models": rows})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_model_is_planned_and_has_the_parameters_that_its_name_says() {
        let options = Options::default();
        let load = Load { users: 2, context: 1024, images: 0, audio_seconds: 0 };
        let mut wrong = Vec::new();
        for known in KNOWN {
            let need = need_of(known, &options, 2, load).unwrap_or_else(|error| panic!("{}: {error:#}", known.name));
            let bits = 8.0 * need.weight_bytes as f64 / (f64::from(known.millions) * 1e6);
            let [least, most] = match known.weights {
                // Vision encoders have 16 bits: their `mmproj` file is not quantized.
                Weights::Q4 => [4.4, if known.kind == Kind::Vision { 6.1 } else { 5.9 }],
                Weights::AsConfigured => [15.0, 36.0],
            };
            if !(least..most).contains(&bits) || need.bytes < need.weight_bytes {
                wrong.push(format!("{}: {bits:.2} bits a weight, {need:?}", known.name));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}
