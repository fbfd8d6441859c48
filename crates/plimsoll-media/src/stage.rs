//! The encoder stage: an encoder that has survived its worst case, and may never be asked for more.
//!
//! An item takes room for its outputs first ([`OutputPool::claim`], which never waits), then its permit; whoever has a permit
//! lacks nothing, so waiting for one always ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::error::panic_words;
use crate::permits::InUse;
use crate::{
    Claim, ContentKey, Encoder, Grant, Job, MediaError, Modality, OutputPool, Permits, Pinned, Shape, Vacant, Worst,
    WorstCase,
};

/// An encoder with the permits that its stress has earned.
pub struct Stage<E: Encoder> {
    encoder: Mutex<E>,
    /// Beside the encoder, so that items can be priced while it runs.
    costs: E::Costs,
    permits: Arc<Permits>,
    limits: [Option<Limit>; 3],
    committed: u64,
}

/// The stressed maximum of one kind.
#[derive(Clone, Copy, Debug)]
struct Limit {
    tokens: u64,
    bytes: u64,
}

/// One item with the room for its outputs.
#[derive(Debug)]
pub struct Item<I> {
    /// The preprocessed item.
    pub input: I,
    /// Where its outputs go.
    pub output: Vacant,
}

/// Items with the permits to run them. The permits go back when the batch ends, whatever the path.
#[derive(Debug)]
pub struct Batch<I> {
    items: Vec<Item<I>>,
    grant: Grant,
}

/// A batch, or the item back when the deadline has passed.
pub type Started<I> = Result<Batch<I>, Item<I>>;

impl<I> Batch<I> {
    /// Items in it.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Never true: a batch starts with an item.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

impl<E: Encoder> Stage<E> {
    /// Runs the worst case of every kind, `batch` times at once, and keeps what that has committed.
    pub fn prove(mut encoder: E, batch: usize, outputs: &OutputPool) -> Result<Self, MediaError> {
        let batch = batch.max(1);
        let costs = encoder.costs();
        let mut limits = [None; 3];
        for (slot, modality) in limits.iter_mut().zip(Modality::ALL) {
            let Some(worst) = costs.worst(modality) else { continue };
            stress(&mut encoder, &worst, batch, outputs)?;
            *slot = Some(Limit { tokens: worst.tokens, bytes: costs.bytes(&worst.costliest) });
        }
        let largest = limits.iter().flatten().map(|limit| limit.bytes).max().unwrap_or(0);
        let bytes = largest.checked_mul(batch as u64).ok_or_else(|| MediaError::BadConfig {
            key: "--visual-infer-batch-size",
            why: format!("{batch} items of {largest} bytes are more than can be counted"),
        })?;
        let committed = encoder.committed_bytes();
        Ok(Self { encoder: Mutex::new(encoder), costs, permits: Permits::new(batch, bytes), limits, committed })
    }

    /// Refuses an item beyond the stressed worst case, from its shape alone: before anything is decoded (A31).
    pub fn admit(&self, shape: &Shape) -> Result<(), MediaError> {
        let what = shape.modality.noun();
        let Some(worst) = self.limits[shape.modality as usize] else {
            return Err(MediaError::Unsupported { what, supported: "what this model's configuration names" });
        };
        let over = |asked, limit, unit| {
            let flag = shape.modality.flag();
            if asked > limit { Err(MediaError::OverLimit { what, asked, limit, unit, flag }) } else { Ok(()) }
        };
        over(shape.tokens, worst.tokens, "tokens")?;
        over(self.costs.bytes(shape), worst.bytes, "bytes of encoder workspace")
    }

    /// Starts a batch with one item; waits for its permit at most until `deadline`.
    ///
    pub fn batch(&self, item: Item<E::Input>, deadline: Option<Instant>) -> Result<Started<E::Input>, MediaError> {
        let bytes = self.price(&item)?;
        Ok(match self.permits.first(bytes, deadline)? {
            Some(grant) => Ok(Batch { items: vec![item], grant }),
            None => Err(item),
        })
    }

    /// Adds an item if its permit is there at once; hands it back otherwise. Never waits.
    pub fn grow(
        &self,
        batch: &mut Batch<E::Input>,
        item: Item<E::Input>,
    ) -> Result<Option<Item<E::Input>>, MediaError> {
        let bytes = self.price(&item)?;
        if !batch.grant.try_grow(bytes) {
            return Ok(Some(item));
        }
        batch.items.push(item);
        Ok(None)
    }

    /// Encodes a batch; one result per item, in order.
    ///
    /// A batch that fails or panics is run again item by item, and only those that fail alone end with an error (A34).
    pub fn run(&self, batch: Batch<E::Input>) -> Vec<Result<Pinned, MediaError>> {
        let Batch { mut items, grant } = batch;
        let mut encoder = self.lock();
        let failure = encode(&mut *encoder, &mut items).err();
        let results = match failure {
            None => items.into_iter().map(|item| Ok(item.output.fill())).collect(),
            Some(why) if items.len() == 1 => vec![Err(MediaError::Encoder(why))],
            Some(_) => items.into_iter().map(|item| encode_alone(&mut *encoder, item)).collect(),
        };
        debug_assert_eq!(encoder.committed_bytes(), self.committed, "A27: the workspace moved after the stress");
        drop(encoder);
        // The permits stay until the outputs are stored (A28).
        drop(grant);
        results
    }

    /// Bytes committed by the stress, and now.
    pub fn committed(&self) -> (u64, u64) {
        (self.committed, self.lock().committed_bytes())
    }

    /// Encoder work in progress, with its peaks.
    pub fn in_use(&self) -> InUse {
        self.permits.in_use()
    }

    /// The most items and bytes that may be in progress.
    pub fn limits(&self) -> (usize, u64) {
        self.permits.limits()
    }

    /// Ends every wait for a permit with an error.
    pub fn close(&self) {
        self.permits.close();
    }

    fn price(&self, item: &Item<E::Input>) -> Result<u64, MediaError> {
        let shape = E::shape(&item.input);
        self.admit(&shape)?;
        let rows = item.output.rows() as u64;
        if rows != shape.tokens {
            let why = format!("{rows} rows are claimed for {} tokens", shape.tokens);
            return Err(MediaError::Encoder(why));
        }
        Ok(self.costs.bytes(&shape))
    }

    fn lock(&self) -> MutexGuard<'_, E> {
        // After a panic the encoder's next call overwrites what the last one left (see `Encoder::encode`).
        self.encoder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn encode_alone<E: Encoder>(encoder: &mut E, item: Item<E::Input>) -> Result<Pinned, MediaError> {
    let mut items = [item];
    encode(encoder, &mut items).map_err(MediaError::Encoder)?;
    let [item] = items;
    Ok(item.output.fill())
}

/// One call of the encoder. A panic is an error like any other.
fn encode<E: Encoder>(encoder: &mut E, items: &mut [Item<E::Input>]) -> Result<(), String> {
    let mut jobs: Vec<_> = items.iter_mut().map(|item| Job { input: &item.input, output: &mut item.output }).collect();
    match catch_unwind(AssertUnwindSafe(|| encoder.encode(&mut jobs))) {
        Ok(done) => done,
        Err(panic) => Err(panic_words(&*panic)),
    }
}

/// The worst case, `batch` times at once, with room for its outputs.
fn stress<E: Encoder>(encoder: &mut E, worst: &Worst, batch: usize, outputs: &OutputPool) -> Result<(), MediaError> {
    let shape = &worst.costliest;
    let failed = |why| MediaError::WorstCaseFailed { batch, modality: shape.modality.name(), why };
    let count = |tokens: u64| usize::try_from(tokens).map_err(|_| failed(format!("{tokens} tokens")));
    let (rows, most_rows) = (count(shape.tokens)?, count(worst.tokens)?);
    outputs.check((0..batch).map(|_| most_rows)).map_err(|why| failed(why.to_string()))?;
    let key = |i: usize| ContentKey::of(shape.modality, "the stress", &i.to_le_bytes());
    let claims = outputs.claim(&(0..batch).map(|i| (key(i), rows)).collect::<Vec<_>>());
    let claims = claims.map_err(|why| failed(why.to_string()))?;
    let vacant = claims.into_iter().filter_map(|claim| match claim {
        Claim::Vacant(output) => Some(output),
        Claim::Ready(_) => None,
    });
    // Dropped unfilled at the end: a blank item must never be found again.
    let mut items: Vec<_> = vacant.map(|output| Item { input: encoder.blank(shape), output }).collect();
    encode(encoder, &mut items).map_err(failed)
}

#[cfg(test)]
#[path = "stage_tests.rs"]
mod tests;
