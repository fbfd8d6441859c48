//! The steps of the remembering runner.

use super::*;

impl Recall {
    /// Writes every row's token to its position and checks that the step is well formed.
    fn store(&mut self, step: &StepInput<'_>) {
        let mut next_row = 0;
        for seq in step.seqs {
            assert_eq!(seq.first_row, next_row, "rows follow one another");
            assert!(seq.rows > 0, "a share has rows");
            next_row += seq.rows;
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            for i in 0..seq.rows {
                let position = seq.start + i;
                assert_eq!(step.positions[seq.first_row + i] as usize, position);
                let at = place(pages, position);
                assert_ne!(self.written[at], self.step, "two sequences write one place");
                self.written[at] = self.step;
                // Garbage first: a step that fails half way leaves garbage behind.
                self.cache[at] = u32::MAX;
            }
        }
        assert_eq!(step.tokens.len(), next_row);
        assert!(next_row <= self.shape.rows && next_row > 0, "{next_row} rows");
        let logit_rows = self.shape.logit_rows * (1 + self.shape.drafts);
        assert!(step.logit_rows.len() <= logit_rows, "{} logit rows", step.logit_rows.len());
        assert!(step.seqs.len() <= self.shape.running);
        if step.tokens.contains(&PANICS) {
            panic!("token {PANICS} was computed");
        }
        for seq in step.seqs {
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            for i in 0..seq.rows {
                let at = place(pages, seq.start + i);
                self.cache[at] = self.codes[seq.first_row + i];
                self.ids[at] = step.tokens[seq.first_row + i];
            }
            self.remember_window(step, seq);
        }
    }

    /// Writes the history up to each row to the sequence's window pages.
    fn remember_window(&mut self, step: &StepInput<'_>, seq: &SeqSpan) {
        if self.shape.window == 0 {
            return assert!(step.window_pages.is_empty());
        }
        assert_eq!(step.window_pages.len(), step.pages.len());
        for row in seq.first_row..seq.first_row + seq.rows {
            let at = place(&step.window_pages[seq.pages_at..], step.positions[row] as usize);
            self.windows[at] = self.history(step, seq, row);
        }
    }

    /// Whether a row finds its own history in the window pages, as far back as its window reaches.
    fn window_agrees(&self, step: &StepInput<'_>, seq: &SeqSpan, row: usize) -> bool {
        let position = step.positions[row] as usize;
        let first = (position + 1).saturating_sub(self.shape.window);
        let pages = &step.pages[seq.pages_at..][..seq.pages];
        let history = |end: usize| hash((0..=end).map(|seen| self.cache[place(pages, seen)]));
        self.shape.window == 0
            || (first..=position)
                .all(|seen| self.windows[place(&step.window_pages[seq.pages_at..], seen)] == history(seen))
    }

    /// Fills the codes of the rows: the token or the encoder's output, mixed with the place.
    fn read_rows(&mut self, step: &StepInput<'_>) {
        self.codes.clear();
        self.codes.extend_from_slice(step.tokens);
        if self.shape.encoder.is_none() {
            assert!(step.places.is_empty() && step.media.is_empty());
            return;
        }
        let mut next = 0;
        for piece in step.media {
            assert!(piece.first_row >= next && !piece.values.is_empty(), "pieces in order");
            for (row, values) in (piece.first_row..).zip(piece.values.chunks_exact(media_encoder::WIDTH)) {
                assert!(
                    [media_encoder::IMAGE, media_encoder::VIDEO].contains(&step.tokens[row]),
                    "row {row} is no placeholder"
                );
                self.codes[row] = media_encoder::code_of_row(values);
                next = row + 1;
                self.seen.media_rows.fetch_add(1, Ordering::Relaxed);
            }
        }
        let bare =
            |(own, token): (&u32, &u32)| own == token && [media_encoder::IMAGE, media_encoder::VIDEO].contains(token);
        assert!(!self.codes.iter().zip(step.tokens).any(bare), "a placeholder without outputs");
        assert_eq!(step.places.len(), step.tokens.len());
        self.codes.iter_mut().zip(step.places).for_each(|(own, place)| *own = code(*own, *place));
    }

    /// Advances every sequence's state into the slots that the step names. Returns the history after each row, as the state has it.
    fn advance(&mut self, step: &StepInput<'_>) -> Vec<u64> {
        let mut written = Vec::new();
        let mut after_row = Vec::with_capacity(step.tokens.len());
        let sources: Vec<u32> = step.seqs.iter().filter_map(|seq| seq.state).collect();
        for seq in step.seqs {
            assert_eq!(seq.state.is_some(), seq.start > 0, "who has computed something has a state");
            let mut state = seq.state.map_or(1, |slot| self.states[slot as usize]);
            for row in seq.first_row..seq.first_row + seq.rows {
                state = after(state, self.codes[row]);
                after_row.push(state);
                let slot = step.state_out[row];
                if slot == NO_STATE {
                    continue;
                }
                let last = row + 1 == seq.first_row + seq.rows;
                assert!(!written.contains(&slot), "slot {slot} is written twice in one step");
                assert!(!sources.contains(&slot) || (last && seq.state == Some(slot)), "slot {slot} is being read");
                written.push(slot);
                self.states[slot as usize] = state;
            }
            assert_ne!(step.state_out[seq.first_row + seq.rows - 1], NO_STATE, "the last state is kept");
        }
        self.seen.states_written.fetch_add(written.len() as u64, Ordering::Relaxed);
        after_row
    }

    fn read(&mut self, step: &StepInput<'_>, states: &[u64]) {
        self.row_len.clear();
        self.hidden.clear();
        let span = |row: usize| {
            let of = |s: &&SeqSpan| (s.first_row..s.first_row + s.rows).contains(&row);
            step.seqs.iter().find(of).unwrap()
        };
        if self.shape.head && self.shape.drafts > 0 {
            for row in 0..step.tokens.len() {
                self.hidden.push((self.history(step, span(row), row), step.positions[row] as usize));
            }
        }
        for (i, logit_row) in step.logit_rows.iter().enumerate() {
            let logit_row = *logit_row as usize;
            let history = self.history(step, span(logit_row), logit_row);
            // If pages, state and windows disagree, the logits are those of another history.
            let history =
                states.get(logit_row).map_or(history, |state| if *state == history { history } else { !history });
            let history = if self.window_agrees(step, span(logit_row), logit_row) { history } else { !history };
            let echoed = self.echoed(step, span(logit_row), logit_row, history);
            let row = &mut self.logits[i * VOCAB as usize..][..VOCAB as usize];
            logits(history, row);
            echoed.into_iter().for_each(|id| row[id as usize] += 12.0);
            let token = step.tokens[logit_row];
            if token == NAN {
                row.fill(f32::NAN);
            }
            self.row_len.push(if token == SHORT_ROW { 7 } else { VOCAB as usize });
        }
    }

    /// Returns the history up to a row, as the pages have it.
    fn history(&self, step: &StepInput<'_>, seq: &SeqSpan, row: usize) -> u64 {
        let pages = &step.pages[seq.pages_at..][..seq.pages];
        let end = seq.start + row - seq.first_row;
        hash((0..=end).map(|position| self.cache[place(pages, position)]))
    }

    /// Returns the token that followed a row's token where it last stood before, as the pages have it. None: it is not to be repeated.
    fn echoed(&self, step: &StepInput<'_>, seq: &SeqSpan, row: usize, history: u64) -> Option<u32> {
        if mix(history ^ 0xec40) % 256 >= self.shape.echo {
            return None;
        }
        let pages = &step.pages[seq.pages_at..][..seq.pages];
        let id = |position: usize| self.ids[place(pages, position)];
        let last = seq.start + row - seq.first_row;
        (0..last).rev().find(|position| id(*position) == id(last)).map(|position| id(position + 1))
    }

    /// Computes one row of the draft head: writes its entry, checks the entries it may see, and advances the hidden state by its token.
    fn draft_row(&mut self, step: &StepInput<'_>, seq: &SeqSpan, row: usize, from: (u64, usize)) {
        let position = step.positions[row] as usize;
        let further = self.passes > 0;
        assert_eq!(position, from.1 + usize::from(further), "the hidden state is of another position");
        let pages = &step.pages[seq.pages_at..][..seq.pages];
        self.following[place(pages, position)] = step.tokens[row];
        let mut broken = false;
        for seen in seq.seen_from..position {
            // The entry of a position is the token that the main layers have at the next position, as far as they have been computed. The
            // entry before a shared page may be that of another continuation.
            let shared = (seen + 1).is_multiple_of(PAGE_TOKENS);
            let next = self.ids[place(pages, seen + 1)];
            let drafted = further && seen + self.passes >= seq.start;
            broken |= !shared && !drafted && self.following[place(pages, seen)] != next;
        }
        assert!(!broken, "the draft head sees an entry it has not made for this history");
        let next = match step.places.get(row) {
            Some(place) => code(step.tokens[row], place.map(|axis| axis + 1.0)),
            None => step.tokens[row],
        };
        self.hidden.push((after(from.0, next), position));
    }
}

fn place(pages: &[u32], position: usize) -> usize {
    pages[position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS
}

impl Runner for Recall {
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.step += 1;
        self.seen.steps.fetch_add(1, Ordering::Relaxed);
        self.seen.logit_rows.fetch_add(step.logit_rows.len() as u64, Ordering::Relaxed);
        self.seen.seqs_max.fetch_max(step.seqs.len() as u64, Ordering::Relaxed);
        self.read_rows(step);
        self.store(step);
        self.passes = 0;
        if step.tokens.contains(&FAILS) {
            // The failed step has written half of the state.
            step.state_out.iter().filter(|slot| **slot != NO_STATE).for_each(|slot| self.states[*slot as usize] = 0);
            return Err(DeviceError::Injected("the token that fails"));
        }
        let states = if self.shape.ring() > 0 { self.advance(step) } else { Vec::new() };
        self.read(step, &states);
        if !self.shape.step_time.is_zero() {
            std::thread::sleep(self.shape.step_time);
        }
        Ok(())
    }

    fn begin(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.begun = Some((0, step.tokens.to_vec()));
        Ok(())
    }

    fn advance(&mut self, step: &StepInput<'_>) -> Result<bool, DeviceError> {
        let (layer, tokens) = self.begun.take().expect("a step was begun");
        assert_eq!(tokens, step.tokens, "it is the one that was begun");
        self.seen.layers.fetch_add(1, Ordering::Relaxed);
        // Every layer writes. If the pages belong to another sequence by now, that sequence's answer will be wrong.
        for seq in step.seqs {
            let pages = &step.pages[seq.pages_at..][..seq.pages];
            (seq.start..seq.start + seq.rows).for_each(|position| self.cache[place(pages, position)] = u32::MAX);
        }
        if layer + 1 == LAYERS {
            return self.forward(step).map(|()| true);
        }
        if !self.shape.step_time.is_zero() {
            std::thread::sleep(self.shape.step_time);
        }
        self.begun = Some((layer + 1, tokens));
        Ok(false)
    }

    fn forget(&mut self) {
        self.begun = None;
    }

    fn draft(&mut self, from: &[u32], step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.seen.draft_passes.fetch_add(1, Ordering::Relaxed);
        assert_eq!(from.len(), step.tokens.len());
        assert!(step.logit_rows.len() <= self.shape.running && step.state_out.is_empty());
        if !self.shape.pass_time.is_zero() {
            std::thread::sleep(self.shape.pass_time);
        }
        let before = std::mem::take(&mut self.hidden);
        for seq in step.seqs {
            assert!(seq.state.is_none() && seq.seen_from <= seq.start);
            for row in seq.first_row..seq.first_row + seq.rows {
                self.draft_row(step, seq, row, before[from[row] as usize]);
            }
        }
        self.row_len.clear();
        let mut carried = Vec::new();
        for (i, wanted) in step.logit_rows.iter().enumerate() {
            let (history, position) = self.hidden[*wanted as usize];
            carried.push((history, position));
            let row = &mut self.logits[i * VOCAB as usize..][..VOCAB as usize];
            logits(history, row);
            if !is_right(history, self.shape.right) {
                // The same logits for other tokens: wrong whether sampled or greedy, as a rule.
                row[..NEVER_SAID as usize].rotate_right(1);
            }
            self.row_len.push(VOCAB as usize);
        }
        self.hidden = carried;
        self.passes += 1;
        Ok(())
    }

    fn encode(&mut self, _: EncoderKind, images: &EncoderInput<'_>) -> Result<(), DeviceError> {
        self.seen.batches_between.fetch_add(u64::from(self.begun.is_some()), Ordering::Relaxed);
        // As on a device, the encoder's output overwrites what the last step left.
        self.row_len.clear();
        self.encoded.clear();
        let count = images.grids.len() as u64;
        self.seen.batches.fetch_add(1, Ordering::Relaxed);
        self.seen.batch_max.fetch_max(count, Ordering::Relaxed);
        self.seen.images.fetch_add(count, Ordering::Relaxed);
        assert!(count as usize <= self.shape.encoder.unwrap().batch, "A28: {count} at once");
        let mut patches = images.patches;
        for grid in images.grids {
            let rows = grid.frames * grid.height * grid.width;
            let (own, rest) = patches.split_at(rows * 3 * 2 * 2 * 2);
            patches = rest;
            let all = |colour: u8| own.iter().all(|value| (value - f32::from(colour) / 255.0).abs() < 1e-6);
            assert!(!all(media_encoder::PANICS), "a picture that panics");
            if all(media_encoder::FAILS) {
                return Err(DeviceError::Injected("the picture that fails"));
            }
            self.encoded.extend(media_encoder::outputs(own, rows / 4));
        }
        assert!(patches.is_empty());
        if !self.shape.step_time.is_zero() {
            std::thread::sleep(self.shape.step_time);
        }
        Ok(())
    }

    fn embedding(&mut self, row: usize) -> &[f32] {
        &self.encoded[row]
    }

    fn logits(&mut self, row: usize) -> &mut [f32] {
        let len = self.row_len[row];
        &mut self.logits[row * VOCAB as usize..][..len]
    }
}
