//! The degradation levels, in the order of their cost. The governor chooses one; all other modules read it.

/// The degradation level. The order is the order of cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum DegradationLevel {
    /// Nothing is wrong.
    #[default]
    Calm,
    /// The cache evicts unused prefixes and returns their pages to the system.
    EvictPrefix,
    /// Prefill chunks are small.
    SmallChunks,
    /// Speculative decoding is paused: steps are small, and draft passes take no time.
    SpeculationOff,
    /// New requests are refused with status 503.
    StopAdmitting,
    /// The newest running request goes back to the queue, one a reading.
    Preempt,
    /// The newest request fails, one a reading; the oldest never does.
    Fail,
}

impl DegradationLevel {
    /// Every level but the first, from the cheapest to the dearest.
    pub const ALL: [DegradationLevel; 6] = [
        DegradationLevel::EvictPrefix,
        DegradationLevel::SmallChunks,
        DegradationLevel::SpeculationOff,
        DegradationLevel::StopAdmitting,
        DegradationLevel::Preempt,
        DegradationLevel::Fail,
    ];

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            DegradationLevel::Calm => "calm",
            DegradationLevel::EvictPrefix => "evict_prefix",
            DegradationLevel::SmallChunks => "small_chunks",
            DegradationLevel::SpeculationOff => "speculation_off",
            DegradationLevel::StopAdmitting => "stop_admitting",
            DegradationLevel::Preempt => "preempt",
            DegradationLevel::Fail => "fail",
        }
    }

    /// The level of this rank; the last level for any higher rank.
    pub(crate) fn at(level: usize) -> DegradationLevel {
        if level == 0 { DegradationLevel::Calm } else { Self::ALL[level.min(Self::ALL.len()) - 1] }
    }
}
