//! An audio clip for tests; the engine's tests use it too.

/// The audio clip that `tools/fixturelib/omni.py` makes by the same formula.
pub fn played(seed: i64, samples: usize) -> Vec<f32> {
    let at = |i: i64| {
        let rising = (i * (i / 37 + 40 + seed)) % 16_001 - 8_000;
        let beating = (i * 911 + (i / 800) * seed * 733) % 4_001 - 2_000;
        (rising + beating) as f32 / 32_768.0
    };
    (0..samples as i64).map(at).collect()
}
