//! One request's way through a grammar: which tokens may come next, and whether anything may.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use llguidance::toktrie::SimpleVob;
use plimsoll_engine::constraint::{Constraint, Grammar, Unfit};

use crate::automaton::{Compiled, Path};
use crate::cache::Grammars;
use crate::error::GrammarError;
use crate::jobs::{Ticket, Work};
use crate::source::Source;
use crate::thinking::{Next, Reasoning, Thinking};
use crate::trial::Patience;

/// Bytes that walking a grammar takes: two masks, and what the parser keeps of each token.
const WALK_BYTES_FIXED: u64 = 16 << 10;
const WALK_BYTES_PER_TOKEN: u64 = 256;

/// A form of which a mask has taken longer is slow: its masks are computed on a thread for such, and waited for outside of steps. Those of
/// JSON take one to three milliseconds.
const SLOW: Duration = Duration::from_millis(20);

/// What a request's output must be: a grammar, reasoning before it, or both. Cheap to share among choices.
#[derive(Clone)]
pub struct Guide {
    grammars: Arc<Grammars>,
    compiled: Option<Arc<Compiled>>,
    reasoning: Option<Reasoning>,
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("grammar", &self.compiled.is_some()).field("reasoning", &self.reasoning).finish()
    }
}

impl Guide {
    /// Compiles `source`, which follows the fixed text `prefix`, or finds it in the cache. Not for an event loop.
    ///
    /// # Errors
    ///
    /// [`GrammarError::Invalid`] with the reason, [`GrammarError::Full`] when the budget is in use, [`GrammarError::NoThread`] when the
    /// system has none, [`GrammarError::Gone`] when the client has left.
    pub fn new(
        grammars: &Arc<Grammars>,
        source: Option<&Source>,
        prefix: &str,
        thinking: Option<Thinking>,
        patience: &Patience<'_>,
    ) -> Result<Self, GrammarError> {
        let compiled = source.map(|source| grammars.compiled(source, prefix, patience)).transpose()?;
        let reasoning = thinking.map(|rules| Reasoning::new(rules, &grammars.settings().tokenizer));
        Ok(Self { grammars: Arc::clone(grammars), compiled, reasoning })
    }
}

impl Grammar for Guide {
    fn begin(&self) -> Result<Box<dyn Constraint>, String> {
        let settings = self.grammars.settings();
        let state = match &self.compiled {
            Some(compiled) => {
                let mut path = compiled.begin(self.grammars.pool()).map_err(|full| full.to_string())?;
                let mask = path.checked(compiled.first_mask.clone(), compiled, self.grammars.pool());
                State::Ready { path: Box::new(path), mask: mask.map_err(|unfit| unfit.to_string())? }
            }
            None => State::Free,
        };
        Ok(Box::new(Walk {
            grammars: Arc::clone(&self.grammars),
            compiled: self.compiled.clone(),
            state,
            reasoning: self.reasoning.clone(),
            own: SimpleVob::alloc(settings.vocab),
        }))
    }

    fn bytes_max(&self, max_tokens: u32) -> u64 {
        let masks = 2 * self.grammars.settings().vocab as u64 / 8;
        WALK_BYTES_FIXED + masks + WALK_BYTES_PER_TOKEN * u64::from(max_tokens)
    }
}

/// A walk.
struct Walk {
    grammars: Arc<Grammars>,
    compiled: Option<Arc<Compiled>>,
    state: State,
    reasoning: Option<Reasoning>,
    /// A mask that reasoning ask for.
    own: SimpleVob,
}

enum State {
    /// No grammar: anything goes.
    Free,
    Ready {
        path: Box<Path>,
        mask: SimpleVob,
    },
    /// The next mask is to be computed, of a slow form: not before every output of this form has taken its token. They share an automaton,
    /// which is locked meanwhile.
    Due(Box<Path>),
    /// The mask is being computed.
    Away(Errand),
    /// Nothing may come any more, and why.
    Over(Unfit),
    /// The output is complete.
    Complete,
}

impl State {
    /// What there was. Whoever takes it puts something in its place.
    fn take(&mut self) -> State {
        std::mem::replace(self, State::Over(Unfit::Grammar(String::new())))
    }
}

type Done = Result<(Box<Path>, SimpleVob), Unfit>;

/// A mask that was asked for. When nobody waits for it any more, what has not been begun is not, and its path goes at once.
struct Errand {
    reply: Receiver<Done>,
    _ticket: Ticket<Work>,
}

/// A mask to compute.
struct Job {
    path: Box<Path>,
    of: UnderWay,
    grammars: Arc<Grammars>,
    reply: SyncSender<Done>,
}

/// A mask of a form that has been asked for and not been computed yet.
struct UnderWay(Arc<Compiled>);

impl UnderWay {
    fn new(compiled: &Arc<Compiled>) -> Self {
        compiled.under_way.fetch_add(1, AcqRel);
        Self(Arc::clone(compiled))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, AcqRel);
    }
}

impl Job {
    fn run(self) {
        let Self { mut path, of, grammars, reply } = self;
        let began = Instant::now();
        let mask = of.0.depth.follow(|| path.mask(&of.0, grammars.pool()));
        if began.elapsed() > SLOW {
            of.0.slow.store(true, Relaxed);
        }
        let done = match mask {
            Some(mask) => mask.map(|mask| (path, mask)),
            None => Err(Unfit::Memory("the system has no thread for the grammar; try again later".into())),
        };
        of.0.computed.fetch_add(1, Relaxed);
        // Who has it may go on: this form's automaton is free.
        drop(of);
        // A request that is gone needs no mask.
        let _ = reply.send(done);
    }
}

impl Walk {
    /// The grammar's mask, waiting for it if need be; none for anything.
    fn ready(&mut self) -> Result<Option<&SimpleVob>, Unfit> {
        self.ask();
        self.came(Duration::MAX);
        match &self.state {
            State::Ready { mask, .. } => Ok(Some(mask)),
            State::Free => Ok(None),
            State::Over(why) => Err(why.clone()),
            State::Complete => Err(Unfit::Grammar("the output is complete already".into())),
            State::Due(_) | State::Away(_) => unreachable!("it was asked for, and came"),
        }
    }

    /// Has a mask that is due computed.
    fn ask(&mut self) {
        let Some(compiled) = &self.compiled else { return };
        self.state = match self.state.take() {
            State::Due(path) => {
                let (reply, done) = sync_channel(1);
                let job = Job { path, of: UnderWay::new(compiled), grammars: Arc::clone(&self.grammars), reply };
                // Without its thread nobody answers, and that is noticed.
                let ticket = compiled.jobs[usize::from(compiled.slow.load(Relaxed))].hand_in(Box::new(|| job.run()));
                State::Away(Errand { reply: done, _ticket: ticket })
            }
            state => state,
        };
    }

    /// Waits for a mask that is being computed, for so long at most. Says whether none is, now.
    fn came(&mut self, patience: Duration) -> bool {
        let State::Away(errand) = &self.state else { return true };
        self.state = match errand.reply.recv_timeout(patience) {
            Ok(Ok((path, mask))) => State::Ready { path, mask },
            Ok(Err(unfit)) => State::Over(unfit),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => State::Over(Unfit::Grammar("the grammar thread has ended".into())),
        };
        true
    }

    /// Takes a token of the grammar's.
    fn advance(&mut self, token: u32) -> Result<(), Unfit> {
        self.ready()?;
        let Some(compiled) = &self.compiled else { return Ok(()) };
        self.state = match self.state.take() {
            State::Ready { mut path, .. } => match path.take(token, compiled, self.grammars.pool()) {
                Ok(true) => State::Complete,
                Ok(false) => State::Due(path),
                Err(unfit) => State::Over(unfit),
            },
            state => state,
        };
        let slow = compiled.slow.load(Relaxed);
        match &self.state {
            State::Over(unfit) => return Err(unfit.clone()),
            State::Due(_) if !slow => self.ask(),
            _ => {}
        }
        Ok(())
    }
}

impl Constraint for Walk {
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit> {
        let next = self.reasoning.as_ref().map_or(Next::Constrained, Reasoning::next);
        match next {
            Next::Constrained => {}
            Next::Only(id) => {
                self.own.set_all(false);
                self.own.allow_token(id);
                return Ok(Some(self.own.as_slice()));
            }
            Next::Any => {
                self.own.set_all(true);
                if self.compiled.is_some() {
                    // What must have a form must not end before it has begun.
                    for end in &self.grammars.settings().ends {
                        self.own.disallow_token(*end);
                    }
                }
                return Ok(Some(self.own.as_slice()));
            }
            Next::Or(id) => {
                // The parser's masks have room for one token more than ours: nothing is copied from one into the other.
                let Some(mut mask) = self.ready()?.cloned() else { return Ok(None) };
                mask.allow_token(id);
                self.own = mask;
                return Ok(Some(self.own.as_slice()));
            }
        }
        Ok(self.ready()?.map(SimpleVob::as_slice))
    }

    fn mask_ready(&mut self, patience: Duration) -> bool {
        let Some(compiled) = self.compiled.clone().filter(|compiled| compiled.slow.load(Relaxed)) else { return true };
        self.ask();
        if !self.came(patience) {
            return false;
        }
        if compiled.under_way.load(Acquire) > 0 {
            std::thread::sleep(patience);
        }
        compiled.under_way.load(Acquire) == 0
    }

    fn moved(&self) -> u64 {
        self.compiled.as_ref().map_or(0, |compiled| compiled.computed.load(Relaxed))
    }

    fn accept(&mut self, token: u32) -> Result<(), Unfit> {
        let ours = self.reasoning.as_mut().is_none_or(|reasoning| reasoning.take(token));
        if ours { self.advance(token) } else { Ok(()) }
    }

    fn complete(&self) -> bool {
        matches!(self.state, State::Complete)
    }
}
