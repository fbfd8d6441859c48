use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use super::*;

/// What the encoder below is asked to do with an item.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Good,
    Bad,
    Panics,
}

#[derive(Debug)]
struct Picture {
    rows: u64,
    name: f32,
    fate: Fate,
}

#[derive(Default)]
struct Watch {
    running: AtomicU64,
    peak: AtomicU64,
    calls: AtomicUsize,
    overlapped: AtomicBool,
}

/// Four rows become one token; the workspace is ten bytes a row and grows if it is ever asked for more than before.
struct Fake {
    watch: Arc<Watch>,
    workspace: u64,
    broken: bool,
}

struct Costs;

impl WorstCase for Costs {
    fn bytes(&self, shape: &Shape) -> u64 {
        shape.rows * 10
    }
    fn image(&self) -> Option<Worst> {
        Some(picture(64).into())
    }
    fn video(&self) -> Option<Worst> {
        None
    }
    fn audio(&self) -> Option<Worst> {
        None
    }
}

fn picture(rows: u64) -> Shape {
    Shape { modality: Modality::Image, rows, sequences: 1, longest: rows, tokens: rows / 4 }
}

impl Encoder for Fake {
    type Input = Picture;
    type Costs = Costs;

    fn costs(&self) -> Costs {
        Costs
    }
    fn shape(input: &Picture) -> Shape {
        picture(input.rows)
    }
    fn blank(&self, shape: &Shape) -> Picture {
        Picture { rows: shape.rows, name: 0.0, fate: Fate::Good }
    }
    fn encode(&mut self, batch: &mut [Job<'_, Picture>]) -> Result<(), String> {
        if self.broken {
            return Err("out of memory".into());
        }
        self.watch.calls.fetch_add(1, SeqCst);
        let bytes: u64 = batch.iter().map(|job| job.input.rows * 10).sum();
        if self.watch.running.fetch_add(bytes, SeqCst) > 0 {
            self.watch.overlapped.store(true, SeqCst);
        }
        self.watch.peak.fetch_max(bytes, SeqCst);
        self.workspace = self.workspace.max(bytes);
        let bad = batch.iter().find(|job| job.input.fate != Fate::Good);
        let bad = bad.map(|job| job.input.fate);
        self.watch.running.fetch_sub(bytes, SeqCst);
        match bad {
            Some(Fate::Panics) => panic!("index out of bounds"),
            Some(_) => return Err("a patch is not finite".into()),
            None => {}
        }
        for job in batch {
            for row in 0..job.output.rows() {
                job.output.row_mut(row).fill(job.input.name);
            }
        }
        Ok(())
    }
    fn committed_bytes(&self) -> u64 {
        self.workspace
    }
}

fn stage(batch: usize) -> (Stage<Fake>, OutputPool, Arc<Watch>) {
    let outputs = OutputPool::new(2, 4, 40);
    let watch = Arc::new(Watch::default());
    let fake = Fake { watch: Arc::clone(&watch), workspace: 0, broken: false };
    let stage = Stage::prove(fake, batch, &outputs).unwrap();
    assert_eq!(outputs.stats().pages_free, 40, "the stress leaves nothing behind");
    (stage, outputs, watch)
}

fn item(outputs: &OutputPool, name: u32, rows: u64, fate: Fate) -> Item<Picture> {
    let key = ContentKey::of(Modality::Image, "", &name.to_le_bytes());
    let claim = loop {
        match outputs.claim(&[(key, (rows / 4) as usize)]) {
            Ok(mut claims) => break claims.pop().unwrap(),
            Err(MediaError::OutputsBusy { .. }) => thread::yield_now(),
            Err(other) => panic!("{other}"),
        }
    };
    let Claim::Vacant(output) = claim else { panic!("{name} is not new") };
    Item { input: Picture { rows, name: name as f32, fate }, output }
}

fn batch_of(stage: &Stage<Fake>, items: Vec<Item<Picture>>) -> Batch<Picture> {
    let mut items = items.into_iter();
    let mut batch = stage.batch(items.next().unwrap(), None).unwrap().unwrap();
    for item in items {
        assert!(stage.grow(&mut batch, item).unwrap().is_none(), "fits");
    }
    batch
}

#[test]
fn the_stress_runs_the_worst_case_and_its_size_is_the_limit() {
    let (stage, _, watch) = stage(4);
    assert_eq!(stage.limits(), (4, 4 * 640));
    assert_eq!(stage.committed(), (2560, 2560));
    assert_eq!(watch.calls.load(SeqCst), 1, "one kind of medium, one run");
}

#[test]
fn a_worst_case_that_does_not_run_stops_the_start_and_names_the_flag() {
    let outputs = OutputPool::new(2, 4, 40);
    let broken = Fake { watch: Arc::default(), workspace: 0, broken: true };
    let error = Stage::prove(broken, 4, &outputs).err().unwrap();
    let words = "the worst case of 4 × image does not run: out of memory; reduce --visual-infer-batch-size";
    assert_eq!(error.to_string(), words);
    // Outputs that cannot hold one stressed batch are found out now, not by the first large request.
    let small = OutputPool::new(2, 4, 15);
    let sound = Fake { watch: Arc::default(), workspace: 0, broken: false };
    let words = Stage::prove(sound, 4, &small).err().unwrap().to_string();
    assert!(words.contains("64 tokens of encoder output; the limit is 60 (--encoder-output-bytes)"), "{words}");
}

#[test]
fn a31_more_than_was_stressed_is_refused_from_its_shape_with_limit_and_flag() {
    let (stage, outputs, _) = stage(2);
    assert!(stage.admit(&picture(64)).is_ok());
    let error = stage.admit(&picture(68)).unwrap_err();
    assert_eq!(error.to_string(), "an image has 17 tokens; the limit is 16 (--max-image-pixels)");
    assert!(error.is_the_clients());
    // The same tokens at a higher price, as a strip of many windows may be.
    let costly = Shape { rows: 66, ..picture(64) };
    let words = stage.admit(&costly).unwrap_err().to_string();
    assert_eq!(words, "an image has 660 bytes of encoder workspace; the limit is 640 (--max-image-pixels)");
    let sound = Shape { modality: Modality::Audio, ..picture(4) };
    assert!(stage.admit(&sound).unwrap_err().to_string().contains("a sound is in a format that is not supported"));
    // And once more where it would run.
    assert!(stage.batch(item(&outputs, 1, 68, Fate::Good), None).is_err());
}

#[test]
fn a32_rows_claimed_and_tokens_announced_must_agree() {
    let (stage, outputs, _) = stage(2);
    let mut wrong = item(&outputs, 1, 16, Fate::Good);
    wrong.input.rows = 20;
    let words = stage.batch(wrong, None).unwrap_err().to_string();
    assert!(words.contains("4 rows are claimed for 5 tokens"), "{words}");
    assert_eq!(stage.in_use().count, 0);
}

#[test]
fn a34_one_bad_item_fails_alone_and_the_permits_come_back() {
    for fate in [Fate::Bad, Fate::Panics] {
        let (stage, outputs, _) = stage(4);
        let items = (0..4).map(|i| item(&outputs, i, 64, if i == 2 { fate } else { Fate::Good })).collect();
        let results = stage.run(batch_of(&stage, items));
        for (i, result) in results.iter().enumerate() {
            match result {
                Ok(pinned) => assert_eq!(pinned.row(15), [i as f32; 2]),
                Err(MediaError::Encoder(_)) => assert_eq!(i, 2),
                Err(other) => panic!("{other}"),
            }
        }
        assert!(results[2].is_err());
        drop(results);
        assert_eq!((stage.in_use().count, stage.in_use().bytes), (0, 0));
        assert_eq!((outputs.stats().entries, outputs.stats().pages_free), (3, 28), "the bad one holds nothing");
        // The queue goes on.
        let next = stage.run(batch_of(&stage, vec![item(&outputs, 9, 64, Fate::Good)]));
        assert_eq!(next[0].as_ref().unwrap().row(0), [9.0; 2]);
    }
}

#[test]
fn growth_stops_at_the_count_and_hands_the_item_back() {
    let (stage, outputs, _) = stage(2);
    let mut batch = batch_of(&stage, vec![item(&outputs, 1, 64, Fate::Good), item(&outputs, 2, 4, Fate::Good)]);
    let back = stage.grow(&mut batch, item(&outputs, 3, 4, Fate::Good)).unwrap();
    assert_eq!(back.unwrap().input.name, 3.0);
    assert_eq!(batch.len(), 2);
    let soon = Instant::now() + Duration::from_millis(10);
    let waited = stage.batch(item(&outputs, 4, 4, Fate::Good), Some(soon)).unwrap();
    assert_eq!(waited.err().unwrap().input.name, 4.0);
    drop(batch);
    assert_eq!(stage.in_use().count, 0, "a batch that never ran gives back as well");
}

#[test]
fn a27_a28_a_soak_of_random_sizes_stays_inside_what_was_stressed() {
    let (stage, outputs, watch) = stage(4);
    let bad = AtomicUsize::new(0);
    thread::scope(|scope| {
        for client in 0..6_u32 {
            let (stage, outputs, bad) = (&stage, &outputs, &bad);
            scope.spawn(move || {
                let mut random = u64::from(client) * 77 + 5;
                for turn in 0..60 {
                    let mut next = || {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        random >> 33
                    };
                    let fate = match next() % 16 {
                        0 => Fate::Bad,
                        1 => Fate::Panics,
                        _ => Fate::Good,
                    };
                    let name = client * 1000 + turn * 2;
                    let first = item(outputs, name, next() % 16 * 4 + 4, fate);
                    let mut batch = stage.batch(first, None).unwrap().unwrap();
                    let second = item(outputs, name + 1, next() % 16 * 4 + 4, Fate::Good);
                    let _back = stage.grow(&mut batch, second).unwrap();
                    if next() % 8 == 0 {
                        continue;
                    }
                    for (i, result) in stage.run(batch).iter().enumerate() {
                        match result {
                            Ok(pinned) => assert_eq!(pinned.row(0)[0], (name + i as u32) as f32),
                            Err(_) => {
                                assert!(i == 0 && fate != Fate::Good);
                                bad.fetch_add(1, SeqCst);
                            }
                        }
                    }
                }
            });
        }
    });
    assert!(bad.load(SeqCst) > 0, "the soak met bad items");
    let used = stage.in_use();
    assert_eq!((used.count, used.bytes), (0, 0));
    assert!(used.count_peak <= 4 && used.bytes_peak <= 2560 && watch.peak.load(SeqCst) <= 2560);
    assert!(!watch.overlapped.load(SeqCst), "one encoder runs one batch at a time");
    assert_eq!(stage.committed(), (2560, 2560));
    outputs.clear();
    assert_eq!(outputs.stats().pages_free, 40);
}

#[test]
fn pricing_does_not_wait_for_the_encoder() {
    let (stage, _, _) = stage(2);
    let busy = stage.lock();
    assert!(stage.admit(&picture(64)).is_ok());
    drop(busy);
}
