//! The tokens an output may use do not depend on earlier or concurrent outputs of its grammar.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plimsoll_engine::constraint::{Constraint, Grammar, Unfit};
use plimsoll_grammar::{CompileLimits, Grammars, Guide, Settings, Source};
use plimsoll_text::Tokenizer;

/// A pattern with more than ten times the allowed automaton states. One text visits a few hundred.
const COUNTED: &str = "[ab]*a[ab]{16}c";
const TOKENS: usize = 600;
const OUTPUTS: u64 = 60;

fn tokenizer() -> Arc<Tokenizer> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama/tokenizer.json");
    Arc::new(Tokenizer::from_file(&path).unwrap())
}

fn grammars(bytes: u64) -> Arc<Grammars> {
    let tokenizer = tokenizer();
    let (vocab, ends) = (tokenizer.vocab_size(), tokenizer.eos().to_vec());
    Grammars::new(Settings { tokenizer, vocab, ends, spelled: Vec::new(), bytes, sandbox: None })
}

fn guide(grammars: &Arc<Grammars>) -> Guide {
    Guide::new(grammars, Some(&Source::Regex(COUNTED.into())), "", None, &CompileLimits::default()).unwrap()
}

/// An output with random allowed tokens, and all its masks.
struct Output {
    constraint: Box<dyn Constraint>,
    random: u64,
    ends: Vec<u32>,
    masks: Vec<Vec<u32>>,
}

impl Output {
    fn new(guide: &Guide, seed: u64) -> Self {
        let tokenizer = tokenizer();
        let ends = [tokenizer.eos(), &tokenizer.encode("c", false, false).unwrap()].concat();
        Self { constraint: guide.begin().unwrap(), random: seed, ends, masks: Vec::new() }
    }

    fn step(&mut self) -> Result<(), Unfit> {
        if self.constraint.complete() {
            return Ok(());
        }
        let mask = self.constraint.allowed()?.expect("a grammar has masks").to_vec();
        let allows = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        // Prefers tokens that do not end the output.
        let (end, letters): (Vec<u32>, Vec<u32>) =
            (0..32 * mask.len() as u32).filter(allows).partition(|id| self.ends.contains(id));
        let allowed = if letters.is_empty() { end } else { letters };
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let id = allowed[(self.random >> 33) as usize % allowed.len()];
        self.masks.push(mask);
        self.constraint.accept(id)
    }

    fn all_masks(mut self) -> Vec<Vec<u32>> {
        (0..TOKENS).for_each(|_| self.step().unwrap());
        self.masks
    }
}

#[test]
fn masks_do_not_depend_on_other_outputs() {
    let alone: Vec<_> = (0..3).map(|seed| Output::new(&guide(&grammars(256 << 20)), seed).all_masks()).collect();
    let shared = grammars(256 << 20);
    let guide = guide(&shared);
    let began = Instant::now();
    let mut outputs: Vec<_> = (0..OUTPUTS).map(|seed| Output::new(&guide, seed)).collect();
    for step in 0..TOKENS {
        for (seed, output) in outputs.iter_mut().enumerate() {
            output.step().unwrap_or_else(|unfit| panic!("output {seed}, token {step}: {unfit}"));
        }
    }
    println!("{:?}, {} bytes in use", began.elapsed(), shared.usage().used);
    let together: Vec<_> = outputs.into_iter().map(|output| output.masks).collect();
    assert!(together[..3] == alone, "masks differ beside other outputs");
    let after: Vec<_> = (0..3).map(|seed| Output::new(&guide, seed).all_masks()).collect();
    assert!(after == alone, "masks differ after other outputs");
}

/// A lack of memory is reported as such: other outputs use it, and the client may retry.
#[test]
fn full_budget_is_a_memory_error() {
    let shared = grammars(4 << 20);
    let guide = guide(&shared);
    let mut outputs: Vec<_> = (0..OUTPUTS).map(|seed| Output::new(&guide, seed)).collect();
    let mut ended = Vec::new();
    for _ in 0..TOKENS {
        for output in &mut outputs {
            ended.extend(output.step().err());
        }
        assert!(shared.usage().used <= shared.usage().limit);
    }
    assert!(ended.iter().any(|unfit| matches!(unfit, Unfit::Memory(message) if message.contains("--grammar-bytes"))));
    assert!(ended.iter().all(|unfit| matches!(unfit, Unfit::Memory(_))), "{ended:?}");
    drop(outputs);
    Output::new(&guide, 0).all_masks();
}
