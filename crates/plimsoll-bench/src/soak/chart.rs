//! The image of a soak: memory under its limit, the faults around the server, and the degradation level. One SVG, written by hand:
//! rectangles, lines, text.

use std::fmt::Write;

use super::faults::Fault;
use super::memory::LEVELS;
use super::scenario::Kind;
use super::watch::Look;

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 60.0;
/// Height of the memory chart.
const SEA: f64 = 320.0;
/// Space between the parts.
const GAP: f64 = 34.0;
/// Height of the chart of the degradation level and of the requests.
const STRIP: f64 = 90.0;
const MIB: f64 = 1_048_576.0;

/// The contents of the image.
pub struct Chart<'a> {
    /// The title above the charts.
    pub title: String,
    /// The samples, a few hundred.
    pub looks: &'a [Look],
    /// The memory limit in bytes.
    pub line: Option<u64>,
    /// The limit around the process in bytes.
    pub limit: Option<u64>,
    /// The injected faults.
    pub faults: &'a [Fault],
}

impl Chart<'_> {
    /// Returns the SVG.
    pub fn draw(&self) -> String {
        let mut out = String::new();
        // Writing into a String never fails.
        let _ = self.write(&mut out);
        out
    }

    fn x(&self, at_s: f64) -> f64 {
        let end = self.looks.last().map_or(1.0, |look| look.at_s).max(1.0);
        LEFT + (WIDTH - LEFT - RIGHT) * (at_s / end).clamp(0.0, 1.0)
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let height = TOP + SEA + 2.0 * (GAP + STRIP) + GAP;
        writeln!(
            out,
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' font-family='sans-serif' font-size='12'>"
        )?;
        writeln!(out, "<rect width='{WIDTH}' height='{height}' fill='#fff'/>")?;
        writeln!(out, "<text x='{LEFT}' y='24' font-size='16'>{}</text>", escape(&self.title))?;
        self.faults(out, height)?;
        self.sea(out)?;
        let degradation = TOP + SEA + GAP;
        self.degradation(out, degradation)?;
        self.requests(out, degradation + STRIP + GAP)?;
        self.hours(out, height)?;
        writeln!(out, "</svg>")
    }

    /// Draws the faults as bands behind the charts, with a legend above.
    fn faults(&self, out: &mut String, height: f64) -> std::fmt::Result {
        let mut named = Vec::new();
        for fault in self.faults {
            let colour = match fault.kind {
                Kind::Balloon => "#f4c7c3",
                Kind::Busy => "#fce8b2",
                Kind::Stop => "#c9c9c9",
                Kind::Flood => "#b7d7f5",
                Kind::FullDisk => "#d9c4ec",
            };
            let from = self.x(fault.from_s);
            let width = (self.x(fault.to_s.unwrap_or(f64::MAX)) - from).max(1.0);
            let bottom = height - GAP - TOP;
            writeln!(
                out,
                "<rect x='{from:.1}' y='{TOP}' width='{width:.1}' height='{bottom}' fill='{colour}' opacity='.7'/>"
            )?;
            if !named.contains(&(fault.kind, colour)) {
                named.push((fault.kind, colour));
            }
        }
        for (i, (kind, colour)) in named.iter().enumerate() {
            let x = LEFT + 170.0 * i as f64;
            writeln!(
                out,
                "<rect x='{x}' y='36' width='12' height='12' fill='{colour}'/><text x='{}' y='47'>{kind}</text>",
                x + 17.0
            )?;
        }
        Ok(())
    }

    fn sea(&self, out: &mut String) -> std::fmt::Result {
        let most = self.looks.iter().map(|look| look.sample.owned).max().unwrap_or(0);
        let top = [Some(most), self.line, self.limit].into_iter().flatten().max().unwrap_or(1) as f64 * 1.08;
        let y = |bytes: f64| TOP + SEA * (1.0 - bytes / top);
        let step = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 50_000.0];
        let step = step.into_iter().find(|step| top / MIB / step <= 8.0).unwrap_or(100_000.0);
        let mut tick = 0.0;
        while tick * MIB < top {
            let at = y(tick * MIB);
            writeln!(out, "<path d='M{LEFT} {at:.1}H{}' stroke='#e4e4e4'/>", WIDTH - RIGHT)?;
            writeln!(out, "<text x='{}' y='{:.1}' text-anchor='end'>{tick:.0}</text>", LEFT - 6.0, at + 4.0)?;
            tick += step;
        }
        writeln!(out, "<text x='{}' y='{}' text-anchor='end'>MiB</text>", LEFT - 6.0, TOP - 2.0)?;
        let mut area = format!("M{LEFT} {}", TOP + SEA);
        let mut ledger = String::new();
        for look in self.looks {
            write!(area, "L{:.1} {:.1}", self.x(look.at_s), y(look.sample.owned as f64))?;
            if let Some(account) = look.ledger {
                let letter = if ledger.is_empty() { 'M' } else { 'L' };
                write!(ledger, "{letter}{:.1} {:.1}", self.x(look.at_s), y(account.committed as f64))?;
            }
        }
        write!(area, "V{}Z", TOP + SEA)?;
        writeln!(out, "<path d='{area}' fill='#2f6f9f' opacity='.75'/>")?;
        writeln!(out, "<path d='{ledger}' fill='none' stroke='#08263c' stroke-width='1.2'/>")?;
        // The two limits lie close together: one is labelled at the left, the other at the right.
        let words = [
            (self.line, "#c62828", "memory limit: planned", LEFT + 6.0, "start"),
            (self.limit, "#555", "the limit around the process", WIDTH - RIGHT - 6.0, "end"),
        ];
        for (bytes, colour, name, x, anchor) in words {
            let Some(bytes) = bytes else { continue };
            let (at, mib) = (y(bytes as f64), bytes as f64 / MIB);
            writeln!(out, "<path d='M{LEFT} {at:.1}H{}' stroke='{colour}' stroke-width='2'/>", WIDTH - RIGHT)?;
            let above = at - 5.0;
            writeln!(
                out,
                "<text x='{x}' y='{above:.1}' fill='{colour}' text-anchor='{anchor}'>{name}, {mib:.1} MiB</text>"
            )?;
        }
        writeln!(
            out,
            "<text x='{}' y='{}' fill='#fff'>anonymous, shared and swapped memory of the process; dark line: the ledger's sum</text>",
            LEFT + 6.0,
            TOP + SEA - 8.0
        )
    }

    fn degradation(&self, out: &mut String, top: f64) -> std::fmt::Result {
        let floor = top + STRIP;
        let level = |look: &Look| look.ledger.map_or(0, |ledger| ledger.level);
        self.steps(out, floor, (LEVELS.len() - 1) as f64, "#c62828", level)?;
        for (i, name) in LEVELS.iter().enumerate() {
            let y = floor - STRIP * i as f64 / (LEVELS.len() - 1) as f64;
            writeln!(out, "<text x='{}' y='{:.1}' text-anchor='end' font-size='8'>{name}</text>", LEFT - 4.0, y + 3.0)?;
        }
        writeln!(out, "<text x='{LEFT}' y='{}'>degradation level</text>", top - 6.0)
    }

    fn requests(&self, out: &mut String, top: f64) -> std::fmt::Result {
        let count = |look: &Look| look.ledger.map_or(0, |ledger| ledger.lent[0]);
        let most = self.looks.iter().map(count).max().unwrap_or(0).max(1);
        self.steps(out, top + STRIP, most as f64, "#2e7d32", count)?;
        writeln!(out, "<text x='{}' y='{}' text-anchor='end'>{most}</text>", LEFT - 6.0, top + 4.0)?;
        writeln!(out, "<text x='{LEFT}' y='{}'>requests in the server</text>", top - 6.0)
    }

    /// Draws a step line above `floor`.
    fn steps(
        &self,
        out: &mut String,
        floor: f64,
        most: f64,
        colour: &str,
        of: impl Fn(&Look) -> u64,
    ) -> std::fmt::Result {
        let mut path = format!("M{LEFT} {floor}");
        for look in self.looks {
            write!(path, "H{:.1}V{:.1}", self.x(look.at_s), floor - STRIP * of(look) as f64 / most)?;
        }
        writeln!(out, "<path d='M{LEFT} {floor}H{}' stroke='#999'/>", WIDTH - RIGHT)?;
        writeln!(out, "<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.2'/>")
    }

    fn hours(&self, out: &mut String, height: f64) -> std::fmt::Result {
        let end = self.looks.last().map_or(1.0, |look| look.at_s);
        let each =
            [10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 14_400.0].into_iter().find(|each| end / each <= 12.0);
        let each = each.unwrap_or(86_400.0);
        let mut at = 0.0;
        while at <= end {
            let words = if each < 60.0 { format!("{at:.0} s") } else { format!("{:.0} min", at / 60.0) };
            writeln!(out, "<text x='{:.1}' y='{}' text-anchor='middle'>{words}</text>", self.x(at), height - 10.0)?;
            at += each;
        }
        Ok(())
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Sample;

    #[test]
    fn a_image_has_the_line_the_trouble_and_every_look() {
        let look = |i: u32| Look {
            at_s: f64::from(i),
            sample: Sample { owned: u64::from(i) << 20, ..Sample::default() },
            ledger: None,
            free: None,
            calm: true,
        };
        let looks: Vec<Look> = (0..120).map(look).collect();
        let fault = |kind, to_s| Fault { kind, from_s: 10.0, to_s, seen: Ok(String::new()) };
        let faults = [fault(Kind::Balloon, Some(20.0)), fault(Kind::Stop, None), fault(Kind::Stop, Some(30.0))];
        let (line, limit) = (Some(200 << 20), Some(210 << 20));
        let drawn = Chart { title: "a < b & c".into(), looks: &looks, line, limit, faults: &faults }.draw();
        assert!(drawn.starts_with("<svg") && drawn.ends_with("</svg>\n"));
        assert!(drawn.contains("a &lt; b &amp; c") && drawn.contains("memory limit: planned, 200.0 MiB"));
        assert!(drawn.contains("balloon") && drawn.matches(">stopped<").count() == 1, "each kind is named once");
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        let empty = Chart { title: String::new(), looks: &[], line: None, limit: None, faults: &[] }.draw();
        assert!(!empty.contains("NaN") && !empty.contains("inf"), "{empty}");
    }
}
