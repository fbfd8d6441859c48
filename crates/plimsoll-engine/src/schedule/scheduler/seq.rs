//! One sequence in the scheduler: its computed positions, its pages and slots, and its next rows.

use arrayvec::ArrayVec;

use crate::api::options::Options;
use crate::cache::lease::{CHECKPOINTS_WANTED_MAX, PageLease, SharedCache, StateLease};
use crate::cache::{PAGE_TOKENS, PageId, PageKey, Pin};
use crate::media::SeqMedia;
use crate::schedule::scheduler::layered::Layered;

/// The special needs of a pooled sequence, which generates no text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pooled {
    /// Its logits are needed (a classifier's scores); otherwise none are computed.
    pub logits: bool,
    /// Every row must be computed: the prefix cache is not used.
    pub every_row: bool,
    /// First position of a token of the second type.
    pub second_at: usize,
}

/// The state of a sequence's prefix on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskRead {
    /// The prefix was not looked up on disk, or there is no disk cache.
    #[default]
    Unasked,
    /// A part on disk is worth reading: the sequence waits for it and is not admitted.
    Waits,
    /// No part is left to read.
    Done,
}

/// The part of a sequence that the scheduler alone reads and writes.
#[derive(Debug, Default)]
pub(super) struct SchedState {
    /// Output has other numerics than prompts, so a prompt must not reuse its pages (I9): the scheduler's
    /// [`StepLimits::split_numerics`](super::StepLimits::split_numerics).
    pub(super) split_numerics: bool,
    /// At its last admission more rows were left to compute than a step has.
    pub(super) long: bool,
    /// Its chunk that is being computed layer by layer.
    pub(super) layered: Option<Layered>,
    /// Positions that are published to the prefix cache.
    pub(super) published: usize,
    /// Positions at which its state or window pages are to be kept for other sequences.
    pub(super) checkpoints_wanted: ArrayVec<usize, CHECKPOINTS_WANTED_MAX>,
    /// This sequence was in a step that failed: it runs alone until it has passed this position.
    pub(super) suspect_until: Option<usize>,
}

/// One sequence of the scheduler, with its tokens, its pages and its state slots.
#[derive(Debug)]
pub struct Seq<T> {
    /// Arrival number: smaller is older.
    pub order: u64,
    /// Sequences of different salts share no pages.
    pub salt: u64,
    /// Prompt and output so far.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
    /// Prompt plus the most it may generate.
    pub total_max: usize,
    /// Positions that are computed: `pages` hold their KV cache, and the recurrent state is the one after the last of
    /// them.
    pub computed: usize,
    /// Its pages.
    pub pages: PageLease,
    /// Its recurrent state.
    pub states: StateLease,
    /// Guesses at the tokens after the last, to be verified in its next step.
    pub drafts: ArrayVec<u32, { Options::DRAFTS_MAX }>,
    /// Positions with KV entries of the draft head, without a gap, up to the last position that the head was run on.
    pub drafted: std::ops::Range<usize>,
    /// It waits for its grammar's mask, and takes part in no step.
    pub waits_for_mask: bool,
    /// Whether its prefix is read from disk.
    pub disk_read: DiskRead,
    /// The first position with wanted logits; those of the last position are always wanted.
    pub logits_from: usize,
    /// Number of top logits that decide the next token; 0: all logits are needed.
    pub candidates: u32,
    /// Set for a pooled sequence, which generates no text.
    pub pooled: Option<Pooled>,
    /// The media in its prompt.
    pub media: SeqMedia,
    /// Prefixes of its prompt that the cache is to keep.
    pub pins: ArrayVec<Pin, { Pin::MOST }>,
    /// The scheduler's own part.
    pub(super) sched: SchedState,
    /// The caller's data.
    pub payload: T,
}

/// The fields of a new sequence, with all memory that it needs until it ends.
#[derive(Debug)]
pub struct NewSeq<T> {
    /// Sequences of different salts share no pages.
    pub salt: u64,
    /// The prompt, with room for the output.
    pub tokens: Vec<u32>,
    /// Prompt plus the most it may generate.
    pub total_max: usize,
    /// The first position with wanted logits.
    pub logits_from: usize,
    /// Set for a pooled sequence, which generates no text.
    pub pooled: Option<Pooled>,
    /// Number of top logits that decide the next token; 0: all logits are needed.
    pub candidates: u32,
    /// Empty, with capacity for all its pages.
    pub pages: Vec<PageId>,
    /// Empty, with capacity for all its window pages.
    pub window_pages: Vec<PageId>,
    /// The media in its prompt.
    pub media: SeqMedia,
    /// Prefixes of its prompt that the cache is to keep.
    pub pins: ArrayVec<Pin, { Pin::MOST }>,
    /// The caller's data.
    pub payload: T,
}

/// Builds a key from some fields of a sequence, so that other fields can be borrowed meanwhile.
fn key_of<'a>(salt: u64, tokens: &'a [u32], media: &'a SeqMedia) -> PageKey<'a> {
    PageKey { salt, tokens, media: media.marks() }
}

impl<T> NewSeq<T> {
    /// A sequence of `tokens` that generates `output` more at most. No salt, no media; the page lists have no capacity.
    pub fn new(tokens: Vec<u32>, output: usize, payload: T) -> Self {
        Self {
            salt: 0,
            total_max: tokens.len() + output,
            logits_from: tokens.len() - 1,
            pooled: None,
            candidates: 0,
            pages: Vec::new(),
            window_pages: Vec::new(),
            media: SeqMedia::default(),
            pins: ArrayVec::new(),
            tokens,
            payload,
        }
    }

    /// Requests logits of the whole prompt, if its log-probabilities are reported.
    pub fn reporting(self, prompt: bool) -> Self {
        Self { logits_from: if prompt { 0 } else { self.logits_from }, ..self }
    }
}

impl<T> Seq<T> {
    /// A sequence that holds nothing yet. `order`: its arrival number, smaller is older. `slots`: state slots it owns
    /// while it runs; 0 for a model without recurrent state.
    pub fn new(cache: &SharedCache, order: u64, slots: usize, new: NewSeq<T>) -> Self {
        let NewSeq {
            salt,
            tokens,
            total_max,
            logits_from,
            pooled,
            candidates,
            pages,
            window_pages,
            media,
            pins,
            payload,
        } = new;
        Self {
            order,
            salt,
            prompt_len: tokens.len(),
            tokens,
            total_max,
            computed: 0,
            pages: PageLease::new(cache, pages, window_pages),
            states: StateLease::new(cache, slots),
            drafts: ArrayVec::new(),
            drafted: 0..0,
            waits_for_mask: false,
            disk_read: DiskRead::default(),
            logits_from,
            candidates,
            pooled,
            media,
            pins,
            sched: SchedState::default(),
            payload,
        }
    }

    /// Whether its prefix can be reused at checkpoints only: the model has recurrent state or sliding windows.
    pub(super) fn needs_checkpoints(&self) -> bool {
        self.states.needed() || self.pages.windowed()
    }

    /// Whether only the newest token, and drafts after it, are left to compute.
    pub fn decoding(&self) -> bool {
        self.computed + 1 == self.tokens.len() && self.tokens.len() > self.prompt_len
    }

    /// Whether the rest of a long prompt can be computed now.
    pub(super) fn computes_long_prompt(&self) -> bool {
        self.sched.long && !self.decoding() && !self.waits_for_encoder()
    }

    /// Whether a position is one of its prompt's.
    pub fn in_prompt(&self, position: usize) -> bool {
        position < self.prompt_len
    }

    /// Positions that are left to compute.
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// The last page end in the prompt after which a token is left to compute.
    pub fn end_of_input(&self) -> usize {
        self.prompt_len.saturating_sub(1) / PAGE_TOKENS * PAGE_TOKENS
    }

    /// Whether its next position waits for a medium to be encoded.
    pub fn waits_for_encoder(&self) -> bool {
        self.media.first_missing(self.computed) == Some(self.computed)
    }

    /// The key of its pages in the prefix cache.
    pub(crate) fn key(&self) -> PageKey<'_> {
        key_of(self.salt, &self.tokens[..self.findable()], &self.media)
    }

    /// Tokens in pages that may be shared through the prefix cache.
    fn findable(&self) -> usize {
        if self.sched.split_numerics { self.prompt_len } else { self.tokens.len() }
    }

    /// Positions that can be computed now: all that are left, or the positions before a medium that is not encoded yet.
    pub(super) fn ready(&self) -> usize {
        let end = self.media.first_missing(self.computed).unwrap_or(usize::MAX);
        end.min(self.tokens.len()) - self.computed
    }

    /// Positions from the next on that must be in one step: the rest of an image, in some models.
    pub(super) fn together(&self) -> usize {
        if self.decoding() || self.waits_for_encoder() { 0 } else { self.media.together(self.computed) }
    }

    /// Rows with wanted logits among the next `rows`.
    pub(super) fn logit_rows(&self, rows: usize) -> usize {
        if self.pooled.is_some_and(|pooled| !pooled.logits) {
            return 0;
        }
        let end = self.computed + rows;
        let wanted = end.saturating_sub(self.logits_from.max(self.computed));
        if end >= self.tokens.len() { wanted.max(1) } else { wanted }
    }

    /// Whether the prefix cache may be used. Prompt log-probabilities and some poolings need every position computed.
    pub fn reuses(&self) -> bool {
        !self.pooled.is_some_and(|pooled| pooled.every_row) && self.logits_from >= self.prompt_len.saturating_sub(1)
    }

    /// Drafts that are useful after the last token: the answer ends at the latest one token after the last draft.
    pub fn drafts_useful(&self, most: usize) -> usize {
        (self.total_max - self.tokens.len()).saturating_sub(1).min(most)
    }

    /// Makes room for up to `want` drafts after the last token, without taking another sequence's pages. Returns how
    /// many fit.
    pub fn room_for_drafts(&mut self, want: usize) -> usize {
        let want = self.drafts_useful(want);
        if !self.pages.grow(self.tokens.len() + want) {
            // The draft head's KV entries end two positions before the token that it drafts.
            return want.min((self.pages.capacity() + 1).saturating_sub(self.tokens.len()));
        }
        want
    }

    /// The position from which a draft model's pass starts, so that it has seen as many positions before `start` as possible: the first
    /// position that it has not seen. `start` itself if the gap is over `most` positions, or if another sequence reads them.
    pub fn draft_from(&self, start: usize, most: usize) -> usize {
        let end = self.drafted.end;
        let near = !self.drafted.is_empty() && end < start && start - end <= most;
        if near && self.pages.held_once(end..start) { end } else { start }
    }

    /// Records a pass of the draft head over `rows` positions from `start`.
    pub fn draft_over(&mut self, start: usize, rows: usize) {
        if self.drafted.end != start {
            self.drafted.start = start;
        }
        self.drafted.end = start + rows;
        self.pages.set_drafted(&self.drafted, start);
    }

    /// Requests a checkpoint after `position` tokens. Returns whether one will be written if a slot is free. In a model with sliding
    /// windows the checkpoint keeps the window pages that a sequence reads from there on.
    pub(super) fn request_checkpoint(&mut self, position: usize) -> bool {
        // A chunk that was begun has its state slots assigned already.
        let begun = self.computed + self.sched.layered.map_or(0, |chunk| chunk.rows);
        let windowed = self.pages.windowed() && position >= self.computed.max(1);
        if !windowed && (position <= begun || !self.states.needed()) {
            return self.states.plans(position);
        }
        if !self.sched.checkpoints_wanted.contains(&position)
            && self.sched.checkpoints_wanted.len() < CHECKPOINTS_WANTED_MAX
        {
            self.sched.checkpoints_wanted.push(position);
        }
        self.sched.checkpoints_wanted.contains(&position)
    }

    /// Takes the resources to run: the longest cached prefix, and the state slots. Returns false, with nothing held, if slots are short.
    /// `shared`: tokens at the prompt's beginning that another sequence has too.
    pub(super) fn enter(&mut self, alone: bool, shared: usize) -> bool {
        let found = match self.reuses() {
            true => {
                let key = key_of(self.salt, &self.tokens[..self.findable()], &self.media);
                self.pages.take_prefix(key, &mut self.states)
            }
            false => Default::default(),
        };
        self.start_at(found.tokens);
        if !self.states.acquire() {
            self.leave();
            // The matched checkpoint may occupy the slot that it needs. `leave` released it, so try again.
            if !(alone && self.states.acquire()) {
                return false;
            }
        }
        // Keep window pages and states at points of reuse: later requests start there.
        for position in [self.end_of_input(), found.known.max(shared), found.tokens] {
            self.request_checkpoint(position);
        }
        for at in 0..self.pins.len() {
            self.request_checkpoint(self.pins[at].tokens.min(self.end_of_input()) / PAGE_TOKENS * PAGE_TOKENS);
        }
        true
    }

    fn start_at(&mut self, computed: usize) {
        self.media.start_over();
        let drafted = self.pages.drafted_from(computed)..computed;
        (self.computed, self.sched.published, self.drafted) = (computed, computed, drafted);
    }

    /// Releases all pages and slots; everything is computed again later.
    pub(super) fn leave(&mut self) {
        self.pages.clear();
        self.states.clear();
        self.start_over();
    }

    /// As [`Self::leave`], but releases nothing: the tables start over too.
    pub(super) fn forget(&mut self) {
        self.pages.forget();
        self.states.forget();
        self.start_over();
    }

    fn start_over(&mut self) {
        self.sched.layered = None;
        self.drafts.clear();
        self.sched.checkpoints_wanted.clear();
        self.start_at(0);
    }

    /// Releases the window pages that its next row does not see.
    pub(super) fn slide(&mut self) {
        if let Some(slid) = self.pages.slide(self.computed, &self.sched.checkpoints_wanted) {
            self.sched.checkpoints_wanted.retain(|position| *position / PAGE_TOKENS > slid);
        }
    }

    /// Plans the checkpoints that fall into the next `rows` rows, which end before the prompt's last.
    pub(super) fn plan_checkpoints(&mut self, rows: usize) {
        if !self.states.needed() {
            return;
        }
        if self.pages.invalidated() {
            return self.sched.checkpoints_wanted.clear();
        }
        let (start, end) = (self.computed, self.computed + rows);
        self.sched.checkpoints_wanted.sort_unstable();
        for i in 0..self.sched.checkpoints_wanted.len() {
            let position = self.sched.checkpoints_wanted[i];
            if position > start && position <= end {
                self.states.plan_checkpoint(position);
            }
        }
        self.sched.checkpoints_wanted.retain(|position| *position > end);
    }

    /// Publishes the computed positions of the prompt to the prefix cache.
    pub(super) fn publish(&mut self) {
        let key = key_of(self.salt, &self.tokens[..self.findable()], &self.media);
        if self.states.needed() {
            let end = self.end_of_input();
            if self.pages.publish_checkpoints(key, &mut self.states, end) {
                // Pages of another sequence with the same tokens may have replaced its own.
                let whole = self.drafted.end / PAGE_TOKENS * PAGE_TOKENS;
                self.drafted.start = self.drafted.start.max(self.pages.drafted_from(whole));
            }
            return;
        }
        // After a preemption, a chunk can extend past the prompt.
        let end = self.computed.min(self.prompt_len);
        if end / PAGE_TOKENS > self.sched.published / PAGE_TOKENS {
            self.pages.publish(key.first(end), &self.sched.checkpoints_wanted);
            self.sched.published = end;
        }
    }

    /// The pinned prefixes, and their minutes.
    pub(crate) fn pinned(&self) -> impl Iterator<Item = (PageKey<'_>, u32)> {
        let key = key_of(self.salt, &self.tokens[..self.prompt_len], &self.media);
        self.pins.iter().map(move |pin| (key.first(pin.tokens.min(self.prompt_len)), pin.minutes))
    }

    /// Ends a finished sequence: its pages stay in the prefix cache, as far as other sequences could start from them.
    pub(super) fn donate(&mut self) {
        if self.states.needed() {
            self.pages.clear();
        } else {
            let key = key_of(self.salt, &self.tokens[..self.findable()], &self.media);
            self.pages.donate(key.first(self.computed.min(key.tokens.len())));
        }
    }
}
