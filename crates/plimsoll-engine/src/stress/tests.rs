//! A12: the stress runs exactly the largest steps the scheduler can form, and no step it forms needs more than was planned.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use plimsoll_device::{KvDtype, PlanDevice};
use plimsoll_formats::Checkpoint;
use proptest::prelude::*;

use super::*;
use crate::cache::{PagePool, PrefixIndex};
use crate::lease::{KvCache, PageLease};
use crate::options::Options;
use crate::planner::{Blueprint, Line};
use crate::scheduler::{Scheduler, Seq};
use crate::step::StepBuffers;

/// What makes a step dear.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    rows: usize,
    logit_rows: usize,
    seqs: usize,
    /// The last position that a row attends from, plus one.
    context: usize,
    /// Bytes of workspace, as the planner counts them.
    workspace: usize,
}

impl Cost {
    fn max(self, other: Self) -> Self {
        Self {
            rows: self.rows.max(other.rows),
            logit_rows: self.logit_rows.max(other.logit_rows),
            seqs: self.seqs.max(other.seqs),
            context: self.context.max(other.context),
            workspace: self.workspace.max(other.workspace),
        }
    }
}

/// Notes what each step costs and computes nothing.
struct Recorder<'a> {
    blueprint: &'a Blueprint,
    steps: Vec<Cost>,
    decodes: usize,
    row: Vec<f32>,
}

impl<'a> Recorder<'a> {
    fn new(blueprint: &'a Blueprint) -> Self {
        Self { blueprint, steps: Vec::new(), decodes: 0, row: vec![0.5; blueprint.model.vocab_size()] }
    }

    fn most(&self) -> Cost {
        self.steps.iter().fold(Cost::default(), |most, step| most.max(*step))
    }
}

impl Runner for Recorder<'_> {
    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        let mut device = PlanDevice::new(&self.blueprint.weights, self.blueprint.model.shape(KvDtype::F32).kv);
        self.blueprint.model.forward(&mut device, step)?;
        self.steps.push(Cost {
            rows: step.tokens.len(),
            logit_rows: step.logit_rows.len(),
            seqs: step.seqs.len(),
            context: step.seqs.iter().map(|seq| seq.start + seq.rows).max().unwrap_or(0),
            workspace: device.high_water(),
        });
        if step.seqs.iter().all(|seq| seq.rows == 1 && seq.start > 0) {
            self.decodes = self.decodes.max(step.seqs.len());
        }
        Ok(())
    }

    fn logits(&mut self, _row: usize) -> &mut [f32] {
        &mut self.row
    }
}

fn blueprint() -> Blueprint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama");
    Blueprint::new(&Checkpoint::open(&path).unwrap(), &Options::default()).unwrap()
}

/// Serves random requests to their ends with the real scheduler. Returns what its dearest steps cost.
fn serve(blueprint: &Blueprint, limits: StepLimits, pages: usize, requests: &[(usize, usize, bool)]) -> Cost {
    let pool = PagePool::new(pages).unwrap();
    let cache = Rc::new(RefCell::new(KvCache { pool, index: Some(PrefixIndex::new(pages).unwrap()) }));
    let mut scheduler = Scheduler::new(limits, cache.clone(), requests.len());
    for (order, (prompt, output, reported)) in requests.iter().enumerate() {
        let total_max = prompt + output;
        scheduler.push(Seq {
            order: order as u64,
            salt: 0,
            tokens: (0..*prompt as u32).map(|i| (i * 7 + order as u32) % 300).collect(),
            prompt_len: *prompt,
            total_max,
            computed: 0,
            pages: PageLease::new(&cache, Vec::new(), Vec::new()),
            logits_from: if *reported { 0 } else { prompt - 1 },
            work: (),
        });
    }
    let mut buffers = StepBuffers::new(&limits, 64);
    let mut runner = Recorder::new(blueprint);
    while !scheduler.is_empty() {
        let (shares, _) = scheduler.schedule();
        let shares = shares.to_vec();
        runner.forward(&buffers.fill(&shares, scheduler.running())).unwrap();
        for share in &shares {
            let seq = &mut scheduler.running_mut()[share.seq];
            if share.start + share.rows == seq.tokens.len() {
                seq.tokens.push(1);
                seq.logits_from = seq.tokens.len() - 1;
            }
            scheduler.commit(*share);
        }
        for i in (0..scheduler.running().len()).rev() {
            if scheduler.running()[i].tokens.len() >= scheduler.running()[i].total_max {
                scheduler.finish(i);
            }
        }
    }
    runner.most()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a12_no_step_is_dearer_than_those_that_were_stressed(
        rows in 4usize..80, logit_rows in 1usize..20, running in 1usize..20, pages in 8usize..60,
        requests in prop::collection::vec((1usize..120, 1usize..30, any::<bool>()), 1..24),
    ) {
        let blueprint = blueprint();
        let logit_rows = logit_rows.min(rows);
        let limits = StepLimits {
            rows, logit_rows, running: running.min(logit_rows), prefill_rows_beside_decode: rows,
        };
        let context = 128.min(pages * PAGE_TOKENS);
        let requests: Vec<_> = requests.into_iter().map(|(p, o, r)| (p.min(context - 1), o.min(context - p.min(context - 1)), r)).collect();
        let mut stressed = Recorder::new(&blueprint);
        let mut sampler = Sampler::new(blueprint.model.vocab_size()).unwrap();
        stress(&mut stressed, &mut sampler, &limits, context, pages).unwrap();
        let most = stressed.most();
        // Exactly the largest: no dimension beyond what a step may have, and every dimension at its bound.
        prop_assert_eq!((most.rows, most.context), (rows.min(context).max(stressed.decodes), context));
        prop_assert_eq!(stressed.decodes, limits.running.min(pages).max(usize::from(context > 1)));
        prop_assert_eq!(most.logit_rows, logit_rows.min(rows.min(context)).max(stressed.decodes));
        let served = serve(&blueprint, limits, pages, &requests);
        prop_assert_eq!(served.max(most), most, "served {:?}, stressed {:?}", served, most);
        // And the plan knows it without running anything.
        let options = Options {
            kv_dtype: KvDtype::F32, batch_max_tokens: rows, graph_max_batch_size: logit_rows,
            running_max_req_size: limits.running, max_total_token_num: Some((pages * PAGE_TOKENS) as u64),
            ..Options::default()
        };
        let line = Line { bytes: 4 << 30, source: "a test".into(), chosen: false };
        let plan = blueprint.plan(&options, 1, &line).unwrap();
        let scratch = plimsoll_device::cpu::scratch_bytes(&blueprint.model.shape(KvDtype::F32), 1);
        prop_assert!(served.workspace + scratch <= plan.workspace, "{} + {scratch} of {}", served.workspace, plan.workspace);
        if rows <= context {
            prop_assert_eq!(most.workspace + scratch, plan.workspace, "the stress takes all that was planned");
        }
    }
}

#[test]
fn a12_the_sampler_is_stressed_over_the_whole_vocabulary() {
    let blueprint = blueprint();
    let vocab = blueprint.model.vocab_size();
    let mut sampler = Sampler::new(vocab).unwrap();
    let before = sampler.bytes();
    let limits = StepLimits { rows: 32, logit_rows: 8, running: 8, prefill_rows_beside_decode: 32 };
    stress(&mut Recorder::new(&blueprint), &mut sampler, &limits, 128, 64).unwrap();
    assert_eq!(sampler.bytes(), before, "its scratch is made for the largest row once");
    assert!(before >= vocab * size_of::<f32>(), "a whole row of candidates");
    // A sampler that was made too small would be noticed here, not by a client.
    let mut small = Sampler::new(vocab / 2).unwrap();
    assert!(stress(&mut Recorder::new(&blueprint), &mut small, &limits, 128, 64).is_err());
}
