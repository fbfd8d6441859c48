//! Decides when to speculate. Pure arithmetic over measurements: output never depends on it.
//!
//! A step that checks drafts has more rows, and a draft pass follows it. Whether the gained tokens are worth that
//! depends on machine, batch and text. Two things are estimated: what checking costs, in plain steps of about as many
//! sequences, and how many drafts a sequence gets right. A sequence gets drafts while it is expected to gain from them.
//! Otherwise it is tried again now and then.
//!
//! Estimates err, so an account of seconds limits the loss. A plain step pays in a share of its time ([`STAKE`]). A
//! step with drafts pays in what its tokens would have taken in plain steps, and is charged what it took. An overdrawn
//! account pauses speculation until it can pay for a burst. Prompts go through the draft head because the head must
//! have seen the text that it continues. That has an account of its own, into which drafts pay what they gain. So
//! speculation costs at most that share and the accounts' first credit, however bad the drafts are. Beside prompts,
//! drafts are not booked, because the prompts have more rows than the drafts. There, after a burst, only sequences with
//! an expected gain get drafts.

/// Share of the time of plain steps that wrong drafts may lose, and share of all time that bursts and prompts' draft passes may take.
const STAKE: f64 = 0.01;
/// The first credit of the account and its maximum, in plain steps: the loss before a change for the worse is noticed.
const CREDIT: [f64; 2] = [6.0, 16.0];
/// Seconds that running prompts through the draft head may cost before drafts have gained them.
const ADVANCE: f64 = 5.0;
/// Steps of a burst, in which every sequence gets drafts as a test.
const BURST: u32 = 8;
/// Plain steps to measure before their time is known.
const PLAIN_MIN: u32 = 4;
/// Checking steps to measure before their time is known; until then the plan's estimate is used.
const CHECKING_MIN: u32 = 8;
/// Until then a checking step is charged at most this many times the estimate: a longer one was interrupted.
const INTERRUPTED: f64 = 2.0;
/// Checking steps after which plain steps are measured again, and how many are measured.
const PROBE_EVERY: u32 = 64;
/// See [`PROBE_EVERY`].
const PROBE_STEPS: u32 = 2;
/// Steps of silence after the draft head has failed.
const SILENCE: u32 = 256;
/// Settings of speculative decoding.
#[derive(Clone, Copy, Debug)]
pub struct Speculation {
    /// Drafts are accepted without a check.
    pub optimistic: bool,
    /// Drafting pauses where it does not pay.
    pub adaptive: bool,
    /// Time of a step that checks drafts over that of a plain one, as the plan estimates it.
    pub cost: f64,
}

impl Default for Speculation {
    fn default() -> Self {
        Self { optimistic: false, adaptive: true, cost: 1.25 }
    }
}

/// Number of buckets. Times are compared among batches of one bucket, which has one power of two: [`bucket`].
pub(crate) const BUCKETS: usize = 18;

/// Returns the bucket of a batch of `decodes` decoding sequences.
pub(crate) fn bucket(decodes: usize) -> usize {
    (decodes.max(1).ilog2() as usize).min(BUCKETS - 1)
}

/// Counts of checks and hits, newer ones weighted more.
#[derive(Clone, Copy, Debug, Default)]
struct Acceptance {
    checked: f64,
    hits: f64,
}

impl Acceptance {
    /// Checks of a sequence, and of all sequences, before the counts are halved.
    const OF_ONE: f64 = 16.0;
    const OF_ALL: f64 = 256.0;
    /// The weight of the expectation, in checks.
    const WEIGHT: f64 = 4.0;

    fn check(&mut self, most: f64) {
        if self.checked >= most {
            (self.checked, self.hits) = (self.checked / 2.0, self.hits / 2.0);
        }
        self.checked += 1.0;
    }

    /// Scales the counts so that the `next` checks weigh as much as all before them.
    fn discount(&mut self, next: f64) {
        let share = (next / self.checked).min(1.0);
        (self.checked, self.hits) = (self.checked * share, self.hits * share);
    }

    /// Returns the hits of a check. `expected`: the estimate before any check.
    fn estimate(&self, expected: f64) -> f64 {
        (Self::WEIGHT * expected + self.hits) / (Self::WEIGHT + self.checked)
    }
}

/// The source of a draft, as far as it predicts the draft's quality.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    /// The draft head.
    #[default]
    Head,
    /// Prompt lookup, with two or three matching last tokens.
    Few,
    /// Prompt lookup, with four to seven matching tokens.
    Some,
    /// Prompt lookup, with eight or more matching tokens.
    Many,
    /// Prompt lookup past a token that differs from the earlier text.
    Resumed,
}

impl Source {
    /// Number of sources.
    const COUNT: usize = 5;

    /// Returns the source for `tokens` matching last tokens.
    pub fn repeat(tokens: usize) -> Self {
        match tokens {
            ..4 => Self::Few,
            4..8 => Self::Some,
            8.. => Self::Many,
        }
    }

    /// Hits of a check before any was counted. A draft head's draft is as likely right as wrong.
    fn expected(self) -> f64 {
        match self {
            Self::Head => 0.5,
            Self::Few => 0.2,
            Self::Some => 0.6,
            Self::Many => 1.2,
            Self::Resumed => 0.6,
        }
    }
}

/// Speculation of one sequence.
#[derive(Debug, Default)]
pub(crate) struct Drafting {
    /// The request forbids drafts, or the engine makes none.
    off: bool,
    seen: [Acceptance; Source::COUNT],
    /// Source of the drafts that are checked next.
    pub source: Source,
    /// Drafts that were checked since the sequence began.
    pub drafted: u32,
    /// Drafts that were right.
    pub accepted: u32,
}

impl Drafting {
    /// No drafts yet. `wanted`: the sequence may have drafts.
    pub fn new(wanted: bool) -> Self {
        Self { off: !wanted, ..Self::default() }
    }

    /// Makes no drafts from now on.
    pub fn stop(&mut self) {
        self.off = true;
    }

    /// Counts `drafted` drafts that are being checked.
    pub fn check(&mut self, drafted: usize) {
        self.drafted += drafted as u32;
        self.seen[self.source as usize].check(Acceptance::OF_ONE);
    }

    /// Counts a draft that was right.
    pub fn hit(&mut self) {
        self.accepted += 1;
        self.seen[self.source as usize].hits += 1.0;
    }
}

/// Samples of a [`Median`].
const RECENT: usize = 16;

/// The median of the newest samples: a step that the system interrupted does not count.
#[derive(Clone, Copy, Debug, Default)]
struct Median {
    recent: [f64; RECENT],
    samples: u32,
}

impl Median {
    fn add(&mut self, sample: f64) {
        self.recent[self.samples as usize % RECENT] = sample;
        self.samples += 1;
    }

    /// Returns the median; 0 without samples.
    fn value(&self) -> f64 {
        let count = (self.samples as usize).min(RECENT);
        let mut sorted = self.recent;
        sorted[..count].sort_unstable_by(f64::total_cmp);
        (sorted[count.saturating_sub(1) / 2] + sorted[count / 2]) / 2.0
    }
}

/// Measured times of batches of about one size.
#[derive(Clone, Copy, Debug, Default)]
struct Batch {
    /// Seconds of a plain step.
    plain: Median,
    /// Seconds of a step that checked drafts, the draft passes after it included.
    checking: Median,
    since_probe: u32,
    probes: u32,
}

impl Batch {
    fn known(&self) -> bool {
        self.checking.samples >= CHECKING_MIN
    }

    /// Returns the seconds of a plain step, at most those of a step that checks drafts.
    fn plain(&self) -> f64 {
        let plain = self.plain.value();
        if self.known() { plain.min(self.checking.value()) } else { plain }
    }

    /// Returns the time of a checking step over that of a plain one.
    fn cost(&self, planned: f64) -> f64 {
        if self.known() { self.checking.value() / self.plain().max(f64::MIN_POSITIVE) } else { planned }
    }

    /// Returns the seconds that a checking step is charged.
    fn charge(&self, seconds: f64, planned: f64) -> f64 {
        if self.known() { self.checking.value() } else { seconds.min(INTERRUPTED * planned * self.plain()) }
    }

    /// Counts a checking step; after enough of them plain steps are measured again.
    fn checked(&mut self) {
        self.since_probe += 1;
        if self.since_probe >= PROBE_EVERY {
            (self.since_probe, self.probes) = (0, PROBE_STEPS);
        }
    }
}

/// The measurements of one step, for [`Pace::observe`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    /// Sequences that decoded.
    pub decodes: usize,
    /// Rows of prompts beside them; such steps say nothing about the cost of drafts.
    pub prompt_rows: usize,
    /// Draft rows that were checked.
    pub drafts: usize,
    /// Tokens that the decoding sequences gained.
    pub tokens: usize,
    /// Seconds of the step, draft passes included.
    pub seconds: f64,
    /// Seconds of the draft passes.
    pub draft_seconds: f64,
}

/// The speculative decoding of the next step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SpeculationPlan {
    /// Check the present drafts; otherwise they are dropped.
    pub check: bool,
    /// Make drafts after the step.
    pub draft: bool,
    /// Run prompts through the draft head.
    pub fill: bool,
    /// The least expected hits of a checking step with which a sequence gets drafts.
    hits_min: f64,
}

impl SpeculationPlan {
    /// No speculation, and no pass of the draft head.
    pub const OFF: Self = Self { check: false, draft: false, fill: false, hits_min: f64::INFINITY };
}

/// Speculation of the whole engine.
#[derive(Debug)]
pub(crate) struct Pace {
    adaptive: bool,
    /// The plan's estimate of a checking step's time over that of a plain one.
    planned_cost: f64,
    batches: [Batch; BUCKETS],
    /// Counts of all sequences, by source: the expectation for a new sequence.
    seen: [Acceptance; Source::COUNT],
    /// Seconds gained less seconds lost; none before a plain step was measured.
    credit: Option<f64>,
    /// Seconds gained less seconds lost, for prompts' passes through the draft head.
    prompts: f64,
    /// Whether the account was not overdrawn since it last could pay for a burst.
    open: bool,
    /// Seconds that the next burst may lose.
    allowance: f64,
    /// Steps left of the burst.
    trying: u32,
    silent: u32,
}

impl Pace {
    /// Nothing measured yet. `adaptive`: speculation may pause.
    pub fn new(adaptive: bool, planned_cost: f64) -> Self {
        let (batches, seen) = ([Batch::default(); BUCKETS], [Acceptance::default(); Source::COUNT]);
        Self {
            adaptive,
            planned_cost,
            batches,
            seen,
            credit: None,
            prompts: ADVANCE,
            open: true,
            allowance: 0.0,
            trying: BURST,
            silent: 0,
        }
    }

    /// Plans the speculative decoding of a step of `decodes` decoding sequences.
    pub fn next(&self, decodes: usize) -> SpeculationPlan {
        let batch = &self.batches[bucket(decodes)];
        if self.silent > 0 {
            return SpeculationPlan::OFF;
        }
        if !self.adaptive {
            return SpeculationPlan { check: true, draft: true, fill: true, hits_min: 0.0 };
        }
        let cost = batch.cost(self.planned_cost);
        let hits_min = if self.trying > 0 { 0.0 } else { (cost - 1.0).max(0.0) };
        // Prompts computed shortly before a burst go through the draft head, so that the burst can draft for them.
        let soon = self.allowance >= 0.75 * self.burst(cost, batch.plain());
        let fill = self.prompts >= 0.0 && (soon || self.expected(Source::Head) >= hits_min);
        // The last of the plain steps makes drafts for the step after it.
        let draft = self.open && batch.plain.samples >= PLAIN_MIN && batch.probes <= 1;
        SpeculationPlan { check: batch.probes == 0, draft, fill, hits_min }
    }

    /// Whether a sequence gets drafts from this source.
    pub fn drafts(&self, next: SpeculationPlan, drafting: &Drafting, source: Source) -> bool {
        let hits = drafting.seen[source as usize].estimate(self.expected(source));
        next.draft && !drafting.off && hits >= next.hits_min
    }

    /// Returns the expected hits of a check for a sequence without checks.
    fn expected(&self, source: Source) -> f64 {
        self.seen[source as usize].estimate(source.expected())
    }

    /// Returns the seconds that a burst may lose.
    fn burst(&self, cost: f64, plain: f64) -> f64 {
        f64::from(BURST) * (cost.max(self.planned_cost) - 1.0).max(STAKE) * plain
    }

    /// Counts a sequence's check and its hits.
    pub fn checked(&mut self, source: Source, hits: usize) {
        let seen = &mut self.seen[source as usize];
        seen.check(Acceptance::OF_ALL);
        seen.hits += hits as f64;
    }

    /// Records a step.
    pub fn observe(&mut self, done: &Done) {
        self.silent = self.silent.saturating_sub(1);
        if !self.adaptive {
            return;
        }
        if done.decodes == 0 || done.prompt_rows > 0 {
            // Steps with prompts do not measure the cost of drafts.
            let rows = (done.prompt_rows + done.decodes).max(1) as f64;
            let filling = done.draft_seconds * done.prompt_rows as f64 / rows;
            self.prompts = (self.prompts + STAKE * done.seconds - filling).min(ADVANCE);
            // A burst ends here too: after it, only sequences with an expected gain get drafts.
            self.trying = self.trying.saturating_sub(u32::from(done.drafts > 0));
            return;
        }
        let batch = &mut self.batches[bucket(done.decodes)];
        let won = if done.drafts == 0 {
            batch.plain.add(done.seconds - done.draft_seconds);
            batch.probes = batch.probes.saturating_sub(1);
            STAKE * batch.plain() - done.draft_seconds
        } else {
            batch.checking.add(done.seconds);
            batch.checked();
            self.trying = self.trying.saturating_sub(1);
            let worth = batch.plain() * done.tokens as f64 / done.decodes as f64;
            worth - batch.charge(done.seconds, self.planned_cost)
        };
        let (plain, cost) = (batch.plain(), batch.cost(self.planned_cost));
        let burst = self.burst(cost, plain);
        let credit = (self.credit.unwrap_or(CREDIT[0] * plain) + won).min(CREDIT[1] * plain);
        self.open = credit >= burst.min(CREDIT[0] * plain) || (self.open && credit >= 0.0);
        self.credit = Some(credit);
        self.prompts = (self.prompts + won).min(ADVANCE);
        self.allowance = (self.allowance + STAKE * plain).min(burst);
        if self.trying == 0 && self.allowance >= burst {
            (self.trying, self.allowance) = (BURST, 0.0);
            self.seen.iter_mut().for_each(|seen| seen.discount(f64::from(BURST) / 2.0));
        }
    }

    /// Pauses speculation for [`SILENCE`] steps, because the draft head failed.
    pub fn fall_silent(&mut self) {
        self.silent = SILENCE;
    }
}

#[cfg(test)]
mod tests;
