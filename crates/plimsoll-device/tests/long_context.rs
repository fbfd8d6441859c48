//! Attention over long contexts: a step of few sequences is cut into splits where there are threads for them, and nothing shows.

mod common;

use common::{Random, checkpoint, device, matrix, rows, shape};
use plimsoll_device::{Attention, Declare, Device, DtypePolicy, Isa, PAGE_TOKENS, SeqSpan, StepInput};

const CONTEXT: usize = 4000;

/// What rows attend to after `CONTEXT` positions are stored: single rows, verified drafts, rows of two sequences, with and without a
/// window.
fn run(threads: usize) -> Vec<Vec<u32>> {
    let checkpoint = checkpoint("llama");
    let table = Declare::new(&checkpoint, DtypePolicy::Auto).finish();
    let shape = shape(None);
    let mut device = device(&table, &checkpoint, &shape, 0, threads, Isa::detect());
    let mut random = Random::new(9);
    let pages: Vec<u32> = (0..256).map(|page| page * 37 % 256).collect();
    let mut step = |rows_of: &[(usize, usize)], window: Option<usize>, seen_from: usize| {
        device.begin_step();
        let mut first_row = 0;
        let seqs: Vec<SeqSpan> = rows_of
            .iter()
            .map(|(start, rows)| {
                let (first, used) = (first_row, (start + rows).div_ceil(PAGE_TOKENS));
                first_row += rows;
                SeqSpan {
                    first_row: first,
                    rows: *rows,
                    start: *start,
                    pages_at: 0,
                    pages: used,
                    seen_from,
                    state: None,
                }
            })
            .collect();
        let mut filled = |cols: usize| -> Vec<Vec<f32>> { (0..first_row).map(|_| random.floats(cols)).collect() };
        let (q, k, v) = (filled(64), filled(32), filled(32));
        let [q, k, v] = [q, k, v].map(|rows| matrix(&mut device, &rows));
        let out = device.temp(first_row, 64).unwrap();
        let step = StepInput { seqs: &seqs, pages: &pages, ..StepInput::default() };
        let spec = Attention { layer: 0, heads: 4, scale: 0.25, window, softcap: None };
        device.attention(&spec, out, q, k, v, &step);
        rows(&mut device, out)
    };
    let mut all = Vec::new();
    for start in (0..CONTEXT).step_by(250) {
        all.extend(step(&[(start, 250)], None, 0));
    }
    // One row, also where a split begins; drafts, in several waves; a window; a draft head that resumed late.
    for (rows_of, window, seen_from) in [
        (&[(CONTEXT, 1)][..], None, 0),
        (&[(3584, 1)], None, 0),
        (&[(CONTEXT + 1, 6)], None, 0),
        (&[(3000, 16)], None, 0),
        (&[(CONTEXT + 7, 3)], Some(1500), 0),
        (&[(CONTEXT + 10, 1)], None, 2000),
        (&[(2100, 1), (CONTEXT + 11, 2)], None, 0),
        (&[(5, 1), (CONTEXT + 13, 1)], None, 0),
    ] {
        all.extend(step(rows_of, window, seen_from));
    }
    all
}

#[test]
fn threads_do_not_show() {
    let expected = run(1);
    for threads in 2..=4 {
        assert!(run(threads) == expected, "{threads} threads");
    }
}
