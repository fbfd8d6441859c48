//! The report as text for people: on one line, and in full.

use std::fmt;

use plimsoll_memory::Bytes;

use super::LedgerReport;

impl LedgerReport {
    /// One line for the log: the sums, the held and planned bytes of each component, and the numbers of running and waiting requests.
    pub fn line(&self) -> impl fmt::Display + '_ {
        Line(self)
    }
}

/// A signed number of bytes for people.
struct Signed(i64);

impl fmt::Display for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        write!(f, "{sign}{}", Bytes(self.0.unsigned_abs()))
    }
}

struct Line<'a>(&'a LedgerReport);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        write!(
            f,
            "ledger at step {}: {} committed of {} planned under {}, unaccounted {}",
            report.steps,
            Bytes(report.committed_bytes),
            Bytes(report.planned_bytes),
            Bytes(report.line_bytes),
            Signed(report.unaccounted_bytes)
        )?;
        if let Some(device) = &report.device {
            let [committed, line] = [device.committed_bytes, device.line_bytes].map(Bytes);
            write!(f, "; on the GPU {committed} committed under {line}")?;
        }
        for row in &report.components {
            write!(f, "; {} {}/{}", row.component, Bytes(row.committed_bytes), Bytes(row.planned_bytes))?;
        }
        let (pages, requests) = (report.pools.kv_pages, report.pools.requests);
        write!(
            f,
            "; pages {} used, {} cached of {}; {} running, {} waiting; {}",
            pages.used, pages.cached, pages.total, requests.running, requests.waiting, report.degradation.level
        )
    }
}

/// The whole report, for the end of a server: a table and a few lines.
impl fmt::Display for LedgerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  {:<17} {:>11} {:>11} {:>11}", "component", "planned", "committed", "peak")?;
        for row in &self.components {
            let [planned, committed, peak] =
                [row.planned_bytes, row.committed_bytes, row.peak_bytes].map(|bytes| Bytes(bytes).to_string());
            writeln!(f, "  {:<17} {planned:>11} {committed:>11} {peak:>11}", row.component)?;
        }
        let [planned, committed, line] =
            [self.planned_bytes, self.committed_bytes, self.line_bytes].map(|bytes| Bytes(bytes).to_string());
        writeln!(f, "  {:<17} {planned:>11} {committed:>11} {:>11}", "total", "")?;
        if let Some(device) = &self.device {
            let [planned, committed] =
                [device.planned_bytes, device.committed_bytes].map(|bytes| Bytes(bytes).to_string());
            writeln!(f, "  {:<17} {planned:>11} {committed:>11} {:>11}", "total on the GPU", "")?;
            writeln!(f, "  memory limit of the GPU {} ({})", Bytes(device.line_bytes), device.line_source)?;
        }
        writeln!(
            f,
            "  memory limit {line} ({}); unaccounted {}; heap peak {}; {} device allocations before ready, {} after",
            self.line_source,
            Signed(self.unaccounted_bytes),
            Bytes(self.heap.peak_bytes),
            self.device_allocations.before_ready,
            self.device_allocations.after_ready
        )?;
        let requests = &self.requests;
        writeln!(
            f,
            "  requests: {} finished, {} aborted, {} failed, {} refused (4xx), {} full (429), {} short of memory (503), \
             {} preemptions, {} steps",
            requests.finished,
            requests.aborted,
            requests.failed,
            requests.refused_invalid,
            requests.refused_full,
            requests.refused_memory,
            requests.preemptions,
            self.steps
        )?;
        write!(f, "  degradation: {}", self.degradation.level)?;
        for entered in &self.degradation.entered {
            write!(f, ", {} {}", entered.level, entered.times)?;
        }
        write!(f, ", emergency reserve released {}", self.degradation.reserve_blocks_released)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_and_the_page_are_one_value() {
        let engine = crate::testing::scripted(crate::testing::limits(), crate::testing::letters).handle;
        let report = engine.report();
        let (line, page) = (report.line().to_string(), report.to_string());
        for row in &report.components {
            assert!(line.contains(row.component) && page.contains(row.component), "{}", row.component);
        }
        for word in ["unaccounted", "degradation: calm", "evict_prefix 0", "0 finished", "429"] {
            assert!(page.contains(word), "{word}: {page}");
        }
        assert!(!line.contains('\n') && line.starts_with("ledger at step "), "{line}");
        assert_eq!(Signed(-2048).to_string(), "-2.0 KiB");
    }
}
