//! Norms, rotation and storing in one operation give the same result as one after the other.

use crate::common::random::Random;
use crate::common::{checkpoint, device, matrix, rows, shape};
use plimsoll_device::{Attention, Declare, Device, DtypePolicy, Isa, PAGE_TOKENS, Rotary, SeqSpan, StepInput};

/// Query heads, cached heads and their width: those of `shape`.
const HEADS: [usize; 3] = [4, 2, 16];

/// Returns the attention of the rows of sequences, each from a position on, with these steps in one operation or one after the other.
fn run(seqs: &[(usize, usize)], norms: bool, interleaved: bool, threads: usize, at_once: bool) -> Vec<Vec<u32>> {
    let [heads, kv_heads, dim] = HEADS;
    let checkpoint = checkpoint("llama");
    let mut declare = Declare::new(&checkpoint, DtypePolicy::Auto);
    let inv_freq = declare.values(vec![1.0, 0.3, 0.01, 0.002]);
    let norms = norms.then(|| [0.5, 1.5].map(|from| declare.values((0..dim).map(|i| from + i as f32 / 8.0).collect())));
    let mut device = device(&declare.finish(), &checkpoint, &shape(None), 0, threads, Isa::detect());
    let (mut spans, mut positions, mut pages_at) = (Vec::new(), Vec::new(), 0);
    for (start, rows) in seqs.iter().copied() {
        let pages = (start + rows).div_ceil(PAGE_TOKENS);
        spans.push(SeqSpan { first_row: positions.len(), rows, start, pages_at, pages, seen_from: start, state: None });
        positions.extend((start..start + rows).map(|position| position as u32));
        pages_at += pages;
    }
    // The pages are in no order.
    let pages: Vec<u32> = (0..pages_at as u32).map(|page| (7 * page + 3) % 251).collect();
    let mut random = Random::new(11);
    let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| {
        let filled: Vec<_> = positions.iter().map(|_| random.floats(heads * dim)).collect();
        matrix(&mut device, &filled)
    });
    let angles = device.temp(positions.len(), 8).unwrap();
    device.rope_angles(angles, inv_freq, &positions, 1.0);
    let rotary = Rotary { norms, eps: 1e-5, angles, interleaved };
    if !at_once {
        for (x, norm) in [q, k].into_iter().zip(norms.into_iter().flatten()) {
            device.rms_norm(x.reshape(dim), x.reshape(dim), norm, rotary.eps);
        }
        [q, k].into_iter().for_each(|x| device.rope(x, angles, dim, interleaved));
    }
    let out = device.temp(positions.len(), heads * dim).unwrap();
    let step = StepInput { seqs: &spans, pages: &pages, ..StepInput::default() };
    let spec = Attention { layer: 0, heads, scale: 0.25, ..Attention::WHOLE };
    device.attention(&spec, at_once.then_some(&rotary), out, q, Some([k, v]), &step);
    rows(&mut device, out)
}

#[test]
fn one_operation_is_its_parts() {
    let many: Vec<_> = (0..17).map(|i| (5 * i, 1)).collect();
    let steps: [&[(usize, usize)]; 7] = [
        &[(0, 1)],
        &[(3, 1), (40, 1), (15, 1)],
        &[(14, 15)],
        &[(0, 16), (31, 1)],
        &[(5, 40), (3, 2), (16, 1)],
        &[(0, 300)],
        &many,
    ];
    for seqs in steps {
        for (norms, interleaved) in [(false, false), (true, false), (true, true)] {
            let expected = run(seqs, norms, interleaved, 1, false);
            assert!(expected.iter().flatten().any(|bits| *bits != 0), "something was computed");
            for threads in [1, 2, 5] {
                let found = run(seqs, norms, interleaved, threads, true);
                assert_eq!(found, expected, "{seqs:?}, norms {norms}, pairs {interleaved}, {threads} threads");
            }
        }
    }
}
