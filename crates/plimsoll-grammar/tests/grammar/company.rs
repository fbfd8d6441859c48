//! The allowed tokens of an output do not depend on other outputs of the same grammar, neither beside it nor before it.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use plimsoll_engine::constraint::{Constraint, Grammar, Unfit};
use plimsoll_grammar::{Grammars, Guide, Patience, Settings, Source};
use plimsoll_text::Tokenizer;

/// A pattern with an automaton of more than ten times the allowed states. One text passes a few hundred of them.
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
    Guide::new(grammars, Some(&Source::Regex(COUNTED.into())), "", None, &Patience::default()).unwrap()
}

/// One output, drawn at random among what is allowed, with every mask.
struct Output {
    walk: Box<dyn Constraint>,
    dice: u64,
    ends: Vec<u32>,
    masks: Vec<Vec<u32>>,
}

impl Output {
    fn new(guide: &Guide, seed: u64) -> Self {
        let tokenizer = tokenizer();
        let ends = [tokenizer.eos(), &tokenizer.encode("c", false, false).unwrap()].concat();
        Self { walk: guide.begin().unwrap(), dice: seed, ends, masks: Vec::new() }
    }

    fn step(&mut self) -> Result<(), Unfit> {
        if self.walk.complete() {
            return Ok(());
        }
        let mask = self.walk.allowed()?.expect("a form has masks").to_vec();
        let allows = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
        // What goes on: a letter that may end it only where nothing else may come.
        let (end, letters): (Vec<u32>, Vec<u32>) =
            (0..32 * mask.len() as u32).filter(allows).partition(|id| self.ends.contains(id));
        let allowed = if letters.is_empty() { end } else { letters };
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let id = allowed[(self.dice >> 33) as usize % allowed.len()];
        self.masks.push(mask);
        self.walk.accept(id)
    }

    fn whole(mut self) -> Vec<Vec<u32>> {
        (0..TOKENS).for_each(|_| self.step().unwrap());
        self.masks
    }
}

#[test]
fn grammar_output_is_the_same_alone_and_in_company() {
    let alone: Vec<_> = (0..3).map(|seed| Output::new(&guide(&grammars(256 << 20)), seed).whole()).collect();
    let shared = grammars(256 << 20);
    let form = guide(&shared);
    let began = Instant::now();
    let mut crowd: Vec<_> = (0..OUTPUTS).map(|seed| Output::new(&form, seed)).collect();
    for step in 0..TOKENS {
        for (seed, output) in crowd.iter_mut().enumerate() {
            output.step().unwrap_or_else(|unfit| panic!("output {seed}, token {step}: {unfit}"));
        }
    }
    println!("{:?}, {} bytes in use", began.elapsed(), shared.usage().used);
    let together: Vec<_> = crowd.into_iter().map(|output| output.masks).collect();
    assert!(together[..3] == alone, "beside others it is another");
    let after: Vec<_> = (0..3).map(|seed| Output::new(&form, seed).whole()).collect();
    assert!(after == alone, "after others it is another");
}

/// What ends for want of room says that it is room that is missing: others took it, and the client may try again.
#[test]
fn budget_taken_by_others_is_not_the_clients_error() {
    let shared = grammars(4 << 20);
    let form = guide(&shared);
    let mut crowd: Vec<_> = (0..OUTPUTS).map(|seed| Output::new(&form, seed)).collect();
    let mut ended = Vec::new();
    for _ in 0..TOKENS {
        for output in &mut crowd {
            ended.extend(output.step().err());
        }
        assert!(shared.usage().used <= shared.usage().limit);
    }
    assert!(ended.iter().any(|unfit| matches!(unfit, Unfit::Memory(words) if words.contains("--grammar-bytes"))));
    assert!(ended.iter().all(|unfit| matches!(unfit, Unfit::Memory(_))), "{ended:?}");
    drop(crowd);
    Output::new(&form, 0).whole();
}
