//! The grammar state of one request: which tokens may come next.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use llguidance::toktrie::SimpleVob;
use plimsoll_engine::constraint::{Constraint, Grammar, Unfit};

use crate::automaton::{CompiledGrammar, ParserState};
use crate::cache::Grammars;
use crate::error::GrammarError;
use crate::job_queue::{QueuedJob, Work};
use crate::reasoning::{NextTokens, ReasoningRules, ReasoningState};
use crate::sandboxes::CompileLimits;
use crate::source::Source;

/// Host bytes of one output's state: two masks, and the parser's data for each token.
const STATE_BYTES_FIXED: u64 = 16 << 10;
const STATE_BYTES_PER_TOKEN: u64 = 256;

/// A grammar with a mask that took longer is slow. Its masks are computed on a second thread, outside of steps. A mask
/// of a typical JSON schema takes one to three milliseconds.
const SLOW_MASK_TIME: Duration = Duration::from_millis(20);

/// The constraint on a request's output: a grammar, limits on reasoning before it, or both. All choices share it.
#[derive(Clone)]
pub struct Guide {
    grammars: Arc<Grammars>,
    compiled: Option<Arc<CompiledGrammar>>,
    reasoning: Option<ReasoningState>,
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("grammar", &self.compiled.is_some()).field("reasoning", &self.reasoning).finish()
    }
}

impl Guide {
    /// Compiles `source`, or takes it from the cache. `prefix` is fixed text before it. Not for an event loop.
    ///
    /// # Errors
    ///
    /// [`GrammarError::Invalid`] with the reason, [`GrammarError::Full`] if the budget is in use,
    /// [`GrammarError::NoThread`] if the system has no thread, [`GrammarError::ClientDisconnected`] if the client has
    /// disconnected.
    pub fn new(
        grammars: &Arc<Grammars>,
        source: Option<&Source>,
        prefix: &str,
        reasoning: Option<ReasoningRules>,
        limits: &CompileLimits<'_>,
    ) -> Result<Self, GrammarError> {
        let compiled = source.map(|source| grammars.compiled(source, prefix, limits)).transpose()?;
        let reasoning = reasoning.map(|rules| ReasoningState::new(rules, &grammars.settings().tokenizer));
        Ok(Self { grammars: Arc::clone(grammars), compiled, reasoning })
    }
}

impl Grammar for Guide {
    fn begin(&self) -> Result<Box<dyn Constraint>, String> {
        let settings = self.grammars.settings();
        let state = match &self.compiled {
            Some(compiled) => {
                let mut parser = compiled.begin(self.grammars.pool()).map_err(|full| full.to_string())?;
                let mask = parser.apply_checks(compiled.first_mask.clone(), compiled, self.grammars.pool());
                MaskState::Ready { parser: Box::new(parser), mask: mask.map_err(|unfit| unfit.to_string())? }
            }
            None => MaskState::Unconstrained,
        };
        Ok(Box::new(GrammarState {
            grammars: Arc::clone(&self.grammars),
            compiled: self.compiled.clone(),
            state,
            reasoning: self.reasoning.clone(),
            reasoning_mask: SimpleVob::alloc(settings.vocab),
        }))
    }

    fn bytes_max(&self, max_tokens: u32) -> u64 {
        let masks = 2 * self.grammars.settings().vocab as u64 / 8;
        STATE_BYTES_FIXED + masks + STATE_BYTES_PER_TOKEN * u64::from(max_tokens)
    }
}

/// The grammar state of one output.
struct GrammarState {
    grammars: Arc<Grammars>,
    compiled: Option<Arc<CompiledGrammar>>,
    state: MaskState,
    reasoning: Option<ReasoningState>,
    /// The mask while the output is in its reasoning.
    reasoning_mask: SimpleVob,
}

enum MaskState {
    /// No grammar: all tokens are allowed.
    Unconstrained,
    Ready {
        parser: Box<ParserState>,
        mask: SimpleVob,
    },
    /// A slow grammar needs its next mask. Computing it locks the automaton that all outputs of the grammar share. So
    /// it starts after all of them have accepted their token.
    NeedsMask(Box<ParserState>),
    /// The mask is being computed.
    Computing(PendingMask),
    /// No token can follow, for this reason.
    Failed(Unfit),
    /// The output is complete.
    Complete,
}

impl MaskState {
    /// Takes the state out. The caller must set a new one.
    fn take(&mut self) -> MaskState {
        std::mem::replace(self, MaskState::Failed(Unfit::Grammar(String::new())))
    }
}

type MaskResult = Result<(Box<ParserState>, SimpleVob), Unfit>;

/// A requested mask. On drop, its job leaves the queue unless it has started.
struct PendingMask {
    reply: Receiver<MaskResult>,
    _job: QueuedJob<Work>,
}

/// A mask to compute.
struct MaskJob {
    parser: Box<ParserState>,
    count: PendingCount,
    grammars: Arc<Grammars>,
    reply: SyncSender<MaskResult>,
}

/// Counts as one pending mask of its grammar.
struct PendingCount(Arc<CompiledGrammar>);

impl PendingCount {
    fn new(compiled: &Arc<CompiledGrammar>) -> Self {
        compiled.pending_masks.fetch_add(1, AcqRel);
        Self(Arc::clone(compiled))
    }
}

impl Drop for PendingCount {
    fn drop(&mut self) {
        self.0.pending_masks.fetch_sub(1, AcqRel);
    }
}

impl MaskJob {
    fn run(self) {
        let Self { mut parser, count, grammars, reply } = self;
        let began = Instant::now();
        let mask = count.0.depth.run(|| parser.mask(&count.0, grammars.pool()));
        if began.elapsed() > SLOW_MASK_TIME {
            count.0.slow.store(true, Relaxed);
        }
        let done = match mask {
            Some(mask) => mask.map(|mask| (parser, mask)),
            None => Err(Unfit::Memory("the system has no thread for the grammar; try again later".into())),
        };
        count.0.masks_computed.fetch_add(1, Relaxed);
        // Before the reply: its receiver expects the automaton to be unlocked.
        drop(count);
        // The request may have ended meanwhile.
        let _ = reply.send(done);
    }
}

impl GrammarState {
    /// The grammar's mask; waits for it. `None` if all tokens are allowed.
    fn wait_for_grammar_mask(&mut self) -> Result<Option<&SimpleVob>, Unfit> {
        self.start_mask();
        self.wait_for_mask(Duration::MAX);
        match &self.state {
            MaskState::Ready { mask, .. } => Ok(Some(mask)),
            MaskState::Unconstrained => Ok(None),
            MaskState::Failed(why) => Err(why.clone()),
            MaskState::Complete => Err(Unfit::Grammar("the output is already complete".into())),
            MaskState::NeedsMask(_) | MaskState::Computing(_) => unreachable!("waiting ends with a mask or an error"),
        }
    }

    /// Requests the next mask if it is needed and not requested yet.
    fn start_mask(&mut self) {
        let Some(compiled) = &self.compiled else { return };
        self.state = match self.state.take() {
            MaskState::NeedsMask(parser) => {
                let (reply, done) = sync_channel(1);
                let job =
                    MaskJob { parser, count: PendingCount::new(compiled), grammars: Arc::clone(&self.grammars), reply };
                // If the thread has ended, the reply channel closes, and waiting for the mask fails.
                let queued = compiled.jobs[usize::from(compiled.slow.load(Relaxed))].push(Box::new(|| job.run()));
                MaskState::Computing(PendingMask { reply: done, _job: queued })
            }
            state => state,
        };
    }

    /// Waits at most `patience` for a requested mask. True if no mask is outstanding.
    fn wait_for_mask(&mut self, patience: Duration) -> bool {
        let MaskState::Computing(pending) = &self.state else { return true };
        self.state = match pending.reply.recv_timeout(patience) {
            Ok(Ok((parser, mask))) => MaskState::Ready { parser, mask },
            Ok(Err(unfit)) => MaskState::Failed(unfit),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => {
                MaskState::Failed(Unfit::Grammar("the grammar thread has ended".into()))
            }
        };
        true
    }

    /// Advances the grammar by a token.
    fn advance(&mut self, token: u32) -> Result<(), Unfit> {
        self.wait_for_grammar_mask()?;
        let Some(compiled) = &self.compiled else { return Ok(()) };
        self.state = match self.state.take() {
            MaskState::Ready { mut parser, .. } => match parser.accept(token, compiled, self.grammars.pool()) {
                Ok(true) => MaskState::Complete,
                Ok(false) => MaskState::NeedsMask(parser),
                Err(unfit) => MaskState::Failed(unfit),
            },
            state => state,
        };
        let slow = compiled.slow.load(Relaxed);
        match &self.state {
            MaskState::Failed(unfit) => return Err(unfit.clone()),
            MaskState::NeedsMask(_) if !slow => self.start_mask(),
            _ => {}
        }
        Ok(())
    }
}

impl Constraint for GrammarState {
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit> {
        let next = self.reasoning.as_ref().map_or(NextTokens::Constrained, ReasoningState::next);
        match next {
            NextTokens::Constrained => {}
            NextTokens::Only(id) => {
                self.reasoning_mask.set_all(false);
                self.reasoning_mask.allow_token(id);
                return Ok(Some(self.reasoning_mask.as_slice()));
            }
            NextTokens::Any => {
                self.reasoning_mask.set_all(true);
                if self.compiled.is_some() {
                    // The output must not end before its structured part.
                    for end in &self.grammars.settings().ends {
                        self.reasoning_mask.disallow_token(*end);
                    }
                }
                return Ok(Some(self.reasoning_mask.as_slice()));
            }
            NextTokens::ConstrainedOr(id) => {
                // The parser's masks have one bit more than ours. So a mask is replaced, and never copied into the
                // other kind.
                let Some(mut mask) = self.wait_for_grammar_mask()?.cloned() else { return Ok(None) };
                mask.allow_token(id);
                self.reasoning_mask = mask;
                return Ok(Some(self.reasoning_mask.as_slice()));
            }
        }
        Ok(self.wait_for_grammar_mask()?.map(SimpleVob::as_slice))
    }

    fn mask_ready(&mut self, patience: Duration) -> bool {
        let Some(compiled) = self.compiled.clone().filter(|compiled| compiled.slow.load(Relaxed)) else { return true };
        self.start_mask();
        if !self.wait_for_mask(patience) {
            return false;
        }
        if compiled.pending_masks.load(Acquire) > 0 {
            std::thread::sleep(patience);
        }
        compiled.pending_masks.load(Acquire) == 0
    }

    fn moved(&self) -> u64 {
        self.compiled.as_ref().map_or(0, |compiled| compiled.masks_computed.load(Relaxed))
    }

    fn accept(&mut self, token: u32) -> Result<(), Unfit> {
        let ours = self.reasoning.as_mut().is_none_or(|reasoning| reasoning.accept(token));
        if ours { self.advance(token) } else { Ok(()) }
    }

    fn complete(&self) -> bool {
        matches!(self.state, MaskState::Complete)
    }
}
