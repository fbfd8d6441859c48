//! The scheduler: which rows run in the next step. One for all work; it knows nothing of devices, text or clients.
//!
//! A step is the decode rows of every running sequence (the newest token, and drafts to be checked) plus prefill chunks, oldest
//! first, under the step's row budget; of a long prompt, a chunk between two steps instead (`layered.rs`). Pages are taken as
//! positions need them. When none is left the newest running sequence is preempted: its pages go back, it keeps its place in the
//! queue, and what it had produced is computed again later (with the same bits: I9). The oldest is never preempted and fits the
//! pool alone, so it always finishes (I5).
//!
//! Generic over what a sequence carries, so that the engine, the simulator and the property tests run this very code.

mod admission;
mod layered;
mod seq;

use plimsoll_memory::broken;

use plimsoll_device::{Rounded, SPLIT_PAGES};

use crate::cache::PAGE_TOKENS;
use crate::lease::SharedCache;
pub use seq::{Newcomer, Pooled, Seq};

/// Rows of answers that a step computes again, beside those that its streams need, where [`StepLimits::apart`].
const RECOMPUTED_ROWS: usize = 64;

/// The bounds of a step and of the running set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLimits {
    /// Rows of one step.
    pub rows: usize,
    /// Rows of one step whose logits are produced.
    pub logit_rows: usize,
    /// Sequences that run at once.
    pub running: usize,
    /// State slots that a running sequence owns; 0 for models without recurrent state.
    pub slots: usize,
    /// Drafts that a sequence may have at once; 0 without speculation.
    pub drafts: usize,
    /// They are a draft head's, which is run behind every step; otherwise they cost nothing to make.
    pub draft_head: bool,
    /// Sequences are computed whole, each in one step, and keep nothing: an encoder's.
    pub whole: bool,
    /// A prompt may take more than a step: a chunk of it, as large as a step at most, is computed layer by layer, between steps.
    pub layered: bool,
    /// Rows have places in three axes, and some of them outputs of a tower in place of embeddings.
    pub media: bool,
    /// Which rows are computed in bfloat16.
    pub rounded: Rounded,
}

impl StepLimits {
    /// Rows of prompts have an arithmetic of their own: they stand last in a step, and what an answer has computed is no part of
    /// anybody's prompt.
    pub fn apart(&self) -> bool {
        self.rounded == Rounded::Prompts
    }

    /// How many of `rows` rows, of which the last `of_prompts` are of prompts, are computed in bfloat16: the last ones.
    pub fn rounded_rows(&self, rows: usize, of_prompts: usize) -> usize {
        match self.rounded {
            Rounded::None => 0,
            Rounded::Prompts => of_prompts,
            Rounded::All => rows,
        }
    }

    /// Whether logits are.
    pub fn rounded_logits(&self) -> bool {
        self.rounded == Rounded::All
    }

    /// The same for a chunk that is computed layer by layer: of one sequence, or of none where there are no such chunks.
    pub fn of_layers(&self) -> Self {
        Self { rows: if self.layered { self.rows } else { 0 }, running: usize::from(self.layered), ..*self }
    }

    /// Rows of a step that are no prompt's, at most: newest tokens, drafts, and what answers that were preempted compute again. Where
    /// prompts have a faster arithmetic these are the slow ones, so that a step has no more of them than serve its streams and let every
    /// answer come back some time.
    pub fn answer_rows(&self) -> usize {
        if self.apart() { self.rows.min(self.logit_rows + RECOMPUTED_ROWS) } else { self.rows }
    }
}

/// Rows of prompts beside those who decode, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beside {
    /// In a step, of all prompts together.
    pub prompts: usize,
    /// In a chunk that is computed layer by layer.
    pub long: usize,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Index in [`Scheduler::running`].
    pub seq: usize,
    /// Position of its first row.
    pub start: usize,
    /// Its rows.
    pub rows: usize,
    /// How many of its last rows produce logits.
    pub logit_rows: usize,
    /// How many of its last rows are drafts.
    pub drafts: usize,
}

impl Share {
    /// Whether the state after each row goes to a slot of its own, since any of them may be the last that counts.
    pub fn keeps_each(&self, slots: usize) -> bool {
        self.drafts > 0 && slots > 1
    }
}

/// Counts of what scheduling a step did besides filling it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Sequences preempted.
    pub preempted: u64,
    /// Sequences that left the queue for the running set.
    pub admitted: u64,
}

/// Waiting and running sequences, and the rules between them.
#[derive(Debug)]
pub struct Scheduler<T> {
    limits: StepLimits,
    cache: SharedCache,
    /// Oldest first. No ring: one that is never empty walks through all the memory that is reserved for it, and touches it.
    waiting: Vec<Seq<T>>,
    running: Vec<Seq<T>>,
    shares: Vec<Share>,
    eased: Eased,
    beside: Beside,
    /// Chunks that were begun layer by layer.
    chunks_begun: u64,
}

/// Which prompts are meant.
#[derive(Clone, Copy)]
enum Prompts {
    All,
    /// Those of a step at most behind this running sequence.
    ShortBehind(usize),
}

/// Bounds below those of the plan, while memory is short.
#[derive(Clone, Copy, Debug)]
struct Eased {
    prefill_rows: usize,
    running: usize,
}

impl<T> Scheduler<T> {
    /// An empty scheduler over `cache`; room for `waiting_max` queued sequences is reserved.
    pub fn new(limits: StepLimits, cache: SharedCache, waiting_max: usize) -> Self {
        Self {
            limits,
            cache,
            // A preempted sequence returns to the queue, so it can hold everybody.
            waiting: Vec::with_capacity(waiting_max + limits.running),
            running: Vec::with_capacity(limits.running),
            shares: Vec::with_capacity(limits.running),
            eased: Eased { prefill_rows: limits.rows, running: limits.running },
            beside: Beside { prompts: limits.rows, long: limits.rows },
            chunks_begun: 0,
        }
    }

    /// Until told otherwise, prompts have no more rows beside those who decode.
    pub fn prompts_take(&mut self, beside: Beside) {
        self.beside = Beside { prompts: beside.prompts.max(1), long: beside.long.max(1) };
    }

    /// Until told otherwise, steps have at most `prefill_rows` rows of prompts and at most `running` sequences run: newer
    /// ones are preempted now and wait. The oldest runs in any case. Returns how many were preempted.
    pub fn ease(&mut self, prefill_rows: usize, running: usize) -> u64 {
        self.eased = Eased {
            prefill_rows: prefill_rows.clamp(1, self.limits.rows),
            running: running.clamp(1, self.limits.running),
        };
        let mut preempted = 0;
        while self.running.len() > self.eased.running {
            self.preempt(self.running.len() - 1);
            preempted += 1;
        }
        preempted
    }

    /// Takes the newest sequence out, waiting or running, unless it is the only one.
    pub fn give_up_newest(&mut self) -> Option<Seq<T>> {
        if self.running.len() + self.waiting.len() < 2 {
            return None;
        }
        let newest = |seqs: Option<&Seq<T>>| seqs.map(|seq| seq.order);
        match newest(self.waiting.last()) > newest(self.running.last()) {
            true => self.waiting.pop(),
            false => self.running.pop(),
        }
    }

    /// Queues a sequence behind all older ones.
    pub fn push(&mut self, mut seq: Seq<T>) {
        seq.apart = self.limits.apart();
        let fits = |seq: &Seq<T>| match self.limits.whole {
            true => seq.total_max <= self.limits.rows,
            false => seq.total_max.div_ceil(PAGE_TOKENS) <= self.cache.borrow().pool.total(),
        };
        debug_assert!(fits(&seq), "checked at submission");
        let behind = self.waiting.iter().rposition(|w| w.order < seq.order).map_or(0, |i| i + 1);
        self.waiting.insert(behind, seq);
    }

    /// Sequences in the running set, oldest first.
    pub fn running(&self) -> &[Seq<T>] {
        &self.running
    }

    /// The same, to write results into.
    pub fn running_mut(&mut self) -> &mut [Seq<T>] {
        &mut self.running
    }

    /// Sequences that wait, oldest first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Seq<T>> {
        self.waiting.iter()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Takes out every sequence, waiting or running, that `gone` says has nobody left to serve.
    pub fn remove(&mut self, mut gone: impl FnMut(&Seq<T>) -> bool, mut take: impl FnMut(Seq<T>)) {
        for i in (0..self.running.len()).rev() {
            if gone(&self.running[i]) {
                take(self.running.remove(i));
            }
        }
        for i in (0..self.waiting.len()).rev() {
            if !broken("V-A") && gone(&self.waiting[i]) {
                take(self.waiting.remove(i));
            }
        }
    }

    /// Fills the next step. The result is empty only when nothing waits or runs, all that runs waits for media to be encoded or is held, or a chunk
    /// is all there is to do and computed layer by layer.
    pub fn schedule(&mut self) -> (&[Share], Events) {
        self.shares.clear();
        let mut events = Events::default();
        if !self.schedule_suspect(&mut events) {
            self.schedule_all(&mut events);
            self.ask_leaders();
        }
        for share in self.shares.iter().filter(|share| share.drafts == 0) {
            self.running[share.seq].plan_checkpoints(share.rows);
        }
        self.order_shares();
        (&self.shares, events)
    }

    /// Rows of prompts last, where they stand apart; and those that begin alike side by side.
    fn order_shares(&mut self) {
        let Self { shares, running, limits, .. } = self;
        let last = |share: &Share| limits.apart() && running[share.seq].in_prompt(share.start);
        let splits = |share: &Share| running[share.seq].pages.ids().iter().skip(SPLIT_PAGES - 1).step_by(SPLIT_PAGES);
        shares.sort_unstable_by(|a, b| {
            let alike = || splits(a).cmp(splits(b));
            last(a).cmp(&last(b)).then_with(alike).then(a.seq.cmp(&b.seq))
        });
    }

    fn schedule_all(&mut self, events: &mut Events) {
        let mut rows = self.limits.rows;
        let mut logit_rows = if broken("T-01") { usize::MAX } else { self.limits.logit_rows };
        let stalls = broken("V-37") && self.running.iter().any(|seq| !seq.decoding());
        let decodes = if stalls { 0 } else { self.schedule_decodes(&mut rows, &mut logit_rows, events) };
        rows = rows.min(self.prefill_rows());
        if decodes > 0 {
            rows = rows.min(self.beside.prompts);
        }
        // The few do not hold up the many.
        let layers = self.limits.layered && decodes > 0 && decodes >= self.long_prompts();
        // And what is short does not wait for a long one before it: up to half of the rows are its own.
        let long = |seq: &Seq<T>| seq.computes_long_prompt() && seq.layered.is_none();
        if let Some(long) = self.running.iter().position(long).filter(|_| !layers) {
            let (mut short, mut short_logits) = (rows / 2, logit_rows / 2);
            (rows, logit_rows) = (rows - short, logit_rows - short_logits);
            if !self.schedule_prompts(Prompts::ShortBehind(long), layers, &mut short, &mut short_logits, events) {
                return;
            }
            (rows, logit_rows) = (rows + short, logit_rows + short_logits);
        }
        self.schedule_prompts(Prompts::All, layers, &mut rows, &mut logit_rows, events);
    }

    /// Chunks of prompts that have none in this step yet, oldest first: of running ones, then of those who may start. Says whether more
    /// may join them: not where one came that must run alone.
    fn schedule_prompts(
        &mut self,
        which: Prompts,
        layers: bool,
        rows: &mut usize,
        logit_rows: &mut usize,
        events: &mut Events,
    ) -> bool {
        let (mut i, all) = match which {
            Prompts::All => (0, true),
            Prompts::ShortBehind(long) => (long + 1, false),
        };
        while i < self.running.len() {
            let seq = &self.running[i];
            let meant = !seq.decoding() && (all || !seq.long);
            if meant && !self.shares.iter().any(|share| share.seq == i) {
                self.schedule_prompt(i, layers, rows, logit_rows, events);
            }
            i += 1;
        }
        while *rows > 0 && *logit_rows > 0 && self.next_fits(*rows) {
            let long = all && (!layers || self.layered().is_none());
            let Some(admitted) = self.admit(long) else { break };
            events.admitted += 1;
            if self.running[admitted].suspect_until.is_some() && !self.shares.is_empty() {
                // Its turn comes in the next step, alone.
                return false;
            }
            // One that comes back from preemption and finds its prefix cached may have nothing left but its newest token.
            self.schedule_prompt(admitted, layers, rows, logit_rows, events);
            if self.running.get(admitted).is_some_and(|seq| seq.suspect_until.is_some()) {
                return false;
            }
        }
        true
    }

    /// Prompts of more than a step that have a place or could have one, and could be computed now.
    fn long_prompts(&self) -> usize {
        let running = self.running.iter().filter(|seq| seq.computes_long_prompt());
        let places = self.eased.running.saturating_sub(self.running.len());
        let waiting = self.waiting.iter().take(places).filter(|seq| seq.remaining() > self.limits.rows);
        running.count() + waiting.count()
    }

    /// Rows of prompts in a step, at most. What is computed whole cannot be computed in smaller pieces.
    fn prefill_rows(&self) -> usize {
        if self.limits.whole { self.limits.rows } else { self.eased.prefill_rows }
    }

    /// Whether what waits longest, where it is to be computed whole, fits into the step's last `rows` rows.
    fn next_fits(&self, rows: usize) -> bool {
        !self.limits.whole || self.waiting.first().is_none_or(|seq| seq.remaining() <= rows)
    }

    /// After a failed step each of its sequences runs alone until it has passed where it failed. Says whether one does now.
    fn schedule_suspect(&mut self, events: &mut Events) -> bool {
        // One that waits for a medium, or for what it may say, can do nothing until that is there, in whatever step.
        let able = |seq: &Seq<T>| !seq.at_wall() && !seq.held;
        while let Some(i) = self.running.iter().position(|seq| seq.suspect_until.is_some() && able(seq)) {
            let (mut rows, mut logit_rows) = (self.prefill_rows(), self.limits.logit_rows);
            let order = self.running[i].order;
            self.schedule_chunk(i, &mut rows, &mut logit_rows, events);
            if !self.shares.is_empty() {
                return true;
            }
            // It is the newest and there is no page for it: it waits, and the others go on.
            if self.running.get(i).is_some_and(|seq| seq.order == order) {
                return false;
            }
        }
        false
    }

    /// Takes note that the step of the last [`Self::schedule`] failed. Each of its sequences will run alone until it has passed
    /// the position where it failed; recurrent state, which the step may have left half written, is dropped and computed again.
    /// False if there was only one: then nobody else is to blame.
    pub fn step_failed(&mut self) -> bool {
        if self.shares.len() < 2 {
            return false;
        }
        for i in (0..self.shares.len()).rev() {
            let share = self.shares[i];
            let seq = &mut self.running[share.seq];
            seq.suspect_until = Some(share.start + share.rows);
            seq.drafts.clear();
            if seq.states.needed() {
                let mut restarted = self.running.remove(share.seq);
                self.shares.iter_mut().filter(|other| other.seq > share.seq).for_each(|other| other.seq -= 1);
                restarted.leave();
                self.push(restarted);
            }
        }
        self.shares.clear();
        true
    }

    fn schedule_decodes(&mut self, rows: &mut usize, logit_rows: &mut usize, events: &mut Events) -> usize {
        let mut drafts_left = self.room_for_drafts(*rows, *logit_rows);
        let mut decodes = 0;
        let mut i = 0;
        while i < self.running.len() && *rows > 0 && *logit_rows > 0 {
            if self.running[i].decoding() && !self.running[i].held && self.fit(i, 1, events) {
                let seq = &mut self.running[i];
                seq.drafts.truncate(drafts_left);
                // Drafts take no pages from anybody.
                while !seq.pages.grow(seq.computed + 1 + seq.drafts.len()) {
                    seq.drafts.pop();
                }
                let drafts = seq.drafts.len();
                drafts_left -= drafts;
                self.add(self.share_of(i, 1 + drafts, drafts), rows, logit_rows);
                decodes += 1;
            }
            i += 1;
        }
        decodes
    }

    /// How many drafts a step may check: everybody who decodes has a row before them, and while prompts are computed or about to be
    /// they leave these half of the other rows, and one with logits.
    fn room_for_drafts(&self, rows: usize, logit_rows: usize) -> usize {
        let decoding = self.running.iter().filter(|seq| seq.decoding()).count();
        let newcomers = !self.waiting.is_empty() && self.running.len() < self.eased.running;
        let prompts = newcomers || decoding < self.running.len();
        let (rows, logit_rows) = (rows.saturating_sub(decoding), logit_rows.saturating_sub(decoding));
        if prompts { (rows / 2).min(logit_rows.saturating_sub(1)) } else { rows.min(logit_rows) }
    }

    /// A chunk of a prompt, in this step; or, of a long one where these have `layers`, between this step and those to come.
    fn schedule_prompt(
        &mut self,
        i: usize,
        layers: bool,
        rows: &mut usize,
        logit_rows: &mut usize,
        events: &mut Events,
    ) {
        let seq = &self.running[i];
        if seq.layered.is_some() || seq.held {
            return;
        }
        match layers && seq.long {
            true => self.begin_layers(i, events),
            false => self.schedule_chunk(i, rows, logit_rows, events),
        }
    }

    fn schedule_chunk(&mut self, i: usize, rows: &mut usize, logit_rows: &mut usize, events: &mut Events) {
        if let Some(share) = self.chunk(i, *rows, *logit_rows, events) {
            self.add(share, rows, logit_rows);
        }
    }

    fn add(&mut self, share: Share, rows: &mut usize, logit_rows: &mut usize) {
        *rows -= share.rows;
        *logit_rows -= share.logit_rows;
        self.shares.push(share);
    }

    /// What the `i`-th running sequence computes next, with pages for it; at most so many rows, and of these so many with logits.
    fn chunk(&mut self, i: usize, rows: usize, logit_rows: usize, events: &mut Events) -> Option<Share> {
        let seq = &self.running[i];
        if rows == 0 || logit_rows == 0 {
            return None;
        }
        let mut chunk = seq.ready().min(rows);
        if self.limits.whole && chunk < seq.remaining() {
            return None;
        }
        if self.limits.apart() && seq.in_prompt(seq.computed) {
            chunk = chunk.min(seq.prompt_len - seq.computed);
        } else if self.limits.apart() {
            let answers = self.shares.iter().filter(|share| !self.running[share.seq].in_prompt(share.start));
            chunk = chunk.min(self.limits.answer_rows().saturating_sub(answers.map(|share| share.rows).sum()));
        }
        while seq.logit_rows(chunk) > logit_rows {
            chunk -= seq.logit_rows(chunk) - logit_rows;
        }
        (chunk > 0 && self.fit(i, chunk, events)).then(|| self.share_of(i, chunk, 0))
    }

    fn share_of(&self, i: usize, rows: usize, drafts: usize) -> Share {
        let seq = &self.running[i];
        Share { seq: i, start: seq.computed, rows, logit_rows: seq.logit_rows(rows), drafts }
    }

    /// Gives sequence `i` pages for `rows` more positions, preempting newer ones if need be. When there is no newer one,
    /// `i` itself waits for older ones to finish: false.
    fn fit(&mut self, i: usize, rows: usize, events: &mut Events) -> bool {
        if self.limits.whole {
            return true;
        }
        let positions = self.running[i].computed + rows;
        while !self.running[i].pages.grow(positions) {
            let newest = self.running.len() - 1;
            debug_assert!(newest > 0, "I5: the oldest fits the pool alone");
            if newest == 0 {
                return false;
            }
            self.preempt(newest);
            self.shares.retain(|share| share.seq != newest);
            events.preempted += 1;
            if newest == i {
                return false;
            }
        }
        true
    }

    /// Sends a running sequence back to the queue.
    fn preempt(&mut self, index: usize) {
        let mut victim = self.running.remove(index);
        victim.leave();
        self.push(victim);
    }

    /// Records that the first `rows` rows of a share of the last step count; rows after them were drafts that missed.
    pub fn commit(&mut self, share: Share, rows: usize) {
        let seq = &mut self.running[share.seq];
        seq.layered = None;
        seq.computed = share.start + rows;
        seq.media.passed(seq.computed);
        seq.states.advance(share.start, rows, share.keeps_each(self.limits.slots));
        if seq.suspect_until.is_some_and(|position| seq.computed >= position) {
            seq.suspect_until = None;
        }
    }

    /// Everybody waits again, with nothing computed and nothing held. The caller makes the tables anew.
    pub fn start_over(&mut self) {
        self.shares.clear();
        while let Some(mut seq) = self.running.pop() {
            seq.forget();
            self.push(seq);
        }
    }

    /// Lets others share what a sequence has computed of its prompt.
    pub fn publish(&mut self, index: usize) {
        self.running[index].publish();
    }

    /// Takes a finished sequence out; what it computed stays findable, as far as others could start from it.
    pub fn finish(&mut self, index: usize) -> Seq<T> {
        let mut seq = self.running.remove(index);
        seq.donate();
        seq
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod whole_tests;
