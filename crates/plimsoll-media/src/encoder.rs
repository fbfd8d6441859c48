//! What an encoder owes: its worst case, the price of an item, and outputs for exactly the tokens it announced.

use crate::{Modality, Shape, Vacant, Worst};

/// What the planner must know of an encoder: what an item costs, and the worst legal items of each kind.
///
/// An obligation of every [`Encoder`]: one that cannot state its worst case does not compile, so nobody can serve a
/// family whose peak was never planned.
///
/// ```compile_fail,E0277
/// use plimsoll_media::{Encoder, Job, Shape};
///
/// struct Uncovered;
///
/// impl Encoder for Uncovered {
///     type Input = ();
///     type Costs = ();
///     fn costs(&self) {}
///     fn shape(_: &()) -> Shape { unreachable!() }
///     fn blank(&self, _: &Shape) {}
///     fn encode(&mut self, _: &mut [Job<'_, ()>]) -> Result<(), String> { Ok(()) }
///     fn committed_bytes(&self) -> u64 { 0 }
/// }
/// ```
///
/// ```
/// use plimsoll_media::{Encoder, Job, Shape, Worst, WorstCase};
///
/// struct Costs;
///
/// impl WorstCase for Costs {
///     fn bytes(&self, _: &Shape) -> u64 { 1 }
///     fn image(&self) -> Option<Worst> { None }
///     fn video(&self) -> Option<Worst> { None }
///     fn audio(&self) -> Option<Worst> { None }
/// }
///
/// struct Covered;
///
/// impl Encoder for Covered {
///     type Input = ();
///     type Costs = Costs;
///     fn costs(&self) -> Costs { Costs }
///     fn shape(_: &()) -> Shape { unreachable!() }
///     fn blank(&self, _: &Shape) {}
///     fn encode(&mut self, _: &mut [Job<'_, ()>]) -> Result<(), String> { Ok(()) }
///     fn committed_bytes(&self) -> u64 { 0 }
/// }
/// ```
pub trait WorstCase {
    /// The workspace that an item of this shape adds to a batch, in bytes. Additive over a batch, and no smaller for a
    /// shape that is larger; what does not add up (the scratch of the longest sequence) belongs to the fixed part.
    fn bytes(&self, shape: &Shape) -> u64;
    /// The worst of all legal images. `None`: the encoder takes none; so for the others.
    fn image(&self) -> Option<Worst>;
    /// The worst of all legal videos.
    fn video(&self) -> Option<Worst>;
    /// The worst of all legal sounds.
    fn audio(&self) -> Option<Worst>;

    /// The worst of all legal items of a kind.
    fn worst(&self, modality: Modality) -> Option<Worst> {
        match modality {
            Modality::Image => self.image(),
            Modality::Video => self.video(),
            Modality::Audio => self.audio(),
        }
    }
}

/// One item on its way through the encoder.
#[derive(Debug)]
pub struct Job<'a, I> {
    /// The item.
    pub input: &'a I,
    /// Where its outputs go: one row per token of its shape.
    pub output: &'a mut Vacant,
}

/// An encoder: preprocessed items in, embeddings out.
pub trait Encoder {
    /// A preprocessed item: patches or spectrogram.
    type Input;
    /// Its worst case and its prices, which are asked for while the encoder is busy.
    type Costs: WorstCase;

    /// The worst case and the prices.
    fn costs(&self) -> Self::Costs;

    /// The shape of an item.
    fn shape(input: &Self::Input) -> Shape;

    /// An item of this shape with no content, for the stress.
    fn blank(&self, shape: &Shape) -> Self::Input;

    /// Encodes a batch. A call overwrites what an earlier one left behind, failed or not, so running it again is harmless.
    fn encode(&mut self, batch: &mut [Job<'_, Self::Input>]) -> Result<(), String>;

    /// Bytes committed for workspace now. They must not move after the stress (A27).
    fn committed_bytes(&self) -> u64;
}

/// Items per batch of one encoder replica: its share of `--visual-infer-batch-size`, never less than one.
pub fn replica_batch(visual_infer_batch_size: usize, replicas: usize) -> usize {
    (visual_infer_batch_size / replicas.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::replica_batch;

    #[test]
    fn a26_the_batch_of_a_replica_is_its_share_and_at_least_one() {
        for batch in 1..=16_usize {
            for replicas in 1..=8_usize {
                let share = replica_batch(batch, replicas);
                let expected = if batch < replicas { 1 } else { batch / replicas };
                assert_eq!(share, expected, "{batch} over {replicas}");
                assert!(share * replicas <= batch.max(replicas));
            }
        }
        assert_eq!(replica_batch(8, 0), 8);
    }
}
