//! One request's way through a grammar: which tokens may come next, and whether anything may.

use std::borrow::Cow;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use plimsoll_engine::constraint::{Constraint, Grammar};

use crate::cache::{Compiled, GrammarError, Grammars, reason};
use crate::source::Source;
use crate::thinking::{Next, Thinking, Thoughts};

/// Bytes that walking a grammar takes: two masks, and what the parser keeps of each token.
const WALK_BYTES_FIXED: u64 = 16 << 10;
const WALK_BYTES_PER_TOKEN: u64 = 256;

/// A form of which a mask has taken longer is slow: its masks are computed on a thread for such, and waited for outside of steps. Those of
/// JSON take one to three milliseconds.
const SLOW: Duration = Duration::from_millis(20);

/// What a request's output must be: a grammar, thoughts before it, or both. Cheap to share among choices.
#[derive(Clone)]
pub struct Guide {
    grammars: Arc<Grammars>,
    compiled: Option<Arc<Compiled>>,
    thoughts: Option<Thoughts>,
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("grammar", &self.compiled.is_some()).field("thoughts", &self.thoughts).finish()
    }
}

impl Guide {
    /// Compiles `source`, which follows the fixed text `prefix`, or finds it in the cache. Not for an event loop.
    ///
    /// # Errors
    ///
    /// [`GrammarError::Invalid`] with the reason, [`GrammarError::Full`] when the budget is in use, [`GrammarError::NoThread`] when the
    /// system has none.
    pub fn new(
        grammars: &Arc<Grammars>,
        source: Option<&Source>,
        prefix: &str,
        thinking: Option<Thinking>,
    ) -> Result<Self, GrammarError> {
        let compiled = source.map(|source| grammars.compiled(source, prefix)).transpose()?;
        let thoughts = thinking.map(|rules| Thoughts::new(rules, &grammars.settings().tokenizer));
        Ok(Self { grammars: Arc::clone(grammars), compiled, thoughts })
    }
}

impl Grammar for Guide {
    fn begin(&self) -> Result<Box<dyn Constraint>, String> {
        let settings = self.grammars.settings();
        let state = self.compiled.as_ref().map(|compiled| {
            let parser = compiled.start.lock().unwrap_or_else(PoisonError::into_inner).clone();
            State::Ready { parser: Box::new(parser), mask: compiled.first_mask.clone() }
        });
        Ok(Box::new(Walk {
            grammars: Arc::clone(&self.grammars),
            compiled: self.compiled.clone(),
            state: state.unwrap_or(State::Free),
            thoughts: self.thoughts.clone(),
            own: SimpleVob::alloc(settings.vocab),
            complete: false,
            alive: Arc::new(()),
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
    thoughts: Option<Thoughts>,
    /// A mask that thoughts ask for.
    own: SimpleVob,
    complete: bool,
    /// Goes with it: what it asked for need not be computed then.
    alive: Arc<()>,
}

enum State {
    /// No grammar: anything goes.
    Free,
    Ready {
        parser: Box<TokenParser>,
        mask: SimpleVob,
    },
    /// The next mask is to be computed, of a slow form: not before every output of this form has taken its token. They share an automaton,
    /// which is locked meanwhile.
    Due(Box<TokenParser>),
    /// The mask is being computed.
    Away(Receiver<Done>),
    /// Nothing may come any more, and why.
    Over(Cow<'static, str>),
}

type Done = Result<(Box<TokenParser>, SimpleVob), String>;

const COMPLETE: State = State::Over(Cow::Borrowed("the output is complete already"));
const ENDED: State = State::Over(Cow::Borrowed("the grammar thread has ended"));

/// A mask to compute.
pub(crate) struct Job {
    parser: Box<TokenParser>,
    of: UnderWay,
    asker: Weak<()>,
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
    pub fn run(self) {
        let Self { mut parser, of, asker, reply } = self;
        if asker.strong_count() == 0 {
            return;
        }
        let began = Instant::now();
        let mask = of.0.depth.follow(|| catch_unwind(AssertUnwindSafe(|| parser.compute_mask())));
        if began.elapsed() > SLOW {
            of.0.slow.store(true, Relaxed);
        }
        let done = match mask {
            Some(Ok(Ok(mask))) => Ok((parser, mask)),
            Some(Ok(Err(error))) => Err(words(&error.to_string())),
            Some(Err(_)) | None => Err("the grammar's next tokens could not be computed".into()),
        };
        // Who has it may go on: this form's automaton is free.
        drop(of);
        // A request that is gone needs no mask.
        let _ = reply.send(done);
    }
}

fn words(message: &str) -> String {
    format!("the grammar could not be followed: {}", reason(message))
}

impl Walk {
    /// The grammar's mask, waiting for it if need be; none for anything.
    fn ready(&mut self) -> Result<Option<&SimpleVob>, String> {
        self.ask();
        self.came(Duration::MAX);
        match &self.state {
            State::Ready { mask, .. } => Ok(Some(mask)),
            State::Free => Ok(None),
            State::Over(why) => Err(why.clone().into_owned()),
            State::Due(_) | State::Away(_) => unreachable!("it was asked for, and came"),
        }
    }

    /// Has a mask that is due computed.
    fn ask(&mut self) {
        let (State::Due(_), Some(compiled)) = (&self.state, &self.compiled) else { return };
        let State::Due(parser) = std::mem::replace(&mut self.state, ENDED) else { return };
        let (reply, done) = sync_channel(1);
        let job = Job { parser, of: UnderWay::new(compiled), asker: Arc::downgrade(&self.alive), reply };
        if compiled.jobs[usize::from(compiled.slow.load(Relaxed))].send(job).is_ok() {
            self.state = State::Away(done);
        }
    }

    /// Waits for a mask that is being computed, for so long at most. Says whether none is, now.
    fn came(&mut self, patience: Duration) -> bool {
        let State::Away(reply) = &self.state else { return true };
        self.state = match reply.recv_timeout(patience) {
            Ok(Ok((parser, mask))) => State::Ready { parser, mask },
            Ok(Err(words)) => State::Over(words.into()),
            Err(RecvTimeoutError::Timeout) => return false,
            Err(RecvTimeoutError::Disconnected) => ENDED,
        };
        true
    }

    /// Takes a token of the grammar's.
    fn advance(&mut self, token: u32) -> Result<(), String> {
        self.ready()?;
        let State::Ready { mut parser, .. } = std::mem::replace(&mut self.state, COMPLETE) else {
            self.state = State::Free;
            return Ok(());
        };
        let consumed = catch_unwind(AssertUnwindSafe(|| {
            parser.consume_token(token)?;
            parser.check_stop()
        }));
        let stopped = match consumed {
            Ok(Ok(stopped)) => stopped || parser.stop_reason() != StopReason::NotStopped,
            Ok(Err(error)) => return Err(words(&error.to_string())),
            Err(_) => return Err("the grammar could not take a token".into()),
        };
        if stopped {
            self.complete = true;
            return Ok(());
        }
        let Some(compiled) = &self.compiled else { return Err("a grammar without its source".into()) };
        while !compiled.charge(&parser) {
            if !self.grammars.evict_one() {
                let limit = self.grammars.usage().limit;
                return Err(format!("the grammar outgrew the {limit} bytes for grammars (--grammar-bytes)"));
            }
        }
        let slow = compiled.slow.load(Relaxed);
        self.state = State::Due(parser);
        if !slow {
            self.ask();
        }
        Ok(())
    }
}

impl Constraint for Walk {
    fn allowed(&mut self) -> Result<Option<&[u32]>, String> {
        let next = self.thoughts.as_ref().map_or(Next::Constrained, Thoughts::next);
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

    fn at_hand(&mut self, patience: Duration) -> bool {
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

    fn accept(&mut self, token: u32) -> Result<(), String> {
        let ours = self.thoughts.as_mut().is_none_or(|thoughts| thoughts.take(token));
        if ours { self.advance(token) } else { Ok(()) }
    }

    fn complete(&self) -> bool {
        self.complete
    }
}
