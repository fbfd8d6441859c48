//! The buffers of a step, reserved once, and the layout of its batch and of the draft passes after it.

use plimsoll_device::{MediaRows, PAGE_TOKENS, SeqSpan, StepInput};

use crate::schedule::scheduler::{Seq, StepEntry, StepLimits};

/// Reserved buffers for one step.
#[derive(Debug)]
pub struct StepBuffers {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    seqs: Vec<SeqSpan>,
    pages: Vec<u32>,
    window_pages: Vec<u32>,
    logit_rows: Vec<u32>,
    logit_seqs: Vec<SeqSpan>,
    candidates: Vec<u32>,
    state_out: Vec<u32>,
    types: Vec<u32>,
    places: Vec<[f32; 3]>,
    /// For each row the position after the last one it attends to, in models with image rows that attend to each other.
    ends: Vec<u32>,
    /// Rows of prompts, if prompts have numerics of their own.
    prompt_rows: usize,
    /// Whether a sequence is pooled from its rows' hidden states.
    pooled: bool,
    /// Rows of the pass before that a draft pass continues.
    from: Vec<u32>,
    limits: StepLimits,
}

/// Rows of one sequence in a pass of the draft head.
#[derive(Clone, Copy, Debug)]
pub struct DraftRows {
    /// Index of the sequence among the running ones.
    pub seq: usize,
    /// Position of its first row.
    pub start: usize,
    /// Its rows.
    pub rows: usize,
    /// Row of the pass before that its first row continues; the others follow.
    pub from: usize,
    /// Whether a guess is wanted after its last row.
    pub wanted: bool,
}

impl StepBuffers {
    /// Room for the largest step: `pages` is the number of page ids all running sequences may name together.
    pub fn new(limits: &StepLimits, pages: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(limits.rows),
            positions: Vec::with_capacity(limits.rows),
            seqs: Vec::with_capacity(limits.running),
            pages: Vec::with_capacity(pages),
            window_pages: Vec::with_capacity(if limits.window > 0 { pages } else { 0 }),
            logit_rows: Vec::with_capacity(limits.logit_rows),
            logit_seqs: Vec::with_capacity(limits.running),
            candidates: Vec::with_capacity(if limits.candidates { limits.logit_rows } else { 0 }),
            state_out: Vec::with_capacity(if limits.slots > 0 { limits.rows } else { 0 }),
            types: Vec::with_capacity(if limits.encoder_batch { limits.rows } else { 0 }),
            places: Vec::with_capacity(if limits.media { limits.rows } else { 0 }),
            ends: Vec::with_capacity(if limits.image_rows > 0 { limits.rows } else { 0 }),
            prompt_rows: 0,
            pooled: false,
            from: Vec::with_capacity(if limits.draft_head { limits.rows } else { 0 }),
            limits: *limits,
        }
    }

    /// Bytes that [`Self::new`] reserves.
    pub fn bytes_for(limits: &StepLimits, pages: usize) -> usize {
        let more = [limits.slots > 0, limits.draft_head, limits.encoder_batch, limits.image_rows > 0];
        let by_row = 2 + more.into_iter().filter(|has| *has).count();
        let tables = 1 + usize::from(limits.window > 0);
        let by_logits = 1 + usize::from(limits.candidates);
        let words = by_row * limits.rows + by_logits * limits.logit_rows + tables * pages;
        let media = if limits.media { limits.rows * (size_of::<[f32; 3]>() + size_of::<MediaRows<'_>>()) } else { 0 };
        words * size_of::<u32>() + media + 2 * limits.running * size_of::<SeqSpan>()
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.seqs.clear();
        self.pages.clear();
        self.window_pages.clear();
        self.logit_rows.clear();
        self.logit_seqs.clear();
        self.candidates.clear();
        self.state_out.clear();
        self.types.clear();
        self.places.clear();
        self.ends.clear();
        self.prompt_rows = 0;
        self.pooled = false;
        self.from.clear();
    }

    fn span<T>(&mut self, seq: &Seq<T>, start: usize, rows: usize, seen_from: usize, state: Option<u32>) {
        self.seqs.push(SeqSpan {
            first_row: self.tokens.len(),
            rows,
            start,
            pages_at: self.pages.len(),
            pages: if self.limits.encoder_batch { rows.div_ceil(PAGE_TOKENS) } else { seq.pages.pages().len() },
            seen_from,
            state,
        });
        self.positions.extend(start as u32..(start + rows) as u32);
        if self.limits.media {
            self.places.extend((start..start + rows).map(|position| seq.media.place(position)));
        }
        if self.limits.encoder_batch {
            // Pages of the step's own, which last as long as it.
            let first = self.pages.len() as u32;
            self.pages.extend(first..first + rows.div_ceil(PAGE_TOKENS) as u32);
        } else {
            self.pages.extend(seq.pages.pages().iter().map(|page| page.0));
            self.window_pages.extend(seq.pages.windows().iter().map(|page| page.0));
        }
    }

    /// Room for the pieces of encoder outputs that a step may name; [`Self::fill`] fills it, [`reuse`] empties it.
    pub fn room_for_media(&self) -> Vec<MediaRows<'static>> {
        Vec::with_capacity(if self.limits.media { self.limits.rows } else { 0 })
    }

    /// Lays out `entries` of `running`, one after another; `media` receives the pieces of encoder outputs
    /// among their rows.
    pub fn fill<'a, T>(
        &mut self,
        entries: &[StepEntry],
        running: &'a [Seq<T>],
        media: &mut Vec<MediaRows<'a>>,
    ) -> StepInput<'_> {
        self.clear();
        for entry in entries {
            let seq = &running[entry.seq];
            self.pooled |= seq.pooled.is_some();
            let first_row = self.tokens.len();
            seq.media.each_piece(entry.start, entry.rows, |offset, values| {
                media.push(MediaRows { first_row: first_row + offset, values });
            });
            self.span(seq, entry.start, entry.rows, 0, seq.states.source());
            if self.limits.image_rows > 0 {
                self.ends.extend(seq.media.ends(entry.start, entry.rows));
            }
            let of_prompt = self.limits.split_numerics() && seq.in_prompt(entry.start);
            debug_assert!(of_prompt || self.prompt_rows == 0, "rows of prompts stand last");
            debug_assert!(
                !of_prompt || entry.start + entry.rows <= seq.prompt_len,
                "a chunk ends where its prompt does"
            );
            self.prompt_rows += if of_prompt { entry.rows } else { 0 };
            let known = entry.rows - entry.drafts;
            self.tokens.extend_from_slice(&seq.tokens[entry.start..entry.start + known]);
            self.tokens.extend_from_slice(&seq.drafts[..entry.drafts]);
            seq.states.outputs(entry.start, entry.rows, entry.keeps_each(self.limits.slots), &mut self.state_out);
            let last = self.tokens.len();
            if self.limits.encoder_batch {
                // An encoder's sequence has the logits of its first position.
                let first = (last - entry.rows) as u32;
                self.logit_rows.extend((entry.logit_rows > 0).then_some(first));
                let second = seq.pooled.map_or(usize::MAX, |pooled| pooled.second_at);
                self.types.extend((entry.start..entry.start + entry.rows).map(|at| u32::from(at >= second)));
            } else {
                let (first_row, rows) = (self.logit_rows.len(), entry.logit_rows);
                let start = entry.start + entry.rows - rows;
                let span = self.seqs.last().filter(|_| rows > 0);
                self.logit_seqs.extend(span.map(|span| SeqSpan { first_row, rows, start, state: None, ..*span }));
                self.logit_rows.extend((last - rows) as u32..last as u32);
                if self.limits.candidates {
                    self.candidates.extend(std::iter::repeat_n(seq.candidates, rows));
                }
            }
        }
        debug_assert!(
            self.tokens.len() - self.prompt_rows <= self.limits.answer_rows(),
            "I6: more rows with logits than in the self-test"
        );
        self.input()
    }

    /// Lays out a pass of the draft head: each row names the token that follows its position. Returns the rows of the previous pass that it
    /// continues, and the step.
    pub fn fill_drafts<T>(&mut self, passes: &[DraftRows], running: &[Seq<T>]) -> (&[u32], StepInput<'_>) {
        self.clear();
        for pass in passes {
            let seq = &running[pass.seq];
            self.span(seq, pass.start, pass.rows, seq.drafted.start, None);
            for position in pass.start + 1..=pass.start + pass.rows {
                let drafted = position.checked_sub(seq.tokens.len());
                self.tokens.push(drafted.map_or_else(|| seq.tokens[position], |draft| seq.drafts[draft]));
            }
            self.from.extend(pass.from as u32..(pass.from + pass.rows) as u32);
            if pass.wanted {
                self.logit_rows.push(self.tokens.len() as u32 - 1);
                self.candidates.extend(self.limits.candidates.then_some(seq.candidates));
            }
        }
        (&self.from, StepInput { only_logits: false, ..self.input() })
    }

    fn input(&self) -> StepInput<'_> {
        debug_assert!(
            self.tokens.len() <= self.limits.rows && self.logit_rows.len() <= self.limits.logit_rows,
            "I6: a step larger than the self-test"
        );
        StepInput {
            tokens: &self.tokens,
            positions: &self.positions,
            seqs: &self.seqs,
            pages: &self.pages,
            window_pages: &self.window_pages,
            types: &self.types,
            logit_rows: &self.logit_rows,
            logit_seqs: &self.logit_seqs,
            candidates: &self.candidates,
            state_out: &self.state_out,
            places: &self.places,
            ends: &self.ends,
            media: &[],
            bf16_rows: self.limits.bf16_rows(self.tokens.len(), self.prompt_rows),
            bf16_logits: self.limits.bf16_logits(),
            only_logits: (!self.limits.draft_head || self.limits.draft_model) && !self.pooled,
            pooled: self.pooled,
        }
    }
}

/// An emptied list for the pieces of another step, over the same memory.
pub fn reuse(mut media: Vec<MediaRows<'_>>) -> Vec<MediaRows<'static>> {
    media.clear();
    // Collecting in place keeps the allocation; there is nothing to convert.
    media.into_iter().map(|_| MediaRows { first_row: 0, values: &[] }).collect()
}
