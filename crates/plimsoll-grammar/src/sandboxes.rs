//! Compiling and validating in sandbox processes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use plimsoll_schema::{Compiled, Options, escaped};

use crate::checks::Rule;
use crate::depth;
use crate::error::GrammarError;
use crate::sandbox::{COMPILING, Response, Sandbox, SandboxError, SandboxRequest, VALIDATING, Violation, Vocabulary};
use crate::source::{RuleSource, ToolInput};

/// The deadline for compiling one request's grammars, and the check for its client's disconnect.
pub struct CompileLimits<'a> {
    until: Instant,
    client_left: &'a (dyn Fn() -> bool + 'a),
}

/// Time limit for validating the documents of one mask.
const VALIDATE_TIME_MAX: Duration = Duration::from_secs(1);

/// Time limit for compiling all grammars of one request.
pub const COMPILE_TIME_MAX: Duration = Duration::from_millis(1500);

impl Default for CompileLimits<'static> {
    /// For a client that never disconnects.
    fn default() -> Self {
        Self::new(&|| false)
    }
}

impl<'a> CompileLimits<'a> {
    /// The time starts now. `client_left` says whether the client has disconnected.
    pub fn new(client_left: &'a (dyn Fn() -> bool + 'a)) -> Self {
        Self { until: Instant::now() + COMPILE_TIME_MAX, client_left }
    }
}

/// The sandboxes of one vocabulary. Without them only the library's own limits bound the cost of a grammar.
pub(crate) struct Sandboxes {
    /// For compiling.
    compiling: Option<Sandbox>,
    /// For validating, so that answers do not wait for other requests' compilations.
    validating: Option<Sandbox>,
}

impl Sandboxes {
    /// Sandboxes that run a program, for a vocabulary.
    pub fn new(of: Option<(PathBuf, Vocabulary)>) -> Self {
        let sandbox = |bounds| of.clone().map(|(program, vocabulary)| Sandbox::new(program, vocabulary, bounds));
        Self { compiling: sandbox(COMPILING), validating: sandbox(VALIDATING) }
    }

    /// Processes started so far.
    pub fn starts(&self) -> u64 {
        [&self.compiling, &self.validating].into_iter().flatten().map(Sandbox::starts).sum()
    }

    /// Compiles a grammar in the sandbox and returns the peak heap bytes; 0 without a sandbox.
    pub fn compile(&self, lark: &str, rules: &[Rule], limits: &CompileLimits<'_>) -> Result<u64, GrammarError> {
        let done = self.run_compile_job(&SandboxRequest::Compile(&replace_token_ids(lark)), limits);
        let schemas = || rules.iter().filter_map(|rule| Some((rule.tool.as_deref(), rule.schema.as_deref()?)));
        match done.map_err(|stop| self.explain_failure(stop, schemas(), limits))? {
            None => Ok(0),
            Some(Response::Compiles { bytes }) => Ok(bytes),
            Some(response) => Err(unexpected(&response)),
        }
    }

    /// Compiles a part of a grammar into rules, in the sandbox.
    pub fn rules(
        &self,
        part: RuleSource<'_>,
        name: &str,
        limits: &CompileLimits<'_>,
    ) -> Result<Compiled, GrammarError> {
        let input = match part {
            RuleSource::Schema { schema, lenient } => return self.compile_schema(schema, name, lenient, limits),
            RuleSource::Input(input) => input,
        };
        let job = SandboxRequest::Input { text: input.text(), lark: matches!(input, ToolInput::Lark(_)), name };
        match self
            .run_compile_job(&job, limits)
            .map_err(|stop| self.explain_failure(stop, std::iter::empty(), limits))?
        {
            None => input_rules(input.text(), matches!(input, ToolInput::Lark(_)), name).map_err(GrammarError::Invalid),
            Some(Response::Rules { rules, validated }) => Ok(Compiled { rules, validated }),
            Some(response) => Err(unexpected(&response)),
        }
    }

    /// Compiles a schema into rules, in the sandbox.
    fn compile_schema(
        &self,
        schema: &str,
        name: &str,
        lenient: bool,
        limits: &CompileLimits<'_>,
    ) -> Result<Compiled, GrammarError> {
        let done = self.run_compile_job(&SandboxRequest::Schema { schema, at: "", name, lenient }, limits);
        // A lenient schema is dropped on an error, so the error names no part of it.
        let schemas = || (!lenient).then_some((None, schema)).into_iter();
        match done.map_err(|stop| self.explain_failure(stop, schemas(), limits))? {
            None => schema_rules(schema, name, lenient).map_err(GrammarError::Invalid),
            Some(Response::Rules { rules, validated }) => Ok(Compiled { rules, validated }),
            Some(response) => Err(unexpected(&response)),
        }
    }

    /// Runs a compile job. `None` without a sandbox.
    fn run_compile_job(
        &self,
        job: &SandboxRequest<'_>,
        limits: &CompileLimits<'_>,
    ) -> Result<Option<Response>, CompileFailure> {
        let Some(sandbox) = &self.compiling else { return Ok(None) };
        let time = limits.until.saturating_duration_since(Instant::now());
        match sandbox.run(job, time, limits.client_left) {
            Ok(Response::Refused(why)) => Err(CompileFailure::Error(GrammarError::Invalid(why))),
            Ok(response) => Ok(Some(response)),
            Err(SandboxError::ClientDisconnected) => Err(CompileFailure::Error(GrammarError::ClientDisconnected)),
            Err(SandboxError::Process(error)) => Err(CompileFailure::Error(GrammarError::NoThread(error.to_string()))),
            Err(SandboxError::Time(_)) => Err(CompileFailure::LimitExceeded(SandboxError::Time(COMPILE_TIME_MAX))),
            Err(fault) => Err(CompileFailure::LimitExceeded(fault)),
        }
    }

    /// The error of a failed job. It names the part of a schema that alone exceeds a limit. `schemas`: each with its
    /// tool.
    fn explain_failure<'s>(
        &self,
        stop: CompileFailure,
        mut schemas: impl Iterator<Item = (Option<&'s str>, &'s str)>,
        limits: &CompileLimits<'_>,
    ) -> GrammarError {
        let fault = match stop {
            CompileFailure::Error(error) => return error,
            CompileFailure::LimitExceeded(fault) => fault,
        };
        let until = Instant::now().min(limits.until) + SEARCH_TIME_MAX;
        let search = Search { sandbox: self.compiling.as_ref(), client_left: limits.client_left, until };
        let (tool, at) =
            schemas.find_map(|(tool, schema)| Some((tool, search.smallest_failing_part(schema)?))).unwrap_or_default();
        let tool = tool.map(|name| format!("tool '{name}': ")).unwrap_or_default();
        let at = if at.is_empty() { at } else { format!(" at {}", at.chars().take(120).collect::<String>()) };
        let part = if at.is_empty() { "it" } else { "this part" };
        GrammarError::Invalid(format!("{tool}it is too complex{at}: {fault}; simplify {part}"))
    }

    /// Validates documents in the sandbox and returns the violations of each. Without a sandbox all are valid.
    pub fn validate(&self, schema: &str, documents: &[String]) -> Result<Vec<Vec<Violation>>, String> {
        let Some(sandbox) = &self.validating else { return Ok(vec![Vec::new(); documents.len()]) };
        match sandbox.run(&SandboxRequest::Validate { schema, documents }, VALIDATE_TIME_MAX, &|| false) {
            Ok(Response::Validated(breaches)) => Ok(breaches),
            Ok(Response::Refused(why)) => Err(format!("the schema cannot be validated: {why}")),
            Ok(response) => Err(format!("unexpected response of the sandbox: {response:?}")),
            Err(fault) => Err(format!("the answer cannot be validated: {fault}")),
        }
    }
}

/// Why a compile job has no result.
enum CompileFailure {
    /// An error with its message.
    Error(GrammarError),
    /// The job exceeded a limit of the sandbox.
    LimitExceeded(SandboxError),
}

/// Time limits of the search for the part that exceeds a limit, and of one job in it.
const SEARCH_TIME_MAX: Duration = Duration::from_millis(400);
const SEARCH_JOB_TIME_MAX: Duration = Duration::from_millis(100);

/// Searches for the smallest part of a schema that alone exceeds a limit.
struct Search<'a> {
    sandbox: Option<&'a Sandbox>,
    client_left: &'a dyn Fn() -> bool,
    until: Instant,
}

impl Search<'_> {
    /// JSON pointer of the part; empty for the whole schema. `None` if the schema alone exceeds no limit, or on
    /// timeout.
    fn smallest_failing_part(&self, schema: &str) -> Option<String> {
        let mut at = String::new();
        if !self.exceeds_limit(schema, &at) {
            return None;
        }
        while let Ok(Response::Parts(parts)) = self.run(&SandboxRequest::Parts { schema, at: &at }) {
            match parts.into_iter().find(|part| self.exceeds_limit(schema, part)) {
                Some(part) => at = part,
                None => break,
            }
        }
        Some(at)
    }

    /// Whether a part alone exceeds a limit.
    fn exceeds_limit(&self, schema: &str, at: &str) -> bool {
        let rules = match self.run(&SandboxRequest::Schema { schema, at, name: "body", lenient: false }) {
            Ok(Response::Rules { rules, .. }) => rules,
            response => return is_limit_error(&response),
        };
        let lark = format!("start: body\n{rules}");
        is_limit_error(&self.run(&SandboxRequest::Compile(&lark)))
    }

    fn run(&self, job: &SandboxRequest<'_>) -> Result<Response, SandboxError> {
        let left = self.until.saturating_duration_since(Instant::now());
        match self.sandbox {
            Some(sandbox) if !left.is_zero() => sandbox.run(job, left.min(SEARCH_JOB_TIME_MAX), self.client_left),
            _ => Err(SandboxError::ClientDisconnected),
        }
    }
}

fn is_limit_error(response: &Result<Response, SandboxError>) -> bool {
    matches!(response, Err(SandboxError::Bytes(_) | SandboxError::Time(_) | SandboxError::Stack(_)))
}

fn unexpected(response: &Response) -> GrammarError {
    GrammarError::NoThread(format!("unexpected response of the sandbox: {response:?}"))
}

/// Compiles a custom tool's grammar into rules.
pub(crate) fn input_rules(text: &str, lark: bool, name: &str) -> Result<Compiled, String> {
    let rules = if lark { escaped::lark(text, name) } else { escaped::regex(text, name) };
    rules.map(|rules| Compiled { rules, validated: Vec::new() })
}

/// Compiles a schema into rules in this process.
pub(crate) fn schema_rules(schema: &str, name: &str, lenient: bool) -> Result<Compiled, String> {
    let options = Options::default();
    let compiled = depth::run_on_deep_stack(|| plimsoll_schema::compile(schema, name, lenient, &options));
    match compiled {
        Some(Ok(compiled)) => compiled.map_err(|error| error.to_string()),
        Some(Err(_)) => Err("the schema could not be compiled".into()),
        None => Err("the system has no thread to compile the schema; try again later".into()),
    }
}

/// Replaces every list of token ids (`<[5,7-9]>`) by one id: the sandbox has a different vocabulary.
fn replace_token_ids(lark: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(lark.len()), lark);
    while let Some((before, ids)) = rest.split_once("<[") {
        let Some((ids, after)) = ids.split_once("]>") else { break };
        let plain = ids.bytes().all(|byte| byte.is_ascii_digit() || b" ,-^".contains(&byte));
        out.extend([before, "<[", if plain { "0" } else { ids }, "]>"]);
        rest = after;
    }
    out + rest
}
