//! The child process: it runs one job at a time, each on its own thread with a fixed stack.

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

use super::protocol::{Bounds, OwnedRequest, Response, Violation, Vocabulary, read_frame, write_frame};
use crate::automaton::InitialParser;
use crate::library::{factory, plain_message};
use crate::sandboxes::input_rules;

/// A job ends after this time. The server's own limit is shorter.
const JOB_TIME_MAX: Duration = Duration::from_secs(10);

/// Most cached validators. An answer is validated several times against the same schema.
const VALIDATORS_MAX: usize = 4;

/// Most violations reported per document.
const VIOLATIONS_MAX: usize = 16;

/// Most bytes of a compiled pattern in a validator.
const PATTERN_BYTES_MAX: usize = 1 << 20;

/// Runs jobs from standard input until it closes. The program calls it for [`super::SANDBOX_ARGUMENT`].
#[must_use]
pub fn serve() -> ExitCode {
    child::begin(c"plimsoll-grammar");
    match run_jobs() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn run_jobs() -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let mut worker = Worker::new();
    while let Some(frame) = read_frame(&mut input, |_| false)? {
        let job = serde_json::from_slice(&frame)?;
        drop(frame);
        let (back, answer) = run_on_own_thread(worker, job)?;
        worker = back;
        write_frame(&mut output, &serde_json::to_vec(&answer)?)?;
    }
    Ok(())
}

/// Runs one job on its own thread, so that the stack is released afterwards.
fn run_on_own_thread(mut worker: Worker, job: OwnedRequest) -> io::Result<(Worker, Response)> {
    worker.drop_validators_if_large();
    worker.limit_heap();
    let (stack_bytes, (done, is_done)) = (worker.bounds.stack_bytes, channel());
    let work = move || {
        let answer = catch_unwind(AssertUnwindSafe(|| worker.run(job))).unwrap_or_else(|_| {
            worker.reset();
            Response::Refused("it could not be compiled".into())
        });
        // The receiver exists until the response arrives.
        let _ = done.send((worker, answer));
    };
    let thread = std::thread::Builder::new().stack_size(stack_bytes).spawn(work)?;
    let answer = is_done.recv_timeout(JOB_TIME_MAX);
    heap::end_process_beyond(u64::MAX);
    match answer {
        Ok(answer) => {
            // The thread has only to exit.
            let _ = thread.join();
            Ok(answer)
        }
        Err(error) => Err(io::Error::other(error)),
    }
}

/// Data that outlives a job.
struct Worker {
    bounds: Bounds,
    /// Heap bytes that belong to no job: the vocabulary and the factory.
    base_heap_bytes: u64,
    vocabulary: Option<Vocabulary>,
    factory: Option<Arc<ParserFactory>>,
    /// Ordered by last use, the latest at the end.
    validators: VecDeque<(String, Validator)>,
}

impl Worker {
    fn new() -> Self {
        // Enough for the first frame, which sets the bounds.
        let bounds = Bounds { heap_bytes: 4 << 20, stack_bytes: 1 << 20 };
        Self { bounds, base_heap_bytes: heap::in_use(), vocabulary: None, factory: None, validators: VecDeque::new() }
    }

    fn limit_heap(&self) {
        heap::end_process_beyond(self.base_heap_bytes + self.bounds.heap_bytes);
    }

    /// Drops the validators if they take more than a quarter of a job's heap.
    fn drop_validators_if_large(&mut self) {
        if heap::in_use().saturating_sub(self.base_heap_bytes) > self.bounds.heap_bytes / 4 {
            self.validators.clear();
        }
    }

    /// Drops data that a panic may have left inconsistent.
    fn reset(&mut self) {
        self.factory = None;
        self.validators.clear();
    }

    fn run(&mut self, job: OwnedRequest) -> Response {
        match job {
            OwnedRequest::Setup(vocabulary, bounds) => {
                (self.vocabulary, self.bounds) = (Some(vocabulary), bounds);
                self.base_heap_bytes = heap::in_use();
                Response::Ready
            }
            OwnedRequest::Compile(lark) => self.compile(lark),
            OwnedRequest::Schema { schema, at, name, lenient } => {
                match plimsoll_schema::compile_part(&schema, &at, &name, lenient, &Options::default()) {
                    Ok(Compiled { rules, validated }) => Response::Rules { rules, validated },
                    Err(error) => Response::Refused(error.to_string()),
                }
            }
            OwnedRequest::Input { text, lark, name } => match input_rules(&text, lark, &name) {
                Ok(Compiled { rules, validated }) => Response::Rules { rules, validated },
                Err(why) => Response::Refused(why),
            },
            OwnedRequest::Parts { schema, at } => match plimsoll_schema::parts(&schema, &at) {
                Ok(parts) => Response::Parts(parts),
                Err(error) => Response::Refused(error.to_string()),
            },
            OwnedRequest::Validate { schema, documents } => match self.validator(schema) {
                Ok(validator) => {
                    Response::Validated(documents.iter().map(|document| violations(validator, document)).collect())
                }
                Err(why) => Response::Refused(why),
            },
        }
    }

    fn compile(&mut self, lark: String) -> Response {
        let factory = match self.factory() {
            Ok(factory) => factory,
            Err(why) => return Response::Refused(why),
        };
        // The heap of the vocabulary does not count for the grammar.
        let before = heap::in_use();
        heap::restart_peak();
        let done = factory.create_parser(TopLevelGrammar::from_lark(lark)).and_then(InitialParser::new);
        match done {
            Ok(_) => Response::Compiles { bytes: heap::peak().saturating_sub(before) },
            Err(error) => Response::Refused(plain_message(&error.to_string())),
        }
    }

    fn factory(&mut self) -> Result<Arc<ParserFactory>, String> {
        if let Some(factory) = &self.factory {
            return Ok(Arc::clone(factory));
        }
        let vocabulary = self.vocabulary.as_ref().ok_or("there is no vocabulary")?;
        let made = factory(&vocabulary.words(), &[]).map_err(|error| plain_message(&error.to_string()))?;
        let made = Arc::clone(self.factory.insert(Arc::new(made)));
        self.base_heap_bytes = heap::in_use();
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

/// The violations of a document. Text that is not JSON violates every schema.
fn violations(validator: &Validator, document: &str) -> Vec<Violation> {
    let value: Value = match serde_json::from_str(document) {
        Ok(value) => value,
        Err(_) => return vec![Violation { keyword: "JSON".into(), instance: String::new(), schema: String::new() }],
    };
    if validator.is_valid(&value) {
        return Vec::new();
    }
    let errors = validator.iter_errors(&value).take(VIOLATIONS_MAX).map(|error| Violation {
        keyword: error.kind().keyword().to_owned(),
        instance: error.instance_path().to_string(),
        schema: error.evaluation_path().to_string(),
    });
    errors.collect()
}

impl Vocabulary {
    /// The tokens that the sandbox compiles with: all bytes, and the special tokens. Other words matter to masks only,
    /// and the process stays small without them.
    fn words(&self) -> Vec<Vec<u8>> {
        let named = |text: &String| [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat();
        (0..=u8::MAX).map(|byte| vec![byte]).chain(self.special.iter().map(named)).collect()
    }
}
