//! A compiled grammar, and the automaton that its outputs share.
//!
//! llguidance extends a grammar's automaton while outputs advance. All outputs of a grammar share one automaton. When
//! it has too many states, it fails for all of them.
//!
//! The tokens an output may use do not depend on other outputs. If a step fails, the output gets a new automaton, and
//! its tokens are replayed there. The output ends only if the step fails again. An automaton with half of its allowed
//! states takes no new outputs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use plimsoll_engine::constraint::Unfit;

use crate::budget::Reservation;
use crate::checks::{DocumentTracker, Layout};
use crate::depth::Depth;
use crate::error::GrammarError;
use crate::job_queue::{JobQueue, Work};
use crate::library::{STATES_MAX, plain_message};
use crate::pool;
use crate::settings::Settings;

/// Fuel after which a replay computes a mask. A mask resets llguidance's limit of 200,000 per step.
const REPLAY_FUEL: usize = 50_000;

/// The error of an output that reaches a point where no token satisfies its schema.
const NO_VALID_TOKEN: &str = "the schema allows no token here; use a simpler schema or a larger model";

/// Most look-aheads for one mask. Each computes a mask.
const LOOK_AHEADS_MAX: usize = 48;

/// Most tokens that one look-ahead goes forward.
const LOOK_AHEAD_TOKENS: usize = 5;

/// Masks with at most this many tokens have every token tested.
const FEW_TOKENS: usize = 8;

/// The tokens of a mask; `None` if there are more than [`FEW_TOKENS`].
fn few_allowed(mask: &SimpleVob) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for (at, word) in mask.as_slice().iter().enumerate() {
        let mut word = *word;
        while word != 0 {
            if all.len() == FEW_TOKENS {
                return None;
            }
            all.push(at as u32 * 32 + word.trailing_zeros());
            word &= word - 1;
        }
    }
    Some(all)
}

/// A compiled grammar.
pub(crate) struct CompiledGrammar {
    /// The parser as compiled. It never advances: new automata are cloned from it.
    fresh: Mutex<TokenParser>,
    fresh_bytes: u64,
    /// The parser before the first token, with the automaton that new outputs share. `None` after that automaton was
    /// retired.
    current: Mutex<Option<(TokenParser, Arc<Automaton>)>>,
    pub first_mask: SimpleVob,
    /// The threads that compute masks: one for most grammars, one for grammars with slow masks.
    pub jobs: [Arc<JobQueue<Work>>; 2],
    /// Masks of this grammar are slow.
    pub slow: AtomicBool,
    /// Masks that were requested and are not computed yet.
    pub pending_masks: AtomicUsize,
    /// Masks computed so far.
    pub masks_computed: AtomicU64,
    pub depth: Depth,
    /// Positions of the JSON documents in an output, and their schemas.
    pub layout: Option<Layout>,
    _reservation: Reservation,
}

/// Settings, budget and cache of all compiled grammars.
pub(crate) type Pool = pool::Pool<CompiledGrammar>;

/// The budget bytes of an automaton. The automaton itself belongs to llguidance.
type Automaton = Mutex<Reservation>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under these locks leaves no partial update.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The size of an automaton.
struct AutomatonSize {
    states: usize,
    bytes: u64,
}

/// The size of a parser's automaton; an error if the automaton has failed.
fn automaton_size(parser: &TokenParser) -> anyhow::Result<AutomatonSize> {
    let stats = parser.parser.lexer_stats();
    anyhow::ensure!(!stats.error, "LexerTooComplex");
    Ok(AutomatonSize { states: stats.num_states, bytes: stats.num_bytes as u64 })
}

/// A parser before its first token, with its first mask. `fresh` is the parser before that mask.
pub(crate) struct InitialParser {
    fresh: TokenParser,
    parser: TokenParser,
    mask: SimpleVob,
}

impl InitialParser {
    /// Computes the first mask.
    pub fn new(mut parser: TokenParser) -> anyhow::Result<Self> {
        parser.start_without_prompt();
        let fresh = parser.deep_clone();
        let mask = parser.compute_mask()?;
        Ok(Self { fresh, parser, mask })
    }

    /// Whether the grammar allows no output at all.
    pub fn allows_nothing(&self) -> bool {
        self.mask.is_zero()
    }

    /// Bytes of the automaton as compiled, and of the automaton that outputs start with.
    pub fn bytes(&self) -> [u64; 2] {
        [&self.fresh, &self.parser].map(|parser| parser.parser.lexer_stats().num_bytes as u64)
    }

    /// The compiled grammar. The reservations are for its fixed bytes and for its first automaton.
    pub fn into_grammar(
        self,
        [own, first]: [Reservation; 2],
        jobs: [Arc<JobQueue<Work>>; 2],
        depth: Depth,
        layout: Option<Layout>,
    ) -> CompiledGrammar {
        CompiledGrammar {
            fresh_bytes: self.bytes()[0],
            fresh: Mutex::new(self.fresh),
            current: Mutex::new(Some((self.parser, Arc::new(Mutex::new(first))))),
            first_mask: self.mask,
            jobs,
            // Validation of incomplete documents waits for another process, so the masks are computed outside of steps.
            slow: AtomicBool::new(layout.as_ref().is_some_and(Layout::validates_incrementally)),
            pending_masks: AtomicUsize::new(0),
            masks_computed: AtomicU64::new(0),
            depth,
            layout,
            _reservation: own,
        }
    }
}

impl CompiledGrammar {
    /// Begins an output.
    ///
    /// # Errors
    ///
    /// [`GrammarError::Full`] if a new automaton is needed and the budget has no bytes left.
    pub fn begin(&self, pool: &Pool) -> Result<ParserState, GrammarError> {
        let mut current = lock(&self.current);
        let (parser, automaton) = match current.take() {
            Some(current) => current,
            None => self.new_automaton(pool)?,
        };
        let tracker = self.layout.as_ref().map(DocumentTracker::new);
        let state =
            ParserState { parser: parser.clone(), automaton: Arc::clone(&automaton), tokens: Vec::new(), tracker };
        *current = Some((parser, automaton));
        Ok(state)
    }

    /// Starts no more outputs on this automaton. The last output that uses it drops it.
    fn retire(&self, automaton: &Arc<Automaton>) {
        let mut current = lock(&self.current);
        if current.as_ref().is_some_and(|(_, shared)| Arc::ptr_eq(shared, automaton)) {
            *current = None;
        }
    }

    fn new_automaton(&self, pool: &Pool) -> Result<(TokenParser, Arc<Automaton>), GrammarError> {
        let reservation = pool.reserve(self.fresh_bytes)?;
        let mut parser = lock(&self.fresh).deep_clone();
        // A mask sets the limits of the next step. The next step reports this error again.
        let _ = try_step(&mut parser, TokenParser::compute_mask);
        Ok((parser, Arc::new(Mutex::new(reservation))))
    }
}

/// The parser of one output.
pub(crate) struct ParserState {
    parser: TokenParser,
    automaton: Arc<Automaton>,
    /// Tokens accepted so far.
    tokens: Vec<u32>,
    /// The JSON documents in the text so far. `None` if the grammar has no checks.
    tracker: Option<DocumentTracker>,
}

impl ParserState {
    /// The mask of the next token.
    pub fn mask(&mut self, compiled: &CompiledGrammar, pool: &Pool) -> Result<SimpleVob, Unfit> {
        let mask = self.step_or_replay(compiled, pool, TokenParser::compute_mask)?;
        self.apply_checks(mask, compiled, pool)
    }

    /// Removes tokens that break a check, or that lead to a point without a valid token.
    pub fn apply_checks(
        &mut self,
        mut mask: SimpleVob,
        compiled: &CompiledGrammar,
        pool: &Pool,
    ) -> Result<SimpleVob, Unfit> {
        let mut uncertain = self.remove_rejected(&mut mask, compiled, pool)?;
        // With few tokens left, each of them may lead to such a point.
        let layout = compiled.layout.as_ref();
        if self.tracker.as_ref().zip(layout).is_some_and(|(tracker, layout)| tracker.may_reject_all(layout)) {
            uncertain.extend(few_allowed(&mask).filter(|few| few.len() > 1).unwrap_or_default());
        }
        let mut left = LOOK_AHEADS_MAX;
        for token in uncertain {
            if mask.is_allowed(token) && !self.can_continue(token, LOOK_AHEAD_TOKENS, &mut left, compiled, pool) {
                mask.disallow_token(token);
            }
        }
        if mask.is_zero() {
            return Err(pool.invalid_answer(NO_VALID_TOKEN.into()));
        }
        Ok(mask)
    }

    /// Whether the output can continue after a token. Looks `ahead` tokens forward while few tokens are possible, with
    /// at most `left` look-aheads. Beyond these limits the answer is yes.
    fn can_continue(
        &self,
        token: u32,
        ahead: usize,
        left: &mut usize,
        compiled: &CompiledGrammar,
        pool: &Pool,
    ) -> bool {
        if *left == 0 || pool.settings().ends.contains(&token) {
            return true;
        }
        *left -= 1;
        let (parser, automaton) = (self.parser.clone(), Arc::clone(&self.automaton));
        let mut ahead_state = Self { parser, automaton, tokens: self.tokens.clone(), tracker: self.tracker.clone() };
        match ahead_state.accept(token, compiled, pool) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(_) => return false,
        }
        let Ok(mut mask) = ahead_state.step_or_replay(compiled, pool, TokenParser::compute_mask) else { return false };
        if ahead_state.remove_rejected(&mut mask, compiled, pool).is_err() {
            return false;
        }
        match few_allowed(&mask) {
            Some(few) if ahead > 1 => {
                few.into_iter().any(|token| ahead_state.can_continue(token, ahead - 1, left, compiled, pool))
            }
            _ => !mask.is_zero(),
        }
    }

    /// Removes tokens that break a check. Returns the tokens that only a look-ahead can judge.
    fn remove_rejected(
        &mut self,
        mask: &mut SimpleVob,
        compiled: &CompiledGrammar,
        pool: &Pool,
    ) -> Result<Vec<u32>, Unfit> {
        let (Some(layout), Some(tracker)) = (&compiled.layout, &mut self.tracker) else { return Ok(Vec::new()) };
        let Settings { tokenizer, ends, spelled, .. } = pool.settings();
        // Reply parsers read a marker inside a document as the end of reasoning, or as a call.
        if tracker.is_in_document() {
            spelled.iter().for_each(|id| mask.disallow_token(*id));
        }
        let allowed = pool.value_end_tokens().iter().copied().filter(|id| mask.is_allowed(*id));
        let mut tokens = allowed.map(|id| (id, tokenizer.token_bytes(id)));
        let end = ends.iter().any(|id| mask.is_allowed(*id));
        let validate = |schema: &str, documents: &[String]| pool.sandboxes.validate(schema, documents);
        let rejected = tracker.rejected(layout, &mut tokens, end, &validate).map_err(|why| pool.invalid_answer(why))?;
        rejected.tokens.iter().chain(ends.iter().filter(|_| rejected.ends)).for_each(|id| mask.disallow_token(*id));
        Ok(rejected.uncertain)
    }

    /// Accepts a token. True if no token can follow.
    pub fn accept(&mut self, token: u32, compiled: &CompiledGrammar, pool: &Pool) -> Result<bool, Unfit> {
        let ends = self.step_or_replay(compiled, pool, |parser| {
            parser.consume_token(token)?;
            Ok(parser.check_stop()? || parser.stop_reason() != StopReason::NotStopped)
        })?;
        self.tokens.push(token);
        if let (Some(layout), Some(tracker)) = (&compiled.layout, &mut self.tracker) {
            tracker.push(layout, pool.settings().tokenizer.token_bytes(token));
            if ends {
                let validate = |schema: &str, documents: &[String]| pool.sandboxes.validate(schema, documents);
                tracker.validate_ended(layout, true, &validate).map_err(|why| pool.invalid_answer(why))?;
            }
        }
        Ok(ends)
    }

    /// Runs a step on the current automaton. If it fails, replays the output on a new automaton and runs the step
    /// there.
    fn step_or_replay<T>(
        &mut self,
        compiled: &CompiledGrammar,
        pool: &Pool,
        step: impl Fn(&mut TokenParser) -> anyhow::Result<T>,
    ) -> Result<T, Unfit> {
        let (done, size) = match try_step(&mut self.parser, &step) {
            Ok(done) => done,
            Err(_) => {
                compiled.retire(&self.automaton);
                (self.parser, self.automaton) =
                    compiled.new_automaton(pool).map_err(|full| Unfit::Memory(full.to_string()))?;
                let tokens = &self.tokens;
                try_step(&mut self.parser, |parser| replay_tokens(parser, tokens).and_then(|()| step(parser)))
                    .map_err(Unfit::Grammar)?
            }
        };
        let fits = pool.grow(&mut lock(&self.automaton), size.bytes);
        if !fits || size.states >= STATES_MAX / 2 {
            compiled.retire(&self.automaton);
        }
        if fits { Ok(done) } else { Err(Unfit::Memory(GrammarError::Full(pool.budget.limit()).to_string())) }
    }
}

/// Replays tokens on a new parser. Each mask resets the limit for the tokens after it, so a replay computes masks too.
fn replay_tokens(parser: &mut TokenParser, tokens: &[u32]) -> anyhow::Result<()> {
    let spent = |parser: &TokenParser| parser.parser.lexer_stats().total_fuel_spent;
    let mut since = spent(parser);
    for token in tokens {
        parser.consume_token(*token)?;
        if spent(parser) - since > REPLAY_FUEL {
            parser.compute_mask()?;
            since = spent(parser);
        }
    }
    Ok(())
}

fn try_step<T>(
    parser: &mut TokenParser,
    step: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>,
) -> Result<(T, AutomatonSize), String> {
    let done = catch_unwind(AssertUnwindSafe(|| {
        let done = step(parser)?;
        // A step on a failed automaton may return without an error.
        Ok::<_, anyhow::Error>((done, automaton_size(parser)?))
    }));
    match done {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(format!("the grammar cannot continue: {}", plain_message(&error.to_string()))),
        Err(_) => Err("the library failed to compute the next tokens".into()),
    }
}
