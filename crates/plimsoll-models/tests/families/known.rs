//! The checkpoints with known acceptance behave as `tools/fixturelib/known.py` says. The model's choice is the permutation, and so is the
//! draft head's, except after the tokens listed as wrong.

use crate::common::{Part, Rig, argmax, ids, reference};

fn check(model: &str, wrong_tokens: usize) {
    let mut rig = Rig::new(model, true);
    let reference = reference(model);
    let (next, wrong) = (ids(&reference["next"]), ids(&reference["wrong"]));
    assert_eq!((next.len(), wrong.len()), (384, wrong_tokens), "{model}");
    // Every token once, in an order that is not the permutation's.
    let tokens: Vec<u32> = (0..next.len() as u32).map(|i| i * 5 % 384).collect();
    let following: Vec<u32> = tokens.iter().map(|token| next[*token as usize]).collect();
    let output = rig.forward(&[Part::new(&tokens, 0, None, 0)]);
    let rows: Vec<u32> = (0..tokens.len() as u32).collect();
    let draft = rig.draft(output.hidden, &rows, &[Part::new(&following, 0, None, 0)]);
    let again = rig.draft(draft.hidden, &rows, &[Part::new(&following, 0, None, 0)]);
    let mut best = |logits| -> Vec<u32> { rig.rows(logits).iter().map(|row| argmax(row)).collect() };
    assert_eq!(best(output.logits), following, "{model}: the model's choice");
    for (pass, guesses) in [best(draft.logits), best(again.logits)].iter().enumerate() {
        for (guess, token) in guesses.iter().zip(&following) {
            let right = *guess == next[*token as usize];
            assert_eq!(right, !wrong.contains(token), "{model}: pass {pass} after token {token}");
        }
    }
}

#[test]
fn always_right() {
    check("mtp-always", 0);
}

#[test]
fn right_after_about_half_of_the_tokens() {
    check("mtp-half", 191);
}

#[test]
fn never_right() {
    check("mtp-never", 384);
}
