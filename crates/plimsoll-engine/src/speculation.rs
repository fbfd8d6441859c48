//! When to speculate: a sequence whose drafts miss stops drafting, a batch for which checking costs more than it wins stops too;
//! both try again later. Pure arithmetic over what was measured: output never depends on it.
//!
//! A step that checks drafts has more rows and a draft pass behind it. What that costs is measured against plain steps of about as
//! many sequences, of which a few are taken now and then for comparison; until they are, the plan's estimate serves.

/// Checked steps of a sequence between two judgements.
const WINDOW: u32 = 16;
/// Tokens for which a sequence pauses the first time, and at most.
const SEQ_PAUSE: [usize; 2] = [64, 1024];
/// Steps for which a batch pauses the first time, and at most.
const BATCH_PAUSE: [u32; 2] = [256, 8192];
/// Speculating steps between two looks at plain ones, and how many of those are taken.
const PROBE_EVERY: u32 = 256;
/// See [`PROBE_EVERY`].
const PROBE_STEPS: u32 = 2;
/// Steps before anything is concluded.
const STEPS_MIN: u32 = 16;
/// A batch speculates as long as it is not slower than this share of plain speed.
const SPEED_MIN: f64 = 0.98;
/// Batches are compared with those of the same power of two.
const BUCKETS: usize = 18;

/// Speculation of one sequence.
#[derive(Debug, Default)]
pub(crate) struct Drafting {
    /// The request forbids it, or there is no draft head.
    off: bool,
    checked: u32,
    hits: u32,
    paused_until: usize,
    pause: usize,
    /// Drafts that were checked, over its whole life.
    pub drafted: u32,
    /// Drafts that were right.
    pub accepted: u32,
}

impl Drafting {
    /// Nothing drafted yet.
    pub fn new(wanted: bool) -> Self {
        Self { off: !wanted, pause: SEQ_PAUSE[0], ..Self::default() }
    }

    /// Whether it drafts after its `tokens`-th token.
    pub fn wants(&self, tokens: usize) -> bool {
        !self.off && tokens >= self.paused_until
    }

    /// Counts `drafted` drafts that are being checked.
    pub fn check(&mut self, drafted: usize) {
        self.drafted += drafted as u32;
        self.checked += 1;
    }

    /// Counts a draft that was right.
    pub fn hit(&mut self) {
        self.accepted += 1;
        self.hits += 1;
    }

    /// Decides, now and then, whether to pause. `break_even` is what a checking step must accept to be worth its while; none if
    /// nothing is ever to be paused.
    pub fn judge(&mut self, break_even: Option<f64>, tokens: usize) {
        let Some(break_even) = break_even else { return };
        if self.checked < WINDOW {
            return;
        }
        if f64::from(self.hits) < break_even * f64::from(self.checked) {
            self.paused_until = tokens + self.pause;
            self.pause = (self.pause * 2).min(SEQ_PAUSE[1]);
        } else {
            self.pause = SEQ_PAUSE[0];
        }
        (self.checked, self.hits) = (0, 0);
    }
}

/// A mean that forgets.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    samples: u32,
}

impl Mean {
    fn add(&mut self, sample: f64) {
        self.samples += 1;
        self.value += (sample - self.value) / f64::from(self.samples.min(STEPS_MIN));
    }
}

/// What is known of batches of about one size.
#[derive(Clone, Copy, Debug, Default)]
struct Batch {
    /// Seconds of a plain step.
    plain: Mean,
    /// Seconds of a step that checked drafts, the draft passes after it included.
    checking: Mean,
    /// Tokens a sequence gained in such a step.
    gain: Mean,
    since_probe: u32,
    probes: u32,
    paused: u32,
    pause: u32,
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

/// What the next step is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    /// Check the drafts there are; otherwise they are dropped.
    pub check: bool,
    /// Draft after it.
    pub draft: bool,
}

/// Speculation of the whole engine.
#[derive(Debug)]
pub(crate) struct Pace {
    adaptive: bool,
    /// Seconds of a checking step over those of a plain one, as the plan sees it.
    planned_cost: f64,
    batches: [Batch; BUCKETS],
}

impl Pace {
    /// Nothing measured yet. `adaptive`: pause at all.
    pub fn new(adaptive: bool, planned_cost: f64) -> Self {
        Self { adaptive, planned_cost, batches: [Batch { pause: BATCH_PAUSE[0], ..Batch::default() }; BUCKETS] }
    }

    fn bucket(decodes: usize) -> usize {
        (decodes.max(1).ilog2() as usize).min(BUCKETS - 1)
    }

    /// What a step of `decodes` decoding sequences is to do.
    pub fn next(&self, decodes: usize) -> Next {
        let batch = &self.batches[Self::bucket(decodes)];
        let paused = self.adaptive && batch.paused > 0;
        let probe = self.adaptive && batch.probes > 0;
        Next { check: !paused && !probe, draft: !paused }
    }

    /// What a checking step of one sequence must accept to be worth its while; none if nothing is ever paused.
    pub fn break_even(&self, decodes: usize) -> Option<f64> {
        let batch = &self.batches[Self::bucket(decodes)];
        let measured = batch.plain.samples >= PROBE_STEPS && batch.checking.samples >= STEPS_MIN;
        let cost = if measured { batch.checking.value / batch.plain.value } else { self.planned_cost };
        self.adaptive.then_some((cost - 1.0).max(0.0))
    }

    /// Takes a step in.
    pub fn observe(&mut self, done: &Done) {
        if done.decodes == 0 || done.prompt_rows > 0 || !self.adaptive {
            return;
        }
        let batch = &mut self.batches[Self::bucket(done.decodes)];
        if batch.paused > 0 {
            batch.paused -= 1;
            if batch.paused == 0 {
                // A fresh look.
                (batch.checking, batch.gain) = (Mean::default(), Mean::default());
            }
        }
        if done.drafts == 0 {
            batch.plain.add(done.seconds - done.draft_seconds);
            batch.probes = batch.probes.saturating_sub(1);
            return;
        }
        batch.checking.add(done.seconds);
        batch.gain.add(done.tokens as f64 / done.decodes as f64);
        batch.since_probe += 1;
        let probe_after = if batch.plain.samples < PROBE_STEPS { STEPS_MIN } else { PROBE_EVERY };
        if batch.since_probe >= probe_after {
            (batch.since_probe, batch.probes) = (0, PROBE_STEPS);
        }
        if batch.checking.samples < STEPS_MIN || batch.plain.samples < PROBE_STEPS || batch.paused > 0 {
            return;
        }
        if batch.gain.value * batch.plain.value < SPEED_MIN * batch.checking.value {
            batch.paused = batch.pause;
            batch.pause = (batch.pause * 2).min(BATCH_PAUSE[1]);
        } else if batch.checking.samples >= 4 * STEPS_MIN {
            batch.pause = BATCH_PAUSE[0];
        }
    }

    /// Nobody drafts for a while: the head failed.
    pub fn pause_all(&mut self) {
        self.adaptive = true;
        for batch in &mut self.batches {
            batch.paused = batch.pause;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `steps` steps of a machine on which checking costs `cost` plain steps and gains `gain` tokens; returns its speed
    /// over that of plain steps alone.
    fn speed(cost: f64, gain: f64, steps: usize) -> f64 {
        let mut pace = Pace::new(true, 1.2);
        let (mut seconds, mut tokens) = (0.0, 0.0);
        let mut drafts_there = false;
        for _ in 0..steps {
            let next = pace.next(4);
            let checks = next.check && drafts_there;
            drafts_there = next.draft;
            let (took, won) = if checks { (cost, gain) } else { (1.0, 1.0) };
            let draft_seconds = if next.draft && !checks { 0.2 } else { 0.0 };
            let done = Done {
                decodes: 4,
                drafts: if checks { 4 } else { 0 },
                tokens: (4.0 * won) as usize,
                seconds: took + draft_seconds,
                draft_seconds,
                ..Done::default()
            };
            pace.observe(&done);
            seconds += done.seconds;
            tokens += won;
        }
        tokens / seconds
    }

    #[test]
    fn speculation_that_costs_more_than_it_wins_stops() {
        for (cost, gain) in [(1.3, 1.0), (2.0, 1.5), (1.6, 1.25), (4.0, 2.0)] {
            let speed = speed(cost, gain, 20_000);
            assert!(speed > 0.98, "a cost of {cost} for {gain} tokens: {speed}");
        }
    }

    #[test]
    fn speculation_that_wins_goes_on() {
        for (cost, gain) in [(1.3, 1.75), (1.1, 1.5), (2.0, 3.0)] {
            let speed = speed(cost, gain, 20_000);
            assert!(speed > 0.98 * gain / cost, "a cost of {cost} for {gain} tokens: {speed}");
        }
    }

    fn check(drafting: &mut Drafting, drafted: usize, hits: usize, break_even: Option<f64>, tokens: usize) {
        drafting.check(drafted);
        (0..hits).for_each(|_| drafting.hit());
        drafting.judge(break_even, tokens);
    }

    #[test]
    fn a_sequence_that_misses_pauses_longer_and_longer_and_tries_again() {
        let mut drafting = Drafting::new(true);
        let (mut tokens, mut checked) = (0, Vec::new());
        for _ in 0..5000 {
            tokens += 1;
            if drafting.wants(tokens) {
                check(&mut drafting, 1, 0, Some(0.2), tokens);
                checked.push(tokens);
            }
        }
        assert!(checked.len() < 16 * 10, "{} of 5000", checked.len());
        assert!(*checked.last().unwrap() > 3000, "it tries again");
        let mut good = Drafting::new(true);
        (0..5000).for_each(|t| check(&mut good, 1, usize::from(t % 2 == 0), Some(0.2), t));
        assert!(good.wants(5001) && good.paused_until == 0);
        assert!(!Drafting::new(false).wants(7));
    }

    #[test]
    fn without_a_break_even_nothing_pauses() {
        let mut drafting = Drafting::new(true);
        (0..5000).for_each(|t| check(&mut drafting, 4, 0, None, t));
        assert!(drafting.wants(5000));
        assert_eq!((drafting.drafted, drafting.accepted), (20_000, 0));
        assert_eq!(Pace::new(false, 9.0).break_even(3), None);
    }
}
