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

/// Of the time of plain steps, what may be lost by drafts that miss, and of all time, what may be spent on trying.
const STAKE: f64 = 0.01;
/// The account's first stake, and the most it holds, in plain steps: what a change for the worse can cost before it is noticed.
const CREDIT: [f64; 2] = [6.0, 16.0];
/// Seconds that taking prompts through the draft head may be in advance of what drafts have won.
const ADVANCE: f64 = 5.0;
/// Steps of a burst, in which every sequence gets drafts as a test.
const BURST: u32 = 8;
/// Plain steps that are needed to say how long one takes.
const PLAIN_MIN: u32 = 4;
/// Steps that checked drafts, needed to say the same of them; before, the plan's estimate serves.
const CHECKING_MIN: u32 = 8;
/// Before, none of them is taken to have cost more than so many times the estimate: it was interrupted.
const INTERRUPTED: f64 = 2.0;
/// Checking steps between two looks at plain ones, and how many of those are taken.
const PROBE_EVERY: u32 = 64;
/// See [`PROBE_EVERY`].
const PROBE_STEPS: u32 = 2;
/// Steps of silence after the draft head has failed.
const SILENCE: u32 = 256;
/// How drafts are dealt with.
#[derive(Clone, Copy, Debug)]
pub struct Speculation {
    /// They are taken as they are, unchecked.
    pub optimistic: bool,
    /// Drafting pauses where it does not pay.
    pub adaptive: bool,
    /// Time of a step that checks drafts over that of a plain one, as far as the plan can tell.
    pub cost: f64,
}

impl Default for Speculation {
    fn default() -> Self {
        Self { optimistic: false, adaptive: true, cost: 1.25 }
    }
}

/// Times are compared among batches of the same power of two: [`bucket`].
pub(crate) const BUCKETS: usize = 18;

/// Among which batches one of so many sequences that decode is compared.
pub(crate) fn bucket(decodes: usize) -> usize {
    (decodes.max(1).ilog2() as usize).min(BUCKETS - 1)
}

/// How many drafts a checking step gets right, newer ones counting more.
#[derive(Clone, Copy, Debug, Default)]
struct Acceptance {
    checked: f64,
    hits: f64,
}

impl Acceptance {
    /// Counts of a sequence, and of all, before they are halved.
    const OF_ONE: f64 = 16.0;
    const OF_ALL: f64 = 256.0;
    /// Checks that an expectation is worth.
    const WEIGHT: f64 = 4.0;

    fn check(&mut self, most: f64) {
        if self.checked >= most {
            (self.checked, self.hits) = (self.checked / 2.0, self.hits / 2.0);
        }
        self.checked += 1.0;
    }

    /// What is seen next is to count as much as all before it.
    fn discount(&mut self, next: f64) {
        let share = (next / self.checked).min(1.0);
        (self.checked, self.hits) = (self.checked * share, self.hits * share);
    }

    /// Hits a check, where `expected` was expected before anything was seen.
    fn estimate(&self, expected: f64) -> f64 {
        (Self::WEIGHT * expected + self.hits) / (Self::WEIGHT + self.checked)
    }
}

/// Where a draft comes from, as far as that says how good it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    /// The draft head.
    #[default]
    Head,
    /// Two or three last tokens that stood in the text before.
    Few,
    /// Four to seven of them.
    Some,
    /// Eight or more.
    Many,
    /// None of the last tokens: the text continues after a token that differs.
    Resumed,
}

impl Source {
    /// How many there are.
    const COUNT: usize = 5;

    /// So many last tokens that stood in the text before.
    pub fn repeat(tokens: usize) -> Self {
        match tokens {
            ..4 => Self::Few,
            4..8 => Self::Some,
            8.. => Self::Many,
        }
    }

    /// Hits of a check before anything is known of any. A head's draft is as likely right as wrong.
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
    /// Of the drafts that are checked next.
    pub source: Source,
    /// Drafts that were checked, over its whole life.
    pub drafted: u32,
    /// Drafts that were right.
    pub accepted: u32,
}

impl Drafting {
    /// Nothing drafted yet.
    pub fn new(wanted: bool) -> Self {
        Self { off: !wanted, ..Self::default() }
    }

    /// Makes none from now on.
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

/// Samples that a [`Median`] is taken of.
const RECENT: usize = 16;

/// The median of the newest samples: a step that the system interrupted says nothing about what it costs.
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

    /// Zero of none.
    fn value(&self) -> f64 {
        let count = (self.samples as usize).min(RECENT);
        let mut sorted = self.recent;
        sorted[..count].sort_unstable_by(f64::total_cmp);
        (sorted[count.saturating_sub(1) / 2] + sorted[count / 2]) / 2.0
    }
}

/// What is known of batches of about one size.
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

    /// Seconds of a plain step. None takes longer than one that checks drafts besides.
    fn plain(&self) -> f64 {
        let plain = self.plain.value();
        if self.known() { plain.min(self.checking.value()) } else { plain }
    }

    /// Plain steps that a checking one takes.
    fn cost(&self, planned: f64) -> f64 {
        if self.known() { self.checking.value() / self.plain().max(f64::MIN_POSITIVE) } else { planned }
    }

    /// Seconds that a checking step is charged.
    fn charge(&self, seconds: f64, planned: f64) -> f64 {
        if self.known() { self.checking.value() } else { seconds.min(INTERRUPTED * planned * self.plain()) }
    }

    /// Counts a checking step; after enough of them plain ones are looked at again.
    fn checked(&mut self) {
        self.since_probe += 1;
        if self.since_probe >= PROBE_EVERY {
            (self.since_probe, self.probes) = (0, PROBE_STEPS);
        }
    }
}

/// What a step did, for [`Pace::observe`].
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
    /// Seconds of it all.
    pub seconds: f64,
    /// Seconds of the draft passes.
    pub draft_seconds: f64,
}

/// What speculation does in the next step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SpeculationPlan {
    /// Check the drafts there are; otherwise they are dropped.
    pub check: bool,
    /// Draft after it.
    pub draft: bool,
    /// Run prompts through the draft head.
    pub fill: bool,
    /// Hits that a sequence must be expected to have in a checking step for it to be drafted for.
    hits_min: f64,
}

impl SpeculationPlan {
    /// Without the draft head.
    pub const OFF: Self = Self { check: false, draft: false, fill: false, hits_min: f64::INFINITY };
}

/// Speculation of the whole engine.
#[derive(Debug)]
pub(crate) struct Pace {
    adaptive: bool,
    /// Seconds of a checking step over those of a plain one, as the plan sees it.
    planned_cost: f64,
    batches: [Batch; BUCKETS],
    /// Of all sequences: what is expected of a new one.
    seen: [Acceptance; Source::COUNT],
    /// Seconds won, over those lost; none before a plain step has been timed.
    credit: Option<f64>,
    /// The same of prompts' way through the draft head.
    prompts: f64,
    /// The account has not been overdrawn since it last could pay for a burst.
    open: bool,
    /// Seconds that may be spent on trying.
    allowance: f64,
    /// Steps of a burst that are left.
    trying: u32,
    silent: u32,
}

impl Pace {
    /// Nothing measured yet. `adaptive`: pause at all.
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

    /// What a step of `decodes` decoding sequences is to do.
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
        // The last of the plain steps drafts for the one behind it.
        let draft = self.open && batch.plain.samples >= PLAIN_MIN && batch.probes <= 1;
        SpeculationPlan { check: batch.probes == 0, draft, fill, hits_min }
    }

    /// Whether a sequence is to be drafted for, from this source.
    pub fn drafts(&self, next: SpeculationPlan, drafting: &Drafting, source: Source) -> bool {
        let hits = drafting.seen[source as usize].estimate(self.expected(source));
        next.draft && !drafting.off && hits >= next.hits_min
    }

    /// Hits of a sequence's check before it is known.
    fn expected(&self, source: Source) -> f64 {
        self.seen[source as usize].estimate(source.expected())
    }

    /// Seconds that a burst may lose.
    fn burst(&self, cost: f64, plain: f64) -> f64 {
        f64::from(BURST) * (cost.max(self.planned_cost) - 1.0).max(STAKE) * plain
    }

    /// Counts a sequence's check, and how many of its drafts were right.
    pub fn checked(&mut self, source: Source, hits: usize) {
        let seen = &mut self.seen[source as usize];
        seen.check(Acceptance::OF_ALL);
        seen.hits += hits as f64;
    }

    /// Takes a step in.
    pub fn observe(&mut self, done: &Done) {
        self.silent = self.silent.saturating_sub(1);
        if !self.adaptive {
            return;
        }
        if done.decodes == 0 || done.prompt_rows > 0 {
            // Where prompts are computed, drafts ride along and nothing can be said of what they cost.
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
