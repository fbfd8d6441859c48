//! Encodes media between two steps, one batch at a time, so that decoding sequences wait for a batch at most.
//!
//! Outputs are claimed for all of a sequence's media or not at all, oldest first. While an older sequence waits for
//! room no newer one claims any, so large requests are not starved by small ones. A batch has at most the largest
//! tested size and starts with the items that are there: it never waits to grow. The items of a failed batch run again one by
//! one, so only a request with a failing item ends (SPECIFICATION.md, A34).

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Instant;

use plimsoll_media::{Grant, MediaError, Permits};
use plimsoll_memory::faults::{self, Site};
use plimsoll_models::{EncoderInput, EncoderKind, Grid};

use super::{Worker, panic_message};
use crate::api::degradation::DegradationLevel;
use crate::media::{MediaSpec, sense, widen};
use crate::metrics::Metrics;
use crate::runner::Runner;

/// One item of a batch.
#[derive(Clone, Copy, Debug)]
struct Job {
    /// Index of its sequence among the running ones.
    seq: usize,
    /// Index of the item among the sequence's media.
    item: usize,
}

/// The buffers of encoding, allocated once.
pub(crate) struct Encoding {
    pub spec: MediaSpec,
    /// Patches of a batch.
    patches: Vec<f32>,
    grids: Vec<Grid>,
    batch: Vec<Job>,
    /// The encoder of the batch.
    kind: EncoderKind,
    /// The items and bytes of patches that the self-test measured (A28).
    permits: Arc<Permits>,
    /// Items encoded since start.
    pub done: u64,
    /// Pages of outputs that were missing when nothing ran.
    lost: usize,
}

impl Encoding {
    /// Allocates a batch's patches.
    ///
    /// # Errors
    /// [`MediaError::OutOfMemory`].
    pub fn new(spec: &MediaSpec) -> Result<Self, MediaError> {
        let values = spec.patch_values_max();
        let mut patches = Vec::new();
        patches.try_reserve_exact(values).map_err(|_| MediaError::OutOfMemory {
            what: "the patches of a batch of media",
            bytes: (values * size_of::<f32>()) as u64,
            flag: "--visual-infer-batch-size, --max-image-pixels or --max-video-frames",
        })?;
        // Touched here, so that the pages are resident.
        patches.resize(values, f32::NAN);
        patches.clear();
        Ok(Self {
            patches,
            grids: Vec::with_capacity(spec.batch),
            batch: Vec::with_capacity(spec.batch),
            kind: EncoderKind::Vision,
            permits: Permits::new(spec.batch, (spec.patch_values_max() * size_of::<f32>()) as u64),
            spec: spec.clone(),
            done: 0,
            lost: 0,
        })
    }

    /// I4, without sequences: every page of outputs is free or cached, and no host bytes are held. A missing page still
    /// has an owner, so it is only logged, and counted once.
    pub fn check_at_rest(&mut self, metrics: &Metrics) {
        let stats = self.spec.outputs.stats();
        let lost = stats.pages - stats.pages_free - stats.pages_idle;
        if lost > self.lost {
            tracing::error!(lost, pages = stats.pages, "encoder outputs: nothing runs, but they are still held");
            metrics.lost_outputs.inc_by((lost - self.lost) as u64);
        }
        self.lost = lost;
    }

    /// Updates the gauges.
    pub fn refresh(&self, metrics: &Metrics) {
        let stats = self.spec.outputs.stats();
        metrics.encoder_hits.inc_by(stats.hits - metrics.encoder_hits.get());
        metrics.encoder_pages_used.set((stats.pages - stats.pages_free - stats.pages_idle) as i64);
        metrics.encoder_pages_cached.set(stats.pages_idle as i64);
        metrics.media_bytes.set(self.spec.staging.used() as i64);
    }
}

impl<R: Runner> Worker<R> {
    /// Encodes one batch of media of the running sequences, if there are any.
    pub(super) fn run_encoders(&mut self) {
        let Some(mut encoding) = self.encoding.take() else { return };
        let ran = catch_unwind(AssertUnwindSafe(|| self.encode_with(&mut encoding)));
        self.encoding = Some(encoding);
        // Outside any request: the engine starts over.
        ran.unwrap_or_else(|panic| resume_unwind(panic));
    }

    fn encode_with(&mut self, encoding: &mut Encoding) {
        // Held until the outputs are stored; they go back whatever happens.
        let granted = self.gather(encoding);
        if granted.is_some() {
            let began = Instant::now();
            self.run_batch(encoding);
            self.shared.metrics.encoder_batches.inc();
            let seconds = began.elapsed().as_secs_f64();
            self.shared.metrics.encode_seconds.observe(seconds);
            if let Some(disk) = &mut self.disk {
                let running = self.scheduler.running();
                let rows = encoding.batch.iter().map(|job| running[job.seq].media.item(job.item).tokens).sum();
                disk.encoded(encoding.kind, rows, seconds);
            }
        }
    }

    /// Claims pages for outputs, and fills the batch with the claimed media. None if there is nothing to encode.
    fn gather(&mut self, encoding: &mut Encoding) -> Option<Grant> {
        let Encoding { spec, batch, kind, permits, .. } = encoding;
        let mut granted = None;
        batch.clear();
        // While memory is short, one at a time.
        let most = if self.relief.governor.level() >= DegradationLevel::SmallChunks { 1 } else { spec.batch };
        let mut claims = true;
        let Self { scheduler, disk, .. } = self;
        for (index, seq) in scheduler.running_mut().iter_mut().enumerate() {
            if claims && seq.media.unclaimed(seq.computed) {
                match seq.media.claim(&spec.outputs, seq.computed) {
                    Ok(()) => {}
                    Err(MediaError::OutputsBusy { .. }) => claims = false,
                    // Checked at submission.
                    Err(error) => seq.payload.fail(error.to_string()),
                }
            }
            let mut from = 0;
            while let Some(item) = seq.media.next_to_encode(from).filter(|_| batch.len() < most) {
                from = item + 1;
                // Another request may have encoded the same image.
                if seq.media.found(item) {
                    continue;
                }
                if let Some(disk) = disk.as_mut().filter(|_| seq.salt == 0)
                    && disk.brings(seq.order, &mut seq.media, item)
                {
                    continue;
                }
                let own = sense(seq.media.item(item).modality);
                // A batch goes through one encoder. Media of the other kind wait for the next batch.
                if !batch.is_empty() && own != *kind {
                    continue;
                }
                let bytes = (spec.values_of(own, &[seq.media.item(item).grid]) * size_of::<f32>()) as u64;
                let permitted = match &mut granted {
                    None => {
                        // No other batch is being encoded: the permit is there at once.
                        granted = permits.first(bytes, Some(Instant::now())).ok().flatten();
                        granted.is_some()
                    }
                    Some(grant) => grant.try_grow(bytes),
                };
                if permitted {
                    *kind = own;
                    batch.push(Job { seq: index, item });
                }
            }
        }
        granted
    }

    fn run_batch(&mut self, encoding: &mut Encoding) {
        let all = 0..encoding.batch.len();
        let Err(error) = self.run_jobs(encoding, all.clone()) else { return };
        if all.len() == 1 {
            return self.fail_job(encoding.batch[0], &error);
        }
        tracing::error!(error, items = all.len(), "the encoder failed; running its items one by one");
        for at in all {
            let Job { seq, item } = encoding.batch[at];
            let seq = &mut self.scheduler.running_mut()[seq];
            // Outputs stored before the failure are found. A request that failed with another item needs no more.
            if seq.media.found(item) || seq.payload.failed() {
                continue;
            }
            if let Err(error) = self.run_jobs(encoding, at..at + 1) {
                self.fail_job(encoding.batch[at], &error);
            }
        }
    }

    fn fail_job(&mut self, job: Job, error: &str) {
        self.shared.metrics.encoder_failures.inc();
        let error = MediaError::Encoder(error.to_owned());
        tracing::error!(%error, "a request ends: its medium cannot be encoded");
        self.scheduler.running_mut()[job.seq].payload.fail(error.to_string());
    }

    /// Encodes some of the batch together and stores the outputs. A panic becomes an error.
    fn run_jobs(&mut self, encoding: &mut Encoding, jobs: std::ops::Range<usize>) -> Result<(), String> {
        let ran = catch_unwind(AssertUnwindSafe(|| self.pass(encoding, jobs)));
        ran.unwrap_or_else(|panic| {
            self.shared.metrics.panics.inc();
            Err(panic_message(panic))
        })
    }

    fn pass(&mut self, encoding: &mut Encoding, jobs: std::ops::Range<usize>) -> Result<(), String> {
        let Encoding { spec, patches, grids, batch, kind, done, .. } = encoding;
        faults::site(Site::Encoder);
        patches.clear();
        grids.clear();
        for job in &batch[jobs.clone()] {
            let medium = self.scheduler.running()[job.seq].media.item(job.item);
            spec.write_patches(medium.modality, &medium.pixels, patches);
            grids.push(medium.grid);
        }
        let ran = self.runner.encode(*kind, &EncoderInput { grids, patches });
        ran.map_err(|error| error.to_string())?;
        let mut first = 0;
        for job in &batch[jobs] {
            let seq = &mut self.scheduler.running_mut()[job.seq];
            let (salt, media) = (seq.salt, &mut seq.media);
            let rows = media.item(job.item).tokens;
            for row in first..first + rows {
                if !self.runner.embedding(row).iter().all(|value| value.is_finite()) {
                    return Err("its outputs are not finite numbers".into());
                }
            }
            media.fill(job.item, |row, out| widen(out, self.runner.embedding(first + row)));
            if let Some(disk) = self.disk.as_mut().filter(|_| salt == 0) {
                disk.keep_output(media.item(job.item).key, rows);
            }
            first += rows;
            *done += 1;
            self.shared.metrics.encoded_media.inc();
        }
        Ok(())
    }
}
