//! Compiled grammars, shared by the requests that use them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::TokTrie;

use crate::automaton::{Compiled, Pool, Start};
use crate::budget::{Share, Usage};
use crate::depth;
use crate::error::GrammarError;
use crate::jobs::{Desk, Work};
use crate::library::{factory, reason};
use crate::sandbox::Vocabulary;
use crate::settings::Settings;
use crate::source::{Made, Part, SOURCE_BYTES_MAX, Source};
use crate::trial::{Patience, Trials};

/// The tries' share of the budget: three of them, whose nodes take 8 bytes in lists that grow by doubling, and each token's
/// text and place. Measured: 13.7 MB for 50,000 words of random letters, of which this makes 16.1.
const TRIE_BYTES_PER_NODE: u64 = 48;
const TRIE_BYTES_PER_BYTE: u64 = 6;
const TRIE_BYTES_PER_TOKEN: u64 = 64;
const TRIE_BYTES_FIXED: u64 = 1 << 20;

/// A compiled grammar's share besides its automaton: per byte of its text, and (`depth.rs`) what a stack may take of it.
const BYTES_PER_SOURCE_BYTE: u64 = 64;
const GRAMMAR_BYTES_FIXED: u64 = 64 << 10;

/// The served vocabulary's grammars.
pub struct Grammars {
    pool: Pool,
    base: OnceLock<Base>,
    /// Held by whoever makes the base.
    making: Mutex<()>,
}

/// What all grammars share: made when the first is asked for.
struct Base {
    factory: ParserFactory,
    jobs: [Arc<Desk<Work>>; 2],
    share: Share,
}

impl Grammars {
    /// A cache for one vocabulary. Nothing is built before the first grammar is asked for.
    pub fn new(settings: Settings) -> Arc<Self> {
        let program = settings.sandbox.clone();
        let trials = Trials::new(program.map(|program| (program, vocabulary(&settings))));
        Arc::new(Self { pool: Pool::new(settings, trials), base: OnceLock::new(), making: Mutex::new(()) })
    }

    /// What the budget holds.
    pub fn usage(&self) -> Usage {
        self.pool.usage()
    }

    /// What this cache was made for.
    pub(crate) fn settings(&self) -> &Settings {
        self.pool.settings()
    }

    /// What its grammars share.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// What all grammars share, made by the first that asks; what failed is tried again by the next.
    fn base(&self) -> Result<&Base, GrammarError> {
        if let Some(base) = self.base.get() {
            return Ok(base);
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        match self.base.get() {
            Some(base) => Ok(base),
            None => {
                let base = Base::new(&self.pool)?;
                Ok(self.base.get_or_init(|| base))
            }
        }
    }

    /// The compiled grammar, from the cache or anew; `prefix` is fixed text before it. Takes milliseconds, for large schemas
    /// more: not for an event loop.
    pub(crate) fn compiled(
        &self,
        source: &Source,
        prefix: &str,
        patience: &Patience<'_>,
    ) -> Result<Arc<Compiled>, GrammarError> {
        let fits = |bytes: usize| match bytes {
            0..=SOURCE_BYTES_MAX => Ok(()),
            _ => {
                let message = format!("the grammar has {bytes} bytes, more than the limit of {SOURCE_BYTES_MAX}");
                Err(GrammarError::Invalid(message))
            }
        };
        // A key may be six times as long as what it is made of.
        fits(source.text_bytes())?;
        let key = source.key(prefix);
        fits(key.len())?;
        let now = self.pool.now();
        if let Some(compiled) = self.pool.find(&key, now) {
            return Ok(compiled);
        }
        let base = self.base()?;
        let build = |source: &Source, prefix: &str| self.build(base, source, prefix, key.len() as u64, patience);
        let built = match build(source, prefix) {
            // Schemas of tools that are not strict promise nothing: what they come to is kept under the name of what was asked for.
            Err(GrammarError::Invalid(why)) => {
                match source.loosened(|alone| !matches!(build(alone, ""), Err(GrammarError::Invalid(_)))) {
                    Some(loose) => build(&loose, prefix),
                    None => Err(GrammarError::Invalid(why)),
                }
            }
            built => built,
        };
        let compiled = Arc::new(built?);
        Ok(self.pool.keep(key, compiled, now))
    }

    fn build(
        &self,
        base: &Base,
        source: &Source,
        prefix: &str,
        source_bytes: u64,
        patience: &Patience<'_>,
    ) -> Result<Compiled, GrammarError> {
        let compile = |part: Part<'_>, name: &str| self.pool.trials.rules(part, name, patience);
        let Made { lark, depth, layout } = source.grammar(prefix, &compile)?;
        for schema in layout.iter().flat_map(|layout| &layout.rules).filter_map(|rule| rule.schema.as_ref()) {
            // Whether answers can be validated is known before there is one.
            self.pool.trials.validate(schema, &[]).map_err(GrammarError::Invalid)?;
        }
        let rules = layout.as_ref().map_or(&[][..], |layout| &layout.rules);
        let trial_bytes = self.pool.trials.compile(&lark, rules, patience)?;
        let fixed_bytes = GRAMMAR_BYTES_FIXED + BYTES_PER_SOURCE_BYTE * source_bytes + depth.bytes();
        self.fits_alone(base, fixed_bytes + trial_bytes)?;
        let mut own = self.pool.room(fixed_bytes)?;
        // While it is compiled. What it comes to is charged below.
        let compiling = self.pool.room(trial_bytes)?;
        let parser = || Start::new(base.factory.create_parser(TopLevelGrammar::from_lark(lark))?);
        let start = match depth::on_a_deep_stack(parser) {
            Some(Ok(Ok(start))) => start,
            Some(Ok(Err(error))) => return Err(GrammarError::Invalid(reason(&error.to_string()))),
            Some(Err(_)) => return Err(GrammarError::Invalid("the grammar could not be compiled".into())),
            None => return Err(GrammarError::Full(self.pool.budget.limit())),
        };
        drop(compiling);
        if start.allows_nothing() {
            return Err(GrammarError::Invalid("the grammar allows no output".into()));
        }
        let [fresh, first] = start.bytes();
        self.fits_alone(base, fixed_bytes + fresh + first)?;
        if !self.pool.grow(&mut own, fixed_bytes + fresh) {
            return Err(GrammarError::Full(self.pool.budget.limit()));
        }
        let shares = [own, self.pool.room(first)?];
        Ok(start.compiled(shares, base.jobs.clone(), depth, layout))
    }

    /// Refuses what would not fit even if no other grammar were there.
    fn fits_alone(&self, base: &Base, bytes: u64) -> Result<(), GrammarError> {
        let most = self.pool.budget.limit().saturating_sub(base.share.bytes());
        match bytes <= most {
            true => Ok(()),
            false => Err(GrammarError::Invalid(format!(
                "it is too complex: it takes {bytes} bytes, and --grammar-bytes leaves {most} for grammars"
            ))),
        }
    }
}

impl Base {
    fn new(pool: &Pool) -> Result<Self, GrammarError> {
        let (settings, budget) = (pool.settings(), &pool.budget);
        let tokenizer = &settings.tokenizer;
        let words: Vec<Vec<u8>> = (0..settings.vocab as u32).map(|id| word(settings, id)).collect();
        let bytes = trie_bytes(&words);
        let mut share = budget.share();
        if !share.grow_to(bytes) {
            let message = format!(
                "constrained output needs {bytes} bytes for this model's vocabulary; --grammar-bytes is {}",
                budget.limit()
            );
            return Err(GrammarError::Invalid(message));
        }
        let failed = |words: String| GrammarError::Invalid(format!("constrained output is not available: {words}"));
        let factory = match catch_unwind(AssertUnwindSafe(|| factory(&words, &settings.ends))) {
            Ok(Ok(factory)) => factory,
            Ok(Err(error)) => return Err(failed(reason(&error.to_string()))),
            Err(_) => return Err(failed(format!("the vocabulary of {} tokens", tokenizer.vocab_size()))),
        };
        // A number or a word ends wherever it could: `true`, `false` and `null` end with these letters.
        let ends = |word: &[u8]| {
            let last = word.last().is_some_and(|last| last.is_ascii_digit() || b"el".contains(last));
            last || word.iter().any(|byte| b"\",]}".contains(byte))
        };
        let structural = (0..).zip(&words).filter(|(_, word)| ends(word)).map(|(id, _)| id).collect();
        let desk = |name: &str| {
            Desk::open(name, |work: Work| work()).map_err(|error| GrammarError::NoThread(error.to_string()))
        };
        let jobs = [desk("grammar")?, desk("slow-grammar")?];
        pool.set_structural(structural);
        Ok(Self { factory, jobs, share })
    }
}

/// What of a vocabulary a grammar's text can name.
fn vocabulary(settings: &Settings) -> Vocabulary {
    let tokenizer = &settings.tokenizer;
    let known = settings.vocab.min(tokenizer.vocab_size()) as u32;
    let special = (0..known).filter(|id| tokenizer.is_special(*id) && !settings.spelled.contains(id));
    Vocabulary { special: special.map(|id| tokenizer.token_name(id).to_owned()).collect() }
}

/// What the tries of a vocabulary take.
fn trie_bytes(words: &[Vec<u8>]) -> u64 {
    let mut sorted: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
    sorted.sort_unstable();
    let (mut nodes, mut texts, mut last): (u64, u64, &[u8]) = (1, 0, &[]);
    for word in sorted {
        // What a word shares with the one before it in the order of letters is there already.
        let shared = word.iter().zip(last).take_while(|(a, b)| a == b).count();
        nodes += (word.len() - shared) as u64;
        texts += word.len() as u64;
        last = word;
    }
    let tokens = words.len() as u64;
    TRIE_BYTES_FIXED + TRIE_BYTES_PER_NODE * nodes + TRIE_BYTES_PER_BYTE * texts + TRIE_BYTES_PER_TOKEN * tokens
}

/// A token as grammars see it: control tokens are out of reach of any text.
fn word(settings: &Settings, id: u32) -> Vec<u8> {
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
