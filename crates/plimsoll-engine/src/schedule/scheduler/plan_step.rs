//! Fills a step: decoding sequences first, then prompts. Preempts sequences where pages run out.

use plimsoll_device::SPLIT_PAGES;

use super::{Events, Scheduler, Seq, StepEntry};

/// The prompts that are scheduled.
#[derive(Clone, Copy)]
enum Prompts {
    All,
    /// Prompts that fit in one step, after the running sequence at this index.
    ShortBehind(usize),
}

impl<T> Scheduler<T> {
    /// Fills the next step. It stays empty if no sequence can run now. Then there are none, or all wait: for their prefix from disk, an
    /// encoder, or a grammar's mask. Or the only work is a chunk that is computed layer by layer.
    pub fn schedule(&mut self) -> (&[StepEntry], Events) {
        self.entries.clear();
        let mut events = Events::default();
        if !self.schedule_suspect(&mut events) {
            self.schedule_all(&mut events);
            self.request_shared_checkpoints();
        }
        for entry in self.entries.iter().filter(|entry| entry.drafts == 0) {
            self.running[entry.seq].plan_checkpoints(entry.rows);
        }
        self.order_entries();
        (&self.entries, events)
    }

    /// Sorts the entries: rows of prompts last if they are computed in other numerics, shared prefixes side by side.
    fn order_entries(&mut self) {
        let Self { entries, running, limits, .. } = self;
        let last = |entry: &StepEntry| limits.split_numerics() && running[entry.seq].in_prompt(entry.start);
        let splits =
            |entry: &StepEntry| running[entry.seq].pages.pages().iter().skip(SPLIT_PAGES - 1).step_by(SPLIT_PAGES);
        entries.sort_unstable_by(|a, b| {
            let alike = || splits(a).cmp(splits(b));
            last(a).cmp(&last(b)).then_with(alike).then(a.seq.cmp(&b.seq))
        });
    }

    fn schedule_all(&mut self, events: &mut Events) {
        let mut rows = self.limits.rows;
        let mut logit_rows = self.limits.logit_rows;
        let decodes = self.schedule_decodes(&mut rows, &mut logit_rows, events);
        let mut most = self.prefill_rows();
        if decodes > 0 {
            most = most.min(self.prefill_budget.prompts);
        }
        // An image that cannot be cut is computed whole, whatever the limit on prompts.
        let together = self.running.iter().map(Seq::together).max().unwrap_or(0);
        rows = rows.min(most.max(together));
        // A prompt is computed layer by layer only if more sequences decode than wait for long prompts.
        let layers = self.limits.layered && decodes > 0 && decodes >= self.long_prompts();
        // Short prompts get up to half of the rows, so that a long prompt does not delay them.
        let long = |seq: &Seq<T>| seq.computes_long_prompt() && seq.sched.layered.is_none();
        let halved = |long: &usize| !layers && self.running[*long].together() <= rows - rows / 2;
        if let Some(long) = self.running.iter().position(long).filter(halved) {
            let (mut short, mut short_logits) = (rows / 2, logit_rows / 2);
            (rows, logit_rows) = (rows - short, logit_rows - short_logits);
            if !self.schedule_prompts(Prompts::ShortBehind(long), layers, &mut short, &mut short_logits, events) {
                return;
            }
            (rows, logit_rows) = (rows + short, logit_rows + short_logits);
        }
        self.schedule_prompts(Prompts::All, layers, &mut rows, &mut logit_rows, events);
    }

    /// Schedules chunks of prompts that have none in this step yet, oldest first: running prompts, then waiting ones
    /// that may start. Returns whether more may join the step: false once a prompt was admitted that must run alone.
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
            let meant = !seq.decoding() && (all || !seq.sched.long);
            if meant && !self.entries.iter().any(|entry| entry.seq == i) {
                self.schedule_prompt(i, layers, rows, logit_rows, events);
            }
            i += 1;
        }
        while *rows > 0 && *logit_rows > 0 && self.next_fits(*rows) {
            let long = all && (!layers || self.layered().is_none());
            let Some(admitted) = self.admit(long) else { break };
            if self.running[admitted].sched.suspect_until.is_some() && !self.entries.is_empty() {
                // Its turn comes in the next step, alone.
                return false;
            }
            let order = self.running[admitted].order;
            self.schedule_prompt(admitted, layers, rows, logit_rows, events);
            if self.running.get(admitted).is_none_or(|seq| seq.order != order) {
                // It was preempted for lack of pages. The loop would admit it again forever.
                return true;
            }
            if self.running.get(admitted).is_some_and(|seq| seq.sched.suspect_until.is_some()) {
                return false;
            }
        }
        true
    }

    /// Counts running prompts longer than a step, and waiting ones that could start now.
    fn long_prompts(&self) -> usize {
        let running = self.running.iter().filter(|seq| seq.computes_long_prompt());
        let places = self.reduced.running.saturating_sub(self.running.len());
        let waiting = self.waiting.iter().take(places).filter(|seq| seq.remaining() > self.limits.rows);
        running.count() + waiting.count()
    }

    /// The most rows of prompts in a step. Encoder models compute a sequence whole, so they have no lower limit.
    pub(super) fn prefill_rows(&self) -> usize {
        if self.limits.encoder_batch { self.limits.rows } else { self.reduced.prefill_rows }
    }

    /// Encoder models: whether the oldest waiting sequence fits in the `rows` rows left.
    fn next_fits(&self, rows: usize) -> bool {
        !self.limits.encoder_batch || self.waiting.first().is_none_or(|seq| seq.remaining() <= rows)
    }

    /// After a failed step, each of its sequences runs alone until it has passed the position of the failure. True if one does now.
    fn schedule_suspect(&mut self, events: &mut Events) -> bool {
        // A sequence that waits for an encoder or a grammar's mask takes part in no step until then.
        let able = |seq: &Seq<T>| !seq.waits_for_encoder() && !seq.waits_for_mask;
        while let Some(i) = self.running.iter().position(|seq| seq.sched.suspect_until.is_some() && able(seq)) {
            let mut rows = self.prefill_rows().max(self.running[i].together());
            let mut logit_rows = self.limits.logit_rows;
            let order = self.running[i].order;
            self.schedule_chunk(i, &mut rows, &mut logit_rows, events);
            if !self.entries.is_empty() {
                return true;
            }
            // The newest sequence has no page: it waits, and the others continue.
            if self.running.get(i).is_some_and(|seq| seq.order == order) {
                return false;
            }
        }
        false
    }

    /// Notes that the step of the last [`Self::schedule`] failed. Each of its sequences will run alone until it has
    /// passed the position where it failed. Recurrent state, which the step may have left half written, is dropped and
    /// computed again. Returns false if the step had fewer than two sequences: then no other sequence can be the cause.
    pub fn step_failed(&mut self) -> bool {
        if self.entries.len() < 2 {
            return false;
        }
        for i in (0..self.entries.len()).rev() {
            let entry = self.entries[i];
            let seq = &mut self.running[entry.seq];
            seq.sched.suspect_until = Some(entry.start + entry.rows);
            seq.drafts.clear();
            if seq.states.needed() {
                let mut restarted = self.running.remove(entry.seq);
                self.entries.iter_mut().filter(|other| other.seq > entry.seq).for_each(|other| other.seq -= 1);
                restarted.leave();
                self.push(restarted);
            }
        }
        self.entries.clear();
        true
    }

    fn schedule_decodes(&mut self, rows: &mut usize, logit_rows: &mut usize, events: &mut Events) -> usize {
        let mut drafts_left = self.room_for_drafts(*rows, *logit_rows);
        let mut decodes = 0;
        let mut i = 0;
        while i < self.running.len() && *rows > 0 && *logit_rows > 0 {
            if self.running[i].decoding() && !self.running[i].waits_for_mask && self.allocate_pages(i, 1, events) {
                let seq = &mut self.running[i];
                seq.drafts.truncate(drafts_left);
                // Drafts never take another sequence's pages: drafts without a page are dropped.
                while !seq.pages.grow(seq.computed + 1 + seq.drafts.len()) {
                    seq.drafts.pop();
                }
                let drafts = seq.drafts.len();
                drafts_left -= drafts;
                self.add(self.entry_of(i, 1 + drafts, drafts), rows, logit_rows);
                decodes += 1;
            }
            i += 1;
        }
        decodes
    }

    /// How many drafts a step may check. Each decoding sequence gets one row first. While prompts are computed or about
    /// to be, drafts get at most half of the other rows and leave one row with logits.
    fn room_for_drafts(&self, rows: usize, logit_rows: usize) -> usize {
        let decoding = self.running.iter().filter(|seq| seq.decoding()).count();
        let new_seqs = !self.waiting.is_empty() && self.running.len() < self.reduced.running;
        let prompts = new_seqs || decoding < self.running.len();
        let rows = rows.saturating_sub(if prompts { self.limits.image_rows } else { 0 });
        let (rows, logit_rows) = (rows.saturating_sub(decoding), logit_rows.saturating_sub(decoding));
        if prompts { (rows / 2).min(logit_rows.saturating_sub(1)) } else { rows.min(logit_rows) }
    }

    /// Schedules a chunk of a prompt in this step. With `layers`, a chunk of a long prompt is computed between this step and the next ones.
    fn schedule_prompt(
        &mut self,
        i: usize,
        layers: bool,
        rows: &mut usize,
        logit_rows: &mut usize,
        events: &mut Events,
    ) {
        let seq = &self.running[i];
        if seq.sched.layered.is_some() || seq.waits_for_mask {
            return;
        }
        match layers && seq.sched.long {
            true => self.begin_layers(i, events),
            false => self.schedule_chunk(i, rows, logit_rows, events),
        }
    }

    fn schedule_chunk(&mut self, i: usize, rows: &mut usize, logit_rows: &mut usize, events: &mut Events) {
        if let Some(entry) = self.chunk(i, *rows, *logit_rows, events) {
            self.add(entry, rows, logit_rows);
        }
    }

    fn add(&mut self, entry: StepEntry, rows: &mut usize, logit_rows: &mut usize) {
        *rows -= entry.rows;
        *logit_rows -= entry.logit_rows;
        self.entries.push(entry);
    }

    /// Allocates pages for the next rows of the `i`-th running sequence: at most `rows`, and at most `logit_rows` of them with logits. None
    /// if no row can run.
    pub(super) fn chunk(&mut self, i: usize, rows: usize, logit_rows: usize, events: &mut Events) -> Option<StepEntry> {
        let seq = &self.running[i];
        if rows == 0 || logit_rows == 0 {
            return None;
        }
        let mut chunk = seq.ready().min(rows);
        if self.limits.encoder_batch && chunk < seq.remaining() {
            return None;
        }
        if self.limits.split_numerics() && seq.in_prompt(seq.computed) {
            chunk = chunk.min(seq.prompt_len - seq.computed);
        } else if self.limits.split_numerics() {
            let answers = self.entries.iter().filter(|entry| !self.running[entry.seq].in_prompt(entry.start));
            chunk = chunk.min(self.limits.answer_rows().saturating_sub(answers.map(|entry| entry.rows).sum()));
        }
        while seq.logit_rows(chunk) > logit_rows {
            chunk -= seq.logit_rows(chunk) - logit_rows;
        }
        chunk = seq.media.uncut(seq.computed, chunk);
        (chunk > 0 && self.allocate_pages(i, chunk, events)).then(|| self.entry_of(i, chunk, 0))
    }

    fn entry_of(&self, i: usize, rows: usize, drafts: usize) -> StepEntry {
        let seq = &self.running[i];
        StepEntry { seq: i, start: seq.computed, rows, logit_rows: seq.logit_rows(rows), drafts }
    }

    /// Allocates pages for `rows` more positions of sequence `i`, and preempts newer ones if necessary. False if no newer one is left: then
    /// `i` itself waits for older ones to finish.
    fn allocate_pages(&mut self, i: usize, rows: usize, events: &mut Events) -> bool {
        if self.limits.encoder_batch {
            return true;
        }
        let positions = self.running[i].computed + rows;
        self.running[i].slide();
        while !self.running[i].pages.grow(positions) {
            let newest = self.running.len() - 1;
            debug_assert!(newest > 0, "I5: the oldest fits the pool alone");
            if newest == 0 {
                return false;
            }
            self.preempt(newest);
            self.entries.retain(|entry| entry.seq != newest);
            events.preempted += 1;
            if newest == i {
                return false;
            }
        }
        true
    }

    /// Returns a running sequence to the queue.
    pub(super) fn preempt(&mut self, index: usize) {
        let mut victim = self.running.remove(index);
        victim.leave();
        self.push(victim);
    }
}
