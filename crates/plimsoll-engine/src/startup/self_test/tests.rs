//! A12: the self-test runs exactly the largest steps that the scheduler can form, and no step needs more than was planned.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use plimsoll_device::{KvDtype, PlanDevice};
use plimsoll_formats::Checkpoint;
use proptest::prelude::*;

use super::*;
use crate::api::options::Options;
use crate::cache::{KvCache, PagePool, PrefixIndex, StatePool};
use crate::plan::{Blueprint, MemoryLimit};
use crate::runner::cpu::Passes;
use crate::runner::step_buffers::{DraftRows, StepBuffers};
use crate::schedule::scheduler::{NewSeq, Scheduler, Seq, StepEntry};

/// The sizes of a step that determine its cost.
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

/// Records the cost of each step, draft passes included, and computes nothing.
struct Recorder<'a> {
    blueprint: &'a Blueprint,
    /// The device of the current step: allocations of earlier passes are still in place.
    device: PlanDevice<'a>,
    passes: Passes,
    steps: Vec<Cost>,
    decodes: usize,
    draft_passes: usize,
    row: Vec<f32>,
}

fn fresh(blueprint: &Blueprint) -> PlanDevice<'_> {
    PlanDevice::new(&blueprint.weights, &blueprint.model.shape(KvDtype::F32).kv)
}

impl<'a> Recorder<'a> {
    fn new(blueprint: &'a Blueprint) -> Self {
        Self {
            blueprint,
            device: fresh(blueprint),
            passes: Passes::default(),
            steps: Vec::new(),
            decodes: 0,
            draft_passes: 0,
            row: vec![0.5; blueprint.model.vocab_size()],
        }
    }

    fn note(&mut self, step: &StepInput<'_>) {
        self.steps.push(Cost {
            rows: step.tokens.len(),
            logit_rows: step.logit_rows.len(),
            seqs: step.seqs.len(),
            context: step.seqs.iter().map(|seq| seq.start + seq.rows).max().unwrap_or(0),
            workspace: self.device.high_water(),
        });
    }

    fn most(&self) -> Cost {
        self.steps.iter().fold(Cost::default(), |most, step| most.max(*step))
    }
}

impl Runner for Recorder<'_> {
    fn begin(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.device = fresh(self.blueprint);
        self.passes.begin(&*self.blueprint.model, &mut self.device, step)
    }

    fn advance(&mut self, step: &StepInput<'_>) -> Result<bool, DeviceError> {
        let done = self.passes.advance(&*self.blueprint.model, &mut self.device, step)?;
        if done {
            self.note(step);
        }
        Ok(done)
    }

    fn forget(&mut self) {
        self.passes = Passes::default();
    }

    fn forward(&mut self, step: &StepInput<'_>) -> Result<(), DeviceError> {
        if !self.passes.release_step_buffers(&mut self.device) {
            self.device = fresh(self.blueprint);
        }
        self.passes.forward(&*self.blueprint.model, &mut self.device, step)?;
        self.note(step);
        if step.seqs.iter().all(|seq| seq.rows == 1 && seq.start > 0) {
            self.decodes = self.decodes.max(step.seqs.len());
        }
        Ok(())
    }

    fn draft(&mut self, from: &[u32], step: &StepInput<'_>) -> Result<(), DeviceError> {
        self.draft_passes += 1;
        self.passes.draft(&*self.blueprint.model, &mut self.device, from, step)?;
        if let Some(cost) = self.steps.last_mut() {
            cost.workspace = self.device.high_water();
        }
        Ok(())
    }

    fn logits(&mut self, _row: usize) -> &mut [f32] {
        &mut self.row
    }
}

fn blueprint(model: &str, options: &Options) -> Blueprint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(model);
    Blueprint::new(&Checkpoint::open(&path).unwrap(), options).unwrap()
}

/// Serves random requests to their ends with the real scheduler; every draft is accepted. Returns the highest cost of its steps, and the
/// number of chunks that were computed layer by layer.
fn serve(blueprint: &Blueprint, limits: StepLimits, pools: Pools, requests: &[(usize, usize, bool)]) -> (Cost, usize) {
    let Pools { pages, slots } = pools;
    let states = (slots > 0).then(|| StatePool::new(slots, pages).unwrap());
    let index = Some(PrefixIndex::new(pages).unwrap());
    let cache = Rc::new(RefCell::new(KvCache::new(PagePool::new(pages).unwrap(), index, states)));
    let mut scheduler = Scheduler::new(limits, cache.clone(), requests.len());
    for (order, (prompt, output, reported)) in requests.iter().enumerate() {
        let tokens = (0..*prompt as u32).map(|i| (i * 7 + order as u32) % 300).collect();
        let new_seq = NewSeq::new(tokens, *output, ()).reporting(*reported);
        scheduler.push(Seq::new(&cache, order as u64, limits.slots, new_seq));
    }
    let mut buffers = [StepBuffers::new(&limits, 64), StepBuffers::new(&limits.of_layers(), 64)];
    let mut runner = Recorder::new(blueprint);
    let (mut begun, mut chunks) = (0, 0);
    while !scheduler.is_empty() {
        let (entries, _) = scheduler.schedule();
        let entries = entries.to_vec();
        if !entries.is_empty() {
            runner.forward(&buffers[0].fill(&entries, scheduler.running(), &mut Vec::new())).unwrap();
            settle(&mut scheduler, &mut runner, &mut buffers[0], &limits, &entries);
        }
        match scheduler.layered() {
            // One step runs between its layers.
            Some((number, entry)) if number != begun => {
                begun = number;
                runner.begin(&buffers[1].fill(&[entry], scheduler.running(), &mut Vec::new())).unwrap();
                chunks += 1;
            }
            Some((_, entry)) => {
                let step = buffers[1].fill(&[entry], scheduler.running(), &mut Vec::new());
                while !runner.advance(&step).unwrap() {}
                settle(&mut scheduler, &mut runner, &mut buffers[0], &limits, &[entry]);
            }
            None => runner.forget(),
        }
        for i in (0..scheduler.running().len()).rev() {
            if scheduler.running()[i].tokens.len() >= scheduler.running()[i].total_max {
                scheduler.finish(i);
            }
        }
    }
    (runner.most(), chunks)
}

/// Updates sequences after a step, as the engine does: every draft is accepted. New drafts come from the draft head, or are made up without
/// one.
/// text.
fn settle(
    scheduler: &mut Scheduler<()>,
    runner: &mut Recorder<'_>,
    buffers: &mut StepBuffers,
    limits: &StepLimits,
    entries: &[StepEntry],
) {
    let (mut passes, mut from) = (Vec::new(), 0);
    for entry in entries {
        let seq = &mut scheduler.running_mut()[entry.seq];
        let drafts = std::mem::take(&mut seq.drafts);
        seq.tokens.extend(drafts.iter().take(entry.drafts));
        if entry.start + entry.rows == seq.tokens.len() {
            seq.tokens.push(1);
            seq.logits_from = seq.tokens.len() - 1;
        }
        scheduler.commit(*entry, entry.rows);
        let seq = &mut scheduler.running_mut()[entry.seq];
        let settled = seq.computed + 1 == seq.tokens.len() && limits.drafts > 0;
        if settled && !limits.draft_head {
            let room = seq.drafts_useful(limits.drafts);
            seq.drafts.extend((0..room).map(|_| 2));
        }
        let wanted = settled && seq.room_for_drafts(limits.drafts) > 0;
        passes.push(DraftRows { seq: entry.seq, start: entry.start, rows: entry.rows, from, wanted });
        from += entry.rows;
    }
    while limits.draft_head && !passes.is_empty() {
        let (from, step) = buffers.fill_drafts(&passes, scheduler.running());
        runner.draft(from, &step).unwrap();
        let mut next = Vec::new();
        for (row, pass) in passes.iter().filter(|pass| pass.wanted).enumerate() {
            let seq = &mut scheduler.running_mut()[pass.seq];
            seq.drafts.push(2);
            if seq.drafts.len() < seq.room_for_drafts(limits.drafts) {
                let start = seq.tokens.len() - 2 + seq.drafts.len();
                next.push(DraftRows { start, rows: 1, from: row, ..*pass });
            }
        }
        passes = next;
    }
    entries.iter().for_each(|entry| scheduler.publish(entry.seq));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a12_no_step_is_larger_than_the_self_test(
        rows in 4usize..80, logit_rows in 1usize..20, running in 1usize..20, pages in 8usize..60,
        requests in prop::collection::vec((1usize..120, 1usize..30, any::<bool>()), 1..24),
    ) {
        let blueprint = blueprint("llama", &Options::default());
        let logit_rows = logit_rows.min(rows);
        let limits = StepLimits {
            rows, logit_rows, running: running.min(logit_rows), layered: rows < 128,
            ..StepLimits::default()
        };
        let pools = Pools { pages, slots: 0 };
        let context = 128.min(pages * PAGE_TOKENS);
        let requests: Vec<_> = requests.into_iter().map(|(p, o, r)| (p.min(context - 1), o.min(context - p.min(context - 1)), r)).collect();
        let mut tested = Recorder::new(&blueprint);
        let mut sampler = Sampler::new(blueprint.model.vocab_size()).unwrap();
        self_test(&mut tested, &mut sampler, &limits, context, pools, &Cancel::default()).unwrap();
        let most = tested.most();
        // Exactly the largest steps: no dimension exceeds the limit of a step, and every dimension reaches it.
        prop_assert_eq!((most.rows, most.context), (rows.min(context).max(tested.decodes), context));
        prop_assert_eq!(tested.decodes, limits.running.min(pages).max(usize::from(context > 1)));
        prop_assert_eq!(most.logit_rows, logit_rows.min(rows.min(context)).max(tested.decodes));
        let (served, _) = serve(&blueprint, limits, pools, &requests);
        prop_assert_eq!(served.max(most), most, "served {:?}, tested {:?}", served, most);
        // The plan has the same number without running anything.
        let options = Options {
            kv_dtype: KvDtype::F32, batch_max_tokens: rows, graph_max_batch_size: logit_rows,
            running_max_req_size: limits.running, max_total_token_num: Some((pages * PAGE_TOKENS) as u64),
            ..Options::default()
        };
        let line = MemoryLimit { chosen: false, ..MemoryLimit::of_budget(4 << 30, "a test") };
        let plan = blueprint.plan(&options, 1, &line).unwrap();
        let scratch = plimsoll_device::cpu::scratch_bytes(&blueprint.weights.shaped(blueprint.model.shape(KvDtype::F32)), 1);
        prop_assert!(served.workspace + scratch <= plan.workspace, "{} + {scratch} of {}", served.workspace, plan.workspace);
        if rows <= context {
            prop_assert_eq!(most.workspace + scratch, plan.workspace, "the self-test takes all that was planned");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The same for recurrent state and drafts: steps that check drafts, and the draft head's passes after them, if it makes the drafts.
    #[test]
    fn a12_no_step_with_drafts_takes_more_workspace_than_was_planned(
        rows in 4usize..80, decodes in 1usize..12, drafts in 1usize..5, head: bool, optimistic: bool, pages in 8usize..60,
        requests in prop::collection::vec((1usize..120, 1usize..30, any::<bool>()), 1..24),
    ) {
        let options = Options {
            kv_dtype: KvDtype::F32, batch_max_tokens: rows, graph_max_batch_size: decodes.min(rows),
            running_max_req_size: decodes.min(rows), max_total_token_num: Some((pages * PAGE_TOKENS) as u64),
            enable_mtp: head, mtp_num_draft_tokens: drafts, mtp_optimistic: optimistic,
            prompt_lookup_num_tokens: if head { 0 } else { drafts },
            ..Options::default()
        };
        let blueprint = blueprint("qwen3.5", &options);
        let line = MemoryLimit { chosen: false, ..MemoryLimit::of_budget(4 << 30, "a test") };
        let plan = blueprint.plan(&options, 1, &line).unwrap();
        let (limits, pools) = (plan.step, Pools { pages: plan.pages, slots: plan.slots });
        let context = 128.min(pages * PAGE_TOKENS);
        let requests: Vec<_> = requests.into_iter().map(|(p, o, r)| (p.min(context - 1), o.min(context - p.min(context - 1)), r)).collect();
        let scratch = plimsoll_device::cpu::scratch_bytes(&blueprint.weights.shaped(blueprint.model.shape(KvDtype::F32)), 1);
        let mut tested = Recorder::new(&blueprint);
        let mut sampler = Sampler::new(blueprint.model.vocab_size()).unwrap();
        self_test(&mut tested, &mut sampler, &limits, context, pools, &Cancel::default()).unwrap();
        prop_assert_eq!(tested.draft_passes >= drafts * 2, head);
        prop_assert!(tested.most().workspace + scratch <= plan.workspace);
        let (served, _) = serve(&blueprint, limits, pools, &requests);
        prop_assert!(served.workspace + scratch <= plan.workspace, "{} + {scratch} of {}", served.workspace, plan.workspace);
        prop_assert!(served.rows <= rows && served.logit_rows <= limits.logit_rows);
    }
}

#[test]
fn a12_the_self_test_samples_over_the_whole_vocabulary() {
    let blueprint = blueprint("llama", &Options::default());
    let vocab = blueprint.model.vocab_size();
    let mut sampler = Sampler::new(vocab).unwrap();
    let before = sampler.bytes();
    let limits = StepLimits { rows: 32, logit_rows: 8, running: 8, ..StepLimits::default() };
    let pools = Pools { pages: 64, slots: 0 };
    self_test(&mut Recorder::new(&blueprint), &mut sampler, &limits, 128, pools, &Cancel::default()).unwrap();
    assert_eq!(sampler.bytes(), before, "its scratch is made for the largest row once");
    assert!(before >= vocab * size_of::<f32>(), "a whole row of candidates");
    // A sampler that is too small fails here, not when a client uses it.
    let mut small = Sampler::new(vocab / 2).unwrap();
    assert!(self_test(&mut Recorder::new(&blueprint), &mut small, &limits, 128, pools, &Cancel::default()).is_err());
}

/// Chunks that are computed layer by layer are part of the served load above, with steps between their layers.
#[test]
fn a12_chunks_between_layers_are_among_what_is_served() {
    let blueprint = blueprint("llama", &Options::default());
    let limits = StepLimits { rows: 16, logit_rows: 8, running: 8, layered: true, ..StepLimits::default() };
    let requests = [(4, 60, false), (6, 60, false), (100, 4, false), (90, 4, true)];
    let (_, chunks) = serve(&blueprint, limits, Pools { pages: 64, slots: 0 }, &requests);
    assert!(chunks >= 12, "{chunks}");
}
