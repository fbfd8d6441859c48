//! The report: all observations as JSON of bounded size, one line per part.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};

use super::memory::{Ledger, POOLS};
use super::watch::Look;
use crate::output::write_json;

/// At most this many samples in a report.
const LOOKS_MAX: usize = 600;

/// Keeps at most `LOOKS_MAX` samples. Of each equal stretch it keeps the one with the most memory, so that no peak is lost.
pub fn thin(looks: &[Look]) -> Vec<Look> {
    let each = looks.len().div_ceil(LOOKS_MAX).max(1);
    looks.chunks(each).filter_map(|stretch| stretch.iter().max_by_key(|look| look.sample.owned).copied()).collect()
}

/// Returns the samples as columns of numbers.
pub fn columns(looks: &[Look]) -> Value {
    let column = |of: &dyn Fn(&Look) -> Value| looks.iter().map(of).collect::<Vec<_>>();
    let ledger = |of: fn(Ledger) -> i64| column(&|look: &Look| look.ledger.map(of).into());
    let mut all = json!({
        "at_s": column(&|look| ((look.at_s * 10.0).round() / 10.0).into()),
        "owned": column(&|look| look.sample.owned.into()),
        "resident": column(&|look| look.sample.resident.into()),
        "threads": column(&|look| look.sample.threads.into()),
        "descriptors": column(&|look| look.sample.fds.into()),
        "free": column(&|look| look.free.into()),
        "committed": ledger(|ledger| ledger.committed),
        "unaccounted": ledger(|ledger| ledger.unaccounted),
        "level": ledger(|ledger| ledger.level as i64),
        "calm": column(&|look| u8::from(look.calm).into()),
    });
    for (i, (name, ..)) in POOLS.iter().enumerate() {
        let lent = column(&|look: &Look| look.ledger.map(|ledger| ledger.lent[i]).into());
        // A pool that was never used needs no column.
        if lent.iter().any(|lent| lent.as_u64().is_some_and(|lent| lent > 0)) {
            all[format!("lent {name}")] = lent.into();
        }
    }
    all
}

/// Writes the parts of an object, one per line.
///
/// # Errors
/// When the file cannot be written.
pub fn write(path: &Path, report: &impl Serialize) -> Result<()> {
    let Value::Object(parts) = serde_json::to_value(report)? else { return write_json(path, report) };
    let mut text = String::from("{");
    for (i, (key, value)) in parts.iter().enumerate() {
        let lead = if i == 0 { "\n" } else { ",\n" };
        match value {
            Value::Object(inner) if key == "series" => {
                write!(text, "{lead}{}: {{", json!(key))?;
                for (i, (name, column)) in inner.iter().enumerate() {
                    write!(text, "{}  {}: {column}", if i == 0 { "\n" } else { ",\n" }, json!(name))?;
                }
                text += "\n}";
            }
            _ => write!(text, "{lead}{}: {value}", json!(key))?,
        }
    }
    text += "\n}\n";
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Sample;

    fn looks(count: u64) -> Vec<Look> {
        let look = |i: u64| {
            let sample = Sample { owned: if i == 777 { 9_999_999 } else { 1_000_000 + i }, ..Sample::default() };
            Look { at_s: i as f64, sample, ledger: None, free: None, calm: true }
        };
        (0..count).map(look).collect()
    }

    #[test]
    fn a_report_is_small_and_keeps_the_peaks() {
        let all = looks(6000);
        let thinned = thin(&all);
        assert!(thinned.len() <= LOOKS_MAX && thinned.len() > LOOKS_MAX / 2, "{}", thinned.len());
        assert!(thinned.iter().any(|look| look.sample.owned == 9_999_999));
        assert_eq!(thin(&looks(20)).len(), 20);
        let path = std::env::temp_dir().join(format!("plimsoll-report-{}", std::process::id()));
        write(&path, &json!({"a": {"b": 1}, "series": columns(&thinned)})).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(text.len() < 100_000 && text.lines().count() < 30, "{}", text.len());
        let read: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(read["series"]["owned"].as_array().unwrap().len(), thinned.len());
        assert!(read["series"].get("lent pages").is_none());
    }
}
