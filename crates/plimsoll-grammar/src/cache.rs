//! The cache of compiled grammars, shared by all requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::TokTrie;

use crate::automaton::{CompiledGrammar, InitialParser, Pool};
use crate::budget::{Reservation, Usage};
use crate::depth;
use crate::error::GrammarError;
use crate::job_queue::{JobQueue, Work};
use crate::library::{factory, plain_message};
use crate::sandbox::Vocabulary;
use crate::sandboxes::{CompileLimits, Sandboxes};
use crate::settings::Settings;
use crate::source::{LarkGrammar, RuleSource, SOURCE_BYTES_MAX, Source};

/// Upper limit of the vocabulary's three tries. A node takes 8 bytes, in lists that grow by doubling. Each token adds
/// its text and offset. For 50,000 random words this gives 16.1 MB; 13.7 MB were measured.
const TRIE_BYTES_PER_NODE: u64 = 48;
const TRIE_BYTES_PER_BYTE: u64 = 6;
const TRIE_BYTES_PER_TOKEN: u64 = 64;
const TRIE_BYTES_FIXED: u64 = 1 << 20;

/// Bytes of a compiled grammar besides its automaton: per byte of its source, and for the stack (`depth.rs`).
const BYTES_PER_SOURCE_BYTE: u64 = 64;
const GRAMMAR_BYTES_FIXED: u64 = 64 << 10;

/// The grammars of one vocabulary.
pub struct Grammars {
    pool: Pool,
    compiler: OnceLock<Compiler>,
    /// Held while the compiler is created.
    compiler_lock: Mutex<()>,
}

/// Factory and mask threads of all grammars, created for the first one.
struct Compiler {
    factory: ParserFactory,
    jobs: [Arc<JobQueue<Work>>; 2],
    reservation: Reservation,
}

impl Grammars {
    /// A cache for one vocabulary. The tries are built for the first grammar.
    pub fn new(settings: Settings) -> Arc<Self> {
        let program = settings.sandbox.clone();
        let sandboxes = Sandboxes::new(program.map(|program| (program, vocabulary(&settings))));
        Arc::new(Self {
            pool: Pool::new(settings, sandboxes),
            compiler: OnceLock::new(),
            compiler_lock: Mutex::new(()),
        })
    }

    /// State of the budget.
    pub fn usage(&self) -> Usage {
        self.pool.usage()
    }

    /// The settings of this cache.
    pub(crate) fn settings(&self) -> &Settings {
        self.pool.settings()
    }

    /// Settings, budget and entries.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The compiler, created on first use. After a failure the next call tries again.
    fn compiler(&self) -> Result<&Compiler, GrammarError> {
        if let Some(compiler) = self.compiler.get() {
            return Ok(compiler);
        }
        let _guard = self.compiler_lock.lock().unwrap_or_else(PoisonError::into_inner);
        match self.compiler.get() {
            Some(compiler) => Ok(compiler),
            None => {
                let compiler = Compiler::new(&self.pool)?;
                Ok(self.compiler.get_or_init(|| compiler))
            }
        }
    }

    /// The compiled grammar, from the cache or new. `prefix` is fixed text before the output. Takes milliseconds, or
    /// more for large schemas: not for an event loop.
    pub(crate) fn compiled(
        &self,
        source: &Source,
        prefix: &str,
        limits: &CompileLimits<'_>,
    ) -> Result<Arc<CompiledGrammar>, GrammarError> {
        let check_size = |bytes: usize| match bytes {
            0..=SOURCE_BYTES_MAX => Ok(()),
            _ => {
                let message = format!("the grammar has {bytes} bytes, more than the limit of {SOURCE_BYTES_MAX}");
                Err(GrammarError::Invalid(message))
            }
        };
        // A key may be six times as long as its source.
        check_size(source.text_bytes())?;
        let key = source.key(prefix);
        check_size(key.len())?;
        let now = self.pool.tick();
        if let Some(compiled) = self.pool.find(&key, now) {
            return Ok(compiled);
        }
        let compiler = self.compiler()?;
        let build = |source: &Source, prefix: &str| self.build(compiler, source, prefix, key.len() as u64, limits);
        let built = match build(source, prefix) {
            // Tools without `strict` have no guarantee, so unsupported schemas are relaxed. The key stays that of the
            // original source.
            Err(GrammarError::Invalid(why)) => {
                match source.relaxed(|alone| !matches!(build(alone, ""), Err(GrammarError::Invalid(_)))) {
                    Some(relaxed) => build(&relaxed, prefix),
                    None => Err(GrammarError::Invalid(why)),
                }
            }
            built => built,
        };
        let compiled = Arc::new(built?);
        Ok(self.pool.insert(key, compiled, now))
    }

    fn build(
        &self,
        compiler: &Compiler,
        source: &Source,
        prefix: &str,
        source_bytes: u64,
        limits: &CompileLimits<'_>,
    ) -> Result<CompiledGrammar, GrammarError> {
        let compile = |part: RuleSource<'_>, name: &str| self.pool.sandboxes.rules(part, name, limits);
        let LarkGrammar { lark, depth, layout } = source.to_lark(prefix, &compile)?;
        for schema in layout.iter().flat_map(|layout| &layout.rules).filter_map(|rule| rule.schema.as_ref()) {
            // Rejects schemas that the validator does not support, before any output exists.
            self.pool.sandboxes.validate(schema, &[]).map_err(GrammarError::Invalid)?;
        }
        let rules = layout.as_ref().map_or(&[][..], |layout| &layout.rules);
        let compile_bytes = self.pool.sandboxes.compile(&lark, rules, limits)?;
        let fixed_bytes = GRAMMAR_BYTES_FIXED + BYTES_PER_SOURCE_BYTE * source_bytes + depth.bytes();
        self.check_fits_alone(compiler, fixed_bytes + compile_bytes)?;
        let mut own = self.pool.reserve(fixed_bytes)?;
        // Reserved while the grammar compiles. The actual size is reserved below.
        let compiling = self.pool.reserve(compile_bytes)?;
        let parser = || InitialParser::new(compiler.factory.create_parser(TopLevelGrammar::from_lark(lark))?);
        let start = match depth::run_on_deep_stack(parser) {
            Some(Ok(Ok(start))) => start,
            Some(Ok(Err(error))) => return Err(GrammarError::Invalid(plain_message(&error.to_string()))),
            Some(Err(_)) => return Err(GrammarError::Invalid("the grammar could not be compiled".into())),
            None => return Err(GrammarError::Full(self.pool.budget.limit())),
        };
        drop(compiling);
        if start.allows_nothing() {
            return Err(GrammarError::Invalid("the grammar allows no output".into()));
        }
        let [fresh, first] = start.bytes();
        self.check_fits_alone(compiler, fixed_bytes + fresh + first)?;
        if !self.pool.grow(&mut own, fixed_bytes + fresh) {
            return Err(GrammarError::Full(self.pool.budget.limit()));
        }
        let reservations = [own, self.pool.reserve(first)?];
        Ok(start.into_grammar(reservations, compiler.jobs.clone(), depth, layout))
    }

    /// Rejects a grammar that does not fit into the budget even without other grammars.
    fn check_fits_alone(&self, compiler: &Compiler, bytes: u64) -> Result<(), GrammarError> {
        let most = self.pool.budget.limit().saturating_sub(compiler.reservation.bytes());
        match bytes <= most {
            true => Ok(()),
            false => Err(GrammarError::Invalid(format!(
                "it is too complex: it takes {bytes} bytes, and --grammar-bytes leaves {most} for grammars"
            ))),
        }
    }
}

impl Compiler {
    fn new(pool: &Pool) -> Result<Self, GrammarError> {
        let (settings, budget) = (pool.settings(), &pool.budget);
        let tokenizer = &settings.tokenizer;
        let words: Vec<Vec<u8>> = (0..settings.vocab as u32).map(|id| token_text(settings, id)).collect();
        let bytes = trie_bytes(&words);
        let mut reservation = budget.reservation();
        if !reservation.grow_to(bytes) {
            let message = format!(
                "structured output needs {bytes} bytes for this model's vocabulary; --grammar-bytes is {}",
                budget.limit()
            );
            return Err(GrammarError::Invalid(message));
        }
        let failed = |words: String| GrammarError::Invalid(format!("structured output is not available: {words}"));
        let factory = match catch_unwind(AssertUnwindSafe(|| factory(&words, &settings.ends))) {
            Ok(Ok(factory)) => factory,
            Ok(Err(error)) => return Err(failed(plain_message(&error.to_string()))),
            Err(_) => {
                return Err(failed(format!(
                    "the library failed on the vocabulary of {} tokens",
                    tokenizer.vocab_size()
                )));
            }
        };
        // A JSON value may end with punctuation, a digit, or the last letter of `true`, `false` or `null`.
        let ends = |word: &[u8]| {
            let last = word.last().is_some_and(|last| last.is_ascii_digit() || b"el".contains(last));
            last || word.iter().any(|byte| b"\",]}".contains(byte))
        };
        let value_end_tokens = (0..).zip(&words).filter(|(_, word)| ends(word)).map(|(id, _)| id).collect();
        let queue = |name: &str| {
            JobQueue::start(name, |work: Work| work()).map_err(|error| GrammarError::NoThread(error.to_string()))
        };
        let jobs = [queue("grammar")?, queue("slow-grammar")?];
        pool.set_value_end_tokens(value_end_tokens);
        Ok(Self { factory, jobs, reservation })
    }
}

/// The part of a vocabulary that a grammar's text can name.
fn vocabulary(settings: &Settings) -> Vocabulary {
    let tokenizer = &settings.tokenizer;
    let known = settings.vocab.min(tokenizer.vocab_size()) as u32;
    let special = (0..known).filter(|id| tokenizer.is_special(*id) && !settings.spelled.contains(id));
    Vocabulary { special: special.map(|id| tokenizer.token_name(id).to_owned()).collect() }
}

/// Upper limit of the tries' bytes.
fn trie_bytes(words: &[Vec<u8>]) -> u64 {
    let mut sorted: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
    sorted.sort_unstable();
    let (mut nodes, mut texts, mut last): (u64, u64, &[u8]) = (1, 0, &[]);
    for word in sorted {
        // In sorted order, the prefix shared with the previous word has its nodes already.
        let shared = word.iter().zip(last).take_while(|(a, b)| a == b).count();
        nodes += (word.len() - shared) as u64;
        texts += word.len() as u64;
        last = word;
    }
    let tokens = words.len() as u64;
    TRIE_BYTES_FIXED + TRIE_BYTES_PER_NODE * nodes + TRIE_BYTES_PER_BYTE * texts + TRIE_BYTES_PER_TOKEN * tokens
}

/// A token's bytes in the trie. A marker before control tokens keeps any text from matching them.
fn token_text(settings: &Settings, id: u32) -> Vec<u8> {
    let tokenizer = &settings.tokenizer;
    if (id as usize) >= tokenizer.vocab_size() {
        return Vec::new();
    }
    let bytes = tokenizer.token_bytes(id);
    if tokenizer.is_special(id) && !settings.spelled.contains(&id) {
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend_from_slice(tokenizer.token_name(id).as_bytes());
        return word;
    }
    bytes.to_vec()
}
