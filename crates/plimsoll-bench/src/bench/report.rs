//! Rounds as a table for people and as JSON for machines: medians over rounds, and every server against the first, round by round.

use serde::Serialize;

use plimsoll_engine::simulate::percentile;

use super::intruder::Window;
use super::load::Round;

/// All rounds of one server.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// The server's address as it was given.
    pub url: String,
    /// Its model.
    pub model: String,
    /// Its rounds, in order.
    pub rounds: Vec<Round>,
}

/// One line of the table.
struct Row {
    name: &'static str,
    /// Decimals to print.
    decimals: usize,
    /// Factor from the unit in [`Round`] to the printed unit.
    factor: f64,
    /// Reads the value of a round; none where it was not measured.
    of: fn(&Round) -> Option<f64>,
}

/// Text of a cell without a value.
const NONE: &str = "-";

/// Number of lines at the end of [`ROWS`] about an intruder.
const INTRUDER_ROWS: usize = 4;

const ROWS: [Row; 13] = [
    Row { name: "output tok/s", decimals: 1, factor: 1.0, of: |r| Some(r.output_tokens_per_s) },
    Row { name: "prompt tok/s", decimals: 1, factor: 1.0, of: |r| Some(r.prompt_tokens_per_s) },
    Row { name: "TTFT p50 ms", decimals: 1, factor: 1e3, of: |r| Some(r.ttft_p50_s) },
    Row { name: "TTFT p99 ms", decimals: 1, factor: 1e3, of: |r| Some(r.ttft_p99_s) },
    Row { name: "inter-token p50 ms", decimals: 2, factor: 1e3, of: |r| Some(r.gap_p50_s) },
    Row { name: "inter-token p99 ms", decimals: 2, factor: 1e3, of: |r| Some(r.gap_p99_s) },
    Row { name: "wall s", decimals: 2, factor: 1.0, of: |r| Some(r.wall_s) },
    Row { name: "errors", decimals: 0, factor: 1.0, of: |r| Some(r.errors as f64) },
    Row {
        name: "peak RSS MiB",
        decimals: 1,
        factor: 1.0 / 1_048_576.0,
        of: |r| r.peak_resident.map(|bytes| bytes as f64),
    },
    Row { name: "intruder: TTFT ms", decimals: 1, factor: 1e3, of: |r| intruded(r, |w| w.ttft_s) },
    Row { name: "meanwhile p50 ms", decimals: 2, factor: 1e3, of: |r| intruded(r, |w| w.gap_p50_s) },
    Row { name: "meanwhile p99 ms", decimals: 2, factor: 1e3, of: |r| intruded(r, |w| w.gap_p99_s) },
    Row { name: "otherwise p50 ms", decimals: 2, factor: 1e3, of: |r| intruded(r, |w| w.quiet_gap_p50_s) },
];

/// Reads a value of the intruder's window.
fn intruded(round: &Round, of: fn(&Window) -> f64) -> Option<f64> {
    round.intruder.as_ref().map(of)
}

/// Formats the table: a column per server with medians and their range over the rounds, and a column with ratios to the first server's
/// rounds. Lines about an intruder appear only if one was sent.
pub fn table(all: &[Series]) -> String {
    let mut lines = vec![vec![String::new()]];
    for (i, series) in all.iter().enumerate() {
        lines[0].push(series.url.clone());
        if i > 0 {
            lines[0].push("ratio".into());
        }
    }
    let intruders = all.iter().flat_map(|series| &series.rounds).any(|round| round.intruder.is_some());
    for row in ROWS.iter().take(if intruders { ROWS.len() } else { ROWS.len() - INTRUDER_ROWS }) {
        let mut cells = vec![row.name.to_owned()];
        for (i, series) in all.iter().enumerate() {
            cells.push(cell(row, &series.rounds));
            if i > 0 {
                cells.push(ratio(row, &all[0].rounds, &series.rounds));
            }
        }
        lines.push(cells);
    }
    align(&lines)
}

fn cell(row: &Row, rounds: &[Round]) -> String {
    spread(rounds.iter().filter_map(row.of).map(|value| value * row.factor).collect(), row.decimals, "")
}

/// Formats the median, and the range if the values differ.
fn spread(mut values: Vec<f64>, digits: usize, unit: &str) -> String {
    if values.is_empty() {
        return NONE.into();
    }
    let median = percentile(&mut values, 50);
    let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(*v), high.max(*v)));
    match low < high {
        true => format!("{median:.digits$}{unit} ({low:.digits$}–{high:.digits$})"),
        false => format!("{median:.digits$}{unit}"),
    }
}

/// Formats the ratio of values from rounds that ran next to each other. A slow moment slows both servers and hardly changes
/// their ratio. No ratio if one round lacks its value: the remaining rounds could favour one server.
fn ratio(row: &Row, first: &[Round], other: &[Round]) -> String {
    let of_round = |(first, other)| {
        let (first, other) = ((row.of)(first)?, (row.of)(other)?);
        (first > 0.0).then(|| other / first)
    };
    let ratios: Option<Vec<f64>> = first.iter().zip(other).map(of_round).collect();
    spread(ratios.unwrap_or_default(), 2, "×")
}

fn align(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        lines.iter().filter_map(|cells| cells.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for cells in lines {
        for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            let pad = " ".repeat(width - cell.chars().count());
            let gap = if column == 0 { "" } else { "  " };
            // Names are aligned to the left, numbers to the right.
            text += &if column == 0 { format!("{gap}{cell}{pad}") } else { format!("{gap}{pad}{cell}") };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_medians_ranges_and_ratios() {
        let series = |url: &str, speeds: &[f64]| Series {
            url: url.into(),
            model: "m".into(),
            rounds: speeds.iter().map(|s| Round { output_tokens_per_s: *s, ..Round::default() }).collect(),
        };
        let text = table(&[series("http://a", &[10.0, 30.0, 20.0]), series("http://b", &[40.0, 90.0, 40.0])]);
        let line = text.lines().find(|line| line.starts_with("output tok/s")).unwrap();
        assert!(line.contains("20.0 (10.0–30.0)"), "{text}");
        assert!(line.contains("40.0 (40.0–90.0)") && line.ends_with("3.00× (2.00–4.00)"), "not 2: {text}");
        let stalled = table(&[series("http://a", &[10.0, 0.0, 20.0]), series("http://b", &[40.0, 90.0, 40.0])]);
        let line = stalled.lines().find(|line| line.starts_with("output tok/s")).unwrap();
        assert!(line.ends_with(" -"), "no ratio of what nobody said: {stalled}");
        assert!(text.lines().next().unwrap().contains("http://b"));
        let ends: Vec<_> = text.lines().filter(|l| l.contains('×')).map(|l| l.chars().count()).collect();
        assert!(ends.windows(2).all(|pair| pair[0] == pair[1]), "columns are aligned: {text}");
    }

    #[test]
    fn unwatched_memory_is_not_reported() {
        let series = |peak_resident| {
            let rounds = vec![Round { peak_resident, ..Round::default() }];
            Series { url: "http://a".into(), model: "m".into(), rounds }
        };
        let text = table(&[series(None), series(Some(3 << 20))]);
        let line = text.lines().find(|line| line.starts_with("peak RSS MiB")).unwrap();
        assert_eq!(line.split_whitespace().skip(3).collect::<Vec<_>>(), ["-", "3.0", "-"], "{text}");
        assert!(serde_json::to_value(series(None)).unwrap()["rounds"][0]["peak_resident"].is_null());
    }
}
