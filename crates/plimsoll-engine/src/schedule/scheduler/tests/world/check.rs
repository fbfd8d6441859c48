//! The checks after every step.

use super::*;

impl World {
    /// Each position has one kind of numerics, whether its sequence computes it or finds it in the cache. Rows of prompts come last.
    pub(super) fn check_split_numerics(&mut self, entries: &[StepEntry]) {
        let running = self.scheduler.running();
        let of_prompt = |entry: &StepEntry| running[entry.seq].in_prompt(entry.start);
        assert!(entries.is_sorted_by_key(of_prompt), "prompts come last");
        let answers: usize = entries.iter().filter(|entry| !of_prompt(entry)).map(|entry| entry.rows).sum();
        assert!(answers <= self.limits.answer_rows(), "{answers} rows of answers in a step");
        for entry in entries {
            let seq = &running[entry.seq];
            for position in entry.start..entry.start + entry.rows {
                assert_eq!(seq.in_prompt(position), of_prompt(entry), "a entry is all of a prompt or not at all");
                let page = seq.pages.pages()[position / PAGE_TOKENS];
                self.made.entry(page).or_default()[position % PAGE_TOKENS] = seq.in_prompt(position);
            }
        }
        for seq in running {
            for position in 0..seq.computed {
                let made = self.made[&seq.pages.pages()[position / PAGE_TOKENS]][position % PAGE_TOKENS];
                assert_eq!(made, seq.in_prompt(position), "position {position} of a prompt of {}", seq.prompt_len);
            }
        }
    }

    /// Computes a step as a model with state would: each row's state from the one before it, written into its slot.
    pub(super) fn compute(&mut self, entries: &[StepEntry]) {
        if self.limits.window > 0 {
            entries.iter().for_each(|entry| self.attend(*entry));
        }
        if self.limits.slots == 0 {
            return;
        }
        let mut written = Vec::new();
        for entry in entries {
            let seq = &self.scheduler.running()[entry.seq];
            let mut out = Vec::new();
            seq.states.outputs(entry.start, entry.rows, entry.keeps_each(self.limits.slots), &mut out);
            assert_eq!(out.len(), entry.rows);
            let source = seq.states.source();
            assert_eq!(source.is_some(), entry.start > 0, "state is there wherever something was computed");
            let mut state = source.map_or(0, |slot| self.states[slot as usize]);
            let history = seq.tokens[..entry.start].iter().fold(0, |state, token| after(state, *token));
            assert_eq!(state, history, "it starts from the state of its own history");
            let rows = seq.tokens[entry.start..].iter().chain(&seq.drafts).take(entry.rows);
            for (row, token) in rows.enumerate() {
                state = after(state, *token);
                if out[row] == plimsoll_device::NO_STATE {
                    assert!(row + 1 < entry.rows, "the last row's state is kept");
                    continue;
                }
                let slot = out[row];
                assert!(!written.contains(&slot), "a slot is written once");
                let in_place = source == Some(slot) && row + 1 == entry.rows;
                assert!(source != Some(slot) || in_place, "the slot that is read is not written before it was");
                let cache = self.cache.borrow();
                let writable = cache.states.as_ref().unwrap().writable(crate::cache::SlotId(slot));
                assert!(writable, "who writes a slot is its one holder, and it is no checkpoint");
                written.push(slot);
                self.states[slot as usize] = if self.fails { u64::MAX } else { state };
            }
        }
        for entry in entries {
            let source = self.scheduler.running()[entry.seq].states.source();
            let others = entries.iter().filter(|other| other.seq != entry.seq);
            let mut theirs = Vec::new();
            for other in others {
                let seq = &self.scheduler.running()[other.seq];
                seq.states.outputs(other.start, other.rows, other.keeps_each(self.limits.slots), &mut theirs);
            }
            assert!(source.is_none_or(|slot| !theirs.contains(&slot)), "nobody writes what another reads");
        }
    }

    /// Computes a step as a model with sliding windows would. Each row writes a hash of the tokens up to it. It must find the hashes of its
    /// own history in all its pages, and in its window pages as far back as the window.
    fn attend(&mut self, entry: StepEntry) {
        let seq = &self.scheduler.running()[entry.seq];
        let tokens = seq.tokens.iter().chain(&seq.drafts).take(entry.start + entry.rows);
        let apart = self.limits.split_numerics();
        let kind = |position: usize| if apart && seq.in_prompt(position) { 1 << 31 } else { 0 };
        let (mut history, mut state) = (Vec::new(), 0);
        for (position, token) in tokens.enumerate() {
            state = after(state, token | kind(position));
            history.push(state);
        }
        for (position, left) in history.iter().enumerate().skip(entry.start) {
            let (page, slot) = (position / PAGE_TOKENS, position % PAGE_TOKENS);
            for (kept, pages) in self.kept.iter_mut().zip([seq.pages.pages(), seq.pages.windows()]) {
                kept.entry(pages[page]).or_insert([0; PAGE_TOKENS])[slot] = *left;
            }
        }
        for position in entry.start..entry.start + entry.rows {
            let window = (position + 1).saturating_sub(self.limits.window);
            for (first, (kept, pages)) in
                [0, window].into_iter().zip(self.kept.iter().zip([seq.pages.pages(), seq.pages.windows()]))
            {
                for (seen, left) in history.iter().enumerate().take(position + 1).skip(first) {
                    let found = kept[&pages[seen / PAGE_TOKENS]][seen % PAGE_TOKENS];
                    assert_eq!(found, *left, "what position {position} sees at {seen}, from {first} on");
                }
            }
        }
        if self.fails {
            for position in entry.start..entry.start + entry.rows {
                let page = seq.pages.windows()[position / PAGE_TOKENS];
                self.kept[1].get_mut(&page).unwrap()[position % PAGE_TOKENS] = u64::MAX;
            }
        }
        let held = seq.pages.windows_held();
        let most = WindowPool::per_sequence(self.limits.window, self.limits.rows.max(1 + self.limits.drafts));
        assert!(held <= most, "{held} window pages are held, {most} are planned");
    }

    pub(super) fn check(&self, entries: &[StepEntry], oldest: Option<u64>, decoding: &[u64]) {
        let running = self.scheduler.running();
        assert!(running.len() <= self.limits.running);
        assert!(running.is_sorted_by_key(|seq| seq.order), "oldest first");
        let layered = self.scheduler.layered().is_some();
        assert!(entries.is_empty() == self.scheduler.is_empty() || layered, "I5: a step with work to do does some");
        assert!(entries.iter().map(|s| s.rows).sum::<usize>() <= self.limits.rows);
        assert!(entries.iter().map(|s| s.logit_rows).sum::<usize>() <= self.limits.logit_rows);
        let mut served: Vec<u64> = Vec::new();
        for entry in entries {
            let seq = &running[entry.seq];
            let end = entry.start + entry.rows;
            assert!(!served.contains(&seq.order), "one entry a sequence");
            served.push(seq.order);
            assert!(entry.rows > 0 && entry.start == seq.computed && end <= seq.tokens.len() + entry.drafts);
            assert!(
                entry.drafts == 0 || end == seq.tokens.len() + seq.drafts.len(),
                "drafts are checked from the first on"
            );
            assert!(end < seq.total_max || entry.drafts == 0, "nothing is drafted beyond the end");
            assert!(seq.pages.capacity() >= end && seq.pages.pages().len() <= seq.total_max.div_ceil(PAGE_TOKENS));
            assert!(entry.logit_rows <= entry.rows && (entry.logit_rows > entry.drafts || end < seq.tokens.len()));
            let written = &seq.pages.pages()[entry.start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)];
            let others = running.iter().filter(|other| other.order != seq.order);
            let mut read = others.flat_map(|other| other.pages.pages());
            assert!(!read.any(|page| written.contains(page)), "a page that is written belongs to one sequence");
            if self.limits.window > 0 {
                let written = &seq.pages.windows()[entry.start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)];
                let others = running.iter().filter(|other| other.order != seq.order);
                let held = |other: &Seq<()>| {
                    other.pages.windows().iter().rev().take(other.pages.windows_held()).copied().collect()
                };
                let read: Vec<Vec<PageId>> = others.map(held).collect();
                assert!(!read.iter().flatten().any(|page| written.contains(page)), "nor does a window page");
            }
        }
        let quarantine = running.iter().any(|seq| seq.sched.suspect_until.is_some());
        if let Some(oldest) = oldest.filter(|_| !quarantine) {
            // It may have been admitted while a younger one's chunk was under way.
            assert!(served.contains(&oldest) || layered, "I5: the oldest running sequence goes on");
        }
        for order in decoding.iter().filter(|order| running.iter().any(|seq| seq.order == **order)) {
            assert!(quarantine || served.contains(order), "a running sequence decodes in every step");
        }
        assert!(self.scheduler.waiting().all(|seq| seq.pages.pages().is_empty() && seq.computed == 0));
        assert!(self.scheduler.waiting().is_sorted_by_key(|seq| seq.order), "the queue keeps the order of arrival");
    }

    pub(super) fn check_tables(&self) {
        let cache = self.cache.borrow();
        cache.check();
        assert_eq!(cache.pool.faults(), 0);
        assert_eq!(cache.windows.as_ref().map_or(0, |windows| windows.pool().faults()), 0);
    }

    /// No more requests arrive: all sequences finish in at most one step per token of work, recomputation included.
    pub(in super::super) fn finish_all(&mut self) {
        // After a preemption the victim is computed again, in the worst case one row in a step.
        let longest = self.cache.borrow().pool.total() * PAGE_TOKENS;
        let mut steps = 0;
        while !self.scheduler.is_empty() {
            self.step();
            steps += 1;
            let bound = self.work + self.preempted as usize * longest + self.layers_waited;
            assert!(steps <= bound, "I5: {steps} steps for {bound} tokens");
        }
    }

    pub(in super::super) fn assert_all_back(&self) {
        let cache = &mut *self.cache.borrow_mut();
        assert_eq!(cache.pool.used(), cache.pool.idle(), "I4: only the index holds pages");
        let kept = cache.states.as_ref().map_or(0, |states| states.stats().kept);
        if let Some(states) = &cache.states {
            assert_eq!(states.available(), states.total(), "I4: sequences hold no slots");
            assert_eq!(states.free() + kept, states.total());
        }
        if let Some(windows) = &cache.windows {
            assert_eq!(windows.pool().used(), windows.pool().idle(), "I4: sequences hold no window pages");
        }
        cache.clear();
        assert_eq!(cache.pool.used(), 0, "I4");
        assert!(cache.windows.as_ref().is_none_or(|windows| windows.pool().used() == 0), "I4");
        assert!(cache.states.as_ref().is_none_or(|states| states.free() == states.total()), "I4");
    }
}
