//! A compiled form, and what its outputs share of it.
//!
//! llguidance builds a form's automaton while it is walked, one for all who walk it. One that has too many states fails from then on, for all
//! of them. That nobody's output depends on who else walks: what fails is done again by a walk that is taken, token by token, from a
//! fresh automaton of its own, and ends only if it fails there. An automaton that has half its states is not for new outputs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use plimsoll_engine::constraint::Unfit;

use crate::budget::Share;
use crate::cache::{GrammarError, Grammars, reason};
use crate::depth::Depth;
use crate::guide::Job;

/// States of one automaton. Each takes one to two kilobytes.
pub(crate) const STATES_MAX: usize = 8_000;

/// A compiled form.
pub(crate) struct Compiled {
    /// As it was compiled: nobody walks it.
    fresh: Mutex<TokenParser>,
    fresh_bytes: u64,
    /// Where outputs begin: before the first token, with the automaton they share. None while there is no room for one.
    current: Mutex<Option<(TokenParser, Arc<Automaton>)>>,
    pub first_mask: SimpleVob,
    /// The thread that computes masks, and the one for forms whose masks take long.
    pub jobs: [Sender<Job>; 2],
    /// This one's do.
    pub slow: AtomicBool,
    /// Masks of it that have been asked for and not been computed yet.
    pub under_way: AtomicUsize,
    pub depth: Depth,
    _share: Share,
}

/// An automaton: its bytes, and whether it is used up.
struct Automaton {
    share: Mutex<Share>,
    worn: AtomicBool,
}

impl Automaton {
    fn new(share: Share) -> Arc<Self> {
        Arc::new(Self { share: Mutex::new(share), worn: AtomicBool::new(false) })
    }
}

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
    pub fn compiled(self, [own, first]: [Share; 2], jobs: [Sender<Job>; 2], depth: Depth) -> Compiled {
        Compiled {
            fresh_bytes: self.bytes()[0],
            fresh: Mutex::new(self.fresh),
            current: Mutex::new(Some((self.parser, Automaton::new(first)))),
            first_mask: self.mask,
            jobs,
            slow: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
            depth,
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
    pub fn begin(&self, grammars: &Grammars) -> Result<Path, GrammarError> {
        let mut current = held(&self.current);
        // One that is used up goes, with the last of those who walk it, before there is another.
        let (parser, automaton) = match current.take().filter(|(_, automaton)| !automaton.worn.load(Relaxed)) {
            Some(current) => current,
            None => self.anew(grammars)?,
        };
        let path = Path { parser: parser.clone(), automaton: Arc::clone(&automaton), taken: Vec::new() };
        *current = Some((parser, automaton));
        Ok(path)
    }

    fn anew(&self, grammars: &Grammars) -> Result<(TokenParser, Arc<Automaton>), GrammarError> {
        let share = grammars.room(self.fresh_bytes)?;
        Ok((held(&self.fresh).deep_clone(), Automaton::new(share)))
    }
}

/// One output's way through a form.
pub(crate) struct Path {
    parser: TokenParser,
    automaton: Arc<Automaton>,
    /// Its tokens.
    taken: Vec<u32>,
}

impl Path {
    /// What may come next.
    pub fn mask(&mut self, compiled: &Compiled, grammars: &Grammars) -> Result<SimpleVob, Unfit> {
        let (mask, grown) = self.follow(compiled, grammars, |parser| parser.compute_mask())?;
        let fits = grammars.grow(&mut held(&self.automaton.share), grown.bytes);
        if !fits || grown.states >= STATES_MAX / 2 {
            self.automaton.worn.store(true, Relaxed);
        }
        if fits { Ok(mask) } else { Err(Unfit::Room(GrammarError::Full(grammars.usage().limit).to_string())) }
    }

    /// Takes a token. Says whether nothing may follow it.
    pub fn take(&mut self, token: u32, compiled: &Compiled, grammars: &Grammars) -> Result<bool, Unfit> {
        let (ends, _) = self.follow(compiled, grammars, |parser| {
            parser.consume_token(token)?;
            Ok(parser.check_stop()? || parser.stop_reason() != StopReason::NotStopped)
        })?;
        self.taken.push(token);
        Ok(ends)
    }

    /// Takes a step with the automaton that it has or, where that fails, the whole way with a fresh one of its own.
    fn follow<T>(
        &mut self,
        compiled: &Compiled,
        grammars: &Grammars,
        step: impl Fn(&mut TokenParser) -> anyhow::Result<T>,
    ) -> Result<(T, Grown), Unfit> {
        if let Ok(done) = attempt(&mut self.parser, &step) {
            return Ok(done);
        }
        self.automaton.worn.store(true, Relaxed);
        (self.parser, self.automaton) = compiled.anew(grammars).map_err(|full| Unfit::Room(full.to_string()))?;
        let taken = &self.taken;
        let way = |parser: &mut TokenParser| {
            taken.iter().try_for_each(|token| parser.consume_token(*token).map(drop))?;
            step(parser)
        };
        attempt(&mut self.parser, way).map_err(Unfit::Form)
    }
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
