//! Speculation under a grammar: slow grammars, and grammars that leave no token.

use super::*;

/// A grammar whose next tokens depend on all tokens before: one of three classes is forbidden. At times ids from 128 on may be grouped. It
/// is complete after a fixed number of tokens.
#[derive(Debug)]
pub(super) struct Weave(pub u64);

struct Weaving {
    woven: u64,
    left: u64,
    mask: [u32; 8],
}

impl Grammar for Weave {
    fn begin(&self) -> Result<Box<dyn Constraint>, String> {
        Ok(Box::new(Weaving { woven: 1, left: self.0, mask: [0; 8] }))
    }

    fn bytes_max(&self, _max_tokens: u32) -> u64 {
        size_of::<Weaving>() as u64
    }
}

impl Constraint for Weaving {
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit> {
        self.mask.fill(0);
        let may = |token: &u64| token % 3 != mix(self.woven) % 3;
        (0..256).filter(may).for_each(|token| self.mask[token as usize / 32] |= 1 << (token % 32));
        Ok(Some(&self.mask))
    }

    fn grouped_from(&self) -> Option<u32> {
        mix(self.woven).is_multiple_of(4).then_some(128)
    }

    fn accept(&mut self, token: u32) -> Result<(), Unfit> {
        assert!(self.left > 0 && u64::from(token) % 3 != mix(self.woven) % 3, "{token} was not allowed");
        (self.woven, self.left) = (mix(self.woven ^ u64::from(token)), self.left - 1);
        Ok(())
    }

    fn complete(&self) -> bool {
        self.left == 0
    }
}

/// A grammar that allows one token, again and again.
#[derive(Debug)]
struct Ever(u32);

struct Mask([u32; 8]);

impl Grammar for Ever {
    fn begin(&self) -> Result<Box<dyn Constraint>, String> {
        let mut mask = [0; 8];
        mask[self.0 as usize / 32] = 1 << (self.0 % 32);
        Ok(Box::new(Mask(mask)))
    }

    fn bytes_max(&self, _max_tokens: u32) -> u64 {
        size_of::<Mask>() as u64
    }
}

impl Constraint for Mask {
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit> {
        Ok(Some(&self.0))
    }

    fn accept(&mut self, _token: u32) -> Result<(), Unfit> {
        Ok(())
    }

    fn complete(&self) -> bool {
        false
    }
}

/// A grammar that takes the first duration for each later token and the second for the first token. It must not be asked before it is
/// ready.
#[derive(Debug)]
struct Ponder(Duration, Duration);

struct Pondering {
    takes: Duration,
    ready: Instant,
    began: Instant,
}

impl Grammar for Ponder {
    fn begin(&self) -> Result<Box<dyn Constraint>, String> {
        let began = Instant::now();
        Ok(Box::new(Pondering { takes: self.0, ready: began + self.1, began }))
    }

    fn bytes_max(&self, _max_tokens: u32) -> u64 {
        size_of::<Pondering>() as u64
    }
}

impl Constraint for Pondering {
    fn allowed(&mut self) -> Result<Option<&[u32]>, Unfit> {
        assert!(self.ready <= Instant::now(), "asked too soon");
        Ok(None)
    }

    fn mask_ready(&mut self, patience: Duration) -> bool {
        std::thread::sleep(patience.min(self.ready.saturating_duration_since(Instant::now())));
        self.ready <= Instant::now()
    }

    fn moved(&self) -> u64 {
        self.began.elapsed().as_millis() as u64 / 100
    }

    fn accept(&mut self, _token: u32) -> Result<(), Unfit> {
        self.ready = Instant::now() + self.takes;
        Ok(())
    }

    fn complete(&self) -> bool {
        false
    }
}

/// A sequence that waits for its grammar's next tokens takes part in no step, with or without drafts. Other sequences continue.
#[test]
fn slow_grammar_delays_no_other_request() {
    for shape in
        [Shape::hybrid(0, 0, 8), Shape::hybrid(2, 256, 8), Shape { drafts: 3, head: false, ..Shape::default() }]
    {
        let (engine, _) = recall_engine(Shape { step_time: Duration::from_millis(1), ..shape });
        let began = Instant::now();
        let ponder = |seed: u64| Request {
            grammar: Some(Arc::new(Ponder(Duration::from_millis(40), Duration::ZERO))),
            ..greedy(&prompt(70 + seed, 20), 20)
        };
        let slow: Vec<_> = (0..3).map(|seed| (seed, engine.submit(ponder(seed)).unwrap())).collect();
        assert_eq!(ask(&engine, greedy(&prompt(80, 20), 100)).ids, says(&prompt(80, 20), 100));
        let quick = began.elapsed();
        for (seed, reader) in slow {
            assert_eq!(collect(reader).ids, says(&prompt(70 + seed, 20), 20));
        }
        assert!(began.elapsed() >= Duration::from_millis(19 * 40), "it does take long");
        assert!(quick < began.elapsed() * 2 / 3, "{quick:?} of {:?}", began.elapsed());
        quiet(&engine);
    }
}

/// A sequence that has just arrived and finds its grammar busy takes part in no step.
#[test]
fn a_new_request_whose_grammar_is_busy_joins_no_step() {
    let (engine, _) = recall_engine(Shape { step_time: Duration::from_millis(1), ..Shape::default() });
    let running = engine.submit(greedy(&prompt(80, 20), 150)).unwrap();
    let form = || Some(Arc::new(Ponder(Duration::ZERO, Duration::from_millis(60))) as Arc<dyn Grammar>);
    let began = Instant::now();
    let new_seqs: Vec<_> =
        (0..3).map(|i| engine.submit(Request { grammar: form(), ..greedy(&prompt(81 + i, 20), 5) }).unwrap()).collect();
    for (i, reader) in (0..).zip(new_seqs) {
        assert_eq!(collect(reader).ids, says(&prompt(81 + i, 20), 5));
    }
    assert!(began.elapsed() >= Duration::from_millis(60));
    assert_eq!(collect(running).ids, says(&prompt(80, 20), 150));
    quiet(&engine);
}

/// Waiting for a grammar is no stall while the grammar progresses, however long its next token takes.
#[test]
fn grammar_slower_than_the_stall_limit_is_not_a_stall() {
    let (engine, _) = recall_engine(Shape::default());
    engine.set_stall_limit(Duration::from_secs(1));
    let request = Request {
        grammar: Some(Arc::new(Ponder(Duration::from_millis(2500), Duration::ZERO))),
        ..greedy(&prompt(75, 20), 2)
    };
    assert_eq!(ask(&engine, request).ids, says(&prompt(75, 20), 2));
    assert_eq!(engine.metrics().recoveries.get(), 0);
    quiet(&engine);
}

#[test]
fn grammar_with_only_ends_before_min_tokens_fails_its_request() {
    let (engine, _) = recall_engine(Shape::default());
    let form = |min_tokens| Request {
        grammar: Some(Arc::new(Ever(7))),
        stop_token_ids: vec![7],
        min_tokens,
        ..greedy(&prompt(90, 20), 20)
    };
    let error = ask(&engine, form(2)).error.unwrap();
    assert!(error.contains("min_tokens does not let it end"), "{error}");
    assert_eq!(ask(&engine, form(0)).finish, Some(FinishReason::Stop));
    quiet(&engine);
}
