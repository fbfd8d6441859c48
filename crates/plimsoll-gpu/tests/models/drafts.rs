//! Draft heads and draft models on the GPU device: the drafts of the reference and of the CPU, in any chunks and company.

use plimsoll_device::{Declare, DtypePolicy, KvDtype};
use plimsoll_formats::Checkpoint;
use plimsoll_models::{Model, Output};

use crate::common::{Rig, alone, checkpoint, cpu, gpu};
use crate::{Part, TOLERANCE, argmax, ids, laid_out, logprob, reference};

/// A step, and a draft pass in a submission of its own over its rows, which `following` continue.
fn drafted(device: &mut dyn Rig, model: &dyn Model, parts: &[Part<'_>], following: &[Part<'_>]) -> Output {
    let output = laid_out(parts, None, |input| model.forward(device.as_device(), input)).unwrap();
    device.rows_of(&[]);
    let rows: Vec<u32> = (0..output.hidden.rows as u32).collect();
    draft(device, model, output, &rows, following)
}

/// A draft pass that continues these rows of the pass before.
fn draft(device: &mut dyn Rig, model: &dyn Model, last: Output, rows: &[u32], parts: &[Part<'_>]) -> Output {
    let drafter = model.drafter().expect("a draft head or a draft model");
    laid_out(parts, None, |input| drafter.draft(device.as_device(), last.hidden, rows, input)).unwrap()
}

/// The logits of a draft pass, after which the workspace is cleared.
fn logits(device: &mut dyn Rig, model: &dyn Model, parts: &[Part<'_>], following: &[Part<'_>]) -> Vec<Vec<f32>> {
    let scope = device.mark();
    let output = drafted(device, model, parts, following);
    let rows = device.rows_of(&[output.logits]).remove(0);
    device.release(scope);
    rows
}

/// The logits after every token of a text, in chunks of so many.
fn in_chunks(
    device: &mut dyn Rig,
    model: &dyn Model,
    text: [&[u32]; 2],
    chunk: usize,
    sequence: usize,
) -> Vec<Vec<f32>> {
    let [tokens, following] = text.map(|text| text.chunks(chunk));
    let parts = tokens.zip(following).enumerate();
    let rows = parts.flat_map(|(i, (own, next))| {
        logits(device, model, &[(own, i * chunk, sequence)], &[(next, i * chunk, sequence)])
    });
    rows.collect()
}

/// Tokens that are drafted in a row after a text.
fn in_a_row(device: &mut dyn Rig, model: &dyn Model, [tokens, following]: [&[u32]; 2], count: usize) -> Vec<u32> {
    let scope = device.mark();
    let mut output = drafted(device, model, &[(tokens, 0, 0)], &[(following, 0, 0)]);
    let mut drafts = Vec::new();
    loop {
        drafts.push(argmax(device.rows_of(&[output.logits]).remove(0).last().unwrap()));
        if drafts.len() == count {
            device.release(scope);
            return drafts;
        }
        let (token, row) = ([drafts[drafts.len() - 1]], output.hidden.rows as u32 - 1);
        output = draft(device, model, output, &[row], &[(&token, tokens.len() + drafts.len() - 1, 0)]);
    }
}

/// Both devices on the same texts; `references`: what is drafted after each row, and in a row.
fn check(name: &str, checkpoint: &Checkpoint, texts: &[[Vec<u32>; 2]], references: Option<&[[Vec<u32>; 2]]>) {
    let mut declare = Declare::new(checkpoint, DtypePolicy::F32);
    let model = plimsoll_models::build_all(&checkpoint.config, &mut declare, references.is_some()).unwrap();
    let (table, shape) = (declare.finish(), model.shape(KvDtype::F32));
    let (mut cpu, mut gpu) = (cpu(&table, checkpoint, &shape), gpu(&table, checkpoint, &shape));
    let mut worst: f64 = 0.0;
    for (i, text) in texts.iter().enumerate() {
        let [tokens, following] = text.each_ref().map(Vec::as_slice);
        let whole = in_chunks(&mut gpu, &*model, [tokens, following], tokens.len(), 0);
        let expected = in_chunks(&mut cpu, &*model, [tokens, following], tokens.len(), 0);
        for (row, (got, expected)) in whole.iter().zip(&expected).enumerate() {
            let id = argmax(expected);
            assert_eq!(argmax(got), id, "{name}: {} tokens, draft {row}", tokens.len());
            worst = worst.max((logprob(got, id) - logprob(expected, id)).abs());
            assert!(worst <= TOLERANCE, "{name}: {} tokens, draft {row}: off by {worst}", tokens.len());
        }
        assert_eq!(in_chunks(&mut gpu, &*model, [tokens, following], 5, 1), whole, "{name}: in chunks");
        let own = logits(
            &mut gpu,
            &*model,
            &[(&tokens[..3], 0, 1), (tokens, 0, 0)],
            &[(&following[..3], 0, 1), (following, 0, 0)],
        );
        assert_eq!(own[3..], whole, "{name}: beside another sequence");
        let row = in_a_row(&mut gpu, &*model, [tokens, following], 3);
        assert_eq!(row, in_a_row(&mut cpu, &*model, [tokens, following], 3), "{name}: in a row");
        if let Some([after, in_a_row]) = references.map(|references| &references[i]) {
            let drafts: Vec<u32> = whole.iter().map(|logits| argmax(logits)).collect();
            assert_eq!((&drafts, &row), (after, in_a_row), "{name}: the reference");
        }
    }
    println!("{name}: largest difference of a draft's log-probability from the CPU's {worst:.2e}");
}

#[test]
#[ignore = "external"]
fn draft_heads_draft_what_their_reference_does() {
    let _alone = alone();
    for name in ["qwen3.5", "qwen3.5-moe", "qwen3-next", "glm4-moe", "glm4.7-flash", "deepseek-v3"] {
        let reference = reference(name);
        let cases = reference["mtp"].as_array().unwrap();
        let of = |keys: [&str; 2]| -> Vec<[Vec<u32>; 2]> {
            cases.iter().map(|case| keys.map(|key| ids(&case[key]))).collect()
        };
        check(name, &checkpoint(name), &of(["ids", "tokens"]), Some(&of(["argmax", "draft"])));
    }
}

#[test]
#[ignore = "external"]
fn draft_models_draft_what_they_draft_on_the_cpu() {
    let _alone = alone();
    let text =
        |count: u32| -> [Vec<u32>; 2] { [0, 1].map(|from| (from..from + count).map(|i| (i * i + 7) % 380).collect()) };
    for (name, draft) in [("llama", "llama-tied"), ("qwen3.5", "llama"), ("qwen3-moe", "gguf-llama-q8_0")] {
        let both = checkpoint(name).with_draft(checkpoint(draft)).unwrap();
        check(&format!("{draft} for {name}"), &both, &[text(9), text(70)], None);
    }
}
