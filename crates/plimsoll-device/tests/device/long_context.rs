//! Attention over long contexts: a step of few sequences is cut into splits where there are threads for them, sequences that begin
//! alike are computed together, and nothing shows.

use crate::common::random::Random;
use crate::common::{checkpoint, device_of, matrix, rows, shape};
use plimsoll_device::{
    Attention, CpuDevice, Declare, Device, DtypePolicy, Isa, ModelShape, PAGE_TOKENS, SPLIT_PAGES, SeqSpan, StepInput,
};

const CONTEXT: usize = 4000;
/// Pages of a list.
const LIST: usize = 256;

/// Some rows of a sequence: which list its pages are in, the position of the first, and how many.
type Rows = (usize, usize, usize);

struct Rig {
    device: CpuDevice,
    /// Lists of pages: all begin with four splits of the first, the third with two.
    pages: Vec<u32>,
}

impl Rig {
    /// Creates the rig and stores all positions of all lists up to `CONTEXT`.
    fn new(threads: usize) -> Rig {
        let checkpoint = checkpoint("llama");
        let table = Declare::new(&checkpoint, DtypePolicy::Auto).finish();
        let shape = ModelShape { bf16: Isa::detect().rounds_attention(), ..shape(None) };
        let device = device_of(&table, &checkpoint, &shape, [3 * LIST, 0], threads, Isa::detect());
        let page = |list: usize, i: usize| {
            let common = if list == 2 { 2 * SPLIT_PAGES } else { 4 * SPLIT_PAGES };
            (i * 37 % LIST + if i < common { 0 } else { list * LIST }) as u32
        };
        let pages = (0..3).flat_map(|list| (0..LIST).map(move |i| page(list, i))).collect();
        let mut rig = Rig { device, pages };
        for list in 0..3 {
            for start in (0..CONTEXT).step_by(250) {
                // Common positions are stored three times, with the same values.
                rig.step(&Step { rows: &[(list, start, 250)], ..Step::default() });
            }
        }
        rig
    }

    /// Returns the attention of rows. Their values depend only on their list and position.
    fn step(&mut self, step: &Step<'_>) -> Vec<Vec<u32>> {
        self.device.begin_step();
        let Step { window, seen_from, .. } = *step;
        let (mut seqs, mut at) = (Vec::new(), Vec::new());
        for (list, start, rows) in step.rows.iter().copied() {
            let (pages_at, pages) = (list * LIST, (start + rows).div_ceil(PAGE_TOKENS));
            seqs.push(SeqSpan { first_row: at.len(), rows, start, pages_at, pages, seen_from, state: None });
            at.extend((start..start + rows).map(|position| (list, position)));
        }
        let numbers: Vec<Vec<f32>> = at
            .iter()
            .map(|(list, position)| {
                let own = if position / PAGE_TOKENS < 2 * SPLIT_PAGES { 0 } else { 2 * CONTEXT * list };
                Random::new((position + own) as u64).floats(64 + 32 + 32)
            })
            .collect();
        let [q, k, v] = [0..64, 64..96, 96..128].map(|columns| {
            let rows: Vec<_> = numbers.iter().map(|row| row[columns.clone()].to_vec()).collect();
            matrix(&mut self.device, &rows)
        });
        let out = self.device.temp(at.len(), 64).unwrap();
        let bf16_rows = if step.prompt { step.rows.last().map_or(0, |(_, _, rows)| *rows) } else { 0 };
        let step = StepInput { seqs: &seqs, pages: &self.pages, bf16_rows, ..StepInput::default() };
        let spec = Attention { layer: 0, heads: 4, scale: 0.25, window, ..Attention::WHOLE };
        self.device.attention(&spec, None, out, q, Some([k, v]), &step);
        rows(&mut self.device, out)
    }
}

/// The rows of a step, and the positions that they see.
#[derive(Clone, Copy, Default)]
struct Step<'a> {
    rows: &'a [Rows],
    window: Option<usize>,
    seen_from: usize,
    /// The last rows are a prompt's, in the arithmetic of prompts.
    prompt: bool,
}

/// One row, also where a split begins; drafts, in several waves; a window; a draft head that resumed late; several of one beginning; a
/// prompt by itself and beside others, of a few splits and of two, with a window.
fn steps() -> Vec<Step<'static>> {
    let plain = |rows| Step { rows, ..Step::default() };
    let prompt = |rows| Step { rows, prompt: true, ..Step::default() };
    vec![
        plain(&[(0, CONTEXT, 1)]),
        plain(&[(0, 3584, 1)]),
        plain(&[(0, CONTEXT + 1, 6)]),
        plain(&[(0, 3000, 16)]),
        Step { window: Some(1500), ..plain(&[(0, CONTEXT + 7, 3)]) },
        Step { seen_from: 2000, ..plain(&[(0, CONTEXT + 10, 1)]) },
        plain(&[(1, 2100, 1), (0, CONTEXT + 11, 2)]),
        plain(&[(1, 5, 1), (0, CONTEXT + 13, 1)]),
        plain(&[(0, CONTEXT + 14, 1), (1, CONTEXT, 3), (2, 3500, 2)]),
        plain(&[(1, 2110, 1), (2, 310, 1), (0, 3000, 16)]),
        prompt(&[(0, CONTEXT + 15, 16)]),
        prompt(&[(1, 2100, 1), (2, 300, 1), (0, CONTEXT + 31, 16)]),
        prompt(&[(0, CONTEXT + 47, 1), (1, CONTEXT + 3, 1), (2, 600, 40)]),
        Step { window: Some(1500), ..prompt(&[(1, 1700, 2), (0, CONTEXT + 48, 30)]) },
    ]
}

#[test]
fn threads_do_not_show() {
    let run = |threads| -> Vec<_> {
        let mut rig = Rig::new(threads);
        steps().iter().map(|step| rig.step(step)).collect()
    };
    let expected = run(1);
    for threads in 2..=4 {
        assert!(run(threads) == expected, "{threads} threads");
    }
}

#[test]
fn neighbours_do_not_show() {
    for threads in 1..=3 {
        let mut rig = Rig::new(threads);
        for step in steps() {
            let together = rig.step(&step);
            let last = step.rows.len() - 1;
            let parts = step.rows.chunks(1).enumerate();
            let alone = parts.flat_map(|(i, rows)| rig.step(&Step { rows, prompt: step.prompt && i == last, ..step }));
            assert!(alone.collect::<Vec<_>>() == together, "{:?} on {threads} threads", step.rows);
        }
    }
}
