//! The child's side: one job after the other, each on a thread of its own with a stack of fixed size.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use jsonschema::{PatternOptions, Validator};
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::TokTrie;
use plimsoll_memory::{child, heap};
use plimsoll_schema::{Compiled, Options};
use serde_json::Value;

use super::protocol::{Answer, Bounds, Breach, Job, Vocabulary, read_frame, write_frame};
use crate::automaton::Start;
use crate::library::{factory, reason};
use crate::trial::rules_of_input;

/// A job is ended after this long even if the server, which has its own limit, does not end it.
const JOB_TIME_MAX: Duration = Duration::from_secs(10);

/// Validators that are kept: an answer is validated several times against the same schema.
const VALIDATORS_MAX: usize = 4;

/// Breaches that are told of one document.
const BREACHES_MAX: usize = 16;

/// Bytes of a compiled pattern in a validator.
const PATTERN_BYTES_MAX: usize = 1 << 20;

/// Does the jobs that arrive on standard input until that ends. The program calls it with [`super::SANDBOX_ARGUMENT`].
#[must_use]
pub fn serve() -> ExitCode {
    child::begin(c"plimsoll-grammar");
    match jobs() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn jobs() -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let mut bench = Bench::new();
    while let Some(frame) = read_frame(&mut input, |_| false)? {
        let job = serde_json::from_slice(&frame)?;
        drop(frame);
        let (back, answer) = alone(bench, job)?;
        bench = back;
        write_frame(&mut output, &serde_json::to_vec(&answer)?)?;
    }
    Ok(())
}

/// Does one job on a thread that ends with it, so that a stack that was used is given back.
fn alone(mut bench: Bench, job: Job) -> io::Result<(Bench, Answer)> {
    bench.make_room();
    bench.limit_heap();
    let (stack_bytes, (done, is_done)) = (bench.bounds.stack_bytes, channel());
    let work = move || {
        let answer = catch_unwind(AssertUnwindSafe(|| bench.run(job))).unwrap_or_else(|_| {
            bench.forget();
            Answer::Refused("it could not be compiled".into())
        });
        // The other end lives until the answer has come.
        let _ = done.send((bench, answer));
    };
    let thread = std::thread::Builder::new().stack_size(stack_bytes).spawn(work)?;
    let answer = is_done.recv_timeout(JOB_TIME_MAX);
    heap::end_process_beyond(u64::MAX);
    match answer {
        Ok(answer) => {
            // It has nothing left to do.
            let _ = thread.join();
            Ok(answer)
        }
        Err(error) => Err(io::Error::other(error)),
    }
}

/// What jobs leave for those after them.
struct Bench {
    bounds: Bounds,
    /// Heap bytes in use that are no job's: the vocabulary and what is made of it.
    floor: u64,
    vocabulary: Option<Vocabulary>,
    factory: Option<Arc<ParserFactory>>,
    /// The validator used last stands last.
    validators: VecDeque<(String, Validator)>,
}

impl Bench {
    fn new() -> Self {
        // Enough for the first frame, which brings the bounds.
        let bounds = Bounds { heap_bytes: 4 << 20, stack_bytes: 1 << 20 };
        Self { bounds, floor: heap::in_use(), vocabulary: None, factory: None, validators: VecDeque::new() }
    }

    fn limit_heap(&self) {
        heap::end_process_beyond(self.floor + self.bounds.heap_bytes);
    }

    /// Drops the validators if they leave a job less than three quarters.
    fn make_room(&mut self) {
        if heap::in_use().saturating_sub(self.floor) > self.bounds.heap_bytes / 4 {
            self.validators.clear();
        }
    }

    /// Drops whatever a job that panicked may have left half done.
    fn forget(&mut self) {
        self.factory = None;
        self.validators.clear();
    }

    fn run(&mut self, job: Job) -> Answer {
        match job {
            Job::Setup(vocabulary, bounds) => {
                (self.vocabulary, self.bounds) = (Some(vocabulary), bounds);
                self.floor = heap::in_use();
                Answer::Ready
            }
            Job::Compile(lark) => self.compile(lark),
            Job::Schema { schema, at, name, lenient } => {
                match plimsoll_schema::compile_part(&schema, &at, &name, lenient, &Options::default()) {
                    Ok(Compiled { rules, validated }) => Answer::Rules { rules, validated },
                    Err(error) => Answer::Refused(error.to_string()),
                }
            }
            Job::Input { text, lark, name } => match rules_of_input(&text, lark, &name) {
                Ok(Compiled { rules, validated }) => Answer::Rules { rules, validated },
                Err(why) => Answer::Refused(why),
            },
            Job::Parts { schema, at } => match plimsoll_schema::parts(&schema, &at) {
                Ok(parts) => Answer::Parts(parts),
                Err(error) => Answer::Refused(error.to_string()),
            },
            Job::Validate { schema, documents } => match self.validator(schema) {
                Ok(validator) => {
                    Answer::Validated(documents.iter().map(|document| breaches(validator, document)).collect())
                }
                Err(why) => Answer::Refused(why),
            },
        }
    }

    fn compile(&mut self, lark: String) -> Answer {
        let factory = match self.factory() {
            Ok(factory) => factory,
            Err(why) => return Answer::Refused(why),
        };
        // What the vocabulary takes is not the grammar's.
        let before = heap::in_use();
        heap::restart_peak();
        let done = factory.create_parser(TopLevelGrammar::from_lark(lark)).and_then(Start::new);
        match done {
            Ok(_) => Answer::Compiles { bytes: heap::peak().saturating_sub(before) },
            Err(error) => Answer::Refused(reason(&error.to_string())),
        }
    }

    fn factory(&mut self) -> Result<Arc<ParserFactory>, String> {
        if let Some(factory) = &self.factory {
            return Ok(Arc::clone(factory));
        }
        let vocabulary = self.vocabulary.as_ref().ok_or("there is no vocabulary")?;
        let made = factory(&vocabulary.words(), &[]).map_err(|error| reason(&error.to_string()))?;
        let made = Arc::clone(self.factory.insert(Arc::new(made)));
        self.floor = heap::in_use();
        self.limit_heap();
        Ok(made)
    }

    fn validator(&mut self, schema: String) -> Result<&Validator, String> {
        match self.validators.iter().position(|(kept, _)| *kept == schema) {
            Some(at) => {
                let found = self.validators.remove(at);
                self.validators.extend(found);
            }
            None => {
                while self.validators.len() >= VALIDATORS_MAX {
                    self.validators.pop_front();
                }
                let value: Value = serde_json::from_str(&schema).map_err(|error| error.to_string())?;
                let patterns = PatternOptions::regex().size_limit(PATTERN_BYTES_MAX).dfa_size_limit(PATTERN_BYTES_MAX);
                let options = jsonschema::options().with_pattern_options(patterns).should_validate_formats(false);
                let validator = options.build(&value).map_err(|error| error.to_string())?;
                self.validators.push_back((schema, validator));
            }
        }
        self.validators.back().map(|(_, validator)| validator).ok_or_else(|| "there is no validator".into())
    }
}

/// How a document breaks its schema. A text that is no JSON breaks every schema.
fn breaches(validator: &Validator, document: &str) -> Vec<Breach> {
    let value: Value = match serde_json::from_str(document) {
        Ok(value) => value,
        Err(_) => return vec![Breach { keyword: "JSON".into(), instance: String::new(), schema: String::new() }],
    };
    if validator.is_valid(&value) {
        return Vec::new();
    }
    let told = validator.iter_errors(&value).take(BREACHES_MAX).map(|error| Breach {
        keyword: error.kind().keyword().to_owned(),
        instance: error.instance_path().to_string(),
        schema: error.evaluation_path().to_string(),
    });
    told.collect()
}

impl Vocabulary {
    /// The tokens that grammars are compiled with here: every byte, and the special tokens. Which words a vocabulary has matters to
    /// masks, not to compiling, and without them the process stays small.
    fn words(&self) -> Vec<Vec<u8>> {
        let named = |text: &String| [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat();
        (0..=u8::MAX).map(|byte| vec![byte]).chain(self.special.iter().map(named)).collect()
    }
}
