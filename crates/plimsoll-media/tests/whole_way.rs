//! One picture's whole way: header, shape, admission, decoding, resize, patches, encoder, outputs.

use plimsoll_media::geometry::video::Budget;
use plimsoll_media::geometry::{PatchVideo, Patches, ProcessorFiles, SoundWindows};
use plimsoll_media::image::{ImageLimits, Normalize, decode, patchify, patchify_len, probe, resize};
use plimsoll_media::{
    Claim, ContentKey, Encoder, Item, Job, MediaError, Modality, OutputPool, Shape, Size, Stage, Worst, WorstCase,
    replica_batch,
};

/// The prices of an encoder with two activations of eight values a patch, and with windows that are dear.
#[derive(Clone)]
struct Costs {
    image: Patches,
    video: PatchVideo,
    audio: SoundWindows,
}

impl WorstCase for Costs {
    fn bytes(&self, shape: &Shape) -> u64 {
        shape.rows * 2 * 8 * 4 + shape.sequences * 2000
    }
    fn image(&self) -> Option<Worst> {
        Some(Worst::found(|cost| self.image.worst(cost), |shape| self.bytes(shape)))
    }
    fn video(&self) -> Option<Worst> {
        Some(Worst::found(|cost| self.video.worst(cost), |shape| self.bytes(shape)))
    }
    fn audio(&self) -> Option<Worst> {
        Some(self.audio.worst().into())
    }
}

/// Averages each token's patches; its workspace is one buffer, which it never lets go.
struct Averager {
    costs: Costs,
    workspace: Vec<u8>,
}

/// Patches with the shape they were announced with.
#[derive(Debug)]
struct Patched {
    shape: Shape,
    values: Vec<f32>,
}

impl Encoder for Averager {
    type Input = Patched;
    type Costs = Costs;

    fn costs(&self) -> Costs {
        self.costs.clone()
    }
    fn shape(input: &Patched) -> Shape {
        input.shape
    }
    fn blank(&self, shape: &Shape) -> Patched {
        Patched { shape: *shape, values: vec![0.0; shape.rows as usize] }
    }
    fn encode(&mut self, batch: &mut [Job<'_, Patched>]) -> Result<(), String> {
        let bytes: u64 = batch.iter().map(|job| self.costs.bytes(&job.input.shape)).sum();
        if self.workspace.len() < bytes as usize {
            self.workspace.resize(bytes as usize, 0);
        }
        for job in batch {
            let per_token = job.input.values.len() / job.output.rows();
            for (row, values) in job.input.values.chunks_exact(per_token).enumerate() {
                job.output.row_mut(row).fill(values.iter().sum::<f32>() / per_token as f32);
            }
        }
        Ok(())
    }
    fn committed_bytes(&self) -> u64 {
        self.workspace.len() as u64
    }
}

const CONFIG: &str = r#"{"patch_size": 2, "merge_size": 2, "min_pixels": 64, "max_pixels": 4096, "max_frames": 6,
    "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}"#;

fn start(batch: usize) -> (Stage<Averager>, OutputPool, ProcessorFiles) {
    let files = ProcessorFiles::read(Some(CONFIG), None, None).unwrap();
    let costs = Costs {
        image: Patches::image(&files.image, Some(16)).unwrap(),
        video: PatchVideo::new(&files.video, Budget::Frame, Some(16)).unwrap(),
        audio: SoundWindows::new(&files.audio, 50, 800, 30).unwrap(),
    };
    let outputs = OutputPool::new(4, 16, 600);
    let stage = Stage::prove(Averager { costs, workspace: Vec::new() }, batch, &outputs).unwrap();
    (stage, outputs, files)
}

/// A PNG of one colour.
fn png(size: Size, color: [u8; 3]) -> Vec<u8> {
    let picture = image::RgbImage::from_pixel(size.width, size.height, image::Rgb(color));
    let mut bytes = std::io::Cursor::new(Vec::new());
    picture.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
    bytes.into_inner()
}

/// From bytes to something that may wait for a permit.
fn prepare(
    stage: &Stage<Averager>,
    outputs: &OutputPool,
    files: &ProcessorFiles,
    bytes: &[u8],
) -> Result<Result<Item<Patched>, plimsoll_media::Pinned>, MediaError> {
    let rule = Patches::image(&files.image, Some(16))?;
    let header = probe(bytes, &ImageLimits::default())?;
    let shape = rule.shape(header.size)?;
    stage.admit(&shape)?;
    let key = ContentKey::of(Modality::Image, CONFIG, bytes);
    let output = match outputs.claim(&[(key, shape.tokens as usize)])?.pop().unwrap() {
        Claim::Ready(pinned) => return Ok(Err(pinned)),
        Claim::Vacant(output) => output,
    };
    let picture = resize(&decode(bytes, &ImageLimits::default())?, rule.resize(header.size)?);
    let mut values = vec![0.0; patchify_len(&rule, 1, picture.size)];
    patchify(&[picture], &rule, &Normalize::new(&files.image, Normalize::CLIP)?, &mut values);
    Ok(Ok(Item { input: Patched { shape, values }, output }))
}

#[test]
fn pictures_keep_their_colour_and_come_back_from_the_pool() {
    let (stage, outputs, files) = start(replica_batch(4, 1));
    let (_, committed) = stage.committed();
    let colors = [[10, 10, 10], [200, 200, 200], [90, 90, 90]];
    let files_of: Vec<_> = colors.iter().map(|&color| png(Size::new(50, 31), color)).collect();
    let mut items = files_of.iter().map(|bytes| prepare(&stage, &outputs, &files, bytes).unwrap().ok().unwrap());
    let mut batch = stage.batch(items.next().unwrap(), None).unwrap().unwrap();
    for item in items {
        assert!(stage.grow(&mut batch, item).unwrap().is_none());
    }
    let pinned: Vec<_> = stage.run(batch).into_iter().map(Result::unwrap).collect();
    for (outputs, color) in pinned.iter().zip(colors) {
        for row in 0..outputs.rows() {
            let expected = f32::from(color[0]) / 255.0;
            assert!(outputs.row(row).iter().all(|value| (value - expected).abs() < 1e-5));
        }
    }
    // The same bytes again need no encoder.
    let again = prepare(&stage, &outputs, &files, &files_of[1]).unwrap().err().unwrap();
    assert_eq!(again.row(0), pinned[1].row(0));
    assert_eq!(stage.committed(), (committed, committed));
    drop((pinned, again));
    outputs.clear();
    assert_eq!((outputs.stats().pages_free, stage.in_use().count), (600, 0));
}

fn stage_worst(rule: &Patches) -> Shape {
    rule.worst(|shape| shape.rows * 64 + shape.sequences * 2000)
}

#[test]
fn a32_tokens_and_rows_agree_for_every_legal_size() {
    let (stage, _, files) = start(1);
    let rule = Patches::image(&files.image, Some(16)).unwrap();
    // The costliest picture is a strip of many windows; a square of more tokens is legal all the same.
    let costliest = stage_worst(&rule);
    assert!(costliest.tokens < rule.shape(Size::new(64, 64)).unwrap().tokens, "{costliest:?}");
    for (h, w) in (1..90).flat_map(|h| (1..90).map(move |w| (h, w))) {
        let shape = rule.shape(Size::new(h, w)).unwrap();
        stage.admit(&shape).unwrap();
        let values = patchify_len(&rule, 1, rule.resize(Size::new(h, w)).unwrap());
        assert_eq!(values as u64, shape.rows * 3 * 2 * 2 * 2, "{h} × {w}");
        assert_eq!(shape.rows, shape.tokens * 4, "{h} × {w}");
    }
}

#[test]
fn a31_what_is_larger_than_was_stressed_is_refused_and_holds_nothing() {
    let (stage, outputs, _) = start(1);
    let roomier = ProcessorFiles::read(Some(&CONFIG.replace("4096", "8192")), None, None).unwrap();
    let error = prepare(&stage, &outputs, &roomier, &png(Size::new(90, 90), [1; 3])).unwrap_err();
    assert_eq!(error.to_string(), "an image has 484 tokens; the limit is 256 (--max-image-pixels)");
    assert_eq!((outputs.stats().pages_free, stage.in_use().count), (600, 0));
}
