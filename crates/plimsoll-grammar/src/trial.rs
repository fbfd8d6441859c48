//! Compiling for trial and validating, in the sandbox.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use plimsoll_schema::{Compiled, Options, escaped};

use crate::checks::Rule;
use crate::depth;
use crate::error::GrammarError;
use crate::sandbox::{Answer, Breach, COMPILING, Fault, Request, Sandbox, VALIDATING, Vocabulary};
use crate::source::{Input, Part};

/// How long one request's grammars may take to compile, and whether their client is still there.
pub struct Patience<'a> {
    until: Instant,
    gone: &'a (dyn Fn() -> bool + 'a),
}

/// Time for validating the documents that one step may lead to.
const VALIDATE_TIME_MAX: Duration = Duration::from_secs(1);

/// Time for all grammars of one request.
pub const COMPILE_TIME_MAX: Duration = Duration::from_millis(1500);

impl Default for Patience<'static> {
    /// For a client that stays.
    fn default() -> Self {
        Self::new(&|| false)
    }
}

impl<'a> Patience<'a> {
    /// The time starts now. `gone` says whether the client has left.
    pub fn new(gone: &'a (dyn Fn() -> bool + 'a)) -> Self {
        Self { until: Instant::now() + COMPILE_TIME_MAX, gone }
    }
}

/// The sandboxes of one vocabulary. Without them a grammar's cost is bounded by the library's own limits alone.
pub(crate) struct Trials {
    /// Compiles grammars for trial.
    compiling: Option<Sandbox>,
    /// Validates answers, so that no answer waits for the compiler of another request.
    validating: Option<Sandbox>,
}

impl Trials {
    /// Sandboxes that run a program, for a vocabulary.
    pub fn new(of: Option<(PathBuf, Vocabulary)>) -> Self {
        let sandbox = |bounds| of.clone().map(|(program, vocabulary)| Sandbox::new(program, vocabulary, bounds));
        Self { compiling: sandbox(COMPILING), validating: sandbox(VALIDATING) }
    }

    /// How often a process was started.
    pub fn starts(&self) -> u64 {
        [&self.compiling, &self.validating].into_iter().flatten().map(Sandbox::starts).sum()
    }

    /// Compiles in the sandbox, where nothing else ends with it. Returns the heap bytes that it took, 0 without a sandbox.
    pub fn compile(&self, lark: &str, rules: &[Rule], patience: &Patience<'_>) -> Result<u64, GrammarError> {
        let done = self.compile_apart(&Request::Compile(&without_ids(lark)), patience);
        let schemas = || rules.iter().filter_map(|rule| Some((rule.tool.as_deref(), rule.schema.as_deref()?)));
        match done.map_err(|stop| self.explain(stop, schemas(), patience))? {
            None => Ok(0),
            Some(Answer::Compiles { bytes }) => Ok(bytes),
            Some(answer) => Err(unexpected(&answer)),
        }
    }

    /// Makes rules of a part of a grammar, in the sandbox.
    pub fn rules(&self, part: Part<'_>, name: &str, patience: &Patience<'_>) -> Result<Compiled, GrammarError> {
        let input = match part {
            Part::Schema { schema, lenient } => return self.compile_schema(schema, name, lenient, patience),
            Part::Input(input) => input,
        };
        let job = Request::Input { text: input.text(), lark: matches!(input, Input::Lark(_)), name };
        match self.compile_apart(&job, patience).map_err(|stop| self.explain(stop, std::iter::empty(), patience))? {
            None => rules_of_input(input.text(), matches!(input, Input::Lark(_)), name).map_err(GrammarError::Invalid),
            Some(Answer::Rules { rules, validated }) => Ok(Compiled { rules, validated }),
            Some(answer) => Err(unexpected(&answer)),
        }
    }

    /// Makes rules of a schema, in the sandbox.
    fn compile_schema(
        &self,
        schema: &str,
        name: &str,
        lenient: bool,
        patience: &Patience<'_>,
    ) -> Result<Compiled, GrammarError> {
        let done = self.compile_apart(&Request::Schema { schema, at: "", name, lenient }, patience);
        // The schema of a tool that is not strict is given up, so no part of it is named.
        let schemas = || (!lenient).then_some((None, schema)).into_iter();
        match done.map_err(|stop| self.explain(stop, schemas(), patience))? {
            None => rules_of(schema, name, lenient).map_err(GrammarError::Invalid),
            Some(Answer::Rules { rules, validated }) => Ok(Compiled { rules, validated }),
            Some(answer) => Err(unexpected(&answer)),
        }
    }

    /// Has a job of compiling done; none without a sandbox.
    fn compile_apart(&self, job: &Request<'_>, patience: &Patience<'_>) -> Result<Option<Answer>, Stop> {
        let Some(sandbox) = &self.compiling else { return Ok(None) };
        let time = patience.until.saturating_duration_since(Instant::now());
        match sandbox.run(job, time, patience.gone) {
            Ok(Answer::Refused(why)) => Err(Stop::Error(GrammarError::Invalid(why))),
            Ok(answer) => Ok(Some(answer)),
            Err(Fault::Gone) => Err(Stop::Error(GrammarError::Gone)),
            Err(Fault::Process(error)) => Err(Stop::Error(GrammarError::NoThread(error.to_string()))),
            Err(Fault::Time(_)) => Err(Stop::Limit(Fault::Time(COMPILE_TIME_MAX))),
            Err(fault) => Err(Stop::Limit(fault)),
        }
    }

    /// The error of a job that stopped. It names the part of a schema that breaks a limit alone.
    /// `schemas`: each with the tool that it belongs to.
    fn explain<'s>(
        &self,
        stop: Stop,
        mut schemas: impl Iterator<Item = (Option<&'s str>, &'s str)>,
        patience: &Patience<'_>,
    ) -> GrammarError {
        let fault = match stop {
            Stop::Error(error) => return error,
            Stop::Limit(fault) => fault,
        };
        let until = Instant::now().min(patience.until) + SEARCH_TIME_MAX;
        let search = Search { sandbox: self.compiling.as_ref(), gone: patience.gone, until };
        let (tool, at) = schemas.find_map(|(tool, schema)| Some((tool, search.heaviest(schema)?))).unwrap_or_default();
        let tool = tool.map(|name| format!("tool '{name}': ")).unwrap_or_default();
        let at = if at.is_empty() { at } else { format!(" at {}", at.chars().take(120).collect::<String>()) };
        let part = if at.is_empty() { "it" } else { "this part" };
        GrammarError::Invalid(format!("{tool}it is too complex{at}: {fault}; simplify {part}"))
    }

    /// Validates documents in the sandbox: for each of them, how it breaks the schema. Without a sandbox all are valid.
    pub fn validate(&self, schema: &str, documents: &[String]) -> Result<Vec<Vec<Breach>>, String> {
        let Some(sandbox) = &self.validating else { return Ok(vec![Vec::new(); documents.len()]) };
        match sandbox.run(&Request::Validate { schema, documents }, VALIDATE_TIME_MAX, &|| false) {
            Ok(Answer::Validated(breaches)) => Ok(breaches),
            Ok(Answer::Refused(why)) => Err(format!("the schema cannot be validated: {why}")),
            Ok(answer) => Err(format!("{answer:?} for a validation")),
            Err(fault) => Err(format!("an answer cannot be validated: {fault}")),
        }
    }
}

/// Why a job of compiling has no result.
enum Stop {
    /// An error that says what is wrong.
    Error(GrammarError),
    /// A limit of the sandbox was broken.
    Limit(Fault),
}

/// Time for finding the part of a schema that breaks a limit, and for one trial in it.
const SEARCH_TIME_MAX: Duration = Duration::from_millis(400);
const TRIAL_TIME_MAX: Duration = Duration::from_millis(100);

/// Looks for the smallest part of a schema that breaks a limit on its own.
struct Search<'a> {
    sandbox: Option<&'a Sandbox>,
    gone: &'a dyn Fn() -> bool,
    until: Instant,
}

impl Search<'_> {
    /// JSON pointer of the part; empty for the whole. None if the schema alone keeps all limits, or the time is over.
    fn heaviest(&self, schema: &str) -> Option<String> {
        let mut at = String::new();
        if !self.breaks(schema, &at) {
            return None;
        }
        while let Ok(Answer::Parts(parts)) = self.run(&Request::Parts { schema, at: &at }) {
            match parts.into_iter().find(|part| self.breaks(schema, part)) {
                Some(part) => at = part,
                None => break,
            }
        }
        Some(at)
    }

    /// Whether a part breaks a limit on its own.
    fn breaks(&self, schema: &str, at: &str) -> bool {
        let rules = match self.run(&Request::Schema { schema, at, name: "body", lenient: false }) {
            Ok(Answer::Rules { rules, .. }) => rules,
            answer => return is_limit(&answer),
        };
        let lark = format!("start: body\n{rules}");
        is_limit(&self.run(&Request::Compile(&lark)))
    }

    fn run(&self, job: &Request<'_>) -> Result<Answer, Fault> {
        let left = self.until.saturating_duration_since(Instant::now());
        match self.sandbox {
            Some(sandbox) if !left.is_zero() => sandbox.run(job, left.min(TRIAL_TIME_MAX), self.gone),
            _ => Err(Fault::Gone),
        }
    }
}

fn is_limit(answer: &Result<Answer, Fault>) -> bool {
    matches!(answer, Err(Fault::Bytes(_) | Fault::Time(_) | Fault::Stack(_)))
}

fn unexpected(answer: &Answer) -> GrammarError {
    GrammarError::NoThread(format!("the sandbox answers {answer:?}"))
}

/// Makes rules of a custom tool's grammar.
pub(crate) fn rules_of_input(text: &str, lark: bool, name: &str) -> Result<Compiled, String> {
    let rules = if lark { escaped::lark(text, name) } else { escaped::regex(text, name) };
    rules.map(|rules| Compiled { rules, validated: Vec::new() })
}

/// Makes rules of a schema on this process's own account.
pub(crate) fn rules_of(schema: &str, name: &str, lenient: bool) -> Result<Compiled, String> {
    let options = Options::default();
    let compiled = depth::on_a_deep_stack(|| plimsoll_schema::compile(schema, name, lenient, &options));
    match compiled {
        Some(Ok(compiled)) => compiled.map_err(|error| error.to_string()),
        Some(Err(_)) => Err("the schema could not be compiled".into()),
        None => Err("the system has no thread to compile the schema".into()),
    }
}

/// The grammar with the first token's id in the place of every list of token ids (`<[5,7-9]>`): the sandbox has other ids.
fn without_ids(lark: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(lark.len()), lark);
    while let Some((before, ids)) = rest.split_once("<[") {
        let Some((ids, after)) = ids.split_once("]>") else { break };
        let plain = ids.bytes().all(|byte| byte.is_ascii_digit() || b" ,-^".contains(&byte));
        out.extend([before, "<[", if plain { "0" } else { ids }, "]>"]);
        rest = after;
    }
    out + rest
}
