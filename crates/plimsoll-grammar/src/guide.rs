//! One request's way through a grammar: which tokens may come next, and whether anything may.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError};

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::toktrie::SimpleVob;
use plimsoll_engine::constraint::{Constraint, Grammar};

use crate::cache::{Compiled, GrammarError, Grammars, reason};
use crate::depth::Depth;
use crate::source::Source;
use crate::thinking::{Next, Thinking, Thoughts};

/// Bytes that walking a grammar takes: two masks, and what the parser keeps of each token.
const WALK_BYTES_FIXED: u64 = 16 << 10;
const WALK_BYTES_PER_TOKEN: u64 = 256;

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
    /// [`GrammarError::Invalid`] with the reason, [`GrammarError::Full`] when the budget is in use.
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
}

enum State {
    /// No grammar: anything goes.
    Free,
    Ready {
        parser: Box<TokenParser>,
        mask: SimpleVob,
    },
    /// The mask is being computed.
    Away(Receiver<Done>),
    /// Nothing may come any more, or everything has failed.
    Over,
}

type Done = Result<(Box<TokenParser>, SimpleVob), String>;

/// A mask to compute.
pub(crate) struct Job {
    parser: Box<TokenParser>,
    depth: Depth,
    reply: SyncSender<Done>,
}

impl Job {
    pub fn run(self) {
        let Self { mut parser, depth, reply } = self;
        let mask = depth.follow(|| catch_unwind(AssertUnwindSafe(|| parser.compute_mask())));
        let done = match mask {
            Some(Ok(Ok(mask))) => Ok((parser, mask)),
            Some(Ok(Err(error))) => Err(words(&error.to_string())),
            Some(Err(_)) | None => Err("the grammar's next tokens could not be computed".into()),
        };
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
        if let State::Away(reply) = &self.state {
            let done = reply.recv().unwrap_or_else(|_| Err("the grammar thread has ended".into()));
            let (parser, mask) = done.inspect_err(|_| self.state = State::Over)?;
            self.state = State::Ready { parser, mask };
        }
        match &self.state {
            State::Ready { mask, .. } => Ok(Some(mask)),
            State::Free => Ok(None),
            State::Away(_) | State::Over => Err("the output is complete already".into()),
        }
    }

    /// Takes a token of the grammar's.
    fn advance(&mut self, token: u32) -> Result<(), String> {
        self.ready()?;
        let State::Ready { mut parser, .. } = std::mem::replace(&mut self.state, State::Over) else {
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
        let (reply, done) = sync_channel(1);
        compiled
            .jobs
            .send(Job { parser, depth: compiled.depth, reply })
            .map_err(|_| "the grammar thread has ended".to_owned())?;
        self.state = State::Away(done);
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

    fn accept(&mut self, token: u32) -> Result<(), String> {
        let ours = self.thoughts.as_mut().is_none_or(|thoughts| thoughts.take(token));
        if ours { self.advance(token) } else { Ok(()) }
    }

    fn complete(&self) -> bool {
        self.complete
    }
}
