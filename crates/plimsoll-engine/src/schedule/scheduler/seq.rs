//! One sequence as the scheduler sees it: what it has computed, what it holds, what it wants next.

use arrayvec::ArrayVec;

use crate::api::options::Options;
use crate::cache::lease::{CHECKPOINTS_WANTED_MAX, PageLease, SharedCache, StateLease};
use crate::cache::{PAGE_TOKENS, PageId, PageKey, Pin};
use crate::media::SeqMedia;
use crate::schedule::scheduler::layered::Layered;

/// What is special about a sequence that no text is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pooled {
    /// Its logits are wanted (a classifier's scores); otherwise none are computed.
    pub logits: bool,
    /// Every row must be computed here and now: nothing comes from the prefix cache.
    pub every_row: bool,
    /// Tokens from here on are of the second type.
    pub second_at: usize,
}

/// Whether a tier below memory was asked for a prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskRead {
    /// It was not, or there is none.
    #[default]
    Unasked,
    /// It has a part that is worth reading: the sequence waits for it and is not admitted.
    Waits,
    /// There is nothing more to read.
    Done,
}

/// The part of a sequence that the scheduler alone reads and writes.
#[derive(Debug, Default)]
pub(super) struct SchedState {
    /// Its output was computed in other arithmetic than prompts, so a prompt must not reuse its pages (I9): the scheduler's
    /// [`StepLimits::split_numerics`](super::StepLimits::split_numerics).
    pub(super) split_numerics: bool,
    /// What was left to compute when it was last admitted takes more than a step.
    pub(super) long: bool,
    /// The chunk of it that is being computed layer by layer.
    pub(super) layered: Option<Layered>,
    /// Positions that others can find.
    pub(super) published: usize,
    /// Positions at which its state is to be kept for others.
    pub(super) checkpoints_wanted: ArrayVec<usize, CHECKPOINTS_WANTED_MAX>,
    /// This sequence was in a step that failed: it runs alone until it has passed this position.
    pub(super) suspect_until: Option<usize>,
}

/// One sequence as the scheduler sees it.
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
    /// Guesses at the tokens after the last, to be checked in its next step.
    pub drafts: ArrayVec<u32, { Options::DRAFTS_MAX }>,
    /// Positions with KV entries of the draft head, without a gap, up to the last position that the head was run on.
    pub drafted: std::ops::Range<usize>,
    /// It waits for its grammar's mask, and takes part in no step.
    pub waits_for_mask: bool,
    /// What a tier below memory has of its prefix.
    pub disk_read: DiskRead,
    /// Logits are wanted from this position on (the last position's always).
    pub logits_from: usize,
    /// Number of top logits that decide the next token; 0: all logits are needed.
    pub candidates: u32,
    /// Set if no text is made of it.
    pub pooled: Option<Pooled>,
    /// The media in its prompt.
    pub media: SeqMedia,
    /// Prefixes of its prompt that the cache is to keep.
    pub pins: ArrayVec<Pin, { Pin::MOST }>,
    /// The scheduler's own part.
    pub(super) sched: SchedState,
    /// What the owner attaches.
    pub payload: T,
}

/// What a sequence is made from, with all memory that it needs until it ends.
#[derive(Debug)]
pub struct NewSeq<T> {
    /// Sequences of different salts share no pages.
    pub salt: u64,
    /// The prompt, with room for the output.
    pub tokens: Vec<u32>,
    /// Prompt plus the most it may generate.
    pub total_max: usize,
    /// Logits are wanted from this position on.
    pub logits_from: usize,
    /// Set if no text is made of it.
    pub pooled: Option<Pooled>,
    /// Number of top logits that decide the next token; 0: all logits are needed.
    pub candidates: u32,
    /// Empty, with room for all its pages.
    pub pages: Vec<PageId>,
    /// The same for its window pages.
    pub window_pages: Vec<PageId>,
    /// The media in its prompt.
    pub media: SeqMedia,
    /// Prefixes of its prompt that the cache is to keep.
    pub pins: ArrayVec<Pin, { Pin::MOST }>,
    /// What the owner attaches.
    pub payload: T,
}

/// A key over some fields of a sequence, so that others may change meanwhile.
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

    /// With logits of its whole prompt, where its log-probabilities are wanted.
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

    /// Whether a prompt of more than a step is left to compute, and could be now.
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

    /// The last position of the prompt at which a page ends and something is left to compute.
    pub fn end_of_input(&self) -> usize {
        self.prompt_len.saturating_sub(1) / PAGE_TOKENS * PAGE_TOKENS
    }

    /// Whether its next position waits for a medium to be encoded.
    pub fn waits_for_encoder(&self) -> bool {
        self.media.first_missing(self.computed) == Some(self.computed)
    }

    /// The key by which its pages are found.
    pub(crate) fn key(&self) -> PageKey<'_> {
        key_of(self.salt, &self.tokens[..self.findable()], &self.media)
    }

    /// Tokens whose pages may be shared through the prefix cache.
    fn findable(&self) -> usize {
        if self.sched.split_numerics { self.prompt_len } else { self.tokens.len() }
    }

    /// Positions that can be computed now: all that are left, or those before a medium that is not encoded yet.
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

    /// Prompt log-probabilities and some poolings need every position computed here and now.
    pub fn reuses(&self) -> bool {
        !self.pooled.is_some_and(|pooled| pooled.every_row) && self.logits_from >= self.prompt_len.saturating_sub(1)
    }

    /// Drafts that are of use after the last token: the answer ends one token after the last of them at the latest.
    pub fn drafts_useful(&self, most: usize) -> usize {
        (self.total_max - self.tokens.len()).saturating_sub(1).min(most)
    }

    /// Makes room for up to `want` drafts after the last token, without taking another sequence's pages. Returns how
    /// many fit.
    pub fn room_for_drafts(&mut self, want: usize) -> usize {
        let want = self.drafts_useful(want);
        if !self.pages.grow(self.tokens.len() + want) {
            // Entries of the draft head end two positions before what it guesses.
            return want.min((self.pages.capacity() + 1).saturating_sub(self.tokens.len()));
        }
        want
    }

    /// Where a draft model goes on, so that it has seen all positions up to `start` that it can: behind those that it was run over. At
    /// `start` itself if there are more than `most` between, or another sequence reads them.
    pub fn draft_from(&self, start: usize, most: usize) -> usize {
        let end = self.drafted.end;
        let near = !self.drafted.is_empty() && end < start && start - end <= most;
        if near && self.pages.held_once(end..start) { end } else { start }
    }

    /// The draft head is run over `rows` positions from `start`.
    pub fn draft_over(&mut self, start: usize, rows: usize) {
        if self.drafted.end != start {
            self.drafted.start = start;
        }
        self.drafted.end = start + rows;
        self.pages.set_drafted(&self.drafted, start);
    }

    /// Asks for a checkpoint after `position` tokens; says whether there will be one if a slot is free. In a model with sliding windows
    /// that is to keep the window pages that a sequence reads from there on.
    pub(super) fn request_checkpoint(&mut self, position: usize) -> bool {
        // Where the states of a chunk that was begun go is settled.
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

    /// Takes what the sequence needs to run: the longest cached prefix, and its state slots. Returns false, with
    /// nothing held, if those are short. `shared`: how many tokens of its prompt are known to begin another sequence,
    /// too.
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

    /// Gives up all pages and slots; everything is computed again later.
    pub(super) fn leave(&mut self) {
        self.pages.clear();
        self.states.clear();
        self.start_over();
    }

    /// The same when the tables start over too: nothing is given back.
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

    /// Gives back the window pages that its next row does not see.
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

    /// Lets others find what was computed up to the end of the prompt.
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

    /// The prefixes that are pinned, and for how many minutes.
    pub(crate) fn pinned(&self) -> impl Iterator<Item = (PageKey<'_>, u32)> {
        let key = key_of(self.salt, &self.tokens[..self.prompt_len], &self.media);
        self.pins.iter().map(move |pin| (key.first(pin.tokens.min(self.prompt_len)), pin.minutes))
    }

    /// Ends it well: what it computed stays findable, as far as others could start from it.
    pub(super) fn donate(&mut self) {
        if self.states.needed() {
            self.pages.clear();
        } else {
            let key = key_of(self.salt, &self.tokens[..self.findable()], &self.media);
            self.pages.donate(key.first(self.computed.min(key.tokens.len())));
        }
    }
}
