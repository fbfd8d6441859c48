//! A compiled form, and what its outputs share of it.
//!
//! llguidance builds a form's automaton while it is walked, one for all who walk it. One that has too many states fails from then on, for all
//! of them. That nobody's output depends on who else walks: what fails is done again by a walk that is taken, token by token, from a
//! fresh automaton of its own, and ends only if it fails there. An automaton that has half its states is not for new outputs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use plimsoll_engine::constraint::Unfit;

use crate::budget::Share;
use crate::checks::{Layout, Reading};
use crate::depth::Depth;
use crate::error::GrammarError;
use crate::jobs::{Desk, Work};
use crate::library::{STATES_MAX, reason};
use crate::pool;
use crate::settings::Settings;

/// Of the 200,000 units that llguidance lets a step cost, those after which a way that is gone again asks for more.
const REFUEL: usize = 50_000;

/// The model has written itself into a corner that its schema does not allow.
const NOTHING_FITS: &str =
    "nothing can follow here that the schema allows; a simpler schema, or a larger model, may help";

/// How often it is looked behind a token before one mask is given. Each look costs a mask.
const LOOKS_MAX: usize = 48;

/// Tokens that are looked ahead.
const LOOK_AHEAD: usize = 5;

/// So many allowed tokens are few.
const FEW: usize = 8;

/// The tokens of a mask; none where they are not few.
fn few(mask: &SimpleVob) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for (at, word) in mask.as_slice().iter().enumerate() {
        let mut word = *word;
        while word != 0 {
            if all.len() == FEW {
                return None;
            }
            all.push(at as u32 * 32 + word.trailing_zeros());
            word &= word - 1;
        }
    }
    Some(all)
}

/// A compiled form.
pub(crate) struct Compiled {
    /// As it was compiled: nobody walks it.
    fresh: Mutex<TokenParser>,
    fresh_bytes: u64,
    /// Where outputs begin: before the first token, with the automaton they share. None while there is no room for one.
    current: Mutex<Option<(TokenParser, Arc<Automaton>)>>,
    pub first_mask: SimpleVob,
    /// The thread that computes masks, and the one for forms whose masks take long.
    pub jobs: [Arc<Desk<Work>>; 2],
    /// This one's do.
    pub slow: AtomicBool,
    /// Masks of it that have been asked for and not been computed yet.
    pub under_way: AtomicUsize,
    /// Masks of it that have been computed.
    pub computed: AtomicU64,
    pub depth: Depth,
    /// Where its documents stand and what they must satisfy.
    pub layout: Option<Layout>,
    _share: Share,
}

/// What all compiled forms share.
pub(crate) type Pool = pool::Pool<Compiled>;

/// An automaton, as far as it is not llguidance's: its share of the budget.
type Automaton = Mutex<Share>;

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half done under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an automaton has grown to.
struct Grown {
    states: usize,
    bytes: u64,
}

/// The automaton of a parser; an error when it is broken.
fn grown(parser: &TokenParser) -> anyhow::Result<Grown> {
    let stats = parser.parser.lexer_stats();
    anyhow::ensure!(!stats.error, "LexerTooComplex");
    Ok(Grown { states: stats.num_states, bytes: stats.num_bytes as u64 })
}

/// A parser before its first token, with its first mask, and what it was before that.
pub(crate) struct Start {
    fresh: TokenParser,
    parser: TokenParser,
    mask: SimpleVob,
}

impl Start {
    /// Computes the first mask.
    pub fn new(mut parser: TokenParser) -> anyhow::Result<Self> {
        parser.start_without_prompt();
        let fresh = parser.deep_clone();
        let mask = parser.compute_mask()?;
        Ok(Self { fresh, parser, mask })
    }

    /// Whether anything may come at all.
    pub fn allows_nothing(&self) -> bool {
        self.mask.is_zero()
    }

    /// Bytes of the automaton that nobody walks, and of the one that outputs begin with.
    pub fn bytes(&self) -> [u64; 2] {
        [&self.fresh, &self.parser].map(|parser| parser.parser.lexer_stats().num_bytes as u64)
    }

    /// The form, with the room for what it takes itself and for its first automaton.
    pub fn compiled(
        self,
        [own, first]: [Share; 2],
        jobs: [Arc<Desk<Work>>; 2],
        depth: Depth,
        layout: Option<Layout>,
    ) -> Compiled {
        Compiled {
            fresh_bytes: self.bytes()[0],
            fresh: Mutex::new(self.fresh),
            current: Mutex::new(Some((self.parser, Arc::new(Mutex::new(first))))),
            first_mask: self.mask,
            jobs,
            // What is validated while it is written waits for another process: outside of steps.
            slow: AtomicBool::new(layout.as_ref().is_some_and(Layout::is_validated_on_the_way)),
            under_way: AtomicUsize::new(0),
            computed: AtomicU64::new(0),
            depth,
            layout,
            _share: own,
        }
    }
}

impl Compiled {
    /// Begins an output.
    ///
    /// # Errors
    ///
    /// [`GrammarError::Full`] when it takes another automaton, for which there is no room.
    pub fn begin(&self, pool: &Pool) -> Result<Path, GrammarError> {
        let mut current = held(&self.current);
        let (parser, automaton) = match current.take() {
            Some(current) => current,
            None => self.anew(pool)?,
        };
        let reading = self.layout.as_ref().map(Reading::new);
        let path = Path { parser: parser.clone(), automaton: Arc::clone(&automaton), taken: Vec::new(), reading };
        *current = Some((parser, automaton));
        Ok(path)
    }

    /// Nobody begins with this automaton any more: it goes with the last of those who walk it.
    fn retire(&self, automaton: &Arc<Automaton>) {
        let mut current = held(&self.current);
        if current.as_ref().is_some_and(|(_, shared)| Arc::ptr_eq(shared, automaton)) {
            *current = None;
        }
    }

    fn anew(&self, pool: &Pool) -> Result<(TokenParser, Arc<Automaton>), GrammarError> {
        let share = pool.room(self.fresh_bytes)?;
        let mut parser = held(&self.fresh).deep_clone();
        // Sets the limits of a step; what fails here fails again for whoever walks on.
        let _ = attempt(&mut parser, TokenParser::compute_mask);
        Ok((parser, Arc::new(Mutex::new(share))))
    }
}

/// One output's way through a form.
pub(crate) struct Path {
    parser: TokenParser,
    automaton: Arc<Automaton>,
    /// Its tokens.
    taken: Vec<u32>,
    /// Its text, as far as there are checks.
    reading: Option<Reading>,
}

impl Path {
    /// What may come next.
    pub fn mask(&mut self, compiled: &Compiled, pool: &Pool) -> Result<SimpleVob, Unfit> {
        let mask = self.follow(compiled, pool, TokenParser::compute_mask)?;
        self.checked(mask, compiled, pool)
    }

    /// The mask without what would break a check, or would lead to where nothing can follow.
    pub fn checked(&mut self, mut mask: SimpleVob, compiled: &Compiled, pool: &Pool) -> Result<SimpleVob, Unfit> {
        let mut doubtful = self.refine(&mut mask, compiled, pool)?;
        // Where few tokens are left, each may be the first of a way without an end.
        let layout = compiled.layout.as_ref();
        if self.reading.as_ref().zip(layout).is_some_and(|(reading, layout)| reading.may_get_stuck(layout)) {
            doubtful.extend(few(&mask).filter(|few| few.len() > 1).unwrap_or_default());
        }
        let mut left = LOOKS_MAX;
        for token in doubtful {
            if mask.is_allowed(token) && !self.leads_on(token, LOOK_AHEAD, &mut left, compiled, pool) {
                mask.disallow_token(token);
            }
        }
        if mask.is_zero() {
            return Err(pool.invalid(NOTHING_FITS.into()));
        }
        Ok(mask)
    }

    /// Whether a token is followed by something: looked so many tokens ahead, as long as few of them are possible, and `left` times at
    /// most. What is farther away is taken for something.
    fn leads_on(&self, token: u32, ahead: usize, left: &mut usize, compiled: &Compiled, pool: &Pool) -> bool {
        if *left == 0 || pool.settings().ends.contains(&token) {
            return true;
        }
        *left -= 1;
        let (parser, automaton) = (self.parser.clone(), Arc::clone(&self.automaton));
        let mut path = Self { parser, automaton, taken: self.taken.clone(), reading: self.reading.clone() };
        match path.take(token, compiled, pool) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(_) => return false,
        }
        let Ok(mut mask) = path.follow(compiled, pool, TokenParser::compute_mask) else { return false };
        if path.refine(&mut mask, compiled, pool).is_err() {
            return false;
        }
        match few(&mask) {
            Some(few) if ahead > 1 => {
                few.into_iter().any(|token| path.leads_on(token, ahead - 1, left, compiled, pool))
            }
            _ => !mask.is_zero(),
        }
    }

    /// Takes from the mask what would break a check. Returns the tokens that only the next mask can judge.
    fn refine(&mut self, mask: &mut SimpleVob, compiled: &Compiled, pool: &Pool) -> Result<Vec<u32>, Unfit> {
        let (Some(layout), Some(reading)) = (&compiled.layout, &mut self.reading) else { return Ok(Vec::new()) };
        let Settings { tokenizer, ends, spelled, .. } = pool.settings();
        // A marker in a document would be read as the end of reasoning, or as a call.
        if reading.is_in_document() {
            spelled.iter().for_each(|id| mask.disallow_token(*id));
        }
        let allowed = pool.structural().iter().copied().filter(|id| mask.is_allowed(*id));
        let mut tokens = allowed.map(|id| (id, tokenizer.token_bytes(id)));
        let end = ends.iter().any(|id| mask.is_allowed(*id));
        let validate = |schema: &str, documents: &[String]| pool.trials.validate(schema, documents);
        let away = reading.refine(layout, &mut tokens, end, &validate).map_err(|why| pool.invalid(why))?;
        away.tokens.iter().chain(ends.iter().filter(|_| away.ends)).for_each(|id| mask.disallow_token(*id));
        Ok(away.doubtful)
    }

    /// Takes a token. Says whether nothing may follow it.
    pub fn take(&mut self, token: u32, compiled: &Compiled, pool: &Pool) -> Result<bool, Unfit> {
        let ends = self.follow(compiled, pool, |parser| {
            parser.consume_token(token)?;
            Ok(parser.check_stop()? || parser.stop_reason() != StopReason::NotStopped)
        })?;
        self.taken.push(token);
        if let (Some(layout), Some(reading)) = (&compiled.layout, &mut self.reading) {
            reading.take(layout, pool.settings().tokenizer.token_bytes(token));
            if ends {
                let validate = |schema: &str, documents: &[String]| pool.trials.validate(schema, documents);
                reading.settle(layout, true, &validate).map_err(|why| pool.invalid(why))?;
            }
        }
        Ok(ends)
    }

    /// Takes a step with the automaton that it has or, where that fails, the whole way with a fresh one of its own.
    fn follow<T>(
        &mut self,
        compiled: &Compiled,
        pool: &Pool,
        step: impl Fn(&mut TokenParser) -> anyhow::Result<T>,
    ) -> Result<T, Unfit> {
        let (done, grown) = match attempt(&mut self.parser, &step) {
            Ok(done) => done,
            Err(_) => {
                compiled.retire(&self.automaton);
                (self.parser, self.automaton) = compiled.anew(pool).map_err(|full| Unfit::Memory(full.to_string()))?;
                let taken = &self.taken;
                attempt(&mut self.parser, |parser| again(parser, taken).and_then(|()| step(parser)))
                    .map_err(Unfit::Grammar)?
            }
        };
        let fits = pool.grow(&mut held(&self.automaton), grown.bytes);
        if !fits || grown.states >= STATES_MAX / 2 {
            compiled.retire(&self.automaton);
        }
        if fits { Ok(done) } else { Err(Unfit::Memory(GrammarError::Full(pool.budget.limit()).to_string())) }
    }
}

/// Goes the way that was gone, with as much effort as it had then: a mask sets what the tokens up to the next one may cost.
fn again(parser: &mut TokenParser, taken: &[u32]) -> anyhow::Result<()> {
    let spent = |parser: &TokenParser| parser.parser.lexer_stats().total_fuel_spent;
    let mut since = spent(parser);
    for token in taken {
        parser.consume_token(*token)?;
        if spent(parser) - since > REFUEL {
            parser.compute_mask()?;
            since = spent(parser);
        }
    }
    Ok(())
}

fn attempt<T>(
    parser: &mut TokenParser,
    step: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>,
) -> Result<(T, Grown), String> {
    let done = catch_unwind(AssertUnwindSafe(|| {
        let done = step(parser)?;
        // A step on a broken automaton may look like one that went well.
        Ok::<_, anyhow::Error>((done, grown(parser)?))
    }));
    match done {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(format!("the grammar could not be followed: {}", reason(&error.to_string()))),
        Err(_) => Err("the grammar's next tokens could not be computed".into()),
    }
}
