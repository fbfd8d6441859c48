use super::*;

/// The factor by which the engine's clock stretches a step.
type Clock = fn(usize) -> f64;

/// A machine on which a checking step takes `cost` plain steps and a draft pass alone `PASS`. The drafts of sequence `i` are right with
/// probability `right[i]`.
struct Machine<'a> {
    cost: f64,
    right: &'a [f64],
    slower: Clock,
    /// Tokens of an answer.
    answer: usize,
}

const PASS: f64 = 0.2;

/// Numbers between 0 and 1 that depend on nothing but their arguments.
fn random(step: usize, lane: usize) -> f64 {
    let mut x =
        (step as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (lane as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 31)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 29)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Speed over that of plain steps alone, and the share of tokens that were drafted: means of five runs.
fn run(machine: &Machine<'_>, steps: usize) -> (f64, f64) {
    let runs = (0..5).map(|number| run_once(machine, number * 1_000_000, steps));
    runs.fold((0.0, 0.0), |mean, run| (mean.0 + run.0 / 5.0, mean.1 + run.1 / 5.0))
}

fn run_once(machine: &Machine<'_>, first: usize, steps: usize) -> (f64, f64) {
    let lanes = machine.right.len();
    let mut pace = Pace::new(true, 1.2);
    let fresh = || (Drafting::new(true), 0usize);
    let mut seqs: Vec<_> = (0..lanes).map(|_| fresh()).collect();
    let mut drafted = vec![false; lanes];
    let (mut seconds, mut gained, mut checks) = (0.0, 0usize, 0usize);
    for step in first..first + steps {
        let next = pace.next(lanes);
        if !next.check {
            drafted.fill(false);
        }
        let (mut tokens, mut drafts) = (0, 0);
        for (lane, (drafting, length)) in seqs.iter_mut().enumerate() {
            let mut won = 1;
            if drafted[lane] {
                drafts += 1;
                drafting.check(1);
                let hit = random(step, lane) < machine.right[lane];
                (0..usize::from(hit)).for_each(|_| drafting.hit());
                pace.checked(Source::Head, usize::from(hit));
                won += usize::from(hit);
            }
            (tokens, *length) = (tokens + won, *length + won);
            if *length >= machine.answer {
                (*drafting, *length) = fresh();
            }
            drafted[lane] = pace.drafts(next, drafting, Source::Head);
        }
        let share = drafts as f64 / lanes as f64;
        let pass = if drafted.contains(&true) { PASS } else { 0.0 };
        let forward = 1.0 + (machine.cost - 1.0 - PASS) * share;
        let slower = (machine.slower)(step);
        let (all, draft_seconds) = ((forward + pass) * slower, pass * slower);
        pace.observe(&Done { decodes: lanes, drafts, tokens, seconds: all, draft_seconds, ..Done::default() });
        (seconds, gained, checks) = (seconds + forward + pass, gained + tokens, checks + drafts);
    }
    (gained as f64 / lanes as f64 / seconds, checks as f64 / gained as f64)
}

fn calm(_: usize) -> f64 {
    1.0
}

/// One step in eight, at no regular distance, takes eight times as long.
fn interrupted(step: usize) -> f64 {
    if random(step, 99) < 0.125 { 8.0 } else { 1.0 }
}

#[test]
fn drafts_that_do_not_pay_cost_no_more_than_was_staked() {
    for cost in [1.25, 1.5, 2.0, 4.0] {
        for right in [&[0.0][..], &[0.1], &[0.2], &[0.2, 0.0, 0.1, 0.0, 0.0, 0.0, 0.2, 0.1]] {
            let cases: [(usize, Clock); 3] = [(40, calm), (usize::MAX, calm), (40, interrupted)];
            for (answer, slower) in cases {
                let (speed, _) = run(&Machine { cost, right, slower, answer }, 2000);
                assert!(speed > 0.98, "cost {cost}, right {right:?}, answers of {answer}: {speed}");
            }
        }
    }
}

#[test]
fn drafts_that_pay_go_on() {
    for (cost, right) in [(1.25, 0.5), (1.3, 0.8), (1.5, 0.8), (1.5, 1.0)] {
        for lanes in [1, 8] {
            let all = vec![right; lanes];
            let cases: [(usize, Clock, f64); 3] = [(40, calm, 0.8), (usize::MAX, calm, 0.8), (40, interrupted, 0.5)];
            for (answer, slower, share) in cases {
                let (speed, _) = run(&Machine { cost, right: &all, slower, answer }, 5000);
                let most = (1.0 + right) / cost;
                assert!(speed > 1.0 + share * (most - 1.0), "{cost} {right} {lanes} {answer}: {speed} of {most}");
            }
        }
    }
}

#[test]
fn of_sequences_that_differ_those_that_win_are_drafted_for() {
    let right = [1.0, 0.0, 1.0, 0.0];
    let machine = Machine { cost: 1.5, right: &right, slower: calm, answer: usize::MAX };
    let (speed, drafted) = run(&machine, 5000);
    // Two of four lanes: 1.5 tokens for 1.35; with all four 1.5 for 1.5.
    assert!(speed > 1.06 && drafted < 0.5, "{speed} {drafted}");
}

#[test]
fn a_head_that_becomes_right_is_found_out_and_one_that_becomes_wrong_too() {
    let mut pace = Pace::new(true, 1.2);
    let mut drafting = Drafting::new(true);
    let (mut pending, mut checks) = (false, [0usize; 4]);
    for step in 0..16_000 {
        let (phase, next) = (step / 4000, pace.next(1));
        let check = pending && next.check;
        let hit = check && phase % 2 == 1;
        if check {
            checks[phase] += 1;
            drafting.check(1);
            (0..usize::from(hit)).for_each(|_| drafting.hit());
            pace.checked(Source::Head, usize::from(hit));
        }
        pending = pace.drafts(next, &drafting, Source::Head);
        let draft_seconds = if pending { PASS } else { 0.0 };
        let seconds = 1.0 + draft_seconds + if check { 0.1 } else { 0.0 };
        let (drafts, tokens) = (usize::from(check), 1 + usize::from(hit));
        pace.observe(&Done { decodes: 1, drafts, tokens, seconds, draft_seconds, ..Done::default() });
    }
    assert!(checks[0] < 300 && checks[2] < 300, "{checks:?}");
    assert!(checks[1] > 3000 && checks[3] > 3000, "{checks:?}");
}

#[test]
fn without_adaptation_all_requests_draft_until_the_head_fails() {
    let mut pace = Pace::new(false, 9.0);
    let (good, off) = (Drafting::new(true), Drafting::new(false));
    assert!(
        pace.next(3).check
            && pace.drafts(pace.next(3), &good, Source::Head)
            && !pace.drafts(pace.next(3), &off, Source::Head)
    );
    pace.fall_silent();
    for _ in 0..SILENCE {
        assert!(!pace.next(1).check && !pace.drafts(pace.next(1), &good, Source::Head));
        pace.observe(&Done { decodes: 1, ..Done::default() });
    }
    assert!(pace.drafts(pace.next(1), &good, Source::Head));
}

#[test]
fn prompts_pass_through_the_head_for_as_long_as_drafts_pay_for_it() {
    // A prompt of one second, of which the head takes a twentieth, and an answer that never drafts.
    let prompt = Done { prompt_rows: 512, seconds: 1.05, draft_seconds: 0.05, ..Done::default() };
    let mut pace = Pace::new(true, 1.2);
    let filled = (0..10_000).filter(|_| {
        let fill = pace.next(0).fill;
        pace.observe(&if fill { prompt } else { Done { seconds: 1.0, draft_seconds: 0.0, ..prompt } });
        fill
    });
    let lost = filled.count() as f64 * 0.05;
    assert!((4.0..5.0 + STAKE * 10_000.0 * 1.05).contains(&lost), "{lost} of 10,000 seconds");
    // Drafts that win ten times as much.
    let mut pace = Pace::new(true, 1.2);
    pace.batches[0].plain.add(1.0);
    for _ in 0..10_000 {
        assert!(pace.next(0).fill);
        pace.observe(&prompt);
        pace.checked(Source::Head, 1);
        pace.observe(&Done { decodes: 1, drafts: 1, tokens: 2, seconds: 1.5, draft_seconds: 0.2, ..Done::default() });
    }
}

#[test]
fn beside_prompts_a_burst_ends_too() {
    let mut pace = Pace::new(true, 1.2);
    (0..PLAIN_MIN).for_each(|_| pace.observe(&Done { decodes: 1, tokens: 1, seconds: 1.0, ..Done::default() }));
    let mut drafting = Drafting::new(true);
    let mixed = Done { decodes: 1, prompt_rows: 31, tokens: 1, seconds: 2.0, draft_seconds: 0.1, ..Done::default() };
    let drafted = (0..1000).filter(|_| {
        let drafts = pace.drafts(pace.next(1), &drafting, Source::Head);
        if drafts {
            drafting.check(1);
            pace.checked(Source::Head, 0);
        }
        pace.observe(&Done { drafts: usize::from(drafts), ..mixed });
        drafts
    });
    assert!(drafted.count() <= 2 * BURST as usize);
}

/// A machine that checks three drafts in a step of 1.6. A third of the text repeats earlier text: eight matching tokens are nearly always
/// followed by the same token, two seldom.
#[test]
fn of_repeats_only_those_that_win_are_drafted_from() {
    let mut pace = Pace::new(true, 1.6);
    let mut drafting = Drafting::new(true);
    let (mut seconds, mut tokens) = (0.0, 0);
    let mut checks = [0; 2];
    let mut pending = false;
    for step in 0..20_000 {
        let next = pace.next(1);
        let checking = pending && next.check;
        // Stretches of fifty steps.
        let source = if step / 50 % 3 == 0 { Source::Many } else { Source::Few };
        let hits = match drafting.source {
            Source::Many => (0..3).take_while(|i| random(step, *i) < 0.9).count(),
            _ => usize::from(random(step, 0) < 0.05),
        };
        if checking {
            checks[usize::from(drafting.source == Source::Many)] += 1;
            drafting.check(3);
            (0..hits).for_each(|_| drafting.hit());
            pace.checked(drafting.source, hits);
        }
        let won = if checking { 1 + hits } else { 1 };
        let took = if checking { 1.6 } else { 1.0 };
        (seconds, tokens) = (seconds + took, tokens + won);
        let drafts = if checking { 3 } else { 0 };
        pace.observe(&Done { decodes: 1, drafts, tokens: won, seconds: took, ..Done::default() });
        pending = pace.drafts(next, &drafting, source);
        drafting.source = source;
    }
    // A third of the steps makes 3.44 tokens in 1.6, the others one in one: 1.51 is all there is.
    let speed = tokens as f64 / seconds;
    assert!(speed > 1.45 && checks[0] < 500 && checks[1] > 6_000, "{speed} {checks:?}");
}
