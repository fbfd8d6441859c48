//! The verdict: every promise, whether it was kept, and the evidence.

use std::fmt;

use serde::Serialize;

use super::balloon;
use super::disk_cache::DiskSeen;
use super::faults::Fault;
use super::limits::Kept;
use super::memory::{IDLE_SLACK, LEVELS, Ledger, POOLS, Page, settled};
use super::question::Kind as Request;
use super::scenario::{Crowd, Kind};
use super::tally::Counted;
use super::watch::{Look, Watched, beside_pages, growth};
use crate::process::Sample;
use crate::replay::Replayed;

/// Memory may rise by this many bytes over the second half of the soak, or by a hundredth of its mean if that is more.
const GROWTH_BYTES: f64 = 8.0 * 1_048_576.0;

/// Unaccounted memory may rise by this much between two idle moments.
const UNACCOUNTED_BYTES: i64 = 16 << 20;

/// The ledger's sum may be wrong by this share of the process's memory, or by [`LEDGER_ERROR_BYTES`]: the allocator may keep that much
/// before it is trimmed.
const LEDGER_ERROR: f64 = 0.01;
const LEDGER_ERROR_BYTES: i64 = 1 << 20;

/// All observations of a soak.
#[derive(Serialize)]
pub struct Evidence<'a> {
    /// The requested clients and limits.
    pub crowd: &'a Crowd,
    /// Bytes that the process must not exceed, if the operator has set a limit.
    pub line: Option<u64>,
    /// Seconds during which clients ran.
    pub busy_s: f64,
    /// Counted outcomes of the visits.
    pub tally: Counted,
    /// The samples of the process and the health probes.
    pub watched: Watched,
    /// The memory limits around the process; none where they cannot be read.
    pub limits: Option<Kept>,
    /// The injected faults.
    pub faults: Vec<Fault>,
    /// Names of the limits that could not be put around the server.
    pub without: Vec<String>,
    /// Kinds of requests that the server does not support, with its error.
    pub unknown: Vec<(Request, String)>,
    /// Result of the trace that was replayed during the soak.
    pub replayed: Option<Replayed>,
    /// Memory page of the idle server before the soak.
    pub before: Page,
    /// Memory page of the idle server after the soak, or why it could not be read.
    pub after: Result<Page, String>,
    /// Number of fixed questions, and the ones whose answer differed when they were asked alone at the end.
    pub again: (usize, Vec<String>),
    /// Number of sampled answers from the crowd, and the ones that differed when they were asked for alone at the end.
    pub alone: (usize, Vec<String>),
    /// How the server ended, if the soak started it.
    pub ended: Option<Result<String, String>>,
    /// The server's warnings and errors, each with its count.
    pub complaints: Vec<String>,
    /// The server's prefix cache on disk, if the soak started it with one.
    pub disk: Option<DiskSeen>,
}

/// One promise.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// The promise.
    pub promise: &'static str,
    /// Whether it was kept; none when it could not be observed.
    pub kept: Option<bool>,
    /// The observations behind the result, as text.
    pub seen: String,
}

/// All promises.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// All checks, in the order in which they are printed.
    pub checks: Vec<Check>,
}

impl Verdict {
    /// Judges the evidence.
    pub fn of(evidence: &Evidence<'_>) -> Self {
        let mut checks = vec![answers(evidence), fixed(evidence)];
        checks.push(same("and alone at the end", &evidence.again));
        checks.push(same("what was answered in the crowd is answered alone", &evidence.alone));
        checks.extend(replayed(evidence));
        checks.push(health(evidence));
        checks.extend([killed(evidence), line(evidence), ledger(evidence)]);
        checks.extend(faults(evidence));
        checks.extend(governor(evidence));
        checks.extend(evidence.disk.as_ref().map(on_disk));
        checks.extend(flat(evidence));
        checks.extend(given_back(evidence));
        checks.extend(unseen(evidence));
        checks.extend(ended(evidence));
        Self { checks }
    }

    /// Whether no promise was broken.
    pub fn good(&self) -> bool {
        self.checks.iter().all(|check| check.kept != Some(false))
    }
}

fn check(promise: &'static str, kept: Option<bool>, seen: impl Into<String>) -> Check {
    Check { promise, kept, seen: seen.into() }
}

fn answers(evidence: &Evidence<'_>) -> Check {
    let (tally, seconds) = (&evidence.tally, evidence.busy_s);
    let (good, refused, bad) = (tally.sum(|c| c.good), tally.sum(|c| c.refused), tally.sum(|c| c.bad));
    // A soak of hostile clients only has no answers from sensible clients.
    let answered = tally.answered() || good > 0 && evidence.crowd.mix.is_hostile();
    let hindered = tally.sum(|c| c.hindered);
    let mut seen = format!(
        "{good} good, {refused} refused for now, {hindered} kept out by the soak itself, {bad} bad in {seconds:.0} s"
    );
    for finding in tally.findings.iter().take(5) {
        seen += &format!("\n      {finding}");
    }
    check("every answer is right or an announced refusal", Some(bad == 0 && answered), seen)
}

fn fixed(evidence: &Evidence<'_>) -> Check {
    let (same, changed) = (evidence.tally.sum(|c| c.same), evidence.tally.sum(|c| c.changed));
    let compared = same + changed;
    let kept = (compared > 0).then_some(changed == 0);
    check("fixed questions keep their answers in the crowd", kept, format!("{changed} of {compared} differed"))
}

fn same(promise: &'static str, (count, differ): &(usize, Vec<String>)) -> Check {
    let mut seen = format!("{} of {count} differed", differ.len());
    for finding in differ.iter().take(5) {
        seen += &format!("\n      {finding}");
    }
    check(promise, (*count > 0).then_some(differ.is_empty()), seen)
}

fn replayed(evidence: &Evidence<'_>) -> Option<Check> {
    let Replayed { answered, left, refused_for_now, refused, failed, skipped, late, .. } =
        evidence.replayed.as_ref()?;
    let all = answered + left + refused_for_now + refused + failed + skipped;
    let seen = format!(
        "{answered} of {all} answered, {left} left, {refused_for_now} refused for now, {refused} refused, {failed} failed, {late} sent late"
    );
    Some(check("the trace is served", Some(*failed == 0 && *refused == 0 && *answered > 0), seen))
}

fn faults(evidence: &Evidence<'_>) -> Vec<Check> {
    let mut kinds: Vec<Kind> = Vec::new();
    for fault in &evidence.faults {
        if !kinds.contains(&fault.kind) {
            kinds.push(fault.kind);
        }
    }
    let one = |kind: Kind| {
        let all: Vec<&Fault> = evidence.faults.iter().filter(|fault| fault.kind == kind).collect();
        let failed: Vec<&String> = all.iter().filter_map(|fault| fault.seen.as_ref().err()).collect();
        let mut seen = format!("{kind}: {} times", all.len());
        if let Some(last) = all.iter().rev().find_map(|fault| fault.seen.as_ref().ok()) {
            seen += &format!(", the last: {last}");
        }
        if let Some(error) = failed.first() {
            seen += &format!("\n      {} failed: {error}", failed.len());
        }
        check("the trouble came", Some(failed.is_empty()), seen)
    };
    kinds.into_iter().map(one).collect()
}

fn unseen(evidence: &Evidence<'_>) -> Vec<Check> {
    let unknown = evidence.unknown.iter().map(|(kind, words)| {
        let words: String = words.chars().take(160).collect();
        check("requests of all kinds", None, format!("{kind:?} was left out: {words}"))
    });
    let without = evidence.without.iter().map(|what| check("the server has around it", None, format!("not {what}")));
    unknown.chain(without).collect()
}

fn ended(evidence: &Evidence<'_>) -> Option<Check> {
    let ended = evidence.ended.as_ref()?;
    let mut seen = ended.clone().unwrap_or_else(|error| error);
    for complaint in &evidence.complaints {
        seen += &format!("\n      {complaint}");
    }
    Some(check("the server ends in order", Some(ended.is_ok()), seen))
}

fn health(evidence: &Evidence<'_>) -> Check {
    let (watched, limit) = (&evidence.watched, evidence.crowd.health_ms);
    let kept = watched.unhealthy == 0 && watched.health_p99_ms <= limit as f64;
    let seen = format!(
        "{} good, {} not, {} kept out, p99 {:.1} ms of {limit}",
        watched.healthy, watched.unhealthy, watched.hindered, watched.health_p99_ms
    );
    check("health answers at once", Some(kept), seen)
}

fn line(evidence: &Evidence<'_>) -> Check {
    let looks = &evidence.watched.looks;
    let most = |of: fn(&Sample) -> u64| looks.iter().map(|look| of(&look.sample)).max().unwrap_or(0);
    let (owned, resident) = (most(|s| s.owned), most(|s| s.resident));
    let mut seen = format!("at most {:.1} MiB of its own, {:.1} MiB resident", mib(owned), mib(resident));
    if evidence.watched.gone {
        return check("the process stays under its line", Some(false), "the process is gone");
    }
    let line = evidence.line.or(evidence.before.planned()).filter(|_| !looks.is_empty());
    let kept = line.map(|line| {
        seen += &format!(", line {:.1} MiB", mib(line));
        owned <= line
    });
    check("the process stays under its line", kept, seen)
}

fn killed(evidence: &Evidence<'_>) -> Check {
    const PROMISE: &str = "the kernel kills no process";
    let Some(limits) = &evidence.limits else { return check(PROMISE, None, "the limits cannot be seen") };
    let free = evidence.watched.looks.iter().filter_map(|look| look.free).min();
    let mut seen = format!("{}: {:.1} MiB", limits.name, mib(limits.bytes));
    if let Some(free) = free {
        seen += &format!(", at least {:.1} MiB of them free", mib(free));
    }
    // The soak's own balloons, which ask to be killed first.
    let killed = |fault: &&Fault| fault.seen.as_ref().is_ok_and(|seen| seen == balloon::KILLED);
    let balloons = evidence.faults.iter().filter(killed).count() as u64;
    let kept = limits.events.map(|events| {
        let others = events.oom_kills.saturating_sub(balloons);
        seen += &format!(", {others} kills, in the way {} times", events.limit_hits);
        if balloons > 0 {
            seen += &format!("; {balloons} balloons went");
        }
        others == 0
    });
    check(PROMISE, kept, seen)
}

/// Returns the sample with the largest error that the next sample shares. A buffer for a body or for media is counted before its pages
/// are touched, so a single sample may be off by its bytes.
fn worst_of(looks: &[Ledger]) -> Option<Ledger> {
    let smaller = |pair: &[Ledger]| if pair[0].error() <= pair[1].error() { pair[0] } else { pair[1] };
    looks.windows(2).map(smaller).max_by(|a, b| a.error().total_cmp(&b.error()))
}

fn ledger(evidence: &Evidence<'_>) -> Check {
    let after = evidence.after.as_ref().ok().and_then(Page::ledger);
    let looks: Vec<Ledger> = evidence.watched.looks.iter().filter_map(|look| look.ledger).collect();
    let worst = worst_of(&looks).into_iter().chain(after).max_by(|a, b| a.error().total_cmp(&b.error()));
    let seen = worst.zip(after).map(|(worst, after)| {
        format!(
            "{:+.1} MiB ({:.2} % of the process) at worst, {:+.1} MiB ({:.2} %) at the end",
            worst.unaccounted as f64 / 1_048_576.0,
            worst.error() * 100.0,
            after.unaccounted as f64 / 1_048_576.0,
            after.error() * 100.0
        )
    });
    let kept = worst.map(|worst| worst.error() <= LEDGER_ERROR || worst.unaccounted.abs() <= LEDGER_ERROR_BYTES);
    check("the ledger's sum is the process", kept, seen.unwrap_or_else(|| "no memory page".into()))
}

fn governor(evidence: &Evidence<'_>) -> Option<Check> {
    if !evidence.faults.iter().any(|fault| fault.kind == Kind::Balloon) {
        return None;
    }
    let after = evidence.after.as_ref().ok();
    let entries = evidence.before.entries().zip(after.and_then(Page::entries)).map(|(before, after)| after - before);
    let level = after.and_then(Page::level).unwrap_or("unknown");
    let highest = evidence.watched.looks.iter().filter_map(|look| look.ledger).map(|ledger| ledger.level).max();
    let kept = entries.is_some_and(|entries| entries > 0) && level == LEVELS[0];
    let highest = LEVELS.get(highest.unwrap_or(0) as usize).copied().unwrap_or("unknown");
    let seen = format!("{} levels entered, {highest} the highest seen, {level} at the end", entries.unwrap_or(0));
    Some(check("the governor gives way to a balloon and comes back", Some(kept), seen))
}

fn on_disk(disk: &DiskSeen) -> Check {
    let number = |name: &str| disk.report[name].as_u64().unwrap_or(0);
    let seen = format!(
        "at most {:.1} of {:.1} MiB in {} looks, {:.1} MiB written, {} tokens read back, misses {}",
        mib(disk.most),
        mib(disk.limit),
        disk.looks,
        mib(number("written_bytes")),
        number("hit_tokens"),
        disk.report["misses"]
    );
    let kept = (disk.looks > 0).then_some(disk.most <= disk.limit && number("written_bytes") > 0);
    check("the cache on disk stays under its bound", kept, seen)
}

fn flat(evidence: &Evidence<'_>) -> Vec<Check> {
    let looks = &evidence.watched.looks;
    let mean = looks.iter().map(|l| l.sample.owned as f64).sum::<f64>() / looks.len().max(1) as f64;
    let bytes = growth(looks, beside_pages(looks)).map(|grown| grown.rise);
    let memory = check(
        "memory does not grow",
        bytes.map(|grown| grown <= GROWTH_BYTES.max(mean / 100.0)),
        bytes.map_or("not seen".into(), |grown| format!("{:+.2} MiB over the second half", grown / 1_048_576.0)),
    );
    let count = |promise, what: &str, of: &dyn Fn(&Look) -> Option<u64>| {
        let grown = growth(looks, |look| of(look).map(|count| count as f64));
        let most = looks.iter().filter_map(of).max().unwrap_or(0);
        // Clients come and go. A tenth of the maximum counts as noise, and so does any rise within the statistical error.
        let noise = (most as f64 / 10.0).max(IDLE_SLACK as f64);
        let kept = grown.map(|grown| grown.rise <= noise.max(grown.chance));
        let seen = grown.map_or("not seen".into(), |grown| {
            format!("{what}{:+.1} (chance ± {:.1}) over the second half, at most {most}", grown.rise, grown.chance)
        });
        check(promise, kept, seen)
    };
    let mut all = vec![
        memory,
        count("descriptors do not grow", "", &|look| Some(look.sample.fds)),
        count("threads do not grow", "", &|look| Some(look.sample.threads)),
    ];
    for (i, (name, ..)) in POOLS.iter().enumerate() {
        all.push(count("what is lent out does not grow", &format!("{name}: "), &|look| Some(look.ledger?.lent[i])));
    }
    all
}

fn given_back(evidence: &Evidence<'_>) -> Vec<Check> {
    const IDLE: &str = "at idle all pools are full again";
    let after = match &evidence.after {
        Ok(after) => after,
        Err(error) => {
            return vec![check(IDLE, Some(false), format!("the server could not be asked: {error}"))];
        }
    };
    let has_page = !after.memory.is_null();
    let none_of = |promise, found: Vec<String>| {
        let seen = if found.is_empty() { "yes".into() } else { found.join("; ") };
        check(promise, has_page.then_some(found.is_empty()), if has_page { seen } else { "no memory page".into() })
    };
    let back = evidence.before.sample.zip(after.sample).map(|(before, now)| {
        let seen = format!("{} → {} threads, {} → {} descriptors", before.threads, now.threads, before.fds, now.fds);
        (settled(Some(before), Some(now)), seen)
    });
    let (late, grown) = (after.late_allocations(), evidence.before.unaccounted().zip(after.unaccounted()));
    vec![
        none_of(IDLE, after.lent()),
        none_of("no component exceeds its plan", after.over_plan()),
        check(
            "no device memory is allocated after ready",
            late.map(|n| n == 0),
            late.map_or("no memory page".into(), |n| format!("{n} attempts")),
        ),
        check(
            "unaccounted memory does not grow",
            grown.map(|(before, after)| after - before <= UNACCOUNTED_BYTES),
            grown.map_or("no memory page".into(), |(before, after)| {
                format!("{:.1} → {:.1} MiB", before as f64 / 1_048_576.0, after as f64 / 1_048_576.0)
            }),
        ),
        check(
            "threads and descriptors come back",
            back.as_ref().map(|(kept, _)| *kept),
            back.map_or("not seen".into(), |(_, seen)| seen),
        ),
    ]
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / 1_048_576.0
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            let mark = match check.kept {
                Some(true) => "kept  ",
                Some(false) => "BROKEN",
                None => "unseen",
            };
            writeln!(f, "{mark}  {}: {}", check.promise, check.seen)?;
        }
        write!(f, "{}", if self.good() { "PASS" } else { "FAIL" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_ledger_counts_if_it_lasts() {
        let look = |unaccounted| Ledger {
            committed: 50 << 20,
            pages: 0,
            unaccounted,
            gave_way: false,
            level: 0,
            lent: Default::default(),
        };
        let worst = |looks: &[i64]| worst_of(&looks.iter().map(|bytes| look(*bytes)).collect::<Vec<_>>());
        assert_eq!(worst(&[0, -2 << 20, 0, 0]), Some(look(0)), "one look");
        assert_eq!(worst(&[0, -2 << 20, -3 << 20, 0]), Some(look(-2 << 20)), "it lasted for two looks");
        assert_eq!(worst(&[5 << 20]), None, "the look at the end is judged alone");
    }
}
